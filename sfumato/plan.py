"""From parameters to one resolved configuration per stage, its noise calibrated to the budget; what it would spend.

All of it is public: nothing here reads an image or a noisy answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sfumato.config import REST, Params, QuerySettings
from sfumato.consistency import check_consistent, check_public, settings_of
from sfumato.data.store import Card, PublicCard
from sfumato.digest import code_digest, digest_of
from sfumato.errors import ConfigError
from sfumato.pipeline import QUERIES, STAGES, Kind, Stage
from sfumato.privacy.accountant import Ask, calibrate, default_delta, epsilon, shares_of_rdp
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.opening import Permission, check_lifetime
from sfumato.recipes import as_yaml

OF_THE_SENSITIVE_SET = ("dataset_id", "classes", "size_hint")  # what a plan for the public set alone leaves out
DOOR = "sfumato.privacy.charge"  # the code of every query: it draws the images and adds the noise
LARGEST_DELTA = 1e-3
MEASURED = "sfumato.evaluation"  # the code of local stages alone: a number from real images decides nothing


@dataclass(frozen=True)
class Plan:
    """All that `stage plan` works out.

    files: the resolved configuration of each stage; mechanisms: of each query that is switched on; budget: a table.
    """

    params: Params
    files: dict[str, dict]
    mechanisms: dict[str, Mechanism]
    budget: dict


def asks_of(params: Params) -> dict[str, Ask]:
    """What each query that is switched on asks of the budget. Raises ConfigError unless exactly one takes the rest."""
    asks, rests = {}, []
    for name in QUERIES:
        settings = settings_of(params, STAGES[name])
        if not params.runs(name) or not isinstance(settings, QuerySettings):
            continue
        rate, uses = settings.sampling(params.privacy.size)
        noise = settings.noise
        if noise == REST:
            rests.append(name)
        asks[name] = Ask(
            sample_rate=rate,
            uses=uses,
            noise_multiplier=float(noise) if not isinstance(noise, str) else None,
            share=float(noise.rstrip("%")) / 100 if isinstance(noise, str) and noise != REST else None,
        )
    if len(rests) != 1:
        raise ConfigError(
            f"recipe={params.recipe!r}: exactly one stage must have noise: rest, "
            f"and {', '.join(rests) or 'none'} ha{'ve' if len(rests) > 1 else 's'} it. "
            f"Queries switched on: {', '.join(asks) or 'none'}"
        )
    return asks


def make_plan(params: Params, card: Card, code: Path, public: PublicCard | None = None) -> Plan:
    """Resolve everything. Raises BudgetError, naming the stage and the excess, if the budget cannot be met.

    `code` is the folder that holds the packages `sfumato` and `stages`; `public` the card of the public set, where a
    stage reads it.
    """
    check_consistent(params, card)
    if public is not None:
        check_public(params, public, len(card.classes))
    privacy = params.privacy
    delta = privacy.delta or default_delta(privacy.size)
    if delta > 1 / privacy.size:
        raise ConfigError(
            f"privacy.delta={delta:g} is above 1/privacy.size_hint={1 / privacy.size:.3g}: "
            "it would allow publishing an image. Lower it, or leave it out"
        )
    adjacency = ZERO_OUT_ONE if privacy.declared_size else ADD_OR_REMOVE_ONE
    mechanisms = calibrate(asks_of(params), privacy.epsilon, delta, privacy.accountant, adjacency)
    events = {name: [m.event] for name, m in mechanisms.items()}
    shares = shares_of_rdp(events, delta)
    every = [m.event for m in mechanisms.values()]
    budget = {
        "recipe": params.recipe,
        "accountant": privacy.accountant,
        "adjacency": adjacency,
        "delta": delta,
        "size_hint": privacy.size,
        "target": privacy.epsilon,
        "epsilon": epsilon(every, delta, privacy.accountant, adjacency),
        "stages": {
            name: {
                **vars(m),
                "epsilon": epsilon([m.event], delta, privacy.accountant, adjacency),
                "share": shares[name],
            }
            for name, m in mechanisms.items()
        },
    }
    files = {name: stage_file(stage, params, card, mechanisms.get(name), code) for name, stage in STAGES.items()}
    return Plan(params, files, mechanisms, budget)


def warnings_of(params: Params, delta: float) -> list[str]:
    """What is allowed and yet weakens the guarantee: one sentence each."""
    found, hint = [], params.privacy.size
    if delta > LARGEST_DELTA:
        found.append(
            f"δ = {delta:.2g} (privacy.size_hint={hint}): with that probability the guarantee says nothing. "
            f"Set privacy.delta to {LARGEST_DELTA:g} or less; a set of so few images cannot be protected well"
        )
    if not params.privacy.declared_size and float(f"{hint:.1e}") != hint:
        found.append(
            f"privacy.size_hint={hint} looks like an exact count, which is private: round it to two digits, such as "
            f"{float(f'{hint:.1e}'):.0f}, or set privacy.declared_size: true where the number is public"
        )
    return found


def stage_file(stage: Stage, params: Params, card: Card, mechanism: Mechanism | None, code: Path) -> dict:
    """All that one stage may depend on, and nothing else: a change of anything else does not re-run it."""
    enabled = params.runs(stage.name)
    content: dict[str, Any] = {"stage": stage.name, "enabled": enabled}
    if enabled:
        content["code"] = code_of(stage, code)
    content |= {
        "dataset_id": card.dataset_id,
        "shape": list(card.shape),
        "classes": list(card.classes),
        "size_hint": params.privacy.size,
        "settings": settings_of(params, stage).model_dump(mode="json", exclude={"noise"}) if enabled else {},
    }
    if enabled and stage.seeded:
        content["seed"] = params.seed
    if enabled and stage.shows_epsilon:
        content["delta"] = params.privacy.delta or default_delta(params.privacy.size)
    if enabled and stage.network:
        content["model"] = params.model.resolved()
    if mechanism is not None:
        content["mechanism"] = dict(vars(mechanism))
    return {key: value for key, value in content.items() if not stage.public_only or key not in OF_THE_SENSITIVE_SET}


def code_of(stage: Stage, root: Path) -> str:
    """Digest of the code that decides what a stage writes."""
    door = [DOOR] if stage.kind is Kind.QUERY else []
    return code_digest(root, f"stages.{stage.name}", *door, without=None if stage.kind is Kind.LOCAL else MEASURED)


def plan_texts(plan: Plan) -> dict[str, str]:
    """File name -> text, byte-deterministic."""
    privacy = plan.params.privacy
    permission = {
        "delta": plan.budget["delta"],
        "declared_size": privacy.declared_size,
        "lifetime_epsilon": privacy.lifetime_epsilon,
        "spend_again": privacy.spend_again,
    }
    texts = {f"{stage}.yaml": as_yaml(content) for stage, content in plan.files.items()}
    texts["budget.json"] = json.dumps(plan.budget, indent=1) + "\n"
    rows = [f"{name},{row['epsilon']:.6g},{row['share']:.6g}" for name, row in plan.budget["stages"].items()]
    texts["budget.csv"] = "\n".join(["stage,epsilon_alone,share", *rows]) + "\n"  # for `dvc plots`
    texts["permission.json"] = json.dumps(permission, indent=1) + "\n"
    return texts


# --- what a plan would spend ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What becomes of one query under a plan.

    done: the charge that released it; cause: the stage whose change makes it spend, or None; left_open: a kill left it
    on the odometer, and it goes on from there at no further cost.
    """

    stage: str
    mechanism: Mechanism
    done: str | None
    cause: str | None
    left_open: bool


