"""An append-only journal whose entries are chained, so that one that was lost, replaced, cut or edited is found.

Each entry is one JSON line in `<state>/odometer/<dataset_id>.jsonl`. Its `head` is an HMAC of the head before it and of
the entry, under a secret salt: it reveals no entry and may be published, and a head that the journal lacks shows that
entries are missing. Salt and newest head, the anchor, are in `<state>/keys/<dataset_id>.journal`. An append holds a
lock, and the entry is on disk when it returns. A journal that does not hold is set aside by `stage ledger adopt`, and
another one counts its records.
"""

import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sfumato.errors import BudgetError, ConfigError, explained
from sfumato.storage.digest import canonical
from sfumato.storage.documents import dataset_name, parse_json, read_json
from sfumato.storage.files import make_folder, sweep, sync, write_local
from sfumato.storage.locks import file_lock, holding

GENESIS = "genesis"  # the first entry; of a journal older than the chain, the first that is chained
ADOPT = "adopt"  # records and heads of ledgers, artifacts and a journal that was set aside, which this one lacks
REGROUP = "regroup"  # images on which something was spent came again in other groups
WAY_OUT = (
    "what was spent is unknown, so nothing more can be spent. Restore it from a backup of the whole state directory, "
    "or run `stage ledger adopt`, which counts what can be read and marks the odometer as incomplete"
)


