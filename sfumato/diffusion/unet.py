"""Class-conditional U-Net: the network inside the denoiser.

`diffusion.objective` adds the preconditioning. The network meets the conditions of
`sfumato.dpsgd.per_image`: no image affects another, the first dimension of every activation is the
batch, and trained weights are used only by functions in its RULES. An attention block has four
plain `nn.Linear` layers, which LoRA can replace by name.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.diffusion.denoiser import Denoiser, Sampler, Sampling
from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.sampler import sample
from sfumato.privacy.rows import label_rows
from sfumato.runtime import distributed
from sfumato.runtime.compute import prefers_bfloat16
from sfumato.settings.fields import Size, size_of
from sfumato.settings.training import Architecture, attention_heads
from sfumato.storage.weights import load_network, save_network

# On CUDA, PyTorch's derivative of group normalisation fails if a batch has more groups than this
MOST_GROUPS = 65_535
# Maximum numbers of pixels and of images that one process draws at a time, by device.
# Pixels are counted after the pixel-unshuffle stem.
DRAWN_TOGETHER = {"cpu": (2**17, 256), "cuda": (2**19, 512)}


class GroupNorm(nn.Module):
    """Group normalisation, followed by a scale and an offset for each channel.

    The scales and offsets are either learned, or passed to `forward` for each image.
    """

    def __init__(self, channels: int, affine: bool = True) -> None:
        super().__init__()
        self.groups = math.gcd(channels // 4, 32)  # a group has 4 channels or more
        self.channels = channels
        self.affine = affine
        if affine:
            self.weight = nn.Parameter(torch.ones(channels))
            self.bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        """Normalise x, (B, C, H, W). scale, shift: (B, C), to replace the learned values."""
        if scale is None or shift is None:
            scale = self.weight.expand(len(x), -1)
            shift = self.bias.expand(len(x), -1)
        max_batch = MOST_GROUPS // self.groups
        if len(x) <= max_batch or not x.is_cuda:
            return normalised(x, self.groups, scale, shift)
        parts = zip(x.split(max_batch), scale.split(max_batch), shift.split(max_batch), strict=True)
        return torch.cat(
            [normalised(part, self.groups, *modulation) for part, *modulation in parts]
        )


def normalised(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise groups, then scale and shift each image. x: (B, C, H, W); scale, shift: (B, C)."""
    # All images become channels of a single image.
    # In this form, the kernel also applies the scale and the shift, and computes their gradients.
    flat = x.reshape(1, -1, x[0, 0].numel())
    scale, shift = (value.flatten().to(x.dtype) for value in (scale, shift))
    # autocast would copy to float32, which is unnecessary: the kernel sums in float32 anyway
    with torch.autocast("cuda", enabled=False):
        return F.group_norm(flat, len(x) * groups, scale, shift).view(x.shape)


class Block(nn.Module):
    """Residual block.

    The embedding of noise level and labels scales and shifts the result of the second
    normalisation.
    """

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.modulation = nn.Linear(embedding, 2 * outputs)
        # No learned scale and offset are needed, because the modulation has a bias
        self.norm2 = GroupNorm(outputs, affine=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        zero(self.conv2)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """Apply the block. x: (B, inputs, H, W); embedding: (B, E). Returns (B, outputs, H, W)."""
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.modulation(embedding).chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h, 1 + scale, shift)))
        return (self.shortcut(x) + h) * math.sqrt(0.5)  # the factor preserves the variance


class Attention(nn.Module):
    """Residual self-attention over the pixels of one level."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = attention_heads(channels)
        self.norm = GroupNorm(channels)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))
        zero(self.out)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the pixels. x: (B, C, H, W)."""
        tokens = self.norm(x).flatten(2).transpose(1, 2).contiguous()  # (B, H*W, C)
        projected = (project(tokens) for project in (self.q, self.k, self.v))
        # (B, heads, H*W, d)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected)
        if q.is_cuda:  # the fused kernel stores no matrix of H*W · H*W scores
            attention_output = F.scaled_dot_product_attention(q, k, v)
        # On a CPU, fused attention would take ten times as long for so few pixels
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            attention_output = scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
        tokens = self.out(attention_output.transpose(1, 2).flatten(2))  # (B, H*W, C)
        return (x + tokens.transpose(1, 2).contiguous().view(x.shape)) * math.sqrt(0.5)


class Level(nn.Module):
    """One step down, in the middle or up: a residual block, with attention at some levels."""

    def __init__(self, inputs: int, outputs: int, embedding: int, attention: bool) -> None:
        super().__init__()
        self.block = Block(inputs, outputs, embedding)
        self.attention = Attention(outputs) if attention else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.attention(self.block(x, embedding))


