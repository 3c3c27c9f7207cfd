"""Batch-invariant features: an image's features are bit-identical in any batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sfumato.data.images import Shape, inference_batch_size
from sfumato.runtime.compute import one_thread

BATCH_SIZE = 64  # Images per batch on a CPU


def batch_size(shape: Sequence[int], device: torch.device) -> int:
    """Return the number of images per batch, which depends only on the device and the shape.

    On a CPU, it is the same for all shapes. On a GPU, batches of small images are larger.
    """
    if device.type == "cpu":
        return BATCH_SIZE
    return inference_batch_size(shape)


def rows_alone(
    function: Callable[[Tensor], Tensor], images: Tensor, place_matters: bool = True
) -> Tensor:
    """Apply `function` batch-invariantly: (B, C, H, W) float32 -> (B, d) float32.

    Images may have any memory format. An image with any non-finite pixel gives a row of NaN.

    place_matters: whether the position of an image in the batch may change its row (see the
    function `place_matters`). If so, images are processed one at a time.

    Guarantee: row i is a function of image i only, to the last bit. Matrix kernels round
    differently for another batch size, layout, alignment or number of threads, so removing one
    image could change the rows of others. Therefore all batches have the same size, are copied to
    the same memory, and run on one thread.
    """
    size = 1 if place_matters else batch_size(images.shape[1:], images.device)
    seats = torch.zeros(size, *images.shape[1:], device=images.device)
    finite = images.flatten(1).isfinite().all(dim=1)
    rows = []
    with same_kernels():
        for part in torch.where(finite[:, None, None, None], images, 0).split(size):
            seats[: len(part)].copy_(part)
            rows.append(function(seats)[: len(part)].clone())
    return torch.cat(rows).masked_fill(~finite[:, None], float("nan"))


@contextmanager
def same_kernels() -> Iterator[None]:
    """Compute without gradients, on one thread, by kernels that are the same in every call."""
    with (
        torch.no_grad(),
        one_thread(),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
    ):
        yield


def place_matters(function: Callable[[Tensor], Tensor], shape: Shape, device: torch.device) -> bool:
    """Test whether any bit of an image's row depends on its position in the batch or on other
    images.

    The kernels of this machine are tested with random images, never with sensitive ones.
    """
    random = torch.Generator().manual_seed(0)
    size = batch_size(shape, device)
    images = torch.rand(size, *shape, generator=random)
    with same_kernels():
        first = function(images.to(device))
        for _ in range(4):
            order = torch.randperm(size, generator=random)
            other_images = torch.rand(images.shape, generator=random)
            kept = torch.rand(size, generator=random) < 0.5
            mixed_images = torch.where(kept[:, None, None, None], images[order], other_images)
            if not torch.equal(function(mixed_images.to(device))[kept], first[order][kept]):
                return True
    return False
