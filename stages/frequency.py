"""`stage frequency`: release a noisy joint Fourier embedding of images and labels (FETA-Pro Algorithm 1, DP-MERF)."""

from sfumato.features.fourier import FourierFeatures
from sfumato.settings.queries import Frequency
from stages.feature_means import release_means
from stages.runner import QueryRun


def frequency(run: QueryRun, settings: Frequency) -> None:
    features = FourierFeatures(run.plan.shape, settings.features, settings.size, run.plan.seed)
    release_means(run, features, f"joint embedding: {settings.size} Fourier features by class", features.arguments)
