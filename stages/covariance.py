"""`stage covariance`: noisy means and covariances of the images' low frequencies, by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.settings.queries import Covariance
    from stages.runner import QueryRun


def covariance(run: QueryRun, settings: Covariance) -> None:
    from sfumato.queries.feature_means import cosine_moments
    from stages.feature_means import release_means

    features = cosine_moments(run.plan.shape, settings.flip)
    released = (
        f"means and covariances of {len(features.chosen)} coefficients of the cosine transform, by "
        "class"
    )
    bound = "1: an image's coefficients and their products have norm 1 at most"
    release_means(run, features, released, features.arguments, sensitivity=bound)


STAGE = Stage(
    "covariance",
    QUERY,
    "Release the noisy means and covariances of the low frequencies of all images, by class.",
    "sfumato.settings.queries:Covariance",
    covariance,
    inputs=("count",),
    adds_up=True,
)
