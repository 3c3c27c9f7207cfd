"""`stage ledger write|check|show|adopt|history`: what the release cost, composed and checked."""

import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sfumato.errors import BudgetError, ConfigError, SfumatoError
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import Artifact, declared_apart, merge_records, read_artifact
from sfumato.storage.files import replace_file
from sfumato.storage.journal import GENESIS, REGROUP
from stages.dvc_lock import keep_copy
from stages.runner import CardPath
from stages.screen import charges, delta_text, say, table_console
from stages.state import ARTIFACTS, CARD, LEDGER, PUBLIC, ledgers, read_policy, seen_in_ledgers, state_dir

app = typer.Typer(no_args_is_help=True, help="Write, check and show the privacy ledger, and everything ever spent.")
LedgerPath = Annotated[Path, typer.Option("--ledger", help="The ledger file.")]
Folder = Annotated[Path, typer.Option("--artifacts", help="Folder of artifact directories.")]


DAY = 10  # characters of a date: exact times tell how long a query took, and so how many images it saw


@app.command()
def write(
    folder: Folder = ARTIFACTS,
    card: CardPath = CARD,
    out: Annotated[Path, typer.Option(help="File to write.")] = LEDGER,
) -> None:
    """Compose the records of the release and of every query into the ledger, and check it."""
    from sfumato.data.store import read_card
    from sfumato.privacy.ledger import build_ledger, read_budget, seen_of
    from sfumato.privacy.odometer import Odometer

    budget = read_budget(folder / "plan" / "budget.json")
    artifacts = [read_artifact(folder / stage, stage) for stage in ("synthesize", *QUERIES)]
    records = merge_records(artifacts)
    apart = declared_apart(artifacts)
    if apart and not card.exists():  # what `stage merge` made
        say(f"note: the journals of {', '.join(apart)} are their owners': what else was ever opened is not known here")
        return save(build_ledger(budget, records, [], apart=apart), out, artifacts)
    odometer = Odometer(state_dir(), read_card(card).dataset_id)
    mine, journal, head, gap = odometer.dataset_id, [], None, f"{odometer.path} was never begun"
    earlier: set[str] = set()
    try:
        journal = odometer.opened()
        others = {record["unit"] for record in journal} - {record["unit"] for record in records.values()}
        earlier = seen_in_ledgers(mine)
        named = earlier | seen_of({"records": list(records.values())}, mine)
        if others and records:
            gap = f"{odometer.path} mixes privacy units ({', '.join(sorted(others))}), which cannot be composed"
        elif odometer.complete() and not named - odometer.known():
            head = odometer.head()
        elif REGROUP in {entry["kind"] for entry in odometer.entries()}:
            gap = f"{odometer.path} holds charges from before the images were regrouped"
        elif odometer.head():
            gap = f"{odometer.path} lacks a charge on dataset {mine!r} that a ledger names"
    except BudgetError as error:
        gap = str(error)
    if head is None:
        say(f"note: the odometer is incomplete: {gap}")
    save(build_ledger(budget, records, journal, dataset_id=mine, head=head, apart=apart), out, artifacts)
    # The copies of releases that this ledger holds stay, to be restored at no cost. So do those that no ledger held
    # yet: they are paid for, and a kill may have come before the pipeline took them over.
    replaced = earlier - records.keys()
    for run, record in odometer.runs().items() if replaced else ():
        if record["id"] in replaced:
            shutil.rmtree(state_dir() / "runs" / run, ignore_errors=True)


def save(ledger: dict, out: Path, artifacts: list[Artifact]) -> None:
    """Check a ledger and write it; remember what was released."""
    from sfumato.data.lineage import remember
    from sfumato.privacy.check import check_ledger
    from sfumato.privacy.ledger import ledger_text

    spent, problems = check_ledger(ledger)
    fail(out, problems)
    remember(state_dir(), artifacts, PUBLIC)
    replace_file(out, ledger_text(ledger).encode())
    keep_copy()
    bound = f"ε = {spent:.4f} of {ledger['target']:g} at δ = {delta_text(ledger['delta'])}"
    typer.echo(f"{out}: {bound}, {charges(len(ledger['records']))}")


