"""Each stage computes the same as before: `golden.json` pins the results, with the stage's
revision.

A case runs the function of its stage, `stages/<name>.py`, on tiny inputs that no other stage made.
Draws, secret or public, are fixed, charges add no noise, and nothing runs in bfloat16.
`golden.json` contains a summary of every sum that the charge releases, of every set of images
before it is rounded, and of every array that the stage writes.

`python tests/test_golden.py --write [NAME…]` writes the summaries of the named cases again, or of
all cases if none is named. It refuses a case if its results changed, but the stage's revision did
not.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from parts import of_baselines
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from small_release import release_plan
from torch import Tensor, nn

import sfumato
import stages
from sfumato.data.cards import PublicCard
from sfumato.data.images import ImageSet, Shape, as_bytes, save_images
from sfumato.data.store import LatentSet
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.lora import add_lora, save_adapter
from sfumato.dpsgd.run import Gradients
from sfumato.dpsgd.trainable import candidates
from sfumato.features import CELLS, FEATURES, FeatureMeans
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.cosine import CosineMoments
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.public_network import arguments_of, build_network
from sfumato.features.teacher_network import TeacherNetwork, load_teacher_network, save_teacher
from sfumato.generators.one_step import new_generator, save_generator
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, UNITS, Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.resolved import QueryPlan
from sfumato.queries.count import PublicCounts, save_counts
from sfumato.queries.feature_means import LENGTH_SCALES, moment_features, save_means
from sfumato.release.release import save_release
from sfumato.release.stream import save_networks
from sfumato.release.synthesis import draw_mixture
from sfumato.release.variation import vary
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.fields import Settings
from sfumato.settings.queries import FeatureMap
from sfumato.settings.release import Synthesize
from sfumato.settings.stage import Kind
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model
from sfumato.storage.artifacts import Artifact, read_artifact, write_empty, writing
from sfumato.storage.files import write_json
from sfumato.storage.records import Records
from sfumato.storage.weights import WEIGHTS, save_network
from sfumato.training.selection import save_choice
from stages.runner import QueryRun

GOLDEN = Path(__file__).with_name("golden.json")
# Classes of the sensitive and of the public images
CLASSES = ("0", "1", "2", "3")
OTHERS = ("4", "5", "6", "7", "8")
COUNT, PUBLIC = 16, 40  # numbers of sensitive and of public images
# Noise multiplier of the charges. They add no noise, but round releases to steps that depend on
# this number: here, to less than a millionth of `max_norm`.
NOISE = 2**-10
NETWORK = Model(width=8, multipliers=(1, 2), attention=(1,))

# --- the images -----------------------------------------------------------------------------------


@functools.cache
def digits(first: int, last: int, colour: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return all 8×8 digits from `first` to `last`, and their labels.

    Images: (N, 8, 8, C) uint8. Labels: (N,) int64, counted from 0.
    """
    bunch = load_digits()
    chosen = (bunch.target >= first) & (bunch.target <= last)
    grey = np.rint(bunch.images[chosen] * (255 / 16)).astype(np.uint8)
    images = np.stack([grey, 255 - grey, np.roll(grey, 2, axis=2)] if colour else [grey], axis=3)
    return images, bunch.target[chosen].astype(np.int64) - first


def sensitive(case: Case) -> ImageSet:
    """Return 16 digits of 4 classes; if the case is grouped, in groups of 1, 2, 3, 4 and 6."""
    images, labels = digits(0, 3, case.colour)
    groups = np.repeat(np.arange(5), (1, 2, 3, 4, 6)).astype(np.int64) if case.grouped else None
    return ImageSet(images[:COUNT], labels[:COUNT], CLASSES, groups)


def public(shape: Shape) -> ImageSet:
    images, labels = digits(4, 8, shape[0] == 3)
    return ImageSet(images[:PUBLIC], labels[:PUBLIC], OTHERS)


# --- the inputs of a stage: functions that write fixed artifacts, by name -------------------------


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def normal(name: str, *size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*size, generator=seeded(name))


