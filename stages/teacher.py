"""`stage teacher`: train a linear classifier on public features by noisy gradient steps."""

from sfumato.data.images import load_images
from sfumato.data.lineage import refuse_private_network
from sfumato.data.store import load_public
from sfumato.features.public_network import load_classifier
from sfumato.features.teacher_network import TeacherNetwork, fit_features, save_teacher
from sfumato.queries.feature_means import encoder_of
from sfumato.queries.teacher import query_teacher
from sfumato.release.teacher import write_card
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.settings.queries import Teacher
from sfumato.storage.artifacts import merge_records
from stages.feature_means import encoded
from stages.runner import QueryRun
from stages.screen import progress
from stages.state import state_dir


def teacher(run: QueryRun, settings: Teacher) -> None:
    plan = run.plan
    network = load_classifier(run.path("classifier")) if settings.reads("classifier") else None
    names = [part.map for part in settings.maps]
    for place, part in enumerate(settings.maps):
        if part.network is not None:
            refuse_private_network(part.network, state_dir())
            names[place] = f"a network of the owner's, declared public, sha256 {part.network.sha256}"
    if settings.fitted_on == "public":
        images = load_public(run.path("public"), plan.shape)
    else:
        images = load_images(run.path("auxiliary"), plan.classes, shape=plan.shape)
    features, covariance = fit_features(settings, plan.shape, network, images, plan.seed)
    distributed.agree(features.state_dict().values())
    latents = encoded(run, features.to(device()), encoder_of(features, features.config()))
    size = run.counts.total * plan.mechanism.sample_rate
    released = f"{settings.steps} steps of a linear classifier on {features.dimension} features ({', '.join(names)})"
    sensitivity = "max_norm: the clipped error of one image times its features of norm 1"
    charge = run.open_charge(released, sensitivity, settings.max_norm, latents=latents)
    offsets = None
    if plan.several:
        offsets = run.counts.priors.clamp(0.001, 0.999).logit()  # a noisy share may be 0
    with progress("teacher", clock=False) as report:
        weights = query_teacher(charge, settings, len(plan.classes), size, covariance, report, offsets)
    with run.releasing(charge) as directory:
        save_teacher(TeacherNetwork.of(features, weights, offsets), directory)
        write_card(directory, plan, merge_records(list(run.inputs.values()), [charge.record]))
