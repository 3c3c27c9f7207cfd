"""`stage finetune`: DP-SGD on the sensitive images, resumable after a kill at no further cost."""

from __future__ import annotations

from functools import partial

from sfumato.baselines.selectors import public_ranking, randomise_unselected
from sfumato.data.store import read_card
from sfumato.diffusion.ema import ema_model
from sfumato.dpsgd.latents import ensure_latents
from sfumato.dpsgd.run import State, epsilon_by_step, fine_tune, save_log
from sfumato.dpsgd.trainable import check_trained, choose_trainable, save_trained
from sfumato.errors import ConfigError
from sfumato.privacy.checkpoint import drop_checkpoints
from sfumato.queries.saliency import read_ranking
from sfumato.release.synthesizer import load_start, start_file
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.settings.dpsgd import Finetune
from sfumato.storage.files import write_local
from sfumato.text_to_image.reference import load_codec
from stages.runner import QueryRun, load_plan
from stages.screen import progress, say
from stages.state import EVALUATION, state_dir


def finetune(run: QueryRun[Finetune]) -> None:
    plan, pretrain, card = run.plan, run.path("pretrain"), read_card(run.card)
    settings = run.settings.on_this_machine()

    # the network, what of it is trained, and what it is trained on
    model = load_start(pretrain)
    encoding = partial(progress, "encoding the images, once", clock=False)
    latents = ensure_latents(model, state_dir(), card, lambda: load_codec(pretrain, device()), encoding)
    if "saliency" in run.inputs:
        ranking = read_ranking(run.inputs["saliency"], settings.debias)
    else:
        ranking = public_ranking(model, settings.trainable, plan.seed)
    names = choose_trainable(model.to(device()), settings, ranking, plan.seed)
    if settings.trainable == "noisy" and ranking:
        randomise_unselected(model, ranking, settings.ratio, plan.seed)
    before = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    counts = run.counts
    public_batch = plan.mechanism.sample_rate * counts.total
    state = State(model, settings, public_batch=public_batch, label_dropout=plan.network.label_dropout)

    # a curve compares with real images: only if asked for, and then the run is local
    curve = None
    if settings.convergence:
        if distributed.world_size() > 1:
            raise ConfigError("finetune.convergence needs a single process: run it without SFUMATO_LAUNCH")
        from sfumato.evaluation.convergence import open_curve

        curve = open_curve(load_plan("evaluate"), plan.network, state_dir(), card, say)

    released, sensitivity = f"{settings.steps} steps of DP-SGD", "max_grad_norm: the clipped gradient of one image"
    open_charge = partial(run.open_charge, released, sensitivity, settings.max_grad_norm, latents=latents)
    epsilon_after = epsilon_by_step(plan.mechanism, plan.delta)
    with progress("finetune", clock=False) as report:
        charge, log = fine_tune(state, open_charge, epsilon_after=epsilon_after, curve=curve, report=report, say=say)
    ema_model(model, state.ema.average)
    check_trained(before, model, names)
    with run.releasing(charge, local=curve is not None) as directory:
        save_trained(model, settings.trainable, names, ranking, directory, start_file(pretrain))
        save_log(log, directory / "log.csv")
    if curve is not None:  # not into the artifact: DVC would put its hash into git
        write_local(EVALUATION / "convergence.csv", curve.text().encode())
    drop_checkpoints(charge.run)
