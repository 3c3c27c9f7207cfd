"""The odometer: an append-only journal of every charge ever opened on a dataset. It is outside the repository and DVC.

Each entry is one JSON line in `<state>/odometer/<dataset_id>.jsonl`. An append holds a lock, and the entry is on disk
when it returns. The whole charge is in the journal before its first batch is drawn, and nothing ever lowers it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dp_accounting import DpEvent
from filelock import FileLock

from sfumato.errors import BudgetError
from sfumato.privacy.events import event_from_json

OPEN, PROGRESS, CLOSE, ABANDON, LOCAL = "open", "progress", "close", "abandon", "local"


class Odometer:
    """The journal of one dataset id."""

    def __init__(self, state: Path, dataset_id: str) -> None:
        self.dataset_id = dataset_id
        self.path = state / "odometer" / f"{dataset_id}.jsonl"
        self._lock = FileLock(self.path.with_suffix(".lock"))  # reentrant

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the journal: no other process can open a charge until the end."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            yield

    def entries(self) -> list[dict]:
        """Every entry, oldest first. Raises BudgetError for a line that cannot be read.

        It skips an unfinished last line: that append never returned, so nothing was drawn because of it.
        """
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        lines = text.split("\n")
        lines.pop()  # empty, or the unfinished one
        found = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                entry = json.loads(line)
                found.append({**entry, "kind": str(entry["kind"])})
            except (ValueError, KeyError, TypeError) as error:
                raise BudgetError(
                    f"{self.path}, line {number}, cannot be read: what was spent is unknown, "
                    "so nothing more can be spent. Restore the journal"
                ) from error
        return found

    def append(self, kind: str, **fields: object) -> None:
        """Add an entry and flush it to disk. Raises BudgetError where the disk does not take all of it.

        Where the entry depends on what the caller read, the caller holds `locked()`.
        """
        line = json.dumps({"kind": kind, "time": int(time.time()), **fields}, allow_nan=False).encode() + b"\n"
        with self.locked():
            self._append(line)

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            if torn:  # a killed append: cut its piece off, so that this entry starts its own line
                end = os.pread(descriptor, size, 0).rfind(b"\n") + 1
                os.ftruncate(descriptor, end)
            if os.write(descriptor, line) != len(line):  # a full disk: the next append cuts the piece off
                raise BudgetError(
                    f"{self.path} could not be written whole: is its disk full? "
                    "Nothing was drawn because of it; make room and run again"
                )
            os.fsync(descriptor)
            if size == 0:
                self._keep_name()
        finally:
            os.close(descriptor)

    def _keep_name(self) -> None:
        """Flush the directory, which holds the name of a new journal."""
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def opened(self) -> list[dict]:
        """The records of all charges ever opened, aborted ones too."""
        return [entry["record"] for entry in self.entries() if entry["kind"] == OPEN]

    def events(self) -> list[DpEvent]:
        return [event_from_json(record["event"]) for record in self.opened()]

    def closed(self, version: str, **same: str) -> str | None:
        """The id of the last charge closed on these images with the same `plan` (or the same `work`), or None."""
        entries = self.entries()
        alike = {
            e["record"]["id"]
            for e in entries
            if e["kind"] == OPEN and e["record"].get("data_version") == version and same.items() <= e.items()
        }
        done = [entry["id"] for entry in entries if entry["kind"] == CLOSE and entry["id"] in alike]
        return done[-1] if done else None

    def left_open(self, version: str, plan: str) -> bool:
        """Is a charge of this plan on these images neither closed nor abandoned?"""
        entries = self.entries()
        over = {entry["id"] for entry in entries if entry["kind"] in (CLOSE, ABANDON)}
        return any(
            e["kind"] == OPEN
            and e["plan"] == plan
            and e["record"].get("data_version") == version
            and e["record"]["id"] not in over
            for e in entries
        )

    def unfinished(self, work: str, version: str) -> tuple[dict, int] | None:
        """The newest charge of this work on these images, if it is still open: its record and its last durable use."""
        entries = self.entries()
        over = {entry["id"] for entry in entries if entry["kind"] in (CLOSE, ABANDON)}
        open_ones = [
            e["record"]
            for e in entries
            if e["kind"] == OPEN and e["work"] == work and e["record"].get("data_version") == version
        ]
        if not open_ones or open_ones[-1]["id"] in over:
            return None
        record = open_ones[-1]
        steps = [entry["uses"] for entry in entries if entry["kind"] == PROGRESS and entry["id"] == record["id"]]
        return record, steps[-1] if steps else 0
