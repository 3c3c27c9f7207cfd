"""`stage forget` and `stage du`: no part of a picture remains, but all records of spending do.

No log shows the number of pictures.
"""

import json
import os
import re
import shutil
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml
from filelock import FileLock, Timeout

from sfumato import Project
from sfumato.data.store import read_card
from sfumato.errors import BudgetError, DataError
from sfumato.planning import folder
from sfumato.planning import forget as library
from sfumato.privacy import authorize
from sfumato.privacy.odometer import Odometer
from sfumato.settings.stage import CARD_PATH, LOCK
from sfumato.settings.stages import STAGES
from sfumato.storage.in_use import until_the_end
from stages.dvc_lock import COPY as WHOLE_LOCK
from stages.dvc_lock import damage
from stages.forget import local_files

# An 8×8 picture that is in each class many times. No other file has these 64 bytes.
MARK = bytes(range(7, 71))
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
    """Write 400 pictures, a quarter of them with the bytes of MARK.

    The folder also contains the project, once it is made.
    """
    folder = tmp_path_factory.mktemp("shelf")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (400, 8, 8), dtype=np.uint8)
    images[::4] = np.frombuffer(MARK, np.uint8).reshape(8, 8)
    images[::4, 7, 7] = np.arange(100)  # equal pictures would all be held out together
    np.savez(
        folder / "real.npz",
        images=images,
        labels=np.arange(400) % 2,
        classes=np.array(["ill", "well"]),
    )
    return folder


@pytest.fixture
def desk(desk, shelf):
    """Create a project with a release, an evaluation, and files that killed commands left.

    The project is made once, and then copied.
    """
    desk.base = PARAMS | {
        "data": {"dataset_id": "clinic", "source": "npz", "path": str(shelf / "real.npz")}
    }
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
    """Return the files that contain at least the first 63 of the 64 bytes of MARK."""
    return [
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and MARK[:63] in path.read_bytes()
    ]


def test_a_forgotten_evaluation_runs_again(desk):
    """DVC does not track the results of `evaluate`. It would skip this stage if `dvc.lock` still
    contained the stage.
    """
    stages = {name: {"cmd": f"stage {name}"} for name in STAGES}
    for name in (LOCK, WHOLE_LOCK):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    desk.run("forget --yes")
    assert {*STAGES} - {*yaml.safe_load(LOCK.read_text())["stages"]} == {"evaluate"}
    assert damage() is None


def test_no_byte_of_a_picture_remains_after_forget(desk):
    assert len(marked()) > 3 and Path("metrics.json").exists()
    before = desk.journal
    desk.run(
        "forget --yes",
        "private copy",
        "is forgotten",
        "What remains: the journal",
        "the path of the pictures",
    )
    assert marked() == []
    left = [path for path in Path("state").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.relative_to("state").parts[0] for path in left} <= {
        *("odometer", "keys", "data", "cache", "released", "access.jsonl")
    }
    assert {path.name for path in COPY.iterdir()} == {"converted.json", "origin.json", "unnamed"}
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


def test_a_forgotten_file_under_another_name_is_refused(desk):
    desk.run("forget --yes")
    desk.params(data={"dataset_id": "other"})
    desk.run("prepare sensitive", "already counted under the dataset id 'clinic'", code=4)


@pytest.mark.parametrize("times", range(1, 7))
def test_killed_in_the_middle_it_is_run_again(desk, monkeypatch, times):
    """`stage forget` is killed at each deletion, and before its entry in the journal."""
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
    desk.run("forget --yes", "no files of dataset" if times == 6 else "clinic")
    assert (
        marked() == []
        and desk.journal[-1]["purpose"] == library.FORGOTTEN
        and not Path("metrics.json").exists()
    )
    entries = desk.journal
    desk.run("forget", "no files of dataset 'clinic' are left: it was forgotten on 20")
    assert desk.journal == entries
    desk.run_all("prepare sensitive", "plan")
    desk.run("count", "already released", code=3)


def test_images_in_use_and_of_other_projects_stay(desk):
    run = next(Path("state/runs").iterdir())
    for name in ("lock", "copying.lock"):
        with FileLock(run / name):
            desk.run("forget --yes", "is locked by another process", code=3)
    desk.run(
        "forget --yes --dataset klinic",
        "dataset 'klinic' has no files",
        "Known datasets: clinic",
        code=2,
    )
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
    """Begin the journal of a data set `a.b` in an empty state directory."""
    odometer = Odometer(tmp_path / "state", "a.b")
    odometer.begin()
    odometer.images.parent.mkdir()
    return odometer


