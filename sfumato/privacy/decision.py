"""Decide what a query will do: restore its release, resume after a kill, or pay.

`stage plan`, `stage doctor` and `open_charge` use `decide`.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sfumato.privacy.checkpoint import load_checkpoint
from sfumato.privacy.events import SECRET
from sfumato.privacy.odometer import CLOSE, Run
from sfumato.privacy.resolved import Lineage
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import depends_on_charge
from sfumato.storage.digest import digest_of

Outcome = Literal["restore", "resume", "pay"]
# Folder of the release in a run's directory. It gets this name when it is complete.
RELEASED = "released"
OTHER_BYTES = (
    "an earlier free stage was rerun and produced different bytes. Restore the old artifacts (`git "
    "checkout` dvc.lock, then `dvc checkout`)"
)


@dataclass(frozen=True, kw_only=True)
class QueryWork(Lineage):
    """Work of a query, which is paid for once. Settings, inputs and `again` identify the work.

    settings: digest of the query's own settings;
    inputs: digests of the artifacts that the query reads. In a plan, this is None if one of these
    artifacts is missing now or will be written again. `decide` then assumes that the artifacts will
    match an earlier run of the same plan;
    rests_on: ids of the charges that the inputs depend on.
    """

    stage: str
    settings: str
    inputs: Sequence[str] | None = ()
    rests_on: Collection[str] = ()

    @property
    def pay(self) -> str:
        """Setting with which the owner pays for this work again."""
        return f"privacy.spend_again: {{{self.stage}: {self.again + 1}}}"

    @property
    def digest(self) -> str:
        """Digest of settings, inputs and `again`. The same digest means the same work."""
        return digest_of(
            {"settings": self.settings, "again": self.again, "inputs": sorted(self.inputs or ())}
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Decision about one query.

    run: the run that released this work, or an unfinished run of this work, or None. If the
    checkpoint of an unfinished run is lost, `run` is still this run, but the query must pay;
    same_inputs: False if `run` released its result from different inputs;
    problem: reason for a refusal, or empty;
    cause: in a plan, the stage whose change makes the query run.
    """

    stage: str
    kind: Outcome
    run: Run | None = None
    same_inputs: bool = True
    problem: str = ""
    cause: str | None = None

    @property
    def pays(self) -> bool:
        return self.kind == "pay" and not self.problem

    @property
    def words(self) -> str:
        """State of the query: not released yet, already released, resumed or refused."""
        if self.run is None or self.pays:
            return "not released yet"
        if self.kind == "restore":
            text = f"already released as {self.run.record['id']}"
            if self.problem:
                return f"{text}. {self.problem}"
            return f"{text}; it is not charged again"
        return (
            self.problem
            or f"resumes run {self.run.id[:8]} at no further cost, if the images have not changed"
        )


def decide(
    state: Path,
    work: QueryWork,
    runs: Sequence[Run],
    prepared: str | None,
    terms: Mapping[str, object],
    noise_source: str = SECRET,
) -> Decision:
    """Decide what a query will do, from the journal and the kept copies of releases.

    runs: earlier runs on the images;
    prepared: fingerprint of the images, or None to skip the comparison of the images;
    terms: fields of a new record. A run is resumed only if its record has the same values.
    """
    if last := last_for(work, [run for run in runs if run.end == CLOSE]):
        run, same_inputs = last
        problem = restoring_problem(state, work, run, same_inputs)
        return Decision(
            stage=work.stage, kind="restore", run=run, same_inputs=same_inputs, problem=problem
        )
    left_open = [
        run for run in runs if run.end is None and run.record["noise_source"] == noise_source
    ]
    if (last := last_for(work, left_open)) is None:
        return Decision(stage=work.stage, kind="pay")
    run = last[0]
    kind: Outcome = "resume"
    home = state / "runs" / run.id
    if (home / RELEASED).exists():  # The process was killed before it journalled the release.
        kind = "restore"
    elif run.uses and load_checkpoint(home, run.uses, run.checkpoint) is None:
        kind = "pay"
    return Decision(
        stage=work.stage, kind=kind, run=run, problem=resuming_problem(work, *last, prepared, terms)
    )


def last_for(work: QueryWork, runs: Sequence[Run]) -> tuple[Run, bool] | None:
    """Find the last run of the same work or, if there is none, the last run of the same plan.

    A run from before the owner asked to pay again is skipped. Returns the run, and whether its
    inputs match; or None if there is no such run.
    """
    digest = work.digest
    if matches := [run for run in runs if run.opened.get("work") == digest]:
        return matches[-1], True
    of_the_plan = [run for run in runs if run.opened.get("plan") == work.plan]
    if matches := [run for run in of_the_plan if run.record.get("again", 0) >= work.again]:
        return matches[-1], work.inputs is None
    return None


def restoring_problem(state: Path, work: QueryWork, run: Run, same_inputs: bool) -> str:
    """Return why a release cannot be restored, or an empty string.

    If the inputs have changed, the release cannot be restored in two cases: the query trains a
    network, or the new inputs depend on a charge that the release does not contain.
    """
    release_folder = state / "runs" / run.id / RELEASED
    if not os.path.lexists(release_folder):
        return (
            "The state directory contains no copy of this release. Restore the artifact (`dvc "
            f"checkout` or `dvc pull`), or pay for a new release: set {work.pay}"
        )
    trains_network = work.stage in STAGES and STAGES[work.stage].network
    if same_inputs or (
        not trains_network
        and all(depends_on_charge(release_folder, record) for record in work.rests_on)
    ):
        return ""
    return (
        f"Its inputs have changed: {OTHER_BYTES}, or pay for a release from the new inputs: set "
        f"{work.pay}"
    )


def resuming_problem(
    work: QueryWork, run: Run, same_inputs: bool, prepared: str | None, terms: Mapping[str, object]
) -> str:
    """Return why an open run must not resume, or an empty string.

    A run resumes only with the same inputs, images and mechanism.
    """
    changed_terms = [
        f"{key}={run.record.get(key)}"
        for key, value in terms.items()
        if run.record.get(key) != value
    ]
    unfinished = f"{work.stage}: run {run.id[:8]} is not finished"
    if not same_inputs:
        return (
            f"{unfinished}, and was started under this plan with different inputs: {OTHER_BYTES}, "
            f"or pay again: set {work.pay}"
        )
    if prepared is not None and run.drew_others(prepared):
        return (
            f"{unfinished}, and was started on images that differ from the prepared ones. Prepare "
            f"the earlier images again, set another data.version, or pay again: set {work.pay}"
        )
    if changed_terms:
        return (
            f"{unfinished}, and was started with another mechanism or privacy unit. That run "
            f"has {', '.join(changed_terms)}. Restore its settings, or pay again: set {work.pay}"
        )
    return ""
