"""`stage covariance`: noisy means and covariances of the images' low frequencies, by class."""

from __future__ import annotations

from sfumato.features.cosine import ClassMoments
from sfumato.queries.count import read_counts
from sfumato.queries.covariance import cosine_moments, save_covariance
from sfumato.queries.joint import query_joint_embedding
from sfumato.runtime.compute import device
from sfumato.settings.queries import Covariance
from stages.runner import QueryRun


def covariance(run: QueryRun[Covariance]) -> None:
    plan = run.plan
    features = cosine_moments(run.settings, plan.shape).to(device())
    size = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes)).total
    released = f"means and covariances of {len(features.chosen)} coefficients of the cosine transform, by class"
    charge = run.open_charge(released, "1: an image's coefficients and their products have norm 1 at most", 1.0)
    table = query_joint_embedding(charge, features, len(plan.classes), size)
    with run.releasing(charge) as directory:
        save_covariance(ClassMoments(table, features, charge.noise_multiplier / size), directory)
