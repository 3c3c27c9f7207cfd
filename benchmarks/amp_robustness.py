"""Measure whether AMP makes a network robust to noise in its weights.

AMP is adversarial model perturbation.

    python benchmarks/amp_robustness.py [--radius 0.2] [--steps 500] [--per-class 60]
        [--seeds 2] [--plot curve.png]

The same small U-Net is trained on drawn glyphs in three ways:

- plain;
- with AMP, for the same number of steps (a step with AMP takes at least twice the work);
- plain, with as much work as AMP.

Then each network's averaged weights are moved by a vector of a given norm, and its denoising loss
on held-out glyphs is measured. The vector has either a random direction, like the noise of DP-SGD
(the loss is the mean over several directions), or the worst direction that a few steps of gradient
ascent find, like the perturbation in AMP. Batches, noise and directions are the same for all three
networks. All images are public and drawn by this program, so nothing is downloaded. The program
takes less than five minutes on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.rendered import DRAWN, draw_all
from sfumato.diffusion.denoiser import draw_noise_levels
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.unet import UNet
from sfumato.settings.noise_levels import LogNormal
from sfumato.settings.training import Amp, Architecture, Phase
from sfumato.training.amp import ascend, put
from sfumato.training.curriculum import mean_loss, warm_up

FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0, 64.0)  # norm of the noise, in units of the radius
WORST = 4.0  # largest factor for which the worst direction is searched
DIRECTIONS = 8
HELD_OUT = 8  # held-out glyphs of each of the 62 classes


def glyphs(per_class: int) -> tuple[Tensor, Tensor]:
    """Draw glyphs: first those for training, then the held-out ones.

    In each part, all classes have the same number of glyphs.

    Returns ((N, 1, 8, 8) float32 in [0, 1], (N,) int64).
    """
    names, draw = DRAWN["glyphs"]((1, 8, 8))
    images, labels = zip(*draw_all(draw, len(names), per_class + HELD_OUT, 0), strict=True)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255, torch.tensor(
        labels
    )


def train(
    images: Tensor, labels: Tensor, steps: int, rate: float, amp: Amp | None, seed: int
) -> UNet:
    torch.manual_seed(seed)
    model = UNet(8, 1, 62, Architecture(width=32, multipliers=(1, 1), attention=(1,)))
    phase = Phase(sources={"public": 1.0}, steps=steps, batch=64, learning_rate=rate, amp=amp)
    average = warm_up(model, [phase], {"public": (images, labels)}, seed)
    ema_model(model, average)
    return model


def held_out_batch(images: Tensor, labels: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        images,
        labels,
        draw_noise_levels(LogNormal(), len(images), generator),
        torch.randn(images.shape, generator=generator),
    ]


def losses_under_noise(
    model: UNet, batch: Sequence[Tensor], norms: Sequence[float]
) -> list[list[float]]:
    """Measure the losses after moving the weights by random vectors of each norm.

    Returns, per norm, the losses in DIRECTIONS directions, or one loss if the norm is 0.
    """
    parameters = list(model.parameters())
    weights = [p.detach().clone() for p in parameters]
    rows = []
    for norm in norms:
        row = []
        for direction in range(DIRECTIONS if norm else 1):
            generator = torch.Generator().manual_seed(direction)
            noise = [torch.randn(w.shape, generator=generator) for w in weights]
            length = torch.stack([n.norm() for n in noise]).norm()
            put(parameters, [w + n * (norm / length) for w, n in zip(weights, noise, strict=True)])
            with torch.no_grad():
                row.append(float(mean_loss(model, batch, False, len(batch[0]))))
        rows.append(row)
    put(parameters, weights)
    return rows


def worst_loss(model: UNet, batch: Sequence[Tensor], norm: float, steps: int = 5) -> float:
    """Move the weights by gradient ascent by at most `norm`, and return the loss there.

    Afterwards, the model has its original weights again.
    """
    parameters = list(model.parameters())
    weights = [p.detach().clone() for p in parameters]
    delta = [torch.zeros_like(w) for w in weights]
    for _ in range(steps):
        gradient = torch.autograd.grad(mean_loss(model, batch, False, len(batch[0])), parameters)
        delta = ascend(delta, [1e3 / Amp.rate * part for part in gradient], Amp(radius=norm))
        put(parameters, [w + d for w, d in zip(weights, delta, strict=True)])
    with torch.no_grad():
        loss = float(mean_loss(model, batch, False, len(batch[0])))
    put(parameters, weights)
    return loss


def spread(values: Tensor) -> str:
    return (
        f"{values.mean():.4f} ± {values.std():.4f}"
        if values.numel() > 1
        else f"{values.item():.4f}"
    )


def plot(curves: dict[str, Tensor], path: Path) -> None:
    """Plot the losses.

    curves: losses by network, (2, seeds, norms): first in random directions, then in the worst one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, title, scale, part in zip(
        axes,
        ("random directions", "the worst direction found"),
        ("linear", "log"),
        (0, 1),
        strict=True,
    ):
        for name, curve in curves.items():
            means = curve[part].mean(dim=0)
            means = means[~means.isnan()]
            axis.plot(range(len(means)), means, marker="o", label=name)
        axis.set_xticks(range(len(means)), [f"{factor:g}" for factor in FACTORS[: len(means)]])
        axis.set(
            title=title,
            xlabel="norm of the noise in the weights, in units of γ",
            ylabel="denoising loss, held out",
            yscale=scale,
        )
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--radius", type=float, default=0.2, help="γ, the radius of AMP")
    parser.add_argument("--steps", type=int, default=500, help="training steps")
    parser.add_argument("--per-class", type=int, default=60, help="training glyphs of each class")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="PNG file for the curves")
    options = parser.parse_args()
    torch.set_num_threads(1)

    start = time.process_time()
    amp = Amp(radius=options.radius)
    images, labels = glyphs(options.per_class)
    split = 62 * options.per_class
    batch = held_out_batch(images[split:], labels[split:])
    norms = [options.radius * factor for factor in FACTORS]
    ways = {"plain": (1, None), "AMP": (1, amp), "plain, equal work": (1 + amp.steps, None)}
    random = {name: torch.zeros(options.seeds, len(norms), DIRECTIONS) for name in ways}
    worst = {name: torch.full((options.seeds, len(norms)), torch.nan) for name in ways}
    for seed in range(options.seeds):
        for name, (times, perturbed) in ways.items():
            model = train(
                images[:split],
                labels[:split],
                times * options.steps,
                options.learning_rate,
                perturbed,
                seed,
            )
            for index, row in enumerate(losses_under_noise(model, batch, norms)):
                random[name][seed, index] = torch.tensor(row)
                if FACTORS[index] <= WORST:
                    worst[name][seed, index] = (
                        worst_loss(model, batch, norms[index]) if norms[index] else row[0]
                    )

    print(
        f"{sum(p.numel() for p in model.parameters())} weights, {amp}, {options.steps} steps, "
        f"{len(batch[0])} images held out"
    )
    print(
        f"Denoising loss: mean ± standard deviation over {options.seeds} seeds. With random noise "
        f"in the weights, the loss of a seed is the mean over {DIRECTIONS} directions\n"
    )
    for title, losses in (
        ("random", {name: value.mean(dim=2) for name, value in random.items()}),
        ("worst", worst),
    ):
        print(f"{title + ' noise of norm':>22} " + " ".join(f"{name:>20}" for name in ways))
        for index, factor in enumerate(FACTORS):
            if not losses["plain"][:, index].isnan().any():
                print(
                    f"{factor:>8g} γ = {norms[index]:>8.3f} "
                    + " ".join(f"{spread(losses[name][:, index]):>20}" for name in ways)
                )
        print()
    print(f"{time.process_time() - start:.0f} s of processor time")
    if options.plot:
        plot(
            {name: torch.stack([random[name].mean(dim=2), worst[name]]) for name in ways},
            options.plot,
        )


if __name__ == "__main__":
    main()
