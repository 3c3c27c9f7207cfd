"""The gradient of a random network: a public map whose kernel is a neural tangent kernel."""

import math

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.features.scattering import to_root_norm


class Tangent(nn.Module):
    """Gradient of an untrained network with respect to its weights, scaled to norm √d.

    The network has one hidden layer. (B, C, H, W) -> (B, d), d = width · (C·H·W + 1): the gradient
    of f(x) = Σ a_j · silu(w_j · x) with respect to all w_j and a_j.

    Source: DP-NTK (Yang et al. 2023), with SiLU instead of ReLU, because the gradient of a ReLU
    network is not differentiable.
    """

    width = 16  # number of hidden units

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        pixels = math.prod(shape)
        public = torch.Generator().manual_seed(0)
        inner = torch.randn(pixels, self.width, generator=public) * math.sqrt(2 / pixels)
        self.inner = nn.Buffer(inner, persistent=False)
        self.outer = nn.Buffer(torch.randn(self.width, generator=public), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        hidden = x @ self.inner.to(x)  # (B, width)
        gate = hidden.sigmoid()
        slope = gate * (1 + hidden * (1 - gate)) * self.outer.to(x)
        row = torch.cat([(slope[:, :, None] * x[:, None, :]).flatten(1), hidden * gate], dim=1)
        return to_root_norm(row, 1e-6)
