"""Adding or removing one group of images changes every sum by at most what one image could.

The tests use real networks, all queries and real charges, with noise so small that a release shows
its sum.
"""

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES as OWN
from cases import Case
from parts import of_baselines
from torch import Tensor

from sfumato.data.groups import GroupIndex
from sfumato.data.images import ImageSet
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import LatentSet, read_card
from sfumato.errors import BudgetError
from sfumato.features.fourier import FourierFeatures
from sfumato.privacy import charge as door
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import UNITS, Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.policy import SpendingPolicy
from sfumato.privacy.rows import Rows, bounded_sum, one_hot
from sfumato.privacy.sampling import group_picks, group_weights
from sfumato.queries.count import query_count
from sfumato.settings.data import GROUP, Data, Groups
from sfumato.settings.queries import FeatureMap

SIZES = (1, 7, 200)  # sizes of the groups to leave out; 30 further groups have 2 or 3 images each
CLASSES = tuple(str(i) for i in range(10))
HIDDEN = 1e-9  # noise multiplier
CASES = OWN | of_baselines("baseline_cases", "CASES")


def opened(
    images: ImageSet | LatentSet,
    max_norm: float,
    *,
    noise=HIDDEN,
    rate=1.0,
    uses=1,
    cap=1,
    seed=None,
    kind=Charge,
) -> Charge:
    """Open a charge on images in memory, without a budget."""
    mechanism = Mechanism(noise_multiplier=noise, sample_rate=rate, uses=uses)
    record = {"stage": "count", "max_norm": max_norm, "event": mechanism.to_json()}
    more = {
        "odometer": None,
        "noise": NoiseSource(seed),
        "run": Path(),
        "lock": ExitStack(),
        "group_cap": cap,
    }
    return kind(record, images, **more)


def part(images, keep: np.ndarray):
    """Return the images at `keep`, with their groups."""
    if isinstance(images, LatentSet):
        return LatentSet(
            images.latents[keep], images.labels[keep], images.classes, images.groups[keep]
        )
    return ImageSet(images.images[keep], images.labels[keep], images.classes, images.groups[keep])


