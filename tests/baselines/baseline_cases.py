"""The queries of the baselines as cases of the privacy tests, and small runs of DP-GAN.

`tests/parts.py` adds each table to the table of the same name in the general tests.
"""

import functools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CLASSES, GRADIENTS, PUBLIC, SHAPE, Case, Recorder, seeded_draws
from dpsgd_runs import CLIP, Run
from torch import Tensor

from sfumato.baselines.dp_gan import AdversarialState, Discriminator
from sfumato.baselines.private_evolution import (
    RendererGenerator,
    distance_features,
    query_evolve,
    query_votes,
)
from sfumato.baselines.settings import Adversarial, Evolve
from sfumato.data.images import Shape
from sfumato.dpsgd.run import State, fine_tune
from sfumato.generators.one_step import new_generator
from sfumato.settings.fields import Size, size_of

EVEN = torch.full((CLASSES,), 1 / CLASSES)
OBLONG = (1, 24, 32)


def discriminator(resolution: Size = 8, channels: int = 1) -> Discriminator:
    torch.manual_seed(0)
    model = Discriminator(resolution, channels, CLASSES, 4)
    torch.nn.init.normal_(model.by_label.weight, std=0.1)
    return model


def adversarial(charge: Any, shape: Shape = SHAPE) -> dict[str, Tensor]:
    chosen = Adversarial(max_grad_norm=GRADIENTS["bound"], microbatch_size=16)
    generator = new_generator(shape, CLASSES, 4, 8, 0)
    judge = State(discriminator(size_of(shape[1:])), chosen, PUBLIC, autocast=False)
    state = AdversarialState(judge, generator, chosen, EVEN, 0)
    state.judge.draw = partial(seeded_draws, None, draws=1)  # type: ignore[method-assign]
    state.step(charge)
    return state.tensors()


def evolve(charge: Any) -> Tensor:
    places = torch.rand(40, 64, generator=torch.Generator().manual_seed(0))
    return query_votes(charge, places, torch.arange(40) % CLASSES, CLASSES)


def first_pixels(images: Tensor) -> Tensor:
    return images.flatten(1)[:, :64]


@functools.cache
def renderer() -> RendererGenerator:
    return RendererGenerator("photos", SHAPE)


def all_rounds(charge: Recorder) -> dict[str, Tensor]:
    """Run all rounds of Private Evolution. Returns the last population."""
    settings = Evolve(rounds=3, population=40, images=30)
    embedding = distance_features(settings, SHAPE, renderer(), seed=0)
    charge.run, charge.durable = Path(tempfile.mkdtemp()), lambda *digest: None
    _, population, _ = query_evolve(
        lambda: charge, settings, renderer(), embedding, EVEN, 0, say=print
    )
    return population._asdict()


VOTE = {"stage": "evolve", "bound": 1, "integer": True, "axis": 0, "encode": first_pixels}
CASES = {
    "evolve": Case(query=evolve, **VOTE),
    "adversarial": Case(stage="adversarial", query=adversarial, **GRADIENTS),
}
OF_RECTANGLES = {
    "evolve": Case(query=evolve, **VOTE),
    "adversarial": Case(stage="adversarial", query=partial(adversarial, shape=OBLONG), **GRADIENTS),
}
QUERIES = {"evolve, all rounds": Case(query=all_rounds, uses=3, **VOTE)}


def adversary(seed: int = 0, **options: Any) -> AdversarialState:
    settings = Adversarial(**{"max_grad_norm": CLIP, "microbatch_size": 4, **options})
    network = new_generator(SHAPE, CLASSES, settings.latent, settings.width, 0)
    random = torch.Generator().manual_seed(seed)
    judge = State(discriminator(), settings, 16.0, autocast=False, generator=random)
    return AdversarialState(judge, network, settings, EVEN, 0)


train_dp_gan = partial(fine_tune, stage="adversarial", one_step=AdversarialState.step)
RUNS = {
    "adversarial": Run(adversary, AdversarialState.step, train_dp_gan, lambda state: state.judge)
}
# Kinds of tensors in a checkpoint
KINDS = {
    "adversarial": {
        *("step", "parameters", "ema", "exp_avg", "exp_avg_sq", "generator"),
        *(f"generator_{key}" for key in ("ema", "exp_avg", "exp_avg_sq", "step", "steps")),
    }
}
