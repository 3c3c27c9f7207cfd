"""The audit of one run: DP-SGD with many canaries at once, each in the set by a fair coin, and guesses which are.

White-box: the observer sees every released sum. It costs one run, and at a small ε it proves little: where an ideal
observer is right in 55 % of all guesses, a thousand guesses cannot prove more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from audit.bounds import guess, one_run_epsilon
from audit.repeated import Watched, opened
from audit.subjects import CLIP, Subject, trainer
from sfumato.dpsgd.run import step
from sfumato.privacy.accountant import epsilon, round_up, smallest_noise
from sfumato.privacy.events import Mechanism

SIDE = 32  # of the images, and so 1 024 canaries
DELTA, SAMPLE_RATE = 1e-5, 0.5
FRACTIONS = (1 / 64, 1 / 16, 1 / 4, 1)  # of the canaries that are guessed, the surest


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """epsilon: what is claimed, at DELTA; low: what is proven at `confidence`; right: of all guesses, in parts of 1."""

    epsilon: float
    low: float
    canaries: int
    right: float
    confidence: float
    noise_multiplier: float

    @property
    def alarm(self) -> bool:
        return self.low > self.epsilon


def one_run(target: float, steps: int = 20, confidence: float = 0.95, subject: Subject | None = None) -> OneRun:
    """A run of DP-SGD calibrated to ε = `target`, attacked. subject: only what replaces its noise.

    Each canary is one white pixel, whose gradient is that pixel alone, clipped to the bound. Its score is the sum over
    all steps of what was released in its place. The confidence is split evenly over the numbers of guesses tried.
    """
    count = SIDE**2
    inside = np.random.default_rng().random(count) < 0.5  # the observer's coins: secret to nobody but the guesser
    chosen = torch.from_numpy(np.flatnonzero(inside))
    images = torch.zeros(len(chosen), count)
    images[torch.arange(len(chosen)), chosen] = 1.0
    images = images.view(-1, 1, SIDE, SIDE)
    seen: list[Tensor] = []
    subject = subject or Subject(name="DP-SGD", max_norm=CLIP, spend=lambda charge: None)
    made = partial(Mechanism, sample_rate=SAMPLE_RATE, uses=steps)
    enough = smallest_noise(lambda noise: epsilon([made(noise_multiplier=noise).event], DELTA) <= target)
    mechanism = made(noise_multiplier=round_up(enough))
    with opened(images, torch.zeros(len(images), dtype=torch.int64), subject, mechanism) as charge:
        state, watched = trainer(SIDE), Watched(charge, seen.append)
        for _ in range(steps):
            step(state, watched)  # type: ignore[arg-type]
    scores = -torch.stack(seen).double().sum(0).numpy()  # the gradient is the negated image
    guesses = [max(2, round(count * part)) for part in FRACTIONS]
    right = [guess(scores, inside, number) for number in guesses]
    each = 1 - (1 - confidence) / len(guesses)
    low = max(one_run_epsilon(count, n, k, DELTA, each) for n, k in zip(guesses, right, strict=True))
    return OneRun(
        epsilon=target,
        low=low,
        canaries=count,
        right=right[-1] / count,
        confidence=confidence,
        noise_multiplier=mechanism.noise_multiplier,
    )
