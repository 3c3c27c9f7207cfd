"""Program that `test_processes.py` runs in one process or several.

With `kill`, only DP-SGD runs, and all processes but the first are killed after step `kill`.
DP-SGD's draws depend only on the image and the step, so that it does not matter which process gets
an image. The processes differ: after each step, all but the first change their weights, and the
next step must begin with the first process's weights.
"""

import os
from pathlib import Path

import torch

from sfumato.data.store import read_card
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.gradients import Draws
from sfumato.dpsgd.run import State, fine_tune
from sfumato.features.fourier import FourierFeatures
from sfumato.privacy import sampling
from sfumato.privacy.authorize import ChargeRequest, open_charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.policy import SpendingPolicy
from sfumato.queries.count import query_count
from sfumato.queries.feature_means import query_feature_means
from sfumato.runtime import distributed
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.queries import FeatureMap
from sfumato.settings.training import Architecture

SETTINGS = Finetune(
    steps=5, batch=60, draws=2, max_grad_norm=0.01, learning_rate=1e-3, checkpoint_every=1
)
STEPS = Mechanism(noise_multiplier=0.5, sample_rate=0.05, uses=5)


class Tied(State):
    """A state whose draws for an image depend only on the image's pixels and the step."""

    @torch.no_grad()
    def descend(self, gradient):
        super().descend(gradient)
        for value in (
            self.parameters.values()
            if self.steps < SETTINGS.steps and not distributed.is_main()
            else ()
        ):
            value += 0.1

    def draw(self, images):
        rows = [super().draw(images[:0])]
        for image in images:
            seed = (
                int(
                    image.double().mul(torch.arange(1, image.numel() + 1).view_as(image)).sum()
                    * 1000
                )
                + self.steps
            )
            self.generator.manual_seed(seed)
            rows.append(super().draw(image[None]))
        return Draws(
            **{name: torch.cat([vars(row)[name] for row in rows]) for name in vars(rows[0])}
        )


def network() -> UNet:
    torch.manual_seed(0)
    return UNet(10, 1, 8, Architecture(width=8, multipliers=(1, 1), attention=(1,)))


def work(stage: str, mechanism: Mechanism, max_norm: float) -> ChargeRequest:
    return ChargeRequest(
        stage=stage,
        plan=stage,
        settings=stage,
        mechanism=mechanism,
        max_norm=max_norm,
        released="",
        sensitivity="",
    )


def main(state: Path, card: Path, out: Path, kill: int | None) -> None:
    distributed.join()
    sampling.SEGMENT = 400  # makes each draw arrive in several blocks
    known = read_card(card)
    permission = SpendingPolicy(delta=1e-4, lifetime_epsilon="unlimited")

    def charge(stage: str, mechanism: Mechanism, max_norm: float, seed: int | None):
        noise = NoiseSource(seed) if seed is not None else None
        return open_charge(state, known, work(stage, mechanism, max_norm), permission, noise)

    once = Mechanism(noise_multiplier=5.0, sample_rate=1.0, uses=1)
    found = {}
    said = []
    if kill is None:
        found["count"] = query_count(charge("count", once, 1.0, 1), 10)
        features = FourierFeatures(
            (1, 8, 8), [FeatureMap(map="pixels", length_scales=(0.3,))], 200, 0
        )
        found["frequency"] = query_feature_means(
            charge("frequency", once, 1.0, 2), features, 10, 1500.0
        )
        noise = charge(
            "noise", Mechanism(noise_multiplier=2.0, sample_rate=0.01, uses=40), 1.0, None
        )
        released = []
        for _ in range(noise.uses):
            for _ in noise.batches(100):
                pass
            released.append(noise.release(torch.zeros(500), 1.0))
        found["noise"] = torch.stack(released)
        drawn = charge("draws", Mechanism(noise_multiplier=2.0, sample_rate=0.2, uses=1), 1.0, 3)
        found["mine"] = torch.cat([images.flatten(1) for images, _ in drawn.batches(50)])
        drawn.release(torch.zeros(1), 1.0)

    trained = Tied(
        network(),
        SETTINGS,
        public_batch=60.0,
        autocast=False,
        generator=torch.Generator().manual_seed(0),
    )

    def die(done: int, total: int) -> None:
        if kill is not None and done == kill and not distributed.is_main():
            os.kill(os.getpid(), 9)

    finetune, log = fine_tune(
        trained,
        lambda: charge("finetune", STEPS, SETTINGS.max_grad_norm, 4 if kill is None else None),
        epsilon_after=lambda steps: 0.0,
        report=die,
        say=said.append,
    )
    found |= {f"weights.{name}": value.detach() for name, value in trained.parameters.items()}
    finetune.close()
    torch.save(found | {"log": log, "said": said}, out / f"rank-{distributed.rank()}.pt")
    distributed.leave_group()
