"""How long each stage should take on this machine: public numbers of work, times steps that are timed on blank images.

No sensitive image is read and no private number used, so the answer may be shown. What a step costs is remembered by
what decides it, in the state directory: asking again takes no time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.baselines.discriminator import Discriminator
from sfumato.baselines.dp_gan import FEATURES, LATENT, WIDTH, AdversarialState
from sfumato.baselines.feta_sampler import STEPS, new_sampled
from sfumato.data.images import ImageSet, Shape
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.gradients import clipped_gradient_sum
from sfumato.dpsgd.run import State, update
from sfumato.evaluation.downstream import Schedule
from sfumato.evaluation.protocol import seconds_per_step
from sfumato.evaluation.scores import schedule_from
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.cosine import CosineMoments
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import CELLS, CLASSIFIER, ProjectedFeatures
from sfumato.features.public_network import arguments_of, build_network
from sfumato.generators.gaussian import GaussianGenerator
from sfumato.generators.one_step import SETTLING, Match, draw_images, fit_generator, new_generator
from sfumato.planning.clock import (
    Timings,
    Told,
    rate_of_products,
    seconds_of,
    seconds_of_further_steps,
    seconds_of_steps,
    start_of_a_program,
)
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.rows import Rows, bounded_sum, one_hot
from sfumato.queries.covariance import cosine_moments
from sfumato.queries.embedding import embedding_rows, learned_features
from sfumato.queries.teacher import FITTED, TeacherNetwork, error_rows, guide_by
from sfumato.runtime.compute import device
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.params import Params
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Classifier, Fit, Phase
from sfumato.training.curriculum import warm_up
from sfumato.training.public_classifier import train_public_classifier

Map = Callable[[Tensor], Tensor]
PUBLIC_CLASSES = 100  # of a public set that is not known yet: they hardly matter to the time of a step
FRAME = ("prepare sensitive", "prepare public", "plan", "ledger", "report")  # stages that are not in the table
UNTIMED = ("evolve",)  # whose time depends on its generator
IDLE = 1.0  # seconds of a stage that is switched off, with what DVC does around it
AROUND = 1.0  # seconds that DVC adds to a stage, and a stage to its work: hashes, a card, a picture, the journal


class Blanks:
    """The work of every stage under `params`, timed on black images of `shape` (C, H, W) in so many classes."""

    def __init__(self, params: Params, shape: Shape, classes: int, timings: Timings, public_images: int = 0) -> None:
        self.params, self.shape, self.classes, self.timings = params, (*shape,), classes, timings
        self.sensitive, self.public_images = params.privacy.size, public_images

    # --- what several stages share ------------------------------------------------------------------------------------

    def unit(self, what: str, decides: Mapping[str, Any], measure: Callable[[], list[float]]) -> list[float]:
        return self.timings.of(what, {"shape": self.shape, "classes": self.classes, **decides}, measure)

    def images(self, count: int) -> Tensor:
        return torch.zeros(count, *self.shape, device=device())

    def image_set(self, count: int) -> ImageSet:
        channels, height, width = self.shape
        labels = np.arange(count, dtype=np.int64) % self.classes
        blank = np.zeros((count, height, width, channels), dtype=np.uint8)
        return ImageSet(blank, labels, tuple(map(str, range(self.classes))))

    def start(self) -> float:
        """Seconds until a stage begins with its work."""
        return self.timings.of("start", {}, start_of_a_program)[0] + AROUND

    def drawn(self, settings: Any) -> int:
        """Images that a draw of a query expects."""
        return min(settings.batch or self.sensitive, self.sensitive)

    def by_class(self, width: int) -> Rows:
        """Rows of 64 images, (64, width), each in its class."""
        return Rows(torch.rand(64, width), one_hot(torch.zeros(64, dtype=torch.int64), self.classes))

    def alone(self, what: str, decides: Mapping[str, Any], function: Callable[[], Map]) -> float:
        """Seconds of a map of one sensitive image, which is taken as if it were alone."""

        def measure() -> list[float]:
            map = function()
            if isinstance(map, nn.Module):
                map.to(device()).eval()
            matters = place_matters(map, self.shape, device())
            count = 8 if matters else 64
            return [seconds_of(lambda: rows_alone(map, self.images(count), matters)) / count]

        return self.unit(f"{what}, alone", decides, measure)[0]

    @torch.no_grad()
    def together(self, what: str, decides: Mapping[str, Any], function: Callable[[], nn.Module]) -> float:
        """Seconds of a map of one public or released image among many."""

        def measure() -> list[float]:
            map = function().to(device()).eval()
            return [seconds_of(lambda: map(self.images(64))) / 64]

        return self.unit(f"{what}, together", decides, measure)[0]

    def summed(self, what: str, decides: Mapping[str, Any], rows: Callable[[], Rows]) -> float:
        """Seconds that one image takes in a bounded sum. rows: those of 64 images."""
        return self.unit(f"{what}, summed", decides, lambda: [seconds_of(lambda: bounded_sum(rows(), 1.0)) / 64])[0]

    def principal(self, images: int, width: int, directions: int) -> float:
        """Seconds that the principal directions of so many rows take: about ten products of matrices."""
        rate = self.timings.of("products of matrices", {}, lambda: [rate_of_products(torch.float32)])[0]
        return 10 * 2 * images * width * (directions + 16) / rate

    # --- the networks -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def fourier(self) -> FourierFeatures:
        frequency = self.params.frequency
        return FourierFeatures(self.shape, frequency.features, frequency.size, 0)

    @functools.cached_property
    def cosine(self) -> CosineMoments:
        return cosine_moments(self.params.covariance, self.shape)

    @functools.cached_property
    def teacher_features(self) -> ProjectedFeatures:
        settings, arguments = self.params.teacher, None
        if settings.feature == CLASSIFIER:
            network = self.params.classifier.network
            arguments = arguments_of(build_network(network, self.shape, PUBLIC_CLASSES, self.params.classifier.width))
        return with_directions(ProjectedFeatures(settings.feature, self.shape, settings.dimension, arguments))

    @functools.cached_property
    def studied(self) -> ProjectedFeatures:
        """The features of a network that studied the generator's images."""
        learned = self.params.embedding.learned
        arguments = arguments_of(build_network("whitened", self.shape, self.classes, learned.width))
        return with_directions(ProjectedFeatures(CELLS, self.shape, learned.dimension, arguments))

    @functools.cached_property
    def learned(self) -> FourierFeatures:
        return learned_features(self.params.embedding, self.teacher_features, self.studied, 0).to(device())

    @property
    def equal(self) -> Tensor:
        """Equal shares of the classes."""
        return torch.full((self.classes,), 1 / self.classes)

    @property
    def frequency_key(self) -> dict[str, Any]:
        return {"features": self.params.frequency.features, "size": self.params.frequency.size}

    @property
    def teacher_key(self) -> dict[str, Any]:
        teacher, classifier = self.params.teacher, self.params.classifier
        key: dict[str, Any] = {"feature": teacher.feature, "dimension": teacher.dimension}
        own = teacher.feature == CLASSIFIER
        return key | ({"network": classifier.network, "width": classifier.width} if own else {})

    @property
    def learned_key(self) -> dict[str, Any]:
        embedding = self.params.embedding
        learned = {"width": embedding.learned.width, "dimension": embedding.learned.dimension}
        return {**self.teacher_key, **learned, "size": embedding.size, "scales": embedding.length_scales}

    def widths(self) -> list[int]:
        """Outputs and kept directions of the teacher's map, and of the network that studied the generator's images."""

        def measure() -> list[float]:
            return [
                number for map in (self.teacher_features, self.studied) for number in (len(map.mean), map.dimension)
            ]

        return [int(width) for width in self.unit("widths", self.learned_key, measure)]

    def blank_teacher(self) -> TeacherNetwork:
        features = self.teacher_features
        return TeacherNetwork.of(features, torch.zeros(features.dimension, self.classes)).to(device())

    def teacher_together(self) -> float:
        return self.together("teacher", self.teacher_key, lambda: self.teacher_features)

    def training(self, settings: Classifier, images: int, classes: int) -> float:
        """Seconds of the training of a network on public or released images."""

        def measure() -> list[float]:
            blank = self.image_set(max(2 * settings.batch, 3))
            return [seconds_of_steps(lambda told: train_public_classifier(blank, settings, 0, told))]

        decides = {"network": settings.network, "width": settings.width, "batch": settings.batch}
        step = self.unit("network, step", {**decides, "classes": classes}, measure)[0]
        network = functools.partial(build_network, settings.network, self.shape, classes, settings.width)
        return step * settings.steps + self.together("network", decides, network) * settings.validation * images

    def fitting(self, name: str, settings: Fit, decides: Mapping[str, Any], fit: Callable[[Fit, Told], None]) -> float:
        """Seconds of a generator's fit and of the images that it draws. fit: starts one, to be timed."""
        half = settings.model_copy(update={"batch": max(1, settings.batch // 2)})
        everything = {"width": self.params.auxiliary.width, "batch": settings.batch, **decides}
        step = 2 * self.unit(name, everything, lambda: [seconds_of_steps(functools.partial(fit, half))])[0]
        drawn = settings.images + SETTLING * settings.batch
        return step * settings.steps + drawn * self.drawing()

    def drawing(self) -> float:
        """Seconds of one image of a generator, stored as PNG sets and arrays are."""

        def measure() -> list[float]:
            generator = self.generator().to(device()).eval()
            return [seconds_of(lambda: draw_images(generator, 100)) / 100]

        drawn = self.params.auxiliary
        key = {"width": drawn.width, "network": drawn.network, "target": drawn.target}
        return self.unit("drawing", key, measure)[0]

    def generator(self) -> Any:
        settings = self.params.auxiliary
        if settings.target == "covariance":
            return GaussianGenerator(self.cosine.arguments, self.classes, 1 if settings.details else 0)
        if settings.network == "denoiser":
            return new_sampled(self.shape, self.classes, settings.width, 0)
        return new_generator(self.shape, self.classes, settings.latent, settings.width, 0)

    def blank_match(self, features: FourierFeatures) -> Any:
        return Match(torch.zeros(features.size, self.classes, device=device()), features)

    def network(self) -> Any:
        channels, resolution, _ = self.shape
        network = self.params.model.network()
        return UNet(resolution=resolution, channels=channels, classes=self.classes, **network).to(device())

    # --- the stages ---------------------------------------------------------------------------------------------------

    def central(self) -> float:
        central = self.params.central
        each = self.summed("central", {}, lambda: self.by_class(math.prod(self.shape)))
        return central.repeats * self.drawn(central) * each * (central.bins if central.statistic == "mode" else 1)

    def frequency(self) -> float:
        size = self.params.frequency.size
        each = self.alone("frequency", self.frequency_key, lambda: self.fourier)
        return self.sensitive * (each + self.summed("frequency", {"size": size}, lambda: self.by_class(size)))

    def covariance(self) -> float:
        key = self.params.covariance.model_dump(exclude={"noise"})
        each = self.alone("covariance", key, lambda: self.cosine)
        return self.sensitive * (each + self.summed("covariance", key, lambda: self.by_class(self.cosine.size)))

    def auxiliary(self) -> float:
        if self.params.auxiliary.target == "covariance":
            return self.params.auxiliary.images * self.drawing()

        def fit(settings: Fit, told: Told) -> None:
            fit_generator(self.generator(), [self.blank_match(self.fourier)], settings, self.equal, 0, told)

        return self.fitting("auxiliary", self.params.auxiliary, self.frequency_key, fit)

    def refine(self) -> float:

        def fit(settings: Fit, told: Told) -> None:
            teacher = self.blank_teacher()
            matches = [self.blank_match(self.fourier), self.blank_match(self.learned)]
            fit_generator(self.generator(), matches, settings, self.equal, 0, told, teacher=teacher, agreement=0.01)

        return self.fitting("refine", self.params.refine, self.frequency_key | self.learned_key, fit)

    def classifier(self) -> float:
        return self.training(self.params.classifier, self.public_images, PUBLIC_CLASSES)

    def votes(self) -> float:
        """Seconds that the public classifier takes for one sensitive image."""
        classifier = self.params.classifier
        network = functools.partial(build_network, classifier.network, self.shape, PUBLIC_CLASSES, classifier.width)
        return self.alone("votes", {"network": classifier.network, "width": classifier.width}, network)

    def moments(self) -> float:
        return self.sensitive * self.votes()

    def histogram(self) -> float:
        return self.drawn(self.params.histogram) * self.votes()

    def teacher(self) -> float:
        settings = self.params.teacher
        known = self.params.auxiliary.images if settings.fitted_on == "auxiliary" else self.public_images
        fitted, (outputs, dimension, _, _) = min(FITTED, known), self.widths()
        labels, weights = torch.zeros(64, dtype=torch.int64), torch.zeros(dimension, self.classes).double()
        each = self.summed(
            "teacher", {"dimension": dimension}, lambda: error_rows(weights, torch.rand(64, dimension), labels)
        )
        return (
            2 * fitted * self.teacher_together()
            + self.principal(fitted, outputs, dimension)
            + self.sensitive * self.alone("teacher", self.teacher_key, lambda: self.teacher_features)
            + settings.steps * self.drawn(settings) * each
        )

    def embedding(self) -> float:
        settings, (_, dimension, outputs, kept) = self.params.embedding, self.widths()
        how = settings.learned.model_dump(include={"width", "steps", "batch", "learning_rate"})
        images = self.params.auxiliary.images
        labels = torch.zeros(64, dtype=torch.int64)
        vectors = torch.rand(64, dimension + kept)
        fitted = min(FITTED, images)
        each = self.alone("learned", self.learned_key, lambda: self.learned.to(device()).eval().vectors)
        each += self.summed(
            "learned", self.learned_key, lambda: embedding_rows(self.learned.cpu(), self.classes, vectors, labels)
        )
        return (
            images * self.teacher_together()
            + self.training(Classifier(network="whitened", **how), images, self.classes)
            + fitted * self.together("studied", self.learned_key, lambda: self.studied)
            + self.principal(fitted, outputs, kept)
            + self.sensitive * each
        )

    def select(self) -> float:
        return self.public_images * self.teacher_together() if self.params.select.by == "teacher" else 0.0

    def pretrain(self) -> float:
        return sum(
            phase.steps * self.denoising(phase) * (STEPS if phase.fits else 1) for phase in self.params.pretrain.phases
        )

    def denoising(self, phase: Phase) -> float:
        """Seconds of a step of the warm-up."""

        def measure() -> list[float]:
            blanks = torch.zeros(4, *self.shape), torch.zeros(4, dtype=torch.int64)
            sources: dict[str, Any] = dict.fromkeys(map(str, phase.sources), blanks)
            model, settings = self.network(), self.params.pretrain

            def train(steps: int) -> None:
                shortened = phase.model_copy(update={"steps": steps})
                warm_up(model, [shortened], sources, settings, 0)

            return [seconds_of_further_steps(train)]

        decides = {"model": self.params.model, "batch": phase.batch, "augment": phase.augment, "amp": phase.amp}
        return self.unit("denoising", {**decides, "sources": len(phase.sources)}, measure)[0]

    def step(self, state: State, settings: Finetune) -> list[float]:
        """Seconds of the clipped gradient of one image, and of the noise and the update of all weights by a sum."""
        images, labels = (
            self.images(state.microbatch_size),
            torch.zeros(state.microbatch_size, dtype=torch.int64, device=device()),
        )

        def once() -> None:
            drawn = state.draw(images)
            bound, chunk = settings.max_grad_norm, state.microbatch_size
            clipped_gradient_sum(
                state.model,
                state.parameters,
                images,
                labels,
                drawn,
                bound,
                chunk,
                state.autocast,
                None,
                state.draws_per_pass,
            )

        noise = NoiseSource()
        each = seconds_of(once) / state.microbatch_size
        return [each, seconds_of(lambda: update(state, noise.gaussian((state.size,), 1.0).to(device())))]

    def steps(self, settings: Finetune, each: float, step: float) -> float:
        """Seconds of all steps, of so long an image and so long an update."""
        return settings.steps * (self.drawn(settings) * each + step)

    def gradient(self, trainable: str, draws: int) -> list[float]:
        """`step` of the diffusion model."""

        def measure() -> list[float]:
            settings = self.params.finetune.model_copy(update={"draws": draws})
            return self.step(State(self.network(), settings, public_batch=float(self.drawn(settings))), settings)

        return self.unit("gradient", {"model": self.params.model, "trainable": trainable, "draws": draws}, measure)

    def adversarial(self) -> float:
        """A step of the discriminator, and as much again for generated images and the generator."""
        settings = self.params.adversarial

        def measure() -> list[float]:
            judge = Discriminator(self.shape[1], self.shape[0], self.classes, FEATURES).to(device())
            generator = new_generator(self.shape, self.classes, LATENT, WIDTH, 0)
            public_batch = float(self.drawn(settings))
            state = AdversarialState(judge, generator, settings, self.equal, 0, public_batch=public_batch)
            noise, released = NoiseSource(), state.judge.size
            each, _ = self.step(state.judge, state.judge.config)

            class Blank:
                def batches(self, size: int, draws: int) -> tuple[()]:
                    return ()

                def release(self, total: Tensor, bound: float) -> Tensor:
                    return noise.gaussian((released,), 1.0).to(device())

            charge: Any = Blank()
            return [each, seconds_of(lambda: state.step(charge))]

        each, step = self.unit("adversarial", {}, measure)
        drawn = settings.steps * (self.drawn(settings) * each + step)
        return drawn + settings.images * self.drawing()

    def saliency(self) -> float:
        return self.sensitive * self.gradient("all", self.params.saliency.draws)[0]

    def finetune(self) -> float:
        settings = self.params.finetune
        return self.steps(settings, *self.gradient(settings.trainable, settings.draws))

    def synthesize(self) -> float:
        settings = self.params.synthesize
        whole = sum(settings.sources.values())
        found = 0.0
        for name, weight in settings.sources.items():
            images = settings.count * weight / whole
            if name in ("auxiliary", "refine", "adversarial"):
                found += images * self.drawing()
            elif name in ("finetune", "pretrain"):
                found += images * settings.steps * self.sampling()
        if settings.reads("teacher"):
            seen = 1 + settings.augmented + settings.distorted + settings.mixed  # a variant is seen before and after
            found += seen * settings.count * self.teacher_together()
        return found

    def sampling(self) -> float:
        """Seconds of one image and one step of the solver."""
        guidance, strength = self.params.synthesize.guidance, self.params.synthesize.teacher_guidance
        decides = {"model": self.params.model, "guided": guidance > 0, **(self.teacher_key if strength else {})}

        def measure() -> list[float]:
            model, labels = self.network(), torch.zeros(32, dtype=torch.int64)
            random, guide = torch.Generator().manual_seed(0), guide_by(self.blank_teacher(), 1.0) if strength else None
            return [seconds_of(lambda: model.draw(labels, 3, guidance, random, guide=guide)) / 32 / 3]

        return self.unit("sampling", decides, measure)[0]

    def evaluate(self) -> float:
        settings, params = self.params.evaluate, self.params
        sets = [params.synthesize.count, *(settings.images for _ in settings.stages)]
        sets += [self.sensitive] if settings.bound else []
        schedules = [(name, schedule_from(settings, name, count)) for name in settings.classifiers for count in sets]
        found = len(settings.seeds) * sum(self.learning(*pair) for pair in schedules)
        held_out = self.sensitive * params.data.holdout_fraction / (1 - params.data.holdout_fraction)
        return found + (held_out * self.teacher_together() if settings.teacher else 0.0)

    def learning(self, name: str, schedule: Schedule) -> float:
        """Seconds of the training of a classifier that scores the release."""

        decides = {"name": name, "batch": schedule.batch, "size": schedule.size}
        step = self.unit("learning", decides, lambda: [seconds_per_step(name, schedule, self.shape, self.classes)])[0]
        return schedule.steps * step

    def seconds(self, name: str) -> float:
        """Seconds of one stage, from the start of its program to its end."""
        if not self.params.runs(name):
            return IDLE
        work = getattr(self, name, None)
        return self.start() + (work() if work is not None else 0.0)


def with_directions(features: ProjectedFeatures) -> ProjectedFeatures:
    """Features that look in random directions, as if they had been fitted: zeros may be quicker than numbers."""
    features.directions.normal_(generator=torch.Generator().manual_seed(0))
    return features.to(device())


def expected_seconds(
    params: Params, shape: Shape, classes: int, timings: Timings, public_images: int = 0
) -> dict[str, float | None]:
    """Seconds of every stage by name, those of FRAME too; None where nothing is known, as of a public model.

    shape: (C, H, W); public_images: how many there are, where a stage reads them. All is by `privacy.size_hint`, never
    by a count of private images.
    """
    blanks = Blanks(params, shape, classes, timings, public_images)
    unknown = {*UNTIMED}
    if params.model.directory is not None:
        unknown |= {"synthesize", *(name for name, stage in STAGES.items() if stage.network)}
    found = {name: None if name in unknown and params.runs(name) else blanks.seconds(name) for name in STAGES}
    return {**found, **dict.fromkeys(FRAME, blanks.start())}
