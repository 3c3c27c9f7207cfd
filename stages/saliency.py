"""`stage saliency`: noisy gradient norms of the weight matrices, and the matrices to train."""

from sfumato.dpsgd.microbatch import choose_microbatch
from sfumato.dpsgd.trainable import candidates
from sfumato.queries.saliency import query_saliency, rank_candidates, save_ranking
from sfumato.release.synthesizer import load_start
from sfumato.runtime.compute import device
from sfumato.settings.dpsgd import Saliency
from sfumato.text_to_image.reference import load_codec
from stages.runner import QueryRun


def saliency(run: QueryRun[Saliency]) -> None:
    plan, pretrain = run.plan, run.path("pretrain")
    model = load_start(pretrain)
    latents = run.latents(model.encoder, "latents", lambda: load_codec(pretrain, device()).encode)
    settings = run.settings.on_this_machine()
    pool = candidates(model.to(device()))
    public_size = run.counts.total
    released = f"gradient of {len(pool)} candidates (qkv)"
    sensitivity = "max_norm: the jointly clipped gradient of one image"
    trained = {name: model.get_parameter(name) for name in pool}
    microbatch = choose_microbatch(model, trained, settings.draws, public_size, settings.microbatch_size)
    charge = run.open_charge(released, sensitivity, settings.max_norm, latents=latents)
    dropout, autocast = plan.network.label_dropout, None if latents else False
    vectors = query_saliency(
        charge, model, pool, settings, public_size, label_dropout=dropout, autocast=autocast, microbatch=microbatch
    )
    # public, as the multiplier is; the charge has added the noise itself
    noise_std = charge.noise_multiplier * settings.max_norm / public_size
    rows = rank_candidates(vectors, noise_std)
    with run.releasing(charge) as directory:
        save_ranking(rows, noise_std, directory)
