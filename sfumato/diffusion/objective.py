"""The denoiser's objective: EDM preconditioning and weighting.

Denoising works on images in [-1, 1]. `per_image_loss` and `sample` convert from and to [0, 1], the
range of images in the rest of the program.

Source: Karras et al. 2022 (EDM), Table 1.
"""

from collections.abc import Callable

from torch import Tensor

Network = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, c_noise, labels) -> F, as `UNet.forward`


def to_model_range(images: Tensor) -> Tensor:
    """Map [0, 1] to [-1, 1]."""
    return images * 2 - 1


def to_image_range(x: Tensor) -> Tensor:
    """Map [-1, 1] to [0, 1], clamped."""
    return ((x + 1) / 2).clamp(0, 1)


def denoise(
    network: Network, noisy: Tensor, sigma: Tensor, labels: Tensor, sigma_data: float = 0.5
) -> Tensor:
    """Estimate the clean image by D(x; σ) = c_skip·x + c_out·F(c_in·x; ln σ / 4).

    noisy: (B, C, H, W), clean image in [-1, 1] plus σ times a standard normal;
    sigma: (B,), positive;
    labels: (B,) or, with several labels, (B, classes).

    Source: EDM Eq. 7 and Table 1.
    """
    s = sigma.float()[:, None, None, None]
    total = (s**2 + sigma_data**2).sqrt()
    output = network(noisy / total, sigma.float().log() / 4, labels).float()
    return noisy * (sigma_data / total) ** 2 + output * (s * sigma_data / total)


def per_image_loss(
    network: Network,
    images: Tensor,
    labels: Tensor,
    sigma: Tensor,
    noise: Tensor,
    sigma_data: float = 0.5,
) -> Tensor:
    """Compute the weighted denoising error λ(σ)·mean((D(x + σn; σ) − x)²) of each image, (B,).

    λ = (σ² + σ_data²)/(σ·σ_data)².

    images: (B, C, H, W) float32 in [0, 1];
    labels: (B,) or, with several labels, (B, classes);
    sigma: (B,), positive;
    noise: (B, C, H, W), standard normal.

    Source: EDM Eq. 8.
    """
    clean = to_model_range(images)
    noisy = clean + sigma[:, None, None, None] * noise
    error = (
        (denoise(network, noisy, sigma, labels, sigma_data) - clean).square().mean(dim=(1, 2, 3))
    )
    return error * (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
