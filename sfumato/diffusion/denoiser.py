"""The interface of a denoiser, which training, queries and sampling share; and the laws of its noise levels.

Source: Karras et al. 2022 (EDM) for the log-normal; DP-Diffusion §3.3 for the mixture of timesteps.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.settings.fields import Size, both_sides
from sfumato.settings.noise_levels import NoiseLevels, TimestepMixture

# (D, labels, the variance of the image given its noised form) -> what is added to D; images in about [-1, 1]
Guide = Callable[[Tensor, Tensor, float], Tensor]
Sampler = Callable[[Tensor], Tensor]  # labels, as in `drawing` -> images, (B, C, H, W) float32 in [0, 1], on the CPU
Progress = Callable[[int, int], None]  # done, of how many
TIMESTEPS = 1000


class Denoiser(nn.Module):
    """A class-conditional network that learns to remove noise, from pixels or from latents.

    channels, resolution: of pixels or latents; the resolution is the side of squares, or rows and columns.
    classes: labels are 0..classes-1, and `classes` means no label.
    several: labels are (B, classes) of 0 and 1, and a row with any other entry means no label.
    A network that is only trained needs only `per_image_loss`.
    """

    classes: int
    several: bool = False
    channels: int
    resolution: Size
    # No image sees another in the forward pass, and only layers use weights (`sfumato.dpsgd.per_image`).
    supports_ghost_layers: bool = False
    # Take per-image gradients of convolutions by matrix products: a setting of the machine.
    use_products: bool = False
    # What fixes the latents that it works on (weights of the encoder, image size); None: it works on pixels.
    encoder: str | None = None
    sigma_data: float  # of the preconditioning, where images are drawn by `sfumato.diffusion.sampler`
    at_a_time: int  # images that are drawn together, by all processes

    @property
    def shape(self) -> Shape:
        """(C, H, W) of the pixels or latents."""
        return self.channels, *both_sides(self.resolution)

    @property
    def no_label(self) -> int:
        """The label, or the entries of several, that mean none."""
        return 2 if self.several else self.classes

    def hidden(self, labels: Tensor, hide: Tensor) -> Tensor:
        """Labels, (*,) or (*, classes), without those of the images for which `hide`, (*,) bool, is true."""
        return torch.where(hide[..., None] if self.several else hide, self.no_label, labels)

    def draw_levels(self, law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
        """As `draw_noise_levels`, or what else `per_image_loss` takes for them."""
        return draw_noise_levels(law, n, generator)

    def per_image_loss(self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
        """The loss of denoising each image, (B,) float32.

        images: (B, C, H, W) float32 in [0, 1], or latents; labels: (B,), or (B, classes); levels: (B,); noise:
        (B, C, H, W), standard normal.
        """
        raise NotImplementedError

    def sampler(
        self, steps: int, guidance: float, generator: torch.Generator, shape: Sequence[int] | None, guide: Guide | None
    ) -> Sampler:
        """The function that draws at most `at_a_time` images, under the arguments of `drawing`."""
        raise NotImplementedError

    def drawing(
        self,
        labels: Tensor,
        steps: int,
        guidance: float,
        generator: torch.Generator,
        shape: Sequence[int] | None = None,
        progress: Progress | None = None,
        guide: Guide | None = None,
    ) -> Iterator[Tensor]:
        """One image for each label, (N,) or (N, classes), in parts: (B, C, H, W) float32 in [0, 1], on the CPU.

        steps: of the solver; guidance: g of D + g·(D − D without label); generator: a CPU one, which fixes the images
        up to rounding; shape: (C, H, W) wanted, if the network can give another than its own; guide: a classifier's
        part, for networks that draw pixels.
        """
        sampler = self.sampler(steps, guidance, generator, shape, guide)
        done = 0
        for part in labels.split(self.at_a_time):
            yield sampler(part)
            done += len(part)
            if progress:
                progress(done, len(labels))

    def save(self, directory: Path, trained: Sequence[str]) -> None:
        """Write what `sfumato.release.synthesizer` loads again. trained: the parameters that differ from the start."""
        raise NotImplementedError


def draw_noise_levels(law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
    """n independent noise levels σ of the law, (n,) float32, on the generator's device.

    ln σ ~ N(mean, std²), or σ(t) of the linear DDPM schedule, t as `draw_timesteps` gives it.
    """
    if isinstance(law, TimestepMixture):
        return schedule(generator.device)[draw_timesteps(law, n, generator, TIMESTEPS)]
    return (law.mean + law.std * torch.randn(n, generator=generator, device=generator.device)).exp()


def draw_timesteps(law: TimestepMixture, n: int, generator: torch.Generator, steps: int) -> Tensor:
    """n timesteps, uniform on {lᵢ, …, uᵢ − 1} with probability wᵢ/Σw: (n,) int64 below `steps`.

    The bounds are of TIMESTEPS, and stretched to `steps`.
    """
    device = generator.device
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    weights, bounds = mixture(law, device)
    bounds = bounds * (steps / TIMESTEPS)
    part = torch.multinomial(weights, n, replacement=True, generator=generator)
    # float64, floored: the uniform draw stays below 1, so t stays below its upper bound
    uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
    return (bounds[part] + uniform * (bounds[part + 1] - bounds[part])).floor().long().clamp(max=steps - 1)


@functools.cache
def mixture(law: TimestepMixture, device: torch.device) -> tuple[Tensor, Tensor]:
    """The weights, (n,), and the bounds, (n + 1,) float64, of a law, sent to the device once."""
    return torch.tensor(law.weights, device=device), torch.tensor(law.bounds, device=device, dtype=torch.float64)


@functools.cache
def schedule(device: torch.device) -> Tensor:
    """σ(t) = √((1 − ᾱ)/ᾱ) for t = 0..999 under linear betas. (1000,) float32, rising from 0.01 to about 157."""
    betas = torch.linspace(1e-4, 0.02, TIMESTEPS, dtype=torch.float64)  # Ho et al. 2020 (DDPM)
    alphas_cumprod = (1 - betas).cumprod(0)
    return ((1 - alphas_cumprod) / alphas_cumprod).sqrt().float().to(device)
