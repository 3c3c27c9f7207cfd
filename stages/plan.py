"""`stage plan`: resolve every parameter, calibrate the noise, show the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.common import CARD, PLAN, PUBLIC, ROOT, CardPath, PublicPath, state_dir, table_console

if TYPE_CHECKING:
    from sfumato.config import Params as Parameters
    from sfumato.data.store import Card
    from sfumato.plan import Plan
    from sfumato.privacy.events import Mechanism

Params = Annotated[Path, typer.Option("--params", help="What the user edits.")]
Recipes = Annotated[Path, typer.Option("--recipes", help="Folder of recipes, with its profiles/.")]


def plan(
    params: Params = Path("params.yaml"),
    recipes: Recipes = Path("pipelines"),
    card: CardPath = CARD,
    public: PublicPath = PUBLIC,
    out: Annotated[Path, typer.Option("--out", help="Directory to write.")] = PLAN,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the budget and what would be spent again; write nothing.")
    ] = False,
) -> None:
    """Free: one resolved configuration per stage, and the budget table."""
    from sfumato.data.store import read_card, read_public_card
    from sfumato.plan import load_params, make_plan, plan_texts

    loaded = load_params(params, recipes)
    known = read_card(card)
    made = make_plan(loaded, known, ROOT, read_public_card(public / "card.json") if loaded.public.enabled else None)
    if loaded.model.directory is not None:
        check_public_model(loaded)
    show_budget(made)
    spending = spending_of(made, known, out)
    check_lifetime_of(made, known, spending)
    if dry_run:
        show_spending(made, known, spending)
        show_memory_of(made)
        show_step_noise(made)
        return
    write_texts(out, plan_texts(made))


def check_public_model(params: Parameters) -> None:
    """Raise ConfigError or DataError where the public model is not there or cannot be used: before anything is spent on a query."""
    from sfumato.public_model.directory import choose_image_size, read_model_directory, require_library

    require_library()
    assert params.model.directory is not None
    choose_image_size(read_model_directory(params.model.directory), params.model)


def show_memory_of(made: Plan) -> None:
    """What the stages that train a public model will take. Nothing for a network of our own."""
    from stages.latents import memory_line

    params = made.params
    for stage in ("saliency", "finetune"):
        if params.model.directory is not None and getattr(params, stage).enabled:
            typer.echo(
                f"{stage}: memory {memory_line(params.model, len(made.files[stage]['classes']), getattr(params, stage))}"
            )


def show_step_noise(made: Plan) -> None:
    """How much of a step of DP-SGD can be signal at most, by public numbers. Nothing where there is no DP-SGD."""
    params, mechanism = made.params, made.mechanisms.get("finetune")
    if mechanism is None:
        return
    import torch

    from sfumato.config import SALIENT
    from sfumato.diffusion.unet import UNet
    from sfumato.dpsgd.memory import trained_parameters
    from sfumato.dpsgd.run import step_noise
    from sfumato.public_model.network import outline

    (channels, resolution, _), classes = made.files["finetune"]["shape"], len(made.files["finetune"]["classes"])
    with torch.device("meta"):
        own = (
            None
            if params.model.directory
            else UNet(resolution=resolution, channels=channels, classes=classes, **params.model.network())
        )
    model = own or outline(params.model, classes)
    weights = sum(
        value.numel()
        for value in trained_parameters(model, params.finetune, params.seed, params.saliency.candidates).values()
    )
    length = step_noise(
        mechanism.noise_multiplier, weights, mechanism.sample_rate * made.files["finetune"]["size_hint"]
    )
    about = "about " if params.finetune.trainable in SALIENT else ""
    hint = (
        ": mostly noise. A larger share or ε, a larger batch or fewer trained weights shorten it" if length > 1 else ""
    )
    typer.echo(
        f"finetune: the noise of a step is {length:.2g} times as long as its signal can be, over {about}{weights:,} trained weights{hint}"
    )


def write_texts(out: Path, texts: dict[str, str]) -> None:
    """Replace the files one by one, unchanged ones left alone; files of an older plan are removed."""
    from sfumato.data.images import replace_file
    from sfumato.errors import ConfigError

    if out.exists() and any(p.name not in texts and p.suffix not in (".yaml", ".json", ".csv") for p in out.iterdir()):
        raise ConfigError(f"--out {out} holds files that are no plan: name another directory")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if not (out / name).is_file() or (out / name).read_text(encoding="utf-8") != text:
            replace_file(out / name, text.encode())
    for path in out.iterdir():
        if path.name not in texts:
            path.unlink()


def show_budget(made: Plan) -> None:
    """Stage, mechanism, epsilon alone, share; then the total against the target."""
    from rich.table import Table

    budget = made.budget
    table = Table(title=f"{budget['recipe']}: privacy budget at δ = {budget['delta']:.3g}", title_justify="left")
    for heading in ("stage", "σ", "sample rate", "releases", "ε alone", "share of RDP"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, row in budget["stages"].items():
        table.add_row(
            name,
            f"{row['noise_multiplier']:g}",
            f"{row['sample_rate']:.4g}",
            str(row["uses"]),
            f"{row['epsilon']:.3f}",
            f"{row['share']:.1%}",
        )
    table.add_section()
    table.add_row("together", "", "", "", f"{budget['epsilon']:.3f}", f"target {budget['target']:g}")
    table_console().print(table)


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What becomes of one query under a plan.

    done: the charge that released it; cause: the stage whose change makes it spend, or None; left_open: a kill left it on the odometer, and it
    goes on from there at no further cost.
    """

    stage: str
    mechanism: Mechanism
    done: str | None
    cause: str | None
    left_open: bool