def test_what_a_kill_left_is_deleted_and_nothing_of_like_names(begun, tmp_path):
    mine = {".a.b.7.tmp", ".a.b.7-140.tmp", ".a.b.old"}
    others = {".axb.7.tmp", ".a.b.2.7.tmp", ".a.b.old.7.tmp", ".a.b.old.old", "axb"}
    for name in mine | others:
        begun.images.with_name(name).mkdir()
    library.forget_dataset(tmp_path / "state", "a.b")
    assert {path.name for path in begun.images.parent.iterdir()} & (mine | others) == others


@pytest.mark.parametrize(
    "name",
    ["survey_cache.json", ".survey_cache.json.7.tmp", "looked.json", "printed.txt", "refused.txt"],
)
def test_a_note_that_may_tell_of_images_is_deleted(begun, tmp_path, name):
    (tmp_path / "state" / name).write_bytes(MARK)
    library.forget_dataset(tmp_path / "state", "a.b")
    assert marked(str(tmp_path)) == []


def test_images_that_are_being_prepared_are_not_deleted(begun, tmp_path):
    begun.images.mkdir()
    held = FileLock(begun.images.with_name(".a.b.lock"), is_singleton=False)
    with held, pytest.raises(BudgetError, match="is locked by another process"):
        library.forget_dataset(tmp_path / "state", "a.b")
    assert begun.images.exists()


def test_no_charge_can_be_opened_while_images_are_deleted(begun, tmp_path, monkeypatch):
    (tmp_path / "state/printed.txt").touch()
    deleted = []

    def watched(paths, whole=library.delete):
        for path in paths:
            with pytest.raises(Timeout):  # another process would open a charge in this way
                FileLock(begun.path.with_suffix(".lock"), is_singleton=False).acquire(timeout=0)
            deleted.append(path.name)
        whole(paths)

    monkeypatch.setattr(library, "delete", watched)
    library.forget_dataset(tmp_path / "state", "a.b")
    assert deleted == ["printed.txt"]


def test_nothing_is_deleted_unless_it_is_agreed_to(desk):
    desk.run("forget", "Delete the files listed above?", code=1)
    desk.answers = "n\n"
    desk.run("forget", code=1)
    assert len(marked()) > 3
    desk.answers = "y\n"
    desk.run("forget", "is forgotten")


def test_sizes_that_reveal_a_number_stay_off_a_log(desk):
    said = desk.run(
        "du", "clinic:", "private copy", "kept releases and checkpoints", "this project"
    )
    assert not re.search(r"\d\.\d", said)
    assert "state/printed.txt" in said and ".: data/sensitive, evaluation, metrics.json" in said, (
        "what of a folder"
    )
    desk.terminal = True
    assert len(re.findall(r"\d\.\d", desk.run("du"))) == 7


def test_no_log_shows_that_pictures_were_left_out(desk):
    before = desk.run("du")
    for name in ("left_out.txt", "left_out.json"):
        (COPY / name).write_text("[]")
    assert desk.run("du") == before
    assert "left_out" not in desk.run("forget --yes") and not (COPY / "left_out.txt").exists()


# --- work in progress -----------------------------------------------------------------------------

INIT = (
    "init ../real.npz --yes --epsilon 5 --minutes 1 --one-image-each --dataset-id other --out new"
)
# Command, its exit code, and a function of it that reads real images or writes results from them
WORK = [
    ("evaluate", 0, "sfumato.evaluation.evaluate.evaluate_release"),
    ("evaluate", 0, "sfumato.evaluation.evaluate.keep_private"),
    ("evaluate", 0, "stages.evaluate.write_local"),
    ("evaluate", 0, "sfumato.evaluation.identity.keep_evaluation"),
    ("prepare sensitive", 0, "sfumato.data.prepare.read_source"),
    ("prepare sensitive", 0, "sfumato.data.prepare.kept_fingerprint"),
    ("count", 3, "sfumato.privacy.authorize.kept_fingerprint"),
    ("report --audience owner", 0, "sfumato.release.report.report_page"),
    (INIT, 0, "sfumato.data.survey.replace_private"),
    (INIT, 0, "sfumato.planning.create.write_local"),
]


