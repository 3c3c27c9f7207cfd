"""`stage moments`: noisy means of a public network's features and of their squares."""

from __future__ import annotations

from functools import partial

from sfumato.data.store import read_card
from sfumato.features.public_network import load_classifier
from sfumato.queries.count import read_counts
from sfumato.queries.embedding import query_embedding
from sfumato.queries.encoded import encoder_of, ensure_encoded
from sfumato.queries.moments import moment_features, save_moments
from sfumato.runtime.compute import device
from sfumato.settings.queries import Moments
from stages.runner import QueryRun, progress, state_dir


def moments(run: QueryRun[Moments]) -> None:
    plan, settings = run.plan, run.settings
    network = load_classifier(run.path("classifier"))
    features = moment_features(settings, plan.shape, network).to(device())
    encoding = partial(progress, "features of the images, once", clock=False)
    encoder = encoder_of(features, settings.model_dump(mode="json", exclude={"noise"}))
    latents = ensure_encoded(features.vectors, encoder, device(), state_dir(), read_card(run.card), encoding)
    size = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes)).total
    released = f"means of {features.size} features of a public network, their squares among them, by class"
    charge = run.open_charge(released, "1: the features of an image have norm 1", 1.0, latents=latents)
    found = query_embedding(charge, features, len(plan.classes), size)
    with run.releasing(charge) as directory:
        save_moments(found, settings, network, directory)
