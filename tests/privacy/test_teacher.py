"""The teacher's guarantee: one image moves the sum of gradients by no more than the clip.

Also, no image changes another image's part of the sum.
"""

import math

import pytest
import torch
from cases import CLASSES, MAPS, SHAPE, Recorder, classifier

from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.teacher_network import (
    TeacherNetwork,
    classify,
    fit_features,
    load_teacher_network,
    save_teacher,
)
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.teacher import error_rows, query_teacher
from sfumato.settings.queries import Teacher
from sfumato.settings.training import Classifier
from sfumato.training.public_classifier import train_public_classifier

BESIDE = ["classifier beside patches", "patches beside colour-histogram"]


@pytest.fixture(scope="module", params=["classifier", *MAPS, *BESIDE])
def features(request, digits):
    maps = [{"map": name} for name in request.param.split(" beside ")]
    settings = Teacher(features=maps, dimension=32, flip="patches" in request.param)
    return fit_features(
        settings, SHAPE, classifier() if "classifier" in request.param else None, digits, seed=0
    )[0]


def test_a_row_depends_on_its_image_alone_to_the_last_bit(features, digits):
    images = digits.batch(range(90))[0]
    matters = place_matters(features, SHAPE, torch.device("cpu"))
    alone = torch.cat([rows_alone(features, image[None], matters) for image in images])
    for kept in (slice(None), slice(1, None), slice(None, None, 2), slice(70, 75)):
        assert torch.equal(rows_alone(features, images[kept], matters), alone[kept])


@pytest.mark.parametrize("max_norm", [0.1, math.sqrt(2)])
def test_one_image_moves_each_release_by_at_most_the_clip(features, digits, max_norm):
    """Test at zero weights, and at large random weights."""
    images, labels = digits.batch(range(90))
    rows = rows_alone(features, images)
    weights = (
        torch.randn(
            rows.shape[1], CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        * 30
    )
    for values in (torch.zeros_like(weights), weights):
        whole = bounded_sum(error_rows(values, rows, labels), max_norm)
        moves = []
        for left_out in range(0, 90, 7):
            kept = torch.arange(90) != left_out
            moves.append(
                float(
                    (
                        whole - bounded_sum(error_rows(values, rows[kept], labels[kept]), max_norm)
                    ).norm()
                )
            )
        assert max(moves) <= max_norm * (1 + 1e-9)
        assert max(moves) > 0.5 * min(max_norm, 0.9)  # the bound is not loose


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_a_first_step_from_zero_needs_no_bound_above_one(classes):
    """Recipe teacher-mixed releases only this step, with max_norm 1.

    This bound must not clip any row.
    """
    rows = torch.nn.functional.normalize(torch.randn(60, 6, dtype=torch.float64), dim=1).float()
    found = error_rows(
        torch.zeros(6, classes, dtype=torch.float64), rows, torch.arange(60) % classes
    )
    norms = found.left.double().norm(dim=1) * found.right.norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(1 - 1 / classes)))
    assert torch.equal(bounded_sum(found, 1.0), bounded_sum(found, 1.4142))


def test_it_releases_once_per_step_at_the_clip(digits):
    rows = torch.nn.functional.normalize(torch.rand(50, 6), dim=1)
    labels = torch.arange(50) % CLASSES
    settings = Teacher(
        dimension=6, steps=7, max_norm=0.3, momentum=0, average=1, last_rate=1, learning_rate=2.0
    )
    charge = Recorder(rows, labels, settings.steps, size=9)
    weights = query_teacher(charge, settings, CLASSES, 1000.0, torch.eye(6), print)
    assert [max_norm for _, max_norm, _ in charge.asked] == [0.3] * 7
    walked = torch.cumsum(
        torch.stack([total for total, _, _ in charge.asked]) * 2.0 / 1000.0, dim=0
    )
    torch.testing.assert_close(weights, walked.mean(0))


def test_steps_are_preconditioned_slowed_and_averaged():
    rows = torch.nn.functional.normalize(torch.rand(50, 4), dim=1)
    labels = torch.arange(50) % CLASSES
    covariance = torch.diag(torch.tensor([1.0, 0.1, 0.01, 0.0]))
    settings = Teacher(
        dimension=4, steps=2, momentum=0.5, ridge=0.1, last_rate=0.2, average=0.5, learning_rate=3.0
    )
    charge = Recorder(rows, labels, 2)
    weights = query_teacher(charge, settings, CLASSES, 50.0, covariance, print)
    scale = (0.1 / (torch.tensor([1.0, 0.1, 0.01, 0.0]) + 0.1)).double()[:, None]
    first, second = (scale * total / 50 for total, _, _ in charge.asked)
    torch.testing.assert_close(
        weights, 3.0 * first + 3.0 * 0.6 * (0.5 * first + second), rtol=1e-6, atol=1e-9
    )


def test_without_noise_it_learns_and_keeps_its_record(digits, tmp_path):
    settings = Teacher(dimension=64, steps=40, learning_rate=30.0)
    network = train_public_classifier(
        digits, Classifier(network="whitened", width=8, steps=60), seed=0
    )[0]
    features, covariance = fit_features(settings, SHAPE, network, digits, seed=0)
    rows = rows_alone(features, digits.batch(range(len(digits)))[0], False)
    labels = torch.from_numpy(digits.labels)
    weights = query_teacher(
        Recorder(rows, labels, 40), settings, CLASSES, float(len(digits)), covariance, print
    )
    save_teacher(TeacherNetwork.of(features, weights), tmp_path)
    answers = classify(load_teacher_network(tmp_path), digits)
    assert answers.shape == (len(digits), CLASSES) and torch.allclose(
        answers.sum(1), torch.ones(len(digits))
    )
    assert (answers.argmax(1).numpy() == digits.labels).mean() > 0.9