@torch.no_grad()
def filled(network: nn.Module, kind: str = "") -> Any:
    """Set the weights of a network to values that depend only on their names and shapes, and on
    `kind`. Returns the network in eval mode.
    """
    for name, value in network.named_parameters():
        inputs = value[0].numel() if value.ndim > 1 else 25
        centre = value.ndim == 1 and name.endswith("weight")  # 1 for the weights of a norm
        value.copy_(normal(kind + name, *value.shape) / math.sqrt(inputs) + centre)
    for name, value in network.named_buffers():
        if name.endswith(("mean", "directions", "weights", "filters")):
            value.copy_(normal(name, *value.shape, scale=0.3))
        elif name.endswith("var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=seeded(name)))
    return network.eval()


def made_counts(folder: Path, shape: Shape) -> None:
    noisy = torch.tensor([3.0, 6.0, 2.0, 5.0], dtype=torch.float64)
    save_counts(PublicCounts(16.0, noisy, noisy / 16), noisy, folder)


def made_central(folder: Path, shape: Shape) -> None:
    np.save(folder / "mean.npy", (0.5 + normal("central", 2, 4, *shape, scale=0.3)).numpy())


def made_mode(folder: Path, shape: Shape) -> None:
    np.save(folder / "mode.npy", normal("mode", 2, 4, 3, *shape).numpy())


def made_frequency(folder: Path, shape: Shape) -> None:
    features = FourierFeatures(shape, [FeatureMap(), FeatureMap(map="scattering")], 16, seed=3)
    save_means(
        "frequency",
        FeatureMeans(normal("frequency", 16, 4, scale=0.1), features),
        features.arguments,
        folder,
    )


@torch.no_grad()
def network_of(shape: Shape) -> Any:
    """Return a public network. Its biases are raised by 1, so that no feature is zero for all
    images: the scale of such a feature would consist of rounding errors.
    """
    network = filled(build_network("residual", shape, len(OTHERS), 8))
    for name, value in network.named_parameters():
        if name.endswith("bias"):
            value += 1
    return network


def made_classifier(folder: Path, shape: Shape) -> None:
    network = network_of(shape)
    save_network(network, arguments_of(network), folder)
    write_json(folder / "card.json", {"classes": OTHERS})


def made_moments(folder: Path, shape: Shape) -> None:
    network = network_of(shape)
    features = moment_features(network, "cells", 0.3)
    means = FeatureMeans(normal("moments", features.size, 4, scale=0.02), features)
    save_means("moments", means, {"feature": "cells", "squares": 0.3}, folder, network)


@torch.no_grad()
def made_covariance(folder: Path, shape: Shape, flip: bool = False) -> None:
    features = CosineMoments(shape, 5, 2, 0.3, 0.7, flip)
    images, labels = public(shape).batch(np.arange(PUBLIC))
    table = features(images).T @ nn.functional.one_hot(labels % 4, 4).float() / PUBLIC
    save_means("covariance", FeatureMeans(table, features, 1e-4), features.arguments, folder)


def made_public(folder: Path, shape: Shape) -> None:
    save_images(folder, public(shape))
    card = PublicCard(enabled=True, source="digits", shape=shape, classes=OTHERS, images=PUBLIC)
    write_json(folder / "card.json", asdict(card))


def made_drawing(folder: Path, shape: Shape, kind: str = "") -> None:
    """Write a generator, and public images in place of images that it would draw."""
    save_generator(filled(new_generator(shape, 4, 4, 8, 0), kind), folder)
    images = public(shape)
    first = len(kind)
    save_images(folder, ImageSet(images.images[first:], images.labels[first:] % 4, CLASSES))


def unet_of(shape: Shape, classes: int = 4, kind: str = "") -> UNet:
    return filled(UNet(shape[1], shape[0], classes, NETWORK), kind)


def made_unet(folder: Path, shape: Shape, classes: int = 4, kind: str = "") -> None:
    unet_of(shape, classes, kind).save(folder)


def made_adapters(folder: Path, shape: Shape) -> None:
    """Write adapters on the network of `made_unet`."""
    model = unet_of(shape)
    with tempfile.TemporaryDirectory() as base:
        model.save(Path(base))
        add_lora(model, candidates(model), 2, seed=4)
        for name, value in model.named_parameters():
            if value.requires_grad:
                value.data.copy_(normal(name, *value.shape, scale=0.3))
        save_adapter(model, folder, Path(base) / WEIGHTS)


def made_histogram(folder: Path, shape: Shape, rows: int = 1) -> None:
    np.save(folder / "histogram.npy", normal("histogram", rows, 5, scale=9).double().numpy())
    write_json(
        folder / "histogram.json", {"public_classes": OTHERS, "votes": 1, "per_class": rows > 1}
    )


def made_teacher(folder: Path, shape: Shape) -> None:
    save_teacher(filled(TeacherNetwork(4, feature="pixels", shape=shape, dimension=8)), folder)


def made_embedding(folder: Path, shape: Shape) -> None:
    arguments = arguments_of(build_network("whitened", shape, 4, 4))
    network = filled(ProjectedFeatures(CELLS, shape, 6, arguments))
    about = {"seed": 3, "size": 16, "length_scales": LENGTH_SCALES, "teacher": 0.5}
    save_means(
        "embedding",
        FeatureMeans(normal("embedding", 16, 4, scale=0.1), None),
        about,
        folder,
        network,
    )


def made_selection(folder: Path, shape: Shape, kind: str = "sensitive") -> None:
    rows = np.arange(1, PUBLIC, 2)
    labels = np.arange(len(rows)) % (4 if kind == "sensitive" else 3)
    names = CLASSES if kind == "sensitive" else OTHERS[:3]
    save_choice(folder, rows, np.sort(labels), kind, names, names)


def made_saliency(folder: Path, shape: Shape) -> None:
    names = [[name] for name in candidates(unet_of(shape))]
    write_json(folder / "saliency.json", {"ranked": {"debiased": names[::-1], "raw": names}})


def made_stream(folder: Path, shape: Shape) -> None:
    """Write a release with a stream."""
    settings = Synthesize(
        sources={"auxiliary": 1.0}, count=20, relabel=True, mixed=0.25, stream=True
    )
    plan = SimpleNamespace(
        **vars(release_plan(ImageSet(np.zeros(0), np.zeros(0), CLASSES))) | {"shape": shape}
    )
    plan.settings = settings
    with tempfile.TemporaryDirectory() as place:
        paths = {name: Path(place) / name for name in ("auxiliary", "teacher")}
        for name, path in paths.items():
            path.mkdir()
            MADE[name](path, shape)
        teacher = load_teacher_network(paths["teacher"])
        images, labels, sources = draw_mixture(paths, settings, None, 0)
        varied = vary(images, labels, settings, teacher, 0)
        recipe = save_networks(folder, paths, settings, varied, None, 0, teacher)
    save_release(folder, varied, sources, Records(), plan, stream=asdict(recipe))


Maker = Callable[[Path, Shape], None]
MADE: dict[str, Maker] = {
    "count": made_counts,
    "central": made_central,
    "frequency": made_frequency,
    "classifier": made_classifier,
    "moments": made_moments,
    "covariance": made_covariance,
    "public": made_public,
    **{
        name: functools.partial(made_drawing, kind=name)
        for name, stage in STAGES.items()
        if stage.gives
    },
    "histogram": made_histogram,
    "teacher": made_teacher,
    "embedding": made_embedding,
    "select": made_selection,
    "pretrain": made_unet,
    "saliency": made_saliency,
    "finetune": functools.partial(made_unet, kind="finetune"),
    "synthesize": made_stream,
}

# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage under some settings.

    given: name of an input -> function that writes it instead of the function in MADE, or None if
    the stage that makes this input is switched off;
    tolerance: relative tolerance, above 1e-6 if the computation amplifies rounding errors.
    """

    stage: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    colour: bool = False
    grouped: bool = False
    group_cap: int = 1
    given: Mapping[str, Maker | None] = field(default_factory=dict)
    tolerance: float = 1e-6

    @property
    def shape(self) -> Shape:
        return (3 if self.colour else 1), 8, 8


def case(stage: str, /, **given: Any) -> Case:
    """Build a case. given: fields of `Case`, and settings of the stage."""
    own = {
        key: given.pop(key)
        for key in ("colour", "grouped", "group_cap", "given", "tolerance")
        if key in given
    }
    return Case(stage=stage, settings=given, **own)


def maps(*names: str, **more: Any) -> list[dict]:
    return [{"map": name, **more} for name in names]


# Tolerances: for sums of a float32 feature, for gradients through a network, and for results that
# depend on principal directions
FEATURE = 1e-5
GRADIENT = 5e-5
DIRECTIONS = 5e-4
DESCENT = {
    "tolerance": GRADIENT,
    "steps": 3,
    "batch": 12,
    "microbatch_size": 8,
    "learning_rate": 1e-3,
}
SHORT = {"tolerance": GRADIENT, "steps": 2, "width": 8}
FITTED = SHORT | {"batch": 16}
GENERATOR = FITTED | {"images": 10, "latent": 4}
REFIT = {key: value for key, value in FITTED.items() if key != "width"}
WARM_UP = {"tolerance": GRADIENT, "steps": 3, "batch": 12, "learning_rate": 1e-3}
TIMESTEPS = {"law": "timesteps"}
CLIPPED = DESCENT | {"max_grad_norm": 0.5}
AUXILIARY = {
    "fitted_on": "auxiliary",
    "max_norm": 0.3,
    "ridge": 1e-3,
    "last_rate": 0.2,
    "momentum": 0.8,
}
AUXILIARY |= {
    "learning_rate": 300.0,
    "average": 0.34,
    "feature": "deep-scattering",
    "tolerance": DIRECTIONS,
}
GAUSSIANS = {"target": "covariance", "images": 10, "tolerance": FEATURE}
CENTRAL = {"sources": {"central": 1.0}}
FITTED_IMAGES = {"sources": {"auxiliary": 1.0, "refine": 2.0}}
DRAWN = {"count": 8, "tolerance": GRADIENT}
VARIED = {"relabel": True, "distorted": 0.3, "tolerance": GRADIENT}
EVERY_MAP = maps(
    "pixels", "scattering", "deep-scattering", "moduli", "tangent", length_scales=[0.7]
)
OTHER_KERNELS = [*maps("pixels", kernel="linear"), *maps("moduli", kernel="squared")]
MIRRORED_COVARIANCE = functools.partial(made_covariance, flip=True)
HISTOGRAM_BY_CLASS = functools.partial(made_histogram, rows=4)
PUBLIC_CLASSES = functools.partial(made_selection, kind="public")

CASES: dict[str, Case] = {
    "count": case("count"),
    "count of groups": case("count", grouped=True),
    "count of capped groups": case("count", grouped=True, group_cap=4),
    "count switched off": case("central", repeats=1, given={"count": None}),
    "central mean": case("central", repeats=2, batch=10),
    "central mean, clipped": case("central", repeats=1, max_norm=1.5, colour=True),
    "central mean of groups": case("central", repeats=1, grouped=True),
    "central mode": case("central", repeats=2, batch=10, statistic="mode", bins=4),
    "frequency": case("frequency", size=40, tolerance=FEATURE),
    "frequency of groups": case("frequency", size=20, grouped=True, tolerance=FEATURE),
    "frequency of every map": case(
        "frequency", size=60, features=EVERY_MAP, colour=True, tolerance=FEATURE
    ),
    "frequency of blocks": case(
        "frequency",
        size=24,
        features=[*maps("pixels"), {"map": "deep-scattering", "block": 2}],
        tolerance=FEATURE,
    ),
    "frequency of colour-histogram": case(
        "frequency",
        size=24,
        features=[*maps("colour-histogram"), {"map": "colour-histogram", "block": 2}],
        colour=True,
        tolerance=FEATURE,
    ),
    "frequency by every kernel": case(
        "frequency",
        size=24,
        features=[{"map": "pixels", "kernel": "rational-quadratic", "weight": 2.0}, *OTHER_KERNELS],
        tolerance=FEATURE,
    ),
    "moments": case("moments", tolerance=FEATURE),
    "moments in colour": case("moments", colour=True, tolerance=FEATURE),
    "moments of groups": case("moments", grouped=True, tolerance=FEATURE),
    "covariance": case("covariance"),
    "covariance, mirrored": case("covariance", flip=True, colour=True),
    "histogram": case("histogram"),
    "histogram by class": case("histogram", per_class=True, votes=2, colour=True),
    "histogram of groups": case("histogram", votes=2, grouped=True),
    "teacher": case("teacher", dimension=4, steps=3, tolerance=DIRECTIONS),
    "teacher of auxiliary images": case(
        "teacher", **AUXILIARY, dimension=14, steps=3, batch=12, colour=True
    ),
    "teacher of patches, mirrored": case(
        "teacher",
        feature="patches",
        flip=True,
        dimension=6,
        steps=3,
        colour=True,
        tolerance=DIRECTIONS,
    ),
    "teacher of patches beside colour-histogram": case(
        "teacher",
        features=maps("patches", "colour-histogram"),
        dimension=6,
        steps=3,
        colour=True,
        tolerance=DIRECTIONS,
    ),
    "embedding": case("embedding", size=20, learned={"steps": 2}, tolerance=DIRECTIONS),
    "saliency": case("saliency", microbatch_size=8, tolerance=GRADIENT),
    "saliency of groups": case(
        "saliency",
        noise_levels=TIMESTEPS,
        microbatch_size=8,
        grouped=True,
        colour=True,
        tolerance=GRADIENT,
    ),
    "finetune": case("finetune", **CLIPPED, draws=2),
    "finetune of groups": case(
        "finetune", **CLIPPED, draws=2, grouped=True, group_cap=3, colour=True
    ),
    "finetune at timesteps": case("finetune", **CLIPPED, draws=4, noise_levels=TIMESTEPS),
    "finetune of attention": case("finetune", **DESCENT, draws=1, trainable="attention"),
    "finetune of adapters": case("finetune", **DESCENT, draws=1, trainable="attention-lora"),
    "finetune of salient matrices": case("finetune", **DESCENT, draws=1, trainable="salient"),
    "finetune of salient adapters": case("finetune", **DESCENT, draws=1, trainable="salient-lora"),
    "classifier": case("classifier", **SHORT),
    "classifier, whitened": case(
        "classifier", **SHORT, network="whitened", learning_rate=0.1, colour=True
    ),
    "auxiliary": case("auxiliary", **GENERATOR),
    "auxiliary in colour": case("auxiliary", **GENERATOR, colour=True),
    "auxiliary of moments": case("auxiliary", **GENERATOR, target="moments", colour=True),
    "auxiliary of covariances": case("auxiliary", **GAUSSIANS),
    "auxiliary of covariances and details": case(
        "auxiliary",
        **GAUSSIANS,
        details=True,
        colour=True,
        given={"covariance": MIRRORED_COVARIANCE},
    ),
    "refine": case("refine", **REFIT, images=10),
    "refine in colour": case("refine", **REFIT, images=10, colour=True),
    "select by votes": case("select", ratio=0.6),
    "select by votes of each class": case(
        "select", ratio=1.0, given={"histogram": HISTOGRAM_BY_CLASS}
    ),
    "select all": case("select", ratio=1.0, given={"histogram": None}),
    "select by the teacher": case("select", by="teacher", images=12, colour=True),
    "pretrain on central images": case("pretrain", **WARM_UP, phases=[CENTRAL]),
    "pretrain on modes": case(
        "pretrain", **WARM_UP, phases=[CENTRAL], given={"central": made_mode}
    ),
    "pretrain on public images": case(
        "pretrain", **WARM_UP, phases=[{"sources": {"public": 1.0}, "augment": 2}]
    ),
    "pretrain on public classes": case(
        "pretrain",
        **WARM_UP,
        phases=[{"sources": {"public": 1.0}}, CENTRAL],
        given={"select": PUBLIC_CLASSES},
    ),
    "pretrain with AMP": case(
        "pretrain",
        **WARM_UP,
        amp={"radius": 0.3},
        phases=[
            {"sources": {"auxiliary": 1.0}, "amp": True},
            {"sources": {"auxiliary": 1.0}, "amp": {"radius": 9}},
        ],
    ),
    **{
        f"synthesize from {name}": case("synthesize", **DRAWN, steps=3, sources={name: 1.0})
        for name in ("finetune", "pretrain", "refine", "auxiliary", "select")
    },
    "synthesize from adapters": case(
        "synthesize", **DRAWN, steps=3, given={"finetune": made_adapters}
    ),
    "synthesize with guidance": case(
        "synthesize", **DRAWN, steps=2, guidance=0.7, labels="uniform", colour=True
    ),
    "synthesize with the teacher's guidance": case(
        "synthesize", **DRAWN, steps=2, teacher_guidance=1.0
    ),
    "synthesize variants": case(
        "synthesize",
        **VARIED,
        count=30,
        sources={"auxiliary": 2.0, "refine": 1.0},
        mixed=0.2,
        colour=True,
    ),
    "student": case("student", **SHORT),
    "synthesize herded": case("synthesize", **DRAWN, herding=3, sources={"auxiliary": 1.0}),
    "synthesize herded in colour": case(
        "synthesize", **DRAWN, herding=4, relabel=True, sources={"refine": 1.0}, colour=True
    ),
    **{
        name: case(stage, **given)
        for name, (stage, given) in of_baselines("baseline_settings", "GOLDEN").items()
    },
}
# A stage without a case gets one with its default settings
PINNED = {case.stage for case in CASES.values()}
CASES |= {
    name: case(name)
    for name, stage in STAGES.items()
    if stage.kind is not Kind.LOCAL and name not in PINNED
}
# A map without a case gets one with the usual kernel, except imagenet's maps: an extra installs
# their weights
MAPPED = {each["map"] for case in CASES.values() for each in case.settings.get("features", ())}
MAPPED |= {"imagenet", "imagenet-middle"}
CASES |= {
    f"frequency of {name}": case(
        "frequency", size=24, features=maps(name), colour=True, tolerance=FEATURE
    )
    for name in FEATURES
    if name not in MAPPED
}

# --- a run whose charge adds no noise -------------------------------------------------------------


class NoNoise(NoiseSource):
    """A source with fixed draws, and zeros in place of noise."""

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class SilentRun(QueryRun):
    """A run of any stage on images in memory.

    encoded: encoded images, for stages that encode images;
    seen: name -> released sum, or images before they are rounded.
    """

    images: ImageSet
    encoded: dict[str, LatentSet] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)

    def open_charge(
        self, released: str, sensitivity: str, max_norm: float, *, latents: str | None = None
    ) -> Charge:
        record = {"id": "0" * 32, "unit": UNITS[self.plan.unit], "adjacency": ADD_OR_REMOVE_ONE}
        record["event"] = self.plan.mechanism.to_json()
        charge = Charge(
            record | {"stage": self.plan.stage, "released": released, "max_norm": max_norm},
            self.encoded[latents] if latents else self.images,
            odometer=SimpleNamespace(append=lambda *kind, **content: None),
            noise=NoNoise(seed=1),
            run=self.out.parent,
            lock=ExitStack(),
            group_cap=self.plan.group_cap,
        )
        release = charge.release

        def remembered(*arguments: Any, **more: Any) -> Tensor:
            found = release(*arguments, **more)
            self.seen[f"release {charge.used}"] = found.clone()
            return found

        charge.release = remembered  # type: ignore[method-assign]
        return charge

    @contextmanager
    def releasing(self, charge: Charge, *, local: bool = False) -> Iterator[Path]:
        assert charge.used == charge.uses
        with self.writing() as directory:
            yield directory

    def encode(self, _run: Any, function: Callable[[Tensor], Tensor], _encoder: str) -> str:
        """Replace `stages.latents.encoded` by a version without float16, whose rounding differs
        between processors.
        """
        images, labels = self.images.batch(np.arange(len(self.images)))
        self.encoded["rows"] = LatentSet(
            rows_alone(function, images).numpy(),
            labels.numpy(),
            self.images.classes,
            self.images.groups,
        )
        return "rows"

    def show(self, images: Tensor) -> Tensor:
        """Replace `as_bytes`, and record the drawn or varied images before they are rounded."""
        self.seen["drawn"] = torch.cat(
            [*([self.seen["drawn"]] if "drawn" in self.seen else []), images.detach()]
        )
        return as_bytes(images)


def import_all() -> None:
    for package in (sfumato, stages):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)


@contextmanager
def settled(run: SilentRun) -> Iterator[None]:
    """Fix randomness and arithmetic: secret draws, precision, signs of eigenvectors."""
    autocast = torch.autocast
    eigh = torch.linalg.eigh
    svd = torch.svd_lowrank

    def signed(vectors: Tensor) -> Tensor:
        largest = vectors.abs().argmax(dim=-2, keepdim=True)
        return vectors.gather(-2, largest).sign()

    def signed_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = eigh(matrix)
        return values, vectors * signed(vectors)

    def signed_svd(matrix: Tensor, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        left, values, right = svd(matrix, **more)
        return left * signed(right), values, right * signed(right)

    stand_ins = {
        "secret_generator": lambda device="cpu": torch.Generator(device).manual_seed(2),
        "fast_bfloat16": lambda device: False,
        "encoded": run.encode,
        "as_bytes": run.show,
    }
    begin = Gradients.__init__

    def begun(gradients: Gradients, *given: Any, **more: Any) -> None:
        """Draw once for blank images, before all other draws.

        When the values were pinned, the code did this to choose the precision.
        """
        begin(gradients, *given, **more)
        gradients.draw(torch.zeros(gradients.microbatch_size, *gradients.model.shape))

    import_all()  # otherwise, a module imported during the patch would keep the stand-ins
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        for module in [
            m for name, m in sys.modules.items() if name.split(".")[0] in ("sfumato", "stages")
        ]:
            for name in stand_ins.keys() & vars(module).keys():
                patch.setattr(module, name, stand_ins[name])
        patch.setattr(Gradients, "__init__", begun)
        patch.setattr(torch, "autocast", lambda kind, *rest, **more: autocast(kind, enabled=False))
        # Fewer directions than usual: with so few images, the last would consist of rounding errors
        patch.setattr("sfumato.queries.feature_means.EMBEDDING_DIMENSION", 8)
        patch.setattr(torch.linalg, "eigh", signed_eigh)
        patch.setattr(torch, "svd_lowrank", signed_svd)
        for name in [name for name in os.environ if name.startswith("SFUMATO_")]:
            patch.delenv(name)
        patch.setenv("SFUMATO_DEVICE", "cpu")
        patch.setenv("SFUMATO_STATE", str(run.out.parent / "state"))
        torch.manual_seed(0)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def inputs_of(case: Case, settings: Any, folder: Path) -> dict[str, Artifact]:
    """Write the artifacts that the stage reads under these settings. Returns them by name."""
    found = {}
    for name in (name for name in STAGES[case.stage].inputs if settings.reads(name)):
        make = case.given.get(name, MADE[name])
        if make is None:
            write_empty(folder / name, name)
        else:
            with writing(folder / name, name) as directory:
                make(directory, case.shape)
        found[name] = read_artifact(folder / name, name)
    return found


def fewer_images(kind: type[Settings]) -> AbstractContextManager[object]:
    """Let a stage that draws a fixed number of images draw only 10."""
    if "images" in kind.__class_vars__:
        return mock.patch.object(kind, "images", 10)
    return nullcontext()


def computed(case: Case) -> dict[str, Tensor]:
    """Return the stage's releases, draws and files, by name."""
    work = getattr(import_module(f"stages.{case.stage}"), case.stage)
    query = STAGES[case.stage].kind is Kind.QUERY
    kind = STAGES[case.stage].settings
    images = sensitive(case)
    settings = kind.model_validate({**case.settings, **({"noise": NOISE} if query else {})})
    rate, uses = settings.sampling(COUNT) if query else (1.0, 1)
    public_facts = {
        "dataset_id": "golden",
        "shape": case.shape,
        "classes": CLASSES,
        "size_hint": COUNT,
    }
    asked = {
        "stage": case.stage,
        "enabled": True,
        "settings": settings,
        "model": NETWORK,
        "seed": 7,
        "delta": 1e-5,
    }
    mechanism = Mechanism(noise_multiplier=NOISE, sample_rate=rate, uses=uses)
    groups = {"unit": GROUP if case.grouped else IMAGE, "group_cap": case.group_cap}
    plan = QueryPlan(**public_facts, **asked, **groups, mechanism=mechanism, digest="")
    with fewer_images(kind), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = SilentRun(plan=plan, inputs={}, images=images, out=folder / "out")
        with settled(run):
            run = replace(run, inputs=inputs_of(case, settings, folder))
            run.seen.clear()
            work(run, settings.on_this_machine())
        return run.seen | written(run.out)


# JSON files whose numbers and texts are compared with the pinned results
NUMBERS = ("counts.json", "saliency.json", "trainable.json")
# Columns of CSV files that are compared with the pinned results
COLUMNS = ("raw_norm", "debiased", "noised_gradient_norm", "parents")


def written(directory: Path) -> dict[str, Tensor]:
    """Return an artifact's arrays by file. All weights of a network are joined in one array."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".npy" and path.name != "kinds.npy":  # contains text
            found[path.name] = torch.from_numpy(np.load(path))
        elif path.suffix == ".safetensors":
            tensors = {
                name: value for name, value in sorted(load_file(path).items()) if not idle(name)
            }
            found[path.name] = torch.cat([value.flatten().double() for value in tensors.values()])
        elif path.name in NUMBERS:
            found[path.name] = torch.tensor(
                [*numbers(json.loads(path.read_text()))], dtype=torch.float64
            )
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                rows = [
                    [float(row[name]) for name in COLUMNS if name in row]
                    for row in csv.DictReader(file)
                ]
            found |= {path.name: torch.tensor(rows, dtype=torch.float64)} if any(rows) else {}
    return found


def idle(name: str) -> bool:
    """Return whether rounding errors determine the values of a tensor.

    This is true of two kinds of tensor: the bias of attention keys, because its exact gradient is
    zero and Adam enlarges the rounding errors; and principal directions, because features hardly
    vary along some of them. Results that depend on these tensors are pinned with the releases.
    """
    return name.endswith((".k.bias", "directions"))


def numbers(content: Any) -> Iterator[float]:
    """Yield the numbers of a JSON document in order. Each text is replaced by a checksum."""
    if isinstance(content, str):
        yield zlib.crc32(content.encode()) % 2**16
    elif isinstance(content, (int, float)):
        yield content
    else:
        for value in content.values() if isinstance(content, dict) else content:
            yield from numbers(value)


# --- the summaries --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    shape: list[int]
    dtype: str
    sum: float
    norm: float
    values: list[float]  # values at eight evenly spaced places

    @classmethod
    def of(cls, tensor: Tensor) -> Summary:
        flat = tensor.detach().double().flatten()
        places = torch.linspace(0, len(flat) - 1, min(8, len(flat))).long()
        total, norm, *values = (
            float(f"{value:.12g}") for value in (flat.sum(), flat.norm(), *flat[places])
        )
        return cls(
            list(tensor.shape), str(tensor.dtype).removeprefix("torch."), total, norm, values
        )

    def differences(self, now: Summary, tolerance: float) -> list[str]:
        """Describe the values that differ by more than the tolerance."""
        if (self.shape, self.dtype) != (now.shape, now.dtype):
            return [f"{self.dtype} {self.shape} is now {now.dtype} {now.shape}"]
        count = max(1, math.prod(self.shape))
        typical = self.norm / math.sqrt(count)
        flips = 1.0 if self.dtype == "uint8" else 0.0  # a pixel may be rounded to its neighbour
        pairs = {
            "sum": (self.sum, now.sum, tolerance * max(abs(self.sum), self.norm) + 3 * flips),
            "norm": (self.norm, now.norm, tolerance * self.norm + flips),
        } | {
            f"value {place}": (old, new, tolerance * max(abs(old), typical) + flips)
            for place, (old, new) in enumerate(zip(self.values, now.values, strict=True))
        }
        return [
            f"{what} {old:.9g} is now {new:.9g}"
            for what, (old, new, allowed) in pairs.items()
            if not abs(new - old) <= allowed + 1e-12
        ]


def summaries_of(name: str) -> dict[str, Summary]:
    return {what: Summary.of(tensor) for what, tensor in computed(CASES[name]).items()}


def read_golden() -> dict[str, dict]:
    return json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}


def differences(name: str, pinned: dict, found: Mapping[str, Summary]) -> list[str]:
    """Describe the results of a case that differ from the pinned ones."""
    known = {what: Summary(**content) for what, content in pinned["tensors"].items()}
    gone = [
        f"{what} is {'gone' if what in known else 'new'}"
        for what in sorted(known.keys() ^ found.keys())
    ]
    both = [what for what in known if what in found]
    tolerance = CASES[name].tolerance
    return gone + [
        f"{what}: {line}"
        for what in both
        for line in known[what].differences(found[what], tolerance)
    ]


# --- the tests ------------------------------------------------------------------------------------


def test_every_case_is_pinned():
    assert read_golden().keys() == CASES.keys(), (
        "write golden.json again: python tests/test_golden.py --write"
    )


@pytest.mark.parametrize("name", CASES)
def test_a_stage_computes_what_it_did_under_its_revision(name):
    pinned = read_golden()[name]
    stage = CASES[name].stage
    changed = differences(name, pinned, summaries_of(name))
    revision = STAGES[stage].revision
    raised = revision != pinned["revision"]
    again = "`python tests/test_golden.py --write`"
    assert not (changed and not raised), (
        f"what {stage} computes has changed ({'; '.join(changed[:4])}): if that is meant, raise "
        f"its revision in the table of stages and write the golden numbers again with {again}; "
        "otherwise, correct the change"
    )
    assert not raised, (
        f"{stage} has revision {revision}, and golden.json is of {pinned['revision']}: write it "
        f"with {again}"
    )


def write(names: list[str]) -> int:
    """Pin the named cases again, or all cases if none is named. Returns the exit code.

    A case whose results changed under the same revision is refused.
    """
    golden = read_golden()
    refused = []
    for name in names or CASES:
        found = summaries_of(name)
        revision = STAGES[CASES[name].stage].revision
        pinned = golden.get(name)
        changed = differences(name, pinned, found) if pinned else ["new"]
        if pinned and changed and pinned["revision"] == revision:
            refused.append(f"{name}: {'; '.join(changed[:4])}")
        elif changed or pinned["revision"] != revision:
            tensors = {what: asdict(summary) for what, summary in found.items()}
            golden[name] = {"stage": CASES[name].stage, "revision": revision, "tensors": tensors}
    GOLDEN.write_text(
        as_text({name: golden[name] for name in CASES if name in golden}), encoding="utf-8"
    )
    for line in refused:
        print(f"not written, for the revision of its stage was not raised: {line}")
    if refused:
        print(
            "Where a case itself was changed, and not its stage, remove it from golden.json first."
        )
    return 1 if refused else 0


def as_text(golden: Mapping[str, dict]) -> str:
    """Format the pinned results as JSON, with one line per tensor."""
    entries = []
    for name, entry in golden.items():
        lines = [
            f"   {json.dumps(what)}: {json.dumps(content)}"
            for what, content in entry["tensors"].items()
        ]
        head = (
            f' {json.dumps(name)}: {{"stage": {json.dumps(entry["stage"])}, "revision": '
            f"{entry['revision']}"
        )
        entries.append(head + ', "tensors": {\n' + ",\n".join(lines) + "\n  }}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    sys.exit(write(sys.argv[2:]))
