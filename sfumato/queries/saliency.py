"""Noisy gradients of the weight matrices over all sensitive images, and the choice of the matrices to train (DP-SAPF §3.2, Algorithm 1).

One Gaussian for all candidates together: their gradients are clipped jointly. Norms, ranks and the choice are post-processing, free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sfumato.config import Saliency
from sfumato.dpsgd.run import choose_chunk, clipped_gradient_sum, draw, levels_of, unflatten
from sfumato.precision import bfloat16_is_faster
from sfumato.privacy.noise import secret_generator
from sfumato.public_model.network import Denoiser

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

OUTSIDE = "(network)"  # the row of the heat map for layers outside every block


class Salience(NamedTuple):
    """What was released about one candidate."""

    name: str
    size: int  # its parameters
    raw_norm: float  # of its noisy mean gradient
    debiased: float  # the squared norm less what the noise adds to it: unbiased, so perhaps negative
    rank: int  # by the latter, 1 for the most salient
    raw_rank: int  # by the former


def query_saliency(
    charge: Charge,
    model: Denoiser,
    candidates: Mapping[str, Sequence[str]],
    settings: Saliency,
    public_size: float,
    *,
    label_dropout: float = 0.0,
    autocast: bool | None = False,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The one release: the sum of the images' clipped gradients of the denoising loss, noised by the charge, over a public size.

    candidates: name -> names of its parameters in `model`; settings: of which noise is not read; public_size: N̄, never a realised
    count; autocast: run the network in bfloat16, None where that is faster; generator: only for tests (the draws are secret: see `DPSGD`).
    Each image's gradient is the mean over `settings.draws`
    draws; for the score "snip" it is multiplied by the weights, entry by entry; then it is clipped to `settings.max_norm` over all
    candidates jointly. Memory does not grow with N. Returns the noisy vectors by candidate, (size,) float64, on the CPU.
    Guarantee: one image more or less moves the sum, over all candidates together, by at most `settings.max_norm` in L2.
    """
    named = dict(model.named_parameters())
    parameters = {name: named[name] for names in candidates.values() for name in names}
    size = sum(value.numel() for value in parameters.values())
    chunk = settings.chunk or choose_chunk(size, settings.draws)
    device = next(iter(parameters.values())).device
    generator = generator or secret_generator(device)
    if autocast is None:
        autocast = half_precision_pays(model, parameters, settings, chunk, generator)
    factors = parameters if settings.score == "snip" else None
    total = torch.zeros(size, dtype=torch.float64)
    for images, labels in charge.batches(size=4 * chunk):
        images, labels = images.to(device), labels.to(device)
        draws = draw(
            images,
            settings.draws,
            settings.noise_levels,
            generator,
            label_dropout=label_dropout,
            levels=levels_of(model),
        )
        total += clipped_gradient_sum(
            model, parameters, images, labels, draws, settings.max_norm, chunk, autocast, factors
        ).cpu()
    released = unflatten(charge.release(total, max_norm=settings.max_norm).double() / public_size, parameters)
    return {name: torch.cat([released[part].flatten() for part in parts]) for name, parts in candidates.items()}


def half_precision_pays(
    model: Denoiser, parameters: Mapping[str, Tensor], settings: Saliency, chunk: int, generator: torch.Generator
) -> bool:
    """Is bfloat16 faster here? Timed on blank images: neither the answer nor the time depends on data."""
    device = generator.device
    images = torch.zeros(chunk, model.channels, model.resolution, model.resolution, device=device)
    labels = torch.zeros(chunk, dtype=torch.int64, device=device)
    drawn = draw(images, settings.draws, settings.noise_levels, generator, levels=levels_of(model))
    key = ("saliency", device, images.shape, settings.draws, len(parameters))
    return bfloat16_is_faster(
        lambda half: clipped_gradient_sum(model, parameters, images, labels, drawn, 1.0, chunk, half), key, device
    )


