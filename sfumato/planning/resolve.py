"""Resolve parameters into one configuration per stage, with the noise calibrated to the budget.

The result is public: no code here reads an image or a noisy release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.data.cards import Card, PublicCard
from sfumato.errors import BudgetError, ConfigError
from sfumato.planning.checks import check_consistent
from sfumato.planning.kept import Plan, holds, repeat_count, stages_before
from sfumato.privacy.accountant import (
    LARGEST_DELTA,
    NoiseRequest,
    calibrate,
    checked_delta,
    epsilon,
    shares_of_rdp,
)
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, UNITS, ZERO_OUT_ONE, Mechanism, event_of
from sfumato.privacy.odometer import Run
from sfumato.privacy.policy import SpendingPolicy
from sfumato.privacy.record import record_problems
from sfumato.privacy.resolved import LINEAGE, Lineage, PlanFile, settings_digest
from sfumato.settings.data import GROUP, IMAGE, SEVERAL
from sfumato.settings.fields import REST
from sfumato.settings.params import Params
from sfumato.settings.recipes import as_yaml
from sfumato.settings.stage import Stage
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.digest import digest_of
from sfumato.storage.files import csv_text, json_text

if TYPE_CHECKING:
    from dp_accounting import DpEvent


def noise_requests(params: Params) -> dict[str, NoiseRequest]:
    """Return what each query in `run` requests: a noise multiplier, a share of the budget, or the
    rest of the budget.

    Raises ConfigError unless exactly one query requests the rest of the budget.
    """
    requests = {}
    rest_queries = []
    for name in filter(params.runs, QUERIES):
        settings = getattr(params, name)
        rate, uses = settings.sampling(params.privacy.size)
        multiplier = share = None
        if settings.noise == REST:
            rest_queries.append(name)
        elif isinstance(settings.noise, str):
            share = float(settings.noise.rstrip("%")) / 100
        else:
            multiplier = settings.noise
        requests[name] = NoiseRequest(
            sample_rate=rate, uses=uses, noise_multiplier=multiplier, share=share
        )
    if len(rest_queries) != 1:
        raise ConfigError(
            f"recipe={params.recipe!r}: exactly one query must have `noise: rest`. Queries that "
            f"have it: {', '.join(rest_queries) or 'none'}. Queries in run: "
            f"{', '.join(requests) or 'none'}"
        )
    return requests


def make_plan(
    params: Params,
    card: Card,
    public: PublicCard | None = None,
    runs: Sequence[Run] = (),
    records: Sequence[dict] = (),
) -> Plan:
    """Resolve all parameters, calibrate the noise, and return the plan.

    Raises BudgetError, with the stage and the excess, if the budget cannot be met.

    public: card of the public set, if a stage reads it;
    runs: earlier runs on these images (see `Past`);
    records: charges of the earlier releases from which public images or a public model were made.
    The budget must cover these charges too (see `inherited_events`).
    """
    check_consistent(params, card, public)
    privacy = params.privacy
    delta = checked_delta(privacy.delta, privacy.size, "privacy.")
    inherited = inherited_events(
        records, privacy.epsilon, delta, privacy.protected, privacy.accountant
    )
    adjacency = ADD_OR_REMOVE_ONE
    if privacy.declared_size and not any(
        record["adjacency"] == ADD_OR_REMOVE_ONE for record in records
    ):
        adjacency = ZERO_OUT_ONE
    mechanisms = calibrate(
        noise_requests(params), privacy.epsilon, delta, privacy.accountant, adjacency, inherited
    )
    shares = shares_of_rdp({name: [m.event] for name, m in mechanisms.items()}, delta)
    events = [*inherited, *(m.event for m in mechanisms.values())]
    budget = {
        "recipe": params.recipe,
        "accountant": privacy.accountant,
        "adjacency": adjacency,
        "delta": delta,
        "size_hint": privacy.size,
        "target": privacy.epsilon,
        "epsilon": epsilon(events, delta, privacy.accountant, adjacency),
        "stages": {
            name: (
                vars(m)
                | {
                    "epsilon": epsilon([m.event], delta, privacy.accountant, adjacency),
                    "share": shares[name],
                }
            )
            for name, m in mechanisms.items()
        },
    }
    files = {
        name: stage_file(stage, params, card, mechanisms.get(name))
        for name, stage in STAGES.items()
    }
    lineage = {}
    for name in mechanisms:
        digest = plan_digest(name, params, files, public)
        again = repeat_count(name, params, digest, runs)
        lineage[name] = Lineage(plan=digest, again=again)
        if again:
            files[name]["again"] = again
    return Plan(params, files, mechanisms, budget, lineage)


def plan_digest(
    name: str, params: Params, files: Mapping[str, dict], public: PublicCard | None
) -> str:
    """Compute one digest over the settings of a stage and of all stages whose results it uses.

    If one of these stages reads the public set, the card of the public set is included. Revisions
    of earlier free stages are not included, because a change of a free stage's code must not cause
    new spending.
    """
    stages = (*stages_before(name, params), name)
    reads = any("public" in params.inputs_of(n) for n in stages)
    free_files = {
        n: {**files[n], "revision": 1}
        for n in stages
        if n not in QUERIES and "revision" in files[n]
    }
    settings = {n: settings_digest(free_files.get(n, files[n])) for n in stages}
    return digest_of(
        {"settings": settings, "public": asdict(public) if reads and public is not None else None}
    )


def inherited_events(
    records: Sequence[dict], target: float, delta: float, unit: str = IMAGE, accountant: str = "rdp"
) -> list[DpEvent]:
    """Return the mechanisms of all charges that public images or a public model depend on.

    Public images and models may be earlier releases, or made from earlier releases. Their
    `privacy.json` then lists the charges of these releases. The releases of this project depend on
    these charges too, so the project's budget must cover the charges.

    Raises BudgetError if a record is invalid or protects another unit, or if the mechanisms
    together use up the `target` ε.
    """
    problems = [problem for record in records for problem in record_problems("record", record)] or [
        f"record {record['id'][:8]} protects the unit {record['unit']!r}, not {UNITS[unit]!r}"
        for record in records
        if record["unit"] != UNITS[unit]
    ]
    if problems:
        raise BudgetError(
            "the public images or the public model were made from earlier releases, and the "
            f"charges of these releases cannot be counted: {problems[0]}. Fix this, or use other "
            "public images or another model"
        )
    events = [event_of(record) for record in records]
    if (spent := epsilon(events, delta, accountant)) >= target:
        raise BudgetError(
            f"privacy.epsilon={target:g} is too small: it must also cover the ε = {spent:.4g} that "
            "was spent when the public images or the public model were made from sensitive images. "
            "Raise privacy.epsilon, or use other public images or another model"
        )
    return events


def warnings_of(params: Params, delta: float, classes: int) -> Iterator[str]:
    """Yield a warning for each setting that is allowed but weakens the guarantee, and one if
    `count.noise` is large compared with the class counts.
    """
    hint = params.privacy.size
    if params.privacy.epsilon > 20:
        yield (
            f"privacy.epsilon={params.privacy.epsilon:g}: above 20 the guarantee is almost "
            "meaningless"
        )
    if params.privacy.delta is None and delta == LARGEST_DELTA:
        yield (
            f"privacy.size_hint={hint} is so small that δ is the largest allowed value, {delta:g}: "
            "so few units cannot be protected well"
        )
    if not params.privacy.declared_size and float(f"{hint:.1e}") != hint:
        remedy = (
            f"round it, for example to {float(f'{hint:.1e}'):.0f}, or, if the exact count is "
            "public, set privacy.declared_size: true"
        )
        yield f"privacy.size_hint={hint} looks like an exact count, which is private: {remedy}"
    noise = params.count.noise
    images_per_class = hint / classes
    if params.runs("count") and not isinstance(noise, str) and noise > 0.1 * images_per_class:
        remedy = "set a share, such as count.noise: 1%, before the first release"
        yield (
            f"count.noise={noise:g} is large compared with the number of images per class, about "
            f"{images_per_class:.3g}: {remedy}"
        )


def stage_file(stage: Stage, params: Params, card: Card, mechanism: Mechanism | None) -> PlanFile:
    """Return the resolved configuration of one stage: its revision, its settings that differ from
    the defaults, and the public facts that it uses.
    """
    enabled = params.runs(stage.name)
    content: PlanFile = {"stage": stage.name, "revision": stage.revision, "enabled": enabled}
    content |= {
        "dataset_id": card.dataset_id,
        "shape": list(card.shape),
        "classes": list(card.classes),
    }
    content |= {"size_hint": params.privacy.size, "settings": {}}
    if card.labels == SEVERAL:
        content["labels"] = SEVERAL
    if enabled:
        settings = getattr(params, stage.name)
        content["settings"] = settings.model_dump(
            mode="json", exclude={"noise"}, exclude_defaults=True
        )
    if enabled and stage.seeded:
        content["seed"] = params.seed
    if enabled and stage.shows_epsilon:
        content["delta"] = checked_delta(params.privacy.delta, params.privacy.size)
    if enabled and stage.network:
        content["model"] = params.model.non_default()
    if enabled and stage.owned and (about := params.release.model_dump(exclude_none=True)):
        content["about"] = about
    # The cards of these stages describe how pictures were prepared, and state ε at δ. Therefore,
    # their plans contain these settings
    if enabled and stage.name in ("teacher", "synthesize", "student"):
        if prepared := params.data.model_dump(
            mode="json", include={"fit", "range"}, exclude_defaults=True
        ):
            content["prepared"] = prepared
        if params.privacy.accountant != "rdp":
            content["accountant"] = params.privacy.accountant
        if params.privacy.delta is not None:
            content["delta"] = params.privacy.delta
    if mechanism is not None:
        content["mechanism"] = dict(vars(mechanism))
        if params.privacy.unit == GROUP:
            content |= {"unit": GROUP, "group_cap": params.privacy.group_cap or 1}
    # The plan of a stage that reads only the public set must not contain these facts about the
    # sensitive set.
    private = ("dataset_id", "classes", "size_hint", "labels")
    return {
        key: value for key, value in content.items() if not stage.public_only or key not in private
    }


def policy_of(plan: Plan) -> SpendingPolicy:
    """Return the owner's permissions to spend, which `plan_texts` puts into a file of their own."""
    privacy = plan.params.privacy
    return SpendingPolicy(
        delta=plan.budget["delta"],
        lifetime_epsilon=privacy.lifetime,
        accountant=privacy.accountant,
        declared_size=privacy.declared_size,
        one_image_each=privacy.unit == IMAGE,
    )


def plan_texts(plan: Plan, last_folder: Path | None = None) -> dict[str, str]:
    """Return the text of each file of the plan, by name. Equal plans have equal texts.

    last_folder: folder of the last plan. If a file in it has equal content, its text is returned
    unchanged.
    """
    texts = {
        file: (
            (last_folder / file).read_text("utf-8")
            if last_folder and holds(last_folder / file, content)
            else as_yaml(content)
        )
        for file, content in ((f"{stage}.yaml", content) for stage, content in plan.files.items())
    }
    texts["budget.json"] = json_text(plan.budget)
    rows = [
        row | {"stage": name, "epsilon_alone": row["epsilon"]}
        for name, row in plan.budget["stages"].items()
    ]
    # For `dvc plots`
    texts["budget.csv"] = csv_text(rows, {"stage": "", "epsilon_alone": ".6g", "share": ".6g"})
    permission = {
        key: value
        for key, value in vars(policy_of(plan)).items()
        if key != "one_image_each" or value
    }
    texts["permission.json"] = json_text(permission)
    lineage = {
        name: {k: v for k, v in asdict(entry).items() if v} for name, entry in plan.lineage.items()
    }
    texts[LINEAGE] = json_text(lineage)
    return texts
