"""Prepared images: sensitive ones in the private state directory, found by the public card that stands for them; public ones in an artifact."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sfumato.data.images import ImageSet, load_images
from sfumato.errors import DataError

SENSITIVE, HOLDOUT, CARD = "sensitive", "holdout", "card.json"
AGAIN = "run `stage prepare sensitive`"
AGAIN_PUBLIC = "run `stage prepare public`"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is public of a dataset. `fingerprint`: HMAC of the sensitive images with a key that stays in the state directory."""

    dataset_id: str
    source: str
    shape: tuple[int, int, int]  # (C, H, W)
    classes: tuple[str, ...]
    split: str
    fingerprint: str
    range: tuple[int, int] = (0, 255)


@dataclass(frozen=True, kw_only=True)
class PublicCard:
    """What a prepared public set holds. Switched off: no source, no shape, no classes, no images."""

    enabled: bool
    source: str | None = None
    shape: tuple[int, int, int] | None = None  # (C, H, W)
    classes: tuple[str, ...] = ()
    images: int = 0


def read_card(path: Path) -> Card:
    """Raises DataError where `path` is no card."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.update({key: tuple(content[key]) for key in ("shape", "classes", "range")})
        return Card(**content)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: {AGAIN} first") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is no data card ({error!r}): {AGAIN} again") from error


def dataset_directory(state: Path, dataset_id: str) -> Path:
    return state / "data" / dataset_id


def load_prepared(state: Path, card: Card, part: str) -> ImageSet:
    """The images of one part, "sensitive" or "holdout", memory-mapped.

    Raises DataError where the state directory holds none, or others than those that the card stands for.
    """
    home = dataset_directory(state, card.dataset_id)
    if not (home / CARD).is_file():
        raise DataError(
            f"no prepared images of dataset {card.dataset_id!r} under {state}: {AGAIN}, or set SFUMATO_STATE to where they are"
        )
    if read_card(home / CARD) != card:
        raise DataError(f"{home} holds other images than the data card stands for: {AGAIN} again")
    images = load_images(home / part, card.classes)
    if images.shape != card.shape:
        raise DataError(f"{home / part} has images of shape {images.shape}, the card says {card.shape}: {AGAIN} again")
    return images


def read_public_card(path: Path) -> PublicCard:
    """Raises DataError where `path` is no card of a public set."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        shape = content["shape"] and tuple(content["shape"])
        return PublicCard(**{**content, "shape": shape, "classes": tuple(content["classes"])})
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: {AGAIN_PUBLIC} first") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is no card of a public set ({error!r}): {AGAIN_PUBLIC} again") from error


def load_public(directory: Path, shape: tuple[int, int, int]) -> ImageSet:
    """The prepared public set, memory-mapped. Its bytes are verified by `read_artifact(directory, "public")`, not here.

    Raises DataError where it is missing, switched off, or of another shape than that of the sensitive images, (C, H, W).
    """
    card = read_public_card(directory / CARD)
    if not card.enabled:
        raise DataError(f"{directory} holds no public images: set public.enabled: true and {AGAIN_PUBLIC}")
    if card.shape != tuple(shape):
        raise DataError(
            f"{directory} has images of shape {card.shape}, the sensitive ones are {tuple(shape)}: {AGAIN_PUBLIC} again"
        )
    return load_images(directory, card.classes)
