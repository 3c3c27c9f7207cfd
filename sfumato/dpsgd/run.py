"""DP-SGD for the denoiser: per-image gradients, each the mean of K draws, clipped, summed; then noise, Adam and EMA.

The noise multiplier and the sample rate are not known here: a `Charge` draws the images and adds the noise.
Source: Dockhorn et al. 2023 (DPDM) for the K draws; Abadi et al. 2016 for the step; METHODS §8 and §10.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from sfumato.config import Finetune, LogNormal, TimestepMixture
from sfumato.diffusion.ema import EMA
from sfumato.diffusion.objective import draw_noise_levels, per_image_loss
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.per_image import PerImage
from sfumato.precision import bfloat16_is_faster
from sfumato.privacy.noise import secret_generator
from sfumato.public_model.network import Denoiser, LatentDiffusion

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

GRADIENT_MEMORY = 2**30  # bytes of per-image gradients held at a time
IMAGES = 64  # whose gradients are taken together
PASSES = 256  # network passes at a time: more is hardly faster
RUN = 4096  # squares added up in float32
Levels = Callable[[LogNormal | TimestepMixture, int, torch.Generator], Tensor]
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The randomness of the loss, K draws per image: row i belongs to image i and to no other.

    The sensitivity bound rests on that: taking an image away takes its row away and changes nothing for the others.

    sigma: (B, K) noise levels, of a public text-to-image model its timesteps; noise: (B, K, C, H, W), standard normal;
    drop: (B, K) bool, label hidden; flip: (B, K) bool,
    mirrored, or None; shift: (B, K, 2) int64, pixels down and right, or None.
    """

    sigma: Tensor
    noise: Tensor
    drop: Tensor
    flip: Tensor | None = None
    shift: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sigma)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def rows(self, index: slice | Tensor) -> Draws:
        return Draws(**{name: value[index] for name, value in self.tensors().items()})


def draw(
    images: Tensor,
    draws: int,
    law: LogNormal | TimestepMixture,
    generator: torch.Generator,
    *,
    label_dropout: float = 0.0,
    flip: bool = False,
    crop: int = 0,
    levels: Levels = draw_noise_levels,
) -> Draws:
    """Fresh draws for a batch. images: (B, C, H, W), of which only the shape is used; draws: K; crop: largest shift in pixels; levels: draws the law."""
    count, device = len(images), generator.device
    shape = (count, draws)
    return Draws(
        sigma=levels(law, count * draws, generator).reshape(shape),
        noise=torch.randn(*shape, *images.shape[1:], generator=generator, device=device),
        drop=torch.rand(shape, generator=generator, device=device) < label_dropout,
        flip=torch.rand(shape, generator=generator, device=device) < 0.5 if flip else None,
        shift=torch.randint(-crop, crop + 1, (*shape, 2), generator=generator, device=device) if crop else None,
    )


def step_noise(noise_multiplier: float, weights: int, batch: float) -> float:
    """How long the noise of one step is, in clips: σ·√P / batch, by public numbers alone. The mean of clipped gradients is at most 1 long.

    weights: P, how many are trained; batch: expected images of a step. Above 1 a step is mostly noise, whatever the images are.
    """
    return noise_multiplier * math.sqrt(weights) / batch


def levels_of(model: Denoiser) -> Levels:
    """What draws the noise levels of a network: σ for our own, timesteps for a public text-to-image model."""
    return model.draw_levels if isinstance(model, LatentDiffusion) else draw_noise_levels


def loss_of(model: Denoiser) -> Callable[..., Tensor]:
    """(network, images, labels, levels, noise) -> (B,): the denoising loss that the network was made for."""
    return (
        model.per_image_loss
        if isinstance(model, LatentDiffusion)
        else functools.partial(per_image_loss, sigma_data=model.sigma_data)
    )


