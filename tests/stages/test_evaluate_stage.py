"""`stage evaluate` on a small release: what it writes, where, and what it refuses."""

import json
import stat
import subprocess
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import yaml
from small_record import small_record

from sfumato.data.images import ImageSet, save_images
from sfumato.data.prepare import card_text
from sfumato.data.store import Card, read_card
from sfumato.evaluation import evaluate as library
from sfumato.evaluation.tables import read_local, tables_of
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.privacy.odometer import OPEN, Odometer
from sfumato.privacy.resolved import read_stage_plan
from sfumato.storage.artifacts import writing
from sfumato.storage.records import Records
from stages.state import in_git

SETTINGS = {"classifiers": ["lr"], "seeds": [0], "steps": 20, "bound": True}
CARD = Path("data/sensitive/card.json")


@pytest.fixture(scope="module")
def digits(digits) -> ImageSet:
    """Return digits with margins, 8×12, so that all tests in this file use rectangles."""
    margins = ((0, 0), (0, 0), (2, 2), (0, 0))
    return ImageSet(np.pad(digits.images, margins), digits.labels, digits.classes)


@pytest.fixture
def desk(desk, digits, short_judging):
    """Prepare digits, and write a release of other digits."""
    arrays = {"images": digits.images[:500, ..., 0], "labels": digits.labels[:500]}
    np.savez("source.npz", **arrays, classes=np.array(digits.classes))
    data = {"dataset_id": "digits", "source": "npz", "path": "source.npz"}
    desk.params(recipe="dpdm", profile=None, data=data, privacy={"size_hint": 400})
    desk.run("prepare sensitive")
    release(digits, slice(900, 1200))
    return desk


@pytest.fixture
def evaluate(desk):
    """Return a function that runs `stage evaluate`, and checks its output and exit code."""

    def run(words: str = "", *said: str, code: int = 0, **settings) -> str:
        card = read_card(CARD)
        plan = {"stage": "evaluate", "enabled": True, "dataset_id": "digits", "size_hint": 400}
        plan |= {
            "shape": list(card.shape),
            "classes": list(card.classes),
            "settings": {**SETTINGS, **settings},
        }
        Path("artifacts/plan").mkdir(parents=True, exist_ok=True)
        Path("artifacts/plan/evaluate.yaml").write_text(yaml.safe_dump(plan))
        return desk.run(f"evaluate {words}", *said, code=code)

    return run


@pytest.fixture
def terminal(desk):
    desk.terminal = True


def release(digits, rows, labels=None, records=()):
    with writing(Path("artifacts/synthesize"), "synthesize", (), records) as directory:
        labels = digits.labels[rows] if labels is None else labels
        save_images(directory, ImageSet(digits.images[rows], labels, digits.classes))


def measured() -> dict:
    return json.loads(Path("metrics.json").read_text())


def journalled(desk) -> list[str]:
    """Return the kinds of the journal's entries since the images were prepared."""
    genesis, *found = [entry["kind"] for entry in desk.journal]
    assert genesis == "genesis"
    return found


def test_numbers_pictures_and_features_are_written_privately(desk, evaluate, terminal):
    network = "evaluate: training of a feature network on computer-generated images (glyphs)"
    evaluate("", "evaluate: release: lr", network, "Fidelity")
    found = measured()
    assert found["scope"] == "local" and "frechet" in found["real"]["fidelity"]
    assert found["release"]["fidelity"]["space"] == "cnn-glyphs-128"
    names = {"neighbours.png", "detected.png"}
    assert {path.name for path in Path("evaluation").iterdir()} == names
    local = Path("metrics.json"), *Path("evaluation").iterdir()
    assert {stat.S_IMODE(path.stat().st_mode) for path in local} == {0o600}
    assert not Path("state/cache/features").exists()  # features of real images are not kept on disk
    assert journalled(desk) == ["local"]


def test_warnings_are_shown_on_a_terminal_and_kept(desk, evaluate):
    assert "rank-deficient" not in evaluate("", fidelity=["frechet"])  # warnings contain numbers
    assert measured()["warnings"]
    desk.terminal = True
    evaluate("", "warning: real: ", "rank-deficient", fidelity=["frechet"])