@pytest.fixture
def before(monkeypatch):
    """Return a function that lets something happen once, before a named function is called."""

    def happens(name: str, what) -> None:
        module, _, function = name.rpartition(".")
        called = getattr(import_module(module), function)

        def first(*given, **more):
            monkeypatch.setattr(name, called)
            what()
            return called(*given, **more)

        monkeypatch.setattr(name, first)

    return happens


def forget() -> None:
    library.forget_dataset(Path("state").absolute(), "clinic")


@pytest.mark.parametrize(("command", "code", "name"), WORK)
def test_nothing_is_forgotten_under_work_with_real_images(desk, before, command, code, name):
    refused = []

    def try_it() -> None:
        with pytest.raises(
            BudgetError, match="'clinic' is in use by .* wait until that process ends"
        ) as error:
            forget()
        refused.append(error)

    if "init" in command:
        shutil.copy(desk.base["data"]["path"], "../real.npz")
        desk.run_all("forget --yes")  # otherwise, the same images are refused under another name
    before(name, try_it)
    Path("state/data/clinic/listing").unlink(missing_ok=True)
    desk.run(command, code=code)
    assert len(refused) == 1
    desk.run("forget --yes", "was forgotten on" if "init" in command else "is forgotten")
    assert marked() == []


def test_preparing_by_the_library_writes_nothing_after_forget(desk, before):
    """An earlier version wrote the fingerprint of the images without the lock."""
    refused = []

    def try_it() -> None:
        with pytest.raises(BudgetError, match="is locked by another process") as error:
            forget()
        refused.append(error)

    (COPY / "listing").unlink(missing_ok=True)
    before("sfumato.data.prepare.kept_fingerprint", try_it)
    folder.prepare_images(Path(), Path("state").absolute())
    assert len(refused) == 1


def test_a_notebook_leaves_no_unpacked_pictures(desk, shelf):
    desk.run("forget --yes")
    options = {
        "images": shelf / "real.npz",
        "minutes": 1,
        "one_image_each": True,
        "dataset_id": "clinic",
    }
    project = Project.create("new", epsilon=5, **options)
    assert marked() == []
    folder.prepare_images(project.folder, Path("state").absolute())
    assert not [*Path("state").glob(".unpacked*")]
    desk.run("forget --yes --dataset clinic", "is forgotten")
    assert marked() == []


def test_latents_are_not_made_of_forgotten_images(desk, before):
    tried = []

    def encode(images):
        with pytest.raises(BudgetError, match="is in use"):
            forget()
        tried.append(len(images))
        return images[:, :, :2, :2]

    def ensure(encoder: str) -> None:
        state = Path("state").absolute()
        bar = nullcontext(lambda *_: None)
        authorize.ensure_latents(
            state, read_card(CARD_PATH), encoder, "latents", lambda: encode, lambda: bar
        )

    ensure("encoder")
    assert tried and [*COPY.glob("latents-*")]
    until_the_end.close()
    before("sfumato.privacy.authorize.use_until_the_end", forget)
    with pytest.raises(DataError, match="no prepared images"):
        ensure("another encoder")
    assert {path.name for path in COPY.iterdir()} == {"converted.json", "origin.json", "unnamed"}


@pytest.mark.parametrize(
    ("command", "door"), [("evaluate", "use_until_the_end"), ("count", "in_use")]
)
def test_work_that_waited_for_the_end_of_forget_writes_nothing(desk, before, command, door):
    kept = read_card(CARD_PATH)
    desk.params(privacy={"spend_again": ["count"], "lifetime_epsilon": 50.0})
    desk.run("plan")
    before(f"sfumato.privacy.authorize.{door}", forget)
    for name in library_files():
        library.delete([name])
    entries = desk.journal
    desk.run(command, "no prepared images of 'clinic'", code=4)
    assert kept == read_card(CARD_PATH) and library_files() == [] and marked() == []
    assert [entry["purpose"] for entry in desk.journal[len(entries) :]] == [library.FORGOTTEN]
    assert [*Path("state/runs").glob("*")] == [] and [*Path("state/evaluations").glob("*")] == []


def library_files() -> list[Path]:
    """Return the files that evaluations left in this project."""
    return [path for path in local_files() if path != CARD_PATH.parent]


# --- what else may survive ------------------------------------------------------------------------


