"""`stage forget`, `stage du`: nothing of a picture stays, what was spent does, and no log tells how many they are."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock, Timeout

from sfumato.errors import BudgetError
from sfumato.planning import forget as library
from sfumato.privacy.odometer import Odometer
from sfumato.settings.stages import STAGES

MARK = bytes(range(7, 71))  # a picture of 8×8, which each class holds many times: 64 bytes that no other file has
COPY = Path("state/data/clinic")


PARAMS = {
    "recipe": "dpdm",
    "profile": None,
    "run": ["count", "pretrain", "finetune", "synthesize", "evaluate"],
    "privacy": {"epsilon": 5.0, "size_hint": 300},
    "model": {"width": 8, "multipliers": [1, 1]},
    "pretrain": {"steps": 1, "batch": 8},
    "finetune": {"steps": 2, "batch": 20, "draws": 1},
    "synthesize": {"count": 20, "steps": 2},
    "evaluate": {"classifiers": ["lr"], "seeds": [0], "epochs": 1, "bound": False, "fidelity": []},
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    """A folder with 400 such pictures, and with the project once it is made."""
    folder, rng = tmp_path_factory.mktemp("shelf"), np.random.default_rng(0)
    images = rng.integers(0, 256, (400, 8, 8), dtype=np.uint8)
    images[::4] = np.frombuffer(MARK, np.uint8).reshape(8, 8)
    images[::4, 7, 7] = np.arange(100)  # or they would all be held out together
    np.savez(folder / "real.npz", images=images, labels=np.arange(400) % 2, classes=np.array(["ill", "well"]))
    return folder


@pytest.fixture
def desk(desk, shelf):
    """A project with a release of them, an evaluation, and what killed commands left. It is made once, and copied."""
    desk.base = PARAMS | {"data": {"dataset_id": "clinic", "source": "npz", "path": str(shelf / "real.npz")}}
    if (shelf / "project").exists():
        shutil.copytree(shelf / "project", ".", dirs_exist_ok=True)
        return desk
    desk.params()
    *stages, evaluate = STAGES
    desk.run_all("prepare sensitive", "prepare public", "plan", *stages, "ledger write", evaluate)
    shutil.copytree(COPY, COPY.with_name(".clinic.999999.tmp"))
    shutil.copytree(COPY, "state/.unpacked.999999.tmp")
    (next(Path("state/runs").iterdir()) / "checkpoint").write_bytes(MARK)
    shutil.copytree(".", shelf / "project")
    return desk


def marked(folder: str = "state") -> list[Path]:
    """The files that hold the picture, but for its last byte."""
    return [path for path in Path(folder).rglob("*") if path.is_file() and MARK[:63] in path.read_bytes()]


def test_no_byte_of_a_picture_stays_and_a_second_release_is_refused(desk):
    assert len(marked()) > 3 and Path("metrics.json").exists()
    before = desk.journal
    desk.run("forget --yes", "private copy", "is forgotten", "What stays: the journal")
    assert marked() == []
    left = [path for path in Path("state").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.relative_to("state").parts[0] for path in left} <= {"odometer", "keys", "data", "cache", "released"}
    assert {path.name for path in COPY.iterdir()} == {"origin.json", "unnamed"}
    assert not any(Path(name).exists() for name in ("metrics.json", "evaluation", "data/sensitive"))
    assert Path("artifacts/synthesize/images.npy").exists()
    assert desk.journal[:-1] == before and desk.journal[-1]["purpose"] == library.FORGOTTEN
    desk.terminal = True
    desk.run("ledger history --dataset clinic", "forget", "2 charges")
    desk.terminal = False
    desk.run_all("prepare sensitive", "plan")
    desk.run("count", "already released", code=3)
    desk.params(finetune={"steps": 3})
    desk.run("plan", "privacy.lifetime_epsilon=5 of dataset 'clinic' would be exceeded", code=3)
    desk.params(data={"version": "second"})
    desk.run("prepare sensitive")
    desk.run("plan", "would be exceeded", code=3)


def test_the_same_file_under_another_name_is_refused_after_it_was_forgotten(desk):
    desk.run("forget --yes")
    desk.params(data={"dataset_id": "other"})
    desk.run("prepare sensitive", "counted as 'clinic' already", code=4)


@pytest.mark.parametrize("times", range(1, 7))
def test_killed_in_the_middle_it_is_run_again(desk, monkeypatch, times):
    """At each deletion, and before its entry in the journal."""
    calls = []

    def dying(*given, whole=library.delete, **more):
        calls.append(given)
        if len(calls) == times:
            raise KeyboardInterrupt
        return whole(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(library, "delete", dying)
        code, _ = desk("forget", "--yes")
    assert (code == 0) == (times == 6)
    desk("forget", "--yes", "--dataset", "clinic")
    assert marked() == [] and desk.journal[-1]["purpose"] == library.FORGOTTEN and not Path("metrics.json").exists()
    desk.run_all("prepare sensitive", "plan")
    desk.run("count", "already released", code=3)


def test_images_that_are_in_use_and_those_of_others_stay(desk):
    run = next(Path("state/runs").iterdir())
    with FileLock(run / "lock"):
        desk.run("forget --yes", "is held by another process", code=3)
    desk.run("forget --yes --dataset klinic", "was never begun", code=3)
    assert len(marked()) > 3
    shutil.copytree(COPY, COPY.with_name("clinic.2"))
    shutil.copytree(COPY, COPY.with_name(".clinic.2.999999.tmp"))
    theirs = Path("state/evaluations/0.json")
    theirs.write_text(json.dumps({"identity": {"dataset": "clinic.2"}}))
    desk.run("forget --yes")
    assert [*theirs.parent.iterdir()] == [theirs]
    assert {path.parts[2] for path in marked()} == {"clinic.2", ".clinic.2.999999.tmp"}


def test_the_end_of_another_data_set_leaves_this_project_alone(desk):
    Odometer(Path("state").absolute(), "other").begin()
    desk.run("forget --yes --dataset other")
    assert marked(str(COPY)) and Path("metrics.json").exists() and Path("data/sensitive").exists()


@pytest.fixture
def begun(tmp_path) -> Odometer:
    """The journal of a data set `a.b` in an empty state directory."""
    odometer = Odometer(tmp_path / "state", "a.b")
    odometer.begin()
    odometer.images.parent.mkdir()
    return odometer


def test_what_a_kill_left_is_deleted_and_nothing_of_like_names(begun, tmp_path):
    mine = {".a.b.7.tmp", ".a.b.7-140.tmp", ".a.b.old"}
    others = {".axb.7.tmp", ".a.b.2.7.tmp", ".a.b.old.7.tmp", ".a.b.old.old", "axb"}
    for name in mine | others:
        begun.images.with_name(name).mkdir()
    library.forget(tmp_path / "state", "a.b")
    assert {path.name for path in begun.images.parent.iterdir()} & (mine | others) == others


@pytest.mark.parametrize("name", ["looked.json", ".looked.json.7.tmp", "printed.txt", "refused.txt"])
def test_a_note_that_may_tell_of_images_is_deleted(begun, tmp_path, name):
    (tmp_path / "state" / name).write_bytes(MARK)
    library.forget(tmp_path / "state", "a.b")
    assert marked(str(tmp_path)) == []


def test_images_that_are_being_prepared_are_not_deleted(begun, tmp_path):
    begun.images.mkdir()
    held = FileLock(begun.images.with_name(".a.b.lock"), is_singleton=False)
    with held, pytest.raises(BudgetError, match="is held by another process"):
        library.forget(tmp_path / "state", "a.b")
    assert begun.images.exists()


def test_no_charge_can_be_opened_while_images_are_deleted(begun, tmp_path, monkeypatch):
    (tmp_path / "state/printed.txt").touch()
    deleted = []

    def watched(paths, whole=library.delete):
        for path in paths:
            with pytest.raises(Timeout):  # as another process would open a charge
                FileLock(begun.path.with_suffix(".lock"), is_singleton=False).acquire(timeout=0)
            deleted.append(path.name)
        whole(paths)

    monkeypatch.setattr(library, "delete", watched)
    library.forget(tmp_path / "state", "a.b")
    assert deleted == ["printed.txt"]


def test_nothing_is_deleted_unless_it_is_agreed_to(desk):
    desk.run("forget", "Delete what is listed?", code=1)
    desk.answers = "n\n"
    desk.run("forget", code=1)
    assert len(marked()) > 3
    desk.answers = "y\n"
    desk.run("forget", "is forgotten")


def test_sizes_which_tell_how_many_images_there_are_stay_off_a_log(desk):
    said = desk.run("du", "clinic:", "private copy", "kept releases and checkpoints", "this project")
    assert not re.search(r"\d\.\d", said)
    assert "state/printed.txt" in said and ".: data/sensitive, evaluation, metrics.json" in said, "what of a folder"
    desk.terminal = True
    assert len(re.findall(r"\d\.\d", desk.run("du"))) == 7
