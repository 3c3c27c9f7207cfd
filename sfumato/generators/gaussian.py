"""A generator with one Gaussian per class.

Low frequencies are drawn from Gaussians that were fitted to a release. Finer frequencies are drawn
with variances extrapolated by a power law, or are taken from public images.

No function here reads a sensitive image: the release was charged, and the fit is post-processing.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.features import FeatureMeans
from sfumato.features.cosine import CosineMoments

RECOLOURED = 6  # Number of random numbers that recolour one public image


class GaussianGenerator(nn.Module):
    """G(z, y): low cosine coefficients from the Gaussian of class y, plus finer coefficients.

    features: arguments of the release's `CosineMoments`;
    details: number of public images. The finer coefficients are taken from one of these images,
    which is chosen at random and recoloured. If there are none (0), the finer coefficients are
    independent and normally distributed, with variances that `fit_gaussians` sets;
    latent: size of z, C·H·W + 1. The last number chooses the public image, and the RECOLOURED
    numbers before it determine how the image is recoloured.
    """

    def __init__(self, features: dict[str, Any], classes: int, details: int) -> None:
        super().__init__()
        self.features = CosineMoments(**features)
        self.classes = classes
        self.shape = self.features.shape
        size = len(self.features.chosen)
        pixels = math.prod(self.shape)
        self.latent = pixels + 1
        self.means = nn.Buffer(torch.zeros(classes, size))
        self.factors = nn.Buffer(torch.zeros(classes, size, size))
        self.fine = nn.Buffer(torch.zeros(pixels))
        self.details = nn.Buffer(torch.zeros(details, *self.shape, dtype=torch.uint8))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """Draw images, (B, C, H, W) in [0, 1].

        z: (B, latent); labels: (B,) int64 below `classes`.
        """
        choice = z[:, -1]
        z = z[:, :-1]
        chosen = self.features.chosen
        low = self.means[labels]
        for label in labels.unique():
            low[labels == label] += z[labels == label][:, chosen] @ self.factors[label].T
        if len(self.details):
            rows = (
                (torch.special.ndtr(choice) * len(self.details))
                .long()
                .clamp(max=len(self.details) - 1)
            )
            images = recolour(
                self.details[rows].float() / 255, torch.special.ndtr(z[:, -RECOLOURED:])
            )
            coefficients = self.features.coefficients(images)
        else:
            coefficients = z * self.fine.sqrt()
        return self.features.images(coefficients.index_copy(1, chosen, low)).clamp(0, 1)

    def config(self) -> dict[str, object]:
        return {
            "features": self.features.arguments,
            "classes": self.classes,
            "details": len(self.details),
        }


@torch.no_grad()
def fit_gaussians(
    release: FeatureMeans, priors: Tensor, details: Tensor | None = None
) -> GaussianGenerator:
    """Fit one Gaussian per class to a release of `CosineMoments`, in closed form.

    priors: (classes,) public or released shares of the classes, which add up to 1;
    details: (n, C, H, W) uint8 public images, or None.

    The covariance of a class is the sum of three matrices:

    1. the diagonal matrix of variances that `fit_variance_law` fits;
    2. the shrunk difference between the pooled covariance and matrix 1;
    3. half of the shrunk difference between the class's released covariance and the sum of
       matrices 1 and 2.

    To shrink a difference, all its eigenvalues are moved towards zero by the same amount. This
    amount is the expected largest eigenvalue of a matrix that contains only noise: 2·√d times the
    standard deviation of the noise in an entry. Here d is the number of coefficients, or half of
    this number if `CosineMoments` has `flip`.
    """
    features = release.features
    deviation = release.deviation
    if deviation is None:
        raise ValueError("the release does not state the standard deviation of its noise")
    generator = GaussianGenerator(
        features.arguments, len(priors), 0 if details is None else len(details)
    )
    # The share of a rare class is raised to a floor, because the noise is divided by the share
    shares = priors.double().clamp(min=0.1 / len(priors))[:, None]
    means, seconds = features.moments(release.table.double().T / shares)
    noise = features.radius * deviation / math.sqrt(1 - features.products) / shares
    means = shrink_means(means, noise.square() * len(features.even), shares)
    covariances = seconds - means[:, :, None] * means[:, None, :]
    pooled = (shares[:, :, None] * covariances).sum(0)
    law = fit_variance_law(pooled.diagonal(), features)
    expected_variances = law[features.chosen]
    # Standard deviation of the noise of an off-diagonal entry, for a class with a share of 1
    unit = features.radius**2 * deviation / math.sqrt(2 * features.products)
    largest = 2 * math.sqrt(len(pooled) / (2 if features.arguments["flip"] else 1)) * unit
    pooled = expected_variances.diag() + shrink_eigenvalues(
        pooled - expected_variances.diag(), largest * math.sqrt(len(priors))
    )
    for label, share in enumerate(shares.flatten().tolist()):
        covariance = pooled + 0.5 * shrink_eigenvalues(covariances[label] - pooled, largest / share)
        generator.factors[label] = factor_of(covariance, expected_variances).float()
    generator.means.copy_(means)
    generator.fine.copy_(law)
    if details is not None:
        generator.details.copy_(details)
    return generator


def shrink_means(means: Tensor, noise: Tensor, shares: Tensor) -> Tensor:
    """Shrink the means of the classes towards the mean of all images.

    Noise increases the squared distance between a class's mean and the mean of all images. The
    difference of the two means is reduced by the share of this squared distance that is noise.

    means: (M, d), means of the classes;
    noise: (M, 1), expected squared norm of the noise in each class's mean;
    shares: (M, 1), share of each class among all images.

    Source: James and Stein 1961, positive part.
    """
    middle = (shares * means).sum(0) / shares.sum()
    deviations = means - middle
    return middle + (1 - noise / deviations.square().sum(1, keepdim=True)).clamp(min=0) * deviations


def recolour(images: Tensor, random: Tensor) -> Tensor:
    """Reorder channels, mirror, invert, desaturate and relight each image, at random.

    images: (B, C, H, W) in [0, 1]; random: (B, RECOLOURED), uniform in [0, 1].
    """
    order, mirrored, inverted, saturation, contrast, gamma = random.T[:, :, None, None, None]
    orders = torch.tensor(
        list(itertools.permutations(range(images.shape[1]))), device=images.device
    )
    channel_orders = orders[(order.flatten() * len(orders)).long().clamp(max=len(orders) - 1)]
    images = images.gather(1, channel_orders[:, :, None, None].expand_as(images))
    images = torch.where(mirrored < 0.5, images.flip(3), images)
    images = torch.where(inverted < 0.2, 1 - images, images)
    grey = images.mean(1, keepdim=True)
    images = grey + (0.1 + 0.9 * saturation) * (images - grey)
    mean = images.mean((2, 3), keepdim=True)
    return (mean + (0.6 + 1.2 * contrast) * (images - mean)).clamp(0, 1) ** (gamma - 0.5).exp()


def fit_variance_law(variances: Tensor, features: CosineMoments) -> Tensor:
    """Fit a law to the released variances of low coefficients, and apply it to all coefficients.

    The law states that a coefficient with f half waves per image has the variance
    a·(1 + f)^-decay. The parameters a and decay are fitted once for brightness, and once for both
    colour contrasts. They maximise the likelihood of the released variances (Whittle 1953).

    variances: (d,), released. Returns the variances of all coefficients, (C·H·W,) float64.
    """
    frequency = features.radius_of.double() * max(features.shape[1:])
    laws = []
    for bands in [(0,), (1, 2), (1, 2)][: features.shape[0]]:
        in_bands = torch.isin(features.chosen // len(frequency), torch.tensor(bands))
        base = 1 + frequency[features.chosen[in_bands] % len(frequency)]
        scores = []
        for decay in torch.arange(1.0, 4.55, 0.1).tolist():
            level = (variances[in_bands] * base**decay).mean().clamp(min=1e-6)
            scores.append((float(level.log() - decay * base.log().mean()), decay, float(level)))
        _, decay, level_of_best = min(scores)
        laws.append(level_of_best * (1 + frequency) ** -decay)
    return torch.cat(laws)


def shrink_eigenvalues(matrix: Tensor, noise: float) -> Tensor:
    """Move each eigenvalue of a symmetric matrix towards zero by `noise`, and stop at zero."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * (values.sign() * (values.abs() - noise).clamp(min=0)) @ vectors.T


def factor_of(covariance: Tensor, expected_variances: Tensor) -> Tensor:
    """Return F so that F Fᵀ is the covariance, with a floor on its variances.

    In each direction, the variance is raised to at least half of the expected variance.

    covariance: (d, d); expected_variances: (d,), expected variances of the coefficients.
    """
    scale = expected_variances.sqrt()
    values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None])
    return scale[:, None] * vectors * values.clamp(min=0.5).sqrt()