def augment(images: Tensor, draws: Draws) -> Tensor:
    """Each image K times, mirrored and shifted as its row says; edges are repeated. (B, C, H, W) to (B, K, C, H, W)."""
    x = images.contiguous()[:, None].expand(-1, draws.sigma.shape[1], -1, -1, -1)
    if draws.flip is not None:
        x = torch.where(draws.flip[:, :, None, None, None], x.flip(-1), x)
    if draws.shift is not None:
        for axis, size in ((0, x.shape[-2]), (1, x.shape[-1])):
            source = (torch.arange(size, device=x.device) - draws.shift[:, :, axis, None]).clamp(
                0, size - 1
            )  # (B, K, size)
            source = source[:, :, None, :, None] if axis == 0 else source[:, :, None, None, :]
            x = x.gather(3 + axis, source.expand(x.shape))
    return x


def per_image_gradients(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    autocast: bool = False,
) -> dict[str, Tensor]:
    """Gradient of each image's mean loss over its K draws, before any clip.

    parameters: the trained ones by name, the rest are taken from `model`; images: (B, C, H, W) float32 in [0, 1], or latents; labels: (B,)
    int64, one out of range counts as no label (to fail on it would reveal it). Returns, by name and in the order of `parameters`,
    (B, *shape) float32. Memory: B·P numbers.
    """
    labels = torch.where((labels < 0) | (labels >= model.classes), model.classes, labels)
    labels = torch.where(draws.drop, model.classes, labels[:, None])  # (B, K)
    detached = {name: value.detach() for name, value in parameters.items()}
    batch = (augment(images, draws), labels, draws.sigma, draws.noise)
    # The cast of a weight must stay inside the transform that made it: no cache.
    with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
        return by_layers(model, detached, *batch) if isinstance(model, UNet) else by_vmap(model, detached, *batch)


