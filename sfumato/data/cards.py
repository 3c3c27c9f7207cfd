"""The public cards of prepared images: facts that stages read without opening the images.

This module imports no array library.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sfumato.errors import DataError, explained
from sfumato.settings.data import IMAGE, ClassName, DatasetId
from sfumato.storage.artifacts import writing
from sfumato.storage.documents import Exact, missing_text, read_json, validated

CARD = "card.json"
TO_PREPARE = "run `stage prepare sensitive`"
AGAIN_PUBLIC = "run `stage prepare public`"

Side = Annotated[int, Field(gt=0, lt=2**16)]  # number of pixels along a side, or number of channels


@dataclass(frozen=True, kw_only=True)
class Card(Exact):
    """The public facts of a dataset.

    version: name of this state of the images, chosen by the owner or at random. A version computed
    from the images would reveal who was in the set: when a person withdraws, such a version would
    change only if the set contained images of that person.
    """

    dataset_id: DatasetId
    source: str
    shape: tuple[Side, Side, Side]  # (C, H, W)
    classes: tuple[ClassName, ...]
    split: str
    version: str
    range: tuple[int, int] = (0, 255)
    unit: Literal["image", "group"] = IMAGE
    labels: Literal["one", "several"] = "one"

    def content(self) -> dict:
        """Return the content of the card's file.

        A `unit` of "image" and `labels` of "one" are the defaults, and are left out.
        """
        defaults = ("unit", IMAGE), ("labels", "one")
        return {key: value for key, value in asdict(self).items() if (key, value) not in defaults}


@dataclass(frozen=True, kw_only=True)
class PublicCard(Exact):
    """The facts of a prepared public set.

    If there is no public set, `enabled` is false and the other fields are empty.
    """

    enabled: bool
    source: str | None = None
    shape: tuple[Side, Side, Side] | None = None  # (C, H, W)
    classes: tuple[ClassName, ...] = ()
    images: Annotated[int, Field(ge=0)] = 0


def card_at(path: Path, expected: str, fix: str) -> AbstractContextManager[None]:
    """Return a context that raises DataError if the file `path` is missing or invalid.

    expected: content that the file should have, such as "a data card";
    fix: how to write the file, such as "run `stage prepare public`".
    """
    missing = missing_text(path, f"{path} is missing: {fix} first")
    return explained(
        DataError, lambda error: f"{path} is not {expected} ({error}): {fix} again", missing=missing
    )


def read_card(path: Path) -> Card:
    """Read the public card of a dataset. Raises DataError if the file is missing or invalid."""
    with card_at(path, "a data card", TO_PREPARE):
        return validated(Card, read_json(path))


def read_public_card(path: Path) -> PublicCard:
    """Read the card of a public set.

    Raises DataError if the file is missing or invalid.
    """
    with card_at(path, "the card of a public set", AGAIN_PUBLIC):
        card = validated(PublicCard, read_json(path))
        if card.enabled and (card.source is None or card.shape is None or not card.classes):
            raise ValueError("source, shape or classes are missing")
        return card


def card_text(content: dict) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def write_no_public(out: Path) -> None:
    """Write the artifact `out` for a project whose stages need no public images.

    The artifact contains only a card, which is the same in all such projects.
    """
    with writing(out, "public", []) as directory:
        (directory / CARD).write_bytes(card_text(asdict(PublicCard(enabled=False))))


def dataset_directory(state: Path, dataset_id: str) -> Path:
    return state / "data" / dataset_id
