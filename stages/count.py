"""`stage count`: release noisy class counts.

Later stages divide sums by these counts, and draw labels in proportion to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.settings.queries import Count
    from stages.runner import QueryRun


def count(run: QueryRun, settings: Count) -> None:
    from sfumato.queries.count import (
        public_counts,
        public_several,
        query_count,
        query_several,
        save_counts,
        several_bound,
    )

    classes = len(run.plan.classes)
    if run.plan.several:
        released = "counts of labels, of images, and of labels over the root of their number"
        sensitivity = f"√{classes + 2}: an image with all {classes} labels"
        charge = run.open_charge(released, sensitivity, several_bound(classes))
        noisy = query_several(charge, classes)
        counts = public_several(noisy, charge.noise_multiplier)
    else:
        charge = run.open_charge("class counts", "1: an image is in one class", 1.0)
        noisy = query_count(charge, classes)
        counts = public_counts(noisy, charge.noise_multiplier)
    with run.releasing(charge) as directory:
        save_counts(counts, noisy, directory)


def problems(setup: Setup) -> Problems:
    from sfumato.settings.data import SEVERAL

    noise = setup.params.count.noise
    if setup.card.labels != SEVERAL or isinstance(noise, str):
        return
    from sfumato.queries.count import several_bound

    size = setup.params.privacy.size
    classes = len(setup.card.classes)
    spread = noise * several_bound(classes)
    if spread > 0.05 * size:
        yield (
            f"count.noise={noise:g} adds noise of about {spread:.3g} to the count of each of the "
            f"{classes} labels, but there are only about {size} images: lower count.noise, or set "
            "it to a share of the budget, such as count.noise: 10%"
        )


STAGE = Stage(
    "count",
    QUERY,
    "Release noisy class counts of the sensitive images.",
    "sfumato.settings.queries:Count",
    count,
    several_labels=True,
    adds_up=True,
    problems=problems,
)
