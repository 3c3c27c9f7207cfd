"""How much memory per-image gradients will take, before any of it is taken: the very computation, on shapes alone.

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

from sfumato.config import SALIENT, Finetune, Model, Saliency
from sfumato.dpsgd.run import Draws, per_image_gradients
from sfumato.dpsgd.trainable import candidates, choose_trainable, flat
from sfumato.public_model.network import Denoiser, LatentDiffusion, outline

STEP_COPIES = (
    5  # float32 copies of the trained parameters beside the model: average, two moments, the sum, the noised gradient
)
SALIENCY_COPIES = 8  # the sum and the released vectors in float64, the clipped sum and the noise of one batch
IMAGES = 32  # per vmap, at most
CPU_BYTES = 4 * 2**30  # for one chunk where there is no GPU


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, all of float32. gradients: of all images of a chunk; activations: the largest that one chunk needs beside its gradients."""

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
        peak, weights, copies, gradients, activations = map(
            readable, (self.peak, self.weights, self.copies, self.gradients, self.activations)
        )
        return (
            f"about {peak} at float32, {self.chunk} image{'s' * (self.chunk > 1)} at a time: {weights} for the network, {copies} for sums and moments, "
            f"{gradients} for per-image gradients of {self.trained:,} parameters, {activations} for activations"
        )


def readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and the most there ever were, of tensors made while it is active.

    there: tensors that were there before, whose storages do not count; views of them turn up all the same.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.there = [
            tensor.untyped_storage() for tensor in there
        ]  # kept, so that no new one takes the place of one of them
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


def gradient_memory(
    model: LatentDiffusion, parameters: Mapping[str, Tensor], chunk: int, draws: int, copies: int
) -> Memory:
    """What one step takes at its largest. model: on the meta device, as `outline` gives it; draws: K."""
    shape = (model.channels, model.resolution, model.resolution)
    with torch.device("meta"), torch.no_grad():
        images, labels = torch.empty(chunk, *shape), torch.empty(chunk, dtype=torch.int64)
        drawn = Draws(
            sigma=torch.empty(chunk, draws, dtype=torch.int64),
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
    most = max(counter.peak, gradients + 8 * trained)  # the clipped sum is made twice: in parts, and whole
    return Memory(
        weights=weights,
        copies=4 * trained * copies,
        gradients=gradients,
        activations=most - gradients + inputs,
        trained=trained,
        chunk=chunk,
    )


def trained_parameters(
    model: Denoiser, settings: Finetune | Saliency, seed: int = 0, pattern: str = "qkv"
) -> dict[str, Tensor]:
    """The parameters whose per-image gradients a stage takes, of a model on the meta device, which this changes as the stage will.

    Which candidates of `pattern` `saliency` will select for `finetune` is not known before: so many of the first are taken.
    """
    if isinstance(settings, Saliency):
        named = dict(model.named_parameters())
        return {name: named[name] for name in flat(candidates(model, settings.candidates))}
    if settings.trainable == "synflow-lora":  # its scores need weights
        settings = settings.model_copy(update={"trainable": "random-lora"})
    ranking = list(candidates(model, pattern).values()) if settings.trainable in SALIENT else None
    trained = set(choose_trainable(model, settings, ranking, seed))
    return {name: value for name, value in model.named_parameters() if name in trained}


def estimate(
    settings: Model, classes: int, stage: Finetune | Saliency, chunk: int | None = None, budget: int | None = None
) -> Memory:
    """The memory of a stage on the public model that `settings` names, at `chunk` images at a time (default: the stage's own, or what fits)."""
    model = outline(settings, classes)
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
    """Bytes that one step may take here: four fifths of what is free on the GPU, or CPU_BYTES."""
    if torch.cuda.is_available():
        return int(0.8 * torch.cuda.mem_get_info()[0])
    return CPU_BYTES


def settle_chunk(settings: Any, model: Model | None, classes: int) -> Any:
    """The settings of a stage with `chunk` filled in for a public model: by the machine's memory, never by data."""
    if model is None or model.directory is None or settings.chunk:
        return settings
    return settings.model_copy(update={"chunk": estimate(model, classes, settings).chunk})
