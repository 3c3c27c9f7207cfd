"""`stage select`: select public images by the noisy votes for their classes, or by the teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, Stage

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.training import Select
    from stages.runner import StageRun


def select(run: StageRun, settings: Select) -> None:
    from sfumato.features.teacher_network import classify
    from sfumato.training.selection import (
        read_votes,
        relabel,
        save_selection,
        save_surest,
        select_public,
        surest,
    )

    images = run.public
    classes = run.plan.classes
    if settings.by == "teacher":
        probabilities = classify(run.teacher, images).numpy()
        number = min(settings.images, len(images))
        indices, labels = surest(probabilities, max(1, number // len(classes)))
        with run.writing() as directory:
            save_surest(directory, images, probabilities, indices, labels, classes)
        return
    histogram = run.inputs["histogram"]
    votes = None
    per_class = False
    if histogram.enabled:
        votes, per_class = read_votes(histogram.path, images.classes, len(classes))
    kept = select_public(settings, votes, len(images.classes))
    indices, labels = relabel(images.labels, kept, len(images.classes), per_class)
    with run.writing() as directory:
        save_selection(directory, images, kept, indices, labels, classes if per_class else None)


def work(workload: Work) -> float:
    return (
        workload.network("teacher")
        * workload.public_images
        * (workload.params.select.by == "teacher")
    )


def problems(setup: Setup) -> Problems:
    from sfumato.training.selection import number_to_keep

    settings = setup.params.select
    if settings.by == "votes" and settings.ratio < 1 and not setup.params.runs("histogram"):
        yield (
            f"select.ratio={settings.ratio:g} is below 1, so the votes of the stage `histogram` "
            "are required: add histogram to `run`, or set select.ratio: 1"
        )
    if setup.public is None:
        return
    sensitive = len(setup.card.classes)
    classes = len(setup.public.classes)
    # Values that the owner set are not adapted to the public set, but defaults are
    explicit = settings.model_fields_set
    if settings.by == "teacher":
        images = setup.public.images
        too_many = settings.images > images and "images" in explicit
        if too_many or min(settings.images, images) < sensitive:
            remedy = f"set select.images to a number from {sensitive} to {images}"
            if images < sensitive:
                remedy = "use a larger public set"
            yield (
                f"select.images={settings.images} does not fit {images} public images and "
                f"{sensitive} sensitive classes. Each class needs a public image: {remedy}"
            )
    elif setup.params.runs("histogram") and setup.params.histogram.per_class:
        number = number_to_keep(settings, classes)
        remedy = f"raise select.ratio to at least {sensitive / classes:.4g}"
        if classes < sensitive:
            remedy = "use another public set, or set histogram.per_class: false"
        if classes < sensitive or (number < sensitive and "ratio" in explicit):
            yield (
                f"select.ratio={settings.ratio:g} keeps {number} of {classes} public classes, but "
                f"each of the {sensitive} sensitive classes needs a public class of its own: "
                f"{remedy}"
            )


STAGE = Stage(
    "select",
    FREE,
    "Keep the public images of the classes with the most votes, or the public images that the "
    "teacher labels with the most confidence.",
    "sfumato.settings.training:Select",
    select,
    inputs=("histogram", "teacher", "public"),
    optional=("histogram",),
    work=work,
    problems=problems,
)
