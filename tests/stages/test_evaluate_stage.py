"""`stage evaluate` on a small release: what it writes, where, and what it refuses."""

import json
import stat
import subprocess
import sys
from hashlib import sha256
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfumato.data.images import ImageSet, save_images
from sfumato.data.store import read_card
from sfumato.evaluation import downstream, extractors, scores
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.storage.artifacts import writing
from stages.cli import main
from stages.state import in_git

SETTINGS = {"classifiers": ["lr"], "seeds": [0], "epochs": 1, "bound": True}


class Screen(StringIO):
    """Standard output and error: of a log, or of a terminal."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def desk(tmp_path, monkeypatch, digits):
    """Prepared digits, a release of other digits, and `stage evaluate` as a function: (exit code, output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(downstream, "MIN_STEPS", 20)
    monkeypatch.setattr(extractors, "EPOCHS", 1)
    monkeypatch.setattr(extractors, "DRAWN_PER_CLASS", {"glyphs": 4, "procedural": 4})
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
        return int(end.value.code or 0), out.getvalue()

    (tmp_path / "pipelines").mkdir()
    data = {"dataset_id": "digits", "source": "npz", "path": str(tmp_path / "source.npz")}
    Path("params.yaml").write_text(
        yaml.safe_dump({"recipe": "r", "profile": None, "data": data, "privacy": {"size_hint": 400}})
    )
    Path("pipelines/r.yaml").write_text("{}\n")
    assert call("prepare", "sensitive")[0] == 0
    card = read_card(Path("data/sensitive/card.json"))
    release(digits, slice(900, 1200), card.classes)

    def evaluate(*words, **settings):
        plan = {
            "stage": "evaluate",
            "enabled": True,
            "dataset_id": "digits",
            "shape": list(card.shape),
            "classes": list(card.classes),
        }
        Path("evaluate.yaml").write_text(
            yaml.safe_dump({**plan, "size_hint": 400, "settings": {**SETTINGS, **settings}})
        )
        return call("evaluate", "--config", "evaluate.yaml", *words)

    return evaluate


def release(digits, rows, classes, labels=None):
    with writing(Path("artifacts/synthesize"), "synthesize") as directory:
        save_images(
            directory, ImageSet(digits.images[rows], digits.labels[rows] if labels is None else labels, classes)
        )


def test_numbers_and_pictures_are_written_and_features_are_kept_privately(desk, monkeypatch):
    monkeypatch.setattr(Screen, "terminal", True)
    code, text = desk()
    assert code == 0, text
    found = json.loads(Path("metrics.json").read_text())
    assert (
        found["scope"] == "local"
        and found["release"]["fidelity"]["space"] == "cnn-glyphs-128"
        and "frechet" in found["real"]["fidelity"]
    )
    assert {p.name for p in Path("evaluation").iterdir()} == {
        "accuracy.png",
        "accuracy.csv",
        "per_class.csv",
        "neighbours.png",
        "detected.png",
    }
    assert (
        Path("evaluation/accuracy.csv").read_text().startswith("model,trained_on,accuracy,std\nrelease: lr,release,0.")
    )
    local = Path("metrics.json"), *Path("evaluation").iterdir()
    assert {stat.S_IMODE(path.stat().st_mode) for path in local} == {0o600}
    assert not Path("state/cache/features").exists()  # features of real images are not kept on disk
    assert (
        "evaluate: release: lr" in text
        and "evaluate: feature network on drawn images (glyphs)" in text
        and "Fidelity" in text
    )
    assert journalled() == ["local"]


def journalled() -> list[str]:
    """What the journal says was done with the sensitive images since they were prepared."""
    journal = [json.loads(line) for line in Path("state/odometer/digits.jsonl").read_text().splitlines()]
    assert journal[0]["kind"] == "genesis"
    return [entry["kind"] for entry in journal[1:]]


def test_warnings_are_shown_and_kept(desk, monkeypatch):
    code, text = desk(fidelity=["frechet"])
    assert code == 0 and "rank-deficient" not in text and "are in metrics.json" in text  # they name numbers
    assert json.loads(Path("metrics.json").read_text())["warnings"]
    monkeypatch.setattr(Screen, "terminal", True)
    code, text = desk(fidelity=["frechet"])
    assert code == 0 and "warning: real: " in text and "rank-deficient" in text


def test_a_log_holds_no_number_from_real_images(desk):
    """Standard output that is no terminal is kept: by CI, by a scheduler, in a file."""
    code, text = desk(fidelity=[])
    found = json.loads(Path("metrics.json").read_text())
    means = [f"{100 * values['lr']['mean']:.1f}" for values in (found["release"], found["real"])]
    assert code == 0 and not any(mean in text for mean in means), text
    assert "metrics.json: local, not to be shared" in text


def git_repository(*ignored: str) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    Path(".git/info/exclude").write_text("\n".join(["/state/", *ignored]) + "\n")
    in_git.cache_clear()


def test_numbers_from_real_images_never_go_where_git_or_an_artifact_would_take_them(desk):
    git_repository("/metrics.json", "/evaluation/")
    for words, said in (
        (("--metrics", "numbers.json"), "git"),
        (("--out", "plots"), "git"),
        (("--metrics", "artifacts/synthesize/metrics.json"), "artifact"),
        (("--out", "artifacts/plots"), "artifact"),
        (("--out", "artifacts/synthesize/plots"), "artifact"),
    ):
        code, text = desk(*words, fidelity=[])
        assert code == 2 and said in text and "Traceback" not in text, (words, text)
        assert not Path(words[1]).exists() and journalled() == []
    assert desk(fidelity=[])[0] == 0  # the usual places, which git ignores
    subprocess.run(["git", "add", "-f", "metrics.json"], check=True)  # tracked all the same
    in_git.cache_clear()
    assert desk(fidelity=[])[0] == 2


def test_a_state_directory_that_git_would_take_is_refused(desk, monkeypatch):
    git_repository("/metrics.json", "/evaluation/")
    Path(".git/info/exclude").write_text("/metrics.json\n/evaluation/\n")
    code, text = desk(fidelity=[])
    assert code == 2 and ".gitignore" in text and "SFUMATO_STATE" in text and "Traceback" not in text
    Path(".gitignore").write_text("/state/\n")
    in_git.cache_clear()
    assert desk(fidelity=[])[0] == 0


def test_without_fidelity_there_is_no_network_and_no_picture_of_features(desk, monkeypatch):
    monkeypatch.setattr(Screen, "terminal", True)
    code, text = desk(fidelity=[])
    assert "release: lr" in text
    assert code == 0 and "feature network" not in text
    assert {p.name for p in Path("evaluation").iterdir()} == {"accuracy.png", "accuracy.csv", "per_class.csv"}


def test_membership_inference_is_a_table_where_asked_for(desk, monkeypatch):
    monkeypatch.setattr(Screen, "terminal", True)
    code, text = desk("--membership", fidelity=[])
    assert code == 0 and "Membership inference" in text and "finds nothing" in text, text
    lines = Path("evaluation/membership.csv").read_text().splitlines()
    assert lines[0] == "name,auc,low,high,hits,members,others" and len(lines) == 3


def test_a_release_that_lacks_a_class_is_judged_as_it_is(desk, digits, monkeypatch):
    """Noisy counts at a small ε leave classes out: the owner needs the verdict then more than ever."""
    monkeypatch.setattr(Screen, "terminal", True)
    release(digits, digits.labels != 6, digits.classes)
    code, text = desk()
    assert code == 0 and "no image of class '6'" in text and "synthesize.count" in text
    found = json.loads(Path("metrics.json").read_text())
    assert found["release"]["lr"]["per_class"][6]["mean"] == 0 and "Verdict: " in text


def test_the_verdict_tells_a_release_of_noise_from_one_of_digits(desk, digits, monkeypatch):
    """In a log it is in metrics.json alone."""
    monkeypatch.setattr("sfumato.evaluation.verdict.FEWEST", 1)  # a secret key holds out about ten of each
    code, text = desk(fidelity=[], epochs=12)
    assert code == 0 and "good" not in text
    assert json.loads(Path("metrics.json").read_text())["verdict"]["level"] in ("fair", "good")
    release(digits, slice(900, 1200), digits.classes, np.random.default_rng(0).permutation(digits.labels[900:1200]))
    assert desk(fidelity=[], epochs=12)[0] == 0
    found = json.loads(Path("metrics.json").read_text())["verdict"]
    assert found["level"] == "useless" and "do not rely on it" in found["sentence"]


def test_a_missing_or_other_weights_file_exits_4_before_real_images_are_read(desk):
    Path("w.pth").write_text("other")
    for settings, words in (
        ({"weights": "none.pth"}, "does not exist"),
        ({"weights": "w.pth"}, "has sha256 d9298a10d1b0735837dc4bd85dac641b"),
    ):
        code, text = desk(extractor="inception", **settings)
        assert code == 4 and words in " ".join(text.split()) and "Traceback" not in text
    assert journalled() == []


def test_the_numbers_say_what_they_belong_to_and_no_digest_of_real_images_is_without_a_key(desk, digits):
    assert desk(fidelity=[])[0] == 0
    first = json.loads(Path("metrics.json").read_text())["identity"]
    assert first["dataset"] == "digits" and first["version"] == read_card(Path("data/sensitive/card.json")).version
    assert (
        first["extractor"] == "none"
        and first["training"] == "light, 1 epochs, last epoch"
        and first["release"].endswith(".dir")
    )
    holdout = np.load("state/data/digits/holdout/images.npy")
    labels = np.load("state/data/digits/holdout/labels.npy")
    plain = {
        sha256(part).hexdigest() for part in (holdout.tobytes(), labels.tobytes(), holdout.tobytes() + labels.tobytes())
    }
    assert first["holdout"] not in plain
    np.save("state/data/digits/holdout/labels.npy", labels[::-1].copy())
    assert desk(fidelity=[], steps=5)[0] == 0
    second = json.loads(Path("metrics.json").read_text())["identity"]
    assert {key for key in first if first[key] != second[key]} == {"holdout", "training"}


def test_a_copy_is_kept_for_the_ledger_of_the_release_and_only_then(desk):
    assert desk(fidelity=[])[0] == 0 and not Path("state/evaluations").exists()
    ledger = build_ledger({"recipe": "r", "accountant": "rdp", "delta": 1e-4, "size_hint": 400, "target": 1.0}, {}, [])
    Path("ledger.json").write_text(ledger_text(ledger))
    assert desk(fidelity=[])[0] == 0
    kept = next(Path("state/evaluations").iterdir())
    found = json.loads(kept.read_text())
    assert found["ledger"] == ledger and kept.name == f"{found['identity']['release']}.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert found["release"] == json.loads(Path("metrics.json").read_text())["release"]


def test_the_accuracies_of_the_classes_are_a_table(desk, monkeypatch):
    monkeypatch.setattr(Screen, "terminal", True)
    monkeypatch.setenv("TERM", "dumb")  # no codes of style in the text
    code, text = desk(fidelity=[], seeds=[0, 1])
    lines = Path("evaluation/per_class.csv").read_text().splitlines()
    assert code == 0 and lines[0] == "trained_on,classifier,class,accuracy,std" and len(lines) == 1 + 2 * 10
    assert "The release, class by class" in " ".join(text.split())


def test_no_seeds_exit_2_before_real_images_are_read(desk):
    code, text = desk(seeds=[])
    assert code == 2 and "seeds" in text and "Traceback" not in text and journalled() == []


def test_a_log_does_not_say_whether_there_are_warnings(desk, monkeypatch):
    """That there are some is a bit on the real images, and the log leaves the machine."""
    measured, said = scores.evaluate_release, set()
    for found in ([], ["real: few images"]):
        monkeypatch.setattr(scores, "evaluate_release", lambda *given, f=found: {**measured(*given), "warnings": f})
        said.add(desk(fidelity=[])[1])
    assert len(said) == 1