def test_a_log_holds_no_number_from_real_images(evaluate):
    """Output that does not go to a terminal is stored, for example by CI or by a scheduler."""
    text = evaluate("", "metrics.json: local, not to be shared", fidelity=[])
    found = measured()
    means = [f"{100 * values['lr']['mean']:.1f}" for values in (found["release"], found["real"])]
    assert not any(mean in text for mean in means), text


def test_the_test_for_copies_shows_on_a_terminal_only(desk, evaluate, digits):
    text = evaluate("", fidelity=["disclosure"])
    found = measured()
    assert found["verdict"]["sentence"].endswith(f"Copies: {found['disclosure']['sentence']}")
    assert "are nearer" not in text and "sign" not in text
    train = np.load("state/data/digits/sensitive/images.npy")
    assert (
        found["disclosure"]["units"] == len(np.unique(train, axis=0))
        and not found["disclosure"]["rings"]
    )
    with writing(Path("artifacts/synthesize"), "synthesize") as directory:
        save_images(
            directory,
            ImageSet(train, np.load("state/data/digits/sensitive/labels.npy"), digits.classes),
        )
    desk.terminal = True
    evaluate("", "A SIGN OF COPYING", fidelity=["disclosure"])


def by_library(card: Card) -> dict:
    """Evaluate the release by the library instead of the stage, under the last plan."""
    plan = read_stage_plan(Path("artifacts/plan/evaluate.yaml"), "evaluate")
    state = Path("state")
    return library.evaluate_folder(
        plan, Path("artifacts/synthesize"), {}, state, card, Path("pictures")
    )


def test_proposals_test_for_copies_without_training(desk, evaluate, terminal):
    assert "feature network" not in evaluate(
        "", "no sign of copying", extractor="pixels", fidelity=["disclosure"]
    )
    assert Path("evaluation/neighbours.png").exists()
    assert not [table.title for table in tables_of(measured()) if "Fidelity" in table.title]


def test_a_provided_hold_out_qualifies_the_test_for_copies(evaluate):
    folder = Path("state/data/digits")
    images = np.load(folder / "holdout/images.npy")
    images[0] = np.load(folder / "sensitive/images.npy")[0]
    np.save(folder / "holdout/images.npy", images)
    evaluate(extractor="pixels", fidelity=["disclosure"])
    card = replace(read_card(CARD), split="official")
    (folder / "card.json").write_bytes(card_text(asdict(card)))
    found = measured(), by_library(card)
    drawn, brought = (one["verdict"]["sentence"] for one in found)
    assert brought == f"{drawn} {library.NOT_BY_CHANCE}"
    drawn, brought = (one["warnings"][0] for one in found)
    assert "into test/" not in drawn and "into test/" in brought


def test_the_library_measures_what_the_stage_does(evaluate):
    evaluate(fidelity=["frechet"])
    assert by_library(read_card(CARD)) == measured()


def git_repository(*ignored: str) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    Path(".git/info/exclude").write_text("\n".join(ignored) + "\n")
    in_git.cache_clear()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--metrics numbers.json", "git"),
        ("--out plots", "git"),
        ("--metrics artifacts/synthesize/metrics.json", "artifact"),
        ("--out artifacts/plots", "artifact"),
        ("--out artifacts/synthesize/plots", "artifact"),
    ],
)
def test_local_numbers_never_go_into_git_or_artifacts(desk, evaluate, words, said):
    git_repository("/state/", "/metrics.json", "/evaluation/")
    evaluate(words, said, code=2, fidelity=[])
    assert not Path(words.split()[1]).exists() and journalled(desk) == []


def test_local_numbers_go_where_git_ignores_them(evaluate):
    git_repository("/state/", "/metrics.json", "/evaluation/")
    evaluate(fidelity=[])
    subprocess.run(["git", "add", "-f", "metrics.json"], check=True)
    in_git.cache_clear()
    evaluate(code=2, fidelity=[])


