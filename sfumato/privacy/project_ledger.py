"""The ledger of a project: written from its artifacts and its journal; and what its ledgers name of a journal."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sfumato.data.lineage import remember
from sfumato.data.store import read_card
from sfumato.errors import BudgetError, SfumatoError, explained
from sfumato.privacy.check import LedgerError, check_ledger
from sfumato.privacy.ledger import build_ledger, by_id, ledger_text, read_budget, seen_of
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.record import record_problems
from sfumato.settings.stages import ARTIFACTS, CARD_PATH, LEDGER, PLAN, PUBLIC, QUERIES
from sfumato.storage.artifacts import Artifact, declared_apart, merge_records, read_artifact
from sfumato.storage.documents import parse_json, read_text
from sfumato.storage.files import replace_file
from sfumato.storage.journal import REGROUP
from sfumato.storage.state_directory import REFUSED, git


def ledgers(folder: Path) -> list[dict]:
    """The project's ledger.json, of any version: the file at hand, and as it was last committed.

    Raises BudgetError if it is not JSON, or if git does not read the project's repository.
    """
    file = folder / LEDGER
    code, committed = git("-C", str(folder), "show", f"HEAD:./{LEDGER}")
    if code == REFUSED and (folder / ".git").exists():
        place = folder.resolve()
        raise BudgetError(
            f"git refuses the repository {place}, which another account owns, so the {LEDGER} committed last is not "
            "known: work as its owner, or, if you trust all who can write there, run `git config --global --add "
            f"safe.directory {place}`"
        )
    with explained(BudgetError, lambda error: f"{file} is not JSON ({error}): restore it (`git checkout {LEDGER}`)"):
        texts = []
        if file.exists():
            texts.append(read_text(file))
        if code == 0:
            texts.append(committed)
        contents = [parse_json(text) for text in texts]
    return [content for content in contents if isinstance(content, dict)]


def seen_in_ledgers(dataset_id: str, folder: Path = Path()) -> set[str]:
    return {name for content in ledgers(folder) for name in seen_of(content, dataset_id)}


def write_ledger(folder: Path, state: Path, out: Path, say: Callable[[str], None]) -> tuple[dict, float]:
    """Compose, check and write the ledger of the release and all queries. Returns it and ε. Raises LedgerError."""
    budget = read_budget(folder / PLAN / "budget.json")
    artifacts = [read_artifact(folder / ARTIFACTS / stage, stage) for stage in ("synthesize", *QUERIES)]
    records = merge_records(artifacts)
    apart = declared_apart(artifacts)
    if apart and not (folder / CARD_PATH).exists():  # what `stage merge` made
        say(f"note: {', '.join(apart)} keep their own journals: charges that they opened elsewhere are not known here")
        ledger = build_ledger(budget, records, [], apart=apart)
        return ledger, save_ledger(ledger, artifacts, folder, state, out)
    odometer = Odometer(state, read_card(folder / CARD_PATH).dataset_id)
    journal = list[dict]()
    earlier = set[str]()
    head = None
    try:
        journal = odometer.opened()
        earlier = seen_in_ledgers(odometer.dataset_id, folder)
        gap = gap_in(odometer, records, earlier)
        head = None if gap else odometer.head()
    except BudgetError as error:
        gap = str(error)
    if gap:
        say(f"note: the odometer is incomplete: {gap}")
    ledger = build_ledger(budget, records, journal, dataset_id=odometer.dataset_id, head=head, apart=apart)
    spent = save_ledger(ledger, artifacts, folder, state, out)
    # The copies of releases that this ledger holds stay, to be restored at no cost. So do those that no ledger held
    # yet: they are paid for, and a kill may have come before the pipeline took them over.
    replaced = earlier - records.keys()
    if replaced:
        for run, record in odometer.runs().items():
            if record["id"] in replaced:
                shutil.rmtree(state / "runs" / run, ignore_errors=True)
    return ledger, spent


def gap_in(odometer: Odometer, records: Mapping[str, dict], earlier: set[str]) -> str | None:
    """Why the journal does not tell all that was ever opened, or None. earlier: what ledgers name of it."""
    mine = odometer.dataset_id
    others = {record["unit"] for record in odometer.opened()} - {record["unit"] for record in records.values()}
    named = earlier | seen_of({"records": list(records.values())}, mine)
    if others and records:
        return f"{odometer.path} mixes privacy units ({', '.join(sorted(others))}), which cannot be composed"
    if odometer.complete() and not named - odometer.known():
        return None
    if REGROUP in {entry["kind"] for entry in odometer.entries()}:
        return f"{odometer.path} holds charges from before the images were regrouped"
    if odometer.head():
        return f"{odometer.path} lacks a charge on dataset {mine!r} that a ledger names"
    return f"{odometer.path} was never begun"


def save_ledger(ledger: dict, artifacts: Sequence[Artifact], folder: Path, state: Path, out: Path) -> float:
    """Check a ledger and write it; remember what was released. Returns its epsilon."""
    spent, problems = check_ledger(ledger)
    if problems:
        raise LedgerError(out, problems)
    remember(state, artifacts, folder / PUBLIC)
    replace_file(out, ledger_text(ledger).encode())
    return spent


def adopt_charges(folder: Path, state: Path, say: Callable[[str], None]) -> tuple[Odometer, int, int]:
    """Replace a lost journal. Returns the odometer, and how many charges are new and old entries unreadable."""
    odometer = Odometer(state, read_card(folder / CARD_PATH).dataset_id)
    mine = odometer.dataset_id
    records = dict[str, dict]()
    for ledger in ledgers(folder):
        records |= by_id(ledger)
    for path in (folder / ARTIFACTS).glob("*/privacy.json"):
        try:
            records |= read_artifact(path.parent, allow_local=True).records
        except SfumatoError as error:
            say(f"left out: {error}")
    whole = [record for record in records.values() if not record_problems("record", record)]
    here = [record for record in whole if record["dataset_id"] == mine]
    return odometer, *odometer.adopt(here, seen_in_ledgers(mine, folder))
