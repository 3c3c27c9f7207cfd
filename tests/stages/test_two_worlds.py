"""A log depends on public facts only: run every command in two worlds, with one image and without
it.
"""

import itertools
import os
import resource
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parts import of_baselines
from PIL import Image
from small_lock import write_lock
from test_recipes import RECIPES, SMALL

from sfumato.data import decoding
from sfumato.planning import estimate
from sfumato.settings.recipes import overlaid
from sfumato.settings.stages import QUERIES, STAGES

VICTIM = "in/3/Maria_1902.png"
# Recipes that together have all stages
TOGETHER = [
    "full",
    "teacher-generator",
    "sapf-pixel",
    "dp-mepf",
    "teacher-gaussian",
    *of_baselines("baseline_settings", "RECIPES"),
]
AFTER = (
    "ledger write",
    "ledger check",
    "ledger show",
    "ledger history",
    "report",
    "report --audience owner",
)
CLINIC = {
    "data": {"dataset_id": "clinic", "source": "imagefolder", "path": "in"},
    "privacy": {"lifetime_epsilon": "unlimited"},
    "evaluate": {"steps": 2, "seeds": [0], "classifiers": ["lr"], "fidelity": ["frechet"]},
}
Log = list[tuple[str, int, str]]  # each command, its exit code and what it printed


def run_of(name: str) -> list[str]:
    """Return the stages that a recipe runs.

    For `teacher-generator`, `student` is added, because no recipe runs it.
    """
    added = {"student"} if name == "teacher-generator" else set()
    return [stage for stage in STAGES if stage in added.union(RECIPES[name]["run"])]


def test_these_recipes_run_every_stage():
    assert set().union(*map(run_of, TOGETHER)) == {*STAGES}


