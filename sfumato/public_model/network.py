"""Public text-to-image latent diffusion models (Stable Diffusion 1.x and 2.x, PixArt) as a `Denoiser`.

Only `network` is trained. The text encoder runs once, when the reference is written (`sfumato.public_model.reference`),
and images come as latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sfumato.compute import bfloat16_is_faster
from sfumato.config import NoiseLevels, TimestepMixture
from sfumato.diffusion.denoiser import Denoiser, Network, Progress
from sfumato.diffusion.noise_levels import draw_noise_levels, draw_timesteps
from sfumato.errors import DataError
from sfumato.public_model.parts import LatentCodec, make_differentiable
from sfumato.public_model.sampler import sample_latents

CONFIG, PROMPTS, TRAINED = "config.json", "prompts.safetensors", "trained.safetensors"
DRAWN = 16  # images at a time


@dataclass(frozen=True)
class Origin:
    """What a network was read from: the folder of its reference, and what opens the model's other parts.

    encoder: what fixes its latents, the weights of the encoder and the image size.
    """

    directory: Path
    encoder: str
    load_codec: Callable[[torch.device], LatentCodec]
    load_scheduler: Callable[[], Any]


class LatentDiffusion(Denoiser):
    """A text-conditional denoiser over latents, with the interface of our own network.

    network: U-Net or transformer of `diffusers`; prompts: (classes + 1, tokens, D), the last for no label; mask:
    (classes + 1, tokens) bool, or None; alphas_cumprod: (T,) ᾱ of the model's own schedule; prediction: "epsilon" or
    "v_prediction"; resolution: side of the latents.
    """

    alphas_cumprod: Tensor
    prompts: Tensor
    mask: Tensor | None

    def __init__(
        self,
        network: Any,
        prompts: Tensor,
        mask: Tensor | None,
        alphas_cumprod: Tensor,
        prediction: str,
        resolution: int,
        image_size: int,
        origin: Origin | None = None,
    ) -> None:
        super().__init__()
        make_differentiable(network)
        self.network = network
        self.prediction, self.resolution, self.image_size = prediction, resolution, image_size
        self.classes, self.channels = len(prompts) - 1, int(network.config.in_channels)
        self.is_transformer = hasattr(network, "transformer_blocks")
        self.sized = bool(getattr(network, "use_additional_conditions", False))
        self.origin = origin
        self.encoder = None if origin is None else origin.encoder
        for name, value in (("prompts", prompts), ("mask", mask), ("alphas_cumprod", alphas_cumprod)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """What the model predicts, (B, c, h, w).

        x: (B, c, h, w) noisy latents; timesteps: (B,); labels: (B,) int64 in 0..classes.
        """
        context = self.prompts[labels]  # (B, tokens, D)
        if not self.is_transformer:
            output = self.network(x, timesteps, encoder_hidden_states=context, return_dict=False)[0]
        else:
            sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
            if self.sized:
                side = x.new_full((len(x), 2), float(self.image_size))
                sizes = {"resolution": side, "aspect_ratio": torch.ones_like(side[:, :1])}
            mask = None if self.mask is None else self.mask[labels].to(x.dtype)
            output = self.network(
                x,
                encoder_hidden_states=context,
                timestep=timesteps,
                encoder_attention_mask=mask,
                added_cond_kwargs=sizes,
                return_dict=False,
            )[0]
        return output[:, : self.channels]  # some models also predict a variance, unused here

    def per_image_loss(self, network: Network, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
        """Mean squared error of the model's own prediction, (B,) float32.

        images: (B, c, h, w), latents; noise: the same; labels, levels: (B,) int64, the latter timesteps.
        x_t = √ᾱ·x + √(1 − ᾱ)·ε; the target is ε, or v = √ᾱ·ε − √(1 − ᾱ)·x.
        Source: Ho et al. 2020; Salimans & Ho 2022 for v.
        """
        alphas_cumprod = self.alphas_cumprod[levels][:, None, None, None]
        image_scale, noise_scale = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
        target = noise if self.prediction == "epsilon" else image_scale * noise - noise_scale * images
        output = network(image_scale * images + noise_scale * noise, levels, labels).float()
        return (output - target).square().mean(dim=(1, 2, 3))

    def draw_levels(self, law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
        """n independent timesteps of the law, (n,) int64, on the generator's device.

        Timesteps: by the mixture, with its bounds stretched from 1000 steps to the model's own number. Log-normal: draw
        σ, then take the first timestep whose √((1 − ᾱ)/ᾱ) is not below it.
        """
        steps = len(self.alphas_cumprod)
        if isinstance(law, TimestepMixture):
            return draw_timesteps(law, n, generator, steps)
        sigma = draw_noise_levels(law, n, generator)
        levels = ((1 - self.alphas_cumprod) / self.alphas_cumprod.clamp(min=1e-12)).sqrt().to(sigma.device)  # rising
        return torch.searchsorted(levels, sigma).clamp(max=steps - 1)

    def draw(
        self,
        labels: Tensor,
        steps: int,
        guidance: float,
        generator: torch.Generator,
        shape: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Images by the library's sampler, decoded and resized to `shape`."""
        origin = self.opened_from()
        device = next(self.parameters()).device
        scheduler, codec = origin.load_scheduler(), origin.load_codec(device)
        channels, height, width = shape or (codec.channels, self.image_size, self.image_size)

        def step(autocast: bool) -> Tensor:
            blank = torch.zeros(min(len(labels), DRAWN), dtype=torch.int64)
            return sample_latents(self, scheduler, blank, 1, guidance, torch.Generator().manual_seed(0), autocast)

        half = device.type == "cuda" and bfloat16_is_faster(step, ("latent sampling", self.resolution), device)
        images = []
        for part in labels.split(DRAWN):
            latents = sample_latents(self, scheduler, part, steps, guidance, generator, half)
            images.append(codec.decode(latents, (channels, height, width)))
            if progress:
                progress(sum(map(len, images)), len(labels))
        return torch.cat(images)

    def save(self, directory: Path, trained: Sequence[str]) -> None:
        """Write the trained parameters, and the reference that they belong to. Other changes of the model are lost."""
        tensors = {name: self.get_parameter(name).detach().cpu().contiguous() for name in trained}
        save_file(tensors, directory / TRAINED)
        for name in (CONFIG, PROMPTS):
            (directory / name).write_bytes((self.opened_from().directory / name).read_bytes())

    def opened_from(self) -> Origin:
        if self.origin is None:
            raise DataError("this network was not read from a reference: run `stage pretrain`, and read what it wrote")
        return self.origin