def rank_candidates(released: Mapping[str, Tensor], noise_std: float) -> list[Salience]:
    """Norms and ranks from the released vectors, in their order: post-processing.

    noise_std: of the noise in each entry, σ·C_s/N̄, which is public. Noise adds size·noise_std² to the expected squared norm: a large
    candidate without any signal beats a small one with it. `debiased` is the squared norm less that term. What remains grows with the size in another way: a norm adds up over entries, as the gradient itself does.
    Source: DP-SAPF Eq. 8 and Algorithm 1 for the raw norm; METHODS §7 for the other.
    """
    norms = {name: float(torch.linalg.vector_norm(vector.double())) for name, vector in released.items()}
    debiased = {name: norms[name] ** 2 - len(vector) * noise_std**2 for name, vector in released.items()}
    ranks, raw_ranks = (
        {name: place + 1 for place, name in enumerate(sorted(released, key=lambda name: -scores[name]))}
        for scores in (debiased, norms)
    )
    return [
        Salience(name, len(vector), norms[name], debiased[name], ranks[name], raw_ranks[name])
        for name, vector in released.items()
    ]


def ranked(rows: Sequence[Salience], debias: bool) -> list[str]:
    """The candidates' names, the most salient first."""
    return [row.name for row in sorted(rows, key=lambda row: row.rank if debias else row.raw_rank)]


def saliency_table(rows: Sequence[Salience]) -> str:
    """The rows as CSV."""
    lines = ["matrix,size,raw_norm,debiased,rank,raw_rank"]
    lines += [f"{row.name},{row.size},{row.raw_norm:.6g},{row.debiased:.6g},{row.rank},{row.raw_rank}" for row in rows]
    return "\n".join(lines) + "\n"


def split_name(name: str) -> tuple[str, str]:
    """Block and projection of a candidate: `down.1.attention.q` -> (`down.1`, `q`), `down.1.block.conv1` -> (`down.1`, `conv1`)."""
    found = re.fullmatch(r"(?:(.*)\.)?([^.]*[^.\d][^.]*(?:\.\d+)*)", name)
    block, projection = (found[1] or OUTSIDE, found[2]) if found else (OUTSIDE, name)
    return block.removesuffix(".attention").removesuffix(".block"), projection


def plot_saliency(rows: Sequence[Salience], path: Path) -> None:
    """Draw the noisy gradient norms as a heat map, blocks by projections, with the rank of each candidate.

    The colour is the square root of the debiased squared norm, 0 where that is negative: no signal above the noise.
    """
    from matplotlib.figure import Figure  # heavy: only when used

    cells = {split_name(row.name): row for row in rows}
    blocks, projections = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    values = {key: max(row.debiased, 0) ** 0.5 for key, row in cells.items()}
    grid = [[values.get((block, projection), float("nan")) for block in blocks] for projection in projections]
    widest = max(map(len, blocks))
    turned = widest > 9
    margin = 0.075 * widest * turned
    figure = Figure(
        figsize=(max(4.6, 2.6 + 0.62 * len(blocks)), max(2.3, 1.5 + 0.5 * len(projections) + margin)),
        layout="constrained",
    )
    axes = figure.subplots()
    axes.set_facecolor("#eeeeee")  # no such candidate
    largest = max(values.values()) or 1.0
    image = axes.imshow(grid, cmap="YlGnBu", vmin=0, vmax=largest, aspect="auto")
    for (block, projection), row in cells.items():
        x, y = blocks.index(block), projections.index(projection)
        dark = values[block, projection] > 0.55 * largest
        axes.text(x, y, str(row.rank), ha="center", va="center", fontsize=9, color="white" if dark else "#253d5b")
    axes.set_xticks(range(len(blocks)), blocks, rotation=90 if turned else 0, fontsize=8)
    axes.set_yticks(range(len(projections)), projections, fontsize=9)
    axes.set_xticks([x - 0.5 for x in range(1, len(blocks))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(projections))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"Noisy gradient norms of {len(rows)} candidates; numbers are ranks", fontsize=9, loc="left")
    figure.colorbar(image, ax=axes, label="gradient norm, debiased", pad=0.02)
    figure.savefig(path, dpi=150, metadata={"Software": None})
