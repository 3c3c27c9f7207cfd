"""`stage doctor`: describe this machine and this project."""

from __future__ import annotations

import importlib.util
import os
import stat
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.errors import DataError, SfumatoError
from sfumato.settings.stage import CARD_PATH, PLAN
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.documents import quoted
from sfumato.storage.state_directory import DVC_INDEX
from stages.dvc_lock import lock_in_words, rwlock_in_words
from stages.runner import load_plan
from stages.screen import table_console
from stages.state import read_policy, state_dir

if TYPE_CHECKING:
    from sfumato.data.cards import Card

SkeletonOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write a skeleton of this folder of images: a copy in which pictures have random "
        "pixels, and most words in names and tables are replaced. If `stage init` cannot read the "
        "folder, you can send the skeleton with a question.",
    ),
]
OutOption = Annotated[Path, typer.Option(help="File to write the skeleton to.")]


def doctor(skeleton: SkeletonOption = None, out: OutOption = Path("skeleton.zip")) -> None:
    """Show device, threads, libraries, prepared datasets, the state directory, and DVC's
    settings.
    """
    if skeleton is not None:
        return show_skeleton(skeleton, out)
    import torch
    from rich.table import Table

    from sfumato.data.cards import read_card
    from sfumato.runtime.compute import device

    processor = f"CPU, {torch.get_num_threads()} threads"
    if device().type == "cuda":
        processor = torch.cuda.get_device_name()
    table = Table("what", "found", show_header=False)
    table.add_row("device", processor)
    for name in ("torch", "torchvision", "opacus", "dp-accounting", "dvc", "pytorch-fid"):
        table.add_row(
            name,
            version(name) if importlib.util.find_spec(name.replace("-", "_")) else "not installed",
        )
    table.add_row("extra diffusers", extra_in_words())
    state = state_dir()
    table.add_row(
        "state directory", f"{state} ({'exists' if state.exists() else 'does not exist yet'})"
    )
    prepared = sorted(p.parent.name for p in state.glob("data/*/card.json"))
    table.add_row("prepared datasets", ", ".join(prepared) or "none")
    if not any(map(os.path.exists, ("dvc.yaml", "params.yaml"))):
        table.add_row("project", "none in this folder. `stage init` creates one")
        return table_console().print(table)
    try:
        card = read_card(CARD_PATH)
        rows = {"data card": card.dataset_id, **queries_in_words(card)}
    except DataError as error:
        rows = {"data card": str(error)}
    for row in rows.items():
        table.add_row(*row)
    table.add_row("DVC repository", "yes" if os.path.isdir(".dvc") else "no")
    table.add_row("DVC's lock", rwlock_in_words())
    table.add_row("dvc.lock", lock_in_words())
    table.add_row("DVC's index", index_in_words(state / DVC_INDEX))
    table_console().print(table)


def extra_in_words() -> str:
    """Return the versions of the libraries in the extra `diffusers`, or how to install them."""
    extra = ("diffusers", "transformers")
    missing = [name for name in extra if not importlib.util.find_spec(name)]
    if missing:
        return (
            f"{' and '.join(missing)} not installed. To use public text-to-image models (recipes "
            "dp-sapf, dp-lora, dp-ldm, dp-finetune), run `pip install 'sfumato[diffusers]'`"
        )
    return ", ".join(f"{name} {version(name)}" for name in extra)


def show_skeleton(folder: Path, out: Path) -> None:
    """Write the skeleton of a folder (see `sfumato.data.skeleton`), and print a summary."""
    from sfumato.data.skeleton import write_skeleton

    pictures, other_files, kept_words = write_skeleton(folder, out)
    typer.echo(
        f"{out} was written. Pictures with random pixels: {pictures:,}. Files that are "
        f"listed, but not copied: {other_files:,}."
    )
    typer.echo(f"Words kept unchanged in names and tables: {', '.join(kept_words) or 'none'}.")
    typer.echo(f"Look through {out} before you send it: it is not differentially private.")


def index_in_words(own_index: Path) -> str:
    """Describe the folder of DVC's index. own_index: the folder that `stage run` uses.

    If other accounts may be able to write into the described folder, the text contains the remedy.
    """
    if importlib.util.find_spec("dvc") is None:
        return "none, because DVC is not installed: `stage run` runs the stages itself"
    from dvc.config import Config, ConfigError

    from sfumato.planning.project_files import NO_DVC_FOLDER, dvc_root, use_index

    if dvc_root(Path()) is None:
        return f"none: {NO_DVC_FOLDER}"
    configured = None
    with suppress(ConfigError):
        configured = Config(os.path.abspath(".dvc"))["core"].get("site_cache_dir")
    environment_folder = os.environ.get("DVC_SITE_CACHE_DIR")
    index = Path(environment_folder or configured or "/var/tmp/dvc")  # DVC's default on Linux
    if index != own_index and not environment_folder:
        return (
            f"{index} is not in this state directory. If other accounts can write there, they can "
            "write code into the index, and `dvc checkout` runs it. To use a private folder, "
            f"run `{use_index(own_index)}`"
        )
    for folder in filter(Path.exists, (index, *index.parents)):
        mode = folder.stat().st_mode
        # If a parent folder has the sticky bit, as /tmp has, others cannot replace the folder below
        if mode & stat.S_IWOTH and (folder == index or not mode & stat.S_ISVTX):
            return (
                f"{index}. Other accounts can write into {folder}, so they can write code into the "
                f"index, and `dvc checkout` runs it: run `chmod o-w {quoted(folder)}`"
            )
    return str(index)


def queries_in_words(card: Card) -> dict[str, str]:
    """Describe what each query of the plan will do, if a plan exists."""
    from sfumato.planning.kept import known_past
    from sfumato.privacy.odometer import Odometer
    from sfumato.privacy.policy import check_known
    from sfumato.privacy.project_ledger import seen_in_project
    from sfumato.privacy.resolved import read_lineage
    from sfumato.settings.privacy import UNLIMITED

    words = {}
    try:
        state = state_dir()
        policy = read_policy()
        seen = seen_in_project(card.dataset_id, Path(), state)
        check_known(
            Odometer(state, card.dataset_id), card, seen, policy.lifetime_epsilon != UNLIMITED
        )
        past = known_past(state, card, Path(), declared_size=policy.declared_size)
        for plan in filter(lambda plan: plan.enabled, map(load_plan, QUERIES)):
            inputs = [*filter(plan.settings.reads, STAGES[plan.stage].inputs)]
            lineage = read_lineage(PLAN, plan.stage)
            words[plan.stage] = past.decide(plan.stage, lineage, plan.digest, inputs).words
    except SfumatoError as error:
        return words | {"queries": str(error)}
    return words
