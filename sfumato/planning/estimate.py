"""How long each stage should take on this machine when it is idle: operations of its networks divided by its speed.

The operations are counted on one blank image. The speeds are those of a small reference network, and of writing a large
tensor: measured once per machine, in processor time of one thread, so that other programs count little. A free stage
that ran before corrects its estimate by the time it took. Durations of queries depend on sensitive draws: they are not
kept.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.data.images import Shape
from sfumato.errors import UNREADABLE
from sfumato.evaluation.classifiers import build_classifier
from sfumato.evaluation.detector import CLASSIFIER as DETECTOR
from sfumato.evaluation.detector import STEPS
from sfumato.evaluation.downstream import schedule_of
from sfumato.evaluation.metrics.fidelity import chosen_metrics
from sfumato.evaluation.scores import MOVED
from sfumato.evaluation.shift import SHIFTS
from sfumato.features import FEATURES
from sfumato.features.batch_invariant import one_thread
from sfumato.features.fourier import FourierFeatures
from sfumato.features.own_network import OwnFeatures
from sfumato.features.projection import CLASSIFIER
from sfumato.features.public_network import build_network
from sfumato.features.teacher_network import FITTED
from sfumato.generators.one_step import SETTLING, block_of_steps, new_generator
from sfumato.planning.cost import Cost, cost_of, cost_of_diffusion, cost_of_generator, cost_of_map
from sfumato.privacy.resolved import StagePlan
from sfumato.queries.feature_means import DIMENSION, LEARNED
from sfumato.runtime import distributed
from sfumato.runtime.compute import THREADS, device, fast_bfloat16
from sfumato.settings.params import Params
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_private

FILE = Path("cache") / "durations.json"  # below the state directory
PRODUCTS = 1.3  # products of a tensor with a number that take as long as an operator of a network
CALL = 2e-5  # seconds of one operator besides its arithmetic
TRAINING, PER_IMAGE = 3, 4  # passes of a training step, and of a clipped per-image gradient, in forward passes
NOISE = 2000  # operations of noise and update, per trained weight
BATCH = 64  # images in one pass without gradients
DISTORTING = 170  # written elements for each number of an image that is distorted, as long as that takes
PUBLIC_CLASSES = 100  # of a public set that is not prepared yet
FRAME = ("prepare sensitive", "prepare public", "plan", "ledger", "report")  # commands that the plan does not resolve
READ, READ_CALLS = 20, 4  # of a picture that is decoded and stored: written elements for each of its numbers, calls
OFF = 1.0  # seconds of a stage that is switched off, with DVC's part
START = 8.0  # seconds that DVC, imports and the files of an artifact add to a stage
FACTOR = 4.0  # a past run that differs more than this from its estimate is not used: it was resumed, or disturbed
MEASURED = 0.5  # seconds of the speed's measurement
PARALLEL = 0.5  # n threads are about n to this power times as fast as one


# --- the machine ------------------------------------------------------------------------------------------------------


def now() -> float:
    """Seconds of processor time if one thread does the work, so that other programs count little; else wall time."""
    if device().type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def gain(threads: int) -> float:
    """How many times as fast so many threads should be as one."""
    return 1.0 if device().type == "cuda" else threads**PARALLEL


class Machine:
    """The speed of this machine, and the last run of each stage on it: measured once, kept in the state directory."""

    def __init__(self, state: Path) -> None:
        self.path, found = state / FILE, dict[str, Any]()
        name = torch.cuda.get_device_name() if device().type == "cuda" else platform.machine()
        identity = [platform.node(), name, THREADS, torch.__version__, "idle"]
        with suppress(*UNREADABLE):
            found = dict(read_json(self.path))
        self.content: dict[str, Any] = found if found.get("machine") == identity else {"machine": identity, "runs": {}}

    def write(self) -> None:
        if self.path.parent.parent.is_dir():
            replace_private(self.path, json.dumps(self.content, indent=1).encode())

    def speed(self, name: str, measure: Callable[[], float]) -> float:
        """Of all threads: what `measure` finds for one of them, measured once."""
        if name not in self.content:
            self.content[name] = measure()
            self.write()
        return float(self.content[name]) * gain(THREADS)

    def seconds(self, cost: Cost, images: float, batch: float = BATCH, autocast: bool = False) -> float:
        """Seconds of passes over so many images. autocast: in bfloat16 if the device has it, otherwise in float32."""
        fast = autocast and fast_bfloat16(device().type)
        name = "speed_bfloat16" if fast else "speed_float32"
        arithmetic = cost.products / self.speed(name, functools.partial(products_per_second, fast))
        writing = cost.elements / self.speed("written", written_per_second)
        return images * (arithmetic + writing + CALL * cost.calls / max(batch, 1))


@functools.cache
def products_per_second(bfloat16: bool) -> float:
    """Operations per second of a small convolution and a matrix product, by the best of several passes."""
    layers = [nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(64 * 14 * 14, 576)]
    network, images = nn.Sequential(*layers), torch.rand(BATCH, 64, 14, 14)
    cost = cost_of(network, images[:1])
    network, images = network.to(device()), images.to(device())
    best, begun = math.inf, now()
    with torch.no_grad(), torch.autocast(device().type, torch.bfloat16, enabled=bfloat16):
        network(images)  # warms up
        while best == math.inf or now() - begun < MEASURED:
            start = now()
            network(images)
            best = min(best, now() - start)
    return BATCH * cost.products / best


@functools.cache
def written_per_second() -> float:
    """Elements per second that operators read and write, of tensors beyond the nearest caches; the best of passes."""
    tensor = torch.rand(2**22, device=device())
    best, begun = math.inf, now()
    while best == math.inf or now() - begun < MEASURED / 5:
        start = now()
        tensor * 0.5
        best = min(best, now() - start)
    return len(tensor) / best / PRODUCTS


# --- the stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the entries of WORK are made of, in seconds."""

    params: Params
    shape: Shape
    classes: int
    machine: Machine
    public_images: int  # how many there are

    @property
    def sensitive(self) -> int:
        return self.params.privacy.size

    def drawn(self, settings: Any) -> int:
        """Images that a draw of a query expects."""
        return min(settings.batch or self.sensitive, self.sensitive)

    def passes(self, cost: Cost, images: float, autocast: bool = False) -> float:
        return self.machine.seconds(cost, images, autocast=autocast)

    def sums(self, width: float, images: float) -> float:
        """Rows of so many numbers, clipped and added to the sum of their class in float64."""
        return self.passes(Cost(4 * width * self.classes, 4 * width), images)

    def training(self, cost: Cost, settings: Any) -> float:
        return TRAINING * self.machine.seconds(cost, settings.steps * settings.batch, settings.batch, autocast=True)

    def fit(self, settings: Any, cost: Cost = Cost(0), coarse_to_fine: bool = False) -> float:
        """A generator's fit to the first release, and through maps of this cost, and the images that it draws."""
        features = self.params.frequency.features
        blocks = [block for block in self.blocks if block <= max(feature.block for feature in features)]
        steps = Counter(block_of_steps(blocks, settings.steps) if coarse_to_fine else [1] * settings.steps)
        found = self.passes(self.generator(), settings.images + SETTLING * settings.batch)
        for block, number in steps.items():
            level = self.generator(block) + self.fourier(block) + cost
            found += self.training(level, settings.model_copy(update={"steps": number}))
        return found

    def directions(self, images: int, width: int, number: int) -> float:
        """The principal directions of rows of so many numbers: about ten products of matrices."""
        return self.passes(Cost(20 * width * (number + 16)), images)

    def generator(self, block: int = 1) -> Cost:
        """Of the image of the level of this block."""
        settings = self.params.auxiliary
        return cost_of_generator(self.shape, self.classes, settings.latent, settings.width, block)

    @property
    def blocks(self) -> tuple[int, ...]:
        settings = self.params.auxiliary
        return new_generator(self.shape, self.classes, settings.latent, settings.width, 0).blocks

    def fourier(self, block: int = 1) -> Cost:
        """Of means of blocks of so many pixels a side."""
        settings, (channels, *sides) = self.params.frequency, self.shape
        seen = (channels, *(-(-side // block) for side in sides))
        return cost_of_map(FourierFeatures, seen, self.shape, settings.features, settings.size, 0)

    @property
    def public_network(self) -> Cost:
        settings = self.params.classifier
        return cost_of_map(build_network, self.shape, settings.network, self.shape, PUBLIC_CLASSES, settings.width)

    @property
    def teacher_map(self) -> Cost:
        feature, own = self.params.teacher.feature, self.params.teacher.network
        if own is not None:
            found = cost_of_map(OwnFeatures, self.shape, own)
        elif feature == CLASSIFIER:
            found = self.public_network
        else:
            found = cost_of_map(FEATURES[feature], self.shape, self.shape)
        times = 2 if self.params.teacher.flip else 1
        return Cost(times * found.products, times * found.elements, times * found.calls, found.width)

    @property
    def studied(self) -> Cost:
        return cost_of_map(build_network, self.shape, "whitened", self.shape, self.classes, LEARNED.width)

    @property
    def learned(self) -> Cost:
        """The map of the query `embedding`."""
        settings = self.params.embedding
        width = self.params.teacher.dimension + DIMENSION
        return self.teacher_map + self.studied + Cost(width * settings.size, 2 * settings.size)

    @property
    def diffusion(self) -> tuple[Cost, int]:
        return cost_of_diffusion(self.params.model.model_dump_json(), self.shape, self.classes)


def teacher_seconds(work: Work) -> float:
    settings = work.params.teacher
    known = work.params.auxiliary.images if settings.fitted_on == "auxiliary" else work.public_images
    fitted = min(FITTED, known)
    passes = work.passes(work.teacher_map, 2 * fitted + work.sensitive)
    directions = work.directions(fitted, work.teacher_map.width, settings.dimension)
    return passes + directions + work.sums(settings.dimension, settings.steps * work.drawn(settings))


def embedding_seconds(work: Work) -> float:
    settings, images = work.params.embedding, work.params.auxiliary.images
    study = work.training(work.studied, LEARNED.model_copy(update={"steps": settings.learned.steps}))
    query = work.passes(work.learned, work.sensitive) + work.sums(settings.size, work.sensitive)
    return work.passes(work.teacher_map, images) + study + query


def refine_seconds(work: Work) -> float:
    learned = work.learned if work.params.runs("embedding") else Cost(0)
    return work.fit(work.params.refine, learned + work.teacher_map)


def pretrain_seconds(work: Work) -> float:
    phases = work.params.pretrain.phases
    passes = (1 if phase.amp is None else 1 + phase.amp.steps for phase in phases)
    return sum(n * work.training(work.diffusion[0], phase) for n, phase in zip(passes, phases, strict=True))


def finetune_seconds(work: Work) -> float:
    (cost, weights), settings = work.diffusion, work.params.finetune
    gradients = PER_IMAGE * work.passes(cost, work.drawn(settings) * settings.draws, autocast=True)
    return settings.steps * (gradients + work.passes(Cost(NOISE * weights), 1))


def synthesize_seconds(work: Work) -> float:
    settings, found = work.params.synthesize, 0.0
    evaluations = (2 * settings.steps - 1) * (2 if settings.guidance > 0 else 1)  # of Heun's solver
    for name, weight in settings.sources.items():
        images = settings.count * weight / sum(settings.sources.values())
        if name in ("auxiliary", "refine"):
            found += work.passes(work.generator(), images)
        elif name in ("finetune", "pretrain"):
            found += work.passes(work.diffusion[0], images * evaluations, autocast=True)
    found += work.passes(Cost(0, DISTORTING * math.prod(work.shape)), settings.count * settings.distorted)
    variants = 1 + settings.distorted + settings.mixed
    return found + (work.passes(work.teacher_map, variants * settings.count) if settings.reads("teacher") else 0.0)


def evaluate_seconds(work: Work) -> float:
    settings, found = work.params.evaluate, 0.0
    drawn, moved = work.params.synthesize, MOVED * len(SHIFTS)
    plain = [int(drawn.count * (1 - drawn.distorted - drawn.mixed))] if drawn.relabel else []
    sets = [drawn.count, *plain]
    for images in sets + [work.sensitive] * settings.bound:
        for name in settings.classifiers:
            schedule = schedule_of(name, images, settings.epochs, settings.steps)
            cost = cost_of_map(build_classifier, work.shape, name, work.shape, work.classes)
            seeds = 1 if [images] == plain else len(settings.seeds)
            found += seeds * (work.training(cost, schedule) + work.passes(cost, moved))
    if "detector" in chosen_metrics(settings):  # of each set but a release with plain images, of real and blurred ones
        cost = cost_of_map(build_classifier, work.shape, DETECTOR, work.shape, 2)
        found += (2 + len(sets) - len(plain)) * work.training(cost, schedule_of(DETECTOR, 1, 1, STEPS))
    return found


# seconds of a stage's work; the time of a stage without an entry is unknown until it ran here
WORK: dict[str, Callable[[Work], float]] = {
    "count": lambda work: 0.0,
    "central": lambda work: work.sums(
        math.prod(work.shape), work.params.central.repeats * work.drawn(work.params.central)
    ),
    "frequency": lambda work: (
        work.passes(work.fourier(), work.sensitive) + work.sums(work.params.frequency.size, work.sensitive)
    ),
    "classifier": lambda work: work.training(work.public_network, work.params.classifier),
    "moments": lambda work: work.passes(work.public_network, work.sensitive, autocast=True),
    "auxiliary": lambda work: work.fit(work.params.auxiliary, coarse_to_fine=True),
    "histogram": lambda work: work.passes(work.public_network, work.drawn(work.params.histogram), autocast=True),
    "teacher": teacher_seconds,
    "embedding": embedding_seconds,
    "refine": refine_seconds,
    "select": lambda work: (
        work.passes(work.teacher_map, work.public_images) if work.params.select.by == "teacher" else 0.0
    ),
    "pretrain": pretrain_seconds,
    "saliency": lambda work: (
        PER_IMAGE * work.passes(work.diffusion[0], work.sensitive * work.params.saliency.draws, autocast=True)
    ),
    "finetune": finetune_seconds,
    "synthesize": synthesize_seconds,
    "evaluate": evaluate_seconds,
}


def expected_seconds(
    params: Params, shape: Shape, classes: int, state: Path, public_images: int = 0
) -> dict[str, float | None]:
    """Seconds of each stage and of the commands of FRAME, by name; None without an estimate and a past run.

    shape: (C, H, W) of an image. Their number is `privacy.size_hint`, never a private count. public_images: how many
    there are, if a stage reads them; state: the private state directory.
    """
    machine, found = Machine(state), dict[str, float | None](dict.fromkeys(STAGES, OFF))
    with one_thread():  # several would wait for each other where other programs run
        for name in filter(params.runs, STAGES):
            seconds = corrected(name, Work(params, shape, classes, machine, public_images))
            found[name] = None if seconds is None else START + seconds
    decoding = machine.seconds(Cost(0, READ * math.prod(shape), READ_CALLS), params.privacy.size, batch=1)
    return {**found, **dict.fromkeys(FRAME, START), "prepare sensitive": START + decoding}


def corrected(name: str, work: Work) -> float | None:
    """The estimate of a stage's work, times what its last run took for each second that it was expected to take."""
    run, then, public = work.machine.content["runs"].get(name), None, work.params.model.directory is not None
    unknown = name not in WORK or (public and (STAGES[name].network or name == "synthesize"))
    if run is not None:
        with suppress(*UNREADABLE):  # of another version
            settings = STAGES[name].settings.model_validate(run["settings"])
            privacy = work.params.privacy.model_copy(update={"size_hint": run["size_hint"] or work.params.privacy.size})
            model = Model.model_validate(run["model"]) if run["model"] else work.params.model
            params = work.params.model_copy(update={name: settings, "privacy": privacy, "model": model})
            then = Work(params, tuple(run["shape"]), run["classes"] or work.classes, work.machine, work.public_images)
    if unknown:
        return float(run["seconds"]) if then is not None else None
    seconds = WORK[name](work)
    before = WORK[name](then) if then is not None else 0.0
    factor = run["seconds"] / before if before > 1 else 1.0
    return seconds * factor if 1 / FACTOR < factor < FACTOR else seconds


@contextmanager
def timed(state: Path, plan: StagePlan[Any]) -> Iterator[None]:
    """Remember how long the work of a free stage takes, if it ends well. Of many processes the first one writes."""
    begun = now()
    yield
    if distributed.is_main():
        with suppress(OSError):
            remember(state, plan, (now() - begun) * gain(torch.get_num_threads()) / gain(THREADS))


def remember(state: Path, plan: StagePlan[Any], seconds: float) -> None:
    """Keep the duration of a run, to two digits, with the settings that decide it, in the private state directory."""
    machine = Machine(state)
    about = {"settings": plan.settings.model_dump(mode="json"), "shape": list(plan.shape), "classes": len(plan.classes)}
    model = plan.model.model_dump(mode="json") if plan.model is not None else None
    run = {"seconds": float(f"{seconds:.1e}"), **about, "size_hint": plan.size_hint, "model": model}
    machine.content["runs"][plan.stage] = run
    machine.write()
