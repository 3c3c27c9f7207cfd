"""What every stage does: its command line, its plan, the dry run, its inputs, the charge, and writing what came of it.

A stage that the plan resolves is a function of the name of its module, `stages/<name>.py`, and takes a `StageRun`, or a
`QueryRun` where it spends. It names what it reads, calls the library, and saves.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar

import typer

from sfumato import pipeline
from sfumato.errors import ConfigError
from sfumato.pipeline import STAGES, Kind, Stage

if TYPE_CHECKING:
    from rich.console import Console

    from sfumato.artifacts import Artifact
    from sfumato.privacy.charge import Charge
    from sfumato.resolved import QueryPlan, StagePlan

ROOT = Path(__file__).resolve().parent.parent  # the folder that holds the packages sfumato and stages
ARTIFACTS, PLAN = Path(pipeline.ARTIFACTS), Path(pipeline.PLAN)
CARD, PUBLIC, LEDGER = Path(pipeline.CARD), Path(pipeline.PUBLIC), Path(pipeline.LEDGER)
EVALUATION = Path("evaluation")  # numbers from real images, of which neither DVC nor git knows
RELEASED = "released"  # in a run's directory: the copy of its release
PERMISSION = "permission.json"  # beside the plan

CONFIG_HELP = "Resolved configuration. Default: artifacts/plan/<stage>.yaml, which `stage plan` writes."
Config = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)]
Out = Annotated[Path | None, typer.Option("--out", help="Directory to write. Default: artifacts/<stage>.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be read, written and charged, and stop.")]
CardPath = Annotated[Path, typer.Option("--card", help="Public card of the sensitive set.")]
PublicPath = Annotated[Path, typer.Option("--public", help="Public image set, which `stage prepare public` writes.")]
S = TypeVar("S")


def input_option(stage: str) -> Any:
    """The option that names the artifact of another stage."""
    return typer.Option(f"--{stage}", help=f"Artifact of `stage {stage}`.")


def state_dir() -> Path:
    """Where sensitive bytes, keys, journals and checkpoints live: $SFUMATO_STATE, or the user's state directory."""
    if named := os.environ.get("SFUMATO_STATE"):
        if not Path(named).is_absolute():
            raise ConfigError(
                f"SFUMATO_STATE={named} is relative: from another folder it would be another odometer. "
                "Give the whole path"
            )
        return Path(named)
    from platformdirs import user_state_path

    return user_state_path("sfumato")


# --- the command ----------------------------------------------------------------------------------------------------


def command(stage: Stage) -> Callable[..., None]:
    """The command of a stage, as Typer takes it: an option for the configuration, for each input, and a dry run."""
    parameters: dict[str, tuple[Any, Any]] = {"config": (Config, None), "out": (Out, None)}
    if stage.kind is Kind.QUERY:
        parameters["card"] = (CardPath, CARD)
    for name in stage.inputs:
        option = (PublicPath, PUBLIC) if name == "public" else (Annotated[Path, input_option(name)], ARTIFACTS / name)
        parameters[name] = option
    parameters["dry_run"] = (DryRun, False)

    def run(config: Path | None, out: Path | None, dry_run: bool, card: Path = CARD, **paths: Path) -> None:
        run_stage(stage, paths, config=config, out=out, card=card, dry_run=dry_run)

    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__name__, run.__doc__ = stage.name, f"{stage.kind.capitalize()}: {stage.summary[0].lower()}{stage.summary[1:]}"
    run.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, keyword, default=value, annotation=kind) for n, (kind, value) in parameters.items()]
    )
    return run


def run_stage(
    stage: Stage,
    paths: Mapping[str, Path] | None = None,
    *,
    config: Path | None = None,
    out: Path | None = None,
    card: Path = CARD,
    dry_run: bool = False,
) -> None:
    """Run one stage. paths: of its inputs, where they are not those of the pipeline."""
    plan = load_plan(stage.name, config)
    out = out or ARTIFACTS / stage.name
    every = {name: PUBLIC if name == "public" else ARTIFACTS / name for name in stage.inputs} | dict(paths or {})
    used = {name: path for name, path in every.items() if plan.settings.reads(name)}
    if dry_run:
        return describe(plan, ({"card": card} if stage.kind is Kind.QUERY else {}) | used, out)
    from sfumato.artifacts import check_out, write_empty
    from sfumato.files import check_writable

    if not plan.enabled:
        return write_empty(out, stage.name)
    check_out(out, stage.name)
    check_writable(out)  # found before a charge is opened, not after
    inputs = read_inputs(stage, used)
    from sfumato.compute import settle_processor

    settle_processor()
    work = getattr(import_module(f"stages.{stage.name}"), stage.name)
    kind = QueryRun if stage.kind is Kind.QUERY else StageRun
    try:
        work(kind(plan=plan, inputs=inputs, out=out, card=card))  # type: ignore[arg-type]
    except TakenOver as found:
        say(f"{stage.name}: {found}")


def load_plan(stage: str, config: Path | None = None) -> StagePlan[Any]:
    from sfumato.resolved import read_stage_plan

    return read_stage_plan(config or PLAN / f"{stage}.yaml", stage)


