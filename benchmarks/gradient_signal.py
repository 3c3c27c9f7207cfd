"""Measure the signal, the noise and the sampling error in the first step of DP-SGD.

Run this program after `pretrain`: it reads the pretrained network and the settings of `finetune`,
and tries several clipping bounds C. The results are local, because the gradients are computed on
real images. A setting chosen by these results would depend on real data, so use public data sets
only.

    python benchmarks/gradient_signal.py [--folder .] [--images 1024]

Lengths are L2 norms in the space of all P weights. Signal is the length of the mean clipped
gradient; its square is estimated without bias by the dot product of the means of two halves of the
images. Noise is σ·C·√P / batch, which `stage plan --dry-run` shows in units of C. The
sampling error is the standard deviation of the mean clipped gradient of one drawn batch.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch

from sfumato.data.store import read_card
from sfumato.diffusion.unet import load_model
from sfumato.dpsgd.gradients import draw, per_image_gradients
from sfumato.dpsgd.run import step_noise
from sfumato.privacy.authorize import open_local
from sfumato.privacy.resolved import QueryPlan, read_stage_plan
from sfumato.settings.stage import ARTIFACTS, CARD_PATH
from stages.state import state_dir

PIECE = 32  # Images whose gradients are in memory at once
CLIPS = (0.1, 0.3, 1.0, 3.0, 10.0)  # Multiples of `max_grad_norm`


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--images", type=int, default=1024)
    arguments = parser.parse_args()
    os.chdir(arguments.folder)
    plan = read_stage_plan(ARTIFACTS / "plan" / "finetune.yaml", "finetune")
    assert isinstance(plan, QueryPlan), "the recipe has no finetune"
    settings, batch = plan.settings, plan.mechanism.sample_rate * plan.size_hint
    clips = [factor * settings.max_grad_norm for factor in CLIPS]
    norms, halves = gradients(plan, clips, arguments.images)
    weights = halves.shape[-1]
    quantiles = ", ".join(f"{value:.2f}" for value in np.quantile(norms, (0.05, 0.5, 0.95)))
    print(
        f"{weights} weights, batch {batch:.0f}, {settings.draws} draws, σ = "
        f"{plan.mechanism.noise_multiplier}; 5th, 50th and 95th percentile of the images' gradient "
        f"norms: {quantiles}\n"
    )
    print(
        "| C | clipped | signal | noise | signal / noise | sampling error / signal "
        "|\n|---|---|---|---|---|---|"
    )
    for clip, (first, second) in zip(clips, halves, strict=True):
        signal = math.sqrt(max(float(first @ second), 0.0))
        noise = clip * step_noise(plan.mechanism.noise_multiplier, weights, batch)
        chance = float((first - second).norm()) / 2 * math.sqrt(len(norms) / batch)
        row = (
            f"{clip:g}",
            f"{100 * float((norms > clip).mean()):.0f} %",
            f"{signal:.3g}",
            f"{noise:.3g}",
            f"{signal / noise:.2f}",
            f"{chance / signal:.2f}",
        )
        print(f"| {' | '.join(row)} |")


def gradients(plan, clips: list[float], count: int) -> tuple[np.ndarray, torch.Tensor]:
    """Compute gradient norms, (n,), and mean clipped gradients, (clips, 2 halves, P)."""
    sensitive, _ = open_local(state_dir(), read_card(CARD_PATH), "gradient signal")
    model = load_model(ARTIFACTS / "pretrain").eval()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    chosen = np.random.default_rng(0).permutation(len(sensitive))[:count]
    pieces = [
        chosen[start : start + PIECE]
        for start in range(0, len(chosen) // (2 * PIECE) * 2 * PIECE, PIECE)
    ]
    assert pieces, (
        f"too few images: at least {2 * PIECE} are needed. Raise --images, or use a larger set"
    )
    generator = torch.Generator().manual_seed(0)
    norms, sums = (
        [],
        torch.zeros(len(clips), 2, sum(parameter.numel() for parameter in parameters.values())),
    )
    for number, piece in enumerate(pieces):
        images, labels = sensitive.batch(np.sort(piece))
        draws = draw(
            model,
            images,
            plan.settings.draws,
            plan.settings.noise_levels,
            generator,
            label_dropout=plan.network.label_dropout,
        )
        rows = torch.cat(
            [
                row.flatten(1)
                for row in per_image_gradients(model, parameters, images, labels, draws).values()
            ],
            1,
        )
        norms.append(rows.norm(dim=1))
        for i, clip in enumerate(clips):
            sums[i, number % 2] += (clip / norms[-1]).clamp(max=1) @ rows
    return torch.cat(norms).numpy(), sums / (len(pieces) // 2 * PIECE)


if __name__ == "__main__":
    main()
