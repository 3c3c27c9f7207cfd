"""`stage frequency`: release a noisy joint Fourier embedding of images and labels (FETA-Pro
Algorithm 1, DP-MERF).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.features.fourier import FourierFeatures
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.queries import Frequency
    from stages.runner import QueryRun


def frequency(run: QueryRun, settings: Frequency) -> None:
    from sfumato.features.fourier import FourierFeatures
    from stages.feature_means import release_means

    features = FourierFeatures(run.plan.shape, settings.features, settings.size, run.plan.seed)
    release_means(run, features, record_text(features), features.arguments)


def record_text(features: FourierFeatures) -> str:
    """Describe the release, for its record.

    A map with the kernel `linear` or `squared` has no Fourier features: its outputs are released.
    """
    waves = 2 * features.frequencies
    outputs = features.size - waves
    if not outputs:
        return f"joint embedding: {waves} Fourier features by class"
    if not waves:
        return f"joint embedding: {outputs} outputs of public maps by class"
    return f"joint embedding: {waves} Fourier features, {outputs} outputs of public maps, by class"


def network_work(workload: Work, block: int) -> int:
    from functools import partial

    from sfumato.features.fourier import FourierFeatures

    settings = workload.params.frequency
    channels, *sides = workload.shape
    blocks = channels, *(-(-side // block) for side in sides)
    build = partial(FourierFeatures, workload.shape, settings.features, settings.size, 0)
    return workload.operations(build, blocks)


def work(workload: Work) -> float:
    return workload.network("frequency") * workload.seen("frequency")


def problems(setup: Setup) -> Problems:
    from sfumato.features import FEATURES, name_problems

    settings = setup.params.frequency
    yield from name_problems(
        "frequency.features", [feature.map for feature in settings.features], FEATURES
    )
    number = sum(len(feature.length_scales) for feature in settings.features)
    if settings.size < 2 * number:
        yield (
            f"frequency.size={settings.size} is too small for {number} length-scales: expected at "
            f"least {2 * number}"
        )


STAGE = Stage(
    "frequency",
    QUERY,
    "Release noisy class means of random Fourier features of all images.",
    "sfumato.settings.queries:Frequency",
    frequency,
    inputs=("count",),
    seeded=True,
    several_labels=True,
    adds_up=True,
    network_work=network_work,
    work=work,
    problems=problems,
)
