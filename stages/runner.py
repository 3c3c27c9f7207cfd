"""Run a stage: call its function with the settings and a `StageRun` (a `QueryRun` for a query)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sfumato.errors import ConfigError, SfumatoError
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, FREE, PLAN, PUBLIC, QUERY, Stage
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import (
    PRIVACY,
    Artifact,
    check_out,
    holds_release,
    merge_records,
    read_artifact,
    read_kept,
    write_empty,
    writing,
)
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_yaml
from sfumato.storage.files import check_writable, copy_directory
from sfumato.storage.locks import file_lock, holding
from stages import launch
from stages.dvc_lock import keep_copy
from stages.flags import DryRun, OutPath
from stages.screen import progress, say
from stages.state import PREVIEW, read_policy, state_dir

if TYPE_CHECKING:
    from sfumato.data.images import ImageSet, Shape
    from sfumato.data.store import Encode
    from sfumato.features import FeatureMeans
    from sfumato.features.projection import ProjectedFeatures
    from sfumato.features.teacher_network import TeacherNetwork
    from sfumato.privacy.charge import Charge
    from sfumato.privacy.odometer import Seen
    from sfumato.privacy.resolved import QueryPlan, StagePlan
    from sfumato.queries.count import PublicCounts
    from sfumato.settings.dpsgd import Finetune, Saliency
    from sfumato.settings.fields import Settings
    from sfumato.settings.training import Model

# Lock file in the directory of a run, locked while the run's release is copied to `artifacts/`
COPYING = "copying.lock"


def command(stage: Stage) -> Callable[..., None]:
    def run(out: OutPath = None, dry_run: DryRun = False) -> None:
        run_stage(stage, out=out, dry_run=dry_run)

    run.__name__ = stage.name
    run.__doc__ = f"[{stage.kind}] {stage.summary}"
    return run


def run_stage(stage: Stage, *, out: Path | None = None, dry_run: bool = False) -> None:
    plan = load_plan(stage.name)
    out = out or ARTIFACTS / stage.name
    paths = {name: ARTIFACTS / name for name in stage.inputs} | {"public": PUBLIC}
    input_paths = {name: paths[name] for name in stage.inputs if plan.settings.reads(name)}
    if dry_run:
        card = {"card": CARD_PATH} if stage.kind is QUERY else {}
        return show_files(plan, card | input_paths, out)

    show_standing(stage.name, plan.enabled)
    if not plan.enabled:
        return write_empty(out, stage.name)
    from sfumato.runtime import distributed

    if stage.one_process and launch.is_configured():
        raise ConfigError(f"{stage.name} runs in one process: unset {launch.LAUNCH} for this stage")
    distributed.join()
    check_out(out, stage.name)
    if distributed.is_main():
        check_writable(out)  # before a charge is opened
        keep_copy()
    inputs = {name: read_artifact(path, name) for name, path in input_paths.items()}
    for name, artifact in inputs.items():
        if not artifact.enabled and name not in stage.optional:
            raise ConfigError(
                f"{stage.name} requires {name}, but {artifact.path} is an empty artifact, because "
                f"{name} was not in `run`: add {name} to `run`, then run `stage plan` and `stage "
                f"{name}`"
            )
    if stage.spread and not distributed.launched() and launch.is_configured():
        raise SystemExit(launch.again())
    ready_processor()
    kind: type[StageRun] = StageRun
    remembered: AbstractContextManager[None] = nullcontext()
    # A query's duration is not stored, because it reveals how many images were drawn
    if stage.kind is QUERY:
        keep_memory_off_disk()
        kind = QueryRun
    elif stage.kind is FREE:
        from sfumato.planning.estimate import timed

        remembered = timed(state_dir(), plan)
    try:
        with remembered:
            stage.run(kind(plan=plan, inputs=inputs, out=out), plan.settings.on_this_machine())
        if stage.gives == "generator":
            from sfumato.data.images import load_images
            from sfumato.release.release import save_preview

            save_preview(PREVIEW, load_images(out, plan.classes), stage.name)
            say(f"{stage.name}: first pictures in {PREVIEW}")
    except NothingToDo as reason:
        say(f"{stage.name}: {reason}")
    finally:
        distributed.leave_group()


def show_standing(name: str, enabled: bool = True) -> None:
    """On a terminal, replace DVC's lines by the progress of the run.

    For a stage that is not in `run` (enabled is False), only remove them.
    """
    lock = Path("dvc.lock")
    if (
        "DVC_STAGE" not in os.environ
        or not sys.stdout.isatty()
        or not launch.speaks()
        or not lock.exists()
    ):
        return
    lines = 2  # DVC has printed one line for the stage, and one for its command
    if time.time() - lock.stat().st_mtime < 10:
        lines = 4  # DVC has just printed two lines about dvc.lock too
    print(f"\x1b[{lines}A\x1b[J", end="", flush=True)
    if enabled:
        with suppress(Exception):  # the stage must run even if this line fails
            say(standing(name))


def standing(name: str) -> str:
    """Describe the progress when a stage begins: the expected minutes and the ε spent so far.

    The text contains only public numbers, from the plan and the releases. params.yaml is not read:
    it may have changed since the plan was made, and a merged project has none.
    """
    from sfumato.planning.estimate import seconds_of_plans

    plans = {stage: load_plan(stage) for stage in STAGES}
    steps = read_yaml(Path("dvc.yaml"))["stages"]
    names = [stage for stage, plan in plans.items() if plan.enabled and stage in steps]
    position = names.index(name)
    pending_stages = names[position:]
    seconds = seconds_of_plans(plans, state_dir())
    own_minutes, *later_minutes = ((seconds[stage] or 0.0) / 60 for stage in pending_stages)
    return (
        f"stage {position + 1} of {len(names)}, {name}: about {own_minutes:.0f} min, then about "
        f"{sum(later_minutes):.0f} min for later stages; {spent_before(pending_stages)}"
        f"{newest_picture(names[:position])}"
    )


def spent_before(pending_stages: Collection[str]) -> str:
    """State the ε of the releases so far, and the plan's ε.

    pending_stages: stages that have yet to end.
    """
    from sfumato.privacy.events import common_adjacency
    from sfumato.privacy.ledger import read_budget, spent_on_one

    # A merged project has releases of queries that are not in its dvc.yaml
    paths = [ARTIFACTS / stage for stage in QUERIES if stage not in pending_stages]
    records = merge_records([read_artifact(path) for path in paths if path.exists()])
    budget = read_budget(PLAN / "budget.json")
    adjacency = common_adjacency(records.values())
    spent = spent_on_one(records, budget["delta"], budget["accountant"], adjacency)
    return f"ε = {spent:.2f} of {budget['target']:g} spent so far"


def newest_picture(earlier_stages: Collection[str]) -> str:
    """Point to the newest picture of the stages in `earlier_stages`, if there is one."""
    file = PREVIEW
    if "synthesize" in earlier_stages:
        file = ARTIFACTS / "synthesize" / "grid.png"
    elif not any(STAGES[stage].gives == "generator" for stage in earlier_stages):
        return ""
    if not file.exists():
        return ""
    return f"; look at {file}"


def ready_processor() -> None:
    """Check the requested device, and let the process keep freed memory."""
    from sfumato.runtime.compute import device, keep_freed_memory

    device()
    keep_freed_memory()


def keep_memory_off_disk() -> None:
    """Disable core dumps: after a crash, they would contain sensitive images that others may
    read.
    """
    with suppress(ImportError):  # Windows writes no core dumps
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def load_plan(stage: str) -> StagePlan[Any]:
    from sfumato.privacy.resolved import read_stage_plan

    return read_stage_plan(PLAN / f"{stage}.yaml", stage)


def show_files(plan: StagePlan[Settings], reads: Mapping[str, Path], out: Path) -> None:
    """Print the files that a stage reads and writes, and its charge, for --dry-run."""
    from sfumato.privacy.resolved import QueryPlan
    from sfumato.settings.data import GROUP
    from sfumato.settings.dpsgd import Finetune, Saliency

    if not plan.enabled:
        return typer.echo(
            f"{plan.stage} is not in `run`: it would write an empty artifact to {out} and charge "
            "nothing"
        )
    for name, path in reads.items():
        typer.echo(f"reads   {path} ({name}{'' if path.exists() else ': does not exist yet'})")
    typer.echo(f"writes  {out}")
    if not isinstance(plan, QueryPlan):
        return typer.echo("charges nothing")
    unit = "person" if plan.unit == GROUP else "image"
    typer.echo(f"charges {plan.mechanism} on dataset {plan.dataset_id!r}; the unit is one {unit}")
    if plan.model is not None and isinstance(plan.settings, (Finetune, Saliency)):
        sizes = plan.shape, len(plan.classes), plan.settings, plan.size_hint
        typer.echo(f"memory  {memory_line(plan.model, *sizes)}")


def memory_line(
    network: Model, shape: Shape, classes: int, settings: Finetune | Saliency, size_hint: int
) -> str:
    """Describe the memory for per-image gradients of the network, or why it is unknown."""
    from sfumato.dpsgd.microbatch import needed
    from sfumato.dpsgd.trainable import trained_parameters
    from sfumato.release.synthesizer import outline

    try:
        model = outline(network, shape, classes)
        parameters = trained_parameters(model, settings, 0)
        batch = settings.sampling(size_hint)[0] * size_hint
        return needed(
            model, parameters, settings.draws, batch, settings.on_this_machine().microbatch_size
        )
    except SfumatoError as error:
        return f"unknown: {error}"


class NothingToDo(Exception):
    """The stage has nothing to do: a release of an earlier run was restored, or another process
    does the work.
    """


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """One run of a stage: its plan, its verified inputs by name, and the directory that it
    writes.
    """

    plan: StagePlan[Any]
    inputs: Mapping[str, Artifact]
    out: Path

    def path(self, name: str) -> Path:
        return self.inputs[name].path

    @property
    def paths(self) -> dict[str, Path]:
        return {name: self.path(name) for name in self.inputs}

    @property
    def public(self) -> ImageSet:
        """Load the public images, memory-mapped."""
        from sfumato.data.store import load_public

        return load_public(self.path("public"), self.plan.shape)

    @property
    def teacher(self) -> TeacherNetwork:
        """Load the network that labels images, on the device."""
        from sfumato.features.teacher_network import load_teacher_network
        from sfumato.runtime.compute import device

        return load_teacher_network(self.path("teacher")).to(device())

    def means(self, stage: str, teacher: ProjectedFeatures | None = None) -> FeatureMeans:
        """Load the released class means of features. teacher: see `load_means`."""
        from sfumato.queries.feature_means import load_means

        return load_means(stage, self.path(stage), teacher, plan=self.plan)

    @property
    def counts(self) -> PublicCounts:
        """Return the noisy class counts.

        If `count` is not in `run`, return equal counts that add up to `size_hint`.
        """
        from sfumato.queries.count import read_counts

        return read_counts(self.inputs["count"], self.plan.size_hint, len(self.plan.classes))

    def first_alone(self) -> None:
        """Raise NothingToDo in all processes except the first. Only the first writes."""
        from sfumato.runtime import distributed

        if not distributed.is_main():
            raise NothingToDo("the first process writes")

    @contextmanager
    def writing(self, also: Iterable[Artifact] = ()) -> Iterator[Path]:
        """Yield a directory that becomes the artifact, with the records of all inputs and of
        `also`.

        Only the first process writes.
        """
        self.first_alone()
        with writing(self.out, self.plan.stage, [*self.inputs.values(), *also]) as directory:
            yield directory


@dataclass(frozen=True, kw_only=True)
class QueryRun(StageRun):
    """One run of a query, which may open a charge."""

    plan: QueryPlan[Any]

    def open_charge(
        self, released: str, sensitivity: str, max_norm: float, *, latents: str | None = None
    ) -> Charge:
        """Open the charge of the plan.

        released: what is released, in words;
        sensitivity: bound on the contribution of one unit, in words;
        max_norm: L2 bound on the contribution of one unit;
        latents: key of stored latents to draw instead of images.

        If the same work was already released but the artifact is missing or damaged, the kept copy
        of the release is restored at no cost, and NothingToDo is raised. If the artifact is intact
        and DVC does not run the stage, or if the copy cannot be restored, AlreadyReleasedError is
        raised.
        """
        from sfumato.data.cards import read_card
        from sfumato.privacy import authorize
        from sfumato.privacy.checkpoint import drop_checkpoints
        from sfumato.privacy.decision import RELEASED
        from sfumato.privacy.resolved import read_lineage

        plan = self.plan
        card = read_card(CARD_PATH)
        images = attrgetter("dataset_id", "shape", "classes", "labels")
        if images(card) != images(plan):
            raise ConfigError(
                f"the plan of {plan.stage} was made for a different card than {CARD_PATH}: run "
                "`stage plan` again"
            )
        request = authorize.ChargeRequest(
            stage=plan.stage,
            settings=plan.digest,
            mechanism=plan.mechanism,
            max_norm=max_norm,
            released=released,
            sensitivity=sensitivity,
            inputs=[digest_of_file(artifact.path / PRIVACY) for artifact in self.inputs.values()],
            rests_on={record for artifact in self.inputs.values() for record in artifact.records},
            revision=plan.revision,
            **vars(read_lineage(PLAN, plan.stage)),
            latents=latents,
            seen=self.seen(),
            unit=plan.unit,
            group_cap=plan.group_cap,
        )
        try:
            return authorize.open_charge(state_dir(), card, request, read_policy())
        except authorize.RefusedElsewhereError as refusal:
            raise NothingToDo(str(refusal)) from None
        except authorize.AlreadyReleasedError as refusal:
            if refusal.note:
                # Not printed by `say`: its lines may appear in logs, and the note is private
                print(refusal.note, file=sys.stderr)
            release_folder = state_dir() / "runs" / refusal.run_id / RELEASED
            # Without DVC, a command is refused if its artifact is present. DVC removes an artifact
            # before it runs the stage. If the artifact exists nevertheless, an earlier DVC was
            # killed, but its stage kept running and wrote the artifact. The release is then
            # restored.
            present = holds_release(self.out, plan.stage, refusal.record_id, refusal.digest)
            present = present and "DVC_STAGE" not in os.environ
            if present:
                drop_checkpoints(release_folder.parent)  # a killed process leaves its checkpoints
            if refusal.problem or present:
                raise
            read_kept(release_folder, plan.stage, refusal.digest, refusal.pay)
            drop_checkpoints(release_folder.parent)
            with holding(file_lock(release_folder.with_name(COPYING))):
                copy_directory(release_folder, self.out)
            message = f"already released as {refusal.record_id[:8]}: restored, nothing is charged"
            raise NothingToDo(message) from None

    def latents(self, encoder: str | None, purpose: str, load: Callable[[], Encode]) -> str | None:
        """Compute and store the latents of the images, unless they are stored already, and return
        their key.

        Latents are outputs of an encoder. A charge draws them instead of pixels. Returns None if
        there is no encoder.

        encoder: digest of the encoder, or None; purpose: purpose of the latents, for the journal;
        load: function that loads the encoder.
        """
        if encoder is None:
            return None
        from sfumato.data.cards import read_card
        from sfumato.privacy.authorize import ensure_latents

        bar = partial(progress, f"computing {purpose} of the images", clock=False, log=False)
        return ensure_latents(state_dir(), read_card(CARD_PATH), encoder, purpose, load, bar)

    def seen(self) -> Seen:
        """Return the record ids and journal heads in the project and in the artifact to replace."""
        from sfumato.privacy.project_ledger import seen_in_project

        return seen_in_project(self.plan.dataset_id, Path(), state_dir(), [self.out / PRIVACY])

    @contextmanager
    def releasing(self, charge: Charge) -> Iterator[Path]:
        """Yield a directory that becomes the artifact, with the record of the charge. Then close
        the charge.

        The release is written to the private directory of the run and journalled before it is
        copied to `out`. Therefore, while a charge is open, `out` contains no release of it, and
        the charge can be resumed safely. The private copy is kept until `stage forget`, to restore
        the release at no cost.
        """
        from sfumato.privacy.checkpoint import drop_checkpoints
        from sfumato.privacy.decision import RELEASED

        self.first_alone()
        release_folder = charge.run / RELEASED
        check_writable(release_folder)  # also removes the files that a killed process left
        with writing(
            release_folder, self.plan.stage, list(self.inputs.values()), [charge.record]
        ) as directory:
            yield directory
        # Another process that finds the charge closed waits until the copy is complete
        with holding(file_lock(release_folder.with_name(COPYING))):
            charge.close(digest_of_file(release_folder / PRIVACY))
            copy_directory(release_folder, self.out)
        drop_checkpoints(charge.run)
