"""Compare a plan with earlier releases: which releases the plan would keep, and what it would
spend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sfumato.data.cards import Card
from sfumato.errors import UNREADABLE, ConfigError, passing_over
from sfumato.privacy.check import read_lock
from sfumato.privacy.decision import Decision, QueryWork, decide
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism
from sfumato.privacy.ledger import records_in
from sfumato.privacy.odometer import ABANDON, CLOSE, Odometer, Run
from sfumato.privacy.record import is_record
from sfumato.privacy.resolved import Lineage, read_lineage, settings_digest
from sfumato.settings.params import Params
from sfumato.settings.stage import ARTIFACTS, LEDGER, LOCK, PLAN, PUBLIC
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import PRIVACY, depends_on_charge
from sfumato.storage.digest import digest_of_file, md5_of_file
from sfumato.storage.documents import read_yaml


@dataclass(frozen=True)
class Plan:
    """The result of `stage plan`."""

    params: Params
    files: dict[str, dict]  # the resolved configuration of each stage
    mechanisms: dict[str, Mechanism]  # the mechanism of each query in `run`
    budget: dict
    lineage: dict[str, Lineage]  # facts that decide whether each query in `run` spends


def stages_before(name: str, params: Params) -> tuple[str, ...]:
    """Return the stages in `run` whose results `name` reads, directly or through other stages.

    They are in the order of STAGES.
    """
    direct = [*filter(params.runs, params.inputs_of(name))]
    upstream = {*direct, *(stage for source in direct for stage in stages_before(source, params))}
    return tuple(stage for stage in STAGES if stage in upstream)


@dataclass(frozen=True, kw_only=True)
class Past:
    """The charges on prepared images, from the journal, the ledger and the artifacts.

    Changes of the images are ignored, because it is private whether the images have changed.

    folder: folder of the project;
    runs: all runs on the images, including unfinished and abandoned ones;
    terms: fields of a new record. An unfinished run is resumed only if its record has the same
    values.
    """

    state: Path
    folder: Path
    runs: Sequence[Run]
    terms: Mapping[str, object]

    def decide(
        self,
        name: str,
        lineage: Lineage,
        settings: str,
        inputs: Sequence[str],
        inputs_final: bool = True,
    ) -> Decision:
        """Decide whether a query will restore, resume or pay.

        settings: digest of the query's settings;
        inputs: stages that the query reads, and "public" if it reads the public set;
        inputs_final: True if the next run will not write any of these inputs again.
        """
        files = [self.artifact(other) / PRIVACY for other in inputs]
        inputs_final = inputs_final and all(file.is_file() for file in files)
        work = QueryWork(
            stage=name,
            settings=settings,
            inputs=[digest_of_file(file) for file in files] if inputs_final else None,
            rests_on={record["id"] for file in files for record in records_in(file)},
            **vars(lineage),
        )
        decision = decide(self.state, work, self.runs, None, self.terms)
        run = decision.run
        if decision.kind != "restore" or run is None:
            return decision
        # Only the journal states the inputs of a charge. If it has no entry for this charge, the
        # inputs count as unchanged
        same_inputs = decision.same_inputs or "work" not in run.opened
        if same_inputs and depends_on_charge(self.artifact(name), run.record["id"]):
            return replace(decision, problem="")
        return decision

    def artifact(self, name: str) -> Path:
        return self.folder / (PUBLIC if name == "public" else f"{ARTIFACTS}/{name}")


def known_past(state: Path, card: Card, folder: Path, *, declared_size: bool) -> Past:
    """Return the charges on the images of a card.

    A charge that is in the project's files but not in the journal counts as released by another
    copy of the project. A malformed record is skipped here; `check_known` still requires that the
    journal contains its id.

    declared_size: value of `privacy.declared_size`, which decides the adjacency of a new record.
    """
    version = card.dataset_id, card.version
    journal = Odometer(state, card.dataset_id).charges(card.version)
    ids = {run.record["id"] for run in journal}
    files = [folder / LEDGER, *(folder / ARTIFACTS / name / PRIVACY for name in QUERIES)]
    records = [record for file in files for record in records_in(file) if is_record(record)]
    records = [
        r for r in records if r["id"] not in ids and (r["dataset_id"], r["data_version"]) == version
    ]
    runs = [*(Run({"record": r, "plan": r["plan"]}, r, end=CLOSE) for r in records), *journal]
    adjacency = ZERO_OUT_ONE if declared_size else ADD_OR_REMOVE_ONE
    return Past(state=state, folder=folder, runs=runs, terms={"adjacency": adjacency})


def repeat_count(name: str, params: Params, plan: str, runs: Sequence[Run]) -> int:
    """Return how many repeat payments a query has, including one that the owner requests now.

    The owner requests repeat payments for a query by a number in privacy.spend_again. The number
    also counts for all queries that depend on this query, because their inputs will change. So the
    requested number is the sum of the numbers for the query and for all stages before it.

    A record contains the number of repeat payments so far, as `again`. The paid number is the
    largest `again` of the query's releases. If the query has no release, its open runs are used
    instead. If the requested number is larger than the paid number, the result is the paid number
    plus 1. Otherwise, the result is the paid number. So each request is granted once. If there is
    no earlier run, the result is the requested number.

    plan: digest of the query's plan.
    """
    own_runs = [run for run in runs if run.opened.get("plan") == plan and run.end != ABANDON]
    paid_counts = [
        run.record.get("again", 0)
        for run in [run for run in own_runs if run.end == CLOSE] or own_runs
    ]
    requested = sum(
        params.privacy.spend_again.get(other, 0) for other in (name, *stages_before(name, params))
    )
    last = max(paid_counts, default=requested)  # without an earlier run, the requested number
    return last + (requested > last)


def spending_of(plan: Plan, past: Past, out: Path) -> tuple[list[Decision], set[str]]:
    """Decide what each query will do, and find the stages that will run.

    A stage runs if its settings or inputs have changed, or if its artifact is missing. A query that
    will only restore a kept release is not among the stages that will run.

    out: folder with the plan that was written last.
    """
    cause_of: dict[str, str] = {}  # stage -> the stage whose change makes it run
    pending_stages = set[str]()
    if public_changed(plan, out):
        cause_of["public"] = "public"
        pending_stages.add("public")
    outdated = outdated_stages(past.folder)
    spending = []
    for name, stage in STAGES.items():
        upstream = {*stage.upstream}
        if plan.params.runs(name):
            upstream.update(plan.params.inputs_of(name))
        exists = name == "evaluate" or past.artifact(name).is_dir()  # evaluate writes no artifact
        unchanged = holds(out / f"{name}.yaml", plan.files[name]) and name not in outdated
        up_to_date = exists and unchanged and not pending_stages & upstream
        cause = next(
            (cause_of[other] for other in stage.inputs if other in upstream & {*cause_of}), None
        )
        if not unchanged or (name in plan.mechanisms and cause is None):
            cause = name
        if name in plan.mechanisms:
            inputs = plan.params.inputs_of(name)
            settings = settings_digest(plan.files[name])
            decision = past.decide(
                name, plan.lineage[name], settings, inputs, not pending_stages & {*inputs}
            )
            up_to_date = decision.kind == "restore"
            if up_to_date:
                cause = None
            spending.append(replace(decision, cause=cause))
        if cause:
            cause_of[name] = cause
        if not up_to_date:
            pending_stages.add(name)
    return spending, pending_stages - {"public"}


def public_changed(plan: Plan, out: Path) -> bool:
    """Return whether the public images have changed since the last plan was written.

    A query's lineage depends on its settings, the settings of all stages before it, and the card of
    the public images. If none of these settings has changed but the lineage has, the card has
    changed.
    """
    for name, lineage in plan.lineage.items():
        stages = (*stages_before(name, plan.params), name)
        if all(holds(out / f"{other}.yaml", plan.files[other]) for other in stages):
            with passing_over(ConfigError, KeyError):
                if read_lineage(out, name).plan != lineage.plan:
                    return True
    return False


def outdated_stages(folder: Path) -> set[str]:
    """Return the stages that DVC last ran with another plan or other public images.

    A run that was interrupted after `stage plan` leaves artifacts of the previous plan. Stages that
    `dvc.lock` does not list are left out.
    """
    outdated = set[str]()
    with passing_over(*UNREADABLE):
        stages = read_lock(folder / LOCK)
        public = {file.md5 for stage in stages for file in stage.outs if file.place == str(PUBLIC)}
        for stage in stages:
            read = {file.place: file.md5 for file in stage.deps}
            plans = [Path(place) for place in read if Path(place).parent == PLAN]
            public_differs = public and str(PUBLIC) in read and read[str(PUBLIC)] not in public
            for plan in plans:
                file = folder / plan
                if public_differs or (file.is_file() and read[str(plan)] != md5_of_file(file)):
                    outdated.add(plan.stem)
    return outdated & {*STAGES}


def holds(file: Path, content: dict) -> bool:
    """Return whether a resolved file exists and has this content."""
    with passing_over(*UNREADABLE):
        return bool(read_yaml(file) == content)
    return False
