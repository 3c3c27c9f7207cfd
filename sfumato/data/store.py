"""Load prepared images, and store latents.

Sensitive images are in the state directory, and public images are in an artifact. Latents are the
outputs of a frozen encoder for the sensitive images. The encoder is the VAE of a public model, or a
feature map. Latents are as sensitive as the images, so they are stored in the state directory with
its modes (0700, 0600). They are never in an artifact, and DVC never tracks them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfumato.data.cards import (
    AGAIN_PUBLIC,
    CARD,
    TO_PREPARE,
    Card,
    dataset_directory,
    read_card,
    read_public_card,
)
from sfumato.data.images import (
    COMPARED_FILE,
    ImageSet,
    inference_batch_size,
    load_array,
    load_images,
    write_header,
)
from sfumato.errors import DataError, reading_sensitive
from sfumato.runtime.progress import Progress
from sfumato.settings.data import GROUP, SEVERAL
from sfumato.storage.digest import digest_of
from sfumato.storage.files import open_private, replacing_directory
from sfumato.storage.locks import file_lock, holding

if TYPE_CHECKING:  # see `sfumato.data.images`
    from torch import Tensor

SENSITIVE = "sensitive"
HOLDOUT = "holdout"
LATENTS = "latents.npy"
# Raise this by hand if a change in the code of the VAE or of a feature map gives different latents.
# `tests/test_golden.py` fails if feature maps change.
ENCODING = 1

# (B, C, H, W) float32 in [0, 1] -> (B, c, h, w); each row depends only on its own image
Encode = Callable[["Tensor"], "Tensor"]


def load_prepared(state: Path, card: Card, part: str) -> ImageSet:
    """Load the images of one part, "sensitive" or "holdout", memory-mapped.

    Raises DataError if the images do not match the card.
    """
    home = dataset_directory(state, card.dataset_id)
    if not (home / CARD).is_file():
        raise DataError(
            f"there are no prepared images of {card.dataset_id!r} under {state}: {TO_PREPARE}, or "
            "set SFUMATO_STATE to the state directory that contains them"
        )
    if read_card(home / CARD) != card:
        raise DataError(
            f"{home} does not contain the images that the data card describes: {TO_PREPARE} again"
        )
    reading_sensitive()
    images = load_images(home / part, card.classes, grouped=card.unit == GROUP, shape=card.shape)
    if (images.labels.ndim == 2) != (card.labels == SEVERAL):
        raise DataError(
            f"{home / part} does not match the data card, which states `labels: {card.labels}`: "
            f"{TO_PREPARE} again"
        )
    if (home / part / COMPARED_FILE).exists():
        images = replace(images, compared=load_array(home / part / COMPARED_FILE))
    return images


def load_public(directory: Path, shape: tuple[int, int, int]) -> ImageSet:
    """Load the prepared public set, memory-mapped.

    This function does not verify the hashes of the files. Use `read_artifact` for that.

    Raises DataError if the set is missing, has no images, or has a different shape (C, H, W).
    """
    card = read_public_card(directory / CARD)
    if not card.enabled:
        raise DataError(
            f"{directory} contains no public images: add a stage that uses public images "
            f"(classifier or select) to the setting `run`, then {AGAIN_PUBLIC}"
        )
    if card.shape != tuple(shape):
        raise DataError(
            f"{directory} has images of shape {card.shape}, but sensitive images have the shape "
            f"{tuple(shape)}: {AGAIN_PUBLIC} again"
        )
    return load_images(directory, card.classes)


@dataclass(frozen=True)
class LatentSet:
    """Labelled latents.

    latents: (N, c, h, w) float16, possibly a memory map;
    labels, groups: labels and groups of the images, in the order of `latents`;
    classes: names of the classes.
    """

    latents: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.latents)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Copy the latents at `indices` as (B, c, h, w) float32, and their labels.

        This method has the same interface as `ImageSet.batch`.

        Non-finite numbers become zero, because otherwise kernels may spread them over the rows of
        other images.
        """
        import torch

        indices = np.asarray(indices, dtype=np.int64)
        latents, labels = (
            torch.from_numpy(np.array(array[indices])) for array in (self.latents, self.labels)
        )
        return latents.float().nan_to_num_(0, 0, 0), labels


def latents_key(card: Card, encoder: str) -> str:
    """Return the name under which latents are stored.

    encoder: text that identifies the encoder, such as the sha256 of a VAE and the image size.
    """
    import torch

    identity = {"encoder": encoder, "version": card.version, "dtype": "float16"}
    return digest_of({**identity, "revision": ENCODING, "torch": torch.__version__})[:32]


def latents_directory(state: Path, card: Card, key: str) -> Path:
    return dataset_directory(state, card.dataset_id) / f"latents-{key}"


def have_latents(state: Path, card: Card, key: str) -> bool:
    return latents_directory(state, card, key).is_dir()


def write_latents(
    state: Path, card: Card, key: str, encode: Encode, progress: Progress | None = None
) -> None:
    """Encode all sensitive images, and store the latents under `key`, unless they exist already.

    All other latents of this dataset are removed. Encoding is local work, so the caller must
    journal it first, with `open_local`. progress: called with (1, 100) to (100, 100), which are
    percentages, because the number of images is private.
    Guarantee: latent i depends only on image i, given that `encode` works row by row.
    """
    images = load_prepared(state, card, SENSITIVE)
    home = latents_directory(state, card, key)
    with holding(file_lock(home.parent / ".latents.lock")):
        for folder in home.parent.glob("*latents-*"):
            if folder != home:
                shutil.rmtree(folder)
        if home.exists():
            return
        with (
            replacing_directory(home, private=True) as temporary,
            open_private(temporary / LATENTS) as file,
        ):
            percent = 0
            size = inference_batch_size(card.shape)
            for start in range(0, len(images), size):
                batch, _ = images.batch(np.arange(start, min(start + size, len(images))))
                rows = encode(batch).cpu().half().numpy()
                if start == 0:
                    write_header(file, rows.dtype, (len(images), *rows.shape[1:]))
                file.write(np.ascontiguousarray(rows).tobytes())
                while percent < 100 * (start + len(rows)) // len(images):
                    percent += 1
                    if progress:
                        progress(percent, 100)


def load_latents(state: Path, card: Card, key: str) -> LatentSet:
    """Load the latents under `key` with the labels of the images, memory-mapped.

    Raises DataError if there are no latents under `key`, or if they do not fit the images.
    """
    images = load_prepared(state, card, SENSITIVE)
    home = latents_directory(state, card, key)
    latents = load_array(home / LATENTS)
    if latents.dtype != np.float16 or len(latents) != len(images):
        raise DataError(
            f"{home} contains latents that do not belong to the images of the data card: remove "
            "this directory, and run the same command again"
        )
    return LatentSet(latents, images.labels, images.classes, images.groups)
