"""What lies where: the paths of the pipeline, the state directory, and what git and the ledgers hold."""

from pathlib import Path
from typing import Any

from sfumato.errors import BudgetError, ConfigError, explained
from sfumato.settings import stages
from sfumato.storage.documents import parse_json, read_json, read_text, validated
from sfumato.storage.state_directory import git, in_git
from sfumato.storage.state_directory import state_dir as state_dir  # for the commands

ARTIFACTS, PLAN = Path(stages.ARTIFACTS), Path(stages.PLAN)
CARD, PUBLIC, LEDGER = Path(stages.CARD), Path(stages.PUBLIC), Path(stages.LEDGER)
EVALUATION = Path("evaluation")  # numbers from real images, which neither DVC nor git tracks
PROPOSAL = EVALUATION / "proposal.json"  # what `stage init` understood and proposed
PERMISSION = "permission.json"  # beside the plan


def read_policy() -> Any:
    """What the owner allows, beside the plan."""
    from sfumato.privacy.authorize import SpendingPolicy

    path = PLAN / PERMISSION
    with explained(ConfigError, lambda error: f"{path} cannot be read ({error}): run `stage plan`"):
        return validated(SpendingPolicy, read_json(path))


def check_local(option: str, *files: Path) -> None:
    """Raise ConfigError if a file of numbers from real images would land in an artifact, or in git."""
    for file in files:
        for folder in file.absolute().parents:
            if (folder / "privacy.json").is_file() or folder.resolve() in (ARTIFACTS.resolve(), PUBLIC.resolve()):
                where = f"lies in the artifact {folder}, which may be shared"
                raise ConfigError(f"{option} {file} {where}, and numbers from real images may not: name another place")
        if in_git(file):
            remedy = "name a place that git ignores, such as evaluation/, or ignore it (a line in .gitignore)"
            raise ConfigError(f"{option} {file} would be taken by git, but holds numbers from real images: {remedy}")


def ledgers() -> list[dict]:
    """ledger.json, of any version: the file at hand, and as it was last committed."""
    code, committed = git("show", f"HEAD:./{LEDGER}")
    with explained(BudgetError, lambda error: f"{LEDGER} is not JSON ({error}): restore it (`git checkout {LEDGER}`)"):
        texts = [read_text(LEDGER)] if LEDGER.exists() else []
        found = [parse_json(text) for text in [*texts, *([committed] if code == 0 else [])]]
    return [content for content in found if isinstance(content, dict)]


def seen_in_ledgers(dataset_id: str) -> set[str]:
    """What these ledgers name of the journal of a dataset."""
    from sfumato.privacy.ledger import seen_of

    return {name for content in ledgers() for name in seen_of(content, dataset_id)}
