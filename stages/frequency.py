"""`stage frequency`: noisy joint Fourier embedding of images and labels."""

from __future__ import annotations

from sfumato.features.fourier import FourierFeatures
from sfumato.queries.count import read_counts
from sfumato.queries.frequency import save_embedding
from sfumato.queries.joint import query_joint_embedding
from sfumato.runtime.compute import device
from sfumato.settings.queries import Frequency
from stages.runner import QueryRun


def frequency(run: QueryRun[Frequency]) -> None:
    settings, plan = run.settings, run.plan
    features = FourierFeatures(plan.shape, settings.features, settings.size, plan.seed).to(device())
    counts = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes))
    released = f"joint embedding: {settings.size} Fourier features by class"
    charge = run.open_charge(released, "1: the features of an image have norm 1", 1.0)
    embedding = query_joint_embedding(charge, features, len(plan.classes), counts.total)
    with run.releasing(charge) as directory:
        save_embedding(embedding, features, directory)
