"""The resolved configuration of one stage, as `stage plan` writes it: all that the stage reads besides its inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import yaml
from pydantic import ValidationError

from sfumato.config import Model, Settings
from sfumato.digest import digest_of
from sfumato.errors import ConfigError
from sfumato.pipeline import STAGES, Kind

if TYPE_CHECKING:
    from sfumato.privacy.events import Mechanism

S = TypeVar("S", bound=Settings)
LINEAGE = "lineage.json"  # beside the resolved files: what the record of each query says of the stages before it


@dataclass(frozen=True, kw_only=True)
class StagePlan(Generic[S]):
    """One stage, resolved. shape: (C, H, W) of the images; digest: of all but `code` and `again`.

    about: what the release says of itself, for the stage that makes it.
    code: digest of the code that is to do it, or did; again: how often the owner had it paid for once more.

    A plan for the public set alone names no sensitive set: its dataset id, classes and size hint are empty.
    """

    stage: str
    enabled: bool
    settings: S
    digest: str
    shape: tuple[int, int, int]
    code: str = ""
    again: int = 0
    dataset_id: str = ""
    classes: tuple[str, ...] = ()
    size_hint: int = 0
    seed: int = 0
    delta: float | None = None
    model: Model | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def network(self) -> Model:
        """The parameters of the network, of a stage that trains it."""
        if self.model is None:
            raise ConfigError(f"the plan of {self.stage} holds no network: run `stage plan` again")
        return self.model


@dataclass(frozen=True, kw_only=True)
class QueryPlan(StagePlan[S]):
    """A query that is switched on. `mechanism` is for the charge alone: no query reads a noise multiplier from it."""

    mechanism: Mechanism


def read_lineage(folder: Path, stage: str) -> dict:
    """The lineage of a query (`sfumato.plan.Plan`), from the folder of a plan. Raises ConfigError where it is not."""
    path = folder / LINEAGE
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))[stage]
        return {"plan": str(entry["plan"]), "code": dict(entry["code"]), "again": int(entry["again"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}): run `stage plan`") from error


def settings_digest(content: Mapping[str, Any]) -> str:
    """Digest of a resolved file without its `code` and `again`."""
    return digest_of({key: value for key, value in content.items() if key not in ("code", "again")})


def read_stage_plan(path: Path, stage: str) -> StagePlan[Any]:
    """The plan of `stage`: a QueryPlan for a query that is switched on. Raises ConfigError for any other file."""
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
            f"{path} is not a resolved configuration of `{stage}`: run `stage plan`, "
            "or name the right file with --config"
        )
    try:
        model = content.get("model")
        fields: dict[str, Any] = {
            "stage": stage,
            "enabled": content["enabled"],
            "settings": STAGES[stage].settings.model_validate(content["settings"]),
            "digest": settings_digest(content),
            "shape": tuple(content["shape"]),
            "classes": tuple(content.get("classes", ())),
            "model": Model.model_validate(model) if model else None,
            **{
                key: content[key]
                for key in ("code", "again", "dataset_id", "size_hint", "seed", "delta", "about")
                if key in content
            },
        }
        if STAGES[stage].kind is Kind.QUERY and content["enabled"]:
            from sfumato.privacy.events import Mechanism  # slow to import: only for a query

            return QueryPlan(**fields, mechanism=Mechanism(**content["mechanism"]))
        return StagePlan(**fields)
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be used ({error}): run `stage plan` again") from error
