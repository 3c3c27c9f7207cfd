"""Draw latents of a public text-to-image model with the library's own schedulers and classifier-free guidance."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sfumato.diffusion.sampler import with_guidance

if TYPE_CHECKING:
    from sfumato.text_to_image.network import LatentDiffusion


@torch.no_grad()
def sample_latents(
    model: LatentDiffusion,
    scheduler: Any,
    labels: Tensor,
    steps: int,
    guidance: float,
    generator: torch.Generator,
    autocast: bool = False,
) -> Tensor:
    """One latent for each label.

    scheduler: of `diffusers`; labels: (B,) int64; steps: of the scheduler; guidance: g in ε + g·(ε − ε_no label), 0 for
    none (the library's guidance_scale is g + 1); generator: a CPU one, which fixes the latents; autocast: run the
    network in bfloat16.
    Returns (B, c, h, w) float32 on the model's device.
    """
    device = next(model.parameters()).device
    shape = (model.channels, model.resolution, model.resolution)
    labels = labels.to(device)
    scheduler.set_timesteps(steps, device=device)
    # one at a time, so that the k-th latent does not depend on the batch size
    start = torch.stack([torch.randn(shape, generator=generator) for _ in labels])
    x = start.to(device) * float(scheduler.init_noise_sigma)
    own = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            output = guided(model, scaled, t, labels, guidance).float()
        x = scheduler.step(output, t, x, return_dict=False, **own)[0]
    return x


def guided(model: LatentDiffusion, x: Tensor, t: Tensor, labels: Tensor, guidance: float) -> Tensor:
    """ε + g·(ε − ε_no label)."""
    return with_guidance(lambda x, labels: model(x, t.expand(len(x)), labels), x, labels, model.classes, guidance)
