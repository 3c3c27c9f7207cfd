"""`stage teacher`: train a linear classifier on public features by noisy gradient steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.queries import Teacher
    from stages.runner import QueryRun


def teacher(run: QueryRun, settings: Teacher) -> None:
    from sfumato.data.images import load_images
    from sfumato.data.lineage import refuse_private_network
    from sfumato.features.public_network import load_classifier
    from sfumato.features.teacher_network import TeacherNetwork, fit_features, save_teacher
    from sfumato.queries.feature_means import encoder_of
    from sfumato.queries.teacher import query_teacher
    from sfumato.release.teacher import write_card
    from sfumato.runtime import distributed
    from sfumato.runtime.compute import device
    from sfumato.storage.artifacts import merge_records
    from stages.feature_means import encoded
    from stages.screen import progress
    from stages.state import state_dir

    plan = run.plan
    network = None
    if settings.reads("classifier"):
        network = load_classifier(run.path("classifier"))
    names = [part.map for part in settings.maps]
    for index, part in enumerate(settings.maps):
        if part.network is not None:
            refuse_private_network(part.network, state_dir())
            names[index] = (
                f"a network of the owner's, declared public, sha256 {part.network.sha256}"
            )
    if settings.fitted_on == "public":
        images = run.public
    else:
        images = load_images(run.path("auxiliary"), plan.classes, shape=plan.shape)
    features, covariance = fit_features(settings, plan.shape, network, images, plan.seed)
    distributed.agree(features.state_dict().values())
    latents = encoded(run, features.to(device()), encoder_of(features, features.config()))
    size = run.counts.total * plan.mechanism.sample_rate
    released = (
        f"{settings.steps} steps of a linear classifier on {features.dimension} features "
        f"({', '.join(names)})"
    )
    sensitivity = "max_norm: the clipped error of one image times its features of norm 1"
    charge = run.open_charge(released, sensitivity, settings.max_norm, latents=latents)
    offsets = None
    if plan.several:
        offsets = run.counts.priors.clamp(0.001, 0.999).logit()  # a noisy share may be 0
    with progress("teacher", clock=False) as report:
        weights = query_teacher(
            charge, settings, len(plan.classes), size, covariance, report, offsets
        )
    with run.releasing(charge) as directory:
        save_teacher(TeacherNetwork.of(features, weights, offsets), directory)
        write_card(directory, plan, merge_records(list(run.inputs.values()), [charge.record]))


def network_work(workload: Work, block: int) -> int:
    from functools import partial

    from sfumato.features.projection import ProjectedFeatures
    from sfumato.planning.work import PUBLIC_CLASSES

    settings = workload.params.teacher
    network = settings.network and settings.network.arguments()
    if settings.reads("classifier"):
        classifier = workload.params.classifier.model_dump(include={"network", "width"})
        network = {**classifier, "shape": workload.shape, "classes": PUBLIC_CLASSES}
    features = settings.features or settings.feature, workload.shape, settings.dimension
    return workload.operations(
        partial(ProjectedFeatures, *features, network, settings.flip), workload.shape
    )


def work(workload: Work) -> float:
    from sfumato.features.teacher_network import FITTED

    looked_at = FITTED + workload.params.privacy.size
    rows = workload.params.teacher.dimension * workload.row * workload.seen("teacher")
    return workload.network("teacher") * looked_at + rows


def problems(setup: Setup) -> Problems:
    from sfumato.features import CLASSIFIER, FEATURES, OWN, name_problems

    maps = setup.params.teacher.maps
    yield from name_problems(
        "teacher.feature", [part.map for part in maps], (CLASSIFIER, *FEATURES, OWN)
    )
    for part in maps:
        if part.network is not None and not part.network.declared_public:
            yield (
                f"teacher: the network {part.network.path} is not declared public. If it was "
                "trained without sensitive images, set declared_public: true in the network's entry"
            )


STAGE = Stage(
    "teacher",
    QUERY,
    "Train a linear classifier on public features of the sensitive images by noisy gradient steps, "
    "and release it.",
    "sfumato.settings.queries:Teacher",
    teacher,
    inputs=("classifier", "auxiliary", "public", "count"),
    seeded=True,
    several_labels=True,
    network_work=network_work,
    work=work,
    problems=problems,
)
