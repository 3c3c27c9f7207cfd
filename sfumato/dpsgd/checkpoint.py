"""Checkpoints of a DP-SGD run. Each names its run and its step.

A checkpoint is on disk before anything that follows from it is shown.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sfumato.files import replacing, sync
from sfumato.weights import save_tensors


def checkpoint_path(run: Path, uses: int) -> Path:
    return run / f"checkpoint-{uses:07d}.safetensors"


def save_checkpoint(run: Path, run_id: str, uses: int, state: dict[str, Tensor], log: list[dict]) -> None:
    """Write and flush the state after `uses` releases, and its public log.

    The checkpoint counts only once the charge journals it.
    """
    with replacing(checkpoint_path(run, uses)) as temporary:
        save_tensors(state, temporary, {"run": run_id, "uses": str(uses), "log": json.dumps(log)})
        sync(temporary)
    sync(run)


def load_checkpoint(run: Path, run_id: str, uses: int) -> tuple[dict[str, Tensor], list[dict]] | None:
    """The state and log after `uses` releases of this run.

    None where the file is missing, damaged, or of another run or step.
    """
    path = checkpoint_path(run, uses)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("run") != run_id or metadata.get("uses") != str(uses):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, json.loads(metadata["log"])
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def drop_checkpoints(run: Path, keep: int | None = None) -> None:
    """Remove all checkpoints but the one after `keep` releases."""
    for path in run.glob("checkpoint-*"):
        if keep is None or path != checkpoint_path(run, keep):
            path.unlink(missing_ok=True)