def made_patients(digits: ImageSet) -> ImageSet:
    """Return 297 digits, shuffled.

    Groups 0, 1 and 2 have 1, 7 and 200 images. All images of groups 0 and 1, and half of group 2,
    are white, because the rows of white images are as long as possible.
    """
    chosen = np.random.default_rng(0).permutation(len(digits))[: sum(SIZES) + 89]
    images = digits.images[chosen].copy()
    labels = digits.labels[chosen]
    groups = np.concatenate([np.repeat(np.arange(3), SIZES), 3 + np.arange(89) // 3])
    order = np.random.default_rng(1).permutation(len(groups))
    images[np.isin(groups, (0, 1)) | ((groups == 2) & (np.arange(len(groups)) % 2 == 0))] = 255
    labels[groups == 1] = 4  # group 1 has one class; group 2, the largest, has all classes
    return ImageSet(images[order], labels[order], CLASSES, groups[order])


@pytest.fixture(scope="module")
def patients(digits) -> ImageSet:
    return made_patients(digits)


def drawn_by(case: Case, images: ImageSet) -> ImageSet | LatentSet:
    """Return the rows that a charge of this query draws from the images."""
    if case.encode is None:
        return images
    with torch.no_grad():
        rows = case.encode(images.batch(np.arange(len(images)))[0])
    return LatentSet(rows.half().numpy(), images.labels, images.classes, images.groups)


def move(case: Case, images, group: int, cap: int = 1) -> float:
    """Return how far a group moves the first release."""
    sets = images, part(images, images.groups != group)
    whole, rest = (
        case.first_release(opened(each, case.bound, uses=case.uses, cap=cap)) for each in sets
    )
    return float((whole - rest).norm())


def picks_in_order(generator, sizes: np.ndarray, draws: int) -> np.ndarray:
    """Pick images independently of the other groups, so that two draws can be compared."""
    return np.arange(draws) % sizes[:, None]


@pytest.mark.parametrize("name", CASES)
def test_one_group_moves_the_sum_by_at_most_the_bound(name, patients, monkeypatch):
    monkeypatch.setattr(door, "group_picks", picks_in_order)
    case = CASES[name]
    few = drawn_by(case, part(patients, patients.groups < 9))
    for group in range(3):
        moved = move(case, few, group)
        assert moved <= case.bound * (1 + 1e-5)
        # The group was in the sum. Clipped gradients reach nearly the bound.
        assert moved > (0.9 if case.rounding > 1e-6 else 0.01) * case.bound


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_group_with_broken_images_stays_within_the_bound(value):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 4, generator=random, dtype=torch.float64)
    rows[::3, 1] = value
    weights = torch.from_numpy(group_weights(np.full(50, 50), 1))
    assert torch.linalg.vector_norm(bounded_sum(Rows(rows), 0.5, weights)) <= 0.5


# --- a draw of groups -----------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1, 5, 1000])
def test_the_weights_of_a_group_add_up_to_at_most_one(cap):
    for size in (1, 2, 3, 7, 49, 200, 12_345):
        total = math.fsum(group_weights(np.full(size, size), cap))
        assert total <= 1 and total == pytest.approx(min(size, cap) / cap, rel=1e-9)
    # The weights are added up one by one, as in a sum over images
    for size in (2, 3, 7, 49, 200, 3000):
        assert sum(group_weights(np.full(size, size), 1).tolist()) <= 1


def test_a_group_alone_is_an_image_to_the_last_bit(patients):
    """Groups of one image give the same sum as no groups, under the same noise."""
    singles = replace(patients, groups=np.random.default_rng(0).permutation(len(patients)))
    plain = replace(patients, groups=None)
    assert len(GroupIndex(singles.groups)) == len(singles)
    one, other = (
        opened(images, 1.0, seed=3).sum(lambda x, y: Rows(one_hot(y, 10)), 1.0, size=64)
        for images in (singles, plain)
    )
    assert torch.equal(one, other)


def test_the_index_finds_every_image_of_a_group_once(patients):
    index = GroupIndex(patients.groups)
    assert len(index) == len(set(patients.groups)) and index.sizes[:3].tolist() == list(SIZES)
    for chosen in ([0], [2], [1, 4, 2], [], range(len(index))):
        found = index.images_of(np.array(chosen, dtype=np.int64))
        assert patients.groups[found].tolist() == [g for g in chosen for _ in range(index.sizes[g])]
        assert len(set(found.tolist())) == len(found)


def test_groups_are_drawn_whole_at_the_rate(patients):
    charge = opened(patients, 1.0, rate=0.3, uses=400)
    index = GroupIndex(patients.groups)
    seen = np.zeros(len(index))
    for _ in range(400):
        shapes = []
        parts = [
            (labels, weights)
            for _, labels, weights in charge.batches(64)
            if not shapes.append(len(labels))
        ]
        # All pieces but the last have the same size, wherever groups begin and end
        assert all(length == 64 for length in shapes[:-1])
        weights = torch.cat([weight for _, weight in parts]) if parts else torch.zeros(0)
        for n in SIZES:
            seen[SIZES.index(n)] += (
                n in [round(1 / w) for w in weights.tolist() if w > 0] if n > 3 else 0
            )
        drawn = float(weights.sum())
        assert drawn == pytest.approx(round(drawn), abs=1e-6)  # whole groups
        seen[3] += drawn
        charge.release(torch.zeros(1), 1.0)
    # The counts are binomial, with 400 draws. The tolerance is five standard errors for each. The
    # false-alarm rate is below 2e-6 in total
    assert (
        abs(seen[1] / 400 - 0.3) < 5 * (0.21 / 400) ** 0.5
        and abs(seen[2] / 400 - 0.3) < 5 * (0.21 / 400) ** 0.5
    )
    assert abs(seen[3] / 400 - 0.3 * len(index)) < 5 * (0.21 * len(index) / 400) ** 0.5


@pytest.mark.parametrize("draws", [1, 8])
def test_each_draw_of_a_group_picks_one_of_its_images_at_random(draws, patients):
    marked = replace(patients, labels=np.arange(len(patients)))  # the label identifies the image
    charge = opened(marked, 1.0, uses=300)
    index = GroupIndex(patients.groups)
    times = np.zeros(len(patients))
    for _ in range(300):
        labels = torch.cat([labels for _, labels in charge.batches(16, draws=draws)])
        assert labels.shape == (len(index), draws)  # groups of 1 and of 200 count alike
        groups = patients.groups[labels.numpy()]
        assert (groups == groups[:, :1]).all() and len(set(groups[:, 0])) == len(index)
        times += np.bincount(labels.flatten().numpy(), minlength=len(patients))
        charge.release(torch.zeros(1), 1.0)
    for group, size in enumerate(SIZES):
        found = times[patients.groups == group]
        each = 300 * draws / size
        assert found.sum() == 300 * draws
        # binomial counts: six standard deviations, false alarm 2e-9 for each of 208 images
        assert np.abs(found - each).max() <= 6 * max(each, 1.5) ** 0.5 + 3


def test_a_cap_lets_small_groups_count_less_and_none_more(patients):
    total = opened(patients, 1.0, cap=6).sum(lambda x, y: Rows(one_hot(y, 10)), 1.0, size=64)
    index = GroupIndex(patients.groups)
    assert float(total.sum()) == pytest.approx(np.minimum(index.sizes, 6).sum() / 6, rel=1e-6)
    charge = opened(patients, 1.0, cap=6, uses=300)
    seen = 0
    for _ in range(300):
        seen += sum(len(labels) for _, labels in charge.batches(64, draws=2))
        charge.release(torch.zeros(1), 1.0)
    rate = np.minimum(index.sizes, 6) / 6
    # Groups are drawn independently. The tolerance is five standard errors; the false-alarm rate is
    # below 1e-6
    assert abs(seen / 300 - rate.sum()) < 5 * ((rate * (1 - rate)).sum() / 300) ** 0.5
    for group in range(3):
        assert move(CASES["count"], patients, group, cap=6) <= min(SIZES[group], 6) / 6 + 1e-6


def test_no_group_drawn_is_a_draw_all_the_same(patients):
    charge = opened(patients, 1.0, rate=1e-12, uses=2)
    assert not list(charge.batches(64))
    charge.release(torch.zeros(1), 1.0)
    assert not list(charge.batches(64, draws=8))


def test_picks_are_secret_and_differ_from_step_to_step(patients):
    generator = NoiseSource().generator
    sizes = np.array([1, 7, 200])
    first, second = (group_picks(generator, sizes, 40) for _ in range(2))
    assert (
        not np.array_equal(first, second)
        and (first < sizes[:, None]).all()
        and (first[0] == 0).all()
    )
    assert group_picks(generator, sizes[:0], 3).shape == (0, 3)


# --- what an attacker sees ------------------------------------------------------------------------


def distinguishability(
    query, with_them: ImageSet, without: ImageSet, noise: float, releases: int
) -> float:
    """Compute the best test statistic of releases with and without a patient.

    Returns the difference of its two means, in standard deviations. It is at most μ = 1/σ for a
    Gaussian mechanism of bound 1.
    """
    axis = (query(with_them, HIDDEN) - query(without, HIDDEN)).double().flatten()
    axis /= axis.norm()
    seen = [
        [float(query(images, noise).double().flatten() @ axis) for _ in range(releases)]
        for images in (with_them, without)
    ]
    spread = math.sqrt(sum(np.var(values, ddof=1) for values in seen) / 2)
    return float(np.mean(seen[0]) - np.mean(seen[1])) / spread


@pytest.mark.parametrize("name", ["count", "frequency"])
def test_an_image_copied_fifty_times_is_no_easier_to_find(name, digits):
    """There are 600 releases with a patient and 600 without.

    μ is the difference of the means, in standard deviations of the noise. Its standard error is
    √(2/600) = 0.058. The tolerance, 0.3, is five standard errors.
    """
    sigma = 2.0
    releases = 600
    small = FourierFeatures((1, 8, 8), [FeatureMap(length_scales=(0.366,))], 32, seed=5)

    def query(images: ImageSet, noise: float) -> Tensor:
        charge = opened(images, 1.0, noise=noise)
        if name == "count":
            return query_count(charge, 10)
        return charge.sum(lambda x, y: Rows(small(x), one_hot(y, 10)), 1.0, size=512)

    others = np.arange(8)
    copies = np.full(51, 1000)
    chosen = np.concatenate([others, copies])
    groups = np.concatenate([others, np.full(51, 99)])
    everyone = ImageSet(digits.images[chosen], digits.labels[chosen], CLASSES, groups)
    without = part(everyone, groups != 99)
    with torch.no_grad():
        found = distinguishability(query, everyone, without, sigma, releases)
        assert abs(found - 1 / sigma) < 0.3
        singly = [ImageSet(i.images, i.labels, CLASSES) for i in (everyone, without)]
        # If images are the unit, each copy counts, and the attack succeeds
        assert distinguishability(query, *singly, sigma, 20) > 10


# --- opening --------------------------------------------------------------------------------------


@pytest.fixture
def clinic(owner, tmp_path, digits):
    """Prepare a set with groups. Returns its owner."""
    groups = 1 + np.random.default_rng(0).geometric(0.2, 300).cumsum().searchsorted(np.arange(600))
    path = tmp_path / "set.npz"
    images = {"images": digits.images[:600], "labels": digits.labels[:600]}
    np.savez(path, **images, classes=np.array(CLASSES), groups=groups)
    several = {"groups": Groups(array=True), "different_people": True}
    data = Data(dataset_id="clinic", source="npz", path=str(path), **several)
    prepare_sensitive(data, owner.state, tmp_path / "clinic.json", tmp_path / "raw")
    return replace(owner, card=read_card(tmp_path / "clinic.json"))


def test_a_record_names_the_unit_and_how_a_group_counts(owner, clinic):
    record = clinic.open(unit=GROUP).record
    assert record["unit"] == UNITS[GROUP] and record["group_weight"] == "mean"
    assert "mean over its" in record["sensitivity"]
    assert (
        clinic.open(unit=GROUP, group_cap=5, plan="capped").record["group_weight"]
        == "capped at 5 images"
    )
    plain = owner.open().record
    assert plain["unit"] == "one (image, label)" and not plain.keys() & {"group_weight", "claim"}
    policy = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited", one_image_each=True)
    claimed = owner.open(plan="claimed", permission=policy)
    assert claimed.record["claim"] == "no two images are of one person, says the owner"


def test_a_charge_for_another_unit_than_was_prepared_is_refused(owner, clinic):
    for who, more in (
        (clinic, {}),
        (owner, {"unit": GROUP}),
        (owner, {"group_cap": 3}),
        (owner, {"unit": "person"}),
    ):
        with pytest.raises(BudgetError, match="was prepared for the unit"):
            who.open(**more)
        assert not who.odometer.opened()


def test_a_resume_with_another_weight_of_groups_is_refused(clinic):
    mechanism = Mechanism(noise_multiplier=2.0, uses=3)
    clinic.open(mechanism, unit=GROUP)._lock.close()
    with pytest.raises(BudgetError, match="another mechanism"):
        clinic.open(mechanism, unit=GROUP, group_cap=9)
    assert clinic.open(mechanism, unit=GROUP).used == 0
