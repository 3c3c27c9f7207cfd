import multiprocessing
import os
import shutil
from collections.abc import Callable

import pytest
from small_record import small_record

from sfumato.errors import BudgetError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import Odometer, Seen


def begun(state, dataset_id="a") -> Odometer:
    odometer = Odometer(state, dataset_id)
    odometer.begin()
    return odometer


def purposes(odometer: Odometer) -> list[str]:
    return [entry["purpose"] for entry in odometer.entries() if entry["kind"] == "local"]


def test_entries_come_back_in_order_under_a_lock(tmp_path):
    odometer = begun(tmp_path)
    odometer.append("local", purpose="0")
    with odometer.locked():
        for i in (1, 2):
            odometer.append("local", purpose=str(i))
    assert purposes(odometer) == ["0", "1", "2"]
    assert [entry["kind"] for entry in odometer.entries()] == ["genesis", *["local"] * 3]
    assert Odometer(tmp_path, "b").entries() == []


def test_a_killed_append_is_dropped_and_swallows_nothing(tmp_path):
    odometer = begun(tmp_path)
    odometer.append("local", purpose="first")
    with odometer.path.open("a") as file:
        file.write('{"kind": "open", "rec')  # cut short: the write never returned
    assert purposes(odometer) == ["first"]
    odometer.append("local", purpose="second")
    assert purposes(odometer) == ["first", "second"]


def test_a_last_line_without_its_newline_is_an_entry(tmp_path):
    """An editor or a copy may cut off the last newline. This once removed the newest charge."""
    odometer = begun(tmp_path)
    odometer.append("open", record={"id": "x"})
    odometer.path.write_bytes(odometer.path.read_bytes().rstrip(b"\n"))
    assert odometer.opened() == [{"id": "x"}]
    odometer.append("local", purpose="after")
    assert odometer.opened() == [{"id": "x"}] and purposes(odometer) == ["after"]
    assert odometer.path.read_text().count("\n") == 3


def test_a_line_that_the_disk_takes_only_a_piece_of_is_no_charge(tmp_path, monkeypatch):
    odometer = begun(tmp_path, "small")
    odometer.append("local", purpose="first")
    with monkeypatch.context() as patched:
        write = os.write
        patched.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:10]))
        with pytest.raises(BudgetError, match="free space on its disk"):
            odometer.append("open", record={"id": "lost"})
    odometer.append("local", purpose="second")
    assert purposes(odometer) == ["first", "second"]


# ---- a journal that was lost, replaced, cut or edited


def spent(tmp_path) -> Odometer:
    odometer = begun(tmp_path)
    for name in ("one", "two", "three"):
        odometer.append("open", record=a_record(name), plan=name, work=name)
    (tmp_path / "data" / "a").mkdir(parents=True)  # the prepared images
    return odometer


def a_record(name: str) -> dict:
    return small_record(0, Mechanism(noise_multiplier=2.0), id=name)


def rewritten(change: Callable[[list[str]], list[str]]) -> Callable[[Odometer], object]:
    return lambda it: it.path.write_text(
        "".join(change(it.path.read_text().splitlines(keepends=True)))
    )


def put_back(odometer: Odometer) -> None:
    older = odometer.path.read_text()
    odometer.append("open", record={"id": "four"})
    odometer.path.write_text(older)


LOST = {
    "its last line gone": rewritten(lambda lines: lines[:-1]),
    "its last line cut in two": rewritten(
        lambda lines: [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]
    ),
    "a line taken out": rewritten(lambda lines: [lines[0], *lines[2:]]),
    "two lines swapped": rewritten(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]]),
    "a line edited": rewritten(lambda lines: [line.replace('"two"', '"too"') for line in lines]),
    "a line twice": rewritten(lambda lines: [*lines, lines[-1]]),
    "a line without its head": rewritten(lambda lines: [*lines, '{"kind": "local", "time": 0}\n']),
    "a first line that is not JSON": rewritten(lambda lines: ["not json\n", *lines]),
    "a first line without a kind": rewritten(lambda lines: ['{"time": 1}\n', *lines]),
    "a first line that is a list": rewritten(lambda lines: ["[]\n", *lines]),
    "its genesis gone": rewritten(lambda lines: lines[1:]),
    "emptied": rewritten(lambda lines: []),
    "an older copy": put_back,
    "another dataset's": lambda it: shutil.copy(begun(it.path.parents[1], "b").path, it.path),
    "deleted": lambda it: it.path.unlink(),
    "its key deleted": lambda it: it.anchor.unlink(),
    "both deleted": lambda it: (it.path.unlink(), it.anchor.unlink()),
}