def test_a_state_directory_that_git_would_take_is_refused(evaluate):
    git_repository("/metrics.json", "/evaluation/")
    evaluate("", ".gitignore", "SFUMATO_STATE", code=2, fidelity=[])
    Path(".gitignore").write_text("/state/\n")
    in_git.cache_clear()
    evaluate(fidelity=[])


def test_a_release_that_lacks_a_class_is_judged_as_it_is(evaluate, digits, terminal):
    """Noisy counts at a small ε may leave out classes. The owner then needs the verdict most."""
    release(digits, digits.labels != 6)
    evaluate("", "these classes: '6'", "synthesize.count", "Verdict: ")
    assert measured()["release"]["lr"]["per_class"][6]["mean"] == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("blank", "has only 0 (of "),
        ("one picture", "has only 1 (of 1 images)"),
        ("one class", "all hold-out images belong to the same class"),
        ("the training images", "nearly all hold-out images of a class resemble training images"),
    ],
)
def test_a_hold_out_that_cannot_judge_is_explained(desk, evaluate, kind, why):
    """A release is evaluated after the budget is spent, so all other results must be written."""
    Path("evaluation").mkdir()
    Path("evaluation/detected.png").write_bytes(b"of an earlier release")
    folder = Path("state/data/digits")
    images, labels = (np.load(folder / "holdout" / name) for name in ("images.npy", "labels.npy"))
    rows = {
        "blank": labels >= 0,
        "one picture": np.arange(len(labels)) == 0,
        "one class": labels == labels[0],
    }
    if kind in rows:
        images, labels = images[rows[kind]] * (kind != "blank"), labels[rows[kind]]
    else:
        images, labels = (
            np.load(folder / "sensitive" / name) for name in ("images.npy", "labels.npy")
        )
    np.save(folder / "holdout/images.npy", images)
    np.save(folder / "holdout/labels.npy", labels)
    assert why not in evaluate()
    found = measured()
    assert found["release"] == found["real"] == {} and why in found["verdict"]["sentence"]
    assert ("copies of training images" in found["warnings"][0]) == (kind == "the training images")
    drawn = {path.name for path in Path("evaluation").glob("*.png")}
    assert drawn == {"neighbours.png"} and found["identity"]
    desk.terminal = True
    evaluate("", "Verdict: cannot be judged", why)
    assert why in read_local(Path("metrics.json"), Path("evaluation"), Path("artifacts")).verdict


def test_the_verdict_tells_a_release_of_noise_from_one_of_digits(evaluate, digits, monkeypatch):
    """In a log, the verdict is not shown. It is only in metrics.json."""
    # A secret key selects only about ten hold-out images of each class
    monkeypatch.setattr("sfumato.evaluation.verdict.FEWEST_OF_A_CLASS", 1)
    assert "good" not in evaluate(fidelity=[], epochs=12)
    assert measured()["verdict"]["level"] in ("fair", "good")
    release(digits, slice(900, 1200), np.random.default_rng(0).permutation(digits.labels[900:1200]))
    evaluate(fidelity=[], epochs=12)
    found = measured()["verdict"]
    assert found["level"] == "useless" and "do not rely on it" in found["sentence"]


@pytest.mark.parametrize(
    ("images", "behind", "judged"),
    [("the same", True, True), ("others", True, False), ("others", False, True)],
)
def test_a_release_of_other_images_is_not_judged(desk, evaluate, digits, images, behind, judged):
    """If data.holdout_fraction was raised after a release, the release depends on images that are
    now in the hold-out.
    """
    record = small_record(1, Mechanism(noise_multiplier=5))
    release(digits, slice(900, 1200), records=[record] * behind)
    if images == "the same":
        images = Path("state/data/digits/fingerprint").read_text()
    Odometer(Path("state"), "digits").append(OPEN, images=images, record=record)
    evaluate(extractor="pixels", fidelity=["disclosure"])
    found = measured()
    titles = [table.title for table in tables_of(found)]
    assert titles and any(title.startswith("The best") for title in titles) is judged
    assert ("used for training" in json.dumps(found)) is judged
    assert (found["verdict"]["sentence"] != f"cannot be judged: {library.OTHER_IMAGES}.") is judged
    assert (library.OTHER_IMAGES not in found["warnings"]) is judged


