"""An endless release: new labelled images from a release's own networks. Drawing is free.

import sfumato
for images, labels, about in sfumato.stream("artifacts/synthesize", batch=128): ...
"""

import itertools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from sfumato.data.images import Shape, as_bytes, as_floats
from sfumato.diffusion.denoiser import Sampling
from sfumato.dpsgd.lora import ADAPTER, ADAPTER_CONFIG
from sfumato.errors import ConfigError, DataError, explained
from sfumato.features.batch_invariant import one_thread
from sfumato.features.teacher_network import (
    Labelling,
    TeacherNetwork,
    guide_by,
    load_teacher_network,
    probabilities_of,
)
from sfumato.generators.one_step import GENERATOR_WEIGHTS
from sfumato.release.exports import mark_of
from sfumato.release.loading import Release, load_release
from sfumato.release.pattern import add_pattern
from sfumato.release.synthesis import Parts, mixed, model_of, parts_of
from sfumato.release.variation import BLENDED, PLAIN, Varied, blurred, uniform, vary_parts
from sfumato.runtime.compute import device
from sfumato.settings.release import Synthesize
from sfumato.storage.artifacts import PRIVACY, changed_files
from sfumato.storage.documents import Exact, read_json, validated
from sfumato.storage.weights import CONFIG, WEIGHTS, refers_to_public_model
from sfumato.training.supervised import shift_and_mirror

SHIPPED = "networks"  # Folder inside a release
FILES = (CONFIG, WEIGHTS, GENERATOR_WEIGHTS, ADAPTER, ADAPTER_CONFIG)  # Files of one network
DRAWN_PER_KEPT = 1.25  # Of the drawn images, the least certain fifth of each class is left out
# Standard deviation of a generator's random inputs, at the first image and after GROWTH images. The
# deviation rises evenly between these two values
SPREAD = (1.0, 1.25)
GROWTH = 100_000
GAMMA = 0.3  # Brightness: pixels are raised to a power between exp(-GAMMA) and exp(GAMMA)


@dataclass(frozen=True, kw_only=True)
class Recipe(Exact):
    """Entry `stream` of a release's card. This entry and the networks determine the drawn images.

    settings: settings of `Synthesize` that determine how images are drawn;
    priors: share of each label, empty for equal shares;
    offsets, temperature: see `Labelling`; mirrored: whether mirror images keep their label.
    """

    seed: Annotated[int, Field(ge=0)]
    settings: dict[str, object]
    priors: list[float]
    offsets: dict[str, list[float]]
    temperature: float
    mirrored: bool


def save_networks(
    directory: Path,
    paths: Mapping[str, Path],
    settings: Synthesize,
    varied: Varied,
    priors: Tensor | None,
    seed: int,
    teacher: TeacherNetwork | None,
) -> Recipe:
    """Copy into `directory` the networks that drew a release. Return the card's entry `stream`.

    paths: folder of each artifact that `synthesize` reads, by stage.

    Guarantee: the release includes the charges of every artifact from which files are copied.
    """
    sources = settings.networks("pretrain" in paths and refers_to_public_model(paths["pretrain"]))
    network_stages = {*sources}
    if "finetune" in sources and (paths["finetune"] / ADAPTER_CONFIG).is_file():
        network_stages.add("pretrain")
    for name in sorted(network_stages):
        (directory / SHIPPED / name).mkdir(parents=True)
        for file in FILES:
            if (paths[name] / file).is_file():
                shutil.copyfile(paths[name] / file, directory / SHIPPED / name / file)
    if teacher is not None:
        shutil.copytree(paths["teacher"], directory / SHIPPED / "teacher")
    shares: list[float] = []
    if priors is not None:
        shares = priors.tolist()
    labelling = varied.labelling or Labelling({})
    setting_names = {"steps", "guidance", "teacher_guidance", "relabel", "mixed"}
    return Recipe(
        seed=seed,
        settings=settings.model_dump(mode="json", include=setting_names, exclude_defaults=True)
        | {"sources": sources},
        priors=shares,
        offsets={kind: offsets.tolist() for kind, offsets in labelling.offsets.items()},
        temperature=labelling.temperature,
        mirrored=teacher is not None and teacher.features.flip,
    )


class Batch(NamedTuple):
    """Images that were drawn together.

    Attributes:
        images: (B, C, H, W) float32 in [0, 1].
        labels: (B, classes) float32: probabilities that add up to 1 in each row or, with several
            labels per image, the probability of each label.
        about: Statement that the images are generated, and their licence.
    """

    images: Tensor
    labels: Tensor
    about: dict[str, str]


