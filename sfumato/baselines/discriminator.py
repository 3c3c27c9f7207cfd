"""A discriminator whose gradient splits by image: it separates real images of a class from generated ones (DP-GAN)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.diffusion.denoiser import Denoiser
from sfumato.diffusion.objective import to_model_range

COARSEST = 4  # side of its last cells, at most
WIDEST = 4  # times its first width: channels at most
SLOPE = 0.2  # of the leaky ReLU


class Discriminator(Denoiser):
    """Logits of "real", for noisy images and their labels: convolutions, a linear head, and a projection by label.

    It has the loss of each image that DP-SGD asks of a denoiser. Without batch normalisation no image sees another.
    target: 1 if `per_image_loss` is of real images, -1 if it is of generated ones.
    """

    supports_ghost_layers = True
    target = 1

    def __init__(self, resolution: int, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.resolution, self.channels, self.classes = resolution, channels, classes
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(SLOPE)]
        side, wide = resolution, width
        while side > COARSEST:
            following = min(2 * wide, WIDEST * width)
            layers += [nn.Conv2d(wide, following, 3, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
            side, wide = (side + 1) // 2, following
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(wide * side * side, 1)
        self.by_label = nn.Embedding(classes + 1, wide * side * side)
        nn.init.zeros_(self.by_label.weight)

    def forward(self, x: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """x: (B, C, H, W), about [-1, 1]; levels: (B,), not used; labels: (B,), `classes`: none. Returns (B,)."""
        hidden = self.body(x).flatten(1)
        return self.head(hidden).squeeze(1) + (self.by_label(labels) * hidden).sum(1)

    def per_image_loss(self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
        """ln(1 + exp(−target · logit)) of each image, (B,). Shapes as in `Denoiser`."""
        noisy = to_model_range(images) + levels[:, None, None, None] * noise
        return F.softplus(-self.target * self(noisy, levels, labels).float())
