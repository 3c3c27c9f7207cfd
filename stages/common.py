"""What all stage commands share: options, the state directory, dry runs, progress, and opening a charge."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sfumato.artifacts import Artifact
    from sfumato.privacy.charge import Charge
    from sfumato.queries.count import PublicCounts
    from sfumato.resolved import StagePlan

ROOT = Path(__file__).resolve().parent.parent  # the folder that holds the packages sfumato and stages
ARTIFACTS = Path("artifacts")
EVALUATION = Path("evaluation")  # numbers from real images, of which neither DVC nor git knows
PLAN = ARTIFACTS / "plan"
CARD = Path("data/sensitive/card.json")
PUBLIC = Path("data/public")
RELEASED = "released"  # in a run's directory: the copy of its release

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", help="Resolved configuration. Default: artifacts/plan/<stage>.yaml, which `stage plan` writes."
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory to write. Default: artifacts/<stage>.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be read, written and charged, and stop.")]
CardPath = Annotated[Path, typer.Option("--card", help="Public card of the sensitive set.")]


PublicPath = Annotated[Path, typer.Option("--public", help="Public image set, which `stage prepare public` writes.")]


def input_option(stage: str):
    """The option that names the artifact of another stage."""
    return typer.Option(f"--{stage}", help=f"Artifact of `stage {stage}`.")


def state_dir() -> Path:
    """Where sensitive bytes, keys, journals and checkpoints live: $SFUMATO_STATE, or the user's state directory."""
    if named := os.environ.get("SFUMATO_STATE"):
        if not Path(named).is_absolute():
            raise ConfigError(
                f"SFUMATO_STATE={named} is relative: from another folder it would be another odometer. Give the whole path"
            )
        return Path(named)
    from platformdirs import user_state_path

    return user_state_path("sfumato")


def load_plan(stage: str, config: Path | None) -> StagePlan:
    from sfumato.resolved import read_stage_plan

    return read_stage_plan(config or PLAN / f"{stage}.yaml", stage)


def describe(plan: StagePlan, reads: Mapping[str, Path], out: Path) -> None:
    """The answer to --dry-run."""
    if not plan.enabled:
        typer.echo(
            f"{plan.stage} is switched off by its recipe: it writes an empty artifact to {out} and charges nothing"
        )
        return
    for name, path in reads.items():
        typer.echo(f"reads   {path} ({name}{'' if path.exists() else ': not there yet'})")
    typer.echo(f"writes  {out}")
    typer.echo(f"charges {plan.mechanism} on dataset {plan.dataset_id!r}" if plan.mechanism else "charges nothing")


def open_stage_charge(
    plan: StagePlan,
    card: Path,
    inputs: Sequence[Artifact],
    out: Path,
    released: str,
    sensitivity: str,
    *,
    resumable: bool = False,
    latents: str | None = None,
) -> Charge | None:
    """The charge that a query stage's plan asks for; None where nothing is left to do.

    That is so when a kill came between the release and the pipeline's taking it over: the release, kept with its run until the
    ledger is written, is then put back at `out`, at no cost.
    """
    import json

    from sfumato.data.store import read_card
    from sfumato.digest import digest_of_file
    from sfumato.privacy.charge import AlreadyReleasedError, Permission, open_charge

    public = read_card(card)
    if (public.dataset_id, public.shape, public.classes) != (plan.dataset_id, plan.shape, plan.classes):
        raise ConfigError(
            f"the plan of {plan.stage} was made for another data card than {card}: run `stage plan` again"
        )
    if plan.mechanism is None:
        raise ConfigError(f"the plan of {plan.stage} holds no mechanism: run `stage plan` again")
    permission = PLAN / "permission.json"
    try:
        allowed = Permission(**json.loads(permission.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{permission} cannot be read ({error}): run `stage plan`") from error
    try:
        return open_charge(
            state=state_dir(),
            card=public,
            stage=plan.stage,
            plan=plan.digest,
            inputs=[digest_of_file(artifact.path / "privacy.json") for artifact in inputs],
            mechanism=plan.mechanism,
            permission=allowed,
            released=released,
            sensitivity=sensitivity,
            resumable=resumable,
            latents=latents,
        )
    except AlreadyReleasedError as refusal:
        kept = run_directory(refusal.record_id) / RELEASED
        if out.exists() or not kept.exists():
            raise
        put_copy(kept, out)
        typer.echo(
            f"{plan.stage}: released as {refusal.record_id[:8]} before it was taken over: put back, nothing is charged",
            err=True,
        )
        return None


def run_directory(record_id: str) -> Path:
    return state_dir() / "runs" / record_id


def close_charge(charge: Charge, out: Path) -> None:
    """Keep a copy of the release until the ledger is written, then close the charge: the last thing that a query stage does."""
    put_copy(out, charge.run / RELEASED)
    charge.close()


def put_copy(source: Path, target: Path) -> None:
    """Copy a directory under a temporary name, flush it to disk, then rename it."""
    from sfumato.artifacts import sync

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, temporary)
    for path in [*temporary.rglob("*"), temporary]:
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)


def read_public_counts(count: Artifact, plan: StagePlan) -> PublicCounts:
    """The noisy counts; where counting is switched off, the public size hint in equal parts."""
    import json

    import torch

    from sfumato.queries.count import PublicCounts

    classes = len(plan.classes)
    if not count.enabled:
        return PublicCounts(
            float(plan.size_hint),
            torch.full((classes,), plan.size_hint / classes).double(),
            torch.full((classes,), 1 / classes).double(),
        )
    content = json.loads((count.path / "counts.json").read_text(encoding="utf-8"))
    return PublicCounts(
        content["total"], torch.tensor(content["per_class"]).double(), torch.tensor(content["priors"]).double()
    )


def table_console() -> Console:
    """Where tables are printed: names of folders and classes as they are, square brackets too."""
    from rich.console import Console

    return Console(markup=False)


class Report(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def progress(name: str, *, clock: bool = True) -> Iterator[Report]:
    """A progress bar on a terminal, a plain line every tenth elsewhere.

    With `clock=False` no time is shown: the time of a step on sensitive images tells how many were drawn.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            *([TimeRemainingColumn()] if clock else []),
        ]
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    shown = -1

    def line(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth > shown:
            shown = tenth
            typer.echo(f"{name}: {done}/{total}", err=True)

    yield line
