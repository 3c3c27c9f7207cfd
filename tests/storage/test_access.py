"""The private log records who wrote each journal entry and ran each command. Nothing in it is
published.
"""

import json
import os
import pwd
from pathlib import Path

import pytest

from sfumato.privacy.odometer import Odometer
from sfumato.storage.access import ACTOR, LOG, log_access, logged_actors

HOSTILE = 'Eve\n{"head": "0", "actor": "Ann"}\x1b[2J\u202e'


def lines(state: Path) -> list[dict]:
    return [json.loads(line) for line in (state / LOG).read_text().splitlines() if line]


def test_each_entry_of_a_journal_names_its_actor(tmp_path, environment):
    odometer = Odometer(tmp_path, "scans")
    odometer.begin()
    for name in ("Ann", "Bob"):
        environment[ACTOR] = name
        odometer.append("local", purpose=name)
    found = logged_actors(tmp_path)
    entries = odometer.entries()
    assert [found[entry["head"]] for entry in entries[1:]] == ["Ann", "Bob"]
    assert len(found) == len(entries) == 3
    assert (tmp_path / LOG).stat().st_mode & 0o777 == 0o600


def test_the_account_is_named_without_the_variable(tmp_path, environment, monkeypatch):
    environment[ACTOR] = "Ann"
    environment["LOGNAME"] = environment["USER"] = "Eve"
    log_access(tmp_path)
    environment.pop(ACTOR)
    log_access(tmp_path)
    name = pwd.getpwuid(os.getuid()).pw_name
    assert [(line["actor"], line["account"]) for line in lines(tmp_path)] == [
        ("Ann", name),
        (name, name),
    ]
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)  # a container's user id, with no account
    log_access(tmp_path)
    assert lines(tmp_path)[-1]["actor"] == "uid 4000000"


def test_a_hostile_name_adds_no_line_and_moves_no_cursor(tmp_path, environment):
    environment[ACTOR] = HOSTILE
    log_access(tmp_path, head="1")
    assert len(lines(tmp_path)) == 1
    assert logged_actors(tmp_path) == {"1": r'Eve\n{"head": "0", "actor": "Ann"}\x1b[2J\u202e'}


def test_a_killed_write_spoils_no_other_line(tmp_path):
    log_access(tmp_path, head="1")
    with (tmp_path / LOG).open("a") as file:
        file.write('\n{"time": 1, "act')
    log_access(tmp_path, head="2")
    assert logged_actors(tmp_path).keys() == {"1", "2"}


def test_without_its_log_a_journal_gets_no_entry(tmp_path):
    odometer = Odometer(tmp_path, "scans")
    odometer.begin()
    (tmp_path / LOG).unlink()
    (tmp_path / LOG).mkdir()
    with pytest.raises(IsADirectoryError):
        odometer.append("local", purpose="x")
    assert len(odometer.entries()) == 1


def test_an_older_journal_and_its_log_stay_readable(tmp_path):
    odometer = Odometer(tmp_path, "scans")
    odometer.begin()
    (tmp_path / LOG).unlink()
    assert logged_actors(tmp_path) == {}
    assert "actor" not in odometer.path.read_text()
