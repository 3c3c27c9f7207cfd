import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet
from sfumato.errors import ConfigError
from sfumato.evaluation import protocol
from sfumato.evaluation.downstream import Schedule, schedule_of
from sfumato.evaluation.plots import plot_protocol
from sfumato.evaluation.protocol import (
    Setting,
    accuracy_by_size,
    agreement,
    check_time,
    ensemble,
    grid,
    model_selection,
    seconds_per_step,
    subset,
)

QUICK = Schedule(steps=60, learning_rate=1e-2, weight_decay=1e-4)


@pytest.fixture(scope="module")
def sets(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    return tuple(
        ImageSet(digits.images[part], digits.labels[part], digits.classes) for part in np.array_split(order, 3)
    )


def test_a_smaller_subset_is_part_of_a_larger_one(sets):
    train = sets[0]
    small, large = ({image.tobytes() for image in subset(train, count).images} for count in (50, 300))
    assert len(subset(train, 50)) == 50 and small < large and len(subset(train, 10**6)) == len(train)


def test_more_images_at_equal_steps_help(sets):
    _, holdout, synthetic = sets
    rows = accuracy_by_size("lr", synthetic, holdout, (12, 500), QUICK, (0, 1))
    assert [row["images"] for row in rows] == [12, 500] and {row["steps"] for row in rows} == {60}
    assert rows[1]["mean"] > rows[0]["mean"] + 0.1  # 12 digits of ten classes against 500


def test_an_ensemble_averages_the_probabilities_of_its_members(sets, monkeypatch):
    _, holdout, synthetic = sets
    given = np.full((3, len(holdout), 10), 0.0, dtype=np.float32)
    rows = np.arange(len(holdout))
    given[0, rows, (holdout.labels + 1) % 10] = 1.0  # wrong and unsure
    given[1, rows, holdout.labels] = 3.0  # right and surer
    given[2, rows, (holdout.labels + 2) % 10] = 1.0
    seeds = []
    monkeypatch.setattr(protocol, "fit", lambda *a: (seeds.append(a[-1]), 0))
    monkeypatch.setattr(protocol, "logits", lambda *_: given[len(seeds) - 1])
    found = ensemble("lr", synthetic, holdout, QUICK, 3)
    assert found["accuracy"] == 1.0 and found["members"] == 3 and seeds == [0, 1, 2]
    assert found["alone"]["mean"] == pytest.approx(1 / 3) and found["images"] == len(synthetic)


def test_an_ensemble_of_real_classifiers_is_no_worse_than_its_members(sets):
    _, holdout, synthetic = sets
    found = ensemble("mlp", subset(synthetic, 120), holdout, dataclasses.replace(QUICK, learning_rate=2e-3), 3)
    assert (
        found["accuracy"] >= found["alone"]["mean"] - 0.02
    )  # 599 images: the standard error of a difference is below 0.01


def test_a_grid_is_every_combination():
    assert len(grid(("lr", "cnn"), (0.1, 1, 3), (0, 0.1))) == 12
    setting = Setting(classifier="cnn", rate=0.5, weight_decay=0.1)
    assert setting.schedule(QUICK) == dataclasses.replace(QUICK, learning_rate=5e-3, weight_decay=0.1)


def test_settings_rank_alike_on_two_halves_of_the_same_digits(sets):
    train, holdout, synthetic = sets
    settings = grid(("lr", "mlp"), (1e-3, 0.03, 0.3, 1), (0,))
    found = model_selection(
        settings, [schedule_of(setting.classifier, 500, 1, steps=40) for setting in settings], synthetic, holdout, train
    )
    assert (
        found["spearman"] > 0.7 and found["spearman_retrained"] > 0.7
    )  # eight settings, from far too small a rate to a good one
    assert found["regret"] < 0.05 and found["rank"] <= 3 and found["kept"] == 60
    assert all({"synthetic", "real", "retrained"} <= row.keys() for row in found["settings"])


def test_the_images_that_rank_the_settings_are_not_trained_on(sets, monkeypatch):
    _, holdout, synthetic = sets
    trained, scored = [], []
    monkeypatch.setattr(protocol, "fit", lambda name, images, *rest, **_: (trained.append(images), 0))
    monkeypatch.setattr(
        protocol, "predict", lambda model, images: scored.append(images) or np.zeros(len(images), dtype=np.int64)
    )
    model_selection([Setting(classifier="lr", rate=1, weight_decay=0)], [QUICK], synthetic, holdout)
    learnt, judged = ({image.tobytes() for image in images} for images in (trained[0], scored[0]))
    assert not learnt & judged and len(trained[0]) + len(scored[0]) == len(synthetic) and scored[1] is holdout.images


def test_agreement_is_that_of_ranks():
    rows = [{"synthetic": s, "real": r} for s, r in ((0.1, 0.5), (0.2, 0.6), (0.9, 0.7), (0.5, 0.9))]
    found = agreement(rows, "real")
    assert found["spearman"] == pytest.approx(0.8) and found["kendall"] == pytest.approx(4 / 6)
    assert found["chosen"] == 2 and found["rank"] == 2 and found["regret"] == pytest.approx(0.2)
    equal = agreement([{"synthetic": 0.5, "real": r} for r in (0.1, 0.2)], "real")
    assert equal["spearman"] == 0 and equal["kendall"] == 0 and equal["rank"] == 2


def test_what_would_take_too_long_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(protocol, "seconds_per_step", lambda *_: 0.5)
    planned = [("lr", QUICK, 4), ("cnn", QUICK, 2)]
    assert check_time(planned, (1, 8, 8), 10, 3) == pytest.approx(3)
    with pytest.raises(ConfigError, match=r"--minutes 2.9 is too little: 6 trainings would take about 3 minutes"):
        check_time(planned, (1, 8, 8), 10, 2.9)


def test_a_step_is_timed_without_data_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    took = seconds_per_step("cnn", QUICK, (1, 8, 8), 10)
    assert 0 < took < 5 and torch.equal(before, torch.get_rng_state())


def test_the_plot_says_that_it_is_local(tmp_path: Path):
    found = {
        "sizes": {"cnn": [{"images": 1000, "mean": 0.7, "std": 0.01}, {"images": 5000, "mean": 0.8, "std": 0.0}]},
        "ensemble": {"cnn": {"images": 5000, "members": 5, "accuracy": 0.82}},
        "selection": {
            "settings": [
                {"classifier": "lr", "synthetic": 0.7, "real": 0.6},
                {"classifier": "cnn", "synthetic": 0.8, "real": 0.7},
            ],
            "spearman": 1.0,
        },
    }
    plot_protocol(found, tmp_path / "utility.svg")
    text = (tmp_path / "utility.svg").read_text()
    assert "local: not for release" in text and "ensemble of 5" in text and "1 K" in text
    plot_protocol({"selection": found["selection"]}, tmp_path / "one.svg")
    assert "ensemble" not in (tmp_path / "one.svg").read_text()
