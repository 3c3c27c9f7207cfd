"""Small runs of DP-SGD, and checks for any network with gradients that are clipped per image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import CLASSES, GivenCharge, drawn_images
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from sfumato.diffusion.denoiser import Denoiser
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.gradients import Draws, Microbatch, clipped_gradient_sum, per_image_gradients
from sfumato.dpsgd.run import State, fine_tune, step
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.training import Architecture

CLIP = 1e-4  # far below any gradient, so that every image is clipped
Named = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor, Draws]  # images, labels, and their draws


def matrix(
    model: Denoiser, parameters: Named, images: Tensor, labels: Tensor, drawn: Draws
) -> Tensor:
    """Return the per-image gradients as the rows of one matrix, (B, P)."""
    rows = per_image_gradients(model, parameters, images, labels, drawn)
    return torch.cat([part.flatten(1) for part in rows.values()], dim=1)


def check_rows(
    model: Denoiser,
    parameters: Named,
    batch: Batch,
    shown: Callable[[int], Tensor],
    error: float = 1e-4,
) -> None:
    """Check that each image's gradient is the gradient of its own mean loss over its draws.

    shown: function from the number of an image to its label in each draw.
    """
    (images, _, drawn), rows = batch, matrix(model, parameters, *batch)
    for i in range(len(images)):
        copies = images[i].expand(drawn.levels.shape[1], -1, -1, -1)
        loss = model.per_image_loss(copies, shown(i), drawn.levels[i], drawn.noise[i]).mean()
        expected = parameters_to_vector(torch.autograd.grad(loss, list(parameters.values())))
        assert torch.linalg.vector_norm(rows[i] - expected) < error * torch.linalg.vector_norm(
            expected
        )


def check_clip(
    model: Denoiser,
    parameters: Named,
    batch: Batch,
    clip: float,
    chunk: int,
    autocast: bool = False,
) -> Tensor:
    """Check that each image moves the sum by the clip, and by no more. Returns the sum of all.

    The gradient of each image must be longer than twice the clip.
    """
    (images, labels, drawn), rows = batch, matrix(model, parameters, *batch)
    assert rows.norm(dim=1).min() > 2 * clip

    def total(kept: slice | Tensor) -> Tensor:
        rest = images[kept], labels[kept], drawn.rows(kept)
        return clipped_gradient_sum(
            model, parameters, *rest, clip, Microbatch(chunk, autocast=autocast)
        )

    whole = total(slice(None))
    assert whole.dtype == torch.float64
    for i in range(len(images)):
        moved = float(torch.linalg.vector_norm(whole - total(torch.arange(len(images)) != i)))
        assert 0.95 * clip < moved <= clip
    return whole


def trainer(seed: int = 0, **options: Any) -> State:
    torch.manual_seed(seed)
    model = UNet(8, 1, CLASSES, Architecture(width=8, multipliers=(1,), attention=(0,)))
    rates = {"draws": 2, "max_grad_norm": CLIP, "learning_rate": 1e-3, "microbatch_size": 4}
    random = torch.Generator().manual_seed(seed)
    return State(
        model, Finetune(**rates | options), public_batch=16.0, autocast=False, generator=random
    )


@dataclass(frozen=True)
class Run:
    """A stage that spends a charge step by step.

    of: function that takes the stage's state, and returns the part of it that DP-SGD trains.
    """

    make: Callable[..., Any]
    step: Callable[..., dict]
    train: Callable[..., tuple]
    of: Callable[[Any], State]

    def after(
        self, state: Any, drawn: Sequence[tuple[Tensor, Tensor]], released: Tensor | None = None
    ) -> list[dict]:
        """Return the log's rows after one step on each of these draws."""
        charge = GivenCharge(list(drawn), released)
        rows = [self.step(state, charge) for _ in drawn]
        assert [bound for _, bound in charge.seen] == [CLIP] * len(drawn)
        return rows


RUNS = {"finetune": Run(trainer, step, fine_tune, lambda state: state)}


def draws_of(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [drawn_images(size, seed) for seed, size in enumerate(sizes)]
