"""Before noise, adding or removing one image changes a query's sum by at most its bound.

The images are digits and awkward inputs.
"""

import math

import pytest
import torch
from cases import CASES as OWN
from parts import of_baselines
from torch import Tensor

from sfumato.settings.stages import QUERIES

CASES = OWN | of_baselines("baseline_cases", "CASES")
BY_CLASS = [name for name, case in CASES.items() if case.axis is not None]
BY_PIXELS = [name for name in CASES if name != "count"]
Drawn = tuple[Tensor, Tensor]


def test_every_query_has_a_case():
    """A query without a case would pass every test in this file.

    It would also pass the tests of groups, of several processes, and of what a query shows.
    """
    assert {case.stage for case in CASES.values()} == set(QUERIES)


@pytest.fixture(scope="module")
def sample(digits) -> Drawn:
    """Return twenty digits. The last is replaced by a white image, which has the largest norm."""
    images, labels = digits.batch(range(20))
    images[-1] = 1.0
    return images, labels


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CASES)
def test_one_image_moves_the_total_by_at_most_the_bound(name, layout, sample):
    images, labels = sample
    case = CASES[name]
    move = max(case.moves(images.to(memory_format=layout), labels, [0, 9, 19]))
    assert move <= case.bound * (1 + case.rounding)
    assert move >= 0.5 * case.bound, (
        "the bound is far from met: more noise than the guarantee needs, or the image never entered"
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -5.0, 7.0])
def test_a_broken_image_moves_the_total_by_at_most_the_bound(name, value, sample):
    """If a pixel is not finite, the image adds nothing.

    `count` is the exception, because it reads no pixels.
    """
    images = sample[0].clone()
    labels = sample[1]
    images[17, 0, 3, 4:] = value
    case = CASES[name]
    counts = math.isfinite(value) or name not in BY_PIXELS
    assert (
        max(case.moves(images, labels, [17]))
        <= (case.bound if counts else 0) + case.bound * case.rounding
    )


@pytest.mark.parametrize("label", [-1, 10, 2**40])
@pytest.mark.parametrize("name", CASES)
def test_a_label_out_of_range_neither_stops_the_query_nor_counts(name, label, sample):
    """The image counts as unlabelled.

    So it adds nothing to a sum in which each image adds only to its own class.
    """
    images = sample[0]
    labels = sample[1].clone()
    case = CASES[name]
    labels[17] = label
    assert max(case.moves(images, labels, [17])) <= case.bound * (
        (case.axis is None) + case.rounding
    )


@pytest.mark.parametrize("name", CASES)
def test_an_empty_draw_releases_as_often_and_in_the_same_shapes(name, sample):
    drawn = CASES[name].drawn(sample[0])
    empty = CASES[name].totals(drawn[:0], sample[1][:0])
    assert [total.shape for total in empty] == [
        total.shape for total in CASES[name].totals(drawn, sample[1])
    ]
    assert all((total == 0).all() for total in empty)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 7])
def test_the_total_does_not_depend_on_the_chunks(name, size, sample):
    case = CASES[name]
    drawn = CASES[name].drawn(sample[0])
    for a, b in zip(
        case.totals(drawn, sample[1]), case.totals(drawn, sample[1], size=size), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * case.bound)


@pytest.mark.parametrize("name", BY_CLASS)
def test_one_image_touches_only_its_own_class(name, sample):
    images, labels = sample
    (total, *_) = CASES[name].totals(CASES[name].drawn(images[:1]), labels[:1])
    per_class = total.movedim(CASES[name].axis, 0)
    assert per_class[labels[0]].abs().sum() > 0
    assert (per_class[torch.arange(10) != labels[0]] == 0).all()
