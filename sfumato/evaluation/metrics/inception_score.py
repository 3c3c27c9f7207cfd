"""Inception Score: are single images clear, and are all of them together varied? It uses no real image."""

from __future__ import annotations

import numpy as np
from scipy.stats import entropy


def inception_score(probabilities: np.ndarray, splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation over `splits` parts of exp(mean KL(p(y|x) ‖ p(y))), from 1 to the number of classes.

    probabilities: (N, classes), rows that add up to 1. They are shuffled first, because sets may be sorted by class.
    There are fewer parts where a part would have fewer than two images. Source: Salimans et al. 2016.
    """
    if probabilities.ndim != 2 or len(probabilities) < 2 or not np.allclose(probabilities.sum(axis=1), 1, atol=1e-3):
        raise ValueError(f"probabilities are {probabilities.shape}: expected two rows or more, each adding up to 1")
    order = np.random.default_rng(0).permutation(len(probabilities))
    scores = []
    for part in np.array_split(order, min(splits, len(order) // 2)):
        p = probabilities[part].astype(np.float64)
        scores.append(np.exp(entropy(p, p.mean(axis=0, keepdims=True), axis=1).mean()))
    return float(np.mean(scores)), float(np.std(scores))
