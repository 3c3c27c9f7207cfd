import multiprocessing
import os

import pytest

from sfumato.errors import BudgetError
from sfumato.privacy.odometer import Odometer


def test_entries_come_back_in_order(tmp_path):
    odometer = Odometer(tmp_path, "a")
    for i in range(3):
        odometer.append("local", purpose=str(i))
    assert [entry["purpose"] for entry in odometer.entries()] == ["0", "1", "2"]
    assert Odometer(tmp_path, "b").entries() == []


def test_an_append_that_was_killed_is_given_up_and_swallows_nothing(tmp_path):
    odometer = Odometer(tmp_path, "a")
    odometer.append("local", purpose="first")
    with odometer.path.open("a") as file:
        file.write('{"kind": "open", "rec')  # no newline: the write never returned
    assert [entry["purpose"] for entry in odometer.entries()] == ["first"]
    odometer.append("local", purpose="second")
    assert [entry["purpose"] for entry in odometer.entries()] == ["first", "second"]


def test_a_line_that_the_disk_takes_only_a_piece_of_is_no_charge(tmp_path, monkeypatch):
    odometer = Odometer(tmp_path, "small")
    odometer.append("local", purpose="first")
    with monkeypatch.context() as patched:
        write = os.write
        patched.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:10]))
        with pytest.raises(BudgetError, match="disk full"):
            odometer.append("open", record={"id": "lost"})
    odometer.append("local", purpose="second")
    assert [entry["purpose"] for entry in odometer.entries()] == ["first", "second"]


def test_who_holds_the_journal_may_append(tmp_path):
    odometer = Odometer(tmp_path, "small")
    with odometer.locked():
        odometer.append("local", purpose="held")
    assert len(odometer.entries()) == 1


@pytest.mark.parametrize("damage", ["not json\n", '{"time": 1}\n', "[]\n"])
def test_a_damaged_journal_stops_all_spending(tmp_path, damage):
    odometer = Odometer(tmp_path, "a")
    odometer.append("local", purpose="first")
    odometer.path.write_text(damage + odometer.path.read_text())
    with pytest.raises(BudgetError, match="line 1"):
        odometer.entries()


def append_many(path, name):
    odometer = Odometer(path, "a")
    for _ in range(50):
        odometer.append("local", purpose=name)


def test_appends_of_many_processes_are_all_kept(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=append_many, args=(tmp_path, name)) for name in "xy"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(entry["purpose"] for entry in Odometer(tmp_path, "a").entries()) == ["x"] * 50 + ["y"] * 50


def test_the_journal_is_readable_by_its_owner_only(tmp_path):
    odometer = Odometer(tmp_path, "a")
    odometer.append("local", purpose="x")
    assert odometer.path.stat().st_mode & 0o077 == 0