@pytest.fixture
def world(
    desk, digits, monkeypatch, expect_seconds, short_judging, settled
) -> Callable[[bool], Callable[..., Log]]:
    """Return a function that begins a new project, with the victim's picture or without it.

    That function returns `run`. `run` runs commands and returns their log.
    """
    expect_seconds(lambda params: dict.fromkeys(estimate.FRAME, 60.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    read = decoding.decode

    def decode(path, *given, **more):
        print(f"{path} is odd")  # libraries may print this
        return read(path, *given, **more)

    monkeypatch.setattr(decoding, "decode", decode)

    def run(*commands: str) -> Log:
        log = []
        for command in commands:
            if command == "ledger check":
                write_lock()
            log.append((command, *desk(*command.split())))
        return log

    def begin(whole: bool) -> Callable[..., Log]:
        numbers = itertools.count()
        monkeypatch.setattr(secrets, "token_hex", lambda size=16: f"{next(numbers):0{2 * size}x}")
        for name in ("state", "artifacts", "data", "evaluation", "in"):
            shutil.rmtree(name, ignore_errors=True)
        for name in ("dvc.lock", "ledger.json", "metrics.json", "params.yaml"):
            Path(name).unlink(missing_ok=True)
        for i in range(200 + whole):
            file = (
                Path(VICTIM) if i == 200 else Path("in", str(digits.labels[i]), f"person_{i}.png")
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            # Digit 200 would be held out, so the victim's picture is digit 201
            Image.fromarray(digits.images[i + (i == 200), ..., 0]).save(file)
        return run

    desk.base = overlaid(SMALL, CLINIC)
    return begin


@pytest.mark.parametrize("name", TOGETHER)
def test_every_stage_prints_the_same_without_one_image(world, desk, name):
    """The logs do not reveal a withdrawal either.

    In one world, releases are restored after an image was removed, in the other after no change.
    """
    logs = []
    used = run_of(name)
    local = ("evaluate", *AFTER) if name == "dp-mepf" else ()
    stages = [stage for stage in (STAGES if local else used) if stage != "evaluate"]
    for whole in (True, False):
        run = world(whole)
        select = {"ratio": 0.2} if "histogram" in used else {}
        stream = (
            {"synthesize": {"stream": True}, "student": {"steps": 2}} if "student" in used else {}
        )
        desk.params(recipe=name, run=used, select=select, **stream)
        log = run(
            "prepare sensitive",
            "prepare public",
            "doctor",
            "plan --dry-run",
            "plan",
            *stages,
            *local,
        )
        before = next(Path("state").rglob("fingerprint")).read_text()
        Path(VICTIM).unlink(missing_ok=True)
        log += run("prepare sensitive", "plan --dry-run", "plan")
        assert (next(Path("state").rglob("fingerprint")).read_text() != before) == whole
        for query in (stage for stage in used if stage in QUERIES):
            shutil.rmtree(f"artifacts/{query}")
            ((*_, text),) = back = run(query)
            assert "restored, nothing" in text
            log += back
        log += run(*local)
        assert not [entry for entry in log if entry[1]]
        logs.append(log)
    for one, other in zip(*logs, strict=True):
        assert one == other
    printed = str(logs).replace(str(Path.cwd()), "")
    assert not any(word in printed for word in ("person_", "Maria", "201", "160 "))


def failing(desk) -> None:
    decoding.fit = None
    Path("state/data/clinic/listing").unlink()


REASONS = {
    "no picture": lambda desk: Path("in/0/Zoe_1931.png").write_bytes(b"none"),
    "two of them": lambda desk: [
        Path(f"in/0/{name}_1931.png").write_bytes(b"none") for name in ("Zoe", "Ann")
    ],
    "another size": lambda desk: Image.new("L", (9, 9)).save("in/0/Zoe_1931.png"),
    "a deep picture": lambda desk: Image.new("I;16", (8, 8)).save("in/0/Zoe_1931.png"),
    "an unreadable file": lambda desk: os.mkfifo("in/0/Zoe_1931.png"),
    "a second name for the same images": lambda desk: desk.params(data={"dataset_id": "second"}),
    "a pattern that matches no name": lambda desk: desk.params(
        data={"groups": {"pattern": "^(Zoe)_"}}, privacy={"unit": "group"}
    ),
    "other groups of spent images": lambda desk: desk.params(
        data={"groups": {"pattern": r"_(\d)\d*\."}}, privacy={"unit": "group"}
    ),
    "a library that fails": failing,
}


def test_a_refusal_is_the_same_for_any_reason(world, desk, monkeypatch):
    monkeypatch.setattr(decoding, "fit", decoding.fit)  # restored afterwards
    fit = decoding.fit
    said = set()
    reasons = set()
    for whole in (True, False):
        for reason, spoil in REASONS.items():
            run = world(whole)
            desk.params(recipe="dp-merf")
            log = run(
                "prepare sensitive",
                *(("prepare public", "plan", "count") if "spent" in reason else ()),
            )
            assert not [entry for entry in log if entry[1]]
            spoil(desk)
            said |= {*run("prepare sensitive")}
            decoding.fit = fit
            assert Path("state/refused.txt").exists(), (reason, said)
            reasons.add(Path("state/refused.txt").read_text().rpartition("\n\n")[0])
    assert len(said) == 1 and len(reasons) >= len(REASONS)
    ((_, code, text),) = said
    assert code == 4 and text.count("\n") == 1 and "refused.txt" in text


@pytest.mark.parametrize("spoil", ["images.npy", "labels.npy"])
def test_a_query_does_not_say_how_a_private_copy_is_damaged(world, desk, spoil):
    said = set()
    for whole, size in itertools.product((True, False), (7, 150)):
        run = world(whole)
        desk.params(recipe="dp-merf")
        run("prepare sensitive", "prepare public", "plan", "count")
        array = np.load(f"state/data/clinic/sensitive/{spoil}")
        np.save(f"state/data/clinic/sensitive/{spoil}", array[:size])
        shutil.rmtree("artifacts/count")
        said |= {(code, text) for _, code, text in run("count")}
    ((code, text),) = said
    assert code == 4 and "refused.txt" in text


def test_init_prints_the_same_with_and_without_one_image(world):
    logs = set()
    for whole in (True, False):
        run = world(whole)
        logs.add(tuple(run("init in --out project --epsilon 5 --yes --size-hint 200 --force")))
    ((_, code, text),) = logs.pop()
    assert not logs and code == 0 and "person_" not in text


def test_a_log_does_not_say_that_a_picture_is_left_out(world, desk, monkeypatch):
    """Real data determine which pictures are broken. Only a private file names them."""
    logs = set()
    for spoil in (None, "text", "gone"):
        run = world(spoil != "gone")
        desk.params(recipe="dp-merf", data={"skip": "1%"})
        if spoil == "text":
            Path(VICTIM).write_text("no picture")
        log = run("prepare sensitive", "prepare public", "plan", "count")
        log += run("init in --out project --epsilon 5 --yes --size-hint 200 --force --skip 1%")
        assert not [entry for entry in log if entry[1]]
        assert Path("project/params.yaml").read_text().count("skip: 0.01") == 1
        assert Path("state/data/clinic/left_out.txt").exists() == (spoil == "text")
        logs.add(tuple(log))
    assert len(logs) == 1


def test_settings_alone_are_refused_by_name(world, desk):
    run = world(True)
    for changes, words in (
        ({"path": None}, "data.path is missing"),
        ({"source": "imagefoldr"}, "did you mean 'imagefolder'"),
        ({"label_column": "found"}, "data.classes is missing"),
    ):
        desk.params(data=changes)
        ((_, code, text),) = run("prepare sensitive")
        assert code == 2 and words in text


def test_opening_sensitive_files_leaves_no_core_dump(world, desk):
    run = world(True)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    desk.params()
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    assert run("prepare sensitive")[0][1] == 0
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0


NATIVE = """
import logging, os, sys, warnings
from sfumato.data import decoding, shards
from stages.cli import main
shards.BLOCK_SIZE = 50  # so that the folder has several
read = decoding.decode
def decode(path, *given, **more):
    os.write(1, f"Maria out of {__name__}\\n".encode()), os.write(2, b"Maria err\\n")
    print("Maria", path), print("Maria", file=sys.stderr)
    warnings.warn(f"Maria warns of {path}")
    logging.getLogger("pictures").warning("Maria logs %s", path)
    return read(path, *given, **more)
decoding.decode = decode
if __name__ == "__main__":  # not in a worker, which runs this file too
    main()
"""


@pytest.mark.parametrize("workers", [None, 2])
def test_what_libraries_print_by_themselves_is_kept_privately(world, desk, here, workers):
    """Libraries in C write to file descriptors, and each worker has its own."""
    world(True)
    desk.params(recipe="dp-merf")
    (here / "native.py").write_text(NATIVE)
    words = ["native.py", "prepare", "sensitive"]
    if workers:
        words += ["--workers", str(workers)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(
        "data/sensitive/card.json: dataset"
    )
    assert "Maria" not in done.stdout
    kept = Path("state/printed.txt")
    module = "__mp_main__" if workers else "__main__"
    words = (f"Maria out of {module}\n", "Maria err", "Maria in/", "Maria warns", "Maria logs")
    text = kept.read_text()
    # Two processes may write into each other's lines
    assert min(text.count(word) for word in words) > 150, [text.count(word) for word in words]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_terminal_shows_all(world, desk):
    run = world(True)
    desk.terminal = True
    desk.params(recipe="dp-merf")
    # Pictures are decoded in this process, by the patched `decode` in `world`
    assert "in/0/person_0.png is odd" in run("prepare sensitive")[0][2]
    Path("in/0/Zoe_1931.png").write_bytes(b"none")
    ((_, code, text),) = run("prepare sensitive")
    assert code == 4 and "Zoe_1931.png cannot be read" in text
