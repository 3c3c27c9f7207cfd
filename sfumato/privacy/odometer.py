"""The odometer: the journal of every charge ever opened on a dataset. It is outside the repository and DVC.

The whole charge is in the journal before its first batch is drawn, and nothing ever lowers what it adds up to. A run is
known by the id of the record that it was opened with. One that a kill left open and that goes on takes a record with a
new id that replaces the old: two copies of one state directory then leave two records, not one id for both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dp_accounting import DpEvent

from sfumato.errors import BudgetError
from sfumato.privacy.events import UNITS, event_of
from sfumato.privacy.record import is_record
from sfumato.settings.data import GROUP
from sfumato.storage.journal import ADOPT, GENESIS, REGROUP, Journal

OPEN, RESUME, PROGRESS, CLOSE, ABANDON = "open", "resume", "progress", "close", "abandon"
LOCAL_USE = "local"


@dataclass
class Run:
    """A charge, as far as it came.

    opened: its entry; record: the newest; uses, checkpoint: the last durable use, and the sha256 of its checkpoint;
    end: CLOSE if it released, ABANDON if it was given up, None while it is open; released: sha256 of `privacy.json` of
    what it released. Older journals lack these digests.
    """

    opened: dict
    record: dict
    uses: int = 0
    checkpoint: str | None = None
    end: str | None = None
    released: str | None = None

    @property
    def id(self) -> str:
        """Of the record that it was opened with."""
        return str(self.opened["record"]["id"])

    def drew_others(self, images: str) -> bool:
        """Whether it was opened on images of another fingerprint; older journals lack it."""
        return self.opened.get("images") not in (None, images)


class Odometer(Journal):
    """The journal of one dataset id, read as what was spent."""

    def runs(self) -> dict[str, dict]:
        """The record of every charge ever opened, aborted ones too, by its run: the newest of a run that was resumed.

        Adopted records are runs of their own.
        """
        found: dict[str, dict] = {}
        for entry in self.entries():
            if entry["kind"] == OPEN:
                found[entry["record"]["id"]] = entry["record"]
            elif entry["kind"] == RESUME:
                found[entry["id"]] = entry["record"]
            elif entry["kind"] == ADOPT:
                found |= {record["id"]: record for record in entry["records"]}
        return found

    def opened(self) -> list[dict]:
        """The records of all charges ever opened, aborted ones too: one for each, however often it was resumed."""
        return list(self.runs().values())

    def events(self) -> list[DpEvent]:
        return [event_of(record) for record in self.opened()]

    def spent_otherwise(self, unit: str) -> bool:
        """Whether anything was spent under another unit, or under an earlier grouping of the images."""
        spent: set[str] = set()
        for entry in self.entries():
            if entry["kind"] == REGROUP and UNITS[GROUP] in spent:
                return True
            found = entry["records"] if entry["kind"] == ADOPT else [entry["record"]] if "record" in entry else []
            spent |= {record["unit"] for record in found}
        return bool(spent - {UNITS[unit]})

    def known(self) -> set[str]:
        """The heads and the ids of records that this journal has seen: a ledger of its charges names no other."""
        found: set[str] = set()
        for entry in self.entries():
            found |= {entry["head"]} if "head" in entry else set()
            found |= {entry["record"]["id"]} if entry["kind"] in (OPEN, RESUME) else set()
            found |= {*entry["seen"]} if entry["kind"] == ADOPT else set()
        return found

    def complete(self) -> bool:
        """Whether the journal is chained from its first entry on, no part was lost, and it counts the same units."""
        kinds = [entry["kind"] for entry in self.entries()]
        return kinds[:1] == [GENESIS] and not {ADOPT, REGROUP} & {*kinds}

    def adopt(self, records: Iterable[dict], seen: Iterable[str]) -> tuple[int, int]:
        """Count records that the journal lacks, and start a new journal if it does not hold.

        Returns how many are new, and how many entries of a journal that does not hold cannot be read.

        seen: heads and ids that are taken for known from now on. Entries of a journal that does not hold are counted as
        far as they can be read, and its file is set aside. The odometer is never complete again.
        """
        with self.locked():
            salvaged: list[dict] = []
            lost = 0
            known = set[str]()
            try:
                if self.head() is None:
                    self.begin()
                known = self.known()
            except BudgetError:
                entries, lost = self.set_aside()
                self.begin(lost=True)
                found: list[Any] = [e.get("record") for e in entries if e["kind"] in (OPEN, RESUME)]
                for entry in (e for e in entries if e["kind"] == ADOPT):
                    adopted = entry.get("records")
                    found += adopted if isinstance(adopted, list) else [None]
                salvaged = [record for record in found if is_record(record)]
                lost += len(found) - len(salvaged)
            new = {record["id"]: record for record in [*salvaged, *records] if record["id"] not in known}
            self.append(ADOPT, records=list(new.values()), seen=sorted({*seen, *new} - known))
            return len(new), lost

    def charges(self, version: str | None = None) -> list[Run]:
        """The charges opened here, on these images or on any, in the order in which each was last opened or ended."""
        found: dict[str, Run] = {}
        for entry in self.entries():
            if entry["kind"] == OPEN:
                found[entry["record"]["id"]] = Run(entry, entry["record"])
            elif (run := found.get(str(entry.get("id")))) is None:
                continue
            elif entry["kind"] == RESUME:
                run.record = entry["record"]
            elif entry["kind"] == PROGRESS:
                run.uses, run.checkpoint = entry["uses"], entry.get("checkpoint")
            elif entry["kind"] in (CLOSE, ABANDON):
                run.end, run.released = entry["kind"], entry.get("released")
                found[run.id] = found.pop(run.id)
        return [run for run in found.values() if version in (None, run.record.get("data_version"))]
