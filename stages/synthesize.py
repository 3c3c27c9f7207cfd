"""`stage synthesize`: draw the release, images with labels, from the models of earlier stages."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, PUBLIC, Stage, one_label_only

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from sfumato.features.teacher_network import TeacherNetwork
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.release.synthesis import Drawn
    from sfumato.release.variation import Varied
    from sfumato.settings.release import Synthesize
    from stages.runner import StageRun
LABELS_KEPT = (
    "The teacher often assigns drawn images to other classes than the requested ones: the "
    "agreement is below synthesize.least_agreement. So the images keep the requested classes, and "
    "no image is distorted or blended."
)


def synthesize(run: StageRun, settings: Synthesize) -> None:
    from sfumato.data.cards import CARD, read_public_card
    from sfumato.data.tables import check_parquet
    from sfumato.diffusion.denoiser import Sampling
    from sfumato.features.teacher_network import guide_by
    from sfumato.release.exports import PUBLIC_SOURCE
    from sfumato.release.herding import draw_herded
    from sfumato.release.label_agreement import labels_fit
    from sfumato.release.release import save_release
    from sfumato.release.stream import save_networks
    from sfumato.release.synthesis import draw_mixture
    from sfumato.release.variation import vary
    from sfumato.storage.artifacts import merge_records
    from stages.screen import progress, say

    plan = run.plan
    if "parquet" in settings.export:
        check_parquet()  # checked before slow work
    priors = run.counts.priors if settings.labels == "prior" else None
    teacher = None
    if settings.reads("teacher"):
        teacher = run.teacher
    guide = None
    if teacher and settings.teacher_guidance:
        guide = guide_by(teacher, settings.teacher_guidance)
    sampling = Sampling(
        steps=settings.steps, guidance=settings.guidance, shape=plan.shape, guide=guide
    )

    with progress("synthesize") as report:
        draw = partial(
            draw_mixture,
            run.paths,
            priors=priors,
            progress=report,
            sampling=sampling,
            folder=run.out.parent,
        )
        if teacher and not labels_fit(draw, settings, teacher, plan.seed):
            say(LABELS_KEPT)
            overrides = {"relabel": False, "distorted": 0.0, "mixed": 0.0}
            settings = settings.model_copy(update=overrides)
            plan = replace(plan, settings=settings)
        if not settings.reads("teacher"):
            teacher = None
        if settings.herding > 1:
            means = run.means("frequency")
            draw = partial(draw_herded, draw, means, run.counts.priors, teacher)
        if settings.choose and teacher is not None:
            varied, sources = choose(run, settings, draw, teacher)
        else:
            images, labels, sources = draw(settings=settings, seed=plan.seed)
            varied = vary(images, labels, settings, teacher, plan.seed, sources == PUBLIC_SOURCE)
        if settings.herding > 1:
            # With herding, these labels come from the teacher. They are not the requested classes
            varied = replace(varied, requested_labels=None)
    with run.writing() as directory:
        inputs = list(run.inputs.values())
        public = None
        if (PUBLIC / CARD).is_file():
            public = read_public_card(PUBLIC / CARD).source
        stream = None
        if settings.stream:
            stream = asdict(
                save_networks(directory, run.paths, settings, varied, priors, plan.seed, teacher)
            )
        records = merge_records(inputs)
        save_release(directory, varied, sources, records, plan, public, stream)


def choose(
    run: StageRun, settings: Synthesize, draw: Callable[..., Drawn], teacher: TeacherNetwork
) -> tuple[Varied, np.ndarray]:
    """Choose whether the release contains the selected public images as well as drawn images.

    Returns the images to release, and the source of each image. The sources may be in any order,
    because they are only counted.
    """
    import numpy as np
    import torch

    from sfumato.data.images import ImageSet, load_array
    from sfumato.evaluation.mixture import JUDGES, WITH, WITHOUT, agreement, chosen_mixture, judges
    from sfumato.release.exports import PUBLIC_SOURCE
    from sfumato.release.variation import beside_public, vary

    plan = run.plan
    weights = {str(name): weight for name, weight in settings.sources.items()}
    ratio = weights.pop(PUBLIC_SOURCE) / sum(weights.values())
    without_public = settings.model_copy(update={"sources": weights})
    images, labels, sources = draw(settings=without_public, seed=plan.seed)
    mixtures = {WITHOUT: vary(images, labels, without_public, teacher, plan.seed)}
    public = run.public
    indices = load_array(run.path("select") / "indices.npy")
    chosen_labels = torch.from_numpy(np.array(load_array(run.path("select") / "labels.npy")))
    stride = max(1, round(len(images) * ratio / len(indices)))
    public_images = torch.from_numpy(public.images[indices]).permute(0, 3, 1, 2)
    mixtures[WITH] = beside_public(
        mixtures[WITHOUT], public_images, chosen_labels, stride, plan.seed
    )
    images, labels, _ = draw(
        settings=without_public.model_copy(update={"count": JUDGES}), seed=plan.seed + 1
    )
    private = ImageSet(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), plan.classes)
    judge_sets = judges(teacher, private, public, plan.seed)
    agreements = {
        name: agreement(mixture, judge_sets, len(plan.classes), plan.seed)
        for name, mixture in mixtures.items()
    }
    name = chosen_mixture(agreements)
    if name == WITH:
        sources = np.concatenate([sources[::stride], np.repeat(PUBLIC_SOURCE, len(indices))])
    return replace(mixtures[name], mixture={"chosen": name, "agreement": agreements}), sources


def drawing_work(workload: Work, settings: Synthesize) -> float:
    """Estimate the mean number of operations per image of a release or a stream.

    The operations draw, select and label images.
    """
    from sfumato.planning.work import WRITTEN
    from sfumato.release.herding import COMPARED_CELLS, IMAGES_PER_PART

    # Number of network passes of Heun's solver
    evaluations = (2 * settings.steps - 1) * (1 + (settings.guidance > 0))
    cost = 0.0
    if settings.reads("teacher"):
        cost += workload.network("teacher") * (1 + settings.distorted + settings.mixed)
    if settings.herding > 1:
        selection = workload.network("frequency") + workload.network("teacher") * settings.relabel
        per_class = settings.herding * settings.count / workload.classes
        cells = COMPARED_CELLS * min(per_class, IMAGES_PER_PART)
        # A read costs half as much as a write
        cost += settings.herding * selection + WRITTEN / 2 * cells
    for source, weight in settings.sources.items():
        share = weight / sum(settings.sources.values())
        if source in ("auxiliary", "refine"):
            cost += share * workload.network("auxiliary") * settings.herding
        elif source in ("finetune", "pretrain"):
            cost += share * workload.network(source) * evaluations * settings.herding
    return cost


def work(workload: Work) -> float:
    settings = workload.params.synthesize
    return settings.count * drawing_work(workload, settings)


def problems(setup: Setup) -> Problems:
    from sfumato.release.pattern import carries_pattern
    from sfumato.settings.data import SEVERAL

    settings = setup.params.synthesize
    if settings.mark == "pixels" and not carries_pattern(setup.card.shape):
        yield (
            "synthesize.mark: pixels requires images of at least 8×16 or 16×8 pixels, because the "
            "pattern cannot be found in smaller ones: set synthesize.mark: files"
        )
    if setup.card.labels == SEVERAL:
        of_one_label = {
            "synthesize.labels: uniform": settings.labels == "uniform",
            "synthesize.distorted": settings.distorted > 0,
            "synthesize.mixed": settings.mixed > 0,
            "synthesize.herding": settings.herding > 1,
            "synthesize.teacher_guidance": settings.teacher_guidance > 0,
        }
        yield from (one_label_only(name) for name, is_set in of_one_label.items() if is_set)
    if settings.teacher_guidance > 0:
        if not {"pretrain", "finetune"} & set(settings.sources):
            yield (
                "synthesize.teacher_guidance requires a diffusion model in synthesize.sources: add "
                "one, or remove teacher_guidance"
            )
        elif setup.params.model.directory is not None:
            yield (
                "synthesize.teacher_guidance does not apply to a public model, which draws "
                "latents: remove teacher_guidance"
            )
    if settings.choose and not (
        "select" in settings.sources and len(settings.sources) > 1 and settings.labels == "uniform"
    ):
        yield (
            "synthesize.choose requires select and another stage in synthesize.sources, and "
            "synthesize.labels: uniform. Set both, or remove choose"
        )
    if settings.herding > 1 and "select" in settings.sources and not settings.choose:
        yield (
            "synthesize.herding chooses among drawn images, but select provides public ones: "
            "remove herding, or remove select from synthesize.sources"
        )
    if settings.stream and not settings.networks(setup.params.model.directory is not None):
        yield (
            "synthesize.stream requires a network that this recipe trains, but synthesize.sources "
            f"contains only {', '.join(settings.sources)}. Recipients cannot draw more images from "
            "public images, from the images of `evolve`, or from a public model. Set "
            "synthesize.stream: false"
        )
    labelled = setup.params.select.by == "teacher" or (
        setup.params.runs("histogram") and setup.params.histogram.per_class
    )
    if "select" in settings.sources and not labelled:
        remedy = "set select.by: teacher, or histogram.per_class: true"
        yield (
            "synthesize.sources contains select, but its images would be labelled with public "
            f"classes instead of the sensitive ones: {remedy}"
        )


STAGE = Stage(
    "synthesize",
    FREE,
    "Draw the synthetic set, which may be shared.",
    "sfumato.settings.release:Synthesize",
    synthesize,
    inputs=(
        *("finetune", "pretrain", "refine", "auxiliary", "evolve", "adversarial", "select"),
        *("public", "frequency", "teacher", "count"),
    ),
    seeded=True,
    owned=True,
    shared=True,
    revision=3,
    several_labels=True,
    work=work,
    problems=problems,
)