class UNet(Denoiser):
    """U-Net F(x; c_noise, label) of the EDM denoiser.

    Raises ConfigError if sizes do not fit together.

    resolution, channels: size of the images;
    classes: see `Denoiser`;
    architecture: level l (0 is the finest) has width · multipliers[l] channels. If the coarsest
    level has self-attention, so has the first block between the paths down and up. With
    unshuffle=u, the network works on channels · u² channels at resolution / u;
    extra_classes: number of additional labels for public classes. Label classes+1+j means the j-th
    public class (see `drop_extra_classes`);
    several: see `Denoiser`. The embeddings of an image's labels are added up and divided by the
    square root of their number. All images that have none of the labels share another embedding.
    """

    supports_ghost_layers = True
    sigma_data = 0.5

    def __init__(
        self,
        resolution: Size,
        channels: int,
        classes: int,
        architecture: Architecture = Architecture(),
        extra_classes: int = 0,
        several: bool = False,
    ) -> None:
        super().__init__()
        architecture.check_sizes(resolution)
        width = architecture.width
        multipliers = architecture.multipliers
        attention = architecture.attention
        self.resolution = size_of(resolution)
        self.channels = channels
        self.classes = classes
        self.several = several
        self.architecture = architecture
        self.extra_classes = extra_classes
        embedding = 4 * width
        self.noise = nn.Sequential(
            nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.label: nn.Linear | nn.Embedding = (
            nn.Linear(classes + 1, embedding, bias=False)
            if several
            else nn.Embedding(classes + 1, embedding)
        )
        nn.init.normal_(self.label.weight, std=0.5)

        folded = channels * architecture.unshuffle**2
        sizes = [
            (width * multiplier, level in attention) for level, multiplier in enumerate(multipliers)
        ]
        levels = [size for size in sizes for _ in range(architecture.blocks)]
        current = levels[0][0]
        self.conv_in = nn.Conv2d(folded, current, 3, padding=1)
        self.down = nn.ModuleList()  # finest level first, with `blocks` modules per level
        for size, attends in levels:
            self.down.append(Level(current, size, embedding, attends))
            current = size
        self.middle = nn.ModuleList(
            Level(current, current, embedding, attends) for attends in (levels[-1][1], False)
        )
        # Coarsest level first. Each module also takes the output of its counterpart in `down`
        self.up = nn.ModuleList()
        for size, attends in reversed(levels):
            self.up.append(Level(current + size, size, embedding, attends))
            current = size
        self.norm_out = GroupNorm(current)
        self.conv_out = nn.Conv2d(current, folded, 3, padding=1)
        zero(self.conv_out)
        # Created last, so that other weights get the same initial values as without extra classes
        if extra_classes:
            self.label = label_table(
                [self.label.weight, 0.5 * torch.randn(extra_classes, embedding)]
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `build_unet` that rebuild the network, without its extra classes."""
        arguments = {
            "resolution": self.resolution,
            "channels": self.channels,
            "classes": self.classes,
            "sigma_data": self.sigma_data,
            **self.architecture.model_dump(mode="json", include={*Architecture.model_fields}),
        }
        if self.several:
            arguments["several"] = True
        return arguments

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        """Compute F, (B, C, H, W).

        x: (B, C, H, W);
        c_noise: (B,), ln σ / 4;
        labels: (B,) in 0..classes+extra_classes, or (B, classes): see `Denoiser`.
        """
        if self.several:
            labels_known = ((labels == 0) | (labels == 1)).all(dim=1, keepdim=True)
            # (B, classes + 1), zeros if the labels are unknown
            labels = (label_rows(labels, self.classes) * labels_known).to(c_noise)
        # (B, E)
        embedding = F.silu(
            self.noise(fourier_features(c_noise, self.architecture.width)) + self.label(labels)
        )
        x = self.conv_in(F.pixel_unshuffle(x, self.architecture.unshuffle))
        skips = []
        for index, level in enumerate(self.down):
            if index and index % self.architecture.blocks == 0:
                x = halve(x)
            x = level(x, embedding)
            skips.append(x)
        for level in self.middle:
            x = level(x, embedding)
        for level in self.up:
            skip = skips.pop()
            if x.shape[2:] != skip.shape[2:]:
                x = double(x, skip.shape[2:])
            x = level(torch.cat([x, skip.to(x.dtype)], dim=1), embedding)
        x = self.conv_out(F.silu(self.norm_out(x)))
        return F.pixel_shuffle(x, self.architecture.unshuffle)

    def per_image_loss(
        self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor
    ) -> Tensor:
        return per_image_loss(self, images, labels, levels, noise, self.sigma_data)

    @property
    def at_a_time(self) -> int:  # type: ignore[override]
        """Number of images to draw at a time. Larger batches take more memory, but save no time."""
        max_pixels, max_images = DRAWN_TOGETHER.get(
            self.conv_in.weight.device.type, DRAWN_TOGETHER["cpu"]
        )
        stem_pixels = math.prod(side // self.architecture.unshuffle for side in self.shape[1:])
        return distributed.world_size() * max(1, min(max_images, max_pixels // stem_pixels))

    def sampler(self, sampling: Sampling, generator: torch.Generator) -> Sampler:
        """Return a function that draws images by Heun's solver.

        The function computes in bfloat16 if `prefers_bfloat16` returns true for the network. The
        images have the network's own shape; `sampling.shape` is ignored.
        """
        autocast = distributed.broadcast_object(prefers_bfloat16(self))

        def draw(labels: Tensor) -> Tensor:
            return sample(
                self, labels, sampling.steps, sampling.guidance, generator, autocast, sampling.guide
            )

        return draw

    def save(self, directory: Path, trained: Sequence[str] = ()) -> None:
        """Write all weights, not only those in `trained`.

        Call `drop_extra_classes` before this.
        """
        save_network(self, self.arguments, directory)


def zero(layer: nn.Conv2d | nn.Linear) -> None:
    """Set the last layer of a residual branch to zero, so that the branch starts at zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


def label_table(rows: Sequence[Tensor]) -> nn.Embedding:
    """Build a trainable embedding table by stacking `rows`, without random draws."""
    return nn.Embedding.from_pretrained(torch.cat([part.detach() for part in rows]), freeze=False)


def drop_extra_classes(model: UNet) -> UNet:
    """Remove the label rows of public classes from `model`, in place, and return the model.

    Call this after `ema_model`, which needs all rows.
    """
    if model.extra_classes:
        requires_grad = model.label.weight.requires_grad
        model.label = label_table([model.label.weight[: model.classes + 1]])
        model.label.weight.requires_grad_(requires_grad)
        model.extra_classes = 0
    return model


def fourier_features(c_noise: Tensor, size: int) -> Tensor:
    """Compute sines and cosines of c_noise = ln σ / 4: (B,) -> (B, size).

    The frequencies form a geometric sequence from 1/4 to 8 turns per unit of c_noise.
    """
    frequencies = 2 * math.pi * torch.logspace(-2, 3, size // 2, base=2.0, device=c_noise.device)
    phase = c_noise[:, None] * frequencies
    return torch.cat([phase.cos(), phase.sin()], dim=1) * math.sqrt(2)


def halve(x: Tensor) -> Tensor:
    """Average blocks of 2×2 pixels. If a side is odd, the blocks at its end are smaller.

    (B, C, H, W) -> (B, C, ceil(H/2), ceil(W/2)).
    """
    height, width = x.shape[2:]
    if height % 2 or width % 2:
        return F.avg_pool2d(x, 2, ceil_mode=True)  # 7 -> 4, for example
    rows = x.reshape(-1, 2 * width) @ pairs(width // 2, x) / 4
    return rows.view(*x.shape[:2], height // 2, width // 2)


def double(x: Tensor, sides: Sequence[int]) -> Tensor:
    """Double the sides by repeating each pixel, then crop them to `sides`, such as 4 -> 8 -> 7."""
    height, width = x.shape[2:]
    rows = x.reshape(-1, width) @ pairs(width, x).t()
    return rows.view(*x.shape[:2], 2 * height, 2 * width)[:, :, : sides[0], : sides[1]]


def pairs(width: int, like: Tensor) -> Tensor:
    """Return a matrix, (4·width, width), that sums blocks of 2×2 pixels.

    Two successive rows of 2·width pixels, times this matrix, give the `width` sums. On a CPU, this
    product and its derivative are many times faster than sums over 2×2 windows.
    """
    return (
        torch.eye(width, dtype=like.dtype, device=like.device).repeat_interleave(2, 0).repeat(2, 1)
    )


def build_unet(
    resolution: Size,
    channels: int,
    classes: int,
    sigma_data: float = UNet.sigma_data,
    several: bool = False,
    **architecture: object,
) -> UNet:
    """Build a network from `UNet.arguments`."""
    network = Architecture.model_validate(architecture)
    model = UNet(resolution, channels, classes, network, several=several)
    model.sigma_data = sigma_data
    return model


def load_model(directory: Path) -> UNet:
    """Load the network that `UNet.save` wrote.

    Raises DataError if files are missing or do not match.
    """
    return load_network(directory, build_unet, "pretrain")
