"""Adding or removing one image with any number of labels changes a query's sum by at most its
bound.

Every query that takes several labels has a case here, as in `test_queries.py` for one label.
"""

import math

import numpy as np
import pytest
import torch
from cases import (
    FEATURES,
    GRADIENTS,
    LEARNED,
    Case,
    Recorder,
    finetune,
    means,
    moments,
    teacher,
    unet,
    unit_rows,
)
from test_groups import drawn_by, made_patients, move, part, picks_in_order

from sfumato.data.images import ImageSet
from sfumato.privacy import charge as door
from sfumato.privacy.rows import label_rows
from sfumato.queries.count import public_several, query_several, several_bound, several_rows
from sfumato.settings.stages import QUERIES, STAGES

LABELS = 14
NONE, ONE, ALL = 0, 1, 2  # the first images have none, one and all of the labels


def heads(charge, **settings):
    offsets = torch.linspace(-3, 3, LABELS).double()
    return teacher(charge, classes=LABELS, offsets=offsets, **settings)


def gradients(draws):
    return lambda charge: finetune(charge, draws, unet(LABELS, several=True))


CASES = {
    "count": Case(
        stage="count", query=lambda c: query_several(c, LABELS), bound=several_bound(LABELS)
    ),
    "frequency": Case(stage="frequency", query=means(FEATURES, LABELS), bound=1),
    "moments": Case(stage="moments", **moments(LABELS), bound=1),
    "frequency of cached rows": Case(
        stage="frequency",
        query=means(LEARNED, LABELS, cached=True),
        encode=LEARNED.vectors,
        bound=1,
    ),
    "teacher": Case(stage="teacher", query=heads, encode=unit_rows, bound=1.4142, uses=3),
    "teacher with a short clip": Case(
        stage="teacher",
        query=lambda charge: heads(charge, max_norm=0.1),
        encode=unit_rows,
        bound=0.1,
        uses=3,
    ),
    "finetune": Case(stage="finetune", query=gradients(1), **GRADIENTS),
    "finetune of 8 draws": Case(stage="finetune", query=gradients(8), **GRADIENTS),
}


@pytest.fixture(scope="module")
def some(digits) -> ImageSet:
    labels = (np.random.default_rng(0).random((len(digits.images), LABELS)) < 0.2).astype(np.uint8)
    labels[[NONE, ONE, ALL]] = 0
    labels[ONE, 5] = 1
    labels[ALL] = 1
    return ImageSet(digits.images, labels, tuple(f"finding {i}" for i in range(LABELS)))


def test_every_query_that_the_plan_lets_through_has_a_case():
    assert {case.stage for case in CASES.values()} == {
        name for name in QUERIES if STAGES[name].several_labels
    }


@pytest.mark.parametrize("who", [NONE, ONE, ALL])
@pytest.mark.parametrize("name", CASES)
def test_any_labels_move_every_sum_by_at_most_the_bound(name, who, some):
    case = CASES[name]
    images, labels = some.batch(range(20))
    charge = Recorder(case.drawn(images), labels, case.uses)
    case.query(charge)
    # A charge refuses any bound but its record's
    assert {bound for _, bound, _ in charge.asked} == {case.bound}
    moved = case.moves(images, labels, [who])
    # The image was in the sum
    assert min(moved) > 0.2 * case.bound and max(moved) <= case.bound * (1 + case.rounding)


def test_rows_of_labels_have_the_stated_norms():
    """Test any number of labels; an entry other than 0 or 1 counts as 0."""
    labels = torch.tril(torch.ones(LABELS + 1, LABELS), -1).to(torch.uint8)
    assert labels.sum(1).tolist() == list(range(LABELS + 1))
    torch.testing.assert_close(
        label_rows(labels, LABELS).norm(dim=1), torch.ones(LABELS + 1).double()
    )
    norms = several_rows(labels, LABELS).norm(dim=1)
    torch.testing.assert_close(norms, torch.arange(2, LABELS + 3).double().sqrt())
    assert several_bound(LABELS) == math.sqrt(LABELS + 2)
    assert torch.equal(several_rows(255 * labels, LABELS), several_rows(0 * labels, LABELS))


@pytest.mark.parametrize("group", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["count", "frequency", "teacher", "finetune of 8 draws"])
def test_one_patient_moves_a_charges_sum_by_the_bound(name, group, some, monkeypatch):
    """The charges are real, with so little noise that a release shows its sum.

    The images of one patient have no labels; another's have all.
    """
    monkeypatch.setattr(door, "group_picks", picks_in_order)
    case = CASES[name]
    patients = made_patients(some)
    patients = part(patients, patients.groups < 9)
    patients.labels[patients.groups == 1] = 0
    patients.labels[patients.groups == 3] = 1
    assert (
        0.05 * case.bound < move(case, drawn_by(case, patients), group) <= case.bound * (1 + 1e-3)
    )


def test_the_counts_give_a_size_and_shares_of_labels(some):
    images, labels = some.batch(range(500))
    found = public_several(query_several(Recorder(images, labels), LABELS), 1e-6)
    assert found.total == 500
    np.testing.assert_allclose(found.priors, some.labels[:500].mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(found.row_means, label_rows(labels, LABELS).mean(dim=0), atol=1e-9)
    hidden = public_several(torch.full((2 * LABELS + 2,), -9.0), 100.0)
    assert hidden.total == float(hidden.per_class[0]) == 400.0  # noise of 100·√16
    assert not hidden.priors.any()
