"""`stage saliency`: release noisy gradient norms of weight matrices, and rank the matrices to
train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage
from stages.finetune import clipped_gradients, load_pretrained
from stages.pretrain import denoiser_work

if TYPE_CHECKING:
    from sfumato.planning.work import Work
    from sfumato.settings.dpsgd import Saliency
    from stages.runner import QueryRun


def saliency(run: QueryRun, settings: Saliency) -> None:
    from sfumato.dpsgd.run import Gradients
    from sfumato.dpsgd.trainable import candidates
    from sfumato.queries.saliency import query_saliency, rank_candidates, save_ranking

    model, latents = load_pretrained(run)
    pool = candidates(model)
    parameters = {name: model.get_parameter(name) for name in pool}
    autocast = None if latents else False
    gradients = Gradients(model, parameters, settings, run.counts.total, autocast)
    released = f"gradient of {len(pool)} candidates (qkv)"
    sensitivity = "max_norm: the L2 norm to which the joint gradient of one image is clipped"
    charge = run.open_charge(released, sensitivity, settings.max_norm, latents=latents)
    vectors = query_saliency(charge, gradients)
    # Public standard deviation of the noise that the charge has added. The ranking corrects for it.
    noise_std = charge.noise_multiplier * settings.max_norm / gradients.public_batch
    rows = rank_candidates(vectors, noise_std)
    with run.releasing(charge) as directory:
        save_ranking(rows, noise_std, directory)


def work(workload: Work) -> float:
    return clipped_gradients(workload, "saliency")


STAGE = Stage(
    "saliency",
    QUERY,
    "Release noisy gradient norms of the weight matrices; `finetune` then trains the most salient "
    "matrices.",
    "sfumato.settings.dpsgd:Saliency",
    saliency,
    inputs=("pretrain", "count"),
    network=True,
    network_work=denoiser_work,
    work=work,
)
