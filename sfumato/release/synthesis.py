"""Draw labelled images from one trained model or a weighted mixture, at no privacy cost."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import (
    LABELS,
    Shape,
    as_bytes,
    as_floats,
    having,
    load_array,
    load_images,
    per_class,
    room,
)
from sfumato.data.store import load_public
from sfumato.diffusion.denoiser import Denoiser, Sampling
from sfumato.errors import DataError
from sfumato.generators.one_step import (
    DRAWING_BATCH,
    OneStep,
    balanced_labels,
    drawing,
    labels_to_draw,
    load_generator,
)
from sfumato.release.synthesizer import load_start, load_synthesizer
from sfumato.runtime.compute import device
from sfumato.runtime.progress import Progress
from sfumato.settings.release import Synthesize
from sfumato.settings.stages import STAGES
from sfumato.storage.documents import read_json
from sfumato.training.training_sets import public_training_set

# Images, (N, C, H, W) uint8, their labels, and the stage that drew each image
Drawn = tuple[Tensor, Tensor, np.ndarray]


# N images in parts, each part (B, C, H, W) float32 in [0, 1], and the labels of all N images.
# Labels are (N,) int64 or, if images have several labels, (N, classes) uint8.
Parts = tuple[Iterator[Tensor], Tensor]


def kept_images(
    directory: Path, count: int, priors: Tensor | None, seed: int, shape: Shape | None
) -> Parts:
    """Choose `count` images of an artifact at random.

    If a class has too few images, its images are repeated. A class without images is left out.
    """
    classes = (
        len(priors)
        if priors is not None
        else int(load_array(directory / LABELS).max(initial=0)) + 1
    )
    population = load_images(directory, map(str, range(classes)), shape=shape)
    shares = torch.ones(classes).double() if priors is None else priors.double()
    shares = shares * torch.from_numpy(per_class(population.labels, classes) > 0)
    random = torch.Generator().manual_seed(seed)
    labels = balanced_labels(count, shares / shares.sum(), classes, random)
    rows = torch.empty_like(labels)
    for label in labels.unique().tolist():
        of_class = torch.from_numpy(np.flatnonzero(population.labels == label))
        order = of_class[torch.randperm(len(of_class), generator=random)]
        mask = labels == label
        rows[mask] = order[torch.arange(int(mask.sum())) % len(order)]
    return (population.batch(part.numpy())[0] for part in rows.split(DRAWING_BATCH)), labels


def chosen_images(
    paths: Mapping[str, Path], count: int, priors: Tensor | None, seed: int, shape: Shape
) -> Parts:
    """Choose `count` of the public images that `select` kept.

    In each class, the first images are chosen. If the teacher made the selection, these are the
    images with the highest probability of the class. Raises DataError if a class has too few
    images.
    """
    public = load_public(paths["public"], shape)
    images, labels, _ = public_training_set(public, paths["select"], None)
    new_labels = balanced_labels(
        count, priors, int(labels.max()) + 1, torch.Generator().manual_seed(seed)
    )
    rows = []
    for label, number in enumerate(new_labels.bincount().tolist()):
        of_class = (labels == label).nonzero().flatten()
        if len(of_class) < number:
            name = read_json(paths["select"] / "selection.json")["classes"][label]
            raise DataError(
                f"the release needs {number} images of class {name!r}, but {paths['select']} has "
                f"{len(of_class)}: lower synthesize.count, or raise select.images"
            )
        rows.append(of_class[:number])
    indices = torch.cat(rows)
    return (as_floats(images[part]) for part in indices.split(DRAWING_BATCH)), labels[indices]


def model_of(name: str, paths: Mapping[str, Path]) -> OneStep | Denoiser:
    """Load the network that a stage trained, and move it to the device of this process.

    paths: as for `draw_mixture`.
    """
    if STAGES[name].gives == "generator":
        return load_generator(paths[name]).to(device())
    start = paths["pretrain"]
    return (load_start(start) if name == "pretrain" else load_synthesizer(paths[name], start)).to(
        device()
    )


def parts_of(
    model: OneStep | Denoiser,
    count: int,
    priors: Tensor | None,
    seed: int,
    sampling: Sampling,
    *,
    spread: float = 1.0,
    progress: Progress | None = None,
) -> Parts:
    """Draw `count` images from a network.

    model: network from `model_of`;
    spread: standard deviation of the random inputs of a one-step generator;
    sampling, progress: arguments for a diffusion model.
    """
    if not isinstance(model, Denoiser):
        return drawing(model, count, priors, seed, spread)
    random = torch.Generator().manual_seed(seed)
    labels = labels_to_draw(model, count, priors, random)
    return model.drawing(labels, sampling, random, progress), labels


def draw_mixture(
    paths: Mapping[str, Path],
    settings: Synthesize,
    priors: Tensor | None,
    seed: int,
    progress: Progress | None = None,
    sampling: Sampling | None = None,
    folder: Path | None = None,
) -> Drawn:
    """Draw the release: `settings.count` images, divided among the sources by weight, shuffled.

    paths: folder of each source's artifact, by stage. A fine-tuned model that is saved as adapters
    needs the artifact of "pretrain" too;
    priors: (classes,) share of each label, None for equal shares;
    sampling: options for diffusion models, None for the options in `settings`. A public model
    resizes its images to `sampling.shape`;
    folder: folder for an unnamed file that stores the pixels; None to keep them in memory.

    Returns the images, (N, C, H, W) uint8, their labels, and the stage that drew each image. Raises
    DataError if a model draws non-finite pixels.
    """
    options = sampling or Sampling(steps=settings.steps, guidance=settings.guidance)

    def draw_parts(name: str, count: int, seed: int) -> Parts:
        if name == "select":
            assert options.shape is not None  # set by `stage synthesize`, the only user of `select`
            return chosen_images(paths, count, priors, seed, options.shape)
        if STAGES[name].gives == "images":
            return kept_images(paths[name], count, priors, seed, options.shape)
        return parts_of(model_of(name, paths), count, priors, seed, options, progress=progress)

    return mixed(draw_parts, settings, seed, folder)


def mixed(
    draw_parts: Callable[[str, int, int], Parts],
    settings: Synthesize,
    seed: int,
    folder: Path | None = None,
) -> Drawn:
    """Divide `settings.count` images among the sources by weight, draw them, and shuffle them.

    draw_parts: function that draws images, given a source, a number of images and a seed.

    Returns and raises the same as `draw_mixture`.
    """
    total_weight = sum(settings.sources.values())
    numbers: dict[str, int] = {
        name: int(settings.count * weight / total_weight)
        for name, weight in sorted(settings.sources.items())
    }
    numbers[max(numbers, key=lambda name: numbers[name])] += settings.count - sum(numbers.values())
    order = torch.randperm(settings.count, generator=torch.Generator().manual_seed(seed))
    positions = order.argsort()
    images = None
    labels = []
    start = 0
    for i, (name, number) in enumerate(numbers.items()):
        if not number:
            continue
        parts, of_source = draw_parts(name, number, seed + i)
        labels.append(of_source)
        for part in parts:
            if not part.isfinite().all():
                raise DataError(
                    f"the model of `{name}` drew non-finite pixels: run `stage {name}` again"
                )
            if images is None:
                images = room(settings.count, part.shape[1:], folder)
            images[positions[start : start + len(part)]] = as_bytes(part)
            start += len(part)
    assert images is not None
    drawn_by = np.repeat(list(numbers), list(numbers.values()))
    return images, torch.cat(labels)[order], drawn_by[order.numpy()]


def sorted_examples(
    images: Tensor, labels: Tensor, classes: int, number: int, eligible: np.ndarray | bool = True
) -> Tensor:
    """Return the first `number` images of each class: (classes · number, C, H, W) in [0, 1].

    If a class has fewer images, the remaining places are white.

    images: (N, C, H, W) uint8; eligible: (N,) bool, True for images that may be chosen.
    """
    examples = torch.ones(classes, number, *images.shape[1:])
    for label in range(classes):
        rows = torch.from_numpy(np.flatnonzero(having(labels.numpy(), label) & eligible)[:number])
        examples[label, : len(rows)] = as_floats(images[rows])
    return examples.flatten(0, 1)
