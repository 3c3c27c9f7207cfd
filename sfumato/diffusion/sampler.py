"""Draw images: Heun's second-order solver of the probability-flow ODE, with guidance.

Source: EDM, Algorithm 1 (deterministic) and Eq. 5; Ho & Salimans 2021 for classifier-free guidance;
Dhariwal & Nichol 2021 for classifier guidance; Bansal et al. 2023 for applying the classifier to
the denoised image.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from sfumato.diffusion.denoiser import Denoiser, Guide
from sfumato.diffusion.objective import denoise, to_image_range
from sfumato.runtime import distributed

SIGMA_MIN = 0.002
SIGMA_MAX = 80.0


def noise_schedule(steps: int) -> Tensor:
    """Return noise levels, (steps + 1,) float32: from SIGMA_MAX down to SIGMA_MIN, then 0."""
    ramp = torch.linspace(0, 1, steps)
    # The exponent ρ of EDM is 7
    levels = (SIGMA_MAX ** (1 / 7) + ramp * (SIGMA_MIN ** (1 / 7) - SIGMA_MAX ** (1 / 7))) ** 7.0
    return torch.cat([levels, torch.zeros(1)])


@torch.no_grad()
def sample(
    model: Denoiser,
    labels: Tensor,
    steps: int = 18,
    guidance: float = 0.0,
    generator: torch.Generator | None = None,
    autocast: bool = False,
    guide: Guide | None = None,
) -> Tensor:
    """Draw one image per label, (N, C, H, W) float32 in [0, 1] on the CPU.

    If there are several processes, they share the work.

    labels: (N,), or (N, classes) with several labels per image;
    steps: number of solver steps. They take 2·steps − 1 evaluations of the network, or twice as
    many with guidance;
    guidance: see `Sampling`;
    generator: determines the images up to rounding, for any device and number of processes;
    autocast: run in bfloat16;
    guide: see `Sampling`.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    # The noise is drawn image by image, so that the k-th image does not depend on the batch size.
    noise = (torch.randn(1, *model.shape, generator=generator) for _ in labels)
    start = torch.cat([torch.empty(0, *model.shape), *noise])
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        noised = distributed.local_shard(start).to(device) * noise_schedule(steps)[0].item()
        own_labels = distributed.local_shard(labels).to(device)
        images = to_image_range(solve(model, noised, own_labels, steps, guidance, guide)).float()
    model.train(training)
    return distributed.all_gather(images, len(labels)).cpu()


def solve(
    model: Denoiser, x: Tensor, labels: Tensor, steps: int, guidance: float, guide: Guide | None
) -> Tensor:
    """Solve the ODE by Heun's method, from noise of level SIGMA_MAX to σ = 0.

    x: (B, C, H, W), the noise. Returns images in about [-1, 1].

    The guide gets the variance of the clean image given its noisy version. This variance is assumed
    to be σ²σ_data² / (σ² + σ_data²) in every pixel. By Bayes' rule, the guide's shift is this
    variance times the gradient of log p(label | D).
    """

    def slope(x: Tensor, sigma: float) -> Tensor:
        def denoised(x: Tensor, labels: Tensor) -> Tensor:
            return denoise(model, x, x.new_full((len(x),), sigma), labels, model.sigma_data)

        clean = with_guidance(denoised, x, labels, model.no_label, guidance)
        if guide is not None:
            clean = clean + guide(
                clean, labels, (sigma * model.sigma_data) ** 2 / (sigma**2 + model.sigma_data**2)
            )
        return (x - clean) / sigma

    for sigma, following in itertools.pairwise(noise_schedule(steps).tolist()):
        first_slope = slope(x, sigma)
        step = following - sigma
        euler = x + step * first_slope
        if following == 0:
            return euler
        x = x + step * (first_slope + slope(euler, following)) / 2
    return x


def with_guidance(
    network: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    no_label: int,
    guidance: float,
) -> Tensor:
    """Compute D + g·(D − D_unconditional), with both terms in one pass of the network.

    network: function (x, labels) -> D; guidance: g.
    """
    if guidance == 0:
        return network(x, labels)
    both_labels = torch.cat([labels, torch.full_like(labels, no_label)])
    conditional, unconditional = network(torch.cat([x, x]), both_labels).chunk(2)
    return conditional + guidance * (conditional - unconditional)
