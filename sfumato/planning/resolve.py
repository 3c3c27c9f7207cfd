"""From parameters to one resolved configuration per stage, its noise calibrated to the budget; what it would spend.

All of it is public: nothing here reads an image or a noisy answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent

from sfumato.data.store import Card, PublicCard
from sfumato.errors import UNREADABLE, BudgetError, ConfigError
from sfumato.planning.checks import check_consistent, check_public, settings_of
from sfumato.privacy.accountant import NoiseRequest, calibrate, default_delta, epsilon, shares_of_rdp
from sfumato.privacy.authorize import SpendingPolicy, check_lifetime
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, UNITS, ZERO_OUT_ONE, Mechanism, event_from_json
from sfumato.privacy.ledger import by_id
from sfumato.privacy.odometer import ABANDON, CLOSE, OPEN, Odometer
from sfumato.privacy.record import is_record, record_problems
from sfumato.privacy.resolved import LINEAGE, Lineage, settings_digest
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.fields import REST
from sfumato.settings.noise import QuerySettings
from sfumato.settings.params import Params
from sfumato.settings.recipes import as_yaml
from sfumato.settings.stages import QUERIES, STAGES, Kind, Stage
from sfumato.storage.digest import code_digest, digest_of
from sfumato.storage.documents import read_json, read_yaml

OF_THE_SENSITIVE_SET = ("dataset_id", "classes", "size_hint")  # what a plan for the public set alone leaves out
DOOR = "sfumato.privacy.charge"  # the code of every query: it draws the images and adds the noise
LARGEST_DELTA = 1e-3
MEASURED = "sfumato.evaluation"  # the code of local stages alone: a number from real images decides nothing


@dataclass(frozen=True)
class Plan:
    """All that `stage plan` works out.

    files: the resolved configuration of each stage; mechanisms: of each query that is switched on; budget: a table;
    lineage: of each such query, what its record says beside its own settings: `plan`, the digest of the settings of it
    and of all stages before it; `code`, by stage, of the same; `again`, how often the owner had it paid for once more;
    kept: the release that each of them keeps, where there is one; edited: those whose release other code made.
    """

    params: Params
    files: dict[str, dict]
    mechanisms: dict[str, Mechanism]
    budget: dict
    lineage: dict[str, dict]
    kept: dict[str, dict]
    edited: frozenset[str]


def noise_requests(params: Params) -> dict[str, NoiseRequest]:
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
        asks[name] = NoiseRequest(
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


def make_plan(
    params: Params,
    card: Card,
    code: Path,
    public: PublicCard | None = None,
    released: Sequence[dict] = (),
    before: Mapping[str, Lineage] | None = None,
    inherited: Sequence[dict] = (),
) -> Plan:
    """Resolve everything. Raises BudgetError, naming the stage and the excess, if the budget cannot be met.

    `code` is the folder that holds the packages `sfumato` and `stages`; `public` the card of the public set, where a
    stage reads it; released: records of these images, of which the last is kept first (`released_records`); before: the
    lineage of the plan so far, which tells whether privacy.spend_again is still the same wish; inherited: the records
    that public images and a public model bring, which the budget holds too.
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
    brought = inherited_events(inherited, privacy.epsilon, delta, privacy.protected)
    if any(record["adjacency"] == ADD_OR_REMOVE_ONE for record in inherited):
        adjacency = ADD_OR_REMOVE_ONE
    mechanisms = calibrate(noise_requests(params), privacy.epsilon, delta, privacy.accountant, adjacency, brought)
    shares = shares_of_rdp({name: [m.event] for name, m in mechanisms.items()}, delta)
    every = [*brought, *(m.event for m in mechanisms.values())]
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
    contents = {name: stage_file(stage, params, card, mechanisms.get(name)) for name, stage in STAGES.items()}
    plans = {name: plan_digest(name, params, contents, public) for name in mechanisms}
    agains = agains_of(params, plans, released, before or {})
    at_hand = {name: code_of(STAGES[name], code) for name in contents if params.runs(name)}
    codes, kept = kept_releases(plans, agains, released)
    files = {
        name: {
            **content,
            **({"code": codes.get(name, at_hand[name])} if name in at_hand else {}),
            **({"again": agains[name]} if agains.get(name) else {}),
        }
        for name, content in contents.items()
    }
    lineage: dict[str, dict[str, Any]] = {
        name: {
            "plan": plans[name],
            "code": {other: files[other]["code"] for other in (*stages_before(name, params), name)},
            "again": agains[name],
        }
        for name in mechanisms
    }
    edited = frozenset(n for n in kept if any(at_hand[other] != c for other, c in lineage[n]["code"].items()))
    return Plan(params, files, mechanisms, budget, lineage, kept, edited)


