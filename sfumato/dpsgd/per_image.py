"""Per-image gradients from one ordinary backward pass.

Every layer returns one gradient of its weight per image. `torch.func.vmap(grad)` computes the same
for any network, but is slower. This module needs a network that keeps images apart: no image may
affect another in the forward pass, and the first dimension of each layer's input must be the batch.

Source: Rochette, Manoel and Tramel 2019, for the weight gradients of a convolution as a grouped
convolution; Opacus (Yousefpour et al. 2021) for weight gradients by matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CHANNELS_PER_GROUP = 16  # With fewer output channels per group, a grouped convolution is slow
ALIGNED = 8  # A GPU reads a row of pixels fast if its offset is a multiple of this
Gradients = tuple[Tensor | None, ...]
Geometry = tuple[list[int], list[int], list[int]]  # stride, padding, dilation


class NoRuleError(RuntimeError):
    """A trained weight is used in a way for which this module has no per-image gradient."""


class PerImage(TorchFunctionMode):
    """A context in which each weight of `weights` gets one gradient per image.

    `rows[name]`, (B, *shape), represents B equal copies of a weight, but needs only the memory of a
    single copy. Differentiate the loss with respect to `rows[name]`. A weight may be used only by
    the functions in RULES. Any other use raises NoRuleError, so that no part of a gradient is lost
    silently.

    weights: trained weights by name;
    images: number of images B. A batch has K·B rows, because the loss is computed for K random
    draws of noise level and noise per image. Row k·B + b is the k-th draw of image b;
    use_products: whether to compute the weight gradients of convolutions by matrix products
    instead of a grouped convolution.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], images: int, use_products: bool = False
    ) -> None:
        super().__init__()
        self.images, self.use_products = images, use_products
        self.rows = {
            name: weight.detach().expand(images, *weight.shape).requires_grad_()
            for name, weight in weights.items()
        }
        # Maps the id of a weight to the weight and its rows.
        # A reference to the weight is kept, so that no other tensor gets its id.
        self.of: dict[int, tuple[Tensor, Tensor]] = {}
        for name, weight in weights.items():
            self.of[id(weight)] = (weight, self.rows[name])

    def rows_of(self, weight: Tensor | None) -> Tensor | None:
        return self.of[id(weight)][1] if id(weight) in self.of else None

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        values = [*args, *kwargs.values()]
        values += [part for value in values if isinstance(value, (list, tuple)) for part in value]
        if not any(id(value) in self.of for value in values):
            return function(*args, **kwargs)
        if function in RULES:
            return RULES[function](self, *args, **kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size):
            name = getattr(function, "__name__", function)
            raise NoRuleError(
                f"per-image gradients do not support the function {name} of a trained weight"
            )
        return result  # a shape or a dtype


def computed(weight: Tensor) -> Tensor:
    """Return the weight in autocast's precision.

    The weight is detached, because gradients are taken with respect to its rows.
    """
    weight, device = weight.detach(), weight.device.type
    if weight.is_meta or not torch.is_autocast_enabled(device):
        return weight
    return weight.to(torch.get_autocast_dtype(device))


# --- layers ---------------------------------------------------------------------------------------