def read_inputs(stage: Stage, paths: Mapping[str, Path]) -> dict[str, Artifact]:
    """Read and verify. Raises ConfigError for the empty artifact of a stage whose images or numbers are needed."""
    from sfumato.artifacts import read_artifact

    found = {}
    for name, path in paths.items():
        found[name] = read_artifact(path, name)
        if not found[name].enabled and name not in stage.optional:
            raise ConfigError(
                f"{stage.name} needs {name}, but {path} is the empty artifact of a stage that is switched off: "
                f"add {name} to run, and run `stage plan` and `stage {name}`"
            )
    return found


def describe(plan: StagePlan[Any], reads: Mapping[str, Path], out: Path) -> None:
    """The answer to --dry-run."""
    from sfumato.resolved import QueryPlan

    if not plan.enabled:
        typer.echo(
            f"{plan.stage} is switched off, for `run` does not name it: it writes an empty artifact to {out} "
            "and charges nothing"
        )
        return
    for name, path in reads.items():
        typer.echo(f"reads   {path} ({name}{'' if path.exists() else ': not there yet'})")
    typer.echo(f"writes  {out}")
    if not isinstance(plan, QueryPlan):
        return typer.echo("charges nothing")
    typer.echo(f"charges {plan.mechanism} on dataset {plan.dataset_id!r}")
    if plan.model is not None and plan.model.directory is not None:
        typer.echo(f"memory  {memory_line(plan.model, plan.shape, len(plan.classes), plan.settings)}")


def memory_line(network: Any, shape: tuple[int, int, int], classes: int, settings: Any) -> str:
    """What a stage that takes per-image gradients of a public model will need, or why that cannot be said here."""
    from sfumato.dpsgd.memory import estimate
    from sfumato.errors import SfumatoError
    from sfumato.synthesizer import outline

    try:
        return str(estimate(outline(network, shape, classes), settings))
    except SfumatoError as error:
        return f"not known here: {error}"


# --- what a stage is given --------------------------------------------------------------------------------------------


class TakenOver(Exception):
    """Nothing is left to do: what a killed run had released was put back."""


@dataclass(frozen=True, kw_only=True)
class StageRun(Generic[S]):
    """One run of a stage: its plan, the verified artifacts that it reads, by name, and the directory that it writes."""

    plan: StagePlan[Any]
    inputs: Mapping[str, Artifact]
    out: Path
    card: Path

    @property
    def settings(self) -> S:
        return self.plan.settings  # type: ignore[no-any-return]

    def path(self, name: str) -> Path:
        """The directory of an input."""
        return self.inputs[name].path

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """A directory that becomes the artifact, with the records of all inputs, when the block ends well."""
        from sfumato.artifacts import writing

        with writing(self.out, self.plan.stage, list(self.inputs.values())) as directory:
            yield directory


@dataclass(frozen=True, kw_only=True)
class QueryRun(StageRun[S]):
    """One run of a query, which may open a charge."""

    plan: QueryPlan[Any]

    def open_charge(self, released: str, sensitivity: str, *, latents: str | None = None) -> Charge:
        """The charge that the plan asks for. released, sensitivity: in words, for the record.

        Raises TakenOver where nothing is left to do: a kill came between the release and the pipeline's taking it over.
        The release, kept with its run until the ledger is written, is then put back, at no cost.
        """
        from sfumato.data.store import read_card
        from sfumato.digest import digest_of_file
        from sfumato.files import copy_directory
        from sfumato.privacy.opening import AlreadyReleasedError, Work, open_charge

        plan, public = self.plan, read_card(self.card)
        if (public.dataset_id, public.shape, public.classes) != (plan.dataset_id, plan.shape, plan.classes):
            raise ConfigError(
                f"the plan of {plan.stage} was made for another data card than {self.card}: run `stage plan` again"
            )
        work = Work(
            stage=plan.stage,
            plan=plan.digest,
            mechanism=plan.mechanism,
            released=released,
            sensitivity=sensitivity,
            inputs=[digest_of_file(artifact.path / "privacy.json") for artifact in self.inputs.values()],
            resumable=STAGES[plan.stage].resumable,
            latents=latents,
        )
        try:
            return open_charge(state_dir(), public, work, read_permission())
        except AlreadyReleasedError as refusal:
            kept = run_directory(refusal.record_id) / RELEASED
            if self.out.exists() or not kept.exists():
                raise
            copy_directory(kept, self.out)
            raise TakenOver(
                f"released as {refusal.record_id[:8]} before it was taken over: put back, nothing is charged"
            ) from None

    @contextmanager
    def releasing(self, charge: Charge, *, local: bool = False) -> Iterator[Path]:
        """A directory that becomes the artifact, with the record of the charge, which is closed at the end.

        A copy of the release is kept until the ledger is written. local: it depends on numbers from real images.
        """
        from sfumato.artifacts import writing
        from sfumato.files import copy_directory

        inputs = list(self.inputs.values())
        with writing(self.out, self.plan.stage, inputs, [charge.record], local=local) as directory:
            yield directory
        copy_directory(self.out, charge.run / RELEASED)
        charge.close()


def read_permission() -> Any:
    """What the owner allows, beside the plan."""
    import json

    from sfumato.privacy.opening import Permission

    path = PLAN / PERMISSION
    try:
        return Permission(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): run `stage plan`") from error


def run_directory(record_id: str) -> Path:
    return state_dir() / "runs" / record_id


# --- the screen -----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line on standard error."""
    typer.echo(text, err=True)


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

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TimeRemainingColumn()] if clock else []
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
            say(f"{name}: {done}/{total}")

    yield line
