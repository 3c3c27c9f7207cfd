"""AUROC and sensitivity of two classes, with intervals by person, as medical papers quote them."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from sfumato.data.images import ImageSet
from sfumato.evaluation import downstream
from sfumato.evaluation.downstream import Scored, aggregate, ranked, scored_by, sensitivities
from sfumato.evaluation.tables import tables_of
from sfumato.evaluation.verdict import verdict

NAMES = ("healthy", "ill")


def drawn(count=400, apart=1.5, seed=0):
    """Return log odds, and the classes. The means of the classes differ by `apart` standard
    deviations.
    """
    random = np.random.default_rng(seed)
    second = random.random(count) < 0.3
    return random.normal(size=count) + apart * second, second


def holdout(second, classes=NAMES, groups=None):
    return ImageSet(
        np.zeros((len(second), 2, 2, 1), np.uint8), second.astype(np.int64), classes, groups
    )


def scored(odds, second, classes=NAMES):
    scores = np.stack([np.zeros_like(odds), odds], axis=1)
    return scored_by(lambda _: scores, holdout(second, classes), {})


def test_the_numbers_follow_their_definitions():
    odds, second = drawn()
    area, first, other = sensitivities(odds, second, np.ones(len(odds)))
    assert area == pytest.approx(roc_auc_score(second, odds))
    for found, mine, positive in ((first, -odds, ~second), (other, odds, second)):
        tenth = np.sort(mine[~positive])[::-1][int(0.1 * (~positive).sum())]
        assert found == pytest.approx((mine[positive] > tenth).mean(), abs=0.01)


def test_a_weight_counts_an_image_so_many_times():
    odds, second = drawn(60)
    weights = np.random.default_rng(1).integers(0, 3, 60)
    again = np.repeat(np.arange(60), weights)
    assert sensitivities(odds, second, weights) == pytest.approx(
        sensitivities(odds[again], second[again], np.ones(len(again)))
    )


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(downstream, "RESAMPLES", 200)


def test_a_perfect_area_has_no_interval_despite_rounding():
    """All resamples have the area 1, with rounding errors of 1e-16."""
    second = np.arange(37) % 3 == 0
    rows = ranked([scored(np.where(second, 1.0, -1.0) + np.arange(37) / 99, second)], NAMES)
    assert [row["interval"] for row in rows] == [[], [], []]


def test_intervals_cover_the_truth_at_the_width_of_persons(monkeypatch):
    """The true AUROC of these normal scores is 0.856.

    With 200 resamples, an interval covers it with a probability of 94.5 %. Of 8 such intervals, 3
    or more miss it in one of 130 runs.
    """
    missed = 0
    for seed in range(8):
        low, high = ranked([scored(*drawn(seed=seed))], NAMES)[0]["interval"]
        missed += not low < 0.856 < high
    assert missed <= 2
    monkeypatch.setattr(downstream, "RESAMPLES", 1000)
    odds, second = (np.repeat(each, 4) for each in drawn(100))
    alone, together = (
        ranked([scored(odds, second)], NAMES, groups)[0]
        for groups in (None, np.repeat(range(100), 4))
    )
    assert alone["mean"] == together["mean"]
    assert 1.7 < np.ptp(together["interval"]) / np.ptp(alone["interval"]) < 2.3


def test_seeds_are_averaged_and_other_sets_have_no_such_numbers():
    (_, second), (good, _), (bad, _) = drawn(), drawn(), drawn(apart=0)
    row = aggregate([scored(good, second), scored(bad, second)], NAMES)
    expected = np.mean([roc_auc_score(second, good), roc_auc_score(second, bad)])
    assert row["two_classes"][0]["mean"] == pytest.approx(expected)
    assert "two_classes" not in aggregate([scored(good, np.ones_like(second))], NAMES), (
        "one class only"
    )
    three = Scored(0.5, [0.5] * 3, right=np.ones(20), calibration=0.1)
    assert "two_classes" not in aggregate([three], ("a", "b", "c"))


def test_a_table_shows_them_for_every_classifier():
    row = aggregate([scored(*drawn())], NAMES)
    metrics = {
        "release": {"cnn": row},
        "teacher": row | {"accuracy": 0.8, "balanced_accuracy": 0.8},
    }
    metrics["verdict"] = verdict(metrics, holdout(drawn()[1]).labels, 2)
    (table,) = (table for table in tables_of(metrics) if table.title.startswith("AUROC"))
    assert "90.0 % specificity" in table.title and [each[0] for each in table.rows] == [
        "release: cnn",
        "teacher",
    ]
    assert table.columns[1::2] == ("AUROC", "sensitivity to healthy", "sensitivity to ill")
    assert (
        table.rows[0][1] == f"{100 * row['two_classes'][0]['mean']:.1f}"
        and " to " in table.rows[0][2]
    )
