"""Audit one run of DP-SGD: include many canaries by fair coins, then guess the coins.

The audit is white-box: the observer sees every released sum. It needs only one run, but it proves
little at a small ε. If, for example, even an ideal observer guesses only 55 % of the coins right,
the bound from a thousand guesses is far below ε.

Two lower bounds on ε share the allowed failure probability. The first is valid for any
(ε, δ)-private mechanism. The second uses the full privacy curve of DP-SGD with this sample rate and
number of steps. The audit searches a grid of noise multipliers for the smallest one under which so
many right guesses are too improbable. The bound is the ε of this multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from audit.bounds import guess, least_chance, one_run_epsilon, refutes_f_dp
from audit.repeated import Watched, opened
from audit.subjects import CLIP, Subject, trainer
from sfumato.dpsgd.run import step
from sfumato.privacy.accountant import NoiseRequest, calibrate, loss_distribution
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, Mechanism

SIDE = 32  # Pixels per side of the images, which gives 1 024 canaries
DELTA, SAMPLE_RATE = 1e-5, 0.5
# Fractions of the canaries to guess. The canaries with the most certain scores are guessed.
FRACTIONS = (1 / 64, 1 / 16, 1 / 4, 1)
NOISES = 0.5 * 1.04 ** np.arange(136)  # Noise multipliers to try, up to 100
EPSILONS = np.arange(0, 20, 0.2)  # Points of a mechanism's privacy curve


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """Result of one audited run.

    epsilon: ε claimed at DELTA;
    exact: ε of the same noise by its privacy-loss distribution;
    low: lower bound on ε at `confidence`, the larger of low_pair and low_curve;
    low_pair: lower bound for any (ε, δ)-private mechanism;
    low_curve: lower bound by the privacy curve of DP-SGD. low_pair and low_curve may each fail with
        half of the allowed probability;
    right: share of right guesses if all canaries are guessed, from 0 to 1;
    alarm: whether the audit refutes the claim.
    """

    epsilon: float
    exact: float
    low: float
    low_pair: float
    low_curve: float
    canaries: int
    right: float
    confidence: float
    noise_multiplier: float

    @property
    def alarm(self) -> bool:
        return self.low > self.exact


@lru_cache
def privacy_curve(steps: int, noise_multiplier: float) -> tuple[float, np.ndarray]:
    """Compute ε at DELTA, and δ at each of EPSILONS, by the privacy-loss distribution of DP-SGD."""
    mechanism = Mechanism(noise_multiplier=noise_multiplier, sample_rate=SAMPLE_RATE, uses=steps)
    losses = loss_distribution((mechanism.event,), ADD_OR_REMOVE_ONE)
    return float(losses.get_epsilon(DELTA)), np.array(
        [losses.get_delta(float(value)) for value in EPSILONS]
    )


def epsilon_by_curve(steps: int, guesses: int, correct: int, false_alarms: float) -> float:
    """Return the ε of the smallest noise multiplier in NOISES that the guesses refute.

    Returns 0 if they refute none.
    """
    refuted = len(NOISES)
    low, high = 0, len(NOISES)
    while low < high:
        middle = (low + high) // 2
        least = least_chance(EPSILONS, privacy_curve(steps, float(NOISES[middle]))[1])
        if refutes_f_dp(SIDE**2, guesses, correct, least, false_alarms):
            refuted = high = middle
        else:
            low = middle + 1
    return privacy_curve(steps, float(NOISES[refuted]))[0] if refuted < len(NOISES) else 0.0


def one_run(
    target: float, steps: int = 20, confidence: float = 0.95, subject: Subject | None = None
) -> OneRun:
    """Run DP-SGD calibrated to ε = `target`, and attack it.

    Each canary is an image with one white pixel. Its gradient is zero except at that pixel, and is
    clipped to the bound. The score of a canary is the sum of the values released at its pixel, over
    all steps. Both bounds are computed for several numbers of guesses, one for each of FRACTIONS.
    The allowed failure probability, 1 − confidence, is split evenly over all these bounds.
    subject: a query whose source of noise has a planted bug, or None.
    """
    count = SIDE**2
    # the attacker's code does not use these coins
    inside = np.random.default_rng().random(count) < 0.5
    chosen = torch.from_numpy(np.flatnonzero(inside))
    images = torch.zeros(len(chosen), count)
    images[torch.arange(len(chosen)), chosen] = 1.0
    images = images.view(-1, 1, SIDE, SIDE)
    seen: list[Tensor] = []
    subject = subject or Subject(name="DP-SGD", max_norm=CLIP, spend=lambda charge: None)
    asks = {"DP-SGD": NoiseRequest(sample_rate=SAMPLE_RATE, uses=steps)}
    mechanism = calibrate(asks, target, DELTA)["DP-SGD"]
    with opened(images, torch.zeros(len(images), dtype=torch.int64), subject, mechanism) as charge:
        state, watched = trainer(SIDE), Watched(charge, seen.append)
        for _ in range(steps):
            step(state, watched)  # type: ignore[arg-type]
    scores = -torch.stack(seen).double().sum(0).numpy()  # the gradient is the negated image
    guesses = [max(2, round(count * part)) for part in FRACTIONS]
    right = [guess(scores, inside, number) for number in guesses]
    each = (1 - confidence) / (2 * len(guesses))
    tried = list(zip(guesses, right, strict=True))
    low_pair = max(
        one_run_epsilon(count, number, correct, DELTA, 1 - each) for number, correct in tried
    )
    low_curve = max(epsilon_by_curve(steps, number, correct, each) for number, correct in tried)
    return OneRun(
        epsilon=target,
        exact=privacy_curve(steps, mechanism.noise_multiplier)[0],
        low=max(low_pair, low_curve),
        low_pair=low_pair,
        low_curve=low_curve,
        canaries=count,
        right=right[-1] / count,
        confidence=confidence,
        noise_multiplier=mechanism.noise_multiplier,
    )
