"""The resolved configuration of one stage, as `stage plan` writes it: all that the stage reads besides its input artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sfumato import config
from sfumato.config import Strict
from sfumato.digest import digest_of
from sfumato.errors import ConfigError
from sfumato.privacy.events import Mechanism

SETTINGS: dict[str, type[Strict]] = {
    "count": config.Count,
    "central": config.Central,
    "frequency": config.Frequency,
    "auxiliary": config.Auxiliary,
    "classifier": config.Classifier,
    "histogram": config.Histogram,
    "select": config.Select,
    "pretrain": config.Pretrain,
    "saliency": config.Saliency,
    "finetune": config.Finetune,
    "synthesize": config.Synthesize,
    "evaluate": config.Evaluate,
}
STAGES = tuple(SETTINGS)  # in the order of the DAG
QUERIES = ("count", "central", "frequency", "histogram", "saliency", "finetune")


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage, resolved. `settings` is typed; `mechanism` is for the charge alone, and None where the stage charges nothing.

    The public classifier's plan names no sensitive set: it is trained once for each public one.
    """

    stage: str
    enabled: bool
    settings: Any
    digest: str
    shape: tuple[int, int, int]
    dataset_id: str = ""
    classes: tuple[str, ...] = ()
    size_hint: int = 0
    seed: int = 0
    delta: float | None = None
    model: config.Model | None = None
    mechanism: Mechanism | None = None


def read_stage_plan(path: Path, stage: str) -> StagePlan:
    """Raises ConfigError where `path` is no resolved configuration of `stage`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is missing: run `stage plan` first, or name a resolved configuration with --config"
        ) from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("stage") != stage:
        raise ConfigError(
            f"{path} is no resolved configuration of `{stage}`: run `stage plan`, or name the right file with --config"
        )
    try:
        digest = digest_of(content)
        mechanism, model = content.get("mechanism"), content.get("model")
        return StagePlan(
            stage=stage,
            enabled=content["enabled"],
            settings=SETTINGS[stage].model_validate(content["settings"]),
            digest=digest,
            shape=tuple(content["shape"]),
            dataset_id=content.get("dataset_id", ""),
            classes=tuple(content.get("classes", ())),
            size_hint=content.get("size_hint", 0),
            seed=content.get("seed", 0),
            delta=content.get("delta"),
            model=config.Model.model_validate(model) if model else None,
            mechanism=Mechanism(**mechanism) if mechanism else None,
        )
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be used ({error}): run `stage plan` again") from error
