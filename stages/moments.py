"""`stage moments`: release noisy means of a public network's features and of their squares (DP-MEPF)."""

from sfumato.features.projection import CLASSIFIER
from sfumato.features.public_network import load_classifier
from sfumato.queries.feature_means import SQUARES, moment_features
from sfumato.settings.queries import Moments
from stages.feature_means import release_means
from stages.runner import QueryRun


def moments(run: QueryRun, settings: Moments) -> None:
    network = load_classifier(run.path("classifier"))
    about = {"feature": CLASSIFIER, "squares": SQUARES}
    features = moment_features(network)
    released = f"means of {features.size} features of a public network, their squares among them, by class"
    release_means(run, features, released, about, cache=about, network=network)
