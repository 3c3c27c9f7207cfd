"""An append-only journal with chained entries.

The chain reveals lost, replaced, truncated and edited entries.

Each entry is one JSON line in `<state>/odometer/<dataset_id>.jsonl`. Its `head` is an HMAC of the
previous head and of the entry, under a secret salt. A head reveals nothing about entries, so it may
be published. If the journal lacks a published head, entries are missing. The anchor, the file
`<state>/keys/<dataset_id>.journal`, contains the salt and the newest head. An append takes a lock,
and the entry is on disk when it returns. `stage ledger adopt` sets an invalid journal aside and
counts its records in a new one.
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
from sfumato.storage.access import log_access
from sfumato.storage.digest import canonical
from sfumato.storage.documents import dataset_name, parse_json, read_json
from sfumato.storage.files import make_folder, sweep, sync, write_local
from sfumato.storage.locks import file_lock, holding

# Kinds of entries
GENESIS = "genesis"  # First entry or, in a journal older than the chain, the first chained entry
# Entry with records and heads that this journal lacked. They come from ledgers, artifacts, or a
# journal that was set aside
ADOPT = "adopt"
REGROUP = "regroup"  # Images on which budget was spent were assigned to other persons
WAY_OUT = (
    "what was spent is unknown, so nothing more can be spent. Restore the journal from a backup of "
    "the whole state directory, or run `stage ledger adopt`, which counts what can be read and "
    "marks the odometer as incomplete"
)


class Journal:
    """The journal of one dataset id in one state directory.

    Raises ConfigError for an id that cannot name a file.
    """

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
        """Lock the journal: no other process can open a charge until the block ends."""
        for directory in (self.path.parent, self.anchor.parent):
            make_folder(directory, 0o700)
        with holding(self._lock):
            sweep(self.anchor)
            yield

    def begin(self, *, lost: bool = False) -> None:
        """Write the genesis entry if there is none.

        A journal of an older version, without the chain, is continued. lost: whether the journal
        may be missing, because `set_aside` was called before. Raises BudgetError if the journal is
        invalid or, unless `lost` is true, if it is missing although images were prepared.
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
        """Return every entry, oldest first. The list is empty before images are prepared.

        An unfinished last line is skipped: its append never returned, so no image was drawn for it.
        A last line that lacks only its newline is an entry. Raises BudgetError if the journal is
        invalid.
        """
        if not self.anchor.exists() and not self.path.exists():
            self._refuse_lost()
            return []
        entries = self._checked(*self._secrets())
        if self._aside() and ADOPT not in {entry["kind"] for entry in entries}:
            raise BudgetError(
                f"{self.path} is incomplete, because `stage ledger adopt` was interrupted: run it "
                "again"
            )
        return entries

    def records(self) -> list[dict]:
        """Return the records in all entries. A resumed charge has several records."""
        groups = [(*entry.get("records", ()), entry.get("record")) for entry in self.entries()]
        return [record for records in groups for record in records if record is not None]

    def head(self) -> str | None:
        """Return the head of the newest entry, which depends on all entries.

        Returns None if the journal was never begun.
        """
        entries = self.entries()
        return entries[-1]["head"] if entries else None

    def append(self, kind: str, **fields: object) -> None:
        """Add an entry and flush it to disk.

        If the entry depends on what the caller read from the journal, the caller must read and
        append inside one `locked()` block. Raises BudgetError if the journal was never begun or is
        invalid, or the disk is full.
        """
        with self.locked():
            salt, newest = self._secrets()
            self._append(salt, self._checked(salt, newest)[-1]["head"], kind, fields)

    def set_aside(self) -> tuple[list[dict], int]:
        """Set an invalid journal aside.

        Returns the unchecked entries of all journals ever set aside, and the number of unreadable
        entries. Entries of journals set aside earlier are included, because the process that set
        them aside may have been killed before it counted their entries.
        """
        aside = self.path.with_name(f"{self.dataset_id}.{time.time_ns()}.aside")
        if self.path.exists():
            self.path.rename(aside)
        else:
            # Until the adopting entry is written, this empty file shows that a journal was lost.
            aside.touch(0o600)
        sync(aside.parent)
        self.anchor.unlink(missing_ok=True)
        entries = []
        lines = [line for file in self._aside() for line in self.lines(file)]
        for line in lines:
            with suppress(BudgetError):
                entries.append(self._parsed(line, 0))
        return entries, len(lines) - len(entries)

    def lines(self, file: Path | None = None) -> list[str]:
        """Return the lines of the journal, or of another file, without an unfinished last line."""
        path = file or self.path
        if not path.exists():
            return []
        if not path.is_file():  # reading a pipe would wait
            raise BudgetError(f"{path} is not a file: {WAY_OUT}")
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if not is_complete(lines[-1]):
            lines.pop()
        return [line for line in lines if line]

    def _aside(self) -> list[Path]:
        """Return the journals of this dataset that were set aside, oldest first."""
        name = re.compile(rf"{re.escape(self.dataset_id)}\.\d+\.aside")
        return sorted(
            path
            for path in self.path.parent.glob("*.aside")
            if name.fullmatch(path.name) and path.is_file()
        )

    def _never_begun(self, lines: list[str]) -> bool:
        """Return whether a first `begin` wrote `lines`, and was killed before it wrote the anchor.

        Guarantee: such a journal has no charge. A charge needs the anchor, and its entry is on disk
        before an image is drawn. The dataset's key and images are stored only after the anchor.
        """
        if self.key.exists() or self.images.exists() or self._aside():
            return False
        return len(lines) == 1 and self._parsed(lines[0], 1)["kind"] == GENESIS

    def _refuse_lost(self) -> None:
        """Raise BudgetError if other files show that the missing journal once existed."""
        if self.images.exists() or self._aside():
            raise self._missing()

    def _secrets(self) -> tuple[bytes, str]:
        """Return the salt and the newest head, which are in the anchor."""
        missing = (
            f"the journal {self.path} was never begun: run `stage prepare sensitive`, or set "
            f"SFUMATO_STATE to the state directory of dataset {self.dataset_id!r}"
        )
        broken = f"{self.anchor} cannot be read"
        if not self.anchor.exists() and any('"head"' in line for line in self.lines()):
            raise self._unchecked()
        with explained(
            BudgetError, lambda error: f"{broken} ({error!r}): {WAY_OUT}", missing=missing
        ):
            content = read_json(self.anchor)
            return bytes.fromhex(content["salt"]), str(content["head"])

    def _checked(self, salt: bytes, newest: str) -> list[dict]:
        """Read the entries and check their chain.

        Raises BudgetError if an entry does not follow from the previous entry, or if no entry has
        the head `newest`.
        """
        if not self.path.exists():
            raise self._missing()
        entries: list[dict] = []
        head = ""
        chained = False
        for number, line in enumerate(self.lines(), 1):
            entry = self._parsed(line, number)
            head = link(salt, head, entry)
            chained = chained or entry["kind"] == GENESIS or "head" in entry
            if chained and not hmac.compare_digest(head.encode(), str(entry.get("head")).encode()):
                raise BudgetError(
                    f"{self.path} is damaged or was edited, in line {number} or before it: "
                    f"{WAY_OUT}"
                )
            entries.append(entry)
        if not any(entry.get("head") == newest for entry in entries):
            raise BudgetError(
                f"{self.path} lacks its newest entries, which {self.anchor.name} still records: "
                f"{WAY_OUT}"
            )
        return entries

    def _missing(self) -> BudgetError:
        return BudgetError(
            f"{self.path} is missing, although dataset {self.dataset_id!r} was prepared here: "
            f"{WAY_OUT}"
        )

    def _unchecked(self) -> BudgetError:
        return BudgetError(f"{self.anchor} is missing, so {self.path} cannot be checked: {WAY_OUT}")

    def _parsed(self, line: str, number: int) -> dict:
        with explained(
            BudgetError, lambda _: f"{self.path}, line {number}, cannot be read: {WAY_OUT}"
        ):
            entry = parse_json(line)
            return {**entry, "kind": str(entry["kind"])}

    def _append(self, salt: bytes, previous_head: str, kind: str, fields: dict) -> None:
        entry = {"kind": kind, "time": int(time.time()), **fields}
        head = link(salt, previous_head, entry)
        # Logged before the entry is written, so that every entry has an actor
        log_access(self.path.parent.parent, dataset=self.dataset_id, kind=kind, head=head)
        self._write(json.dumps({**entry, "head": head}, allow_nan=False).encode() + b"\n")
        write_local(self.anchor, json.dumps({"salt": salt.hex(), "head": head}).encode())

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            last = content.rfind(b"\n") + 1
            if is_complete(content[last:].decode(errors="replace")):
                line = b"\n" + line
            # Cut off the remains of a killed append, so that this entry starts a new line
            elif len(content) > last:
                os.ftruncate(descriptor, last)
            try:
                # False if the disk is full. The next append then cuts off the incomplete line
                complete = os.write(descriptor, line) == len(line)
                os.fsync(descriptor)
            except OSError:
                complete = False
            if not complete:
                raise BudgetError(
                    f"{self.path} could not be written completely: free space on its disk, and run "
                    "the command again"
                )
            if not content:
                sync(self.path.parent)  # a new file's name is stored in its folder
        finally:
            os.close(descriptor)


def link(salt: bytes, previous_head: str, entry: dict) -> str:
    """Return the head of an entry: HMAC-SHA256 of the previous head and the entry, under `salt`."""
    content = {key: value for key, value in entry.items() if key != "head"}
    return hmac.digest(salt, canonical([previous_head, content]), "sha256").hex()


def is_complete(line: str) -> bool:
    """Return whether a line contains a complete entry. The newline at its end may be missing."""
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