class Layer(torch.autograd.Function):
    """A layer whose weight and bias get one gradient per image."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Linear | Convolution,
        images: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *rows: Any,
    ) -> Tensor:
        """Compute the output.

        kind: the function that the layer computes, with its derivatives;
        rows: rows of the weight, and rows of the bias. None replaces the rows of a weight or bias
        that is not trained.
        """
        ctx.save_for_backward(x, weight)
        ctx.kind, ctx.images = kind, images
        return kind.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        _, _, for_x, _, _, for_weights, for_biases = ctx.needs_input_grad
        kind, images = ctx.kind, ctx.images
        gradient = gradient.contiguous()
        to_x = kind.to_input(gradient, x, weight) if for_x else None
        to_weights = kind.to_weights(gradient, x, weight, images) if for_weights else None
        to_biases = kind.to_biases(gradient, images) if for_biases else None
        return None, None, to_x, None, None, to_weights, to_biases


class Linear:
    output = staticmethod(F.linear)

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    def to_weights(self, gradient: Tensor, x: Tensor, weight: Tensor, images: int) -> Tensor:
        return by_image(gradient, images).mT @ by_image(x, images)

    def to_biases(self, gradient: Tensor, images: int) -> Tensor:
        return by_image(gradient, images).sum(1)


def by_image(x: Tensor, images: int) -> Tensor:
    """Reshape (K·B, ..., n) to (B, K·..., n)."""
    n = x.shape[-1]
    return x.reshape(-1, images, x[0].numel() // n, n).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class Convolution:
    geometry: Geometry
    use_products: bool = False

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self.geometry)

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        stride, padding, dilation = self.geometry
        if (
            gradient.device.type == "cpu"
            and gradient.dtype == torch.bfloat16
            and stride == dilation == [1, 1]
        ):
            # A convolution with the mirrored weight gives the same result, and is faster in oneDNN
            margin = [size - 1 - pad for size, pad in zip(weight.shape[2:], padding, strict=True)]
            if min(margin) >= 0:
                return F.conv2d(gradient, weight.flip(2, 3).transpose(0, 1), None, padding=margin)
        return convolution_backward(gradient, x, weight, self.geometry, 1, [True, False, False])[0]

    def to_weights(self, gradient: Tensor, x: Tensor, weight: Tensor, images: int) -> Tensor:
        take = shifted_weight_gradients if self.use_products else grouped_weight_gradients
        return take(gradient, x, weight, self.geometry, images)

    def to_biases(self, gradient: Tensor, images: int) -> Tensor:
        """Sum (K·B, C, H, W) to (B, C)."""
        return gradient.flatten(2).sum(2).view(-1, images, gradient.shape[1]).sum(0)


class Pointwise(Convolution):
    """A 1×1 convolution, as a matrix product."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.bmm(weight.flatten(1).expand(len(x), -1, -1), x.flatten(2)).unflatten(
            2, x.shape[2:]
        )
        return y if bias is None else y + bias[:, None, None]

    def to_input(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(
            weight.flatten(1).t().contiguous().expand(len(x), -1, -1), gradient.flatten(2)
        ).view(x.shape)

    def to_weights(self, gradient: Tensor, x: Tensor, weight: Tensor, images: int) -> Tensor:
        return (
            torch.bmm(gradient.flatten(2), x.flatten(2).mT).view(-1, images, *weight.shape).sum(0)
        )


def grouped_weight_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, images: int
) -> Tensor:
    """Compute each image's weight gradient as one group of a grouped convolution.

    gradient, x: (K·B, C, H, W), K draws of B images. Returns (B, *weight.shape).
    """
    outputs = weight.shape[0]
    padded_outputs = max(outputs, CHANNELS_PER_GROUP)
    if padded_outputs > outputs:
        gradient = F.pad(gradient, (0, 0, 0, 0, 0, padded_outputs - outputs))
    gradient, x = (
        value.reshape(-1, images * value.shape[1], *value.shape[2:]) for value in (gradient, x)
    )
    shape = weight.new_empty(images * padded_outputs, *weight.shape[1:])  # only the shape is used
    rows = convolution_backward(gradient, x, shape, geometry, images, [False, True, False])[1]
    assert rows is not None  # not None, because the mask requests it
    return rows.unflatten(0, (images, padded_outputs))[:, :outputs]


def shifted_weight_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, images: int
) -> Tensor:
    """Compute the result of `grouped_weight_gradients` by one matrix product per kernel row.

    On a GPU, this is usually faster (see `choose_microbatch`).

    Each product sums over the zero-padded pixels of all draws of an image, and uses one shifted
    copy of the pixels per column of the kernel. Each image has a separate matrix, so no product
    reads another image's pixels, not even multiplied by zero.
    """
    (stride_y, stride_x), (pad_y, pad_x), (dilation_y, dilation_x) = geometry
    outputs, inputs, rows, columns = weight.shape
    height, width = x.shape[2] + 2 * pad_y, x.shape[3] + 2 * pad_x
    width += -width % ALIGNED
    draws = len(x) // images
    pixels = draws * height * width

    lower = dilation_y * (rows - 1) * width  # offset of the last row that the kernel reads
    shifted = x.new_zeros(images, columns, inputs, pixels + lower)
    canvas = shifted[..., :pixels].unflatten(-1, (draws, height, width))[
        ..., pad_y : pad_y + x.shape[2], :
    ]
    for column in range(columns):
        offset = pad_x - dilation_x * column  # first column of the picture in the shifted copy
        target_columns = slice(max(0, offset), offset + x.shape[3])
        canvas[:, column, ..., target_columns] = by_draw(x, images)[
            ..., target_columns.start - offset :
        ]

    slope = gradient.new_zeros(images, outputs, pixels)
    strided_slope = slope.unflatten(-1, (draws, height, width))[..., ::stride_y, ::stride_x]
    strided_slope[..., : gradient.shape[2], : gradient.shape[3]] = by_draw(gradient, images)

    starts = range(0, lower + 1, dilation_y * width)
    windows = shifted.flatten(1, 2)
    products = [torch.bmm(slope, windows[..., start : start + pixels].mT) for start in starts]
    return torch.stack(products, dim=2).unflatten(-1, (columns, inputs)).permute(0, 1, 4, 2, 3)


