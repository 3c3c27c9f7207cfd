import numpy as np
import pytest

from sfumato.privacy import sampling
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.sampling import assign_processes, poisson_blocks, poisson_draw


def joined(generator, size, rate):
    return np.concatenate([np.zeros(0, dtype=np.int64), *poisson_blocks(generator, size, rate)])


@pytest.mark.parametrize("drawn, segment", [(poisson_draw, 2**16), (joined, 2**16), (joined, 15)])
def test_every_image_enters_independently_at_the_rate(drawn, segment, monkeypatch):
    monkeypatch.setattr(sampling, "SEGMENT", segment)
    generator = NoiseSource().generator
    size = 50
    rate = 0.2
    draws = 20_000
    there = np.zeros((draws, size), dtype=bool)
    for row in there:
        row[drawn(generator, size, rate)] = True
    # six standard errors of a binomial each: false alarm below 1e-6 over all assertions
    assert np.all(np.abs(there.mean(axis=0) - rate) < 6 * np.sqrt(rate * (1 - rate) / draws))
    for i, j in ((0, 1), (3, 17), (24, 25), (0, 49)):  # neighbours, the middle, opposite ends
        assert abs((there[:, i] & there[:, j]).mean() - rate**2) < 6 * np.sqrt(rate**2 / draws)
    variance = size * rate * (1 - rate)  # a shuffled batch of a fixed size would have no variance
    assert abs(there.sum(axis=1).var() / variance - 1) < 6 * np.sqrt(2.2 / draws)


@pytest.mark.parametrize(
    "size, rate", [(0, 0.5), (7, 1.0), (1000, 1.0), (1000, 0.4), (1000, 0.001), (5, 0.01)]
)
def test_a_draw_in_blocks_is_ascending_and_bounded(size, rate, monkeypatch):
    monkeypatch.setattr(sampling, "SEGMENT", 16)
    generator = NoiseSource().generator
    for _ in range(20):
        blocks = list(poisson_blocks(generator, size, rate))
        whole = np.concatenate([np.zeros(0, dtype=np.int64), *blocks])
        assert (
            np.all(np.diff(whole) > 0)
            and np.all((whole >= 0) & (whole < size))
            and whole.dtype == np.int64
        )
        assert all(0 < len(block) < 2 * 16 for block in blocks) and (rate < 1 or len(whole) == size)


def test_each_row_falls_to_any_process_whatever_the_others_do():
    """Count the rows of each process. Also count the rows that have the same process as the row
    before, as the third row before, or as in a second draw.

    Each count is within six standard errors of a third of the rows: false-alarm rate 1e-6. If rows
    were assigned in turn, no row would have the same process as its neighbour.
    """
    rows = 30_000
    many = 3
    generator = NoiseSource().generator
    places = assign_processes(generator, np.arange(rows), many)
    width = 6 * np.sqrt(rows * (many - 1)) / many
    assert np.all(np.abs(np.bincount(places, minlength=many) - rows / many) < width)
    for other in (
        np.roll(places, 1),
        np.roll(places, many),
        assign_processes(generator, np.arange(rows), many),
    ):
        assert abs((places == other).sum() - rows / many) < width
