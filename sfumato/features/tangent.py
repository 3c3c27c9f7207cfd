"""The gradient of a random network: a public map of an image whose inner products are a neural tangent kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape

WIDTH, SEED = 16, 0  # hidden units, and the public seed of the weights


class Tangent(nn.Module):
    """What a network with one hidden layer, as initialised, answers to a change of each weight, of norm √d.

    (B, C, H, W) -> (B, d), d = WIDTH · (pixels + 1): the gradient of f(x) = Σ a_j · silu(w_j · x) by all w_j and a_j.
    Source: DP-NTK (Yang et al. 2023), with SiLU instead of ReLU, whose gradient has no gradient.
    """

    inner: Tensor
    outer: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        pixels, public = math.prod(shape), torch.Generator().manual_seed(SEED)
        inner = torch.randn(pixels, WIDTH, generator=public) * math.sqrt(2 / pixels)
        self.register_buffer("inner", inner, persistent=False)
        self.register_buffer("outer", torch.randn(WIDTH, generator=public), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        hidden = x @ self.inner.to(x)  # (B, WIDTH)
        gate = hidden.sigmoid()
        slope = gate * (1 + hidden * (1 - gate)) * self.outer.to(x)
        row = torch.cat([(slope[:, :, None] * x[:, None, :]).flatten(1), hidden * gate], dim=1)
        return row * (math.sqrt(row.shape[1]) / (torch.linalg.vector_norm(row, dim=1, keepdim=True) + 1e-6))