class Journal:
    """The journal of one dataset id in one state directory. Raises ConfigError for an id that cannot name a file."""

    def __init__(self, state: Path, dataset_id: str) -> None:
        with explained(ConfigError, str):
            self.dataset_id = dataset_name(dataset_id)
        self.path = state / "odometer" / f"{dataset_id}.jsonl"
        self.anchor = state / "keys" / f"{dataset_id}.journal"
        self.key = state / "keys" / dataset_id
        self.images = state / "data" / dataset_id
        self._lock = file_lock(self.path.with_suffix(".lock"))  # reentrant

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the journal: no other process can open a charge until the end."""
        for directory in (self.path.parent, self.anchor.parent):
            make_folder(directory, 0o700)
        with holding(self._lock):
            sweep(self.anchor)
            yield

    def begin(self, *, lost: bool = False) -> None:
        """Write the genesis entry if there is none. A journal from before there was a chain is continued.

        lost: after `set_aside`. Otherwise raises BudgetError if the journal does not hold, or is missing while images
        were prepared.
        """
        with self.locked():
            if self.anchor.exists():
                self.entries()
                return
            old = self.lines()
            if self._never_begun(old):
                self.path.unlink()
                old = []
            if any('"head"' in line for line in old):
                raise self._unchecked()
            if not old and not lost:
                self._refuse_lost()
            salt = secrets.token_bytes(32)
            head = ""
            for number, line in enumerate(old, 1):
                head = link(salt, head, self._parsed(line, number))
            self._append(salt, head, GENESIS, {})

    def entries(self) -> list[dict]:
        """Every entry, oldest first; none before images are prepared. Raises BudgetError if it does not hold.

        It skips an unfinished last line: that append never returned, so nothing was drawn because of it. A last line
        that lacks only its newline is an entry.
        """
        if not self.anchor.exists() and not self.path.exists():
            self._refuse_lost()
            return []
        entries = self._checked(*self._secrets())
        if self._aside() and ADOPT not in {entry["kind"] for entry in entries}:
            raise BudgetError(f"{self.path} is not whole, for `stage ledger adopt` was interrupted: run it again")
        return entries

    def records(self) -> list[dict]:
        """The record of every charge in every entry: of one that was resumed, several."""
        found = [(*entry.get("records", ()), entry.get("record")) for entry in self.entries()]
        return [record for records in found for record in records if record is not None]

    def head(self) -> str | None:
        """The head of the newest entry, which stands for all; None if the journal was never begun."""
        entries = self.entries()
        return entries[-1]["head"] if entries else None

    def append(self, kind: str, **fields: object) -> None:
        """Add an entry and flush it to disk. A caller whose entry depends on what it read holds `locked()`.

        Raises BudgetError if the journal was never begun or does not hold, or the disk is full.
        """
        with self.locked():
            salt, newest = self._secrets()
            self._append(salt, self._checked(salt, newest)[-1]["head"], kind, fields)

    def set_aside(self) -> tuple[list[dict], int]:
        """Put a journal that does not hold out of the way.

        Returns the entries, unchecked, of all that were ever set aside, since a kill may have come before they were
        counted; and how many cannot be read.
        """
        aside = self.path.with_name(f"{self.dataset_id}.{time.time_ns()}.aside")
        if self.path.exists():
            self.path.rename(aside)
        else:
            aside.touch(0o600)  # until the entry that adopts is written, it shows that a journal was lost
        sync(aside.parent)
        self.anchor.unlink(missing_ok=True)
        found = []
        lines = [line for file in self._aside() for line in self.lines(file)]
        for line in lines:
            with suppress(BudgetError):
                found.append(self._parsed(line, 0))
        return found, len(lines) - len(found)

    def lines(self, file: Path | None = None) -> list[str]:
        """The lines of the journal, or of another file, without an unfinished last one."""
        path = file or self.path
        if not path.exists():
            return []
        if not path.is_file():  # a pipe would be waited for
            raise BudgetError(f"{path} is not a file: {WAY_OUT}")
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if not is_whole(lines[-1]):
            lines.pop()
        return [line for line in lines if line]

    def _aside(self) -> list[Path]:
        """The journals of this dataset that were set aside, oldest first."""
        name = re.compile(rf"{re.escape(self.dataset_id)}\.\d+\.aside")
        return sorted(path for path in self.path.parent.glob("*.aside") if name.fullmatch(path.name) and path.is_file())

    def _never_begun(self, lines: list[str]) -> bool:
        """Whether these lines are of a journal whose first `begin` was killed before it had an anchor.

        Guarantee: such a journal has no charge. Every entry but the first needs the anchor to be written, and is on
        disk before an image is drawn; the key and the images come after the anchor.
        """
        if self.key.exists() or self.images.exists() or self._aside():
            return False
        return len(lines) == 1 and self._parsed(lines[0], 1)["kind"] == GENESIS

    def _refuse_lost(self) -> None:
        """Raise BudgetError if a journal that is not there was lost, and not just never begun."""
        if self.images.exists() or self._aside():
            raise self._missing()

    def _secrets(self) -> tuple[bytes, str]:
        """Salt and newest head."""
        begin = "run `stage prepare sensitive`, or set SFUMATO_STATE to where it is"
        missing = f"the journal {self.path} was never begun: {begin}"
        broken = f"{self.anchor} cannot be read"
        if not self.anchor.exists() and any('"head"' in line for line in self.lines()):
            raise self._unchecked()
        with explained(BudgetError, lambda error: f"{broken} ({error!r}): {WAY_OUT}", missing=missing):
            content = read_json(self.anchor)
            return bytes.fromhex(content["salt"]), str(content["head"])

    def _checked(self, salt: bytes, newest: str) -> list[dict]:
        """The entries, each of which follows from those before it; `newest` is the head of one of them."""
        if not self.path.exists():
            raise self._missing()
        found, head, chained = [], "", False
        for number, line in enumerate(self.lines(), 1):
            entry = self._parsed(line, number)
            head = link(salt, head, entry)
            chained = chained or entry["kind"] == GENESIS or "head" in entry
            if chained and not hmac.compare_digest(head.encode(), str(entry.get("head")).encode()):
                raise BudgetError(f"{self.path}, line {number}, does not follow from those before it: {WAY_OUT}")
            found.append(entry)
        if not any(entry.get("head") == newest for entry in found):
            raise BudgetError(f"{self.path} is older than {self.anchor.name}, its last entries are gone: {WAY_OUT}")
        return found

    def _missing(self) -> BudgetError:
        return BudgetError(f"{self.path} is missing, and {self.dataset_id!r} was prepared here: {WAY_OUT}")

    def _unchecked(self) -> BudgetError:
        return BudgetError(f"{self.anchor} is missing, without which {self.path} cannot be checked: {WAY_OUT}")

    def _parsed(self, line: str, number: int) -> dict:
        with explained(BudgetError, lambda _: f"{self.path}, line {number}, cannot be read: {WAY_OUT}"):
            entry = parse_json(line)
            return {**entry, "kind": str(entry["kind"])}

    def _append(self, salt: bytes, before: str, kind: str, fields: dict) -> None:
        entry = {"kind": kind, "time": int(time.time()), **fields}
        head = link(salt, before, entry)
        self._write(json.dumps({**entry, "head": head}, allow_nan=False).encode() + b"\n")
        write_local(self.anchor, json.dumps({"salt": salt.hex(), "head": head}).encode())

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            last = content.rfind(b"\n") + 1
            if is_whole(content[last:].decode(errors="replace")):
                line = b"\n" + line
            elif len(content) > last:  # a killed append: cut its piece off, so that this entry starts its own line
                os.ftruncate(descriptor, last)
            try:
                whole = os.write(descriptor, line) == len(line)  # a full disk: the next append cuts the piece off
                os.fsync(descriptor)
            except OSError:
                whole = False
            if not whole:
                raise BudgetError(f"{self.path} could not be written whole: make room on its disk and run again")
            if not content:
                sync(self.path.parent)  # it holds the name of a new journal
        finally:
            os.close(descriptor)


def link(salt: bytes, before: str, entry: dict) -> str:
    """The head of an entry: HMAC-SHA256 under `salt` of the head before it and of the entry without its head."""
    content = {key: value for key, value in entry.items() if key != "head"}
    return hmac.digest(salt, canonical([before, content]), "sha256").hex()


def is_whole(line: str) -> bool:
    """Whether a line that lacks its newline is an entry all the same. JSON cut short is none."""
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
