"""Per-image gradients of a loss, such as that of denoising, each the mean of K draws, and their clipped sum.

Where images have groups, a group takes the place of an image: its K draws show K images of it, picked at random.

Nothing here adds noise or draws images: a `Charge` does.
Source: Dockhorn et al. 2023 (DPDM) for the K draws; METHODS §8 and §10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from sfumato.diffusion.denoiser import Learner
from sfumato.dpsgd.clip import clipped_sum
from sfumato.dpsgd.per_image import PerImage
from sfumato.runtime import distributed
from sfumato.runtime.compute import is_faster
from sfumato.settings.noise_levels import NoiseLevels

GRADIENT_MEMORY = 2**30  # bytes of per-image gradients held at a time on a CPU
IMAGES, MOST_IMAGES = 64, 128  # whose gradients are taken together on a CPU: the more of a large batch
FILLED = 16  # chunks of a large batch: half of the last one is filled up, on average
PASSES = 256  # network passes at a time: more is hardly faster on a CPU


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The randomness of the loss, K draws per image: row i belongs to image i and to no other.

    The sensitivity bound rests on that: taking an image away takes its row away and changes nothing for the others.

    levels: (B, K) noise levels, as the network draws them; noise: (B, K, C, H, W), standard normal; drop: (B, K) bool,
    label hidden; flip: (B, K) bool, mirrored, or None; shift: (B, K, 2) int64, pixels down and right, or None.
    """

    levels: Tensor
    noise: Tensor
    drop: Tensor
    flip: Tensor | None = None
    shift: Tensor | None = None

    def __len__(self) -> int:
        return len(self.levels)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def rows(self, index: slice | Tensor) -> Draws:
        return Draws(**{name: value[index] for name, value in self.tensors().items()})

    def of_each(self, index: slice) -> Draws:
        """Some of the K draws of every image."""
        return Draws(**{name: value[:, index] for name, value in self.tensors().items()})


def draw(
    model: Learner,
    images: Tensor,
    draws: int,
    law: NoiseLevels,
    generator: torch.Generator,
    *,
    label_dropout: float = 0.0,
    flip: bool = False,
    crop: int = 0,
) -> Draws:
    """Fresh draws for a batch, for `model`.

    images: (B, C, H, W) or (B, K, C, H, W), of which only the shape is used; draws: K; crop: largest shift in pixels.
    """
    count, device = len(images), generator.device
    shape = (count, draws)
    return Draws(
        levels=model.draw_levels(law, count * draws, generator).reshape(shape),
        noise=torch.randn(*shape, *images.shape[-3:], generator=generator, device=device),
        drop=torch.rand(shape, generator=generator, device=device) < label_dropout,
        flip=torch.rand(shape, generator=generator, device=device) < 0.5 if flip else None,
        shift=torch.randint(-crop, crop + 1, (*shape, 2), generator=generator, device=device) if crop else None,
    )


def augment(images: Tensor, draws: Draws) -> Tensor:
    """Each image K times, mirrored and shifted as its row says; edges are repeated. (B, C, H, W) to (B, K, C, H, W).

    Of a group its K images, (B, K, C, H, W), each once.
    """
    x = images.contiguous()
    x = x if x.ndim == 5 else x[:, None].expand(-1, draws.levels.shape[1], -1, -1, -1)
    if draws.flip is not None:
        x = torch.where(draws.flip[:, :, None, None, None], x.flip(-1), x)
    if draws.shift is not None:
        for axis, size in ((0, x.shape[-2]), (1, x.shape[-1])):
            # (B, K, size)
            source = (torch.arange(size, device=x.device) - draws.shift[:, :, axis, None]).clamp(0, size - 1)
            source = source[:, :, None, :, None] if axis == 0 else source[:, :, None, None, :]
            x = x.gather(3 + axis, source.expand(x.shape))
    return x


def per_image_gradients(
    model: Learner,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    autocast: bool = False,
) -> dict[str, Tensor]:
    """Gradient of each image's mean loss over its K draws, before any clip.

    parameters: the trained ones by name (`model` gives the others); images: (B, C, H, W) float32 in [0, 1], or latents;
    labels: (B,) int64, where one out of range counts as no label (to fail on it would reveal it); or, of each group, K
    images (B, K, C, H, W) and their labels (B, K). Returns, by name and in the order of `parameters`, (B, *shape)
    float32. Memory: B·P numbers.
    """
    labels = torch.where((labels < 0) | (labels >= model.classes), model.classes, labels)
    labels = torch.where(draws.drop, model.classes, labels if labels.ndim == 2 else labels[:, None])  # (B, K)
    detached = {name: value.detach() for name, value in parameters.items()}
    batch = (augment(images, draws), labels, draws.levels, draws.noise)
    # The cast of a weight must stay inside the transform that made it: no cache.
    with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
        return by_layers(model, detached, *batch) if model.splits_by_image else by_vmap(model, detached, *batch)


