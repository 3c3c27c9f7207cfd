"""Sources of noise: fresh, secret, and with the right distribution.

The sources are unseeded, so that each run is a new test. False-alarm rates are computed from the
true distribution.
"""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from randomgen import AESCounter

from sfumato.privacy import noise
from sfumato.privacy.events import SECRET, SEEDED
from sfumato.privacy.noise import NoiseSource, secret_generator


def test_two_sources_and_two_draws_differ_whatever_is_seeded():
    drawn = set()
    for _ in range(2):
        np.random.seed(0), torch.manual_seed(0)
        source = NoiseSource()
        drawn |= {tuple(source.gaussian((64,), 1.0).tolist()) for _ in range(2)}
    assert len(drawn) == 4


def test_a_fork_does_not_repeat_its_parents_noise():
    source = NoiseSource()
    source.generator.standard_normal(8)  # the child inherits a generator that is in use
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


@pytest.fixture
def short_pieces(monkeypatch) -> None:
    """Limit a piece to ten numbers, so that even short noise is drawn in several pieces."""
    monkeypatch.setattr(noise, "PIECE", 10)


def test_long_noise_comes_from_sources_with_new_keys(monkeypatch, short_pieces):
    keys = []
    urandom = os.urandom
    monkeypatch.setattr(noise.os, "urandom", lambda size: keys.append(urandom(size)) or keys[-1])
    source = NoiseSource()
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        keys.clear()
        drawn = source.gaussian((5, 7), 3.0)
        assert [len(key) for key in keys] == [16] * 4 and len(set(keys)) == 4
        streams = [
            np.random.Generator(AESCounter(key=int.from_bytes(key, "little"))) for key in keys
        ]
        pieces = {tuple(3.0 * stream.standard_normal(10)) for stream in streams}
        whole = {tuple(piece.tolist()) for piece in drawn.flatten().split(10)[:3]}
        assert len(whole) == 3 and whole < pieces
        (rest,) = pieces - whole
        assert drawn.flatten()[30:].tolist() == list(rest[:5])


def test_long_noise_of_which_a_piece_fails_is_an_error(monkeypatch, short_pieces):
    made = []

    def failing(size):
        made.append(size)
        if len(made) == 3:
            raise OSError("no entropy")
        return bytes(size)

    monkeypatch.setattr(noise.os, "urandom", failing)
    with pytest.raises(OSError, match="no entropy"):
        NoiseSource().gaussian((50,), 1.0)


def test_long_noise_of_a_seed_is_one_stream(short_pieces):
    whole = torch.from_numpy(NoiseSource(seed=1).generator.standard_normal(30) * 2.0)
    assert torch.equal(whole, NoiseSource(seed=1).gaussian((30,), 2.0))


def test_a_secret_generator_draws_new_standard_normals():
    first, second = (torch.randn(100_000, generator=secret_generator()) for _ in range(2))
    assert not torch.equal(first, second)
    for drawn in (first, second):  # five standard errors: false alarm below 1e-6 each
        assert (
            abs(float(drawn.mean())) < 5 / 100_000**0.5
            and abs(float(drawn.var()) - 1) < 5 * (2 / 100_000) ** 0.5
        )


def test_a_torch_whose_generators_look_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(noise, "TWISTER", slice(32, 32 + 8 * 624))
    with pytest.raises(RuntimeError, match=r"constraints\.txt"):
        secret_generator()
