"""Properties that an observer must find in every release, however the code is written.

Statistical tests use fixed numbers of draws of the real noise; each states its false-alarm rate.
"""

import os

import numpy as np
import pytest
import torch
from randomgen import AESCounter
from scipy import stats

from sfumato.data.store import load_prepared
from sfumato.privacy import noise as noise_module
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource, public_grid, secret_generator

RARE = 1e-7  # false-alarm rate of a test of a distribution


def zeros_released(
    owner, count: int, sigma: float = 2.0, total: float = 0.0, **mechanism
) -> np.ndarray:
    """Release a vector of `count` entries, each equal to `total`.

    Returns its noise divided by sigma, float64.
    """
    charge = owner.open(
        Mechanism(noise_multiplier=sigma, **mechanism), plan=f"{count} {total} {mechanism}"
    )
    list(charge.batches(4096))
    return (
        charge.release(torch.full((count,), total, dtype=torch.float64), 1.0) - total
    ).numpy() / sigma


def test_a_release_is_the_sum_plus_a_normal_to_the_tails(owner):
    """A Kolmogorov–Smirnov test checks the middle of the distribution.

    The number of values beyond 3, 4 and 4.5 checks the tails, which protect outliers.
    """
    found = zeros_released(owner, 2_000_000)
    assert stats.kstest(found[:200_000], "norm").pvalue > RARE
    for bound in (3.0, 4.0, 4.5):
        beyond = int((np.abs(found) > bound).sum())
        assert stats.binomtest(beyond, len(found), 2 * stats.norm.sf(bound)).pvalue > RARE, bound


def test_every_entry_has_its_own_noise(owner):
    """Two equal entries among 4 000 have a probability of 10⁻⁵.

    Rows or columns that share their noise would have thousands of equal entries.
    """
    charge = owner.open()
    list(charge.batches(4096))
    released = charge.release(torch.zeros(50, 80, dtype=torch.float64), 1.0)
    assert len(released.unique()) > 3990
    rows = released.numpy()
    columns = released.numpy().T
    # Each correlation is computed from 50 or 80 normals. The largest |correlation| among 3 000
    # pairs stays below 0.8
    for table in (rows, columns):
        assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < 0.8


def test_every_use_of_a_charge_has_fresh_noise_of_full_size(owner):
    charge = owner.open(Mechanism(noise_multiplier=2.0, uses=4))
    uses = []
    for _ in range(4):
        list(charge.batches(4096))
        uses.append(charge.release(torch.zeros(20_000, dtype=torch.float64), 1.0).numpy() / 2.0)
    for released in uses:
        assert stats.kstest(released, "norm").pvalue > RARE
    apart = np.corrcoef(uses) - np.eye(4)
    assert np.abs(apart).max() < 6 / 20_000**0.5  # six standard errors


@pytest.mark.parametrize(
    ("rank", "law"),
    [
        *((rank, {}) for rank in ("0", "1", "3")),
        ("0", {"sample_rate": 0.1}),  # sampling changes the accounting, not the noise
        # In single precision, sums of 1e8 are multiples of 8: noise would vanish or be visible
        ("0", {"sigma": 1.0, "total": 1e8}),
    ],
)
def test_the_noise_is_complete_on_any_process_and_rate(owner, environment, rank, law):
    """One process draws the complete noise of a release.

    If each process drew a part, a lost process would leave too little.
    """
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4"}.items():
        environment[name] = value
    assert stats.kstest(zeros_released(owner, 20_000, **law), "norm").pvalue > RARE


