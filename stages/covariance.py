"""`stage covariance`: noisy means and covariances of the images' low frequencies, by class."""

from sfumato.queries.feature_means import cosine_moments
from sfumato.settings.queries import Covariance
from stages.feature_means import release_means
from stages.runner import QueryRun


def covariance(run: QueryRun, settings: Covariance) -> None:
    features = cosine_moments(run.plan.shape, settings.flip)
    released = f"means and covariances of {len(features.chosen)} coefficients of the cosine transform, by class"
    bound = "1: an image's coefficients and their products have norm 1 at most"
    release_means(run, features, released, features.arguments, sensitivity=bound)
