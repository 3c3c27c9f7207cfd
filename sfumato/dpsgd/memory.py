"""How much memory per-image gradients will take: it runs the same computation on shapes alone.

Everything here is public: the model, the batch, the machine. Nothing depends on an image.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfumato.compute import device
from sfumato.config import SALIENT, Finetune, Saliency
from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.gradients import Draws, per_image_gradients
from sfumato.dpsgd.trainable import candidates, choose_trainable, flat

# float32 copies of the trained parameters beside the model
STEP_COPIES = 5  # average, two moments, the sum, the noised gradient
SALIENCY_COPIES = 8  # the sum and the released vectors in float64, the clipped sum and the noise of one batch
IMAGES = 32  # per vmap, at most
CPU_BYTES = 4 * 2**30  # for one chunk where there is no GPU


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, all of float32. gradients: of all images of a chunk; activations: the most that a chunk needs besides."""

    weights: int
    copies: int
    gradients: int
    activations: int
    trained: int  # parameters
    chunk: int

    @property
    def peak(self) -> int:
        return self.weights + self.copies + self.gradients + self.activations

    def __str__(self) -> str:
        sizes = (self.peak, self.weights, self.copies, self.gradients, self.activations)
        peak, weights, copies, gradients, activations = map(readable, sizes)
        return (
            f"about {peak} at float32, {self.chunk} image{'s' * (self.chunk > 1)} at a time: "
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


def gradient_memory(model: Denoiser, parameters: Mapping[str, Tensor], chunk: int, draws: int, copies: int) -> Memory:
    """The peak of one step. model: on the meta device, as `outline` gives it; draws: K."""
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
    most = max(counter.peak, gradients + 8 * trained)  # the clipped sum exists twice: in parts, and whole
    copies, activations = 4 * trained * copies, most - gradients + inputs
    return Memory(
        weights=weights, copies=copies, gradients=gradients, activations=activations, trained=trained, chunk=chunk
    )


def trained_parameters(
    model: Denoiser, settings: Finetune | Saliency, seed: int = 0, pattern: str = "qkv"
) -> dict[str, Tensor]:
    """The parameters whose per-image gradients a stage takes.

    model: on the meta device; it is changed as the stage will change it. Which candidates of `pattern` saliency selects
    is not known yet: the first ones stand for them.
    """
    if isinstance(settings, Saliency):
        named = dict(model.named_parameters())
        return {name: named[name] for name in flat(candidates(model, settings.candidates))}
    if settings.trainable == "synflow-lora":  # SynFlow scores need weights, and a model on the meta device has none
        settings = settings.model_copy(update={"trainable": "random-lora"})
    ranking = list(candidates(model, pattern).values()) if settings.trainable in SALIENT else None
    trained = set(choose_trainable(model, settings, ranking, seed))
    return {name: value for name, value in model.named_parameters() if name in trained}


def estimate(
    model: Denoiser, stage: Finetune | Saliency, chunk: int | None = None, budget: int | None = None
) -> Memory:
    """The memory of a stage on `model`, which lives on the meta device and is changed as the stage will change it.

    chunk: images at a time; by default the stage's own number, or what fits in `budget` bytes.
    """
    parameters = trained_parameters(model, stage)
    copies = STEP_COPIES if isinstance(stage, Finetune) else SALIENCY_COPIES

    def at(size: int) -> Memory:
        return gradient_memory(model, parameters, size, stage.draws, copies)

    if chunk or stage.chunk:
        return at(chunk or stage.chunk or 1)
    one, two = at(1), at(2)
    room = (budget or chunk_budget()) - one.peak
    each = max(1, two.peak - one.peak)
    return at(max(1, 2 ** (min(IMAGES, 1 + max(0, room) // each).bit_length() - 1)))


def chunk_budget() -> int:
    """Bytes that one step may take: four fifths of the free memory of the GPU, or CPU_BYTES without one."""
    if device().type == "cuda":
        return int(0.8 * torch.cuda.mem_get_info()[0])
    return CPU_BYTES
