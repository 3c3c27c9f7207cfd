"""`stage moments`: release noisy means of a public network's features and of their squares
(DP-MEPF).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.settings.queries import Moments
    from stages.runner import QueryRun


def moments(run: QueryRun, settings: Moments) -> None:
    from sfumato.features import CLASSIFIER
    from sfumato.features.public_network import load_classifier
    from sfumato.queries.feature_means import SQUARES, moment_features
    from stages.feature_means import release_means

    network = load_classifier(run.path("classifier"))
    description = {"feature": CLASSIFIER, "squares": SQUARES}
    features = moment_features(network)
    released = (
        f"means of {features.size} features of a public network, their squares among them, by class"
    )
    release_means(run, features, released, description, cache=description, network=network)


STAGE = Stage(
    "moments",
    QUERY,
    "Release noisy class means of a public network's features, and of the features' squares, over "
    "all images.",
    "sfumato.settings.queries:Moments",
    moments,
    inputs=("classifier", "count"),
    several_labels=True,
    adds_up=True,
)
