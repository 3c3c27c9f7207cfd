"""The journal of every charge ever opened on a dataset. The odometer is the total of these charges.

The journal is stored outside the repository and DVC. A charge is journalled completely before its
first batch is drawn, and no entry ever lowers the total. A run is one charge with its progress. The
id of a run is the id of the record that the charge was opened with. A run that resumes keeps its
id, but gets a new record with a new id. So if two copies of a state directory resume the same run,
their newest records differ.

The head of a journal entry is a hash that depends on this entry and all entries before it. The head
of a journal is the head of its newest entry. Ledgers publish the head of the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sfumato.errors import BudgetError
from sfumato.privacy.events import UNITS, event_of
from sfumato.privacy.record import is_record
from sfumato.settings.data import GROUP
from sfumato.storage.journal import ADOPT, GENESIS, REGROUP, Journal

if TYPE_CHECKING:
    from dp_accounting import DpEvent

OPEN = "open"
RESUME = "resume"
PROGRESS = "progress"
CLOSE = "close"
ABANDON = "abandon"
LOCAL_USE = "local"


@dataclass
class Run:
    """A charge and its progress.

    A use is one draw of images and one noisy release. It is durable once a checkpoint with its
    result is on disk and in the journal: a killed run resumes after its last durable use.

    opened: journal entry that opened the charge;
    record: newest record of the charge;
    uses: number of durable uses; always 0 for queries that write no checkpoints;
    checkpoint: sha256 of the checkpoint after the last durable use, or None before the first one;
    end: CLOSE after a release, ABANDON after the charge was abandoned, None while it is open;
    released: sha256 of the release's `privacy.json`, or None if there is no such file (yet).

    If an older version wrote the journal, `checkpoint` and `released` are always None.
    """

    opened: dict
    record: dict
    uses: int = 0
    checkpoint: str | None = None
    end: str | None = None
    released: str | None = None

    @property
    def id(self) -> str:
        """Id of the record that the charge was opened with."""
        return str(self.opened["record"]["id"])

    def drew_others(self, images: str) -> bool:
        """Return whether the charge was opened on images whose fingerprint differs from `images`.

        Returns False for a run of an older journal, which has no fingerprints.
        """
        return self.opened.get("images") not in (None, images)


@dataclass(frozen=True)
class Seen:
    """Entries of a dataset's journal to which a project and the kept releases refer.

    names: record ids and heads in ledgers, artifacts and kept releases. The journal must contain
    all of them;
    released: record ids in artifacts and in DVC's cache. Files leave the state directory only after
    their charge is closed, so the journal must contain the end of each of these charges.
    """

    names: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()


class Odometer(Journal):
    """The journal of one dataset, interpreted as charges."""

    def opened(self) -> list[dict]:
        """Return one record for each charge ever opened, including abandoned ones.

        For a resumed run, the newest record is returned. Each record that `adopt` added counts as a
        charge.
        """
        records: dict[str, dict] = {}
        for entry in self.entries():
            if entry["kind"] == OPEN:
                records[entry["record"]["id"]] = entry["record"]
            elif entry["kind"] == RESUME:
                records[entry["id"]] = entry["record"]
            elif entry["kind"] == ADOPT:
                records |= {f"adopted {record['id']}": record for record in entry["records"]}
        return list(records.values())

    def events(self) -> list[DpEvent]:
        return [event_of(record) for record in self.opened()]

    def spent_otherwise(self, unit: str) -> bool:
        """Return whether any earlier charge has an unknown cost for one `unit`.

        The cost is unknown if the charge protected a different unit, or if it protected groups and
        images were later assigned to other groups.
        """
        units: set[str] = set()
        for entry in self.entries():
            if entry["kind"] == REGROUP and UNITS[GROUP] in units:
                return True
            records = (
                entry["records"]
                if entry["kind"] == ADOPT
                else [entry["record"]]
                if "record" in entry
                else []
            )
            units |= {record["unit"] for record in records}
        return bool(units - {UNITS[unit]})

    def known(self) -> set[str]:
        """Return all record ids and heads in this journal, including adopted ones.

        If a ledger contains any other id or head, this journal lacks a charge.
        """
        names: set[str] = set()
        for entry in self.entries():
            names |= {entry["head"]} if "head" in entry else set()
            names |= {entry["record"]["id"]} if entry["kind"] in (OPEN, RESUME) else set()
            names |= {*entry["seen"]} if entry["kind"] == ADOPT else set()
        return names

    def missing(self, seen: Seen) -> set[str]:
        """Return the record ids and heads of `seen` that this journal lacks, and the ids in
        `seen.released` under which it shows no release.

        If the result is not empty, the journal is an older copy or a different journal. An older
        copy may list a released charge as still open.
        """
        return {*seen.names} - self.known() | seen.released & self.unreleased()

    def unreleased(self) -> set[str]:
        """Return the ids of records under which this journal shows no release.

        These are the records of charges that were not closed, and records that were replaced when
        their charge was resumed.
        """
        opened = set[str]()
        ended = {run.record["id"] for run in self.charges() if run.end == CLOSE}
        for entry in self.entries():
            if entry["kind"] in (OPEN, RESUME):
                opened.add(entry["record"]["id"])
            elif entry["kind"] == ADOPT:
                ended |= {*entry["seen"]}
        return opened - ended

    def complete(self) -> bool:
        """Return whether the journal contains every charge, and no groups have changed.

        Returns False in three cases: the chain of heads does not begin at the first entry, records
        were adopted, or images were assigned to other groups.
        """
        kinds = [entry["kind"] for entry in self.entries()]
        return kinds[:1] == [GENESIS] and not {ADOPT, REGROUP} & {*kinds}

    def adopt(self, records: Iterable[dict], seen: Seen) -> tuple[int, int]:
        """Add records that the journal lacks; start a new journal if the old one is invalid.

        The readable entries of an invalid journal are added too, and the invalid file is set aside.
        A charge that was released, but is open in this journal, is closed, so that it cannot be
        resumed. After any call of this method, `complete()` returns False.

        seen: ids of charges and heads of journals to treat as known from now on, and ids of
        released charges.

        Returns (number of added records, number of unreadable entries of an invalid journal).
        """
        with self.locked():
            salvaged: list[dict] = []
            unreadable = 0
            known = set[str]()
            try:
                if self.head() is None:
                    self.begin()
                runs = self.charges()
            except BudgetError:
                entries, unreadable = self.set_aside()
                self.begin(lost=True)
                candidates: list[Any] = [
                    e.get("record") for e in entries if e["kind"] in (OPEN, RESUME)
                ]
                for entry in (e for e in entries if e["kind"] == ADOPT):
                    adopted = entry.get("records")
                    candidates += adopted if isinstance(adopted, list) else [None]
                salvaged = [record for record in candidates if is_record(record)]
                unreadable += len(candidates) - len(salvaged)
            else:
                for run in runs:
                    if run.end != CLOSE and run.record["id"] in seen.released:
                        self.append(CLOSE, id=run.id, uses=run.uses)
                known = self.known() - (seen.released & self.unreleased())
            new = {
                record["id"]: record
                for record in [*salvaged, *records]
                if record["id"] not in known
            }
            self.append(ADOPT, records=list(new.values()), seen=sorted({*seen.names, *new} - known))
            return len(new), unreadable

    def charges(self, version: str | None = None) -> list[Run]:
        """Return the charges opened in this journal, by default for all versions of the images.

        They are sorted by time: open charges by the time when they were opened, and all other
        charges by the time when they ended.
        """
        runs: dict[str, Run] = {}
        for entry in self.entries():
            if entry["kind"] == OPEN:
                runs[entry["record"]["id"]] = Run(entry, entry["record"])
            elif (run := runs.get(str(entry.get("id")))) is None:
                continue
            elif entry["kind"] == RESUME:
                run.record = entry["record"]
            elif entry["kind"] == PROGRESS:
                run.uses, run.checkpoint = entry["uses"], entry.get("checkpoint")
            elif entry["kind"] in (CLOSE, ABANDON):
                run.end, run.released = entry["kind"], entry.get("released")
                runs[run.id] = runs.pop(run.id)
        return [run for run in runs.values() if version in (None, run.record.get("data_version"))]
