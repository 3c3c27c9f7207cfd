"""Fixtures that run the program as a function, in a temporary folder."""

import json
import os
import shutil
from io import StringIO
from pathlib import Path

import pytest
import yaml
from program import Terminal, call
from small_lock import write_lock

from sfumato.planning import estimate
from sfumato.privacy.charge import Charge
from sfumato.settings.recipes import overlaid
from stages.cli import main

ROOT = Path(__file__).resolve().parents[2]


class Desk:
    """The program `stage`, run in the current folder.

    terminal: whether it writes to a terminal; answers: answers to its questions; base: settings
    that `params` writes, with changes.
    """

    def __init__(self) -> None:
        self.terminal = False
        self.answers = ""
        self.base = {}

    def __call__(self, *words: str) -> tuple[int, str]:
        """Run a command. Returns its exit code and its output, which is never a traceback."""
        screen = Terminal() if self.terminal else StringIO()
        code = call(main, "stage", *words, answers=self.answers, screen=screen)
        assert "Traceback" not in screen.getvalue()
        return code, screen.getvalue()

    def run(self, command: str, *said: str, code: int = 0) -> str:
        """Run a command, which must end with `code` and print all of `said`. Returns its output."""
        found, text = self(*command.split())
        if "refused.txt" in text:
            text += (Path(os.environ["SFUMATO_STATE"]) / "refused.txt").read_text()
        missing = [
            words for words in said if words not in text and words not in " ".join(text.split())
        ]
        assert (found, missing) == (code, []), text
        return text

    def run_all(self, *commands: str) -> str:
        """Run commands, which must all succeed. Returns their output."""
        return "".join(map(self.run, commands))

    def check(self, options: str = "", *said: str, code: int = 0) -> str:
        """Write the lock that DVC would have written for the files here, and run `ledger check`."""
        write_lock()
        return self.run(f"ledger check {options}", *said, code=code)

    def params(self, **changes) -> None:
        """Write params.yaml: `base` with these changes."""
        Path("params.yaml").write_text(
            yaml.safe_dump(overlaid(self.base, changes), sort_keys=False)
        )

    @property
    def journal(self) -> list[dict]:
        """Return the entries of the only journal in the state directory."""
        (path,) = Path("state/odometer").glob("*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def opened(self) -> list[str]:
        """Return the stages of all charges ever opened, in order."""
        return [entry["record"]["stage"] for entry in self.journal if entry["kind"] == "open"]


@pytest.fixture
def desk(here) -> Desk:
    """Return a desk in an empty folder with the recipes and a state directory."""
    shutil.copytree(ROOT / "pipelines", here / "pipelines")
    return Desk()


@pytest.fixture
def quick(expect_seconds) -> None:
    """Set fixed running times, so that nothing is timed. Other tests cover the times."""
    found = {name: 1.0 for name in estimate.FRAME}
    expect_seconds(lambda params: {**found, "evaluate": params.evaluate.steps})


class Killed(BaseException):
    """Stand-in for the end of the process. Nothing catches this exception."""


@pytest.fixture
def killed_at(desk, monkeypatch):
    """Return a function that runs a stage, and kills it at the nth call of a function.

    name: name of that function; end: error to raise there instead of the kill.
    """

    def until(stage: str, name: str, times: int = 1, end: BaseException | None = None) -> None:
        locks = []
        init = Charge.__init__
        calls = []
        module, _, attribute = name.rpartition(".")
        owner = Charge if module.endswith("Charge") else __import__(module, fromlist=["it"])
        whole = getattr(owner, attribute)

        def opening(charge, *given, lock, **more):
            locks.append(lock)
            init(charge, *given, lock=lock, **more)

        def kill(*given, **more):
            calls.append(name)
            if len(calls) == times:
                raise end or Killed
            return whole(*given, **more)

        with monkeypatch.context() as dying:
            dying.setattr(Charge, "__init__", opening)
            dying.setattr(owner, attribute, kill)
            if end is None:
                with pytest.raises(Killed):
                    desk(stage)
            else:
                assert desk(stage)[0] in (1, 4)
        for lock in locks:
            lock.close()  # the end of a process releases it too
        assert len(calls) == times

    return until
