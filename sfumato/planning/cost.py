"""What the work of a stage costs, in operations: those of its networks, each counted once on one blank image."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sfumato.data.images import Shape
from sfumato.diffusion.unet import UNet
from sfumato.evaluation.classifiers import build_classifier
from sfumato.evaluation.downstream import schedule_of
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.public_network import build_network
from sfumato.features.teacher_network import FITTED
from sfumato.generators.one_step import block_of_steps, new_generator
from sfumato.queries.feature_means import LEARNED
from sfumato.settings.params import Params
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.training.supervised import Schedule

WRITTEN = 80  # operations that take as long as writing a number
CALL = 40_000  # and as the call of an operator
TRAINING = 3  # forward passes that take as long as a step of a training
PER_IMAGE = 4  # and as a clipped per-image gradient
PUBLIC_CLASSES = 100  # of a public set that is not prepared yet
ONE_LABEL = torch.zeros(1, dtype=torch.int64)

_counted: dict[str, int] = {}


class Count(TorchDispatchMode):
    """Counts the operations of convolutions and matrix products, and what takes as long as so many of them."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += CALL
        if not func.is_view:
            self.operations += WRITTEN * sum(one.numel() for one in tree_leaves(out) if isinstance(one, Tensor))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=out)
        return out


def operations_of(build: Callable[[], nn.Module], *inputs: Any) -> int:
    """The operations of a forward pass of the network that `build` makes, on one image.

    inputs: of the pass; a tuple is the shape of a blank tensor.
    """
    key = repr((build, inputs))
    if key not in _counted:
        network = build().eval()
        blank = [torch.zeros(1, *each) if isinstance(each, tuple) else each for each in inputs]
        with torch.no_grad(), Count() as count:
            network(*blank)
        _counted[key] = count.operations
    return _counted[key]


@dataclass(frozen=True)
class Work:
    """What decides the work of the stages. public_images: how many there are."""

    params: Params
    shape: Shape
    classes: int
    public_images: int = 0

    @property
    def diffusion(self) -> int:
        network = partial(UNet, self.shape[1:], self.shape[0], self.classes, **self.params.model.network())
        return operations_of(network, self.shape, (), ONE_LABEL)

    @property
    def public_network(self) -> int:
        settings = self.params.classifier
        network = partial(build_network, settings.network, self.shape, PUBLIC_CLASSES, settings.width)
        return operations_of(network, self.shape)

    @property
    def teacher_map(self) -> int:
        settings = self.params.teacher
        network = settings.network and settings.network.arguments()
        if settings.reads("classifier"):
            trained = self.params.classifier.model_dump(include={"network", "width"})
            network = {**trained, "shape": self.shape, "classes": PUBLIC_CLASSES}
        about = settings.features or settings.feature, self.shape, settings.dimension
        return operations_of(partial(ProjectedFeatures, *about, network, settings.flip), self.shape)

    @property
    def learned_network(self) -> int:
        """Of the network that `embedding` trains."""
        network = partial(build_network, LEARNED.network, self.shape, self.classes, LEARNED.width)
        return operations_of(network, self.shape)

    def generator(self, block: int = 1) -> int:
        """Of the image of the level of this block."""
        settings = self.params.auxiliary
        network = partial(new_generator, self.shape, self.classes, settings.latent, settings.width, 0)
        return operations_of(network, (settings.latent,), ONE_LABEL, block)

    def fourier(self, block: int = 1) -> int:
        """Of means of blocks of so many pixels a side."""
        settings = self.params.frequency
        channels, *sides = self.shape
        seen = (channels, *(-(-side // block) for side in sides))
        return operations_of(partial(FourierFeatures, self.shape, settings.features, settings.size, 0), seen)

    def of(self, name: str) -> float | None:
        """Operations of a stage; None if its time is unknown until it ran: of a public model, and without a case."""
        settings = getattr(self.params, name)
        if self.params.model.directory is not None and (STAGES[name].network or name == "synthesize"):
            return None
        if name in QUERIES:
            return self.of_query(name, settings)
        match name:
            case "classifier":
                return TRAINING * settings.steps * settings.batch * self.public_network
            case "auxiliary" if settings.target == "covariance":  # drawn from Gaussians
                return 0.0
            case "auxiliary":  # coarse to fine
                generator = new_generator(self.shape, self.classes, settings.latent, settings.width, 0)
                coarsest = max(feature.block for feature in self.params.frequency.features)
                blocks = block_of_steps([block for block in generator.blocks if block <= coarsest], settings.steps)
                costs = {block: self.generator(block) + self.fourier(block) for block in set(blocks)}
                return TRAINING * settings.batch * sum(costs[block] for block in blocks)
            case "refine":
                cost = self.generator() + self.fourier() + self.teacher_map
                if self.params.runs("embedding"):
                    cost += self.learned_network + self.teacher_map
                return TRAINING * settings.steps * settings.batch * cost
            case "select":
                return self.teacher_map * self.public_images * (settings.by == "teacher")
            case "pretrain":
                passes = 0
                for phase in settings.phases:
                    ascents = phase.amp.steps if phase.amp else 0
                    passes += phase.steps * phase.batch * (ascents + 1)
                return TRAINING * passes * self.diffusion
            case "synthesize":
                evaluations = (2 * settings.steps - 1) * (1 + (settings.guidance > 0))  # of Heun's solver
                per_image = 0.0
                if settings.reads("teacher"):
                    per_image += self.teacher_map * (1 + settings.distorted + settings.mixed)
                for source, weight in settings.sources.items():
                    share = weight / sum(settings.sources.values())
                    if source in ("auxiliary", "refine"):
                        per_image += share * self.generator()
                    elif source in ("finetune", "pretrain"):
                        per_image += share * self.diffusion * evaluations
                return settings.count * per_image
            case "evaluate":
                return TRAINING * self.evaluation
        return None

    def of_query(self, name: str, settings: Any) -> float:
        """Operations of a query. One that has no case here looks once at each image that it draws."""
        sample_rate, draws = settings.sampling(self.params.privacy.size)
        drawn = self.params.privacy.size * sample_rate * draws  # images of all draws together
        number = 4 * (self.classes + WRITTEN)  # of a row, which is clipped and added to the sum of its class
        match name:
            case "frequency":
                return self.fourier() * drawn
            case "teacher":
                passes = self.teacher_map * (FITTED + self.params.privacy.size)
                return passes + settings.dimension * number * drawn
            case "embedding":
                passes = self.params.auxiliary.images + drawn
                training = TRAINING * settings.learned.steps * LEARNED.batch
                return self.learned_network * (training + passes) + self.teacher_map * passes
            case "saliency" | "finetune" | "adversarial":
                return PER_IMAGE * getattr(settings, "draws", 1) * drawn * self.diffusion
        if "classifier" in STAGES[name].inputs and settings.reads("classifier"):
            return self.public_network * drawn
        return math.prod(self.shape) * number * drawn

    @property
    def evaluation(self) -> int:
        """Of one pass over the images of all trainings."""
        settings = self.params.evaluate
        drawn = self.params.synthesize
        sets = [drawn.count] * len(settings.seeds)
        if settings.bound:
            sets += [self.params.privacy.size] * len(settings.seeds)
        if drawn.relabel:
            sets.append(int(drawn.count * (1 - drawn.distorted - drawn.mixed)))
        steps = sum(schedule_of("cnn", images, settings.epochs, settings.steps).steps for images in sets)
        networks = [partial(build_classifier, name, self.shape, self.classes) for name in settings.classifiers]
        return Schedule.batch * steps * sum(operations_of(network, self.shape) for network in networks)