class Stream(IterableDataset[Batch]):
    """An endless sequence of batches. The function `stream` describes them."""

    def __init__(
        self, release: Release, recipe: Recipe, batch: int, seed: int, augment: bool
    ) -> None:
        """Load the networks of a release that was already checked."""
        super().__init__()
        folder = release.path / SHIPPED
        self.settings = Synthesize.model_validate(recipe.settings)
        names: list[str] = [*self.settings.sources]
        paths = {name: folder / name for name in (*names, "pretrain")}
        self.models = {name: model_of(name, paths) for name in names}
        self.teacher: TeacherNetwork | None = None
        if self.settings.reads("teacher"):
            self.teacher = load_teacher_network(folder / "teacher").to(device())
        self.labelling: Labelling | None = None
        if recipe.offsets:
            offsets = {
                kind: torch.tensor(each, dtype=torch.float64)
                for kind, each in recipe.offsets.items()
            }
            self.labelling = Labelling(offsets, recipe.temperature)
        self.priors: Tensor | None = None
        if recipe.priors:
            self.priors = torch.tensor(recipe.priors, dtype=torch.float64)
        self.mirrored = recipe.mirrored
        self.classes = release.classes
        self.shape: Shape = (release.images.shape[3], *release.images.shape[1:3])
        self.several = release.labels.ndim == 2
        self.pattern = release.card.get("pattern")
        licence = release.card.get("about", {}).get("licence", "other")
        self.about = {**mark_of(self.settings.sources).metadata, "licence": licence}
        self.batch = batch
        self.seed = seed
        self.augment = augment
        numbers = {len(each) for each in (*recipe.offsets.values(), recipe.priors or self.classes)}
        networks = {
            (tuple(model.shape), model.classes)
            for model in (*self.models.values(), self.teacher)
            if model
        }
        if numbers != {len(self.classes)} or networks != {(self.shape, len(self.classes))}:
            raise ValueError(
                f"not all networks have {len(self.classes)} classes and images of shape "
                f"{self.shape}"
            )

    def __iter__(self) -> Iterator[Batch]:
        """Draw batch after batch, from the first batch on.

        The workers of a `DataLoader` take turns, so the order does not depend on their number.
        """
        worker = get_worker_info()
        if worker is None:
            return map(self.draw, itertools.count())
        return map(self.draw, itertools.count(worker.id, worker.num_workers))

    @torch.no_grad()
    def draw(self, number: int) -> Batch:
        """Draw the batch with this number. The batch depends only on the number and the seed."""
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0] >> 1)
        random = torch.Generator().manual_seed(seed)
        low, high = SPREAD
        spread = low + (high - low) * min(1.0, number * self.batch / GROWTH)
        count = self.batch
        if self.labelling is not None:
            count = round(self.batch * DRAWN_PER_KEPT)
        with one_thread():  # several threads would sum in varying order, and so round differently
            draw_settings = self.settings.model_copy(update={"count": count})
            images, requested_labels, _ = mixed(
                partial(self.parts, spread=spread), draw_settings, seed
            )
            labels = self.labels_of(images, requested_labels)
            if self.labelling is not None:
                rows = surest_rows(labels, self.batch)
                images = images[rows]
                labels = labels[rows]
            pixels = as_floats(images)
            if self.augment:
                self.blend(images, labels, random)
                pixels = view(as_floats(images), self.mirrored, random)
        if self.pattern:
            marked = add_pattern(as_bytes(pixels).permute(0, 2, 3, 1).numpy(), self.pattern)
            pixels = as_floats(torch.from_numpy(marked).permute(0, 3, 1, 2))
        return Batch(pixels, labels.float(), self.about)

    def parts(self, name: str, count: int, seed: int, spread: float) -> Parts:
        settings = self.settings
        guide = None
        if settings.teacher_guidance and self.teacher is not None:
            guide = guide_by(self.teacher, settings.teacher_guidance)
        sampling = Sampling(steps=settings.steps, guidance=settings.guidance, guide=guide)
        return parts_of(self.models[name], count, self.priors, seed, sampling, spread=spread)

    def labels_of(self, images: Tensor, requested_labels: Tensor) -> Tensor:
        """Return labels of drawn images, (B, classes).

        The labels are the teacher's probabilities or, if the teacher does not label the release,
        the requested labels.
        """
        if self.teacher is None or not self.settings.relabel:
            if requested_labels.ndim == 1:
                requested_labels = F.one_hot(requested_labels, len(self.classes))
            return requested_labels.float()
        probabilities = probabilities_of(self.teacher, images)
        if self.labelling is None:
            return probabilities
        return self.labelling.soft(probabilities, PLAIN)

    def blend(self, images: Tensor, labels: Tensor, random: torch.Generator) -> None:
        """Blend the last images in place, and label the blends.

        The share of blended images is the same as in the release.
        """
        plain = self.batch - int(self.batch * self.settings.mixed)
        if self.labelling is None or self.teacher is None or plain == self.batch:
            return
        vary_parts(images, plain, 0, labels, random)
        labels[plain:] = self.labelling.soft(
            probabilities_of(self.teacher, images[plain:]), BLENDED
        )


