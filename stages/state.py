"""Paths in a project, its dataset id and spending policy, and a check that numbers from real images
stay local.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, PLAN, PUBLIC, RECIPES
from sfumato.storage.documents import read_json, validated
from sfumato.storage.state_directory import in_git
from sfumato.storage.state_directory import state_dir as state_dir  # re-exported for the commands

if TYPE_CHECKING:
    from sfumato.privacy.policy import SpendingPolicy

PREVIEW = ARTIFACTS / "preview.png"  # not an output in dvc.yaml, because no stage depends on it
EVALUATION = Path("evaluation")  # numbers from real images, which neither DVC nor git tracks


def read_policy() -> SpendingPolicy:
    from sfumato.privacy.policy import SpendingPolicy

    path = PLAN / "permission.json"
    with explained(ConfigError, lambda error: f"{path} cannot be read ({error}): run `stage plan`"):
        return validated(SpendingPolicy, read_json(path))


def dataset_of_project() -> str | None:
    """Return the dataset id from the data card or, if there is no card, from params.yaml.

    Returns None outside a project.
    """
    from sfumato.data.cards import read_card
    from sfumato.settings.recipes import load_params

    with suppress(DataError):
        return read_card(CARD_PATH).dataset_id
    params = Path("params.yaml")
    if params.exists():
        return load_params(params, RECIPES).data.name
    return None


def check_local(option: str, file: Path) -> None:
    """Raise ConfigError if numbers from real images would be written to an artifact, or to a file
    in git.
    """
    for folder in file.absolute().parents:
        if (folder / "privacy.json").is_file() or folder.resolve() in (
            ARTIFACTS.resolve(),
            PUBLIC.resolve(),
        ):
            raise ConfigError(
                f"{option} {file} is in the artifact {folder}, which may be shared. Numbers from "
                "real images must not be shared: choose another path"
            )
    if in_git(file):
        raise ConfigError(
            f"{option} {file} would contain numbers from real images, and git would track it: "
            "choose a path that git ignores, such as evaluation/, or add this path to .gitignore"
        )
