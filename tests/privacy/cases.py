"""Every query as a case for the privacy tests: how to run it on a few 8×8 images, its bound, and
what its charge draws.

`test_queries.py` fails for a query without a case; `tests/baselines` has the baselines' cases. The
cases run with a `Recorder` and with real charges, on images and groups, in one process and in
several.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from small_own_network import small_file
from torch import Tensor

from sfumato.data.images import ImageSet, Shape
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.gradients import Draws
from sfumato.dpsgd.run import Gradients, State, step
from sfumato.dpsgd.trainable import candidates
from sfumato.features import FEATURES as ALL_MAPS
from sfumato.features import OWN
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import ProjectedFeatures
from sfumato.privacy.charge import Charge
from sfumato.queries.central import query_central
from sfumato.queries.count import query_count
from sfumato.queries.feature_means import cosine_moments, moment_features, query_feature_means
from sfumato.queries.histogram import query_histogram
from sfumato.queries.saliency import query_saliency
from sfumato.queries.teacher import query_teacher
from sfumato.settings.dpsgd import Finetune, Saliency
from sfumato.settings.fields import Size
from sfumato.settings.queries import Central, FeatureMap, Teacher
from sfumato.settings.training import Architecture, Classifier
from sfumato.training.public_classifier import train_public_classifier

SHAPE = (1, 8, 8)
CLASSES = 10
PUBLIC = 50.0  # Public size in every query
# All maps except imagenet's, because an extra installs their weights
MAPS = [name for name in ALL_MAPS if not name.startswith("imagenet")]
C = 1e-3  # clip of gradients, far below their norms: every row is clipped


class Recorder:
    """A stand-in for a charge. It draws all its images, adds no noise, and records the releases.

    asked: for each release, the sum, its bound, and whether it is a sum of integers; given: whether
    to release fixed numbers instead of the sums, so that any remaining difference does not come
    from the releases.
    """

    noise_multiplier = 2.0
    sample_rate = 0.5
    sum = Charge.sum
    agree = Charge.agree
    check_alike = Charge.check_alike

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        uses: int = 1,
        size: int | None = None,
        given: bool = False,
    ):
        self.images = images
        self.labels = labels
        self.uses = uses
        self.size = size
        self.given = given
        self.asked: list[tuple[Tensor, float, bool]] = []

    @property
    def used(self) -> int:
        return len(self.asked)

    def batches(self, size: int, draws: int | None = None, *, labels_only: bool = False):
        size = self.size or size
        for start in range(0, len(self.images), size):
            yield self.images[start : start + size], self.labels[start : start + size]

    def release(self, total: Tensor, max_norm: float, *, integer: bool = False) -> Tensor:
        self.asked.append((total.clone(), max_norm, integer))
        random = torch.Generator().manual_seed(len(self.asked))
        return (
            (torch.randn(total.shape, generator=random) * 20).round().to(total.dtype)
            if self.given
            else total
        )

    def probe(self) -> tuple[Tensor, Tensor]:
        labels = (
            torch.tensor([-1])
            if self.labels.ndim == 1
            else self.labels.new_zeros(1, self.labels.shape[1])
        )
        return self.images.new_zeros(1, *self.images.shape[1:]), labels


class GivenCharge:
    """A stand-in for a charge that draws the given batches.

    released: fixed sum that every call returns, so that any difference in what an observer finds
    has another origin. With None, each call returns the true sum.
    """

    noise_multiplier = 1.0
    sample_rate = 0.1

    def __init__(self, drawn: list[tuple[Tensor, Tensor]], released: Tensor | None = None) -> None:
        self.drawn, self.given, self.seen = list(drawn), released, []

    def agree(self, *given: object) -> None:
        pass

    def batches(self, size: int, draws: int = 1):
        images, labels = self.drawn.pop(0)
        yield from zip(images.split(size), labels.split(size), strict=True) if len(images) else ()

    def release(self, total: Tensor, max_norm: float, integer: bool = False) -> Tensor:
        self.seen.append((total, max_norm))
        return total if self.given is None else self.given


@dataclass(frozen=True, kw_only=True)
class Case:
    """A query under some settings.

    query: function that spends a charge of `uses` uses, and returns what it computes from the
    releases; bound: Δ; integer: whether its sums are of integers; axis: axis of a sum that has the
    classes, if an image adds only to its own class, or None; encode: function from images, (B, 1,
    8, 8), to the vectors that the charge draws instead, (B, d), or None; rounding: relative
    rounding error of a sum.
    """

    stage: str
    query: Callable[[Any], object]
    bound: float
    uses: int = 1
    integer: bool = False
    axis: int | None = None
    encode: Callable[[Tensor], Tensor] | None = None
    rounding: float = 1e-9

    def drawn(self, images: Tensor) -> Tensor:
        """Return the rows that a charge draws from the images; each row depends on its image
        only.
        """
        return images if self.encode is None else rows_alone(self.encode, images)

    def totals(self, drawn: Tensor, labels: Tensor, **more: Any) -> list[Tensor]:
        """Return the sums before noise, one per release.

        Later sums depend on fixed releases, not on the earlier sums.
        """
        charge = Recorder(drawn, labels, self.uses, given=True, **more)
        self.query(charge)
        return [total for total, _, _ in charge.asked]

    def moves(
        self, images: Tensor, labels: Tensor, left_out: Iterable[int], **more: Any
    ) -> list[float]:
        """Return by how much (L2) leaving out each of these images moves each release."""
        drawn = self.drawn(images)
        found = []
        whole = self.totals(drawn, labels, **more)
        assert len(whole) == self.uses and all(total.isfinite().all() for total in whole)
        for i in left_out:
            keep = torch.arange(len(images)) != i
            rest = self.totals(drawn[keep], labels[keep], **more)
            found += [
                float((a.double() - b.double()).norm()) for a, b in zip(whole, rest, strict=True)
            ]
        return found

    def first_release(self, charge: Any) -> Tensor:
        """Return the first release of a real charge."""
        release = charge.release
        found = []
        charge.release = lambda *given, **more: found.append(release(*given, **more)) or found[-1]
        self.query(charge)
        return found[0].double()


# --- inputs of the queries ------------------------------------------------------------------------

FEATURES = FourierFeatures(SHAPE, [FeatureMap(), FeatureMap(map="scattering")], 120, seed=0)
BLOCKS = FourierFeatures(SHAPE, [FeatureMap(), FeatureMap(map="moduli", block=2)], 80, seed=0)
LEARNED = FourierFeatures(SHAPE, [FeatureMap(), FeatureMap(map="moduli")], 80, seed=1)


@functools.cache
@torch.enable_grad()
def classifier():
    """Train a public network."""
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    digits = ImageSet(images, bunch.target.astype(np.int64), tuple(str(i) for i in range(CLASSES)))
    return train_public_classifier(
        digits, Classifier(network="whitened", width=8, steps=30), seed=0
    )[0].eval()


def drawn_images(
    count: int, seed: int = 0, classes: int = CLASSES, shape: Shape = SHAPE
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, *shape, generator=random), torch.randint(
        classes, (count,), generator=random
    )


@functools.cache
def moment_map() -> FourierFeatures:
    return moment_features(classifier())


def unet(classes: int = CLASSES, several: bool = False, resolution: Size = 8) -> UNet:
    torch.manual_seed(0)
    model = UNet(
        resolution,
        1,
        classes,
        Architecture(width=8, multipliers=(1,), attention=(0,)),
        several=several,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def seeded_draws(model: object, images: Tensor, draws: int, *rest: Any, **more: Any) -> Draws:
    """Make draws that depend only on the image (for a group, on its first picture), and not on
    other images drawn.
    """
    levels = [torch.zeros(0, draws)]
    noise = [torch.zeros(0, draws, *images.shape[-3:])]
    for shown in images:
        first = (shown[0] if shown.ndim == 4 else shown).double().nan_to_num(0, 0, 0).clamp(-9, 9)
        mark = (first * 255).round().sum().abs() * 7919 + (first[0, 3, 3] * 255).abs()
        random = torch.Generator().manual_seed(int(mark))
        levels.append(torch.randn(1, draws, generator=random).exp())
        noise.append(torch.randn(1, draws, *images.shape[-3:], generator=random))
    return Draws(
        levels=torch.cat(levels),
        noise=torch.cat(noise),
        drop=torch.zeros(len(images), draws, dtype=torch.bool),
    )


def central(charge: Any, shape: Shape = SHAPE, **settings: Any) -> Tensor:
    denominators = torch.full((CLASSES,), PUBLIC).double()
    return query_central(charge, denominators, shape, Central(**{"repeats": 2, **settings}))


def teacher(
    charge: Any, classes: int = CLASSES, offsets: Tensor | float = 0.0, **settings: Any
) -> Tensor:
    chosen = Teacher(
        **{"steps": 3, "learning_rate": 2.0, "ridge": 0.1, "last_rate": 0.5, **settings}
    )
    spread = torch.linspace(1, 2, charge.probe()[0].shape[1]).double().diag()
    return query_teacher(charge, chosen, classes, PUBLIC, spread, lambda done, total: None, offsets)


def saliency_gradients(
    model: Any, generator: torch.Generator | None = None, **settings: Any
) -> Gradients:
    """Return the gradients of all candidates of a model."""
    chosen = Saliency(**settings)
    parameters = {name: model.get_parameter(name) for name in candidates(model)}
    return Gradients(model, parameters, chosen, PUBLIC, False, generator)


def saliency(
    charge: Any, model: Any = None, draw: Callable[..., Draws] = seeded_draws, **settings: Any
) -> dict[str, Tensor]:
    gradients = saliency_gradients(
        model or unet(), **{"microbatch_size": 16, "max_norm": C, **settings}
    )
    if "generator" not in settings:
        draws = gradients.config.draws
        gradients.draw = functools.partial(draw, None, draws=draws)  # type: ignore[method-assign]
    return query_saliency(charge, gradients)


def finetune(charge: Any, draws: int = 1, model: UNet | None = None) -> dict[str, Tensor]:
    chosen = Finetune(draws=draws, max_grad_norm=C, microbatch_size=16)
    state = State(model or unet(), chosen, public_batch=PUBLIC, autocast=False)
    state.draw = functools.partial(seeded_draws, None, draws=draws)  # type: ignore[method-assign]
    return {
        **state.tensors(),
        **{name: torch.tensor(value) for name, value in step(state, charge).items()},
    }


@functools.cache
@torch.enable_grad()
def own_map() -> ProjectedFeatures:
    """Return the features of a network whose weights come from a file."""
    with tempfile.TemporaryDirectory() as folder:
        features = ProjectedFeatures(
            OWN, SHAPE, 40, small_file(Path(folder) / "weights").arguments()
        )
    features.fit(torch.rand(300, *SHAPE, generator=torch.Generator().manual_seed(1)), 0.5, seed=0)
    return features


def unit_rows(images: Tensor) -> Tensor:
    return torch.nn.functional.normalize(images.flatten(1), dim=1)


def means(features: Any, classes: int = CLASSES, **more: Any) -> Callable[[Any], Tensor]:
    return lambda charge: query_feature_means(charge, features, classes, PUBLIC, **more)


def modes(**settings: Any) -> dict[str, Any]:
    return {
        "query": functools.partial(central, statistic="mode", **settings),
        "integer": True,
        "axis": 0,
        "uses": 2,
    }


def moments(classes: int = CLASSES) -> dict[str, Any]:
    """Return fields of a case. The public network is trained when the case first runs."""
    query = lambda charge: means(moment_map(), classes, cached=True)(charge)  # noqa: E731
    return {"query": query, "encode": lambda images: moment_map().vectors(images)}


GRADIENTS = {"bound": C, "rounding": 1e-5}
VOTES = {"bound": math.sqrt(2), "integer": True}

CASES = {
    "count": Case(
        stage="count", query=lambda c: query_count(c, CLASSES), bound=1, integer=True, axis=0
    ),
    "mean": Case(
        stage="central", query=functools.partial(central, max_norm=2.0), bound=2, uses=2, axis=0
    ),
    "mean, unclipped": Case(stage="central", query=central, bound=8, uses=2, axis=0),
    "mode": Case(stage="central", bound=8, **modes(bins=4)),
    "frequency": Case(stage="frequency", query=means(FEATURES), bound=1, axis=1),
    "frequency of blocks": Case(stage="frequency", query=means(BLOCKS), bound=1, axis=1),
    "covariance": Case(
        stage="covariance", query=means(cosine_moments(SHAPE, flip=False)), bound=1, axis=1
    ),
    "moments": Case(stage="moments", **moments(), bound=1, axis=1),
    "embedding": Case(
        stage="embedding",
        query=means(LEARNED, cached=True),
        encode=LEARNED.vectors,
        bound=1,
        axis=1,
    ),
    "histogram": Case(
        stage="histogram", query=lambda c: query_histogram(c, classifier(), 2), **VOTES
    ),
    "histogram by class": Case(
        stage="histogram",
        query=lambda c: query_histogram(c, classifier(), 2, CLASSES),
        **VOTES,
        axis=0,
    ),
    "teacher": Case(stage="teacher", query=teacher, encode=unit_rows, bound=1.4142, uses=3),
    "teacher on a network of one's own": Case(
        stage="teacher",
        query=teacher,
        encode=lambda images: own_map()(images),
        bound=1.4142,
        uses=3,
    ),
    "saliency": Case(stage="saliency", query=saliency, **GRADIENTS),
    "finetune": Case(stage="finetune", query=finetune, **GRADIENTS),
    "finetune of 8 draws": Case(
        stage="finetune", query=functools.partial(finetune, draws=8), **GRADIENTS
    ),
}
