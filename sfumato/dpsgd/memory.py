"""How much memory per-image gradients will take, and how many fit: it runs the same computation on shapes alone.

Everything here is public: the model, the batch, the machine. Nothing depends on an image. How many images are taken at
a time is a setting of the machine: no plan, record or artifact holds it, and a run may go on with another number.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfumato.diffusion.denoiser import Denoiser, Learner
from sfumato.dpsgd.clip import one_matrix
from sfumato.dpsgd.gradients import Draws, choose_chunk, per_image_gradients
from sfumato.dpsgd.trainable import candidates, choose_trainable, flat
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.settings.dpsgd import SALIENT, Finetune, Saliency

# float32 copies of the trained parameters beside the model
STEP_COPIES = 5  # average, two moments, the sum, the noised gradient
SALIENCY_COPIES = 8  # the sum and the released vectors in float64, the clipped sum and the noise of one batch
IMAGES = 32  # per vmap, at most
GPU_IMAGES, GPU_PASSES = 512, 4096  # of a network that splits by image, at most: far more would not be faster
CPU_BYTES = 4 * 2**30  # for one chunk where there is no GPU
KEPT_BYTES = 2**30  # of that, for what a network that splits by image keeps: more at a time is not faster
FREE = 0.8  # of the free memory of a GPU: kernels take some for themselves


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, all of float32. gradients: of all images of a chunk; activations: the most that a chunk needs besides."""

    weights: int
    copies: int
    gradients: int
    activations: int
    trained: int  # parameters
    chunk: int  # images at a time
    draws: int  # of each of them at a time
    split: bool  # whether that is not all of their draws

    @property
    def peak(self) -> int:
        return self.weights + self.copies + self.gradients + self.activations

    def __str__(self) -> str:
        sizes = (self.peak, self.weights, self.copies, self.gradients, self.activations)
        peak, weights, copies, gradients, activations = map(readable, sizes)
        some = f", {self.draws} of its draws," if self.split else ""
        return (
            f"about {peak} at float32, {self.chunk} image{'s' * (self.chunk > 1)}{some} at a time: "
            f"{weights} for the network, {copies} for sums and moments, "
            f"{gradients} for per-image gradients of {self.trained:,} parameters, {activations} for activations"
        )


def readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages of tensors made while it is active, and their peak.

    there: tensors made before. Their storages do not count, even when a view of one comes back as a result.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.there = [tensor.untyped_storage() for tensor in there]  # held, so that no new storage gets one's address
        self.known: dict[int, int] = {storage._cdata: 0 for storage in self.there}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.live -= self.known.pop(key, 0)


def on_meta(model: nn.Module) -> nn.Module:
    """The same network on the meta device: shapes without weights. Nothing of `model` is copied."""
    known: dict[int, Tensor] = {}
    for value in model.parameters():
        known[id(value)] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, known)  # type: ignore[arg-type]


def gradient_memory(
    model: Learner, parameters: Mapping[str, Tensor], chunk: int, draws: int, copies: int, split: bool = False
) -> Memory:
    """The peak of one step. model: on the meta device; draws: of each image at a time; split: and it has more."""
    shape = (model.channels, model.resolution, model.resolution)
    with torch.device("meta"), torch.no_grad():
        images, labels = torch.empty(chunk, *shape), torch.empty(chunk, dtype=torch.int64)
        drawn = Draws(
            levels=torch.empty(chunk, draws, dtype=torch.int64),
            noise=torch.empty(chunk, draws, *shape),
            drop=torch.empty(chunk, draws, dtype=torch.bool),
        )
        gc.collect()
        with LiveBytes([*model.parameters(), *model.buffers(), images, labels, *drawn.tensors().values()]) as counter:
            per_image_gradients(model, parameters, images, labels, drawn)
    trained = sum(value.numel() for value in parameters.values())
    gradients = 4 * trained * chunk
    weights = sum(value.numel() * value.element_size() for value in [*model.parameters(), *model.buffers()])
    inputs = 4 * chunk * (1 + draws) * images[0].numel()
    # the clip: on a GPU the rows exist twice, by name and as one matrix; the sum exists twice, in parts and whole
    clip = (2 if one_matrix(device()) else 1) * gradients + 8 * trained
    most = max(counter.peak + gradients * split, clip)
    return Memory(
        weights=weights,
        copies=4 * trained * copies,
        gradients=gradients,
        activations=most - gradients + inputs,
        trained=trained,
        chunk=chunk,
        draws=draws,
        split=split,
    )


