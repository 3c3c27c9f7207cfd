"""From what the user edits to one resolved configuration per stage, with the noise calibrated to the budget.

Defaults < profile < recipe < `params.yaml`. All of it is public: nothing here reads an image or a noisy answer.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from sfumato.config import PUBLIC_MODEL, REST, SALIENT, Central, Count, Finetune, Frequency, Histogram, Params, Saliency
from sfumato.data.store import Card, PublicCard
from sfumato.digest import code_digest
from sfumato.errors import ConfigError
from sfumato.privacy.accountant import Ask, calibrate, default_delta, epsilon, shares_of_rdp
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism
from sfumato.public_model.prompts import class_prompts
from sfumato.resolved import QUERIES, STAGES

WHOLE = {"sources", "noise_levels"}  # replaced whole by an overlay, not merged key by key
SEEDED = {"frequency", "auxiliary", "classifier", "pretrain", "finetune", "synthesize"}  # stages with public randomness
OF_THE_SENSITIVE_SET = ("dataset_id", "classes", "size_hint")  # no part of the classifier's plan
UPSTREAM = {
    "count": (),
    "central": ("count",),
    "frequency": ("count",),
    "auxiliary": ("frequency", "count"),
    "classifier": (),
    "histogram": ("classifier",),
    "select": ("histogram",),
    "pretrain": ("central", "auxiliary", "select"),
    "saliency": ("pretrain", "count"),
    "finetune": ("pretrain", "saliency", "count"),
    "synthesize": ("finetune", "pretrain", "auxiliary", "count"),
    "evaluate": ("synthesize", "auxiliary", "pretrain", "finetune", "count"),
}


@dataclass(frozen=True)
class Plan:
    """`files`: the resolved configuration of each stage; `mechanisms`: of each query that is switched on; `budget`: the table."""

    params: Params
    files: dict[str, dict]
    mechanisms: dict[str, Mechanism]
    budget: dict


# --- parameters ---------------------------------------------------------------------------------------------------------------


def load_params(path: Path, recipes: Path, recipe: str | None = None) -> Params:
    """Merge and validate. Raises ConfigError naming the key, its value and, for an unknown one, the nearest that exists.

    `recipe`: instead of the one that `path` names.
    """
    own = read_yaml(path)
    if recipe is not None:
        own["recipe"] = recipe
    recipe_name, profile = (
        own.get("recipe", Params.model_fields["recipe"].default),
        own.get("profile", Params.model_fields["profile"].default),
    )
    overlays = [(recipes / "profiles", profile, "profile"), (recipes, recipe_name, "recipe")]
    merged: dict[str, Any] = {}
    for folder, name, kind in overlays:
        if name is not None:
            overlay = read_overlay(folder, name, kind)
            validate(overlay, folder / f"{name}.yaml")
            merged = overlaid(merged, overlay)
    validate({key: value for key, value in own.items() if key not in ("recipe", "profile")}, path)
    return validate(overlaid(merged, own), path)


def read_overlay(folder: Path, name: object, kind: str) -> dict:
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1)
        raise ConfigError(
            f"{kind}={name!r} does not exist{f': did you mean {near[0]!r}?' if near else '.'} Known: {', '.join(known) or 'none'}"
        )
    overlay = read_yaml(folder / f"{name}.yaml")
    overlay.pop("description", None)
    return overlay


def read_yaml(path: Path) -> dict:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist: run from the project's folder, or name the file with --params"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, not {type(content).__name__}")
    return content or {}


def overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, key by key at every depth; lists and the keys in WHOLE are replaced."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping) and key not in WHOLE
        result[key] = overlaid(result[key], value) if both else value
    return result


def validate(values: dict, path: Path) -> Params:
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{path}: unknown key {key!r}{nearest_key(key)}") from error
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {key}={first['input']!r} is not valid: {message}") from error


def nearest_key(key: str) -> str:
    near = difflib.get_close_matches(key, sorted(all_keys(Params)), 1, cutoff=0.4)
    return f": did you mean {near[0]!r}?" if near else ""


def all_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Every dotted key of a parameter model."""
    keys = set()
    for name, field in model.model_fields.items():
        keys.add(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys |= all_keys(kind, f"{prefix}{name}.")
    return keys


# --- the budget -----------------------------------------------------------------------------------------------------------------


def asks_of(params: Params) -> dict[str, Ask]:
    """What each query that is switched on asks of the budget. Raises ConfigError unless exactly one takes the rest."""
    hint = params.privacy.size
    sampling: dict[str, tuple[Count | Central | Frequency | Histogram | Saliency | Finetune, float, int]] = {
        "count": (params.count, 1.0, 1),
        "central": (params.central, min(1.0, params.central.batch / hint), params.central.repeats),
        "frequency": (params.frequency, 1.0, 1),
        "histogram": (params.histogram, min(1.0, (params.histogram.batch or hint) / hint), 1),
        "saliency": (params.saliency, 1.0, 1),
        "finetune": (params.finetune, min(1.0, params.finetune.batch / hint), params.finetune.steps),
    }
    asks, rests = {}, []
    for name in QUERIES:
        settings, rate, uses = sampling[name]
        if not settings.enabled:
            continue
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
            f"recipe={params.recipe!r}: exactly one stage must have noise: rest, and {', '.join(rests) or 'none'} ha{'ve' if len(rests) > 1 else 's'} it. "
            f"Queries switched on: {', '.join(asks) or 'none'}"
        )
    return asks


