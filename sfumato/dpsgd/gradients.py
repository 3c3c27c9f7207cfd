"""Per-image gradients of a loss, and their clipped sum.

The gradient of an image is the mean over K draws of noise level and noise. A `Charge` adds the
noise that protects privacy. If images have groups, such as all images of one person, the unit is a
group instead of an image. The K draws of a group use K of its images, picked at random with
replacement.

Source: Dockhorn et al. 2023 (DPDM) for the K draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.clip import clipped_sum
from sfumato.dpsgd.per_image import PerImage
from sfumato.settings.noise_levels import NoiseLevels


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The randomness of the loss, K draws per image.

    Row i belongs to image i only, as the sensitivity bound requires.

    levels: (B, K), noise levels, as the network's loss expects them;
    noise: (B, K, C, H, W), standard normal;
    drop: (B, K) bool, true if the label is hidden.
    """

    levels: Tensor
    noise: Tensor
    drop: Tensor

    def rows(self, index: slice | Tensor) -> Draws:
        return Draws(**{name: value[index] for name, value in vars(self).items()})


@dataclass(frozen=True)
class Microbatch:
    """The part of a batch that passes through the network at once.

    size: number of images;
    draws: number of draws per image; None for all K;
    autocast: whether to compute in bfloat16.
    """

    size: int
    draws: int | None = None
    autocast: bool = False


def draw(
    model: Denoiser,
    images: Tensor,
    draws: int,
    law: NoiseLevels,
    generator: torch.Generator,
    *,
    label_dropout: float = 0.0,
) -> Draws:
    """Draw fresh randomness for a batch.

    images: (B, C, H, W) or (B, K, C, H, W); only the shape is used;
    draws: K.
    """
    shape = (len(images), draws)
    device = generator.device
    return Draws(
        levels=model.draw_levels(law, len(images) * draws, generator).reshape(shape),
        noise=torch.randn(*shape, *images.shape[-3:], generator=generator, device=device),
        drop=torch.rand(shape, generator=generator, device=device) < label_dropout,
    )


def per_draw(images: Tensor, draws: Draws) -> Tensor:
    """Return each draw's image, (B, K, C, H, W): one image K times, or the K images of a group."""
    images = images.contiguous()
    if images.ndim == 5:
        return images
    return images[:, None].expand(-1, draws.levels.shape[1], -1, -1, -1)


def per_image_gradients(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    autocast: bool = False,
    draws_per_pass: int | None = None,
) -> dict[str, Tensor]:
    """Compute the gradient of each image's mean loss over its K draws, before clipping.

    parameters: trained parameters by name; all others are taken from `model`;
    images: (B, C, H, W) float32 in [0, 1], or latents; with groups, K images of each group,
    (B, K, C, H, W);
    labels: (B,) or (B, K) int64; with several labels, (B, classes) or (B, K, classes). A label out
    of range is treated as no label, because an error would reveal it;
    draws_per_pass: number of draws per image in one pass of the network; None for all K.

    Returns (B, *shape) float32 by name, in the order of `parameters`.
    """
    if not model.several:
        labels = model.hidden(labels, (labels < 0) | (labels >= model.classes))
    # (B, K, ...)
    labels = model.hidden(
        labels if labels.ndim == 2 + model.several else labels[:, None], draws.drop
    )
    batch = (per_draw(images, draws), labels, draws.levels, draws.noise)  # each (B, K, ...)
    take = by_layers if model.supports_ghost_layers else by_vmap
    count = draws.levels.shape[1]
    total: dict[str, Tensor] = {}
    # Autocast's cache is off. Otherwise, a weight that was converted inside one vmap or grad would
    # be reused in another.
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
        if draws_per_pass is None or draws_per_pass >= count:
            return take(model, parameters, *batch)
        for part in zip(*(tensor.split(draws_per_pass, dim=1) for tensor in batch), strict=True):
            share = part[0].shape[1] / count
            for name, value in take(model, parameters, *part).items():
                total[name] = (
                    total[name].add_(value, alpha=share) if name in total else value * share
                )
    return total


class Losses(nn.Module):
    """A module with `per_image_loss` of a model as its forward pass, for `functional_call`."""

    def __init__(self, model: Denoiser) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        return self.model.per_image_loss(*batch)


def losses_at(model: Denoiser, parameters: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
    """Compute `model.per_image_loss` of a batch, with `parameters` instead of the model's own."""
    return functional_call(
        Losses(model), {f"model.{name}": value for name, value in parameters.items()}, batch
    )


def by_layers(
    model: Denoiser, parameters: Mapping[str, Tensor], *batch: Tensor
) -> dict[str, Tensor]:
    """Compute per-image gradients in one backward pass for all images (see `PerImage`).

    No image may affect another in the network. Raises ValueError for parameters that do not belong
    to the model.
    """
    if any(model.get_parameter(name) is not value for name, value in parameters.items()):
        raise ValueError("`parameters` must be parameters of the model")
    count = len(batch[0])
    rows = [tensor.transpose(0, 1).flatten(0, 1) for tensor in batch]  # (K·B, ...)
    with torch.enable_grad():
        with PerImage(parameters, count, model.use_products) as mode:
            losses = model.per_image_loss(*rows)  # (K·B,)
        loss = losses.view(-1, count).mean(0).sum()  # mean over each image's K draws
        gradients = torch.autograd.grad(loss, list(mode.rows.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def by_vmap(model: Denoiser, parameters: Mapping[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
    """Compute per-image gradients of any network with vmap, which separates the images."""

    def loss(parameters: dict[str, Tensor], *batch: Tensor) -> Tensor:
        return losses_at(model, parameters, *batch).mean()  # mean over the K draws

    detached = {name: value.detach() for name, value in parameters.items()}
    rows = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))(detached, *batch)
    return {name: rows[name] for name in parameters}


def number_of_weights(parameters: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in parameters.values())


# If gradients were enabled, weights that require gradients but are not in `parameters` would keep a
# graph of all images in memory
@torch.no_grad()
def clipped_gradient_sum(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    max_grad_norm: float,
    microbatch: Microbatch,
) -> Tensor:
    """Sum the clipped gradients over images, one microbatch at a time.

    images, labels, draws: see `per_image_gradients`; B may be 0.

    Returns (P,) float64.

    Guarantee: adding or removing one image or one group changes the sum by at most `max_grad_norm`
    in L2, for any number of labels per image.
    """
    if len(draws.levels) != len(images):
        raise ValueError(
            f"{len(draws.levels)} rows of draws for {len(images)} images: expected one row per "
            "image"
        )
    total = torch.zeros(number_of_weights(parameters), dtype=torch.float64, device=images.device)
    for start in range(0, len(images), microbatch.size):
        # Fill up the last microbatch with copies of its last image, and drop the copies' gradients.
        # Then all microbatches have one size. Matrix kernels round differently for other sizes, but
        # an image's gradient must not depend on the number of other images.
        index = torch.arange(start, start + microbatch.size, device=images.device).clamp(
            max=len(images) - 1
        )
        count = min(microbatch.size, len(images) - start)
        batch = images[index], labels[index], draws.rows(index)
        rows = per_image_gradients(model, parameters, *batch, microbatch.autocast, microbatch.draws)
        total += clipped_sum({name: value[:count] for name, value in rows.items()}, max_grad_norm)
    return total
