"""A small release of digits, as `stage synthesize` writes one."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from small_record import small_record

from sfumato.privacy.events import Mechanism
from sfumato.release.release import save_release
from sfumato.release.variation import Varied
from sfumato.settings.release import Synthesize
from sfumato.storage.artifacts import writing

ABOUT = {"id": "a" * 32, "dataset_id": "clinic-2026", "released": "counts", "time": 1_795_243_189}
RECORD = small_record(0, Mechanism(noise_multiplier=5), **ABOUT)


def write_release(
    path: Path, digits, sources=("finetune",), about=None, count=40, kinds=None, asked=None, prepared=None, **settings
) -> Path:
    images = torch.from_numpy(digits.images[:count].copy()).permute(0, 3, 1, 2)
    kinds = np.full(count, "plain") if kinds is None else kinds
    varied = Varied(images, torch.from_numpy(digits.labels[:count]), kinds, asked)
    plan = SimpleNamespace(
        dataset_id="clinic-2026",
        shape=(1, 8, 8),
        classes=digits.classes,
        size_hint=1500,
        delta=None,
        about=about or {},
        several=False,
        prepared=prepared or {},
        settings=Synthesize(**settings),
        seed=0,
    )
    drawn_by = np.array(sources)[np.arange(count) % len(sources)]
    with writing(path, "synthesize", records=[RECORD]) as directory:
        save_release(directory, varied, drawn_by, {RECORD["id"]: RECORD}, plan)
    return path
