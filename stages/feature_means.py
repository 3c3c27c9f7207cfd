"""Release class means of features: the common part of the stages `frequency`, `moments`,
`covariance` and `embedding`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from torch import Tensor

    from sfumato.features.projection import ProjectedFeatures
    from sfumato.features.public_network import PublicNetwork
    from stages.runner import QueryRun


def release_means(
    run: QueryRun,
    features: Any,
    released: str,
    about: Mapping[str, object],
    *,
    sensitivity: str = "1: the features of an image have norm 1",
    cache: Mapping[str, object] | None = None,
    network: PublicNetwork | ProjectedFeatures | None = None,
) -> None:
    """Release the noisy sum of `features` over each class, divided by `run.counts.total`.

    about: content of features.json. From it, from `network` and, for `embedding`, from the teacher,
    `features` can be computed again;
    network: network that computes the features, None if there is none;
    sensitivity: bound on the contribution of one image, in words;
    cache: arguments of `features`. The images' rows are stored under a digest of these arguments
    and of the state of `features`. With None, no rows are stored.
    """
    from sfumato.features import FeatureMeans
    from sfumato.queries.feature_means import encoder_of, query_feature_means, save_means
    from sfumato.runtime.compute import device

    features = features.to(device())
    size = run.counts.total
    latents = None
    if cache is not None:
        latents = encoded(run, features.vectors, encoder_of(features, cache))
    charge = run.open_charge(released, sensitivity, 1.0, latents=latents)
    table = query_feature_means(
        charge, features, len(run.plan.classes), size, cached=latents is not None
    )
    means = FeatureMeans(table, features, charge.noise_multiplier / size)
    with run.releasing(charge) as directory:
        save_means(run.plan.stage, means, about, directory, network)


def encoded(run: QueryRun, function: Callable[[Tensor], Tensor], encoder: str) -> str | None:
    """Compute and store rows of the images, unless they are stored already, and return their key.

    A charge draws these rows instead of images. function: computes rows from images; encoder:
    digest of `function`.
    """
    from sfumato.queries.feature_means import encoding_alone
    from sfumato.runtime.compute import device

    return run.latents(
        encoder, "features", partial(encoding_alone, function, run.plan.shape, device())
    )