def spending_of(made: Plan, card: Card, odometer: Odometer, out: Path) -> list[Spending]:
    """For each query: already released, or to be spent, and why. out: the folder of the plan so far."""
    changed: dict[str, str] = {}  # stage -> the stage whose change reaches it
    found = []
    for name, stage in STAGES.items():
        file = out / f"{name}.yaml"
        content = made.files[name]
        same = file.is_file() and yaml.safe_load(file.read_text(encoding="utf-8")) == content
        cause = next((changed[other] for other in stage.upstream if other in changed), None)
        mechanism = made.mechanisms.get(name)
        done = odometer.closed(card.version, plan=digest_of(content)) if mechanism else None
        if not same or (mechanism and not done):
            cause = name
        if cause:
            changed[name] = cause
        if mechanism is not None:
            left_open = stage.resumable and odometer.left_open(card.version, digest_of(content))
            found.append(Spending(stage=name, mechanism=mechanism, done=done, cause=cause, left_open=left_open))
    return found


def check_lifetime_of(made: Plan, odometer: Odometer, spending: Sequence[Spending]) -> None:
    """Refuse a plan that would run out of the lifetime budget half-way, before its first query."""
    privacy = made.params.privacy
    permission = Permission(
        delta=made.budget["delta"], lifetime_epsilon=privacy.lifetime_epsilon, declared_size=privacy.declared_size
    )
    events = [entry.mechanism.event for entry in spending if entry.cause and not entry.left_open]
    if events:
        check_lifetime(odometer, events, permission)
