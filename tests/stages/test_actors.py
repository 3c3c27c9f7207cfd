"""The private log and `ledger history --actors` name the people who opened charges.

No file outside the state directory contains their names.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from small_lock import write_lock
from test_recipes import SMALL

from sfumato.settings.recipes import overlaid
from sfumato.settings.stages import STAGES
from sfumato.storage.access import ACTOR, LOG

RUN = [name for name in STAGES if name != "evaluate"]


@pytest.fixture
def project(desk, environment, digits):
    """Create a project whose charges two people opened."""
    classes = np.array(digits.classes)
    np.savez("source.npz", images=digits.images[:317], labels=digits.labels[:317], classes=classes)
    desk.base = overlaid(SMALL, {"recipe": "dp-merf"})
    desk.params()
    environment[ACTOR] = "Ann Weber"
    desk.run_all("prepare sensitive", "prepare public", "plan", "count")
    environment[ACTOR] = "Bob\x1b[31m Iyer"
    desk.run_all(*(name for name in RUN if name != "count"))
    desk.run_all("ledger write", "report")
    write_lock()
    return desk


def test_actors_are_named_only_on_request(project):
    assert "Ann Weber" not in project.run("ledger history")
    text = project.run("ledger history --actors")
    first = text.index("by Ann Weber")
    second = text.index(r"by Bob\x1b[31m")
    assert text.index("count") < first < text.index("frequency") < second and "\x1b" not in text


def test_no_file_that_may_leave_names_an_actor(project):
    project.run("egress package")
    files = [path for path in Path().rglob("*") if path.is_file() and "state" not in path.parts]
    assert not [
        path for path in files if b"Weber" in path.read_bytes() or b"Iyer" in path.read_bytes()
    ]


def test_each_command_is_logged_with_its_exit_code(project):
    project.run("plan --recipe none", code=2)
    found = [json.loads(line) for line in Path("state", LOG).read_text().splitlines() if line]
    commands = [(line["command"], line["exit_code"]) for line in found if "command" in line]
    assert commands[0] == (["prepare", "sensitive"], 0) and commands[-1] == (
        ["plan", "--recipe", "none"],
        2,
    )
    assert all(line["folder"] == str(Path.cwd()) for line in found if "command" in line)