def further_images(path: Path, number: int) -> np.ndarray:
    """Draw images from a release's stream, without augmentation: (number, H, W, C) uint8."""
    batches = itertools.islice(stream(path, 500, augment=False), -(-number // 500))
    return np.concatenate(
        [as_bytes(images).permute(0, 2, 3, 1).numpy() for images, _, _ in batches]
    )[:number]


def surest_rows(labels: Tensor, number: int) -> Tensor:
    """Choose the images with the most certain labels. The same share of each class is left out.

    labels: (N, classes), probabilities.

    Returns the indices of the chosen images, (number,) int64, ascending.
    """
    scores, classes = labels.max(dim=1)
    ranks = torch.empty(len(labels))
    for label in classes.unique():
        rows = (classes == label).nonzero().flatten()
        ranks[rows[scores[rows].argsort(stable=True)]] = (torch.arange(len(rows)) + 0.5) / len(rows)
    return ranks.argsort(descending=True, stable=True)[:number].sort().values


def view(images: Tensor, mirrored: bool, random: torch.Generator) -> Tensor:
    """Shift, mirror and blur each image at random, and change its brightness.

    images: (B, C, H, W) in [0, 1];
    mirrored: whether mirror images keep their label. If not, no image is mirrored.
    """
    images = shift_and_mirror(images, mirrored, random)
    one_each = len(images), 1, 1, 1
    # Half of the images are blurred
    images = images.lerp(blurred(images), uniform(random, -1, 1, *one_each).clamp(min=0))
    return images.clamp(0, 1) ** uniform(random, -GAMMA, GAMMA, *one_each).exp()


def stream(
    path: str | Path, batch: int = 128, seed: int | None = None, augment: bool = True
) -> Stream:
    """Draw an endless sequence of batches of labelled images from the networks of a release.

    No batch of an iterator repeats. Each new iterator, and so each new loop, begins with the first
    batch again: use one iterator for the whole training, and a different seed in each training
    process. (Workers of a DataLoader share the seed.)

    If the teacher labelled the release, labels are the teacher's probabilities. These labels are
    computed after images are blended, but before images are shifted, mirrored, blurred and changed
    in brightness. If the teacher gave each image one label, the 20 % of each class with the least
    certain labels are left out. The standard deviation of a generator's random inputs grows from 1
    to 1.25 over the first 100 000 images, and is then constant.

    The same seed gives the same batches on processors of the same kind with the same version of
    PyTorch, for any number of threads and workers. On a GPU, use no workers.

    Args:
        path: Folder of the release.
        batch: Number of images in a batch. If it is below about 32, a network with a small
            weight may draw no image, and fewer images with uncertain labels are left out.
        seed: Fixes the batches; None for the release's own seed.
        augment: True to vary the images as described above, False for images as drawn.

    Returns:
        An iterable dataset of `Batch`.

    Raises:
        DataError: `load_release` refuses the folder, the release has no networks, its networks
            do not match `privacy.json`, or the entry `stream` of its card is invalid.
        ConfigError: `batch` or `seed` is not a whole number, `batch` is below 1, or `seed` is
            below 0.
    """
    for name, value, minimum in (("batch", batch, 1), ("seed", 0 if seed is None else seed, 0)):
        if type(value) is bool or not isinstance(value, int | np.integer) or value < minimum:
            raise ConfigError(f"{name}={value!r}: expected a whole number, {minimum} or more")
    release = load_release(path)
    folder = release.path
    if "stream" not in release.card:
        raise DataError(
            f"the release {folder} contains images, but no networks to draw more: use its "
            f"{len(release)} images (load_release), or ask the owner for a release with "
            "synthesize.stream: true"
        )
    fetch = "fetch the release again"
    prefix = f"{SHIPPED}/"
    files: Mapping[str, str] = read_json(folder / PRIVACY)["files"]
    network_files = {
        name.removeprefix(prefix): sha256
        for name, sha256 in files.items()
        if name.startswith(prefix)
    }
    for problem in changed_files(folder / SHIPPED, network_files, received=True):
        raise DataError(
            f"the networks in {folder / SHIPPED} are damaged ({problem}): fetch the release again"
        )
    with explained(
        DataError,
        lambda error: f"{folder / 'card.json'} has a wrong entry `stream` ({error}): {fetch}",
    ):
        recipe = validated(Recipe, release.card["stream"])
        if seed is None:
            seed = recipe.seed
        return Stream(release, recipe, batch, seed, augment)
