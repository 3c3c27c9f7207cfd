"""`stage adversarial`: train a discriminator by DP-SGD, and a generator against it (DP-GAN)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage
from stages.pretrain import denoiser_work

if TYPE_CHECKING:
    from sfumato.baselines.settings import Adversarial
    from sfumato.planning.work import Work
    from stages.runner import QueryRun


def adversarial(run: QueryRun, settings: Adversarial) -> None:
    import torch

    from sfumato.baselines.dp_gan import AdversarialState, Discriminator
    from sfumato.dpsgd.run import State, epsilon_by_step, fine_tune, save_log
    from sfumato.generators.one_step import new_generator, save_drawing
    from sfumato.runtime.compute import device
    from stages.finetune import GRADIENT_NORM
    from stages.screen import progress, say

    plan = run.plan
    counts = run.counts
    generator = new_generator(
        plan.shape, len(plan.classes), settings.latent, settings.width, plan.seed
    )
    torch.manual_seed(plan.seed)
    judge = Discriminator(
        plan.shape[1:], plan.shape[0], len(plan.classes), settings.discriminator
    ).to(device())
    public_batch = plan.mechanism.sample_rate * counts.total
    state = AdversarialState(
        State(judge, settings, public_batch), generator, settings, counts.priors, plan.seed
    )
    open_charge = partial(
        run.open_charge, f"{settings.steps} steps of DP-SGD", GRADIENT_NORM, settings.max_grad_norm
    )
    epsilon_after = epsilon_by_step(plan.mechanism, plan.delta)
    with progress("adversarial", clock=False) as report:
        charge, log = fine_tune(
            state,
            open_charge,
            epsilon_after=epsilon_after,
            report=report,
            say=say,
            stage="adversarial",
            one_step=AdversarialState.step,
        )
    with run.releasing(charge) as directory:
        save_drawing(
            state.result(), settings.images, counts.priors, plan.classes, plan.seed + 1, directory
        )
        save_log(log, directory / "log.csv")


def work(workload: Work) -> float:
    from stages.finetune import clipped_gradients

    return clipped_gradients(workload, "adversarial")


STAGE = Stage(
    "adversarial",
    QUERY,
    "Train a discriminator on the sensitive images by DP-SGD, and a generator against it.",
    "sfumato.baselines.settings:Adversarial",
    adversarial,
    inputs=("count",),
    seeded=True,
    shows_epsilon=True,
    one_process=True,
    gives="generator",
    network_work=denoiser_work,
    work=work,
)
