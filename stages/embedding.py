"""`stage embedding`: noisy joint Fourier embedding under features learned on what was released."""

from __future__ import annotations

from functools import partial

from sfumato.data.images import load_images
from sfumato.data.store import read_card
from sfumato.queries.count import read_counts
from sfumato.queries.embedding import learned_features, query_embedding, save_learned, study
from sfumato.queries.encoded import encoder_of, ensure_encoded
from sfumato.queries.teacher import load_teacher
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.settings.queries import Embedding
from stages.runner import QueryRun, progress, state_dir


def embedding(run: QueryRun[Embedding]) -> None:
    plan, settings = run.plan, run.settings
    teacher = load_teacher(run.path("teacher")).to(device())
    with progress("network of the features", clock=False) as report:
        images = load_images(run.path("auxiliary"), plan.classes)
        network = distributed.broadcast_state(study(settings.learned, images, teacher, plan.seed, report))
    features = learned_features(settings, teacher.features, network, plan.seed).to(device())
    about = {"teacher": teacher.features.config(), "network": network.config()}
    encoding = partial(progress, "features of the images, once", clock=False)
    encoder = encoder_of(features, about)
    latents = ensure_encoded(features.vectors, encoder, device(), state_dir(), read_card(run.card), encoding)
    size = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes)).total
    released = f"joint embedding: {settings.size} Fourier features, learned on what was released, by class"
    charge = run.open_charge(released, "1: the features of an image have norm 1", 1.0, latents=latents)
    found = query_embedding(charge, features, len(plan.classes), size)
    with run.releasing(charge) as directory:
        save_learned(found, settings, network, plan.seed, directory)
