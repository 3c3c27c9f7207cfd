"""Compare a release's `card.json` with the files and records beside it, for recipients."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from sfumato.data.images import IMAGES, check_images
from sfumato.storage.limits import check_picture
from sfumato.storage.records import Records

PUBLIC_SOURCE = "select"  # Source of public images
PUBLIC_KIND = "public"
RECOMPUTED = "recomputed from the records"
STATED = "as its card states"


class Cost(TypedDict):
    """Privacy cost of all charges behind a release, for one protected unit.

    adjacency: neighbour relation; units: protected units.
    """

    epsilon: float
    delta: float
    adjacency: str
    units: list[str]


class KnownCost(Cost):
    """A cost, and whether its ε was recomputed (RECOMPUTED) or read from a card (STATED)."""

    basis: str


class ClassifierCard(Cost):
    """Content of the `card.json` of a classifier.

    shape: (C, H, W) of its images; prepared: the way in which pictures were prepared.
    """

    shape: list[int]
    classes: list[str]
    prepared: dict[str, Any]


class ReleaseCard(ClassifierCard):
    """Content of the `card.json` of a release: the entries that programs read."""

    images: int
    sources: dict[str, int]
    kinds: dict[str, int]
    about: dict[str, str]
    pattern: NotRequired[str]
    mixture: NotRequired[dict[str, object]]
    stream: NotRequired[dict[str, object]]


def source_type(sources: Collection[str]) -> str | None:
    """Return the address of IPTC's digital source type for images from these sources.

    Returns None if no image was generated.
    """
    if {*sources} == {PUBLIC_SOURCE}:
        return None
    term = "trainedAlgorithmicMedia"
    if PUBLIC_SOURCE in sources:
        term = "compositeWithTrainedAlgorithmicMedia"
    return f"http://cv.iptc.org/newscodes/digitalsourcetype/{term}"


def check_card(
    card: ReleaseCard, images: np.ndarray, labels: np.ndarray, kinds: np.ndarray, records: Records
) -> None:
    """Raise ValueError or DataError for the first wrong statement of a card, or for arrays that are
    not images and labels of its classes.

    Statements that the card leaves out are not checked.
    """
    classes = card["classes"]
    if not isinstance(classes, list) or not all(isinstance(name, str) and name for name in classes):
        raise ValueError("its classes are not a list of names")
    if len({*classes}) < len(classes):
        raise ValueError("it names a class twice")
    check_images(images, labels, tuple(classes), Path())
    check_picture(IMAGES, *images.shape[1:])
    if kinds.dtype.kind != "U" or kinds.shape != (len(images),):
        raise ValueError(
            f"kinds.npy is {kinds.dtype} {kinds.shape}, expected text ({len(images)},) for "
            f"{len(images)} images"
        )
    public = int(np.count_nonzero(kinds == PUBLIC_KIND))
    sources = card.get("sources", {})
    if sources and sum(sources.values()) != len(images):
        raise ValueError(
            f"the numbers in its `sources` add up to {sum(sources.values())}, but images.npy "
            f"contains {len(images)} images"
        )
    if sources and public > sources.get(PUBLIC_SOURCE, 0):
        raise ValueError(
            f"kinds.npy marks {public} images as public, but the card states only "
            f"{sources.get(PUBLIC_SOURCE, 0)} public images"
        )
    number = {name: int(np.count_nonzero(kinds == name)) for name in card.get("kinds", ("plain",))}
    if sum(number.values()) != len(images):
        raise ValueError(
            "kinds.npy contains kinds that the card does not list: expected only "
            f"{', '.join(number)}"
        )
    expected = {
        "images": len(images),
        "shape": [images.shape[3], *images.shape[1:3]],
        "kinds": number,
        "units": records.units,
        "apart": sorted(records.owners),
    }
    if sources:
        expected |= {
            "synthetic": PUBLIC_SOURCE not in sources,
            "digital_source_type": source_type(sources),
        }
    statements: Mapping[str, object] = card
    for name, value in expected.items():
        if statements.get(name, value) != value:
            raise ValueError(
                f"it states {name}={statements[name]!r}, but according to the other files it is "
                f"{value!r}"
            )


def known_cost(card: Cost, records: Records) -> KnownCost:
    """Return the cost of a release: ε at the card's δ, the adjacency, and the protected units.

    If the packages for accounting are installed, ε is recomputed from the records by Rényi
    accounting. If the card's ε is smaller than the result, ε is recomputed by the accountant
    `exact`. Without these packages, ε is copied from the card. Raises ValueError if the card's ε is
    smaller than both results, or if the card or the records are invalid.
    """
    delta = card["delta"]
    for name, value in (("epsilon", card["epsilon"]), ("delta", delta)):
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"it states {name}={value!r}, expected a finite number >= 0")
    cost: KnownCost = {
        "epsilon": card["epsilon"],
        "delta": delta,
        "adjacency": card["adjacency"],
        "units": records.units,
        "basis": STATED,
    }
    try:
        from sfumato.privacy.accountant import EXACT, LARGEST_DELTA
        from sfumato.privacy.check import TOLERANCE
        from sfumato.privacy.events import common_adjacency
        from sfumato.privacy.ledger import spent_on_one
        from sfumato.privacy.record import record_problems
    except ImportError:  # only NumPy is installed
        return cost
    if problems := [
        problem
        for key, row in records.items()
        for problem in record_problems(f"record {key[:8]}", row)
    ]:
        raise ValueError(problems[0])
    if problem := records.composition_problem():
        raise ValueError(problem)
    if (adjacency := common_adjacency(records.values())) != card["adjacency"]:
        raise ValueError(
            f"it states adjacency={card['adjacency']!r}, but the records in privacy.json are valid "
            f"for {adjacency}"
        )
    if not 0 < delta <= LARGEST_DELTA:
        raise ValueError(
            f"it states delta={delta:g}, expected more than 0 and at most {LARGEST_DELTA:g}"
        )
    for accountant in ("rdp", EXACT):
        epsilon = spent_on_one(records, delta, accountant, adjacency)
        if card["epsilon"] >= epsilon - TOLERANCE * max(1.0, epsilon):
            return {**cost, "epsilon": epsilon, "basis": RECOMPUTED}
    statement = f"it states epsilon={card['epsilon']:g} at delta={delta:g}"
    raise ValueError(f"{statement}, but the records in privacy.json cost at least {epsilon:.6g}")