def by_draw(x: Tensor, images: int) -> Tensor:
    """Reshape (K·B, C, H, W) to (B, C, K, H, W)."""
    return x.unflatten(0, (-1, images)).permute(1, 2, 0, 3, 4)


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, groups: int, wanted: list[bool]
) -> Gradients:
    return torch.ops.aten.convolution_backward.default(
        gradient, x, weight, None, *geometry, False, [0, 0], groups, wanted
    )


class EmbeddingRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = weights.shape
        return weight[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        (index,) = ctx.saved_tensors
        images, entries, size = ctx.shape
        row_index = index.view(-1, images) + entries * torch.arange(images, device=index.device)
        rows = gradient.new_zeros(images * entries, size).index_add_(
            0, row_index.flatten(), gradient
        )
        return None, None, rows.view(ctx.shape)


# --- rules: replacements for PyTorch's functions of a trained weight ------------------------------


def layer(
    mode: PerImage, kind: Linear | Convolution, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    value, offset = computed(weight), None if bias is None else computed(bias)
    rows = mode.rows_of(weight), mode.rows_of(bias)
    return Layer.apply(kind, mode.images, x.to(value.dtype), value, offset, *rows)


def linear(mode: PerImage, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return layer(mode, Linear(), x, weight, bias)


def conv2d(
    mode: PerImage,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
) -> Tensor:
    if groups != 1:
        raise NoRuleError(f"per-image gradients do not support a convolution with {groups} groups")
    if isinstance(padding, str):
        raise NoRuleError(
            f"per-image gradients do not support a convolution with padding={padding!r}: set the "
            "padding as numbers"
        )
    per_axis = [
        [value, value] if isinstance(value, int) else list(value)
        for value in (stride, padding, dilation)
    ]
    geometry: Geometry = (per_axis[0], per_axis[1], per_axis[2])
    is_pointwise = weight.shape[2:] == (1, 1) and geometry == ([1, 1], [0, 0], [1, 1])
    return layer(
        mode,
        Pointwise(geometry) if is_pointwise else Convolution(geometry, mode.use_products),
        x,
        weight,
        bias,
    )


def embedding_rows(
    mode: PerImage, index: Tensor, weight: Tensor, padding_idx=None, max_norm=None, **_: Any
) -> Tensor:
    if index.ndim != 1:
        raise NoRuleError(
            "per-image gradients do not support an embedding of several indices per image"
        )
    if padding_idx is not None or max_norm is not None:
        raise NoRuleError(
            "per-image gradients do not support an embedding with padding_idx or max_norm"
        )
    return EmbeddingRows.apply(index, weight.detach(), mode.rows_of(weight))


def expand(mode: PerImage, weight: Tensor, rows: int, *sizes: int) -> Tensor:
    """Expand a weight over a batch: each draw of an image gets the weight's row for that image."""
    if any(size != -1 for size in sizes) or len(sizes) != weight.ndim or rows % mode.images:
        raise NoRuleError(
            "per-image gradients do not support the expansion of a trained weight along a "
            "dimension other than the batch"
        )
    weight_rows = mode.of[id(weight)][1]
    return weight_rows.expand(rows // mode.images, *weight_rows.shape).flatten(0, 1)


RULES: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    torch.conv2d: conv2d,
    F.embedding: embedding_rows,
    Tensor.expand: expand,
}
