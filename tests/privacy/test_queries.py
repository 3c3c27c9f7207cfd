"""One image more or less moves the sum of a query by at most its bound, before noise: digits and awkward inputs."""

import math

import pytest
import torch
from torch import Tensor

from sfumato.features.fourier import FourierFeatures
from sfumato.privacy.charge import Charge
from sfumato.privacy.rows import Rows, bounded_sum, one_hot
from sfumato.queries.central import mean_rows, mode_rows, query_central
from sfumato.queries.count import query_count
from sfumato.queries.covariance import cosine_moments
from sfumato.queries.joint import joint_rows, query_joint_embedding
from sfumato.settings.queries import Central, Covariance, FeatureMap

ROUNDING = 1e-9  # the sums are float64
FEATURES = FourierFeatures((1, 8, 8), [FeatureMap(), FeatureMap(map="scattering")], 200, seed=0)
COSINES = cosine_moments(Covariance(frequencies=10), (1, 8, 8))


class Recorder:
    """A charge that draws everything it holds, adds no noise, and keeps what it was asked to release."""

    def __init__(self, images: Tensor, labels: Tensor, size: int | None = None) -> None:
        self.images, self.labels, self.size = images, labels, size
        self.released: list[tuple[Tensor, float]] = []

    def batches(self, size: int, *, labels_only: bool = False):
        size = self.size or size
        for start in range(0, len(self.images), size):
            yield self.images[start : start + size], self.labels[start : start + size]

    def release(self, total: Tensor, max_norm: float, integer: bool = False) -> Tensor:
        self.released.append((total.clone(), max_norm))
        return total

    sum = Charge.sum

    def blank(self):
        return self.images.new_zeros(1, *self.images.shape[1:]), torch.tensor([-1])


QUERIES = {
    "count": lambda charge: query_count(charge, 10),
    "mean": lambda charge: query_central(charge, torch.full((10,), 30.0), (1, 8, 8), Central(repeats=2, max_norm=2.0)),
    "mean-unclipped": lambda charge: query_central(charge, torch.full((10,), 30.0), (1, 8, 8), Central(repeats=1)),
    "mean-pooled": lambda charge: query_central(charge, torch.full((10,), 30.0), (1, 8, 8), Central(repeats=1, pool=2)),
    "mode": lambda charge: query_central(
        charge, torch.full((10,), 30.0), (1, 8, 8), Central(repeats=1, statistic="mode", bins=4)
    ),
    "mode-pooled": lambda charge: query_central(
        charge, torch.full((10,), 30.0), (1, 8, 8), Central(repeats=1, statistic="mode", pool=2)
    ),
    "frequency": lambda charge: query_joint_embedding(charge, FEATURES, 10, 300.0),
    "covariance": lambda charge: query_joint_embedding(charge, COSINES, 10, 300.0),
}
BOUNDS = {
    "count": 1,
    "mean": 2,
    "mean-unclipped": 8,
    "mean-pooled": 4,
    "mode": 8,
    "mode-pooled": 4,
    "frequency": 1,
    "covariance": 1,
}


@pytest.fixture(scope="module")
def sample(digits) -> tuple[Tensor, Tensor]:
    """A hundred digits, the last of them all white: the largest norm that an image can have."""
    images, labels = digits.batch(range(100))
    images[-1] = 1.0
    return images, labels


def totals(query, images: Tensor, labels: Tensor, size: int | None = None) -> list[Tensor]:
    charge = Recorder(images, labels, size)
    query(charge)
    return [total for total, _ in charge.released]


def largest_move(query, images: Tensor, labels: Tensor, left_out) -> float:
    whole = totals(query, images, labels)
    moves = []
    for i in left_out:
        keep = torch.arange(len(images)) != i
        rest = totals(query, images[keep], labels[keep])
        assert len(rest) == len(whole)
        moves += [torch.linalg.vector_norm(a - b).item() for a, b in zip(whole, rest, strict=True)]
    return max(moves)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", QUERIES)
