"""Checkpoints of an iterative query such as DP-SGD.

A checkpoint is written to disk before any result of the steps that led to it is shown or published.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from sfumato.errors import is_failure
from sfumato.storage.digest import digest_of_file
from sfumato.storage.files import replacing

if TYPE_CHECKING:  # torch is loaded only when a checkpoint is written or read
    from torch import Tensor


def checkpoint_path(run: Path, uses: int) -> Path:
    return run / f"checkpoint-{uses:07d}.safetensors"


def save_checkpoint(run: Path, uses: int, state: dict[str, Tensor], log: list[dict]) -> str:
    """Write the state after `uses` releases and the public log, and flush both to disk.

    Returns the sha256 of the file, for the journal.
    """
    from sfumato.storage.weights import save_tensors

    with replacing(checkpoint_path(run, uses)) as temporary:
        save_tensors(state, temporary, {"run": run.name, "uses": str(uses), "log": json.dumps(log)})
        digest = digest_of_file(temporary)
    return digest


def load_checkpoint(
    run: Path, uses: int, digest: str | None
) -> tuple[dict[str, Tensor], list[dict]] | None:
    """Load the state and the log after `uses` releases of this run.

    Returns None if the file is missing or damaged, belongs to another run or step, or has a
    different sha256.
    """
    path = checkpoint_path(run, uses)
    try:
        if digest is not None and digest_of_file(path) != digest:
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("run") != run.name or metadata.get("uses") != str(uses):
                return None
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            return tensors, json.loads(metadata["log"])
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        # If the machine failed, the checkpoint may still exist, so the query must not pay again.
        if is_failure(error):
            raise
        return None


def drop_checkpoints(run: Path, keep: int | None = None) -> None:
    """Remove the checkpoints of a run, except the one after `keep` releases."""
    for path in run.glob("checkpoint-*"):
        if keep is None or path != checkpoint_path(run, keep):
            path.unlink(missing_ok=True)
