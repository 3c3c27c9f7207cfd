"""`stage finetune`: run DP-SGD on the sensitive images. After a kill it resumes at no further cost."""

from functools import partial

from sfumato.diffusion.ema import ema_model
from sfumato.dpsgd.run import State, epsilon_by_step, fine_tune, save_log
from sfumato.dpsgd.trainable import check_trained, choose_trainable, save_trained
from sfumato.queries.saliency import read_ranking
from sfumato.release.synthesizer import load_start, start_file
from sfumato.runtime.compute import device
from sfumato.settings.dpsgd import Finetune
from sfumato.text_to_image.reference import load_codec
from stages.runner import QueryRun
from stages.screen import progress, say

GRADIENT_NORM = "max_grad_norm: the clipped gradient of one image"


def finetune(run: QueryRun, settings: Finetune) -> None:
    plan = run.plan
    pretrain = run.path("pretrain")

    # Load the network, choose the weights to train, and open the charge.
    model = load_start(pretrain)
    latents = run.latents(model.encoder, "latents", lambda: load_codec(pretrain, device()).encode)
    ranking = read_ranking(run.inputs.get("saliency"))
    names = choose_trainable(model.to(device()), settings, ranking, plan.seed)
    before = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    public_batch = plan.mechanism.sample_rate * run.counts.total
    state = State(model, settings, public_batch=public_batch, label_dropout=plan.network.label_dropout)

    released = f"{settings.steps} steps of DP-SGD"
    open_charge = partial(run.open_charge, released, GRADIENT_NORM, settings.max_grad_norm, latents=latents)
    epsilon_after = epsilon_by_step(plan.mechanism, plan.delta)
    with progress("finetune", clock=False) as report:
        charge, log = fine_tune(state, open_charge, epsilon_after=epsilon_after, report=report, say=say)
    ema_model(model, state.ema.average)
    check_trained(before, model, names)
    with run.releasing(charge) as directory:
        save_trained(model, settings.trainable, names, directory, start_file(pretrain))
        save_log(log, directory / "log.csv")
