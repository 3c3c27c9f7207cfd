"""`stage utility` on a small release: what it writes and what it refuses before it starts."""

import json
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfumato.data.images import ImageSet, save_images
from sfumato.data.store import read_card
from sfumato.evaluation import protocol
from sfumato.storage.artifacts import writing
from stages.cli import main

QUICK = (
    "--steps",
    "20",
    "--sizes",
    "60,200",
    "--classifiers",
    "lr",
    "--ensemble",
    "2",
    "--grid-classifiers",
    "lr,mlp",
    "--rates",
    "0.1,1",
    "--weight-decays",
    "0",
)


class Screen(StringIO):
    """Standard output and error: of a log, or of a terminal."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def desk(tmp_path, monkeypatch, digits):
    """Prepared digits, a release of other digits, and `stage utility` as a function: (exit code, output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    np.savez(
        "source.npz", images=digits.images[:500, ..., 0], labels=digits.labels[:500], classes=np.array(digits.classes)
    )

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["stage", *words])
        out = Screen()
        with pytest.MonkeyPatch.context() as capture:
            capture.setattr(sys, "stdout", out)
            capture.setattr(sys, "stderr", out)
            with pytest.raises(SystemExit) as end:
                main()
                raise SystemExit(0)
        return int(end.value.code or 0), " ".join(out.getvalue().split())

    (tmp_path / "pipelines").mkdir()
    data = {"dataset_id": "digits", "source": "npz", "path": str(tmp_path / "source.npz")}
    Path("params.yaml").write_text(
        yaml.safe_dump({"recipe": "r", "profile": None, "data": data, "privacy": {"size_hint": 400}})
    )
    Path("pipelines/r.yaml").write_text("{}\n")
    assert call("prepare", "sensitive")[0] == 0
    card = read_card(Path("data/sensitive/card.json"))
    release(digits, slice(900, 1200), card.classes)
    plan = {
        "stage": "evaluate",
        "enabled": True,
        "dataset_id": "digits",
        "shape": list(card.shape),
        "classes": list(card.classes),
        "size_hint": 400,
    }

    def utility(*words, **settings):
        Path("evaluate.yaml").write_text(yaml.safe_dump({**plan, "settings": {"seeds": [0, 1], **settings}}))
        return call("utility", "--config", "evaluate.yaml", *words)

    return utility


def release(digits, rows, classes):
    with writing(Path("artifacts/synthesize"), "synthesize") as directory:
        save_images(directory, ImageSet(digits.images[rows], digits.labels[rows], classes))


def test_curve_ensemble_and_ranking_are_written_as_numbers_tables_and_a_plot(desk, monkeypatch):
    monkeypatch.setattr(Screen, "terminal", True)
    code, text = desk(*QUICK, "--retrain")
    assert code == 0, text
    found = json.loads(Path("evaluation/utility.json").read_text())
    assert (
        found["scope"] == "local"
        and found["identity"]["training"] == "light, 20 steps, last epoch"
        and found["steps"] == {"lr": 20, "mlp": 20}
    )
    assert [row["images"] for row in found["sizes"]["lr"]] == [60, 200] and len(
        found["sizes"]["lr"][0]["per_seed"]
    ) == 2
    assert found["ensemble"]["lr"]["members"] == 2 and found["ensemble"]["lr"]["images"] == 200
    assert len(found["selection"]["settings"]) == 4 and "spearman_retrained" in found["selection"]
    assert {path.name for path in Path("evaluation").iterdir()} == {
        "utility.json",
        "utility.csv",
        "selection.csv",
        "utility.png",
    }
    assert Path("evaluation/utility.csv").read_text().splitlines()[0] == "classifier,images,members,accuracy,std"
    assert "utility: about" in text and "Spearman" in text and "2 together" in text
    assert journalled() == ["utility"]


def journalled() -> list[str]:
    """What the journal says was done with the sensitive images."""
    journal = [json.loads(line) for line in Path("state/odometer/digits.jsonl").read_text().splitlines()]
    assert journal[0]["kind"] == "genesis" and {entry["kind"] for entry in journal[1:]} <= {"local"}
    return [entry["purpose"] for entry in journal[1:]]


def test_parts_can_be_had_alone_and_a_log_names_the_file_in_place_of_the_numbers(desk):
    code, text = desk(*QUICK, "--parts", "selection")
    assert code == 0, text
    assert "Spearman" not in text and "evaluation/utility.json: local, not to be shared" in text
    found = json.loads(Path("evaluation/utility.json").read_text())
    assert "sizes" not in found and "ensemble" not in found and "spearman" in found["selection"]
    assert {path.name for path in Path("evaluation").iterdir()} == {"utility.json", "selection.csv", "utility.png"}


def test_a_grid_larger_than_the_time_allowed_exits_2_before_real_images_are_read(desk, monkeypatch):
    monkeypatch.setattr(protocol, "seconds_per_step", lambda *_: 10.0)
    code, text = desk(*QUICK, "--minutes", "5")
    assert code == 2 and "error: --minutes 5 is too little: 10 trainings would take about 33 minutes" in text
    assert journalled() == [] and not Path("evaluation").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sizes", "10000"), "the release holds 300 images"),
        (("--sizes", ""), "expected positive numbers"),
        (("--sizes", "60.5"), "expected whole numbers"),
        (("--rates", "0"), "expected positive numbers"),
        (("--rates", "1e99"), "expected positive numbers"),
        (("--classifiers", "vit"), "'vit' is not known, expected some of lr, mlp, cnn, student, wrn, resnet, resnext"),
        (("--parts", ","), "nothing is named"),
    ],
)
def test_options_that_mean_nothing_exit_2(desk, words, said):
    code, text = desk(*words)
    assert code == 2 and said in text and "Traceback" not in text and journalled() == []


def test_no_seeds_exit_2(desk):
    code, text = desk(seeds=[])
    assert code == 2 and "seeds" in text and "Traceback" not in text


def test_fewer_classes_in_the_release_than_in_the_hold_out_exit_4(desk, digits):
    release(digits, digits.labels != 6, digits.classes)
    code, text = desk(*QUICK)
    assert code == 4 and "no image of class '6'" in text and "Traceback" not in text
    release(digits, slice(900, 1200), digits.classes)
    code, text = desk(*QUICK[2:], "--sizes", "3,200", "--steps", "20")
    assert code == 4 and "the 3 images of the release set has no image of class" in text


def test_a_dry_run_reads_nothing(desk):
    code, text = desk("--dry-run")
    assert code == 0 and "charges nothing" in text and journalled() == []