@app.command()
def check(
    ledger: LedgerPath = LEDGER,
    epsilon: Annotated[float | None, typer.Option(help="Fail above this epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="Compute at this delta instead of the ledger's.")] = None,
    unit: Annotated[str | None, typer.Option(help="Fail unless this is protected: image, or group.")] = None,
    artifacts: Annotated[bool, typer.Option("--artifacts", help="Also verify the files and their records.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder of artifact directories, for --artifacts.")] = ARTIFACTS,
    lock: Annotated[Path, typer.Option(help="DVC's lock file.")] = Path("dvc.lock"),
) -> None:
    """Recompute epsilon from the records only; exit 3 if anything does not hold. Needs no data and no GPU."""
    from sfumato.privacy.check import check_ledger, lock_problems
    from sfumato.privacy.events import PROTECTED, UNITS
    from sfumato.privacy.ledger import compose, of_one_person, read_ledger
    from sfumato.privacy.opinions import all_opinions, disagreements

    for flag, value in (("--epsilon", epsilon), ("--delta", delta)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value:g} is not a bound: give a positive number")
    if unit not in (None, *UNITS):
        raise ConfigError(f"--unit {unit} is not a unit: give one of {', '.join(UNITS)}")
    content = read_ledger(ledger)
    spent, problems = check_ledger(content, limit=epsilon, delta=delta, unit=unit)
    if lock.exists():
        problems += lock_problems(content, ledger, lock)
    else:
        typer.echo(f"note: {lock} does not exist, so the ledger is compared with no run", err=True)
    if artifacts:
        problems += artifact_problems(content, folder, lock)
    fail(ledger, problems)
    at, apart = delta or content["delta"], content.get("apart", ())
    parts = of_one_person(content["records"], apart)
    dearest = max(parts.values(), key=lambda part: compose(part, at)["epsilon"]["rdp"])
    opinions = all_opinions(dearest, at)  # takes seconds: of a ledger that holds
    fail(ledger, disagreements(opinions, content["accountant"]))
    bound = f" ≤ {epsilon:g}" if epsilon is not None else ""
    units = sorted({record["unit"] for record in content["records"]})
    protected = "".join(f", for {PROTECTED.get(name, name)}" for name in units)
    typer.echo(
        f"{ledger} holds: ε = {spent:.4f}{bound} at δ = {delta_text(at)}, {charges(len(content['records']))}, "
        f"{content['adjacency']}{protected}"
    )
    typer.echo(f"ε by accountant: {', '.join(f'{name} {opinion}' for name, opinion in opinions.items())}")
    for name, part in parts.items() if apart else ():
        own = compose(part, at)["epsilon"][content["accountant"]]
        typer.echo(f"ε = {own:.4f} for whoever is in {name!r} only, by the declaration that the owners' people differ")


def artifact_problems(ledger: dict, folder: Path, lock: Path) -> list[str]:
    """What is wrong with the bytes, names and records of the artifacts on disk.

    An artifact holds the records of every input that its plan reads, a query its own too; the ledger holds them all.
    """
    from sfumato.privacy.check import lock_outs
    from sfumato.privacy.ledger import by_id
    from sfumato.privacy.resolved import read_stage_plan

    paths, known = {path.parent for path in folder.glob("*/privacy.json")}, by_id(ledger)
    if not paths:
        return [f"{folder} holds no artifact to verify (`dvc checkout`, `dvc pull`)"]
    if lock.exists():
        try:
            outs = [Path(name) for name in lock_outs(lock)]
        except (OSError, ValueError):
            return []  # `lock_problems` says so
        # DVC keeps the entries of stages that an earlier version had
        paths |= {folder / path.name for path in outs if path.parent == ARTIFACTS and path.name in STAGES}
    if folder == ARTIFACTS and (PUBLIC / "privacy.json").is_file():
        paths.add(PUBLIC)  # an earlier release may be among the public images
    problems, found = [], dict[str, Artifact]()
    for path in sorted(paths):
        try:
            found[path.name] = read_artifact(path, path.name, allow_local=True)
        except SfumatoError as error:
            problems.append(str(error))
            continue
        unknown = [key for key, record in found[path.name].records.items() if known.get(key) != record]
        problems += [f"{path} depends on charge {key[:8]}, which the ledger does not hold" for key in unknown]
    if declared_apart(list(found.values())) != tuple(ledger.get("apart", ())):
        problems.append("it sets data sets apart that its artifacts do not, or they others")
    for name, artifact in found.items():
        if name not in STAGES or not artifact.enabled:
            continue
        own = {record["stage"] for record in artifact.records.values() if isinstance(record, dict)}
        if name in QUERIES and name not in own:
            problems.append(f"{artifact.path} holds no record of its own charge: its privacy.json was edited")
        try:
            settings = read_stage_plan(folder / "plan" / f"{name}.yaml", name).settings
        except SfumatoError as error:
            problems.append(str(error))
            continue
        for other in (other for other in STAGES[name].inputs if other in found and settings.reads(other)):
            if not found[other].records.keys() <= artifact.records.keys():
                problems.append(f"{artifact.path} lacks records of {other}, which it was made from: one was trimmed")
    return problems


def fail(path: Path, problems: list[str]) -> None:
    if problems:
        raise BudgetError(f"{path} does not hold: " + "; ".join(problems))


@app.command()
def show(ledger: LedgerPath = LEDGER) -> None:
    """The ledger as a table."""
    from sfumato.privacy.check import malformed
    from sfumato.privacy.ledger import by_id, read_ledger
    from sfumato.privacy.record import record_problems

    content = read_ledger(ledger)
    fail(ledger, malformed(content))
    fail(ledger, [p for i, r in enumerate(content["records"]) for p in record_problems(f"record {i}", r)])
    records = by_id(content)
    spent = f"ε = {content['epsilon'][content['accountant']]:.4f} at δ = {delta_text(content['delta'])}"
    heads = ("stage", "charge", "released", "mechanism", "ε alone", "share")
    table = Table(*heads, title=f"{content['recipe']}: {spent}", title_justify="left")
    for name, row in content["stages"].items():
        for i, key in enumerate(row["records"]):
            record = records[key]
            cost = (f"{row['epsilon']:.3f}", f"{row['share']:.1%}") if i == 0 else ("", "")
            table.add_row(name, key[:8], record["released"], mechanism_text(record["event"]), *cost)
    table_console().print(table)
    by = ", ".join(f"{name} {value:.4f}" for name, value in content["epsilon"].items())
    odometer = content["odometer"]
    least, note = ("", "") if odometer["complete"] else ("at least ", " (incomplete: charges lacked in the journal)")
    typer.echo(
        f"ε by accountant: {by}. {content['adjacency']}. Ever opened on dataset {odometer['dataset_id']!r}: "
        f"{least}{charges(odometer['charges'])}, ε = {odometer['epsilon']:.4f}{note}"
    )


@app.command()
def adopt(folder: Folder = ARTIFACTS, card: CardPath = CARD) -> None:
    """Replace a lost journal: count what can be read of it, and what ledgers and artifacts hold."""
    from sfumato.data.store import read_card
    from sfumato.privacy.ledger import by_id
    from sfumato.privacy.odometer import Odometer
    from sfumato.privacy.record import record_problems

    odometer = Odometer(state_dir(), read_card(card).dataset_id)
    mine, records = odometer.dataset_id, dict[str, dict]()
    for ledger in ledgers():
        records |= by_id(ledger)
    for path in folder.glob("*/privacy.json"):
        try:
            records |= read_artifact(path.parent, allow_local=True).records
        except SfumatoError as error:
            say(f"left out: {error}")
    whole = [record for record in records.values() if not record_problems("record", record)]
    new, lost = odometer.adopt([record for record in whole if record["dataset_id"] == mine], seen_in_ledgers(mine))
    if lost:
        say(f"{lost} entries of the old journal, kept beside it, cannot be read: their charges are not counted")
    typer.echo(
        f"{odometer.path}: {charges(new)} adopted, {len(odometer.opened())} counted in all. "
        "More may be lost, so ledgers and reports call the odometer incomplete"
    )


@app.command()
def history(
    dataset: Annotated[str | None, typer.Option(help="Dataset id. Default: that of the data card.")] = None,
    card: CardPath = CARD,
    delta: Annotated[float | None, typer.Option(help="Delta for the total. Default: that of the plan.")] = None,
) -> None:
    """Everything ever opened on the sensitive images, aborted charges too."""
    from sfumato.data.store import read_card
    from sfumato.privacy.accountant import epsilon
    from sfumato.privacy.odometer import ABANDON, ADOPT, CLOSE, LOCAL, OPEN, PROGRESS, Odometer

    odometer = Odometer(state_dir(), dataset or read_card(card).dataset_id)
    entries = odometer.entries()
    unknown = seen_in_ledgers(odometer.dataset_id) - odometer.known()
    if unknown:
        say(
            f"{odometer.path} lacks {min(unknown)[:8]}, which {LEDGER} names: it is an older copy or another journal, "
            "and more was spent. Restore the newest state directory, or run `stage ledger adopt`"
        )
    if not entries or entries[-1]["kind"] == GENESIS:
        typer.echo(f"dataset {odometer.dataset_id!r}: no history")
        return
    delta = read_policy().delta if delta is None else delta
    runs = odometer.runs()
    words = {CLOSE: "released", ABANDON: "given up"}
    ended = {entry["id"]: words[entry["kind"]] for entry in entries if entry["kind"] in words}
    durable = {entry["id"]: entry["uses"] for entry in entries if entry["kind"] == PROGRESS}
    heads = ("time (UTC)", "stage", "charge", "mechanism", "state")
    table = Table(*heads, title=f"dataset {odometer.dataset_id}", title_justify="left")
    for entry in entries:
        when = utc(entry["time"])[: None if sys.stdout.isatty() else DAY]
        if entry["kind"] == OPEN:
            key = entry["record"]["id"]
            state = ended.get(key, f"open, {durable.get(key, 0)} uses on disk")
            record = runs[key]  # the newest of a run that was resumed, which ledgers hold
            table.add_row(when, record["stage"], record["id"][:8], mechanism_text(record["event"]), state)
        elif entry["kind"] == LOCAL and sys.stdout.isatty():  # it follows from when the images changed
            table.add_row(when, "local", "", entry["purpose"], "outside the guarantee")
        elif entry["kind"] == ADOPT:
            for record in entry["records"]:
                table.add_row(when, record["stage"], record["id"][:8], mechanism_text(record["event"]), "adopted")
    table_console().print(table)
    opened = odometer.events()
    note = " (incomplete: entries of the journal were lost)" if unknown or not odometer.complete() else ""
    typer.echo(f"{charges(len(opened))}, ε = {epsilon(opened, delta):.4f} together at δ = {delta_text(delta)}{note}")


def utc(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # of a clock that was far off
        return f"{seconds} s after 1970"


def mechanism_text(event: dict) -> str:
    """A mechanism's JSON in a few words."""
    from sfumato.privacy.events import Mechanism

    one = Mechanism.from_json(event)
    rate, uses = f", q = {one.sample_rate:.4g}", f", × {one.uses}"
    return f"σ = {one.noise_multiplier:g}{rate if one.sample_rate < 1 else ''}{uses if one.uses > 1 else ''}"
