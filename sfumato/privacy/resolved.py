"""The resolved configuration of one stage, written by `stage plan`.

A stage reads this configuration and its inputs, and no other settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from sfumato.errors import ConfigError, explained
from sfumato.settings.data import IMAGE, SEVERAL, DatasetId
from sfumato.settings.fields import Positive, Settings
from sfumato.settings.stage import QUERY
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import Exact, read_json, read_yaml, validated

if TYPE_CHECKING:
    from sfumato.privacy.events import Mechanism

S = TypeVar("S", bound=Settings, covariant=True)
PlanFile = dict[str, Any]  # content of the resolved file of a stage
LINEAGE = "lineage.json"  # File with the `Lineage` of each query


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Content of the resolved file of any stage.

    The dataset id, classes and size hint are empty if the stage reads only the public set.

    shape: (C, H, W) of the images;
    again: number of times that the owner asked to pay again;
    delta: δ of the ε that the stage prints, or that its card states. A card uses the default for
    `size_hint` if `delta` is None. Digests depend on it only if the stage prints ε while it runs;
    about: the owner's texts for the release;
    prepared: the settings `data.fit` and `data.range`, if they differ from their defaults. Only
    cards state them, and no digest depends on them;
    accountant: accountant of the ε that cards state. No digest depends on it.
    """

    stage: str
    enabled: bool
    shape: tuple[Positive, Positive, Positive]
    revision: Positive = 1
    again: Annotated[int, Field(ge=0)] = 0
    dataset_id: DatasetId | Literal[""] = ""
    classes: tuple[str, ...] = ()
    size_hint: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    about: dict[str, str] = field(default_factory=dict)
    prepared: dict[str, object] = field(default_factory=dict)
    accountant: Literal["rdp", "pld", "exact"] = "rdp"
    labels: Literal["one", "several"] = "one"
    unit: Literal["image", "group"] = IMAGE  # unit that the charge of a query protects
    group_cap: Positive = 1  # see `Charge`

    @property
    def several(self) -> bool:
        """True if an image can have any number of the classes at once."""
        return self.labels == SEVERAL


@dataclass(frozen=True, kw_only=True)
class StagePlan(Resolved, Generic[S]):
    """The resolved configuration of one stage. digest: result of `settings_digest`."""

    settings: S
    digest: str
    model: Model | None = None

    @property
    def network(self) -> Model:
        """Parameters of the network, for a stage that trains it."""
        if self.model is None:
            raise ConfigError(
                f"the plan of {self.stage} contains no network: run `stage plan` again"
            )
        return self.model


@dataclass(frozen=True, kw_only=True)
class QueryPlan(StagePlan[S]):
    """The resolved configuration of a query that is switched on."""

    mechanism: Mechanism


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Facts that decide, together with a query's own plan, whether the query spends.

    plan: digest of the settings of the query and of all stages whose results it uses. For queries
    among these stages, it also covers the revision. If any of these stages reads the public set, it
    also covers the card of the public set;
    again: number of times that the owner asked to pay again.
    """

    plan: str
    again: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True)
class ResolvedFile(Resolved, Exact):
    settings: dict[str, object]
    model: dict[str, object] | None = None
    mechanism: dict[str, Any] = field(default_factory=dict)


def read_lineage(folder: Path, stage: str) -> Lineage:
    """Read the lineage of a query from the folder of a plan.

    Raises ConfigError if the lineage is missing or cannot be read.
    """
    with explained(
        ConfigError, lambda error: f"{folder / LINEAGE} cannot be read ({error}): run `stage plan`"
    ):
        return validated(dict[str, Lineage], read_json(folder / LINEAGE))[stage]


def settings_digest(content: Mapping[str, Any]) -> str:
    """Compute the digest of a stage's resolved file, without the fields that affect no result.

    The file contains only settings that differ from their defaults, so a new option does not change
    the digest of older plans.
    """
    irrelevant = {"again", "prepared", "accountant"}
    if not STAGES[content["stage"]].shows_epsilon:
        irrelevant.add("delta")
    decides = deepcopy({key: content[key] for key in content.keys() - irrelevant})
    settings = decides.get("settings", {})
    for holder in (settings, *settings.get("features", ())):
        # The network is identified by its sha256, so the file may be moved.
        if isinstance(holder.get("network"), dict):
            holder["network"].pop("path", None)
    return digest_of(decides)


def read_stage_plan(
    path: Path, stage: str, extra: Literal["forbid", "ignore"] = "forbid"
) -> StagePlan[Any]:
    """Read the plan of `stage`. Returns a QueryPlan if the stage is a query that is switched on.

    extra: "ignore" to skip settings that this version does not have, "forbid" to refuse them.
    Raises ConfigError if the file is missing or is not a plan of this stage.
    """
    missing = f"{path} is missing: run `stage plan` first"
    with explained(
        ConfigError,
        lambda error: f"{path} cannot be read ({error}): run `stage plan` again",
        missing=missing,
    ):
        content = read_yaml(path)
    if not isinstance(content, dict) or content.get("stage") != stage:
        raise ConfigError(f"{path} is not a resolved configuration of `{stage}`: run `stage plan`")
    with explained(
        ConfigError, lambda error: f"{path} cannot be used ({error}): run `stage plan` again"
    ):
        file = validated(ResolvedFile, content)
        if file.revision != STAGES[stage].revision:
            raise ValueError(
                f"it was written for revision {file.revision} of {stage}, and the current revision "
                f"is {STAGES[stage].revision}"
            )
        fields: dict[str, Any] = vars(file) | {
            "settings": STAGES[stage].settings.model_validate(file.settings, extra=extra),
            "digest": settings_digest(content),
            "model": None if file.model is None else Model.model_validate(file.model),
        }
        mechanism = fields.pop("mechanism")
        if STAGES[stage].kind is QUERY and file.enabled:
            from sfumato.privacy.events import Mechanism  # slow import, only for a query

            return QueryPlan(**fields, mechanism=Mechanism(**mechanism))
        return StagePlan(**fields)
