"""Estimate how long each stage takes on this machine when it is idle.

The estimate is the number of operations of the stage's networks, counted on one blank image, divided by the speed of
this machine. The speed is measured once per machine with a small reference network, in processor time of one thread, so
that other programs have little effect. A free stage corrects its estimate by the duration of its last run. Durations of
queries depend on sensitive draws, so they are not stored.
"""

import json
import math
import platform
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sfumato.data.images import Shape
from sfumato.diffusion.unet import UNet
from sfumato.errors import UNREADABLE
from sfumato.evaluation.classifiers import build_classifier
from sfumato.evaluation.downstream import schedule_of
from sfumato.features.batch_invariant import one_thread
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.public_network import build_network
from sfumato.features.teacher_network import FITTED
from sfumato.generators.one_step import block_of_steps, new_generator
from sfumato.privacy.resolved import StagePlan
from sfumato.queries.feature_means import LEARNED
from sfumato.release.herding import COMPARED_CELLS, TOGETHER
from sfumato.runtime import distributed
from sfumato.runtime.compute import THREADS, device, fast_bfloat16
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.params import Params
from sfumato.settings.release import Synthesize
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_private
from sfumato.training.supervised import Schedule

DURATIONS = Path("cache") / "durations.json"  # path in the state directory
FRAME = ("prepare sensitive", "prepare public", "plan", "ledger", "report")  # commands without a resolved file
START = 8.0  # seconds that DVC, imports and the files of an artifact add to a stage
WRITTEN = 80  # cost of writing one number, in operations
CALL = 40_000  # cost of calling one operator, in operations
TRAINING = 3  # cost of a training step, in forward passes
PUBLIC_CLASSES = 100  # assumed number of classes of a public set that is not prepared yet

_counted: dict[str, int] = {}


