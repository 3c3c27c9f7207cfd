"""Several labels are scored by AUROC, label by label."""

import json

import numpy as np
import pytest
from membership import membership
from sklearn.metrics import roc_auc_score

from sfumato.data.images import ImageSet
from sfumato.errors import DataError
from sfumato.evaluation.downstream import Scored, aggregate, auroc, mean_of
from sfumato.evaluation.scores import absent_classes, check_fits, evaluate_release
from sfumato.evaluation.tables import tables_of
from sfumato.evaluation.verdict import guessing_error, verdict
from sfumato.settings.evaluate import Evaluate

NAMES = ("a", "b", "c")


def made(count: int, seed: int = 0) -> ImageSet:
    random = np.random.default_rng(seed)
    labels = (random.random((count, 3)) < 0.3).astype(np.uint8)
    return ImageSet(random.integers(0, 256, (count, 4, 4, 1), dtype=np.uint8), labels, NAMES)


def found_by(value: float) -> dict:
    row = aggregate([Scored(value, [value, None, value])], NAMES)
    return {"measure": "AUROC", "release": {"lr": row}, "real": {"lr": row | {"mean": 1.0}}}


def test_a_label_that_all_images_have_or_none_has_no_auroc():
    labels = np.array([[1, 1, 0], [0, 1, 0], [1, 1, 0]], dtype=np.uint8)
    assert auroc(np.array([[0.9, 0, 0], [0.1, 0, 0], [0.8, 0, 0]]), labels) == [1.0, None, None]
    assert mean_of([1.0, None, 0.5]) == 0.75 and mean_of([None, None]) == 0.5


def test_uninformative_scores_are_within_three_errors_of_half():
    """Each of 200 means over three labels is off by more than 3 standard errors with a probability
    of at most 0.3 %.
    """
    random = np.random.default_rng(0)
    labels = made(120).labels
    error = guessing_error(labels, 3)
    means = [mean_of(auroc(random.random((120, 3)), labels)) for _ in range(200)]
    assert sum(abs(mean - 0.5) > 3 * error for mean in means) <= 4
    assert 0.4 * error < np.std(means) <= error * 1.2
    single = guessing_error(labels[:, :1], 1)
    spread = np.std([roc_auc_score(labels[:, 0], random.random(120)) for _ in range(500)])
    assert single == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(
    ("value", "level"), [(0.99, "good"), (0.8, "fair"), (0.6, "poor"), (0.5, "useless")]
)
def test_the_verdict_measures_from_a_half(value, level):
    found = found_by(value)
    found["real"]["lr"]["per_class"] = [{"class": "a", "mean": 1.0, "std": None}]
    said = verdict(found, made(2000).labels, 3)
    assert said["level"] == level and said["learned"] == pytest.approx(2 * value - 1)
    assert said["balanced_accuracy"] == {"chance": 0.5, "release": value, "real": 1.0}


@pytest.mark.parametrize("without", [9, 10])
def test_a_label_that_nearly_all_images_have_is_not_judged(without):
    labels = made(2000).labels
    labels[:, 0] = np.arange(2000) >= without
    said = verdict(found_by(0.99), labels, 3)
    assert (said["level"] == "cannot be judged") is (without < 10)
    assert (f"but has only {without} without one of the labels" in said["sentence"]) is (
        without < 10
    )


def test_tables_call_it_auroc():
    found = found_by(0.8)
    found["verdict"] = verdict(found, made(2000).labels, 3)
    scores, by_class, *_, usable = tables_of(found)
    assert scores.title.startswith("AUROC") and scores.rows == (
        ("release", "80.0"),
        ("real", "100.0"),
    )
    assert [name for name, _ in by_class.rows] == ["a", "c"] and "AUROC" in usable.columns


@pytest.mark.parametrize("varying", [0, 1, 2])
def test_constant_labels_leave_all_numbers_finite(varying):
    holdout = made(60)
    holdout.labels[:, varying:] = [1, 0, 1][varying:]
    config = Evaluate(classifiers=("lr",), seeds=(0,), steps=20, fidelity=())
    found = evaluate_release({"release": made(40, 1)}, made(40, 2), holdout, config)
    if varying:
        found["verdict"] = verdict(found, holdout.labels, 3)
    assert bool(list(tables_of(json.loads(json.dumps(found, allow_nan=False))))) == (varying > 0)
    assert ("have the same labels" in " ".join(found["warnings"])) == (varying == 0)


def test_a_set_of_one_label_is_not_scored_on_images_with_several():
    single = ImageSet(made(9).images, made(9).labels[:, 0].astype(np.int64), NAMES)
    with pytest.raises(DataError, match="made from other data"):
        check_fits("release", single, made(9))
    bare = made(9)
    bare.labels[:, 1] = 0
    assert absent_classes(bare) == "'b'"


def test_an_attack_on_several_labels_searches_all_images():
    members = made(60, 1)
    others = made(60, 2)
    (attack,) = membership(members, members, others)
    assert attack.name == "distance to the nearest released image" and attack.low > 0.9
