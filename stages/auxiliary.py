"""`stage auxiliary`: the one-step generator that the frequency release teaches."""

from __future__ import annotations

from sfumato.compute import device
from sfumato.config import Auxiliary
from sfumato.data.images import ImageSet, as_uint8, save_images
from sfumato.pictures import save_png, to_grid
from sfumato.queries.count import read_counts
from sfumato.queries.frequency import load_embedding
from sfumato.warmup.generator import draw_images, fit_generator, save_generator
from stages.runner import StageRun, progress


def auxiliary(run: StageRun[Auxiliary]) -> None:
    plan, classes = run.plan, run.plan.classes
    target, features = load_embedding(run.path("frequency"))
    priors = read_counts(run.inputs["count"], plan.size_hint, len(classes)).priors
    with progress("auxiliary") as report:
        generator = fit_generator(
            target.to(device()), features, run.settings, priors, plan.shape, len(classes), plan.seed, report
        )
    images, labels = draw_images(generator, run.settings.images, priors, plan.seed + 1)
    with run.writing() as directory:
        save_generator(generator, directory)
        save_images(directory, ImageSet(as_uint8(images), labels.numpy(), classes))
        save_png(directory / "grid.png", to_grid(images[:100], 10))
