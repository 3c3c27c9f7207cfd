"""Choose the microbatch size for this machine, from public numbers and blank images."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.clip import clipped_sum
from sfumato.dpsgd.gradients import Draws, losses_at, number_of_weights, per_image_gradients
from sfumato.runtime import compute, distributed

# Estimated number of float32 copies of the trained parameters: the moving average, Adam's moments,
# sums, noise and others
COPIES = 8
# Parts of error messages in which CUDA, cuBLAS or cuDNN reports too little memory, or a size for
# which it has no kernel
DOES_NOT_FIT = (
    "out of memory",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "cuDNN algorithm",
    "find an engine",
)


def choose_microbatch(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    draws: int,
    batch: float,
    requested_size: int | None = None,
) -> tuple[int, int]:
    """Choose how many images, and how many of their K draws, to differentiate at a time.

    Call this before opening a charge. The first choice is an estimate (see
    `estimate_microbatch`). On a GPU, this choice is tried. The number of images, and then the
    number of draws, is halved until a trial fits.

    On a GPU, the function also sets `model.use_products`. This attribute decides whether weight
    gradients of convolutions are computed by matrix products or by a grouped convolution. The
    method that is usually faster is tried first. If not even one draw of one image fits with it,
    the other method is tried, because cuDNN may lack a kernel for the first method.

    batch: expected number of images per step;
    requested_size: number of images at a time, if the user set it.

    Returns (images, draws). Raises MemoryError if no trial fits.
    """
    device = device_of_parameters(parameters)
    estimate = estimate_microbatch(model, parameters, draws, batch, device, requested_size)
    if device.type != "cuda":
        return distributed.all_min(estimate[0]), distributed.all_min(estimate[1])
    # In float32, with 8 or more draws, a grouped convolution is faster than matrix products
    # (measured on an H200).
    faster = distributed.broadcast_object(draws < 8 or compute.fast_bfloat16("cuda"))
    for products in (faster, not faster) if model.supports_ghost_layers else (False,):
        model.use_products = products
        images, draws_per_pass = estimate
        while images and not fits(model, parameters, images, draws_per_pass):
            images, draws_per_pass = (
                (1, draws_per_pass // 2)
                if images == 1 < draws_per_pass
                else (images // 2, draws_per_pass)
            )
        if images := distributed.all_min(images):
            return images, distributed.all_min(draws_per_pass)
    raise MemoryError(
        "the gradient of one image does not fit into GPU memory: use a smaller network or smaller "
        "images"
    )


def estimate_microbatch(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    draws: int,
    batch: float,
    device: torch.device,
    requested_size: int | None,
) -> tuple[int, int]:
    """Estimate the result of `choose_microbatch` from the memory of `device`, without a trial.

    If `requested_size` is set, it is returned, with all draws.

    model: network on `device`, or on the meta device.
    """
    if requested_size:
        return requested_size, draws
    gpu = device.type == "cuda"
    room = room_on(device, parameters)
    passes = max(1, int(room / activation_bytes(model, parameters)))
    if passes < draws:
        return 1, passes
    if not model.supports_ghost_layers:
        max_images: float = 32
    elif gpu:  # Larger microbatches are not faster.
        max_images = min(500, 4000 // draws)
    else:
        max_images = min(max(64, batch / 16), 128, max(4, 256 // draws))
    # Bytes per image: the float32 gradient and, on a GPU, the copy of it that clipping makes
    rows = (8 if gpu else 4) * number_of_weights(parameters)
    largest = int(max(1, min(max_images, room / rows, passes / draws)))
    if not gpu:
        largest = max(1, min(largest, int(batch / 2)))
        return 1 << (largest.bit_length() - 1), draws  # rounded down to a power of two
    # A step seldom draws more images than `large_draw`.
    # The last microbatch is filled up with copies of images. To keep the number of copies small,
    # `large_draw` is divided nearly evenly into microbatches.
    large_draw = batch + 2 * math.sqrt(batch)
    return math.ceil(large_draw / math.ceil(large_draw / largest)), draws


def needed(
    model: Denoiser,
    parameters: Mapping[str, Tensor],
    draws: int,
    batch: float,
    requested_size: int | None = None,
) -> str:
    """Describe the memory that a step of DP-SGD needs on this machine, in one line.

    model: network on the meta device.
    """
    images, draws_per_pass = estimate_microbatch(
        model, parameters, draws, batch, compute.device(), requested_size
    )
    weights = number_of_weights(parameters)
    network = sum(value.nbytes for value in [*model.parameters(), *model.buffers()])
    bytes_per_image = 4 * weights + draws_per_pass * activation_bytes(model, parameters)
    size = (network + 4 * COPIES * weights + images * bytes_per_image) / 2**30
    return (
        f"about {size:.2f} GiB at float32 (images at a time: {images}; draws per image at a time: "
        f"{draws_per_pass} of {draws})"
    )


def plain_microbatch(model: Denoiser, parameters: Mapping[str, Tensor]) -> int:
    """Return how many images fit into memory in a step of ordinary training, at least 1."""
    room = room_on(device_of_parameters(parameters), parameters)
    return max(1, int(room / activation_bytes(model, parameters)))


def device_of_parameters(parameters: Mapping[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


def room_on(device: torch.device, parameters: Mapping[str, Tensor]) -> float:
    """Return how many bytes the per-image gradients may use.

    Activations may use the same number of bytes in addition.
    """
    if device.type != "cuda":
        return 2**30  # larger microbatches are not faster
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that PyTorch has reserved but does not use
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 0.4 * (free + cached - 4 * COPIES * number_of_weights(parameters))


def activation_bytes(model: Denoiser, parameters: Mapping[str, Tensor]) -> int:
    """Measure how many bytes the forward pass of one float32 image keeps in memory for the backward
    pass.

    Weights are not counted.
    """
    images, labels, draws = blanks(model, parameters, 1, 1)
    # References are kept, so that no other storage gets the same address.
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    leaf_parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    with (
        images.device,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        losses_at(model, leaf_parameters, images, labels, draws.levels[0], draws.noise[0])
    for value in model.parameters():
        storages.pop(value.untyped_storage()._cdata, None)
    return max(1, sum(storage.nbytes() for storage in storages.values()))


@torch.no_grad()
def fits(model: Denoiser, parameters: Mapping[str, Tensor], images: int, draws: int) -> bool:
    """Return whether the gradients of `images` blank images, with `draws` draws each, fit into GPU
    memory.
    """
    try:
        clipped_sum(
            per_image_gradients(model, parameters, *blanks(model, parameters, images, draws)), 1.0
        )
    except RuntimeError as error:  # cuDNN and cuBLAS errors have no specific type
        if isinstance(error, torch.cuda.OutOfMemoryError) or any(
            words in str(error) for words in DOES_NOT_FIT
        ):
            return False
        raise
    finally:
        torch.cuda.empty_cache()
    return True


def blanks(
    model: Denoiser, parameters: Mapping[str, Tensor], images: int, draws: int
) -> tuple[Tensor, Tensor, Draws]:
    """Return blank (black) images, labels and draws, as arguments of `per_image_gradients`."""
    device = device_of_parameters(parameters)
    black = torch.zeros(images, *model.shape, device=device)
    levels = torch.ones(images, draws, dtype=torch.int64, device=device)
    noise = torch.zeros(images, draws, *black.shape[1:], device=device)
    labels = torch.zeros(
        (images, model.classes) if model.several else images, dtype=torch.int64, device=device
    )
    return black, labels, Draws(levels=levels, noise=noise, drop=levels.bool())