# --- what was released, which a plan keeps ----------------------------------------------------------------------------


def stages_before(name: str, params: Params) -> tuple[str, ...]:
    """The stages that are switched on and that `name` reads, directly or through others, in the order of the table."""
    settings = settings_of(params, STAGES[name])
    direct = [other for other in STAGES[name].upstream if params.runs(other) and settings.reads(other)]
    found = {*direct, *(far for other in direct for far in stages_before(other, params))}
    return tuple(other for other in STAGES if other in found)


def plan_digest(name: str, params: Params, contents: Mapping[str, dict], public: PublicCard | None) -> str:
    """Digest of the settings of a stage and of all before it, and of the public card where one reads the public set."""
    stages = (*stages_before(name, params), name)
    reads = any("public" in STAGES[n].inputs and settings_of(params, STAGES[n]).reads("public") for n in stages)
    settings = {n: settings_digest(contents[n]) for n in stages}
    return digest_of({"settings": settings, "public": asdict(public) if reads and public is not None else None})


def released_records(card: Card, odometer: Odometer, artifacts: Path, ledger: Path) -> list[dict]:
    """The records of what was released on these images, or left open by a kill; of two the later one is to be kept.

    From the committed ledger, which is there after `git clone`; from the odometer, which outlives a lost cache; from
    the artifacts that lie there now. A record that cannot be read is skipped: then nothing is kept, and the odometer
    refuses all the same to spend on what was released before.
    """
    found = [*records_in(ledger), *odometer_records(odometer)]
    for name in QUERIES:
        records = records_in(artifacts / name / "privacy.json")
        found += [record for record in records if record.get("stage") == name]
    version = card.dataset_id, card.version
    return [r for r in found if is_record(r) and (r["dataset_id"], r["data_version"]) == version]


def records_in(file: Path) -> list[dict]:
    """What a ledger or a `privacy.json` holds; nothing where it cannot be read."""
    try:
        return list(by_id(read_json(file)).values())
    except UNREADABLE:
        return []


def odometer_records(odometer: Odometer) -> list[dict]:
    """Those of charges that are not given up: the open ones first, for a closed one is kept before it."""
    entries, newest = odometer.entries(), odometer.runs()
    gone = {entry["id"] for entry in entries if entry["kind"] == ABANDON}
    closed = {entry["id"] for entry in entries if entry["kind"] == CLOSE}
    runs = [entry["record"]["id"] for entry in entries if entry["kind"] == OPEN and entry["record"]["id"] not in gone]
    return [
        *({**newest[run], "open": True} for run in runs if run not in closed),
        *(newest[run] for run in runs if run in closed),
    ]


def agains_of(
    params: Params, plans: Mapping[str, str], released: Sequence[dict], before: Mapping[str, Lineage]
) -> dict[str, int]:
    """How often each query is to be paid for once more: one more for those that privacy.spend_again newly names.

    It also reaches the queries that depend on them, whose inputs will be others.
    """
    named = set(params.privacy.spend_again)
    found = {}
    for name, plan in plans.items():
        done = [record["again"] for record in released if record.get("plan") == plan]
        found[name] = max(done, default=0)
        if name not in named and not named & set(stages_before(name, params)):
            continue
        then = before.get(name)
        if then and then.plan == plan and then.asked:  # the wish is not new: it was granted, or is about to be
            found[name] = then.again
        elif done:
            found[name] += 1
    return found


def kept_releases(
    plans: Mapping[str, str], agains: Mapping[str, int], released: Sequence[dict]
) -> tuple[dict[str, str], dict[str, dict]]:
    """The code that the plan is to name so that nothing released re-runs, by stage, and the release that each keeps.

    The last queries choose first: a release brings the code of all stages before it.
    """
    codes: dict[str, str] = {}
    kept: dict[str, dict] = {}
    for name in reversed(list(plans)):
        for record in reversed(released):
            same = (record.get("stage"), record.get("plan"), record["again"]) == (name, plans[name], agains[name])
            if same and name in record["code"] and all(codes.get(n, c) == c for n, c in record["code"].items()):
                codes |= record["code"]
                kept[name] = record
                break
    return codes, {name: kept[name] for name in plans if name in kept}