def test_one_image_moves_the_total_by_at_most_the_bound(name, layout, sample):
    images, labels = sample
    move = largest_move(QUERIES[name], images.to(memory_format=layout), labels, [*range(0, 100, 9)])
    assert move <= BOUNDS[name] + ROUNDING
    assert move >= 0.5 * BOUNDS[name], (
        "the bound is far from met: more noise than the guarantee needs, or the image never entered"
    )


@pytest.mark.parametrize("name", QUERIES)
def test_the_noise_is_scaled_by_the_very_bound(name, sample):
    charge = Recorder(*sample)
    QUERIES[name](charge)
    assert {max_norm for _, max_norm in charge.released} == {BOUNDS[name]}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -5.0, 7.0])
def test_a_broken_image_moves_the_total_by_at_most_the_bound(name, value, sample):
    images, labels = sample[0].clone(), sample[1]
    images[17, 0, 3, 4:] = value
    whole = totals(QUERIES[name], images, labels)
    assert all(total.isfinite().all() for total in whole)
    assert largest_move(QUERIES[name], images, labels, [17]) <= BOUNDS[name] + ROUNDING


@pytest.mark.parametrize("name", [name for name in QUERIES if name != "count"])
def test_a_non_finite_image_counts_nowhere(name, sample):
    images, labels = sample[0].clone(), sample[1]
    images[17, 0, 0, 0] = float("nan")
    assert largest_move(QUERIES[name], images, labels, [17]) <= ROUNDING


@pytest.mark.parametrize("name", QUERIES)
def test_a_label_out_of_range_neither_stops_the_query_nor_counts(name, sample):
    images, labels = sample[0], sample[1].clone()
    labels[17] = 10
    assert largest_move(QUERIES[name], images, labels, [17]) <= ROUNDING


@pytest.mark.parametrize("name", QUERIES)
def test_an_empty_draw_releases_as_often_and_in_the_same_shapes(name, sample):
    empty = totals(QUERIES[name], torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    assert [total.shape for total in empty] == [total.shape for total in totals(QUERIES[name], *sample)]
    assert all((total == 0).all() for total in empty)


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_total_does_not_depend_on_the_chunks(name, size, sample):
    for a, b in zip(totals(QUERIES[name], *sample), totals(QUERIES[name], *sample, size=size), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in QUERIES if name != "count"])
def test_dropping_images_leaves_the_divisor_as_it_was(name, sample):
    images, labels = sample
    for kept in (100, 40, 3):
        charge = Recorder(images[:kept], labels[:kept])
        answer = QUERIES[name](charge)
        public = 300.0 if name in ("frequency", "covariance") else 30.0
        expected = torch.stack([total for total, _ in charge.released]).reshape(answer.shape) / public
        torch.testing.assert_close(answer, expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["mean", "mode", "frequency"])
def test_one_image_touches_only_its_own_class(name, sample):
    images, labels = sample
    (total, *_) = totals(QUERIES[name], images[:1], labels[:1])
    per_class = total.T if name == "frequency" else total
    assert per_class[labels[0]].abs().sum() > 0
    others = torch.arange(10) != labels[0]
    assert (per_class[others] == 0).all()


def test_sums_of_a_batch_are_the_sums_of_its_images(sample):
    images, labels = sample
    functions = (
        lambda x, y: bounded_sum(Rows(one_hot(y, 10)), 1.0),
        lambda x, y: bounded_sum(mean_rows(x, y, 10), 2.0),
        lambda x, y: bounded_sum(mode_rows(x, y, 10, 3), 8.0),
        lambda x, y: bounded_sum(joint_rows(FEATURES, x, y, 10), 1.0),
    )
    with torch.no_grad():
        for function in functions:
            singly = sum(function(images[i : i + 1], labels[i : i + 1]) for i in range(20))
            torch.testing.assert_close(function(images[:20], labels[:20]), singly, rtol=0, atol=1e-5)


def test_every_mode_vector_has_the_norm_it_is_charged_for(sample):
    images, labels = sample
    for pool in (1, 2):
        norms = [
            torch.linalg.vector_norm(
                bounded_sum(mode_rows(images[i : i + 1], labels[i : i + 1], 10, 5, pool), 99.0)
            ).item()
            for i in range(10)
        ]
        assert norms == pytest.approx([math.sqrt(64) / pool] * 10)
