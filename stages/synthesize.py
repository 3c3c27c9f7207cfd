"""`stage synthesize`: draw the release, images with labels, from the models of earlier stages."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sfumato.data.images import ImageSet, load_array
from sfumato.data.store import load_public
from sfumato.data.tables import check_parquet
from sfumato.evaluation.mixture import JUDGES, WITH, WITHOUT, agreement, chosen_mixture, judges
from sfumato.features.teacher_network import TeacherNetwork, guide_by, load_teacher
from sfumato.queries.feature_means import load_means
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.release.herding import draw_herded
from sfumato.release.release import save_release
from sfumato.release.stream import save_networks
from sfumato.release.synthesis import Drawn, draw_mixture
from sfumato.release.variation import Varied, beside_public, vary
from sfumato.runtime.compute import device
from sfumato.settings.release import Synthesize
from sfumato.storage.artifacts import declared_apart, merge_records
from stages.runner import StageRun
from stages.screen import progress


def synthesize(run: StageRun, settings: Synthesize) -> None:
    plan = run.plan
    if "parquet" in settings.export:
        check_parquet()  # checked before slow work
    paths = {name: artifact.path for name, artifact in run.inputs.items()}
    priors = run.counts.priors if settings.labels == "prior" else None
    teacher = load_teacher(paths["teacher"]).to(device()) if settings.reads("teacher") else None
    guide = guide_by(teacher, settings.teacher_guidance) if teacher and settings.teacher_guidance else None

    with progress("synthesize") as report:
        given: dict[str, Any] = {"progress": report, "shape": plan.shape, "guide": guide, "folder": run.out.parent}
        drawn = partial(draw_mixture, paths, priors=priors, **given)
        if settings.herding > 1:
            means = load_means("frequency", run.path("frequency"), plan=plan)
            drawn = partial(draw_herded, drawn, means, run.counts.priors, teacher)
        if settings.choose and teacher is not None:
            varied, sources = choose(run, settings, drawn, teacher)
        else:
            images, labels, sources = drawn(settings=settings, seed=plan.seed)
            varied = vary(images, labels, settings, teacher, plan.seed, sources == PUBLIC_SOURCE)
        if settings.herding > 1:
            varied = replace(varied, asked=None)  # its labels were already the teacher's
    with run.writing() as directory:
        inputs = list(run.inputs.values())
        recipe = None
        if settings.stream:
            recipe = asdict(save_networks(directory, paths, settings, varied, priors, plan.seed, teacher))
        save_release(directory, varied, sources, merge_records(inputs), plan, declared_apart(inputs), recipe)


def choose(
    run: StageRun, settings: Synthesize, drawn: Callable[..., Drawn], teacher: TeacherNetwork
) -> tuple[Varied, np.ndarray]:
    """Choose the mixture to release. Returns it, and the source of each of its images in any order."""
    plan = run.plan
    weights: dict[Any, float] = dict(settings.sources)
    ratio = weights.pop(PUBLIC_SOURCE) / sum(weights.values())
    alone = settings.model_copy(update={"sources": weights})
    images, labels, sources = drawn(settings=alone, seed=plan.seed)
    made = {WITHOUT: vary(images, labels, alone, teacher, plan.seed)}
    public = load_public(run.path("public"), plan.shape)
    chosen = load_array(run.path("select") / "indices.npy")
    chosen_labels = torch.from_numpy(np.array(load_array(run.path("select") / "labels.npy")))
    every = max(1, round(len(images) * ratio / len(chosen)))
    added = torch.from_numpy(public.images[chosen]).permute(0, 3, 1, 2)
    made[WITH] = beside_public(made[WITHOUT], added, chosen_labels, every, plan.seed)
    images, labels, _ = drawn(settings=alone.model_copy(update={"count": JUDGES}), seed=plan.seed + 1)
    private = ImageSet(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), plan.classes)
    judged = judges(teacher, private, public, plan.seed)
    agreements = {name: agreement(one, judged, len(plan.classes), plan.seed) for name, one in made.items()}
    name = chosen_mixture(agreements)
    if name == WITH:
        sources = np.concatenate([sources[::every], np.repeat(PUBLIC_SOURCE, len(chosen))])
    return replace(made[name], mixture={"chosen": name, "agreement": agreements}), sources
