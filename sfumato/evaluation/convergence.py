"""How near a small sample comes to real images while DP-SGD runs (FETA-Pro Figure 4). Local: computed from real images.

The training does not use these numbers. A fine-tuned model with a curve is marked local, because whoever watches a run
may choose by it: `synthesize`, the ledger and the public report refuse it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sfumato.data.images import as_uint8
from sfumato.data.store import Card
from sfumato.diffusion.denoiser import Denoiser
from sfumato.diffusion.ema import ema_model
from sfumato.errors import ConfigError
from sfumato.evaluation.extractors import Extractor, build_extractor
from sfumato.evaluation.metrics.distances import frechet_distance
from sfumato.evaluation.scores import subsample
from sfumato.evaluation.tables import csv_of
from sfumato.privacy.authorize import open_local
from sfumato.privacy.resolved import StagePlan
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.training import Model
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_local

IMAGES = 500  # drawn at a time
SOLVER_STEPS = 12
ROWS = "convergence.json"  # in a run's directory


class Convergence:
    """The curve of one run: one row per measured step. real: (N, D) features of the real images, by `extractor`."""

    def __init__(self, extractor: Extractor, real: np.ndarray, images: int = IMAGES) -> None:
        self.extractor, self.real, self.images = extractor, real, images
        self.path: Path | None = None
        self.rows: list[dict] = []

    def resume(self, run: Path, used: int) -> None:
        """Keep the rows in the directory `run` from now on. Drops rows after step `used`, from an earlier process."""
        self.path = run / ROWS
        kept = read_json(self.path) if self.path.is_file() else []
        self.rows = [row for row in kept if row["step"] <= used]

    def measure(self, model: Denoiser, average: Mapping[str, Tensor], step: int) -> dict:
        """Draw a sample with the averaged weights and append its distance. Changes no weights and no generator."""
        averaged = copy.deepcopy(model)
        ema_model(averaged, average)
        labels = torch.arange(self.images) % model.classes
        drawn = averaged.draw(labels, SOLVER_STEPS, 0.0, torch.Generator().manual_seed(0))
        distance = frechet_distance(self.extractor(as_uint8(drawn)), self.real)
        self.rows.append({"step": step, "frechet": distance, "images": self.images, "space": self.extractor.name})
        if self.path is not None:
            write_local(self.path, json.dumps(self.rows).encode())
        return self.rows[-1]

    def text(self) -> str:
        """The curve as CSV."""
        return csv_of(pd.DataFrame(self.rows), "%.6g")


def open_curve(
    plan: StagePlan[Evaluate], network: Model, state: Path, card: Card, log: Callable[[str], None]
) -> Convergence:
    """Features of the hold-out in the space that `evaluate` compares in.

    plan: of `evaluate`; network: the one that is fine-tuned. Journalled as local.
    """
    if network.directory:
        raise ConfigError(
            "finetune.convergence is for our own network, and model.directory names a public model: "
            "take one of them out"
        )
    extractor = build_extractor(plan.settings, plan.shape, log)
    if extractor is None:
        raise ConfigError(
            "finetune.convergence needs a feature space, and evaluate.fidelity is empty: set it to null, "
            "or take finetune.convergence out"
        )
    _, holdout = open_local(state, card, "convergence")
    log("finetune: convergence is measured on real images: this run is local, and nothing of it can be released")
    return Convergence(extractor, extractor(subsample(holdout).images))