def test_experiments_and_killed_evaluations_are_deleted(desk):
    tried = Path(".dvc/tmp/exps/standalone/tmpab12")
    dead = 2**22 + 1  # larger than any process id
    files = [
        "metrics.json",
        "evaluation/neighbours.png",
        "evaluation/report.html",
        f".metrics.json.{dead}-1.tmp",
    ]
    for file in [*map(tried.joinpath, files), Path(f".metrics.json.{dead}-1.tmp")]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(MARK)
    unfinished = Path(f"state/evaluations/.00.json.{dead}-1.tmp")
    unfinished.write_bytes(MARK)  # was cut before the name of its dataset
    (tried / "params.yaml").touch()
    assert len(marked(".")) > 8
    desk.run("forget --yes", ".dvc/tmp/exps/standalone/tmpab12")
    assert marked(".") == [] and [*tried.iterdir()] == [tried / "params.yaml"]


def cut(journal: Path) -> None:
    journal.write_text(journal.read_text()[:-200])


def edited(journal: Path) -> None:
    journal.write_text(journal.read_text().replace("evaluate", "evaluated"))


def unreadable(journal: Path) -> None:
    journal.write_bytes(b"\xff{]\n" + journal.read_bytes())


def without_its_key(journal: Path) -> None:
    Path("state/keys/clinic.journal").unlink()


def lost(journal: Path) -> None:
    journal.unlink()


def a_folder(journal: Path) -> None:
    journal.unlink()
    journal.mkdir()


@pytest.mark.parametrize("damage", [cut, edited, unreadable, without_its_key, lost, a_folder])
def test_images_are_forgotten_with_any_journal(desk, damage):
    journal = Path("state/odometer/clinic.jsonl")
    damage(journal)
    before = journal.read_bytes() if journal.is_file() else None
    desk.run("du", "clinic:", "private copy")
    stays = "no files of dataset 'clinic' are left. Its journal is invalid and was not changed:"
    for _ in range(2):
        desk.run("forget --yes", stays, "`stage ledger adopt`")
        assert marked() == [] and library_files() == [] and [*Path("state/runs").glob("*")] == []
        assert (journal.read_bytes() if journal.is_file() else None) == before
    desk.run("forget", stays)


def test_the_runs_of_other_datasets_stay_where_a_journal_is_lost(desk):
    theirs = Path("state/runs/theirs")
    theirs.mkdir()
    Path("state/odometer/other.jsonl").write_text('{"kind": "open", "record": {"id": "theirs"}}\n')
    lost(Path("state/odometer/clinic.jsonl"))
    desk.run("forget --yes")
    assert [*Path("state/runs").iterdir()] == [theirs]


def test_the_name_comes_from_the_parameters_without_a_card(desk):
    shutil.rmtree(CARD_PATH.parent)
    desk.run("forget --yes", "dataset 'clinic' is forgotten")
    assert marked() == [] and library_files() == []
    desk.terminal = True
    desk.run("ledger history", "forget", "2 charges")


def test_no_refusal_of_forget_leads_in_a_circle(desk):
    """No refusal tells the owner to prepare images that should be deleted."""
    project = Path.cwd()
    Path("empty").mkdir()
    os.chdir("empty")
    asked = desk.run(
        "forget", "this folder contains no project", "--dataset", "Known datasets: clinic", code=2
    )
    os.chdir(project)
    shutil.move("state", "away")
    asked += desk.run("forget --yes", "has no files of dataset 'clinic'", "SFUMATO_STATE")
    assert library_files() == []
    shutil.move("away", "state")
    desk.run("forget --yes", "is forgotten")
    asked += desk.run("forget", "no files of dataset 'clinic' are left")
    shutil.rmtree("state")
    asked += desk.run("forget", "dataset 'clinic' has no files here", "SFUMATO_STATE", code=2)
    desk.run("du", "total:")
    assert "prepare" not in asked and not Path("state").exists()


def test_another_clone_is_named_and_cleared_separately(desk):
    shutil.copytree(".", "../clone", ignore=shutil.ignore_patterns("state"))
    desk.run("forget --yes", "other clones of the project")
    os.chdir("../clone")
    assert Path("metrics.json").exists()
    desk.run("forget --yes", "metrics.json", "is forgotten")
    assert library_files() == []
    desk.run("forget", "no files of dataset")
