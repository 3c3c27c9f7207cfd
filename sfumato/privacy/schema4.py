"""Plans of schema 4 (version 0.2), which held every default and a digest of the code.

Their releases stay known: `as_now` reads such a plan, and `as_then` gives the content whose digest its records hold.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model

TABLE = Path(__file__).with_suffix(".yaml")


@functools.cache
def table() -> dict[str, Any]:
    """The defaults of schema 4: `settings` by stage, `model`, and those that plans `omitted`."""
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def as_now(content: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved file in today's form: its revision, and its settings as far as they are not the defaults.

    Raises ValueError for settings that no version accepts.
    """
    stage = STAGES[content["stage"]]
    found = {"revision": 1, **{key: value for key, value in content.items() if key != "code"}}
    if content.get("settings"):
        settings = without_removed(stage.settings, content["settings"], table()["settings"].get(stage.name, {}))
        found["settings"] = stage.settings.model_validate(settings).model_dump(mode="json", exclude_defaults=True)
    if content.get("model"):
        model = Model.model_validate(without_removed(Model, content["model"], table()["model"]))
        found["model"] = model.model_dump(mode="json", exclude_defaults=True)
    return found


def as_then(content: Mapping[str, Any], settings: BaseModel, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """The content of schema 4 with the same meaning as a resolved file of today.

    Args:
        content: the resolved file of today.
        settings: those of its stage.
        model: all keys of its network, if it has one.
    """
    found = {key: value for key, value in content.items() if key not in ("revision", "again")}
    if content["enabled"]:
        whole = settings.model_dump(mode="json", exclude={"noise"})
        found["settings"] = without_omitted(filled(whole, table()["settings"].get(content["stage"], {})))
    if model is not None:
        found["model"] = dict(model) if model.get("directory") else filled(model, table()["model"])
    return found


def without_removed(kind: type[BaseModel], values: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """`values` less those of settings that are gone since and had their default."""
    found = {}
    for key, value in values.items():
        field = kind.model_fields.get(key)
        if field is None and key in then and value == then[key]:
            continue
        nested = field.annotation if field is not None else None
        if isinstance(nested, type) and issubclass(nested, BaseModel) and isinstance(value, dict):
            value = without_removed(nested, value, then.get(key) or {})
        found[key] = value
    return found


def filled(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """`now`, with the defaults of settings that are gone since."""
    found = {**then, **now}
    for key, value in then.items():
        if isinstance(value, dict) and key != "sources" and found[key] and found[key].get("law") == value.get("law"):
            found[key] = filled(found[key], value)
    return found


def without_omitted(value: Any) -> Any:
    """`value` without the settings that schema 4 omitted at their default."""
    if isinstance(value, list):
        return [without_omitted(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    omitted = table()["omitted"]
    return {k: without_omitted(v) for k, v in value.items() if k not in omitted or v != omitted[k]}
