"""Noisy gradients of the weight matrices over all sensitive images, and their order (DP-SAPF Algorithm 1).

One Gaussian for all candidates together: their gradients are clipped jointly. Norms and ranks are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.clip import unflatten
from sfumato.dpsgd.gradients import Draws, choose_precision, clipped_gradient_sum, draw
from sfumato.dpsgd.microbatch import choose_microbatch
from sfumato.errors import DataError, explained
from sfumato.privacy.charge import Charge
from sfumato.privacy.noise import secret_generator
from sfumato.runtime import distributed
from sfumato.runtime.compute import to_device
from sfumato.settings.dpsgd import Saliency
from sfumato.storage.artifacts import Artifact
from sfumato.storage.documents import read_json
from sfumato.storage.files import csv_text, write_json


class Salience(NamedTuple):
    """What was released about one candidate."""

    name: str  # of its weight
    size: int  # numbers in it
    raw_norm: float  # of its noisy mean gradient
    debiased: float  # the squared norm less what the noise adds to it: unbiased, so perhaps negative
    rank: int  # by the latter, 1 for the most salient
    raw_rank: int  # by the former


def query_saliency(
    charge: Charge,
    model: Denoiser,
    candidates: Sequence[str],
    settings: Saliency,
    public_size: float,
    *,
    label_dropout: float = 0.0,
    autocast: bool | None = False,
    generator: torch.Generator | None = None,
    microbatch: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """The one release: the clipped gradients of the denoising loss summed over images, noised, over a public size.

    Each image's gradient is the mean over `settings.draws` draws, clipped over all candidates jointly.

    public_size: N̄, never a realised count; autocast: run the network in bfloat16; None to do so if that is faster;
    generator: only for tests, because the draws are secret (`sfumato.dpsgd.run.State`); microbatch: images and draws at
    a time, as `choose_microbatch` returns them; None to choose now.
    Returns the noisy vectors by candidate, (size,) float64, on the CPU.
    Guarantee: one image more or less moves the sum, over all candidates together, by at most `settings.max_norm` in L2.
    """
    parameters: dict[str, Tensor] = {name: model.get_parameter(name) for name in candidates}
    size = sum(value.numel() for value in parameters.values())
    microbatch_size, draws_per_pass = microbatch or choose_microbatch(
        model, parameters, settings.draws, public_size, settings.microbatch_size
    )
    device = next(iter(parameters.values())).device
    generator = generator or secret_generator(device)

    def fresh(images: Tensor) -> Draws:
        return draw(model, images, settings.draws, settings.noise_levels, generator, label_dropout=label_dropout)

    autocast = choose_precision(model, parameters, microbatch_size, fresh, draws_per_pass, autocast)
    distributed.agree(parameters.values(), microbatch_size, draws_per_pass, autocast, model.use_unfold)
    total = torch.zeros(size, dtype=torch.float64, device=device)
    for images, labels in charge.batches(size=4 * microbatch_size, draws=settings.draws):
        images, labels = to_device(images, device), to_device(labels, device)
        draws = fresh(images)
        total += clipped_gradient_sum(
            model, parameters, images, labels, draws, settings.max_norm, microbatch_size, autocast, draws_per_pass
        )
    total = total.cpu()
    released = unflatten(charge.release(total, max_norm=settings.max_norm).double() / public_size, parameters)
    return {name: vector.flatten() for name, vector in released.items()}


def rank_candidates(released: Mapping[str, Tensor], noise_std: float) -> list[Salience]:
    """Norms and ranks from the released vectors, in their order: post-processing.

    noise_std: of the noise in each entry, σ·C_s/N̄, which is public. Noise adds size·noise_std² to the expected squared
    norm: a large candidate without any signal beats a small one with it. `debiased` is the squared norm less that term.
    The norm of the gradient itself also grows with the size of a candidate: that growth remains.
    Source: DP-SAPF Eq. 8 and Algorithm 1 for the raw norm.
    """
    norms = {name: float(torch.linalg.vector_norm(vector.double())) for name, vector in released.items()}
    debiased = {name: norms[name] ** 2 - len(vector) * noise_std**2 for name, vector in released.items()}
    orders = (sorted(released, key=lambda name: -scores[name]) for scores in (debiased, norms))
    ranks, raw_ranks = ({name: place for place, name in enumerate(order, start=1)} for order in orders)
    return [
        Salience(name, len(vector), norms[name], debiased[name], ranks[name], raw_ranks[name])
        for name, vector in released.items()
    ]


def save_ranking(rows: Sequence[Salience], noise_std: float, directory: Path) -> None:
    """Write the table, and the candidates, the most salient first, by either norm."""
    columns = {"matrix": "", "size": "", "raw_norm": ".6g", "debiased": ".6g", "rank": "", "raw_rank": ""}
    table = csv_text(({"matrix": row.name.removesuffix(".weight")} | row._asdict() for row in rows), columns)
    (directory / "saliency.csv").write_text(table, encoding="utf-8")
    orders = {"debiased": sorted(rows, key=lambda row: row.rank), "raw": sorted(rows, key=lambda row: row.raw_rank)}
    ranked = {key: [[row.name] for row in order] for key, order in orders.items()}
    content = {"candidates": "qkv", "score": "gradient", "noise_std": noise_std, "ranked": ranked}
    write_json(directory / "saliency.json", content)


def read_ranking(saliency: Artifact) -> list[str] | None:
    """The candidates, the most salient first; None if `saliency` is switched off."""
    if not saliency.enabled:
        return None
    file = saliency.path / "saliency.json"
    with explained(DataError, lambda error: f"{file} cannot be read ({error}): run `stage saliency` again"):
        return [str(name) for (name,) in read_json(file)["ranked"]["debiased"]]
