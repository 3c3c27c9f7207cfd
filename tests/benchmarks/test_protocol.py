"""The utility protocol: what it computes, and that its script runs on a small release."""

import json
from pathlib import Path

import numpy as np
import protocol
import pytest
import typer
import utility
import yaml
from protocol import Setting, agreement, ensemble, grid, model_selection, subset
from typer.testing import CliRunner

from sfumato.data.images import save_images
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import read_card
from sfumato.evaluation.downstream import schedule_of
from sfumato.settings.data import Data
from sfumato.storage.artifacts import writing
from sfumato.training.supervised import Schedule

QUICK = Schedule(steps=60, learning_rate=1e-2, weight_decay=1e-4)


@pytest.fixture(scope="module")
def sets(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    return tuple(map(digits.take, np.array_split(order, 3)))


def test_a_smaller_subset_is_part_of_a_larger_one(sets):
    train = sets[0]
    small, large = (
        {image.tobytes() for image in subset(train, count).images} for count in (50, 300)
    )
    assert (
        len(subset(train, 50)) == 50 and small < large and len(subset(train, 10**6)) == len(train)
    )


def test_an_ensemble_averages_the_probabilities_of_its_members(sets, monkeypatch):
    _, holdout, synthetic = sets
    given = np.full((3, len(holdout), 10), 0.0, dtype=np.float32)
    rows = np.arange(len(holdout))
    given[0, rows, (holdout.labels + 1) % 10] = 1.0  # wrong, with little confidence
    given[1, rows, holdout.labels] = 3.0  # right, with more confidence
    given[2, rows, (holdout.labels + 2) % 10] = 1.0
    seeds = []
    monkeypatch.setattr(protocol, "fit_classifier", lambda *a: seeds.append(a[-1]))
    monkeypatch.setattr(protocol, "logits", lambda *_: given[len(seeds) - 1])
    found = ensemble("lr", synthetic, holdout, QUICK, 3)
    assert found["accuracy"] == 1.0 and found["members"] == 3 and seeds == [0, 1, 2]
    assert found["alone"]["mean"] == pytest.approx(1 / 3) and found["images"] == len(synthetic)


def test_settings_rank_alike_on_two_halves_of_the_same_digits(sets):
    train, holdout, synthetic = sets
    settings = grid(("lr", "mlp"), (1e-3, 0.03, 0.3, 1), (0,))
    schedules = [schedule_of(setting.classifier, 500, 1, steps=40) for setting in settings]
    found = model_selection(settings, schedules, synthetic, holdout, train)
    # eight settings, from far too small a rate to a good one
    assert found["spearman"] > 0.7 and found["spearman_retrained"] > 0.7
    assert found["regret"] < 0.05 and found["rank"] <= 3 and found["kept"] == 60
    assert all({"synthetic", "real", "retrained"} <= row.keys() for row in found["settings"])


def test_agreement_is_a_rank_correlation():
    rows = [
        {"synthetic": s, "real": r} for s, r in ((0.1, 0.5), (0.2, 0.6), (0.9, 0.7), (0.5, 0.9))
    ]
    found = agreement(rows, "real")
    assert found["spearman"] == pytest.approx(0.8) and found["kendall"] == pytest.approx(4 / 6)
    assert found["chosen"] == 2 and found["rank"] == 2 and found["regret"] == pytest.approx(0.2)
    equal = agreement([{"synthetic": 0.5, "real": r} for r in (0.1, 0.2)], "real")
    assert equal["spearman"] == 0 and equal["kendall"] == 0 and equal["rank"] == 2


def test_the_images_that_rank_the_settings_are_not_trained_on(sets, monkeypatch):
    _, holdout, synthetic = sets
    trained = []
    scored = []
    monkeypatch.setattr(
        protocol, "fit_classifier", lambda name, images, *rest, **_: trained.append(images)
    )
    monkeypatch.setattr(protocol, "accuracy", lambda model, part: scored.append(part) or 0.5)
    model_selection([Setting(classifier="lr", rate=1, weight_decay=0)], [QUICK], synthetic, holdout)
    learnt, judged = (
        {image.tobytes() for image in images} for images in (trained[0], scored[0].images)
    )
    assert (
        not learnt & judged
        and len(trained[0]) + len(scored[0]) == len(synthetic)
        and scored[1] is holdout
    )


def test_the_script_writes_numbers_tables_and_a_plot(here, digits):
    prepare_sensitive(Data(), here / "state", Path("data/sensitive/card.json"), here / "raw")
    card = read_card(Path("data/sensitive/card.json"))
    with writing(Path("artifacts/synthesize"), "synthesize") as directory:
        save_images(directory, digits.take(np.arange(300)))
    plan = {"stage": "evaluate", "enabled": True, "dataset_id": "digits", "shape": list(card.shape)}
    plan |= {"classes": list(card.classes), "size_hint": 400, "settings": {"seeds": [0, 1]}}
    Path("artifacts/plan").mkdir()
    Path("artifacts/plan/evaluate.yaml").write_text(yaml.safe_dump(plan))
    app = typer.Typer()
    app.command()(utility.main)
    words = "--steps 8 --sizes 60,200 --classifiers lr --ensemble 2 --grid-classifiers lr,mlp"
    done = CliRunner().invoke(
        app, [*words.split(), "--rates", "0.1,1", "--weight-decays", "0", "--retrain"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(Path("evaluation/utility.json").read_text())
    assert [row["images"] for row in found["sizes"]["lr"]] == [60, 200] and found["ensemble"]["lr"][
        "members"
    ] == 2
    assert len(found["selection"]["settings"]) == 4 and "spearman_retrained" in found["selection"]
    assert (
        Path("evaluation/utility.csv").read_text().splitlines()[0]
        == "classifier,images,members,accuracy,std"
    )
    assert (
        Path("evaluation/selection.csv").exists()
        and Path("evaluation/utility.png").stat().st_size > 1000
    )
    assert {path.stat().st_mode & 0o777 for path in Path("evaluation").iterdir()} == {0o600}
    journal = [
        json.loads(line) for line in Path("state/odometer/digits.jsonl").read_text().splitlines()
    ]
    assert [entry.get("purpose") for entry in journal[1:]] == ["utility"]
