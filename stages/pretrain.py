"""`stage pretrain`: warm the synthesizer up on what was released, phase by phase."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

from stages.common import ARTIFACTS, Config, DryRun, Out, describe, input_option, load_plan, progress


def pretrain(
    config: Config = None,
    out: Out = None,
    central: Annotated[Path, input_option("central")] = ARTIFACTS / "central",
    auxiliary: Annotated[Path, input_option("auxiliary")] = ARTIFACTS / "auxiliary",
    dry_run: DryRun = False,
) -> None:
    """Free: train the diffusion model on central and auxiliary images, in the order of its curriculum."""
    plan, out = load_plan("pretrain", config), out or ARTIFACTS / "pretrain"
    if dry_run:
        return describe(plan, {"central": central, "auxiliary": auxiliary}, out)
    from sfumato.artifacts import read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "pretrain")
    import numpy as np
    import torch

    from sfumato.images import load_images, save_png, to_grid
    from sfumato.models.unet import UNet, save_model
    from sfumato.training.central_images import central_training_set
    from sfumato.training.curriculum import warm_up
    from sfumato.training.ema import ema_model
    from sfumato.training.threads import device, settle_threads

    settle_threads()
    settings = plan.settings
    needed = {source for phase in settings.phases for source in phase.sources}
    paths = {name: path for name, path in (("central", central), ("auxiliary", auxiliary)) if name in needed}
    inputs = {name: read_artifact(path, name) for name, path in paths.items()}
    sources = {}
    if "central" in inputs:
        found = sorted(central.glob("*.npy"))[0]  # mean.npy or mode.npy
        sources["central"] = central_training_set(torch.from_numpy(np.load(found)), found.stem, plan.shape, settings.median)
    if "auxiliary" in inputs:
        drawn = load_images(auxiliary, plan.classes)
        sources["auxiliary"] = (torch.from_numpy(np.array(drawn.images)).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(np.array(drawn.labels)))
    assert plan.model is not None
    shape = {"resolution": plan.shape[1], "channels": plan.shape[0], "classes": len(plan.classes)}
    arguments = shape | plan.model.model_dump(mode="json", exclude={"label_dropout"})
    torch.manual_seed(plan.seed)
    model = UNet(**arguments).to(device())
    ends = [0, *itertools.accumulate(phase.steps for phase in settings.phases)]
    with progress("pretrain") as show:

        def report(phase: int, step: int, steps: int, loss: float) -> None:
            show(ends[phase] + step, ends[-1])

        average = warm_up(model, settings.phases, sources, settings, plan.seed, report, label_dropout=plan.model.label_dropout)
    with writing(out, "pretrain", list(inputs.values())) as directory:
        save_model(ema_model(model, average), arguments, directory)
        if "central" in sources:
            save_png(directory / "central.png", to_grid(sources["central"][0], len(plan.classes)))