def test_the_verdict_counts_persons_not_images(evaluate, digits, monkeypatch):
    """With one person per class, 30 % is not clearly better than guessing."""
    monkeypatch.setattr("sfumato.evaluation.verdict.FEWEST_OF_A_CLASS", 1)
    release(digits, digits.labels < 3)
    evaluate(fidelity=[])
    assert measured()["verdict"]["level"] == "poor"
    card = card_text(asdict(replace(read_card(CARD), unit="group")))
    for folder in (CARD.parent, Path("state/data/digits")):
        (folder / "card.json").write_bytes(card)
    for part in ("sensitive", "holdout"):
        folder = Path("state/data/digits") / part
        np.save(folder / "groups.npy", np.load(folder / "labels.npy"))
    evaluate(fidelity=[])
    assert measured()["verdict"]["level"] == "useless"


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"extractor": "inception", "weights": "none.pth"}, 4, "does not exist"),
        (
            {"extractor": "inception", "weights": "w.pth"},
            4,
            "its sha256 is d9298a10d1b0735837dc4bd85dac641b",
        ),
        ({"seeds": []}, 2, "seeds"),
    ],
)
def test_impossible_settings_are_refused_before_reading(desk, evaluate, settings, code, words):
    Path("w.pth").write_text("other")
    evaluate("", words, code=code, **settings)
    assert journalled(desk) == []


def test_the_numbers_name_their_release_without_plain_digests(evaluate):
    evaluate(fidelity=[])
    first = measured()["identity"]
    assert first["dataset"] == "digits" and first["version"] == read_card(CARD).version
    assert first["extractor"] == "none" and first["training"] == "light, 20 steps, last epoch"
    assert first["release"].endswith(".dir")
    holdout = np.load("state/data/digits/holdout/images.npy").tobytes()
    labels = np.load("state/data/digits/holdout/labels.npy")
    plain = {
        sha256(part).hexdigest() for part in (holdout, labels.tobytes(), holdout + labels.tobytes())
    }
    assert first["holdout"] not in plain
    np.save("state/data/digits/holdout/labels.npy", labels[::-1].copy())
    evaluate(fidelity=[], steps=5)
    second = measured()["identity"]
    assert {key for key in first if first[key] != second[key]} == {"holdout", "training"}


def test_a_copy_is_kept_only_for_the_releases_ledger(evaluate):
    evaluate(fidelity=[])
    assert not Path("state/evaluations").exists()
    ledger = build_ledger(
        {"recipe": "r", "accountant": "rdp", "delta": 1e-4, "size_hint": 400, "target": 1.0},
        Records(),
        [],
    )
    Path("ledger.json").write_text(ledger_text(ledger))
    evaluate(fidelity=[])
    kept = next(Path("state/evaluations").iterdir())
    found = json.loads(kept.read_text())
    assert found["ledger"] == ledger and kept.name == f"{found['identity']['release']}.json"
    assert (
        stat.S_IMODE(kept.stat().st_mode) == 0o600
        and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    )
    assert found["release"] == measured()["release"]


def test_without_fidelity_there_are_accuracies_only(evaluate, terminal, environment):
    environment["TERM"] = "dumb"  # no codes of style in the text
    text = evaluate("", "release: lr", "The release, class by class", fidelity=[], seeds=[0, 1])
    assert "feature network" not in text
    assert not list(Path("evaluation").iterdir())
    assert [len(measured()[name]["lr"]["per_class"]) for name in ("release", "real")] == [10, 10]


def test_a_log_does_not_say_whether_there_are_warnings(evaluate, monkeypatch):
    """Warnings depend on the real images, and the log leaves the machine."""
    real = library.evaluate_release
    said = set()
    for found in ([], ["real: few images"]):
        monkeypatch.setattr(
            library, "evaluate_release", lambda *given, f=found: {**real(*given), "warnings": f}
        )
        said.add(evaluate(fidelity=[]))
    assert len(said) == 1
