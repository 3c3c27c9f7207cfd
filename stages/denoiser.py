"""`stage denoiser`: a diffusion model of the public images alone, as a generator for `evolve`."""

from __future__ import annotations

import numpy as np
import torch

from sfumato.data.store import load_public
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.memory import images_kept
from sfumato.runtime.compute import device
from sfumato.settings.baselines import Denoiser
from sfumato.settings.training import Phase, Pretrain
from sfumato.storage.png import save_png, to_grid
from sfumato.training.curriculum import MappedImages, over_all, warm_up
from stages.runner import StageRun, progress


def denoiser(run: StageRun[Denoiser]) -> None:
    plan, settings = run.plan, run.settings
    public = load_public(run.path("public"), plan.shape)
    torch.manual_seed(plan.seed)
    model = UNet(
        resolution=plan.shape[1], channels=plan.shape[0], classes=len(public.classes), **plan.network.network()
    ).to(device())
    phases = [Phase(sources={"public": 1.0}, **settings.model_dump(include={"steps", "batch", "learning_rate"}))]
    sources = {"public": (MappedImages(public.images), torch.from_numpy(np.array(public.labels)))}
    with progress("denoiser") as report:
        average = warm_up(
            model,
            phases,
            sources,
            Pretrain(ema=settings.ema),
            plan.seed,
            over_all(phases, report),
            label_dropout=plan.network.label_dropout,
            at_a_time=images_kept(model),
        )
    ema_model(model, average).eval()
    shown = torch.arange(100) % model.classes
    pictures = model.draw(shown, steps=12, guidance=0.0, generator=torch.Generator().manual_seed(plan.seed))
    with run.writing() as directory:
        model.save(directory)
        save_png(directory / "grid.png", to_grid(pictures, 10))