def test_the_grid_of_a_release_is_the_same_whatever_was_summed(owner):
    """A grid that grows with the sum would reveal the sum's size.

    On the public grid, half of all values are odd multiples of the grid's step.
    """
    grid = public_grid(2.0)
    for total in (0.0, 1e3, 1e6):
        steps = (zeros_released(owner, 4_000, total=total) * 2.0 + total) / grid
        assert np.array_equal(steps, np.rint(steps))
        assert stats.binomtest(int((steps % 2 == 1).sum()), len(steps), 0.5).pvalue > RARE, total


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, OSError])
def test_where_the_noise_fails_nothing_is_released(owner, monkeypatch, error):
    charge = owner.open(Mechanism(noise_multiplier=2.0, uses=2))
    list(charge.batches(4096))

    def fails(self, shape, std):
        raise error("no room")

    monkeypatch.setattr(NoiseSource, "gaussian", fails)
    with pytest.raises(error):
        charge.release(torch.ones(8), 1.0)


# Name -> function that draws numbers, number of bytes that it gets from the system, and places of
# some bytes, each of which must change the numbers
ENTROPY = {
    "noise": (lambda: NoiseSource().gaussian((8,), 1.0).tolist(), 16, range(16)),
    "draws": (
        lambda: torch.rand(1300, generator=secret_generator()).tolist(),
        4 * 624,
        (5, 1000, 4 * 311, 4 * 623),
    ),
}


@pytest.mark.parametrize("name", ENTROPY)
def test_all_entropy_of_the_system_enters_and_nothing_else(monkeypatch, name):
    """A generator with a seed of 32 bits can be found by trying all seeds."""
    stream, size, places = ENTROPY[name]
    entropy = bytearray(os.urandom(size))

    def drawn() -> list[float]:
        with monkeypatch.context() as patched:
            patched.setattr(noise_module.os, "urandom", lambda size: bytes(entropy[:size]))
            return stream()

    first = drawn()
    assert drawn() == first  # no clock, process or seed has an influence
    for place in places:
        entropy[place] ^= 1
        assert drawn() != first, place
        entropy[place] ^= 1


def test_the_noise_is_made_by_a_cipher_as_recorded():
    source = NoiseSource()
    assert "AES" in source.label
    assert isinstance(source.generator.bit_generator, AESCounter)


def test_the_noise_has_all_bits_of_a_double():
    """Noise that was drawn in single precision, or converted to it, would fit into float32."""
    drawn = NoiseSource().gaussian((1000,), 1.0)
    assert (drawn.float().double() != drawn).double().mean() > 0.99


def test_the_sizes_of_draws_are_binomial(owner):
    """Draws are so small that empty ones are frequent, and some have three times the expected size.

    The test is χ².
    """
    images = len(load_prepared(owner.state, owner.card, "sensitive"))
    sizes = []
    rate = 1.5 / images
    groups = 6
    charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=rate, uses=600))
    for _ in range(600):
        sizes.append(sum(len(labels) for _, labels in charge.batches(7)))
        charge.release(torch.zeros(1), 1.0)
    law = stats.binom.pmf(np.arange(groups), images, rate)
    law = np.append(law, 1 - law.sum()) * len(sizes)
    counted = np.bincount(np.minimum(sizes, groups), minlength=groups + 1)
    assert stats.chisquare(counted, law).pvalue > RARE


def test_draws_are_secret_and_new_each_time(owner):
    """With the same global seed, two charges draw different images in each use.

    The uses of one charge draw different images, too.
    """
    drawn = []
    for plan in ("one", "two"):
        torch.manual_seed(0), np.random.seed(0)
        charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=0.1, uses=3), plan=plan)
        for _ in range(3):
            drawn.append(torch.cat([images for images, _ in charge.batches(50)]))
            charge.release(torch.zeros(1), 1.0)
    for i, one in enumerate(drawn):  # some 140 images of 1 400 each: the same twice is impossible
        assert not any(one.shape == other.shape and torch.equal(one, other) for other in drawn[:i])


@pytest.mark.parametrize("std", [1e-6, 0.3, 2.0, 5e4])
def test_the_grid_lies_between_the_last_bit_and_the_noise(std):
    """At least a thousand floats lie between two grid points, for values up to eight standard
    deviations of the noise.
    """
    assert 1000 * np.spacing(8 * std) < public_grid(std) < 1e-5 * std