def make_plan(params: Params, card: Card, code: Path, public: PublicCard | None = None) -> Plan:
    """Resolve everything. Raises BudgetError, naming the stage and the excess, if the budget cannot be met.

    `code` is the folder that holds the packages `sfumato` and `stages`; `public` the card of the public set, where the recipe has one.
    """
    check_consistent(params, card)
    if public is not None:
        check_public(params, public, len(card.classes))
    privacy = params.privacy
    delta = privacy.delta or default_delta(privacy.size)
    if delta > 1 / privacy.size:
        raise ConfigError(
            f"privacy.delta={delta:g} is above 1/privacy.size_hint={1 / privacy.size:.3g}: it would allow publishing an image. Lower it, or leave it out"
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
    return Plan(
        params,
        {stage: stage_file(stage, params, card, mechanisms.get(stage), code) for stage in STAGES},
        mechanisms,
        budget,
    )


def stage_file(stage: str, params: Params, card: Card, mechanism: Mechanism | None, code: Path) -> dict:
    """All that one stage may depend on, and nothing else: what is not here cannot re-run it."""
    section = getattr(params, stage)
    enabled = section.enabled if hasattr(section, "enabled") else True
    content: dict[str, Any] = {
        "stage": stage,
        "enabled": enabled,
        "code": code_digest(f"stages.{stage}", code),
        "dataset_id": card.dataset_id,
        "shape": list(card.shape),
        "classes": list(card.classes),
        "size_hint": params.privacy.size,
        "settings": section.model_dump(mode="json", exclude={"noise"}),
    }
    if stage in SEEDED:
        content["seed"] = params.seed
    if stage == "finetune":
        content["delta"] = params.privacy.delta or default_delta(params.privacy.size)
    if stage in ("pretrain", "saliency", "finetune"):
        content["model"] = params.model.resolved()
    if mechanism is not None:
        content["mechanism"] = dict(vars(mechanism))
    if not enabled:
        content = {key: content[key] for key in ("stage", "enabled", "dataset_id", "shape", "classes", "size_hint")} | {
            "settings": {}
        }
    return {key: value for key, value in content.items() if stage != "classifier" or key not in OF_THE_SENSITIVE_SET}


def check_consistent(params: Params, card: Card) -> None:
    """Raise ConfigError where a stage needs one that is switched off, or the card is of another dataset."""
    if card.dataset_id != params.data.name:
        raise ConfigError(
            f"data.dataset_id={params.data.name!r}, but the prepared card is of {card.dataset_id!r}: run `stage prepare sensitive`, or mend params.yaml"
        )
    data = params.data
    for key, asked, prepared in (
        ("source", data.source, card.source),
        ("size", data.size, card.shape[1]),
        ("channels", data.channels, card.shape[0]),
    ):
        if asked not in (None, prepared):
            raise ConfigError(
                f"data.{key}={asked}, but {prepared} was prepared: run `stage prepare sensitive`, or mend params.yaml"
            )
    select = params.select
    needs: list[tuple[str, bool, str, bool]] = [
        ("auxiliary", params.auxiliary.enabled, "frequency", params.frequency.enabled),
        ("classifier", params.classifier.enabled, "public", params.public.enabled),
        ("histogram", params.histogram.enabled, "classifier", params.classifier.enabled),
        ("select", select.enabled, "public", params.public.enabled),
        (
            "select.ratio below 1",
            select.enabled and (select.ratio < 1 or select.count is not None),
            "histogram",
            params.histogram.enabled,
        ),
        ("saliency", params.saliency.enabled, "pretrain", params.pretrain.enabled),
        ("finetune", params.finetune.enabled, "pretrain", params.pretrain.enabled),
        (
            f"finetune.trainable={params.finetune.trainable}",
            params.finetune.enabled and params.finetune.trainable in SALIENT,
            "saliency",
            params.saliency.enabled,
        ),
    ]
    for phase in params.pretrain.phases if params.pretrain.enabled else ():
        for source in phase.sources:
            stage = "select" if source == "public" else source
            needs.append(("a phase of pretrain", True, stage, getattr(params, stage).enabled))
    needs += [
        ("synthesize.sources", True, source, getattr(params, source).enabled) for source in params.synthesize.sources
    ]
    needs += [
        ("evaluate.stages", params.evaluate.enabled, source, getattr(params, source).enabled)
        for source in params.evaluate.stages
    ]
    for who, on, whom, there in needs:
        if on and not there:
            raise ConfigError(
                f"recipe={params.recipe!r}: {who} needs {whom}, which is switched off. Set {whom}.enabled: true, or take it out of {who}"
            )
    for wrong, message in shape_mistakes(params, card):
        if wrong:
            raise ConfigError(message)
    if params.model.directory is not None:
        class_prompts(params.model, card.dataset_id, card.classes)  # raises ConfigError where a prompt cannot be made
    elif params.pretrain.enabled:
        import torch

        from sfumato.diffusion.unet import UNet

        with torch.device("meta"):  # shapes only: raises ConfigError where widths and levels do not fit
            UNet(resolution=card.shape[1], channels=card.shape[0], classes=len(card.classes), **params.model.network())


def check_public(params: Params, public: PublicCard, sensitive: int) -> None:
    """Raise ConfigError where more public classes are asked for than there are, or fewer than each sensitive class needs."""
    classes = len(public.classes)
    if params.select.enabled and params.histogram.enabled and params.histogram.per_class:
        from sfumato.warmup.selection import number_to_keep

        kept = number_to_keep(params.select, classes)
        if kept < sensitive:
            key = (
                f"select.count={params.select.count}"
                if params.select.count
                else f"select.ratio={params.select.ratio:g}"
            )
            raise ConfigError(
                f"{key} keeps {kept} of {classes} public classes, but each of the {sensitive} sensitive ones needs its own: "
                f"select.count must be at least {sensitive}"
                + (
                    ""
                    if classes >= sensitive
                    else ", which this public set cannot give: take another, or histogram.per_class: false"
                )
            )
    votes, count = params.histogram.votes, params.select.count
    for wrong, key, value in (
        (params.histogram.enabled and votes > classes, "histogram.votes", votes),
        (params.select.enabled and count is not None and count > classes, "select.count", count),
    ):
        if wrong:
            raise ConfigError(f"{key}={value} is more than the {classes} public classes of {public.source!r}: lower it")


def shape_mistakes(params: Params, card: Card) -> list[tuple[bool, str]]:
    """What would fail only after something was spent: (is it so, what to say)."""
    _, height, width = card.shape
    central, frequency, model = params.central, params.frequency, params.model
    banks = sum(len(feature.length_scales) for feature in frequency.features)
    return [
        *public_model_mistakes(params),
        (
            central.enabled and bool(height % central.pool or width % central.pool),
            f"central.pool={central.pool} does not divide images of {height}×{width}: choose a divisor, or another data.size",
        ),
        (
            central.enabled and central.statistic == "mode" and central.max_norm is not None,
            f"central.max_norm={central.max_norm} means nothing for the mode, whose bound is fixed: leave it out",
        ),
        (
            frequency.enabled and frequency.size < 2 * banks,
            f"frequency.size={frequency.size} is too small for {banks} length-scales: at least {2 * banks}",
        ),
        (
            params.pretrain.enabled and params.pretrain.median > 1 and params.pretrain.median % 2 == 0,
            f"pretrain.median={params.pretrain.median} is no window: give an odd side, or 0 for no blur",
        ),
        (
            (params.pretrain.enabled or params.auxiliary.enabled) and height != width,
            f"images of {height}×{width} do not fit the models, which need square ones: set data.size",
        ),
        (
            params.pretrain.enabled and model.directory is None and bool(height % model.unshuffle),
            f"model.unshuffle={model.unshuffle} does not divide images of {height}×{width}: set data.size, or model.unshuffle",
        ),
    ]


def public_model_mistakes(params: Params) -> list[tuple[bool, str]]:
    """The same, of a public text-to-image model and what does not go with it."""
    model, finetune = params.model, params.finetune
    given = ", ".join(f"model.{name}" for name in PUBLIC_MODEL if getattr(model, name) and name != "directory")
    return [
        (
            model.directory is None and bool(given),
            f"{given} are of a public model, but model.directory names none: set it, or leave them out",
        ),
        (
            model.directory is not None and params.pretrain.enabled and bool(params.pretrain.phases),
            f"model.directory={model.directory}: a public model has no warm-up, but pretrain has {len(params.pretrain.phases)} phase(s). "
            "Set pretrain.phases: [], or use one of the recipes dp-sapf, dp-lora, dp-ldm, dp-finetune",
        ),
        (
            model.directory is not None and finetune.enabled and (finetune.flip or finetune.crop > 0),
            "finetune.flip and finetune.crop do not go with a public model, whose images are encoded once: set flip: false and crop: 0",
        ),
        (
            model.directory is not None and finetune.enabled and bool(finetune.convergence),
            "finetune.convergence does not go with a public model, whose samples take too long: leave it out, and look at the release with evaluate",
        ),
    ]


# --- files ----------------------------------------------------------------------------------------------------------------------


def as_yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


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
