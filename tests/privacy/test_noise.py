"""False-alarm rates are those of the true distribution. The sources below are unseeded: each run is a fresh test."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch

from sfumato.privacy import noise
from sfumato.privacy.events import SECRET, SEEDED
from sfumato.privacy.noise import NoiseSource, secret_generator


def test_noise_has_the_stated_standard_deviation_and_shape():
    count, std = 400_000, 3.7
    drawn = NoiseSource().gaussian((count,), std).numpy()
    # s² of n normals has a standard error of σ²·√(2/n), the mean one of σ/√n: six of each, false alarm 4e-9
    assert abs(drawn.var() / std**2 - 1) < 6 * np.sqrt(2 / count)
    assert abs(drawn.mean()) < 6 * std / np.sqrt(count)
    # the share beyond 3σ is 0.0027: six standard errors
    assert abs((np.abs(drawn) > 3 * std).mean() - 0.0026998) < 6 * np.sqrt(0.0027 / count)


def test_two_sources_and_two_draws_differ():
    source = NoiseSource()
    first, second, other = (
        source.gaussian((64,), 1.0),
        source.gaussian((64,), 1.0),
        NoiseSource().gaussian((64,), 1.0),
    )
    assert not torch.equal(first, second) and not torch.equal(first, other)


def test_global_seeds_do_not_fix_the_noise():
    def draw():
        np.random.seed(0)
        torch.manual_seed(0)
        return NoiseSource().gaussian((64,), 1.0)

    assert not torch.equal(draw(), draw())


def test_a_fork_does_not_repeat_its_parents_noise():
    source = NoiseSource()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, source.generator.standard_normal(8).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reader, 64))
    assert not np.array_equal(theirs, source.generator.standard_normal(8))


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_source_cannot_be_saved_or_copied(attempt):
    with pytest.raises(TypeError, match="never be used twice"):
        attempt(NoiseSource())


def test_a_seed_is_told_in_the_label():
    assert NoiseSource().label == SECRET
    seeded = NoiseSource(seed=1)
    assert seeded.label == SEEDED
    assert torch.equal(seeded.gaussian((4,), 1.0), NoiseSource(seed=1).gaussian((4,), 1.0))


def test_a_secret_generator_differs_each_time_and_draws_standard_normals():
    first, second = (torch.randn(100_000, generator=secret_generator()) for _ in range(2))
    assert not torch.equal(first, second)
    for drawn in (first, second):  # five standard errors: false alarm below 1e-6 each
        assert abs(float(drawn.mean())) < 5 / 100_000**0.5 and abs(float(drawn.var()) - 1) < 5 * (2 / 100_000) ** 0.5


def test_the_whole_state_of_a_secret_generator_is_drawn(monkeypatch):
    """A seed gives 32 bits: here a single bit of any of the words makes another stream."""
    words = bytearray(os.urandom(4 * 624))
    monkeypatch.setattr(os, "urandom", lambda size: bytes(words[:size]))
    once = torch.randint(2**31, (2_000,), generator=secret_generator())
    assert torch.equal(once, torch.randint(2**31, (2_000,), generator=secret_generator()))
    for place in (5, 4 * 311, 4 * 623):
        words[place] ^= 0x10
        other = torch.randint(2**31, (2_000,), generator=secret_generator())
        assert not torch.equal(once, other), place
        once = other


def test_a_torch_whose_generators_look_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(noise, "TWISTER", slice(32, 32 + 8 * 624))
    with pytest.raises(RuntimeError, match=r"constraints\.txt"):
        secret_generator()
