"""Plans of schema 4 (version 0.2), with every default and a digest of the code. Their releases stay known."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from sfumato.settings.fields import models_in
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model


@functools.cache
def table() -> dict[str, Any]:
    """The defaults of schema 4: `settings` by stage, `models` within them, `model`, and `public_model`."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def as_now(content: Mapping[str, Any], extra: Literal["forbid", "ignore"] = "forbid") -> dict[str, Any]:
    """A resolved file in today's form. extra: what becomes of settings that are gone since. Raises ValueError."""
    stage = STAGES[content["stage"]]
    now = {"revision": 1, **{key: value for key, value in content.items() if key != "code"}}
    if content.get("settings"):
        settings = without_removed(stage.settings, content["settings"], table()["settings"].get(stage.name, {}))
        model: BaseModel = stage.settings.model_validate(settings, extra=extra)
        now["settings"] = model.model_dump(mode="json", exclude_defaults=True)
    if content.get("model"):
        model = Model.model_validate(without_removed(Model, content["model"], table()["model"]))
        now["model"] = model.model_dump(mode="json", exclude_defaults=True)
    return now


def as_then(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of schema 4 that means the same as a resolved file of today: the digest of old records is of it."""
    then = {key: value for key, value in content.items() if key not in ("revision", "again")}
    if content["enabled"]:
        then["settings"] = filled(content["settings"], table()["settings"].get(content["stage"], {}))
    if "model" in content:
        kind = "public_model" if "directory" in content["model"] else "model"
        then["model"] = filled(content["model"], table()[kind])
    return then


def without_removed(kind: type[BaseModel], values: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """`values` less those of settings that are gone since and had their default."""
    kept = {}
    for key, value in values.items():
        field = kind.model_fields.get(key)
        if field is None and key in then and value == then[key]:
            continue
        inner = table()["models"].get(key, then.get(key)) or {}
        for nested in models_in(getattr(field, "annotation", None)):
            if isinstance(value, dict):
                value = without_removed(nested, value, inner)
            elif isinstance(value, list):
                value = [without_removed(nested, entry, inner) for entry in value]
        kept[key] = value
    return kept


def filled(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """`now`, with the defaults of schema 4 for what it leaves out."""
    models = table()["models"]
    whole = {**then, **now}
    for key, value in now.items():
        if isinstance(value, dict) and (inner := models.get(value.get("law", key))):
            whole[key] = filled(value, inner)
        elif isinstance(value, list) and key in models:
            whole[key] = [filled(entry, models[key]) for entry in value]
    return whole