def kept_bytes(model: Learner, parameters: Mapping[str, Tensor]) -> int:
    """What one pass in float32 keeps for its way back, besides weights: seen on a blank image, for the time of one.

    It is 0.9 of what passes take while they run, and in proportion to their number. model: on a device, or on meta.
    """
    where = next(iter(parameters.values())).device
    image = torch.zeros(1, model.channels, model.resolution, model.resolution, device=where)
    one = torch.ones(1, 1, device=where)
    drawn = Draws(levels=one, noise=image[None], drop=one.bool())
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no other gets the same address

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with where, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        per_image_gradients(model, parameters, image, torch.zeros(1, dtype=torch.int64, device=where), drawn)
    for value in model.parameters():
        kept.pop(value.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def images_kept(model: Learner) -> int:
    """Images whose activations a plain training step can hold together on this machine; one at least."""
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    where = next(iter(parameters.values())).device
    budget = chunk_budget(where) if where.type == "cuda" else KEPT_BYTES
    return max(1, budget // kept_bytes(model, parameters))


def largest_microbatch(at: Callable[[int, int], Memory], draws: int, budget: int, most: int) -> Memory:
    """The most images at a time, a power of two, whose memory is within `budget` bytes; one at least, `most` at most.

    at: (images, draws of each) -> memory. Where one image with all of its draws is too much, they come in parts.
    """
    one = at(1, draws)
    if one.peak > budget:
        while one.peak > budget and one.draws > 1:
            one = at(1, (one.draws + 1) // 2)
        return one
    each = max(1, at(2, draws).peak - one.peak)
    return at(power_of_two(min(most, 1 + (budget - one.peak) // each)), draws)


def power_of_two(most: int) -> int:
    """The largest that is at most `most` ≥ 1."""
    return 1 << (most.bit_length() - 1)


def choose_microbatch(
    model: Learner, parameters: Mapping[str, Tensor], draws: int, *, batch: float, copies: int, chunk: int | None = None
) -> tuple[int, int]:
    """Images whose gradients are taken draws_per_pass, and how many of the K draws of each. For all processes the same.

    What fits; of a network that splits by image, on a CPU, no more than is fast there. Elsewhere never more than half
    of the expected `batch`, to which a chunk is filled up. chunk: as the user wants it. A collective call.
    """
    where = next(iter(parameters.values())).device
    if chunk is not None:
        return distributed.all_min(chunk), draws
    loaded = sum(value.numel() * value.element_size() for value in [*model.parameters(), *model.buffers()])
    images, some = what_is_taken(model, parameters, draws, batch, copies, where, chunk_budget(where, loaded))
    return distributed.all_min(images), distributed.all_min(some)


def what_is_taken(
    model: Learner,
    parameters: Mapping[str, Tensor],
    draws: int,
    batch: float,
    copies: int,
    where: torch.device,
    budget: int,
) -> tuple[int, int]:
    """As `choose_microbatch`, on the device `where`. model: there, or on the meta device."""
    if where.type != "cuda" and model.splits_by_image:
        size = sum(value.numel() for value in parameters.values())
        passes = max(1, KEPT_BYTES // kept_bytes(model, parameters))
        most = min(choose_chunk(size, draws, batch), power_of_two(max(1, passes // draws)))
        return most, min(draws, passes)
    shapes: Any = on_meta(model)
    trained = {name: shapes.get_parameter(name) for name in parameters}

    def at(images: int, some: int) -> Memory:
        return gradient_memory(shapes, trained, images, some, copies, split=some < draws)

    most = min(GPU_IMAGES, max(1, GPU_PASSES // draws)) if model.splits_by_image else IMAGES
    found = largest_microbatch(at, draws, budget, int(min(most, max(1, batch / 2))))
    return found.chunk, found.draws


def trained_parameters(
    model: Denoiser, settings: Finetune | Saliency, seed: int = 0, pattern: str = "qkv"
) -> dict[str, Tensor]:
    """The parameters whose per-image gradients a stage takes.

    model: on the meta device; it is changed as the stage will change it. Which candidates of `pattern` saliency selects
    is not known yet: the first ones stand for them.
    """
    if isinstance(settings, Saliency):
        return {name: model.get_parameter(name) for name in flat(candidates(model, settings.candidates))}
    if settings.trainable == "synflow-lora":  # SynFlow scores need weights, and a model on the meta device has none
        settings = settings.model_copy(update={"trainable": "random-lora"})
    ranking = list(candidates(model, pattern).values()) if settings.trainable in SALIENT else None
    trained = set(choose_trainable(model, settings, ranking, seed))
    return {name: value for name, value in model.named_parameters() if name in trained}


def estimate(
    model: Denoiser,
    stage: Finetune | Saliency,
    batch: float = math.inf,
    chunk: int | None = None,
    budget: int | None = None,
) -> Memory:
    """The memory of a stage on `model`, which lives on the meta device and is changed as the stage will change it.

    batch: expected images of a step; chunk: images at a time; by default the stage's own number, or as many as it will
    take on this machine, or in `budget` bytes.
    """
    parameters = trained_parameters(model, stage)
    copies = STEP_COPIES if isinstance(stage, Finetune) else SALIENCY_COPIES

    where, images, draws = device(), chunk or stage.chunk, stage.draws
    if images is None:
        budget = budget or chunk_budget(where)
        images, draws = what_is_taken(model, parameters, draws, batch, copies, where, budget)
    return gradient_memory(model, parameters, images, draws, copies, split=draws < stage.draws)


def chunk_budget(where: torch.device, loaded: int = 0) -> int:
    """Bytes that one step may take, the network among them; without a GPU CPU_BYTES.

    loaded: bytes of the network, where it is on the device already.
    """
    if where.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(where)
    kept = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)  # by PyTorch, for tensors to come
    return int(FREE * (free + kept)) + loaded