def inherited_events(records: Sequence[dict], target: float, delta: float, unit: str = IMAGE) -> list[DpEvent]:
    """The mechanisms of records that inputs bring. Raises BudgetError where they do not count, or cost too much."""
    problems = [problem for record in records for problem in record_problems("record", record)]
    problems = problems or [
        f"{record['id'][:8]} is of the unit {record['unit']!r}, not {UNITS[unit]!r}"
        for record in records
        if record["unit"] != UNITS[unit]
    ]
    if problems:
        raise BudgetError(f"public images or the public model bring records that cannot be counted: {problems[0]}")
    events = [event_from_json(record["event"]) for record in records]
    if (spent := epsilon(events, delta)) >= target:
        raise BudgetError(
            f"privacy.epsilon={target:g}: public images or the public model were made from sensitive images, "
            f"and what that cost comes to {spent:.4g} alone. Raise privacy.epsilon, or choose others"
        )
    return events


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


def stage_file(stage: Stage, params: Params, card: Card, mechanism: Mechanism | None) -> dict:
    """All that one stage may depend on besides its code: a change of anything else does not re-run it."""
    enabled = params.runs(stage.name)
    content: dict[str, Any] = {
        "stage": stage.name,
        "enabled": enabled,
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
    if enabled and stage.owned and (about := params.release.model_dump(exclude_none=True)):
        content["about"] = about
    if mechanism is not None:
        content["mechanism"] = dict(vars(mechanism))
        if params.privacy.unit == GROUP:
            content |= {"unit": GROUP, "group_cap": params.privacy.group_cap or 1}
    return {key: value for key, value in content.items() if not stage.public_only or key not in OF_THE_SENSITIVE_SET}


def code_of(stage: Stage, root: Path) -> str:
    """Digest of the code that decides what a stage writes."""
    door = [DOOR] if stage.kind is Kind.QUERY else []
    return code_digest(root, f"stages.{stage.name}", *door, without=None if stage.kind is Kind.LOCAL else MEASURED)


def policy_of(plan: Plan) -> SpendingPolicy:
    """What the owner allows beyond the plan of one stage."""
    privacy = plan.params.privacy
    return SpendingPolicy(
        delta=plan.budget["delta"],
        lifetime_epsilon=privacy.lifetime,
        accountant=privacy.accountant,
        declared_size=privacy.declared_size,
        one_image_each=privacy.unit == IMAGE,
    )


def plan_texts(plan: Plan) -> dict[str, str]:
    """File name -> text, byte-deterministic."""
    texts = {f"{stage}.yaml": as_yaml(content) for stage, content in plan.files.items()}
    texts["budget.json"] = json.dumps(plan.budget, indent=1) + "\n"
    rows = [f"{name},{row['epsilon']:.6g},{row['share']:.6g}" for name, row in plan.budget["stages"].items()]
    texts["budget.csv"] = "\n".join(["stage,epsilon_alone,share", *rows]) + "\n"  # for `dvc plots`
    permission = {key: value for key, value in vars(policy_of(plan)).items() if key != "one_image_each" or value}
    texts["permission.json"] = json.dumps(permission, indent=1) + "\n"
    asked = plan.params.privacy.spend_again
    lineage = {
        name: {**entry, **({"asked": True} if {name, *stages_before(name, plan.params)} & set(asked) else {})}
        for name, entry in plan.lineage.items()
    }
    texts[LINEAGE] = json.dumps(lineage, indent=1) + "\n"
    return texts


# --- what a plan would spend ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What becomes of one query under a plan.

    done: the charge that released it; cause: the stage whose change makes it spend, or None; left_open: a kill left it
    on the odometer, and it goes on from there at no further cost.
    """

    stage: str
    done: str | None
    cause: str | None
    left_open: bool


def spending_of(made: Plan, out: Path) -> list[Spending]:
    """For each query: already released, or to be spent, and why. out: the folder of the plan so far."""
    changed: dict[str, str] = {}  # stage -> the stage whose change reaches it
    found = []
    for name, stage in STAGES.items():
        kept = made.kept.get(name, {})
        done = kept["id"] if kept and not kept.get("open") else None
        cause = next((changed[other] for other in stage.upstream if other in changed), None)
        if not holds(out / f"{name}.yaml", made.files[name]) or (name in made.mechanisms and cause is None):
            cause = name
        if done:
            cause = None
        if cause:
            changed[name] = cause
        if name in made.mechanisms:
            found.append(Spending(stage=name, done=done, cause=cause, left_open=bool(kept.get("open"))))
    return found


def holds(file: Path, content: dict) -> bool:
    """Whether a resolved file is there and says this."""
    try:
        return read_yaml(file) == content
    except (OSError, ValueError):
        return False


def check_lifetime_of(made: Plan, odometer: Odometer, spending: Sequence[Spending]) -> None:
    """Refuse a plan that would run out of the lifetime budget half-way, before its first query."""
    coming = {e.stage: made.mechanisms[e.stage] for e in spending if not e.done and not e.left_open}
    if coming:
        check_lifetime(odometer, coming, policy_of(made))