def spending_of(made: Plan, card: Card, out: Path) -> list[Spending]:
    """For each query: already released, or to be spent, and why. `out`: the folder of the plan so far."""
    import yaml

    from sfumato.digest import digest_of
    from sfumato.plan import UPSTREAM
    from sfumato.privacy.odometer import Odometer
    from sfumato.resolved import STAGES

    odometer = Odometer(state_dir(), card.dataset_id)
    changed: dict[str, str] = {}  # stage -> the stage whose change reaches it
    found = []
    for stage in STAGES:
        file = out / f"{stage}.yaml"
        content = made.files[stage]
        same = file.is_file() and yaml.safe_load(file.read_text(encoding="utf-8")) == content
        cause = next((changed[upstream] for upstream in UPSTREAM[stage] if upstream in changed), None)
        mechanism = made.mechanisms.get(stage)
        done = odometer.closed(card.fingerprint, plan=digest_of(content)) if mechanism else None
        if not same or (mechanism and not done):
            cause = stage
        if cause:
            changed[stage] = cause
        if mechanism is not None:
            left_open = stage == "finetune" and odometer.left_open(card.fingerprint, digest_of(content))
            found.append(Spending(stage=stage, mechanism=mechanism, done=done, cause=cause, left_open=left_open))
    return found


def check_lifetime_of(made: Plan, card: Card, spending: Sequence[Spending]) -> None:
    """Refuse a plan that would run out of the lifetime budget half-way, before its first query."""
    if made.params.privacy.lifetime_epsilon is None:
        return
    from sfumato.privacy.charge import Permission, check_lifetime
    from sfumato.privacy.odometer import Odometer

    privacy = made.params.privacy
    permission = Permission(
        delta=made.budget["delta"], lifetime_epsilon=privacy.lifetime_epsilon, declared_size=privacy.declared_size
    )
    events = [entry.mechanism.event for entry in spending if entry.cause and not entry.left_open]
    if events:
        check_lifetime(Odometer(state_dir(), card.dataset_id), events, permission)


def show_spending(made: Plan, card: Card, spending: Sequence[Spending]) -> None:
    """A line for each query: already released, or what it would spend and why."""
    from sfumato.privacy.odometer import Odometer

    odometer = Odometer(state_dir(), card.dataset_id)
    if not odometer.path.exists():
        typer.echo(f"no history of dataset {card.dataset_id!r} in {odometer.path.parent}")
    for entry in spending:
        stage, cause = entry.stage, entry.cause
        if cause is None:
            typer.echo(f"{stage}: already released as {entry.done}; not spent again")
            continue
        row = made.budget["stages"][stage]
        why = "is new or was changed" if cause == stage else f"depends on {cause}, which was changed"
        again = (
            "re-spend"
            if entry.done or (odometer.closed(card.fingerprint) and any(r["stage"] == stage for r in odometer.opened()))
            else "spend"
        )
        typer.echo(f"{stage}: would {again} ε = {row['epsilon']:.3f} alone ({entry.mechanism}): it {why}")
