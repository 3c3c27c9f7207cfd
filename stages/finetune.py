"""`stage finetune`: run DP-SGD on the sensitive images.

After a kill, the stage resumes at no further cost.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage
from stages.pretrain import denoiser_work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sfumato.diffusion.denoiser import Denoiser
    from sfumato.planning.kept import Plan
    from sfumato.planning.work import Work
    from sfumato.settings.dpsgd import Finetune
    from stages.runner import QueryRun

GRADIENT_NORM = "max_grad_norm: the L2 norm to which the gradient of one image is clipped"


def load_pretrained(run: QueryRun) -> tuple[Denoiser, str | None]:
    """Load the network of `pretrain`, on the device, and return it with the key of its latents."""
    from sfumato.release.synthesizer import load_start
    from sfumato.runtime.compute import device

    model = load_start(run.path("pretrain"))
    latents = run.latents(model.encoder, "latents", lambda: model.load_encoder(device()))
    return model.to(device()), latents


def finetune(run: QueryRun, settings: Finetune) -> None:
    from sfumato.diffusion.ema import ema_model
    from sfumato.dpsgd.run import State, epsilon_by_step, fine_tune, save_log
    from sfumato.dpsgd.trainable import check_trained, choose_trainable, save_trained
    from sfumato.queries.saliency import read_ranking
    from sfumato.release.synthesizer import start_file
    from stages.screen import progress, say

    plan = run.plan

    # Load the network, choose the weights to train, and open the charge.
    model, latents = load_pretrained(run)
    ranking = read_ranking(run.inputs.get("saliency"))
    names = choose_trainable(model, settings, ranking, plan.seed)
    initial_weights = {
        name: value.to("cpu", copy=True) for name, value in model.state_dict().items()
    }
    public_batch = plan.mechanism.sample_rate * run.counts.total
    state = State(model, settings, public_batch)

    released = f"{settings.steps} steps of DP-SGD"
    open_charge = partial(
        run.open_charge, released, GRADIENT_NORM, settings.max_grad_norm, latents=latents
    )
    epsilon_after = epsilon_by_step(plan.mechanism, plan.delta)
    with progress("finetune", clock=False) as report:
        charge, log = fine_tune(
            state, open_charge, epsilon_after=epsilon_after, report=report, say=say
        )
    ema_model(model, state.ema.average)
    check_trained(initial_weights, model, names)
    with run.releasing(charge) as directory:
        save_trained(model, settings.trainable, names, directory, start_file(run.path("pretrain")))
        save_log(log, directory / "log.csv")


def clipped_gradients(workload: Work, query: str) -> float:
    """Estimate the number of operations of a query that uses DP-SGD.

    A clipped gradient costs as much as four forward passes.
    """
    return (
        4 * getattr(workload.params, query).draws * workload.seen(query) * workload.network(query)
    )


def work(workload: Work) -> float:
    return clipped_gradients(workload, "finetune")


def compare_noise(plan: Plan) -> Iterator[str]:
    """Yield one line that compares a DP-SGD step's noise with the step's largest possible signal.

    All numbers in the line are public.
    """
    from sfumato.dpsgd.gradients import number_of_weights
    from sfumato.dpsgd.run import step_noise
    from sfumato.dpsgd.trainable import trained_parameters
    from sfumato.release.synthesizer import outline
    from sfumato.settings.dpsgd import SALIENT

    params = plan.params
    mechanism = plan.mechanisms["finetune"]
    file = plan.files["finetune"]
    model = outline(params.model, tuple(file["shape"]), len(file["classes"]))
    parameters = trained_parameters(model, params.finetune, params.seed)
    weights = number_of_weights(parameters)
    length = step_noise(
        mechanism.noise_multiplier, weights, mechanism.sample_rate * file["size_hint"]
    )
    about = "about " if params.finetune.trainable in SALIENT else ""
    ratio = f"{length:.2g} times the step's largest possible signal"
    if length > 1:
        remedy = "raise finetune.batch"
        if mechanism.sample_rate == 1:  # a batch contains all images already
            remedy = "lower finetune.steps"
        yield (
            f"finetune: with {about}{weights:,} trained weights, the noise of a step is {ratio}, "
            "so a step is mostly noise. Raise privacy.epsilon or finetune's share of it, train "
            f"fewer weights, or {remedy}"
        )
    else:
        yield (f"finetune: with {about}{weights:,} trained weights, the noise of a step is {ratio}")


STAGE = Stage(
    "finetune",
    QUERY,
    "Train the diffusion model, or the part that `finetune.trainable` selects, on the sensitive "
    "images by DP-SGD.",
    "sfumato.settings.dpsgd:Finetune",
    finetune,
    inputs=("pretrain", "saliency", "count"),
    seeded=True,
    network=True,
    shows_epsilon=True,
    several_labels=True,
    network_work=denoiser_work,
    work=work,
    remarks=compare_noise,
)
