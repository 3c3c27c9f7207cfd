"""Interface of denoisers, and functions that draw noise levels.

Source: Karras et al. 2022 (EDM) for log-normal levels; DP-Diffusion §3.3 for mixtures of timesteps.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.data.store import Encode
from sfumato.runtime.progress import Progress
from sfumato.settings.fields import Size, both_sides
from sfumato.settings.noise_levels import NoiseLevels, TimestepMixture

# A guide returns a shift to add to the denoised images D, which have values in about [-1, 1].
# Arguments: D, the labels, and the variance of the clean image given its noisy version.
Guide = Callable[[Tensor, Tensor, float], Tensor]
# A sampler draws one image per label: (B, C, H, W) float32 in [0, 1], on the CPU.
Sampler = Callable[[Tensor], Tensor]
TIMESTEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for drawing images from a diffusion model.

    steps: number of solver steps;
    guidance: g in D + g·(D − D₀); D is the image denoised with its label, D₀ without it;
    shape: requested (C, H, W), for networks that can resize their images;
    guide: guidance by a classifier, for networks that draw pixels.
    """

    steps: int
    guidance: float = 0.0
    shape: Shape | None = None
    guide: Guide | None = None


class Denoiser(nn.Module):
    """A class-conditional network that learns to remove noise, from pixels or from latents.

    channels, resolution: size of the images or latents. The resolution is the side of a square, or
    (height, width);
    classes: number of classes. Labels are 0..classes-1, and the label `classes` means "no label";
    several: whether images have several labels. Labels are then (B, classes) of 0 and 1. If a row
    has any other entry, the labels of this image are unknown to the network.

    A subclass that draws no images needs to define only `per_image_loss`.
    """

    classes: int
    several: bool = False
    channels: int
    resolution: Size
    # Whether the network meets the conditions of `sfumato.dpsgd.per_image`: no image affects
    # another in the forward pass, and trained weights are used only by functions in its RULES.
    supports_ghost_layers: bool = False
    # Whether per-image gradients of convolutions are computed by matrix products, instead of a
    # grouped convolution. `sfumato.dpsgd.microbatch` sets this on a GPU.
    use_products: bool = False
    # Digest of everything that determines the latents: encoder weights and image size.
    # None if the network works on pixels.
    encoder: str | None = None
    # Standard deviation that the preconditioning and the sampler assume for images.
    sigma_data: float
    at_a_time: int  # number of images drawn at a time, summed over all processes

    @property
    def shape(self) -> Shape:
        """(C, H, W) of the pixels or latents."""
        return self.channels, *both_sides(self.resolution)

    def load_encoder(self, device: torch.device) -> Encode:
        """Load the function from images to latents, (B, C, H, W) to (B, c, h, w), on a device.

        Raises ValueError for a network that works on pixels.
        """
        raise ValueError("this network works on pixels and has no encoder to load")

    @property
    def no_label(self) -> int:
        """The value that means "no label".

        With several labels per image, a row with hidden labels has this value in each entry.
        """
        if self.several:
            return 2
        return self.classes

    def hidden(self, labels: Tensor, hide: Tensor) -> Tensor:
        """Replace the labels of some images by "no label".

        labels: (*,) or, with several labels, (*, classes); hide: (*,) bool, true for these images.
        """
        return torch.where(hide[..., None] if self.several else hide, self.no_label, labels)

    def draw_levels(self, law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
        """Draw n noise levels, (n,), to pass to `per_image_loss` as `levels`.

        By default, these are values of σ from `draw_noise_levels`. A subclass may use timesteps.
        """
        return draw_noise_levels(law, n, generator)

    def per_image_loss(
        self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor
    ) -> Tensor:
        """Compute the loss of denoising each image, (B,) float32.

        images: (B, C, H, W) float32 in [0, 1], or latents;
        labels: (B,) or, with several labels, (B, classes);
        levels: (B,), from `draw_levels`;
        noise: (B, C, H, W), standard normal.
        """
        raise NotImplementedError

    def sampler(self, sampling: Sampling, generator: torch.Generator) -> Sampler:
        """Return a function from labels to images.

        The function draws at most `at_a_time` images per call. generator: see `drawing`.
        """
        raise NotImplementedError

    def drawing(
        self,
        labels: Tensor,
        sampling: Sampling,
        generator: torch.Generator,
        progress: Progress | None = None,
    ) -> Iterator[Tensor]:
        """Draw one image per label, and yield the images in batches.

        Yields (B, C, H, W) float32 in [0, 1], on the CPU.

        labels: (N,), or (N, classes) with several labels per image;
        generator: a CPU generator, which determines the images up to rounding.
        """
        sampler = self.sampler(sampling, generator)
        done = 0
        for part in labels.split(self.at_a_time):
            yield sampler(part)
            done += len(part)
            if progress:
                progress(done, len(labels))

    def save(self, directory: Path, trained: Sequence[str]) -> None:
        """Write the files that `sfumato.release.synthesizer` loads.

        trained: names of the parameters that training changed.
        """
        raise NotImplementedError


def draw_noise_levels(law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
    """Draw n independent noise levels σ, (n,) float32, on the generator's device.

    If the law is log-normal, ln σ ~ N(mean, std²). If it is a mixture of timesteps, t is drawn by
    `draw_timesteps`, and σ = σ(t) of the linear DDPM schedule.
    """
    if isinstance(law, TimestepMixture):
        return schedule(generator.device)[draw_timesteps(law, n, generator, TIMESTEPS)]
    return (law.mean + law.std * torch.randn(n, generator=generator, device=generator.device)).exp()


def draw_timesteps(law: TimestepMixture, n: int, generator: torch.Generator, steps: int) -> Tensor:
    """Draw n timesteps from a mixture of uniform distributions, (n,) int64 below `steps`.

    Part i of the mixture has the probability wᵢ/Σw, and is uniform on {bᵢ, …, bᵢ₊₁ − 1}. The
    bounds b of `law` refer to a schedule of TIMESTEPS steps, and are scaled to `steps`.
    """
    device = generator.device
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    weights, bounds = mixture(law, device)
    bounds = bounds * (steps / TIMESTEPS)
    part = torch.multinomial(weights, n, replacement=True, generator=generator)
    # float64, because rounding in float32 could raise t to its upper bound
    uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
    return (
        (bounds[part] + uniform * (bounds[part + 1] - bounds[part]))
        .floor()
        .long()
        .clamp(max=steps - 1)
    )


@functools.cache
def mixture(law: TimestepMixture, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the weights, (n,), and the bounds, (n + 1,) float64, of a mixture of n parts.

    Part i lies between bounds i and i + 1. The result is cached, so that the tensors are copied to
    the device only once.
    """
    return torch.tensor(law.weights, device=device), torch.tensor(
        law.bounds, device=device, dtype=torch.float64
    )


@functools.cache
def schedule(device: torch.device) -> Tensor:
    """Compute σ(t) = √((1 − ᾱ(t))/ᾱ(t)), t = 0..999, for the linear DDPM schedule.

    Returns (1000,) float32, rising from 0.01 to about 157.
    """
    betas = torch.linspace(1e-4, 0.02, TIMESTEPS, dtype=torch.float64)  # Ho et al. 2020 (DDPM)
    alphas_cumprod = (1 - betas).cumprod(0)
    return ((1 - alphas_cumprod) / alphas_cumprod).sqrt().float().to(device)
