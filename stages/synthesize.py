"""`stage synthesize`: the release — images and labels drawn from the models that the privacy budget bought."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.data.store import load_public
from sfumato.data.tables import check_parquet
from sfumato.evaluation.mixture import JUDGES, WITHOUT, agreement, chosen_mixture, judges, judging, mixtures
from sfumato.features.teacher_network import TeacherNetwork, guide_by, load_teacher
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.release.release import save_release
from sfumato.release.synthesis import draw_mixture
from sfumato.release.variation import Varied, beside_public, vary
from sfumato.runtime.compute import device
from sfumato.settings.release import Synthesize
from sfumato.storage.artifacts import declared_apart, merge_records
from stages.runner import StageRun
from stages.screen import progress


def synthesize(run: StageRun[Synthesize]) -> None:
    plan, settings = run.plan, run.settings
    if "parquet" in settings.export:
        check_parquet()  # before anything slow
    paths = {name: artifact.path for name, artifact in run.inputs.items()}
    priors = run.counts.priors if settings.labels == "prior" else None
    teacher = load_teacher(paths["teacher"]).to(device()) if settings.reads("teacher") else None
    guide = guide_by(teacher, settings.teacher_guidance) if teacher and settings.teacher_guidance else None

    def drawn(settings: Synthesize, seed: int) -> tuple[Tensor, Tensor, np.ndarray]:
        with progress("synthesize") as report:
            return draw_mixture(paths, settings, priors, seed, report, plan.shape, guide, run.out.parent)

    mixture = None
    if settings.choose and teacher is not None:
        varied, sources, mixture = choose(run, drawn, teacher)
    else:
        images, labels, sources = drawn(settings, plan.seed)
        varied = vary(images, labels, settings, teacher, plan.seed, sources == PUBLIC_SOURCE)
    with run.writing() as directory:
        inputs = list(run.inputs.values())
        save_release(directory, varied, sources, merge_records(inputs), plan, declared_apart(inputs), mixture)


def choose(
    run: StageRun[Synthesize], drawn: Callable[..., tuple[Tensor, Tensor, np.ndarray]], teacher: TeacherNetwork
) -> tuple[Varied, np.ndarray, dict[str, Any]]:
    """The mixture that is released, the source of each image, and what the card says of the choice."""
    plan, settings = run.plan, run.settings
    public = load_public(run.path("public"), plan.shape)
    selected = np.load(run.path("select") / "indices.npy", allow_pickle=False)
    compared = mixtures(settings, len(selected))
    images, labels, _ = drawn(compared[WITHOUT].model_copy(update={"count": JUDGES}), plan.seed + 1)
    private = ImageSet(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), plan.classes)
    judged = judges(teacher, private, public.take(judging(len(public), selected, plan.seed)))
    made, agreements = {}, {}
    for name, one in compared.items():
        images, labels, sources = drawn(one, plan.seed)
        chosen = torch.from_numpy(sources == PUBLIC_SOURCE)
        varied = vary(images[~chosen], labels[~chosen], one, teacher, plan.seed)
        made[name] = beside_public(varied, images[chosen], labels[chosen], plan.seed), sources
        agreements[name] = agreement(made[name][0], judged, len(plan.classes), plan.seed)
    name = chosen_mixture(agreements)
    return *made[name], {"chosen": name, "agreement": agreements}
