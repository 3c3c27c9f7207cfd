"""What a network must answer for, so that training, queries and drawing need not know which one it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.diffusion.noise_levels import draw_noise_levels
from sfumato.diffusion.sampler import Guide
from sfumato.settings.noise_levels import NoiseLevels

Network = Callable[..., Tensor]  # (x, level, labels) -> what the network predicts
Sampler = Callable[[Tensor], Tensor]  # labels, (B,) -> images, (B, C, H, W) float32 in [0, 1], on the CPU
Progress = Callable[[int, int], None]  # done, of how many


class Learner(nn.Module, ABC):
    """A class-conditional network with a loss of each image: what DP-SGD trains.

    channels, resolution: of what it works on; classes: labels are 0..classes-1, and `classes` means no label.
    """

    classes: int
    channels: int
    resolution: int
    # No image sees another in the forward pass, and weights are used by layers alone (`sfumato.dpsgd.per_image`).
    splits_by_image: bool = False
    # How the per-image gradients of its convolutions are taken then: a setting of the machine.
    unfolds: bool = False

    def draw_levels(self, law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
        """n independent noise levels of the law, (n,), on the generator's device, as `per_image_loss` takes them: σ."""
        return draw_noise_levels(law, n, generator)

    @abstractmethod
    def per_image_loss(self, network: Network, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
        """The loss of each image, (B,) float32: of a denoiser, that of denoising it.

        network: this one, perhaps with other weights; images: (B, C, H, W) float32 in [0, 1], or latents; labels,
        levels: (B,); noise: (B, C, H, W), standard normal.
        """


class Denoiser(Learner):
    """A class-conditional network that learns to remove noise, from pixels or from latents."""

    # What fixes the latents that it works on (weights of the encoder, image size); None: it works on pixels.
    encoder: str | None = None
    at_a_time: int  # images that are drawn together, by all processes

    @abstractmethod
    def sampler(
        self, steps: int, guidance: float, generator: torch.Generator, shape: Sequence[int] | None, guide: Guide | None
    ) -> Sampler:
        """What draws some images, as `draw` asks. It is called with `at_a_time` labels at most."""

    def draw(
        self,
        labels: Tensor,
        steps: int,
        guidance: float,
        generator: torch.Generator,
        shape: Sequence[int] | None = None,
        progress: Progress | None = None,
        guide: Guide | None = None,
    ) -> Tensor:
        """One image for each label: (N, C, H, W) float32 in [0, 1], on the CPU.

        steps: of the solver; guidance g: D + g·(D − D without label); generator: a CPU one, which fixes the images up
        to rounding; shape: (C, H, W) wanted, where the network can give others than its own; progress: images done, of
        how many; guide: a classifier's part, for networks that draw pixels.
        """
        sampler = self.sampler(steps, guidance, generator, shape, guide)
        images: list[Tensor] = []
        for part in labels.split(self.at_a_time):
            images.append(sampler(part))
            if progress:
                progress(sum(map(len, images)), len(labels))
        return torch.cat(images)

    @abstractmethod
    def save(self, directory: Path, trained: Sequence[str]) -> None:
        """Write what `sfumato.release.synthesizer` loads again. trained: the parameters that differ from the start."""
