"""Prepared images in the private state directory, found by the public card that stands for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import DataError
from sfumato.images import ImageSet, load_images

SENSITIVE, HOLDOUT, CARD = "sensitive", "holdout", "card.json"
AGAIN = "run `stage prepare sensitive`"


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
        raise DataError(f"no prepared images of dataset {card.dataset_id!r} under {state}: {AGAIN}, or set SFUMATO_STATE to where they are")
    if read_card(home / CARD) != card:
        raise DataError(f"{home} holds other images than the data card stands for: {AGAIN} again")
    images = load_images(home / part, card.classes)
    if images.shape != card.shape:
        raise DataError(f"{home / part} has images of shape {images.shape}, the card says {card.shape}: {AGAIN} again")
    return images