@pytest.mark.parametrize("how", LOST)
def test_a_lost_cut_or_edited_journal_stops_all_spending(tmp_path, how):
    odometer = spent(tmp_path)
    LOST[how](odometer)
    for attempt in (
        odometer.opened,
        odometer.begin,
        lambda: odometer.append("open", record={"id": "x"}),
    ):
        with pytest.raises(BudgetError, match="stage ledger adopt|stage prepare sensitive"):
            attempt()


def test_a_head_stands_for_all_entries_and_reveals_none(tmp_path, monkeypatch):
    monkeypatch.setattr("sfumato.storage.journal.time.time", lambda: 0)
    heads = []
    for place in ("x", "y"):  # the same entries, two salts
        odometer = spent(tmp_path / place)
        assert odometer.head() in odometer.known()
        heads.append(odometer.head())
    assert heads[0] != heads[1]


def test_a_journal_from_before_the_chain_continues(tmp_path):
    odometer = Odometer(tmp_path, "a")
    odometer.path.parent.mkdir()
    odometer.path.write_text('{"kind": "open", "time": 0, "record": {"id": "old"}}\n')
    (tmp_path / "data" / "a").mkdir(parents=True)
    odometer.begin()
    odometer.append("open", record={"id": "new"})
    assert [record["id"] for record in odometer.opened()] == [
        "old",
        "new",
    ] and not odometer.complete()
    odometer.path.write_text("".join(odometer.path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(BudgetError, match="is damaged or was edited"):
        odometer.opened()


def test_an_adopted_journal_is_never_complete_again(tmp_path):
    odometer = spent(tmp_path)
    odometer.append("resume", id="three", adopts="three", record=a_record("three again"))
    odometer.append("open", record={"id": "four", "event": "not a mechanism"})
    lines = odometer.path.read_text().splitlines(keepends=True)
    odometer.path.write_text("".join([lines[0], *lines[2:], "neither is this\n"]))
    shown = Seen(frozenset(["f" * 64]))
    assert odometer.adopt([{"id": "two"}, {"id": "elsewhere"}], shown) == (4, 2)
    ids = [record["id"] for record in odometer.opened()]
    # "three" and "three again" may be two charges, so both are counted
    assert sorted(ids) == ["elsewhere", "three", "three again", "two"]
    assert (
        not odometer.complete()
        and "f" * 64 in odometer.known()
        and begun(tmp_path / "b").complete()
    )
    assert odometer.adopt([{"id": "two"}], Seen()) == (0, 0) and len(odometer.opened()) == 4
    assert len(list(odometer.path.parent.glob("a.*.aside"))) == 1


def test_a_run_that_was_resumed_counts_once_by_its_newest_record(tmp_path):
    odometer = begun(tmp_path)
    odometer.append("open", record={"id": "x", "data_version": "v"}, plan="p", work="w")
    for i in range(3):
        odometer.append("resume", id="x", adopts="", record={"id": f"x{i}", "data_version": "v"})
        odometer.append("progress", id="x", uses=i)
    assert [record["id"] for record in odometer.opened()] == ["x2"]
    assert {"x", "x0", "x1", "x2"} <= odometer.known()
    (run,) = odometer.charges("v")
    assert (run.id, run.record["id"], run.uses, run.end) == (
        "x",
        "x2",
        2,
        None,
    ) and odometer.charges("w") == []
    odometer.append("close", id="x", uses=3)
    assert [run.end for run in odometer.charges()] == ["close"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_released_charge_that_is_open_here_is_missing(tmp_path, resumed):
    """An older copy of a journal contains the charge, but not its end."""
    odometer = spent(tmp_path)
    odometer.append("open", record=a_record("x"), plan="p", work="w")
    shown = Seen(frozenset(["x"]), frozenset(["x"]))
    assert odometer.missing(shown) == {"x"} and not odometer.missing(Seen(frozenset(["x"])))
    if resumed:  # now, y is released here, but x is the release that left the state directory
        odometer.append("resume", id="x", adopts="x", record=a_record("y"))
        odometer.append("close", id="x", uses=1)
        assert odometer.missing(shown) == {"x"}
        assert not odometer.missing(Seen(frozenset(["y"]), frozenset(["y"])))
    before = len(odometer.opened())
    assert odometer.adopt([a_record("x")], shown) == (int(resumed), 0)
    assert len(odometer.opened()) == before + resumed and not odometer.missing(shown)
    assert [run.end for run in odometer.charges() if run.id == "x"] == ["close"]
    assert odometer.adopt([a_record("x")], shown) == (0, 0)


def test_a_full_disk_does_not_set_a_valid_journal_aside(tmp_path, monkeypatch):
    odometer = spent(tmp_path)
    shown = Seen(frozenset(["one"]), frozenset(["one"]))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda *_: 0)
        with pytest.raises(BudgetError, match="free space on its disk"):
            odometer.adopt([], shown)
    assert not list(odometer.path.parent.glob("*.aside")) and odometer.missing(shown) == {"one"}
    assert odometer.adopt([], shown) == (0, 0) and not odometer.missing(shown)


def append_many(path, name):
    odometer = Odometer(path, "a")
    for _ in range(50):
        odometer.append("local", purpose=name)


def test_appends_of_many_processes_are_all_kept(tmp_path):
    begun(tmp_path)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=append_many, args=(tmp_path, name)) for name in "xy"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(purposes(Odometer(tmp_path, "a"))) == ["x"] * 50 + ["y"] * 50


def test_the_journal_is_readable_by_its_owner_only(tmp_path):
    odometer = begun(tmp_path)
    odometer.append("local", purpose="x")
    assert odometer.path.stat().st_mode & 0o077 == 0 and odometer.anchor.stat().st_mode & 0o077 == 0


# ---- a kill within the first entry, or while a journal is adopted


def without_anchor(tmp_path) -> Odometer:
    odometer = begun(tmp_path)
    odometer.anchor.unlink()
    return odometer


def test_a_journal_killed_before_its_anchor_is_begun_again(tmp_path):
    odometer = without_anchor(tmp_path)
    odometer.begin()
    odometer.append("local", purpose="after")
    assert [entry["kind"] for entry in odometer.entries()] == [
        "genesis",
        "local",
    ] and odometer.complete()


USED = {
    "a key": lambda it: it.key.write_bytes(bytes(32)),
    "images": lambda it: it.images.mkdir(parents=True),
    "a journal that was set aside": lambda it: it.path.with_name("a.1.aside").touch(),
    "a second entry": lambda it: it.path.write_text(it.path.read_text() * 2),
    "a charge": lambda it: it.path.write_text(it.path.read_text().replace("genesis", "open")),
}


@pytest.mark.parametrize("trace", USED)
def test_a_journal_without_its_anchor_that_was_used_is_refused(tmp_path, trace):
    odometer = without_anchor(tmp_path)
    USED[trace](odometer)
    lines = odometer.path.read_text()
    for _ in range(2):
        with pytest.raises(BudgetError, match="stage ledger adopt"):
            odometer.begin()
    assert odometer.path.read_text() == lines


class Killed(BaseException):
    """Stand-in for the end of the process."""


@pytest.mark.parametrize("how", ["a line taken out", "deleted", "its key deleted"])
@pytest.mark.parametrize("last", ["begin", "_append", "append"])
def test_a_killed_adoption_is_repeated_without_loss(tmp_path, monkeypatch, how, last):
    """The adoption is killed at the call `last`. Until it is repeated, nothing can be spent."""
    odometer = spent(tmp_path)
    LOST[how](odometer)
    shutil.rmtree(odometer.images)  # no image shows that there was a journal
    readable = odometer.path.read_text().count('"open"') if odometer.path.exists() else 0
    with monkeypatch.context() as dying:

        def die(*_, **__):
            raise Killed

        dying.setattr(Odometer, last, die)
        with pytest.raises(Killed):
            odometer.adopt([a_record("of a ledger")], Seen())
    for attempt in (odometer.begin, odometer.opened, odometer.complete):
        with pytest.raises(BudgetError, match="stage ledger adopt"):
            attempt()
    odometer.adopt([a_record("of a ledger")], Seen())
    assert len(odometer.opened()) == readable + 1 and not odometer.complete()
