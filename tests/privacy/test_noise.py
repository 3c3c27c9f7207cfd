"""False-alarm rates are those of the true distribution; the sources below are not seeded, so each run is a fresh test."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch

from sfumato.privacy.events import SECRET, SEEDED
from sfumato.privacy.noise import NoiseSource


def test_noise_has_the_stated_standard_deviation_and_shape():
    count, std = 400_000, 3.7
    drawn = NoiseSource().gaussian_like(torch.zeros(count, dtype=torch.float64), std).numpy()
    # s² of n normals has a standard error of σ²·√(2/n), the mean one of σ/√n: six of each, false alarm 4e-9
    assert abs(drawn.var() / std**2 - 1) < 6 * np.sqrt(2 / count)
    assert abs(drawn.mean()) < 6 * std / np.sqrt(count)
    # the share beyond 3σ is 0.0027: six standard errors
    assert abs((np.abs(drawn) > 3 * std).mean() - 0.0026998) < 6 * np.sqrt(0.0027 / count)


def test_two_sources_and_two_draws_differ():
    source, zeros = NoiseSource(), torch.zeros(64)
    first, second, other = source.gaussian_like(zeros, 1.0), source.gaussian_like(zeros, 1.0), NoiseSource().gaussian_like(zeros, 1.0)
    assert not torch.equal(first, second) and not torch.equal(first, other)


def test_global_seeds_do_not_fix_the_noise():
    def draw():
        np.random.seed(0)
        torch.manual_seed(0)
        return NoiseSource().gaussian_like(torch.zeros(64), 1.0)

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
    assert torch.equal(seeded.gaussian_like(torch.zeros(4), 1.0), NoiseSource(seed=1).gaussian_like(torch.zeros(4), 1.0))
