"""Merge the layers of parameters: defaults < profile < recipe < `params.yaml`.

A later layer overrides the earlier ones. All layers are public.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sfumato.errors import ConfigError, explained, nearest
from sfumato.settings.fields import MACHINE, REST, models_in
from sfumato.settings.params import Params
from sfumato.settings.privacy import UNLIMITED
from sfumato.settings.stage import RECIPES
from sfumato.storage import documents

# Parameters before validation: the content of `params.yaml`, of a recipe or of a profile
Layer = dict[str, Any]
# Keys that a project's `params.yaml` must contain because DVC tracks them, and their usual values
TRACKED_KEYS = {"profile": "null", "data": "{}"}
# Messages by pydantic's error type. Pydantic's own messages use words of Python instead of YAML
EXPECTED = {
    "tuple_type": "expected a list, such as [a, b]",
    "dict_type": "expected keys and values, such as {key: value}",
    "model_type": "expected keys and values, such as {key: value}",
}


def recipe_files(folder: Path, kind: str = "recipe") -> dict[str, Path]:
    """Return the file of each recipe or profile, by name.

    A file in the project's `folder` replaces the file of the package with the same name.
    """
    package = Path(__file__).resolve().parents[1]
    shipped = package / RECIPES  # installed
    if not shipped.is_dir():
        shipped = package.parent / RECIPES  # a clone
    pattern = {"recipe": "*.yaml", "profile": "profiles/*.yaml"}[kind]
    files = {file.stem: file for root in (shipped, folder) for file in root.glob(pattern)}
    return dict(sorted(files.items()))


def load_params(path: Path, recipes: Path, recipe: str | None = None) -> Params:
    """Merge all layers of parameters, and validate them.

    recipes: the project's folder of recipes (see `recipe_files`); recipe: recipe to use instead of
    the one in the file `path`.

    Raises ConfigError with the key and its value or, for an unknown key, the nearest known key. In
    a project, also raises ConfigError if a key in TRACKED_KEYS is missing.
    """
    content = read_layer(path)
    in_project = path.name == "params.yaml" and path.with_name("dvc.yaml").is_file()
    for key, default in TRACKED_KEYS.items():
        if in_project and key not in content:
            raise ConfigError(
                f"{path} lacks the key {key!r}: add the line `{key}: {default}`, or set another "
                "value"
            )
    if recipe is not None:
        content["recipe"] = recipe
    return params_of(content, path, recipes)


def params_of(content: Layer, path: Path, recipes: Path = RECIPES) -> Params:
    """Merge and validate the content of a `params.yaml`. path: its name in messages.

    Raises like `load_params`.
    """
    merged: Layer = {}
    for kind in ("profile", "recipe"):
        if (name := content.get(kind, Params.model_fields[kind].default)) is not None:
            file, overlay = read_overlay(recipes, name, kind)
            validate(overlay, file, layer=True)
            merged = overlaid(merged, overlay)
    own_content = {key: value for key, value in content.items() if key not in ("recipe", "profile")}
    validate(own_content, path, layer=True)
    return validate(
        restore_rest(merged, overlaid(drop_unlimited_lifetime(merged, content), content)), path
    )


def restore_rest(recipe: Layer, values: Layer) -> Layer:
    """Restore the recipe's `noise: rest` if `params.yaml` replaced it by a share of the budget.

    The share may have been meant for another recipe. Nothing is changed if a query in `run` has
    `noise: rest`, or if `params.yaml` set a noise multiplier.
    """

    def resting(content: Layer) -> list[str]:
        return [
            name for name in values.get("run", ()) if content.get(name, {}).get("noise") == REST
        ]

    rest_queries = resting(recipe)
    if (
        resting(values)
        or len(rest_queries) != 1
        or not str(values[rest_queries[0]]["noise"]).endswith("%")
    ):
        return values
    return overlaid(values, {rest_queries[0]: {"noise": REST}})


def drop_unlimited_lifetime(merged: Layer, content: Layer) -> Layer:
    """Remove an unlimited lifetime budget from `merged` if `content` names other images.

    A profile sets this budget only for its own images, which are public. merged: parameters from
    profile and recipe; content: parameters from `params.yaml`.
    """
    data = merged.get("data", {})
    own_data = content.get("data", {})
    privacy = merged.get("privacy", {})
    same_images = all(
        own_data.get(key, data.get(key)) == data.get(key) for key in ("source", "path")
    )
    if same_images or privacy.get("lifetime_epsilon") != UNLIMITED:
        return merged
    return {
        **merged,
        "privacy": {key: value for key, value in privacy.items() if key != "lifetime_epsilon"},
    }


def read_overlay(folder: Path, name: object, kind: str = "recipe") -> tuple[Path, Layer]:
    """Return the file and the content of a recipe or profile. folder: see `recipe_files`."""
    files = recipe_files(folder, kind)
    if (file := files.get(str(name))) is None:
        raise ConfigError(f"{kind}={name!r} does not exist: {nearest(str(name), files)}")
    overlay = read_layer(file)
    overlay.pop("description", None)
    return file, overlay


def read_layer(path: Path) -> Layer:
    message = f"{path} does not exist: run in the project's folder, or name the file with --params"
    missing = documents.missing_text(path, message)
    with explained(ConfigError, lambda error: f"{path} cannot be read: {error}", missing=missing):
        content = documents.read_yaml(path)
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__}: expected keys and values")
    return content or {}


def overlaid(under: Mapping[str, object], over: Mapping[str, object]) -> Layer:
    """Merge `over` into `under`, key by key at every depth. Lists, `sources` and `noise_levels` are
    not merged, but replaced as a whole.
    """
    result: Layer = dict(under)
    for key, value in over.items():
        replaces = key in ("sources", "noise_levels") or not isinstance(result.get(key), Mapping)
        if isinstance(value, Mapping) and not replaces:
            value = overlaid(result[key], value)
        result[key] = value
    return result


def validate(values: Layer, path: Path, *, layer: bool = False) -> Params:
    """Validate the values in the file `path`.

    layer: True for a single layer. It may lack keys, and it may break a rule that compares several
    keys of a section, because another layer may set some of these keys.
    """
    sections = {name: section for name, section in values.items() if isinstance(section, dict)}
    for stage, section in sections.items():
        for key in {*MACHINE, "chunk"} & section.keys():
            assignment = f"{MACHINE.get(key, 'SFUMATO_MICROBATCH')}={section[key]}"
            raise ConfigError(
                f"{path}: {stage}.{key} was removed: delete it, and set the environment variable "
                f"{assignment}"
            )
    refuse_truth_values(Params, values, path, "")
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        details = [
            detail for detail in error.errors() if not (layer and is_of_several_keys(detail))
        ]
        if not details:
            return Params()  # the merged values are validated later
        first = details[0]
        reason = EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, "))
        key = ".".join(str(part) for part in first["loc"])
        general_key = re.sub(r"\.phases\.\d+", "", key)  # removed.yaml has no phase numbers
        removed = documents.read_yaml(Path(__file__).with_name("removed.yaml"))
        if key.endswith(".enabled"):
            problem = f"{key} was removed: delete it, and list the stages to run in `run`"
        elif general_key in removed:
            problem = (
                f"{key} was removed: delete it. Its value is now always {removed[general_key]}"
            )
        elif first["type"] == "extra_forbidden":
            hint = nearest(key, all_keys(Params), "no key is similar.", cutoff=0.4)
            problem = (
                f"unknown key {key!r}: {hint} For keys of earlier versions, see docs/upgrading.md"
            )
        else:
            value = re.sub("://.*", "://…", repr(first["input"]))  # a URL may contain a password
            problem = reason
            if is_of_several_keys(first):
                problem = f"{key}: {reason}"
            elif key:
                problem = f"{key}={value} is not valid: {reason}"
            if first["type"] == "string_type":
                problem += f". Write it in quotes: '{first['input']}'"
        raise ConfigError(f"{path}: {problem}") from error


def is_of_several_keys(error: ErrorDetails) -> bool:
    """Return whether another layer may correct this error."""
    rule = error["type"] == "value_error" and error["loc"] and isinstance(error["input"], dict)
    return bool(rule) or error["type"] == "missing"


def refuse_truth_values(kind: object, value: object, path: Path, key: str) -> None:
    """Raise ConfigError if true or false was written in place of a number or a text.

    Python would read true as 1 and false as 0. kind: type of the setting `key`.
    """
    fields = {
        name: field.annotation
        for model in models_in(kind)
        for name, field in model.model_fields.items()
    }
    if isinstance(value, bool) and not fields and bool not in (kind, *get_args(kind)):
        text = (
            f"{key} must not be true or false (yes, no, on and off without quotes count as true or "
            "false too): write a number, or put the text in quotes"
        )
        raise ConfigError(f"{path}: {text}")
    if isinstance(value, list):
        for item in value:
            refuse_truth_values(kind, item, path, key)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name in fields:
                refuse_truth_values(fields[name], inner, path, name)
            elif not fields:
                refuse_truth_values(kind, inner, path, key)


def all_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    keys = set()
    for name, field in model.model_fields.items():
        if field.exclude:  # a machine setting, which params.yaml must not contain
            continue
        keys.add(prefix + (field.alias or name))
        for kind in models_in(field.annotation):
            keys |= all_keys(kind, f"{prefix}{name}.")
    return keys


def as_yaml(content: Mapping[str, object], *, blocks: bool = False) -> str:
    """Return the text of a YAML file. blocks: True to write one line per entry of an inner mapping
    or list.
    """
    return yaml.dump(
        dict(content),
        Dumper=documents.QuotingYaml,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False if blocks else None,
        width=120,
    )
