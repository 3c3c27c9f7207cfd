"""The phases of the warm-up, also those that fit the denoiser to the frequency release (FETA-Pro, Appendix C.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.memory import images_kept
from sfumato.generators.one_step import Match, fit_generator
from sfumato.generators.sampled import SampledGenerator
from sfumato.runtime import distributed
from sfumato.settings.training import Fit, Pretrain
from sfumato.training.curriculum import Sources, over_all, warm_up


def through_phases(
    model: UNet,
    settings: Pretrain,
    sources: Sources,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
    *,
    match: Match | None = None,
    priors: Tensor | None = None,
    label_dropout: float = 0.1,
) -> UNet:
    """Train `model` in place through all phases: each run of denoising phases ends in the average of its weights.

    match: the frequency release, with the public label shares `priors`, (classes,): for phases that fit it.
    """
    whole, done = sum(phase.steps for phase in settings.phases), 0
    for fits, group in itertools.groupby(settings.phases, key=lambda phase: phase.fits):
        phases = list(group)
        steps = sum(phase.steps for phase in phases)

        def told(part: int, of: int, before: int = done) -> None:
            report(before + part, whole)

        if fits:
            assert match is not None and priors is not None, "the stage reads the release where a phase fits it"
            for phase in phases:
                how = Fit(steps=phase.steps, batch=phase.batch, learning_rate=phase.learning_rate)
                fit_generator(SampledGenerator(model, phase.solver), [match], how, priors, seed, told)
            distributed.broadcast_state(model)
        else:
            average = warm_up(
                model,
                phases,
                sources,
                settings,
                seed,
                over_all(phases, told),
                label_dropout=label_dropout,
                at_a_time=images_kept(model),
            )
            ema_model(model, average)
        done += steps
    return model
