"""Write the ledger of a project from its artifacts and its journal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sfumato.data.cards import read_card
from sfumato.data.lineage import remember
from sfumato.errors import UNREADABLE, BudgetError, explained, passing_over
from sfumato.privacy.check import LedgerError, check_ledger, read_lock
from sfumato.privacy.decision import RELEASED
from sfumato.privacy.ledger import (
    build_ledger,
    by_id,
    ledger_text,
    read_budget,
    records_in,
    seen_of,
    unreadable,
)
from sfumato.privacy.odometer import Odometer, Seen
from sfumato.privacy.record import record_problems
from sfumato.settings.recipes import load_params
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, LEDGER, LOCK, PLAN, PUBLIC, RECIPES
from sfumato.settings.stages import QUERIES
from sfumato.storage.artifacts import PRIVACY, Artifact, merge_records, read_artifact
from sfumato.storage.documents import parse_json, quoted, read_json, read_text
from sfumato.storage.files import replace_file
from sfumato.storage.journal import REGROUP
from sfumato.storage.state_directory import REFUSED, git


def ledgers(folder: Path) -> list[dict]:
    """Read the project's ledger.json from disk and from the last commit, in any schema version.

    Raises BudgetError if a ledger is not JSON, or if git refuses to read the project's repository.
    """
    file = folder / LEDGER
    code, committed = git("-C", str(folder), "show", f"HEAD:./{LEDGER}")
    if code == REFUSED and (folder / ".git").exists():
        repository = folder.resolve()
        raise BudgetError(
            f"git refuses to read the repository {repository}, because another account owns it. "
            f"The last committed {LEDGER} is therefore unknown. Work as the owner of the "
            "repository or, if you trust everyone who can write to it, run `git config --global "
            f"--add safe.directory {quoted(repository)}`"
        )
    with explained(BudgetError, lambda error: unreadable(file, error)):
        texts = []
        if file.exists():
            texts.append(read_text(file))
        if code == 0:
            texts.append(committed)
        contents = [parse_json(text) for text in texts]
    return [content for content in contents if isinstance(content, dict)]


def seen_in_ledgers(dataset_id: str, folder: Path = Path()) -> set[str]:
    return {name for content in ledgers(folder) for name in seen_of(content, dataset_id)}


def known_records(folder: Path, state: Path) -> dict[str, dict]:
    """Return the records in a project and in its kept releases, by id. They are not checked."""
    records = [record for content in ledgers(folder) for record in by_id(content).values()]
    files = [*artifacts_of(folder), *kept_releases(state)]
    records += [record for file in files for record in records_in(file)]
    return {record["id"]: record for record in records}


def artifacts_of(folder: Path) -> list[Path]:
    """Return the `privacy.json` files of a project's artifacts, and those in DVC's cache."""
    artifact_files = (folder / ARTIFACTS).glob(f"*/{PRIVACY}")
    return [*artifact_files, folder / PUBLIC / PRIVACY, *cached(folder)]


def kept_releases(state: Path) -> Iterator[Path]:
    return (state / "runs").glob(f"*/{RELEASED}/{PRIVACY}")


def cached(folder: Path) -> Iterator[Path]:
    """Yield the `privacy.json` files in DVC's cache.

    If the rerun of a stage failed, the stage's old file is still in the cache, although DVC removed
    the artifact before the rerun.
    """
    cache = folder / ".dvc/cache/files/md5"
    hashes: list[str] = []
    with passing_over(OSError, ValueError):  # the lock file is missing or cannot be read
        hashes = [out.md5 for stage in read_lock(folder / LOCK) for out in stage.outs]
    for md5 in hashes:
        with passing_over(*UNREADABLE):  # not an artifact, or not in the cache
            of_files = {
                entry["relpath"]: entry["md5"] for entry in read_json(cache / md5[:2] / md5[2:])
            }
            yield cache / of_files[PRIVACY][:2] / of_files[PRIVACY][2:]


def seen_in_project(
    dataset_id: str, folder: Path, state: Path, replaced: Iterable[Path] = ()
) -> Seen:
    """Collect the journal entries of a dataset to which a project and the kept releases refer.

    replaced: further `privacy.json` files to read, of artifacts that are about to be replaced.
    """
    released, kept = (
        {name for file in files for name in seen_of({"records": records_in(file)}, dataset_id)}
        for files in ([*artifacts_of(folder), *replaced], kept_releases(state))
    )
    names = seen_in_ledgers(dataset_id, folder) | released | kept
    return Seen(frozenset(names), frozenset(released))


def write_ledger(
    folder: Path, state: Path, out: Path, say: Callable[[str], None]
) -> tuple[dict, float]:
    """Compose, check and write the ledger of the release and all queries.

    Returns (ledger, ε). Raises LedgerError if the ledger is not valid.
    """
    budget = read_budget(folder / PLAN / "budget.json")
    artifacts = [
        read_artifact(folder / ARTIFACTS / stage, stage) for stage in ("synthesize", *QUERIES)
    ]
    records = merge_records(artifacts)
    if records.owners and not (folder / CARD_PATH).exists():  # a project made by `stage merge`
        say(
            f"note: the datasets {', '.join(records.owners)} have separate journals. Charges that "
            "only these journals contain are not included in this ledger"
        )
        ledger = build_ledger(budget, records, [])
        return ledger, save_ledger(ledger, artifacts, folder, state, out)
    odometer = Odometer(state, read_card(folder / CARD_PATH).dataset_id)
    journal = list[dict]()
    earlier = set[str]()
    head = None
    try:
        journal = odometer.opened()
        earlier = seen_in_ledgers(odometer.dataset_id, folder)
        gap = gap_in(odometer, records, earlier)
        head = None
        if not gap:
            head = odometer.head()
    except BudgetError as error:
        gap = str(error)
    if gap:
        say(f"note: the odometer is incomplete: {gap}")
    ledger = build_ledger(budget, records, journal, dataset_id=odometer.dataset_id, head=head)
    return ledger, save_ledger(ledger, artifacts, folder, state, out)


def gap_in(odometer: Odometer, records: Mapping[str, dict], earlier: set[str]) -> str | None:
    """Return why the odometer of the ledger is incomplete, or None if the journal contains every
    charge ever opened.

    earlier: record ids and journal heads that occur in ledgers.
    """
    dataset_id = odometer.dataset_id
    other_units = {record["unit"] for record in odometer.opened()} - {
        record["unit"] for record in records.values()
    }
    released = frozenset(seen_of({"records": list(records.values())}, dataset_id))
    if other_units and records:
        return (
            f"{odometer.path} also contains charges with another privacy unit "
            f"({', '.join(sorted(other_units))}). They cannot be composed with the charges in this "
            "ledger. This cannot be undone"
        )
    missing = odometer.missing(Seen(released | earlier, released))
    if odometer.complete() and not missing:
        return None
    if REGROUP in {entry["kind"] for entry in odometer.entries()}:
        return (
            f"{odometer.path} contains charges that were opened before images were assigned to "
            "other groups (data.other_groups). The cost of these charges for one of the present "
            "groups is unknown. This cannot be undone"
        )
    if not odometer.head():
        return (
            f"{odometer.path} does not exist. Use the state directory in which the queries ran or, "
            "if it is lost, run `stage ledger adopt`"
        )
    if missing:
        return (
            f"{odometer.path} lacks a charge on dataset {dataset_id!r}, or lists it as still open, "
            "although a ledger or an artifact contains this charge. Restore the newest state "
            "directory or, if it is lost, run `stage ledger adopt`"
        )
    return (
        f"{odometer.path} may lack charges that no file of this project contains, because `stage "
        "ledger adopt` added charges to it, or because an older version created it. This cannot be "
        "undone"
    )


def save_ledger(
    ledger: dict, artifacts: Sequence[Artifact], folder: Path, state: Path, out: Path
) -> float:
    """Check a ledger, write it, and record its artifacts as released. Returns its epsilon."""
    spent, problems = check_ledger(ledger)
    if problems:
        raise LedgerError(out, problems)
    remember(state, artifacts, folder / PUBLIC)
    replace_file(out, ledger_text(ledger).encode())
    return spent


def adopt_charges(
    folder: Path, state: Path, say: Callable[[str], None]
) -> tuple[Odometer, int, int]:
    """Add all charges in the project's files to the journal. If the journal is invalid, begin a new
    one.

    Returns (odometer, number of added charges, number of unreadable entries of the old journal).
    """
    if (folder / CARD_PATH).exists():
        dataset_id = read_card(folder / CARD_PATH).dataset_id
    else:  # `stage prepare sensitive` writes the card, and needs a journal first
        dataset_id = load_params(folder / "params.yaml", folder / RECIPES).data.name
    odometer = Odometer(state, dataset_id)
    records = [
        record
        for record in known_records(folder, state).values()
        if record.get("dataset_id") == dataset_id
    ]
    valid = [record for record in records if not record_problems("record", record)]
    for record in records:
        if record not in valid:
            say(f"note: the charge {record['id'][:8]} is left out: its record is damaged")
    return odometer, *odometer.adopt(valid, seen_in_project(dataset_id, folder, state))