def by_layers(
    model: UNet, parameters: Mapping[str, Tensor], images: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor
) -> dict[str, Tensor]:
    """Per-image gradients of our own network, in which no image sees another: an ordinary backward pass, split by image in its layers."""
    count = len(images)
    mode = PerImage(parameters, count)

    def network(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        with mode:
            return functional_call(model, dict(parameters), (x, c_noise, labels))

    with torch.enable_grad():
        losses = loss_of(model)(
            network, *(tensor.transpose(0, 1).flatten(0, 1) for tensor in (images, labels, sigma, noise))
        )  # (K·B,)
        loss = losses.view(-1, count).mean(0).sum()  # of each image the mean over its K draws
        return dict(
            zip(parameters, torch.autograd.grad(loss, list(mode.rows.values()), materialize_grads=True), strict=True)
        )


def by_vmap(
    model: Denoiser, parameters: Mapping[str, Tensor], images: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor
) -> dict[str, Tensor]:
    """Per-image gradients of any network: vmap keeps the images apart."""
    of_each = loss_of(model)

    def loss(parameters: dict[str, Tensor], images: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        def network(x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
            return functional_call(model, parameters, (x, c_noise, labels))

        return of_each(network, images, labels, sigma, noise).mean()  # over the K draws

    rows = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))(dict(parameters), images, labels, sigma, noise)
    return {name: rows[name] for name in parameters}


def clipped_sum(rows: Mapping[str, Tensor], max_grad_norm: float) -> Tensor:
    """Σ over images of row · min(1, C/(‖row‖ + 1e-6)), without the rows that hold a NaN or an infinity.

    rows: (B, *shape) float32 by name; row i is all that belongs to image i. Rows that are not finite are overwritten.
    Returns (P,) float32.
    Guarantee: one image more or less changes the sum by at most `max_grad_norm` in L2, whatever its row holds.
    """
    parts = [part.flatten(1) for part in rows.values()]
    norms = torch.stack([squared_norms(part) for part in parts]).sum(0).sqrt()  # (B,)
    finite = norms.isfinite()  # the norm is finite only if all entries are
    scale = torch.where(finite, (max_grad_norm / (norms + 1e-6)).clamp(max=1), 0).float()
    dropped = (~finite).nonzero().flatten()
    for part in parts:
        part.index_fill_(0, dropped, 0)  # not by the scale: infinity times zero is NaN
    return torch.cat([scale @ part for part in parts])


def squared_norms(part: Tensor) -> Tensor:
    """(B, p) float32 to (B,) float64. Added up in short runs: one float32 sum over 10^6 squares would understate a norm."""
    whole = part.shape[1] // RUN * RUN
    runs = torch.linalg.vector_norm(part[:, :whole].unflatten(1, (-1, RUN)), dim=2).double()  # (B, runs)
    rest = torch.linalg.vector_norm(part[:, whole:], dim=1).double()
    return runs.square().sum(1) + rest.square()


@torch.no_grad()  # or weights that are not differentiated would keep a graph over all images alive
def clipped_gradient_sum(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    max_grad_norm: float,
    chunk: int,
    autocast: bool = False,
    factors: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Sum over images of their clipped gradients, `chunk` images at a time. Returns (P,) float32; zeros without images.

    images: (B, C, H, W) float32 in [0, 1], any memory format; labels: (B,) int64; draws: B rows, averaged before the clip;
    factors: public, by name and of the parameters' shapes; each image's gradient is multiplied by them before the clip.
    Guarantee: one image more or less changes the sum by at most `max_grad_norm` in L2.
    """
    if len(draws) != len(images):
        raise ValueError(f"{len(draws)} rows of draws for {len(images)} images: expected one each")
    total = torch.zeros(sum(value.numel() for value in parameters.values()), device=images.device)
    for start in range(0, len(images), chunk):
        # The last chunk is filled up by repeating its last image, and the copies are dropped: matrix kernels round
        # differently for different sizes, and no image's gradient may depend on how many others were drawn.
        index = torch.arange(start, start + chunk, device=images.device)
        count = int((index < len(images)).sum())
        index = index.clamp(max=len(images) - 1)
        rows = per_image_gradients(model, parameters, images[index], labels[index], draws.rows(index), autocast)
        if factors is not None:
            rows = {name: value * factors[name].detach() for name, value in rows.items()}
        total += clipped_sum({name: value[:count] for name, value in rows.items()}, max_grad_norm)
    return total


def choose_chunk(parameter_count: int, draws: int) -> int:
    """Images at a time: at most GRADIENT_MEMORY of per-image gradients and PASSES network passes, but at least 1.

    A power of two. `draws` is K.
    """
    limit = min(GRADIENT_MEMORY // (4 * parameter_count), IMAGES, max(4, PASSES // draws))
    return 2 ** int(math.log2(limit)) if limit >= 1 else 1


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """All entries in the order of the mapping, (P,)."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flatten`: views of `vector` with the names and shapes of `like`."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


class DPSGD:
    """The state of a DP-SGD run: parameters, their average, Adam's moments, the step.

    model: its parameters with `requires_grad` are trained, in place; config: of which noise, batch and sample rate are not
    read; public_batch: the public denominator q·N̄ (never a realised count); label_dropout: as in the warm-up; generator:
    only for tests. Sigma, noise and augmentation draws are secret: under a public seed, the draws of an image would tell its
    place in the batch, and with it whether an image before it is missing.
    """

    def __init__(
        self,
        model: Denoiser,
        config: Finetune,
        *,
        public_batch: float,
        label_dropout: float = 0.1,
        autocast: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not public_batch > 0:
            raise ValueError(f"public_batch={public_batch}: expected the public denominator q·N̄ > 0")
        self.model, self.config, self.public_batch, self.label_dropout = model, config, public_batch, label_dropout
        self.parameters: dict[str, Tensor] = {
            name: value for name, value in model.named_parameters() if value.requires_grad
        }
        if not self.parameters:
            raise ValueError("the model has no parameter to train: all have requires_grad=False")
        self.device = next(iter(self.parameters.values())).device
        self.generator = generator or secret_generator(self.device)
        self.ema = EMA(self.parameters, config.ema)
        size = sum(value.numel() for value in self.parameters.values())
        self.first, self.second = torch.zeros(size, device=self.device), torch.zeros(size, device=self.device)
        self.steps = 0
        self.chunk = config.chunk or choose_chunk(size, config.draws)
        self.autocast = self.measure_autocast() if autocast is None else autocast

    def step(self, charge: Charge) -> dict[str, float]:
        """One step: one Poisson draw, one release. Returns the public row of the training log."""
        return self.update(charge.release(self.gradient_sum(charge), self.config.max_grad_norm))

    def gradient_sum(self, charge: Charge) -> Tensor:
        """Clipped sum over one draw of the charge, (P,): private until released. Zeros for an empty draw."""
        total = torch.zeros_like(self.first)
        for images, labels in charge.batches(size=4 * self.chunk):
            images, labels = images.to(self.device), labels.to(self.device)
            draws = self.draw(images)
            total += clipped_gradient_sum(
                self.model, self.parameters, images, labels, draws, self.config.max_grad_norm, self.chunk, self.autocast
            )
        return total

    @torch.no_grad()
    def update(self, noised: Tensor) -> dict[str, float]:
        """Adam and EMA on a released sum, (P,): post-processing. Returns the public row."""
        self.steps += 1
        gradient = noised.to(self.first) / self.public_batch
        self.first.lerp_(gradient, 1 - ADAM_BETAS[0])
        self.second.lerp_(gradient.square(), 1 - ADAM_BETAS[1])
        first = self.first / (1 - ADAM_BETAS[0] ** self.steps)
        second = self.second / (1 - ADAM_BETAS[1] ** self.steps)
        change = self.config.learning_rate * first / (second.sqrt() + ADAM_EPSILON)
        for value, part in zip(self.parameters.values(), unflatten(change, self.parameters).values(), strict=True):
            value.sub_(part)
        self.ema.update(self.parameters)
        norm = float(torch.linalg.vector_norm(gradient))
        return {"step": self.steps, "learning_rate": self.config.learning_rate, "noised_gradient_norm": norm}

    def draw(self, images: Tensor) -> Draws:
        config = self.config
        return draw(
            images,
            config.draws,
            config.noise_levels,
            self.generator,
            label_dropout=self.label_dropout,
            flip=config.flip,
            crop=config.crop,
            levels=levels_of(self.model),
        )

    def measure_autocast(self) -> bool:
        """Is bfloat16 faster here? Timed on blank images: neither the answer nor the time depends on data."""
        model = self.model
        images = torch.zeros(self.chunk, model.channels, model.resolution, model.resolution, device=self.device)
        labels = torch.zeros(self.chunk, dtype=torch.int64, device=self.device)
        draws = self.draw(images)
        key = ("per-image", self.device, images.shape, self.config.draws, len(self.first))
        return bfloat16_is_faster(
            lambda autocast: per_image_gradients(model, self.parameters, images, labels, draws, autocast),
            key,
            self.device,
        )

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, under names such as `parameters.conv_in.weight`: copies, on the CPU."""
        state: dict[str, Tensor] = {f"parameters.{name}": value for name, value in self.parameters.items()}
        state |= {f"ema.{name}": value for name, value in self.ema.average.items()}
        state |= {"adam.first": self.first, "adam.second": self.second, "step": torch.tensor(self.steps)}
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state()`. The draws are fresh. Raises ValueError when the state is of another model."""
        shapes = {name: value.shape for name, value in self.state().items()}
        if {name: value.shape for name, value in state.items()} != shapes:
            odd = sorted(
                name
                for name in shapes.keys() | state.keys()
                if name not in state or state[name].shape != shapes.get(name)
            )
            raise ValueError(
                f"the checkpoint is of another model: {', '.join(odd[:5])} missing, unknown or of another shape"
            )
        for name, value in self.parameters.items():
            value.copy_(state[f"parameters.{name}"])
            self.ema.average[name].copy_(state[f"ema.{name}"])
        self.first.copy_(state["adam.first"])
        self.second.copy_(state["adam.second"])
        self.steps = self.ema.steps = int(state["step"])