class Count(TorchDispatchMode):
    """Counts operations of convolutions and matrix products, and converts the cost of other calls into operations."""

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
    """Count the operations of a forward pass, on one image, of the network that `build` returns.

    inputs: arguments of the pass; a tuple is the shape of a blank tensor.
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
    """The numbers that determine the work of the stages. public_images: number of public images."""

    params: Params
    shape: Shape
    classes: int
    public_images: int = 0

    def network(self, stage: str, block: int = 1) -> int:
        """Count the operations for one image in a stage's network. block: side of the pixel blocks that it uses."""
        shape = self.shape
        label = torch.zeros(1, dtype=torch.int64)
        settings = getattr(self.params, stage)
        match stage:
            case "frequency":
                blocks = shape[0], *(-(-side // block) for side in shape[1:])
                return operations_of(partial(FourierFeatures, shape, settings.features, settings.size, 0), blocks)
            case "auxiliary":
                sizes = self.classes, settings.latent, settings.width
                return operations_of(partial(new_generator, shape, *sizes, 0), (settings.latent,), label, block)
            case "classifier":
                build = partial(build_network, settings.network, shape, PUBLIC_CLASSES, settings.width)
                return operations_of(build, shape)
            case "teacher":
                network = settings.network and settings.network.arguments()
                if settings.reads("classifier"):
                    trained = self.params.classifier.model_dump(include={"network", "width"})
                    network = {**trained, "shape": shape, "classes": PUBLIC_CLASSES}
                about = settings.features or settings.feature, shape, settings.dimension
                return operations_of(partial(ProjectedFeatures, *about, network, settings.flip), shape)
            case "student":
                return operations_of(partial(build_network, "residual", shape, self.classes, settings.width), shape)
            case "embedding":
                return operations_of(partial(build_network, LEARNED.network, shape, self.classes, LEARNED.width), shape)
        network = partial(UNet, shape[1:], shape[0], self.classes, **self.params.model.network())
        return operations_of(network, shape, (), label)

    def of(self, name: str) -> float | None:
        """Estimate the operations of a stage; None if its time is unknown until it has run, as with a public model.

        A query without a case below reads each image that it draws once.
        """
        settings = getattr(self.params, name)
        size = self.params.privacy.size
        if self.params.model.directory is not None and (STAGES[name].network or name == "synthesize"):
            return None
        number = 4 * (self.classes + WRITTEN)  # for each number of a row, to clip it and add it to its class's sum
        seen = 0.0  # number of images in all draws of a query
        if name in QUERIES:
            sample_rate, draws = settings.sampling(size)
            seen = size * sample_rate * draws
        match name:
            case "frequency":
                return self.network("frequency") * seen
            case "teacher":
                return self.network("teacher") * (FITTED + size) + settings.dimension * number * seen
            case "embedding":
                looks = self.params.auxiliary.images + seen
                training = TRAINING * settings.learned.steps * LEARNED.batch
                return self.network("embedding") * (training + looks) + self.network("teacher") * looks
            case "saliency" | "finetune" | "adversarial":
                # A clipped gradient costs as much as 4 forward passes.
                return 4 * settings.draws * seen * self.network(name)
            case "classifier":
                return TRAINING * settings.steps * settings.batch * self.network("classifier")
            case "auxiliary" if settings.target == "covariance":  # images are drawn from Gaussians
                return 0.0
            case "auxiliary":  # coarse to fine
                generator = new_generator(self.shape, self.classes, settings.latent, settings.width, 0)
                coarsest = max(feature.block for feature in self.params.frequency.features)
                blocks = block_of_steps([block for block in generator.blocks if block <= coarsest], settings.steps)
                costs = {block: self.network(name, block) + self.network("frequency", block) for block in set(blocks)}
                return TRAINING * settings.batch * sum(costs[block] for block in blocks)
            case "refine":
                cost = self.network("auxiliary") + self.network("frequency") + self.network("teacher")
                if self.params.runs("embedding"):
                    cost += self.network("embedding") + self.network("teacher")
                return TRAINING * settings.steps * settings.batch * cost
            case "select":
                return self.network("teacher") * self.public_images * (settings.by == "teacher")
            case "pretrain":
                # A perturbed step needs two passes.
                passes = sum(phase.steps * phase.batch * (1 + bool(phase.amp)) for phase in settings.phases)
                return TRAINING * passes * self.network(name)
            case "synthesize":
                return settings.count * self.drawing(settings)
            case "student":
                drawn = self.params.synthesize.model_copy(update={"herding": 1})
                return settings.steps * settings.batch * (TRAINING * self.network(name) + 1.25 * self.drawing(drawn))
            case "evaluate":
                return TRAINING * self.evaluation(settings)
        if name not in QUERIES:
            return None
        if "classifier" in self.params.inputs_of(name):
            return self.network("classifier") * seen
        return math.prod(self.shape) * number * seen

    def drawing(self, settings: Synthesize) -> float:
        """Estimate the operations to draw one image, on average."""
        evaluations = (2 * settings.steps - 1) * (1 + (settings.guidance > 0))  # network passes of Heun's solver
        cost = 0.0
        if settings.reads("teacher"):
            cost += self.network("teacher") * (1 + settings.distorted + settings.mixed)
        if settings.herding > 1:
            seen = self.network("frequency") + self.network("teacher") * settings.relabel
            compared = COMPARED_CELLS * min(settings.herding * settings.count / self.classes, TOGETHER)
            cost += settings.herding * seen + WRITTEN / 2 * compared  # a read costs half of a write
        for source, weight in settings.sources.items():
            share = weight / sum(settings.sources.values())
            if source in ("auxiliary", "refine"):
                cost += share * self.network("auxiliary") * settings.herding
            elif source in ("finetune", "pretrain"):
                cost += share * self.network(source) * evaluations * settings.herding
        return cost

    def evaluation(self, settings: Evaluate) -> int:
        """Estimate the operations of one pass over the images of all trainings."""
        drawn = self.params.synthesize
        sets = [drawn.count] * len(settings.seeds)
        if settings.bound:
            sets += [self.params.privacy.size] * len(settings.seeds)
        if drawn.relabel:
            sets.append(int(drawn.count * (1 - drawn.distorted - drawn.mixed)))
        steps = sum(schedule_of("cnn", images, settings.epochs, settings.steps).steps for images in sets)
        networks = [partial(build_classifier, name, self.shape, self.classes) for name in settings.classifiers]
        return Schedule.batch * steps * sum(operations_of(network, self.shape) for network in networks)


def now() -> float:
    """Return processor time in seconds if one thread does the work, otherwise wall time.

    Other programs affect processor time little.
    """
    if device().type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def gain(threads: int) -> float:
    """Estimate the speed-up by this many threads: about the square root of their number."""
    return 1.0 if device().type == "cuda" else threads**0.5


@cache
def operations_per_second() -> float:
    """Measure the speed of one thread: the best of several passes of a convolution and a matrix product."""
    layers = [nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(64 * 14 * 14, 576)]
    operations = operations_of(partial(nn.Sequential, *layers), (64, 14, 14))  # counted before the layers are moved
    network = nn.Sequential(*layers).to(device())
    images = torch.rand(64, 64, 14, 14, device=device())
    with torch.no_grad(), torch.autocast(device().type, torch.bfloat16, enabled=fast_bfloat16(device().type)):
        best = min(timeit.repeat(lambda: network(images), timer=now, number=1, repeat=20))
    return len(images) * operations / best


class Machine:
    """The speed of this machine and the last duration of each stage, stored in the state directory."""

    def __init__(self, state: Path) -> None:
        name = torch.cuda.get_device_name() if device().type == "cuda" else platform.machine()
        identity = [platform.node(), name, THREADS, torch.__version__, "operations"]
        self.path = state / DURATIONS
        self.content: dict[str, Any] = {"machine": identity, "runs": {}}
        with suppress(*UNREADABLE):
            kept = dict(read_json(self.path))
            if kept.get("machine") == identity:
                self.content = kept

    def write(self) -> None:
        if self.path.parent.parent.is_dir():
            replace_private(self.path, json.dumps(self.content, indent=1).encode())

    def seconds(self, operations: float) -> float:
        if "speed" not in self.content:
            self.content["speed"] = operations_per_second()
            self.write()
        return operations / (float(self.content["speed"]) * gain(THREADS))


def expected_seconds(
    params: Params, shape: Shape, classes: int, state: Path, public_images: int = 0
) -> dict[str, float | None]:
    """Estimate the seconds of each stage and of the commands of FRAME, by name; None if nothing is known.

    The number of images is taken from `privacy.size_hint`, never from a private count.

    shape: (C, H, W) of an image; public_images: number of public images, if a stage reads them; state: the private
    state directory.
    """
    machine = Machine(state)
    work = Work(params, shape, classes, public_images)
    expected: dict[str, float | None] = dict.fromkeys(STAGES, 1.0)  # DVC's time for a stage that is off
    with one_thread():  # several threads would wait for each other while other programs run
        for name in filter(params.runs, STAGES):
            seconds = corrected(name, work, machine)
            expected[name] = None if seconds is None else START + seconds
    return {**expected, **dict.fromkeys(FRAME, START)}


def corrected(name: str, work: Work, machine: Machine) -> float | None:
    """Estimate a stage's seconds, scaled by the ratio of its last run's duration to the estimate for that run."""
    run = machine.content["runs"].get(name, {})
    same_model = run.get("model") in (None, work.params.model.non_default())
    then = None
    if run.get("shape") == list(work.shape) and same_model:
        with suppress(*UNREADABLE):  # written by another version
            settings = STAGES[name].settings.model_validate(run["settings"])
            then = replace(work, params=work.params.model_copy(update={name: settings}))
    operations = work.of(name)
    if operations is None:
        return float(run["seconds"]) if then else None
    seconds = machine.seconds(operations)
    if then is None:
        return seconds
    before = machine.seconds(then.of(name) or 0.0)
    if before > 1 and 1 / 4.0 < run["seconds"] / before < 4.0:  # otherwise it was resumed, or other programs ran
        return seconds * run["seconds"] / before
    return seconds


@contextmanager
def timed(state: Path, plan: StagePlan[Any]) -> Iterator[None]:
    """Store the duration of a free stage, to two digits, if it succeeds. Only the first process writes.

    It is stored in the private state directory, with the settings that determine it.
    """
    begun = now()
    yield
    seconds = (now() - begun) * gain(torch.get_num_threads()) / gain(THREADS)
    if distributed.is_main():
        machine = Machine(state)
        machine.content["runs"][plan.stage] = {
            "seconds": float(f"{seconds:.1e}"),
            "settings": plan.settings.model_dump(mode="json"),
            "shape": list(plan.shape),
            "model": plan.model and plan.model.non_default(),
        }
        with suppress(OSError):
            machine.write()
