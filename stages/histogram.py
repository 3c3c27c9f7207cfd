"""`stage histogram`: noisy votes of the sensitive images for the public classes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sfumato.errors import ConfigError, DataError
from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.settings.queries import Histogram
    from stages.runner import QueryRun


def histogram(run: QueryRun, settings: Histogram) -> None:
    import numpy as np

    from sfumato.features.public_network import load_classifier
    from sfumato.queries.histogram import query_histogram
    from sfumato.runtime.compute import device
    from sfumato.storage.documents import read_json
    from sfumato.storage.files import write_json

    classifier = run.path("classifier")
    shape = run.plan.shape
    votes = settings.votes
    model = load_classifier(classifier).to(device())
    names = read_json(classifier / "card.json")["classes"]
    if model.shape != shape:
        raise DataError(
            f"{classifier} was trained on images of shape {model.shape}, not {shape}: run `stage "
            "classifier` again"
        )
    if votes > model.classes:
        raise ConfigError(
            f"histogram.votes={votes} exceeds the number of public classes, {model.classes}: lower "
            "it"
        )
    released = f"votes of each image for {votes} of {model.classes} public classes"
    rows = None
    if settings.per_class:
        released += ", by class"
        rows = len(run.plan.classes)
    charge = run.open_charge(
        released, f"√{votes}: an image adds 1 to {votes} different counts", math.sqrt(votes)
    )
    noisy = query_histogram(charge, model, votes, rows)
    with run.releasing(charge) as directory:
        np.save(directory / "histogram.npy", noisy.numpy(), allow_pickle=False)
        content = {"public_classes": names, "votes": votes, "per_class": settings.per_class}
        write_json(directory / "histogram.json", content)


def problems(setup: Setup) -> Problems:
    votes = setup.params.histogram.votes
    if setup.public is not None and votes > len(setup.public.classes):
        yield (
            f"histogram.votes={votes} exceeds the number of public classes, "
            f"{len(setup.public.classes)}: lower it"
        )


STAGE = Stage(
    "histogram",
    QUERY,
    "Release noisy counts of how many sensitive images vote for each public class.",
    "sfumato.settings.queries:Histogram",
    histogram,
    inputs=("classifier",),
    problems=problems,
)
