"""A release as arrays, for whoever receives one: nothing but NumPy is needed.

import sfumato
release = sfumato.load_release("artifacts/synthesize")
release.images, release.labels, release.classes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.errors import DataError, explained
from sfumato.storage.digest import digest_of_file

if TYPE_CHECKING:
    from sfumato.release.torch_dataset import ReleaseDataset

NEEDED = ("images.npy", "labels.npy", "card.json")


@dataclass(frozen=True)
class Release:
    """A released set."""

    images: np.ndarray  # (N, H, W, C) uint8, memory-mapped and read-only
    labels: np.ndarray  # (N,) int64 below len(classes)
    classes: tuple[str, ...]
    card: dict[str, Any]  # the content of `card.json`, with ε and δ
    ledger: dict[str, dict[str, Any]]  # the record of every privacy mechanism behind the set, by id

    def __len__(self) -> int:
        return len(self.images)

    def to_torch(self, transform: Callable[[Any], Any] | None = None) -> ReleaseDataset:
        """The set as a torch `Dataset` of ((C, H, W) float32 in [0, 1], label). transform: of an image's tensor."""
        from sfumato.release.torch_dataset import ReleaseDataset

        return ReleaseDataset(self, transform)


def load_release(path: str | Path) -> Release:
    """The release in a folder, as `stage synthesize` writes it or a dataset hub gives it back.

    Files must have the sha256 that `privacy.json` lists; exports may be missing, and a hub may have added files.
    Raises: DataError if the folder is not a release, incomplete or changed.
    """
    folder = Path(path)
    file = folder / "privacy.json"
    if not file.is_file():
        raise DataError(f"{folder} is not a release: {file.name} is missing. Name the folder that holds it")
    fetch = "fetch the release again"
    with explained(DataError, lambda error: f"{file} cannot be read ({error!r}): {fetch}"):
        content = json.loads(file.read_text(encoding="utf-8"))
        files, records, local = dict(content["files"]), dict(content["records"]), content["local"]
        stage, enabled = content["stage"], content["enabled"]
    if stage != "synthesize" or not enabled or local:
        raise DataError(f"{folder} is not a release, but what the stage `{stage}` wrote: name that of `synthesize`")
    for name in NEEDED:
        if name not in files or not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing: {fetch}")
    for name, sha256 in files.items():
        if (folder / name).is_file() and digest_of_file(folder / name) != sha256:
            raise DataError(f"{folder / name} no longer has the bytes that {file.name} lists: {fetch}")
    with explained(DataError, lambda error: f"{folder} cannot be read ({error!r}): {fetch}"):
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        images, labels = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in NEEDED[:2])
        return Release(images, labels, tuple(card["classes"]), card, records)
