"""`stage plan`: resolve every parameter, calibrate the noise, show the budget."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.errors import BudgetError, ConfigError, reading_sensitive
from sfumato.settings.data import OF_THE_OWNER, SEVERAL
from sfumato.settings.dpsgd import SALIENT
from sfumato.settings.fields import REST
from sfumato.settings.params import Params
from sfumato.settings.privacy import UNLIMITED
from sfumato.settings.recipes import load_params, read_yaml
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import merge_records, read_artifact
from sfumato.storage.files import replace_file
from stages.runner import CardPath, PublicPath, lineage_of_model, memory_line
from stages.screen import charges, delta_text, numbers_table, say, table_console, tell
from stages.state import ARTIFACTS, CARD, LEDGER, PLAN, PUBLIC, seen_in_ledgers, state_dir

if TYPE_CHECKING:
    from sfumato.data.store import Card
    from sfumato.planning.kept import Spending
    from sfumato.planning.resolve import Plan
    from sfumato.privacy.odometer import Odometer

PEOPLE = (
    "privacy.unit is not said, so one image is protected: the costs of several images of one person add up. If there "
    "are such, write privacy.unit: group and data.groups; if not, privacy.unit: image, which reports quote as your word"
)
ParamsPath = Annotated[Path, typer.Option("--params", help="What the user edits.")]
BUSY = 0.5  # running programs per processor, from which a line warns of them
RECIPES = Path("pipelines")  # if it is missing, those of the package
RecipesPath = Annotated[Path, typer.Option("--recipes", help="Folder of recipes, with its profiles/.")]


def plan(
    params: ParamsPath = Path("params.yaml"),
    recipes: RecipesPath = RECIPES,
    card: CardPath = CARD,
    public: PublicPath = PUBLIC,
    out: Annotated[Path, typer.Option(help="Directory to write.")] = PLAN,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be spent; write nothing.")] = False,
) -> None:
    """Free: one resolved configuration per stage, and the budget table."""
    from sfumato.data.prepare import unnamed_version
    from sfumato.data.store import dataset_directory, read_card, read_public_card
    from sfumato.data.tables import check_parquet
    from sfumato.planning.checks import reads_public
    from sfumato.planning.kept import known_past, spending_of
    from sfumato.planning.project import renew
    from sfumato.planning.resolve import check_lifetime_of, make_plan, plan_texts, warnings_of
    from sfumato.privacy.authorize import check_known
    from sfumato.privacy.odometer import Odometer

    if not dry_run and renew(Path("dvc.yaml")):
        raise ConfigError("dvc.yaml was written by an older version. It is up to date now: run `dvc repro` again")
    loaded = load_params(params, recipes)
    if loaded.runs("synthesize") and "parquet" in loaded.synthesize.export:
        check_parquet()  # before anything is spent
    known = unprepared(loaded) if dry_run and not card.exists() else read_card(card)
    home = dataset_directory(state_dir(), known.dataset_id)
    version = (loaded.data.version or unnamed_version(home) or known.version) if dry_run else known.version
    again = version != known.version
    if again:
        say(f"the images are not yet prepared as version {version}: `dvc repro` does so first, and then what follows")
        known = replace(known, version=version)
    if sys.stderr.isatty():  # that there were changes is private
        show_changes(loaded)
    if loaded.privacy.unit is None and loaded.data.groups is None and known.source in OF_THE_OWNER:
        say(f"warning: {PEOPLE}")
    reads, inputs = reads_public(loaded) and not (dry_run and not public.exists()), []
    if reads:
        inputs.append(read_artifact(public, "public"))
    if loaded.model.directory is not None:
        from sfumato.text_to_image.directory import choose_image_size, read_model_directory, require_library

        require_library()
        choose_image_size(read_model_directory(str(loaded.model.directory)), loaded.model)
        inputs += lineage_of_model(loaded.model)
    inherited = list(merge_records(inputs).values())
    odometer = Odometer(state_dir(), known.dataset_id)
    shown_public = read_public_card(public / "card.json") if reads else None
    past = known_past(state_dir(), known, ARTIFACTS, LEDGER, declared_size=loaded.privacy.declared_size)
    made = make_plan(loaded, known, shown_public, past.runs, inherited)
    show_budget(made)
    if dry_run and not inherited:
        show_risk(made)
    show_shares(made, params)
    if inherited:
        ids = ", ".join(sorted({record["dataset_id"] for record in inherited}))
        say(f"the budget holds {charges(len(inherited))} of an earlier release, behind public inputs (datasets {ids})")
    for warning in warnings_of(loaded, made.budget["delta"], len(known.classes)):
        say(f"warning: {warning}")
    if odometer.head() is not None:
        check_known(odometer, known, seen_in_ledgers(known.dataset_id), loaded.privacy.lifetime != UNLIMITED)
    spending, coming = spending_of(made, past, out)
    refusal = None
    try:
        check_lifetime_of(made, odometer, spending)
    except BudgetError as error:
        refusal = error
    if dry_run:
        show_spending(made, known, odometer, spending)
        show_settings_for_ever(loaded)
        show_memory(made)
        show_step_noise(made)
        if loaded.privacy.unit == "group":
            for name, mechanism in made.mechanisms.items():
                size = loaded.privacy.size
                tell(f"{name}: a draw expects {mechanism.sample_rate * size:.4g} of {size} groups")
        from sfumato.planning.estimate import expected_seconds

        many = shown_public.images if shown_public is not None else 0
        expected = expected_seconds(made.params, known.shape, len(known.classes), state_dir(), many)
        coming |= {"plan", *(("ledger", "report") if coming else ())}
        prepared = {"prepare sensitive": card.exists() and not again, "prepare public": (public / "card.json").exists()}
        coming |= {name for name, there in prepared.items() if not there}
        show_minutes(made.params, {name: value for name, value in expected.items() if name in coming})
    if refusal is not None:
        raise refusal
    if dry_run:
        return show_next(made, spending)
    write_texts(out, plan_texts(made, out))


def unprepared(params: Params) -> Card:
    """The card that images in a folder will have. Raises DataError for another source: prepare them first."""
    from sfumato.data.sources.imagefolder import list_folder
    from sfumato.data.sources.splits import split_of
    from sfumato.data.store import read_card
    from sfumato.planning.proposal import proposed_card

    reading_sensitive()
    data = params.data
    if data.source != "imagefolder" or data.path is None or data.size is None or data.channels is None:
        return read_card(CARD)
    path = Path(data.path).expanduser()
    classes = data.classes or list_folder(path).classes
    say("the images are not prepared yet: what follows is for those in the folder")
    return proposed_card(params, classes, bool(split_of(path)[1]) and data.labels != SEVERAL)


def show_changes(params: Params) -> None:
    """Say it if pictures were added to the source, or removed, after they were prepared: DVC does not see them."""
    from sfumato.data.listing import listing_of
    from sfumato.data.prepare import LISTING, secret_key
    from sfumato.data.store import dataset_directory

    file = dataset_directory(state_dir(), params.data.name) / LISTING
    listing = listing_of(params.data, secret_key(state_dir(), params.data.name)) if file.is_file() else None
    if listing is not None and listing != file.read_text(encoding="utf-8"):
        say(
            "note: the files of the sensitive images have changed since they were prepared. The release stays as it is "
            "until params.yaml has a new data.version, and then every query spends again"
        )


def show_memory(made: Plan) -> None:
    """Show how much memory the queries that take gradients of the network need."""
    params = made.params
    for name in (name for name in made.mechanisms if STAGES[name].network):
        file = made.files[name]
        about = tuple(file["shape"]), len(file["classes"]), getattr(params, name), file["size_hint"]
        tell(f"{name}: memory {memory_line(params.model, *about)}")


def show_step_noise(made: Plan) -> None:
    """Show how long the noise of a DP-SGD step is beside the longest possible signal, by public numbers."""
    params, mechanism = made.params, made.mechanisms.get("finetune")
    if mechanism is None:
        return
    from sfumato.dpsgd.run import step_noise
    from sfumato.dpsgd.trainable import trained_parameters
    from sfumato.release.synthesizer import outline

    file = made.files["finetune"]
    model = outline(params.model, tuple(file["shape"]), len(file["classes"]))
    parameters = trained_parameters(model, params.finetune, params.seed)
    weights = sum(value.numel() for value in parameters.values())
    length = step_noise(mechanism.noise_multiplier, weights, mechanism.sample_rate * file["size_hint"])
    about = "about " if params.finetune.trainable in SALIENT else ""
    hint = ": mostly noise. A larger share, ε or batch, or fewer trained weights shorten it"
    tell(
        f"finetune: the noise of a step is {length:.2g} times as long as its signal can be, "
        f"over {about}{weights:,} trained weights{hint if length > 1 else ''}"
    )


def write_texts(out: Path, texts: dict[str, str]) -> None:
    """Replace the files that changed, one by one, and remove files of an older plan."""
    if out.exists() and any(
        p.name not in texts and p.suffix not in (".yaml", ".json", ".csv", ".tmp") for p in out.iterdir()
    ):
        raise ConfigError(f"--out {out} holds files that are not of a plan: name another directory")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if not (out / name).is_file() or (out / name).read_bytes() != text.encode():
            replace_file(out / name, text.encode())
    for path in out.iterdir():
        if path.name not in texts:
            path.unlink()


def show_budget(made: Plan) -> None:
    """Stage, mechanism, epsilon alone, share; then the total against the target."""
    budget = made.budget
    title = f"{budget['recipe']}: privacy budget at δ = {delta_text(budget['delta'])}"
    table = numbers_table(title, "stage", "σ", "sample rate", "releases", "ε alone", "share of RDP")
    for name, row in budget["stages"].items():
        noise = f"{row['noise_multiplier']:g}", f"{row['sample_rate']:.4g}", str(row["uses"])
        table.add_row(name, *noise, f"{row['epsilon']:.3f}", f"{row['share']:.1%}")
    table.add_section()
    table.add_row("together", "", "", "", f"{budget['epsilon']:.3f}", f"target {budget['target']:g}")
    table_console().print(table)


def show_risk(made: Plan) -> None:
    """Show what the budget means: how often an attacker is right at most, and at which ε half as far above a coin."""
    from sfumato.privacy.accountant import epsilon
    from sfumato.privacy.profile import best_guess, noise_for_guess, percent_up

    mechanisms, unit = [*made.mechanisms.values()], made.params.privacy.unit
    adjacency, accountant = made.budget["adjacency"], made.budget["accountant"]
    guess = best_guess(mechanisms, adjacency)
    half = noise_for_guess(mechanisms, (guess + 0.5) / 2, adjacency)
    events = [replace(one, noise_multiplier=half * one.noise_multiplier).event for one in mechanisms]
    lower = epsilon(events, made.budget["delta"], accountant, adjacency)
    tell(
        f"risk: who guesses whether one {'person' if unit == 'group' else 'image'} was in the set is right at most "
        f"{percent_up(guess)} % of the time (a coin: 50 %), whatever else they know; half as far above a coin, "
        f"{percent_up((guess + 0.5) / 2)} %, at ε = {lower:.2g}"
    )


def show_minutes(params: Params, seconds: Mapping[str, float | None]) -> None:
    """Expected minutes of each stage that is switched on, of all else, and in total. seconds: by name."""
    table = numbers_table("minutes, idle machine", "stage", "expected")
    others = 0.0
    for name, value in seconds.items():
        if name in STAGES and params.runs(name):
            table.add_row(name, "unknown" if value is None else f"{value / 60:.1f}")
        else:
            others += value or 0.0
    table.add_row("all others", f"{others / 60:.1f}")
    table.add_section()
    table.add_row("together", f"{sum(value or 0.0 for value in seconds.values()) / 60:.1f}")
    table_console().print(table)
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * processors:
        tell(f"other programs are running (load {load:.1f} on {processors} processors): expect longer")


def show_shares(made: Plan, params: Path) -> None:
    """Show which stages have another share than the requested one, and why."""
    own, apart = read_yaml(params), []
    for name in made.mechanisms:
        noise, share = getattr(made.params, name).noise, made.budget["stages"][name]["share"]
        section = own.get(name)
        if noise == REST and isinstance(section, dict) and str(section.get("noise", REST)) != REST:
            say(f"{name} takes the rest, as recipe {made.params.recipe} says, and not {section['noise']} of {params}")
        elif isinstance(noise, str) and noise != REST and abs(share - float(noise.rstrip("%")) / 100) > 0.001:
            apart.append(f"{name} {noise}")
    if apart:
        say(f"asked for: {', '.join(apart)}. A share is held at an order of its own; the table shows that of the sum")


def show_spending(made: Plan, card: Card, odometer: Odometer, spending: Sequence[Spending]) -> None:
    """A line for each query: already released, goes on, or what it would spend and why."""
    from sfumato.privacy.decision import GO_ON

    if not odometer.opened():
        tell(f"nothing was ever spent on dataset {card.dataset_id!r}, by the journal in {odometer.path.parent}")
    before = {record["stage"] for record in odometer.opened()}
    for entry in spending:
        stage, cause = entry.stage, entry.cause
        cost = f"ε = {made.budget['stages'][stage]['epsilon']:.3f} alone ({made.mechanisms[stage]})"
        if not entry.pays:
            tell(f"{stage}: {entry.words}{f' ({cost})' if entry.decision.kind == GO_ON else ''}")
        else:
            why = "is new or was changed" if cause == stage else f"depends on {cause}, which was changed"
            if made.lineage[stage].again:
                why = "is named in privacy.spend_again, or reads what is"
            tell(f"{stage}: would {'re-spend' if stage in before else 'spend'} {cost}: it {why}")


def show_settings_for_ever(params: Params) -> None:
    """Show which free stages must be set before the first run, as queries read them."""
    from sfumato.planning.kept import settings_for_ever

    for name, queries in settings_for_ever(params).items():
        say(f"{name}: set it before the first run: to change it afterwards spends again on {', '.join(queries)}")


def show_next(made: Plan, spending: Sequence[Spending]) -> None:
    """The last line: what to do now."""
    coming = [entry.stage for entry in spending if entry.pays]
    costs = ", ".join(f"{name} (ε = {made.budget['stages'][name]['epsilon']:.3f} alone)" for name in coming)
    wishes = made.params.privacy.spend_again
    granted = [entry.stage for entry in spending if not entry.pays and entry.stage in wishes]
    if granted:
        more = ", ".join(f"{name}: {made.lineage[name].again + 1}" for name in granted)
        tell(f"{', '.join(granted)} was paid for again; privacy.spend_again: {{{more}}} would pay once more")
    tell(f"next: `dvc repro` will spend: {costs}" if coming else "next: nothing to spend: `dvc repro`")
