"""`stage embedding`: release noisy class means of random Fourier features.

The Fourier features are computed from the teacher's features, and from the features of a network
trained on the generator's images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.planning.work import Work
    from sfumato.settings.queries import Embedding
    from stages.runner import QueryRun


def embedding(run: QueryRun, settings: Embedding) -> None:
    from sfumato.data.images import load_images
    from sfumato.queries.feature_means import (
        LENGTH_SCALES,
        TEACHER,
        learned_features,
        train_feature_network,
    )
    from sfumato.runtime import distributed
    from stages.feature_means import release_means
    from stages.screen import progress

    plan = run.plan
    teacher = run.teacher
    images = load_images(run.path("auxiliary"), plan.classes, shape=plan.shape)
    with progress("network of the features", clock=False) as report:
        network = train_feature_network(images, teacher, settings.learned.steps, plan.seed, report)
    distributed.agree(network.state_dict().values())
    features = learned_features(teacher.features, network, settings.size, plan.seed)
    released = (
        f"joint embedding: {settings.size} Fourier features, learned on what was released, by class"
    )
    description = {
        "seed": plan.seed,
        "size": settings.size,
        "length_scales": LENGTH_SCALES,
        "teacher": TEACHER,
    }
    cache = {"teacher": teacher.features.config(), "network": network.config()}
    release_means(run, features, released, description, cache=cache, network=network)


def network_work(workload: Work, block: int) -> int:
    from functools import partial

    from sfumato.features.public_network import build_network
    from sfumato.queries.feature_means import LEARNED

    build = partial(build_network, LEARNED.network, workload.shape, workload.classes, LEARNED.width)
    return workload.operations(build, workload.shape)


def work(workload: Work) -> float:
    from sfumato.queries.feature_means import LEARNED

    looked_at = workload.params.auxiliary.images + workload.seen("embedding")
    training = workload.TRAINING * workload.params.embedding.learned.steps * LEARNED.batch
    return (
        workload.network("embedding") * (training + looked_at)
        + workload.network("teacher") * looked_at
    )


STAGE = Stage(
    "embedding",
    QUERY,
    "Release noisy class means of random Fourier features. Their inputs are features from networks "
    "that were trained on earlier releases.",
    "sfumato.settings.queries:Embedding",
    embedding,
    inputs=("auxiliary", "teacher", "count"),
    seeded=True,
    network_work=network_work,
    work=work,
)
