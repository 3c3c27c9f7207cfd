"""How near a small sample comes to real images while DP-SGD runs (FETA-Pro Figure 4). Local: each number is computed from real images.

Nothing of it goes back into the training. The fine-tuned model that comes with a curve is marked local, for a run that one watched is a run
that one may have chosen: `synthesize`, the ledger and the public report refuse it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import as_uint8, replace_file
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.sampler import sample
from sfumato.diffusion.unet import UNet
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.frechet import frechet_distance

IMAGES = 500  # drawn at a time
SOLVER_STEPS = 12
ROWS = "convergence.json"  # in a run's directory


class Convergence:
    """The curve of one run: a row a measured step. real: (N, D) features of the real images, by `extractor`."""

    def __init__(self, extractor: Extractor, real: np.ndarray, images: int = IMAGES) -> None:
        self.extractor, self.real, self.images = extractor, real, images
        self.path: Path | None = None
        self.rows: list[dict] = []

    def resume(self, run: Path, used: int) -> None:
        """Keep the rows in the directory `run` from now on, going on after step `used`: later rows of an earlier process are dropped."""
        self.path = run / ROWS
        kept = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else []
        self.rows = [row for row in kept if row["step"] <= used]

    def measure(self, model: UNet, average: Mapping[str, Tensor], step: int) -> dict:
        """Draw a sample with the averaged weights and append its distance. `model` and all generators are left as they were."""
        averaged = ema_model(copy.deepcopy(model), average)
        labels = torch.arange(self.images) % model.classes
        drawn = sample(averaged, labels, SOLVER_STEPS, 0.0, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        distance = frechet_distance(self.extractor(as_uint8(drawn)), self.real)
        self.rows.append({"step": step, "frechet": distance, "images": self.images, "space": self.extractor.name})
        if self.path is not None:
            replace_file(self.path, json.dumps(self.rows).encode())
        return self.rows[-1]

    def text(self) -> str:
        """The curve as CSV."""
        lines = ["step,frechet,images,space"]
        return (
            "\n".join(
                lines + [f"{row['step']},{row['frechet']:.6g},{row['images']},{row['space']}" for row in self.rows]
            )
            + "\n"
        )
