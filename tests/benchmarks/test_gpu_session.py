"""The measuring script for a borrowed GPU writes each result to disk at once, and ends in time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_session
import pytest
from program import call

BENCHMARKS = Path(gpu_session.__file__).parent


@pytest.fixture
def run(environment, tmp_path):
    """Return a function that runs the program on the CPU at small sizes.

    The function returns the exit code, and the lines on disk without the first, which describes the
    machine.
    """
    environment["SFUMATO_DEVICE"] = "cpu"

    def on_the_cpu(*arguments: str) -> tuple[int, list[dict]]:
        words = ["gpu_session.py", "--device", "cpu", "--tiny", "--out", str(tmp_path), *arguments]
        code = call(gpu_session.main, *words, screen=sys.stdout)
        return code, lines(tmp_path)[1:]

    return on_the_cpu


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]


def test_the_cheap_parts_run_without_a_card(run):
    code, found = run("--only", "ceilings", "graph", "drawing", "stages", "--seconds", "35")
    assert code == 0
    assert {line["part"] for line in found if "part" in line} >= {"ceilings", "others"}
    skipped = {line["skipped"]: line["reason"] for line in found if "skipped" in line}
    assert skipped["graph"] == "needs a GPU"
    assert "s are left, but this part needs 40 s" in skipped["stages"]


def test_a_part_over_its_seconds_is_cut_and_its_findings_stay(run, monkeypatch):
    def endless(found):
        found.row("endless", "one thing", 1.0, "")
        while True:
            try:
                time.sleep(0.1)
            except Exception:
                pytest.fail("a part took the end of the seconds for a failure of its own")

    monkeypatch.setattr(
        gpu_session, "PARTS", {"endless": (endless, 0), "late": (gpu_session.ceilings, 10)}
    )
    start = time.perf_counter()
    code, found = run("--seconds", "5")
    assert code == 0 and time.perf_counter() - start < 5
    assert found[0]["what"] == "one thing"
    assert [line["skipped"] for line in found[1:]] == ["endless", "late"]


def test_a_row_is_on_disk_before_the_next_is_measured(run, monkeypatch, tmp_path):
    def part(found):
        found.row("part", "first", 1.0, "")
        assert lines(tmp_path)[-1]["what"] == "first"
        found.check("all is well", True, "yes")
        assert lines(tmp_path)[-1]["what"] == "all is well"

    monkeypatch.setattr(gpu_session, "PARTS", {"part": (part, 0)})
    code, found = run()
    assert code == 0 and [line.get("ended") for line in found] == [None, None, "part"]


def test_a_resumed_session_leaves_out_parts_that_ended(run, monkeypatch, tmp_path):
    def part(name, error=None):
        def row(found):
            found.row("part", name, 1.0, "")
            if error:
                raise error

        return row, 0

    parts = {"first": part("first"), "second": part("second", OSError("no card"))}
    monkeypatch.setattr(gpu_session, "PARTS", parts)
    assert run()[0] == 1
    parts["second"] = part("second")
    code, found = run("--resume")
    assert code == 0
    assert [line["what"] for line in found if "value" in line] == ["first", "second", "second"]
    with (tmp_path / "session.jsonl").open("a") as file:
        file.write('{"ended": "cut o')
    assert gpu_session.ended_parts(tmp_path / "session.jsonl") == {"first", "second"}


def test_a_part_that_breaks_does_not_take_the_others_along(run, monkeypatch):
    def broken(found):
        raise RuntimeError("out of memory")

    def missing(found):
        raise ImportError("No module named 'elsewhere'")

    def fine(found):
        found.row("fine", "a thing", 1.0, "")

    monkeypatch.setattr(
        gpu_session, "PARTS", {"broken": (broken, 0), "missing": (missing, 0), "fine": (fine, 0)}
    )
    code, found = run()
    assert code == 1 and not found[0]["passed"]
    assert found[1]["skipped"] == "missing" and found[2]["part"] == "fine"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_step_that_cannot_run_here_is_skipped(run, monkeypatch):
    def too_large(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(gpu_session, "graphed", too_large)
    monkeypatch.setattr(gpu_session, "opacus", too_large)
    monkeypatch.setattr(gpu_session, "networks", lambda found: {"small": gpu_session.TINY})
    code, found = run("--only", "steps")
    assert code == 0
    assert any("Opacus" in line["skipped"] for line in found if "skipped" in line)
    private = [line for line in found if "K=8, grouped" in line.get("what", "")]
    assert len(private) == 3 and all(line["plain_steps"] > 0 for line in private)


def test_a_bare_machine_finds_the_carried_packages_first(tmp_path):
    """If pydantic is not installed, `bare` puts .gpu/site first in the import path.

    It does so for child processes, too.
    """
    copy = tmp_path / "benchmarks" / "bare.py"
    site = tmp_path / ".gpu" / "site"
    copy.parent.mkdir()
    site.mkdir(parents=True)
    copy.write_text((BENCHMARKS / "bare.py").read_text())
    (site / "pydantic.py").write_text("carried = True")
    program = "import os, bare, pydantic; print(pydantic.carried, os.environ['PYTHONPATH'])"
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    words = [sys.executable, "-S", "-c", program]  # -S: no site-packages
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == "True" and said.split()[1].split(os.pathsep)[0] == str(site)