def by_layers(model: Learner, parameters: Mapping[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
    """Per-image gradients of a network in which no image sees another: its layers split one backward pass by image.

    batch: images, labels, levels and noise as `Learner.per_image_loss` takes them, each (B, K, ...).
    """
    count = len(batch[0])
    mode = PerImage(parameters, count, model.unfolds)

    def network(*inputs: Tensor) -> Tensor:
        with mode:
            return functional_call(model, dict(parameters), inputs)

    with torch.enable_grad():
        rows = (tensor.transpose(0, 1).flatten(0, 1) for tensor in batch)  # (K·B, ...)
        losses = model.per_image_loss(network, *rows)  # (K·B,)
        loss = losses.view(-1, count).mean(0).sum()  # for each image, the mean over its K draws
        gradients = torch.autograd.grad(loss, list(mode.rows.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def by_vmap(model: Learner, parameters: Mapping[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
    """Per-image gradients of any network: vmap keeps the images apart. batch: as for `by_layers`."""

    def loss(parameters: dict[str, Tensor], *batch: Tensor) -> Tensor:
        def network(*inputs: Tensor) -> Tensor:
            return functional_call(model, parameters, inputs)

        return model.per_image_loss(network, *batch).mean()  # over the K draws

    rows = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))(dict(parameters), *batch)
    return {name: rows[name] for name in parameters}


def mean_gradients(
    model: Learner,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    autocast: bool = False,
    draws_per_pass: int | None = None,
) -> dict[str, Tensor]:
    """As `per_image_gradients`, `draws_per_pass` of the K draws of every image at a time; None: all of them.

    Guarantee: the row of an image is the mean over all of its K draws, which nothing has clipped yet.
    """
    count = draws.levels.shape[1]
    if draws_per_pass is None or draws_per_pass >= count:
        return per_image_gradients(model, parameters, images, labels, draws, autocast)
    total: dict[str, Tensor] = {}
    for part in (slice(start, min(start + draws_per_pass, count)) for start in range(0, count, draws_per_pass)):
        shown, own = images[:, part] if images.ndim == 5 else images, labels[:, part] if labels.ndim == 2 else labels
        rows = per_image_gradients(model, parameters, shown, own, draws.of_each(part), autocast)
        share = (part.stop - part.start) / count
        for name, value in rows.items():
            total[name] = total[name].add_(value, alpha=share) if name in total else value * share
    return total


@torch.no_grad()  # otherwise weights that are not differentiated keep a graph over all images alive
def clipped_gradient_sum(
    model: Learner,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    max_grad_norm: float,
    chunk: int,
    autocast: bool = False,
    factors: Mapping[str, Tensor] | None = None,
    draws_per_pass: int | None = None,
) -> Tensor:
    """Sum over images of their clipped gradients, `chunk` images at a time. Returns (P,) float32; zeros without images.

    images: (B, C, H, W) float32 in [0, 1], any memory format; labels: (B,) int64; of groups (B, K, C, H, W) and (B, K);
    draws: B rows, averaged before the clip; factors: public, by name and of the parameters' shapes; each gradient is
    multiplied by them before the clip; draws_per_pass: draws of an image at a time, None for all.
    Guarantee: one image, or one group, more or less changes the sum by at most `max_grad_norm` in L2.
    """
    if len(draws) != len(images):
        raise ValueError(f"{len(draws)} rows of draws for {len(images)} images: expected one each")
    total = torch.zeros(sum(value.numel() for value in parameters.values()), device=images.device)
    for start in range(0, len(images), chunk):
        # The last chunk is filled up by repeating its last image, and the copies are dropped: matrix kernels round
        # differently for different sizes, and no image's gradient may depend on how many others were drawn.
        index = torch.arange(start, start + chunk, device=images.device)
        count = min(chunk, len(images) - start)
        index = index.clamp(max=len(images) - 1)
        own = draws.rows(index)
        rows = mean_gradients(model, parameters, images[index], labels[index], own, autocast, draws_per_pass)
        if factors is not None:
            rows = {name: value * factors[name].detach() for name, value in rows.items()}
        total += clipped_sum({name: value[:count] for name, value in rows.items()}, max_grad_norm)
    return total


@torch.no_grad()
def choose_precision(
    model: Learner,
    parameters: Mapping[str, Tensor],
    chunk: int,
    draw: Callable[[Tensor], Draws],
    draws_per_pass: int | None = None,
    autocast: bool | None = None,
) -> bool:
    """Choose how gradients are taken on this machine, and return whether in bfloat16, which `autocast` may say already.

    Each choice is timed on blank images: neither the answer nor the time depends on data. On a GPU `model.unfolds` is
    set. Of many processes the first answers for all: no image's gradient may depend on which of them it falls to.
    draws_per_pass: draws of an image at a time, as they will be taken.
    """
    device = next(iter(parameters.values())).device
    images = torch.zeros(chunk, model.channels, model.resolution, model.resolution, device=device)
    labels = torch.zeros(chunk, dtype=torch.int64, device=device)
    draws = draw(images).of_each(slice(draws_per_pass))
    network = (device, images.shape, draws.levels.shape, sum(value.numel() for value in parameters.values()))

    def pays(step: Callable[[bool], object], *what: Hashable) -> bool:
        return distributed.broadcast_object(is_faster(step, (*what, *network), device))

    def gradients(half: bool) -> None:
        per_image_gradients(model, parameters, images, labels, draws, half)

    def unfolding(unfolds: bool) -> None:
        model.unfolds = unfolds
        gradients(autocast is not False)

    model.unfolds = device.type == "cuda" and model.splits_by_image and pays(unfolding, "unfolded", autocast)
    return pays(gradients, "per-image") if autocast is None else autocast


def choose_chunk(parameter_count: int, draws: int, batch: float = math.inf) -> int:
    """Images at a time that are fast on a CPU: at most GRADIENT_MEMORY of gradients and PASSES passes, but at least 1.

    A power of two. `draws` is K, `batch` the expected number of images of a step. `sfumato.dpsgd.memory` takes fewer
    where their activations need too much, and chooses itself on a GPU and for a public model.
    """
    most = min(max(IMAGES, batch / FILLED), MOST_IMAGES)
    limit = min(GRADIENT_MEMORY // (4 * parameter_count), most, max(4, PASSES // draws))
    return 2 ** int(math.log2(limit)) if limit >= 1 else 1
