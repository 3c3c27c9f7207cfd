"""`stage pretrain`: warm the synthesizer up on what was released and on public images, phase by phase."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.common import (
    ARTIFACTS,
    PUBLIC,
    Config,
    DryRun,
    Out,
    PublicPath,
    describe,
    input_option,
    load_plan,
    progress,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from sfumato.artifacts import Artifact
    from sfumato.config import Phase
    from sfumato.resolved import StagePlan
    from sfumato.warmup.curriculum import Images


def pretrain(
    config: Config = None,
    out: Out = None,
    central: Annotated[Path, input_option("central")] = ARTIFACTS / "central",
    auxiliary: Annotated[Path, input_option("auxiliary")] = ARTIFACTS / "auxiliary",
    select: Annotated[Path, input_option("select")] = ARTIFACTS / "select",
    public: PublicPath = PUBLIC,
    dry_run: DryRun = False,
) -> None:
    """Free: train the diffusion model on central, auxiliary and public images, in the order of its curriculum."""
    plan, out = load_plan("pretrain", config), out or ARTIFACTS / "pretrain"
    every = {"central": central, "auxiliary": auxiliary, "select": select, "public": public}
    paths = {name: every[name] for name in wanted(plan.settings.phases)}
    if dry_run:
        return describe(plan, paths, out)
    from sfumato.artifacts import write_empty, writing

    if not plan.enabled:
        return write_empty(out, "pretrain")
    if plan.model is not None and plan.model.directory is not None:
        return refer_to_public_model(plan, out)
    import torch

    from sfumato.compute import device, settle_processor
    from sfumato.data.images import save_png
    from sfumato.diffusion.ema import ema_model
    from sfumato.diffusion.unet import UNet, drop_extra_classes, save_model
    from sfumato.warmup.curriculum import warm_up

    settle_processor()
    settings = plan.settings
    inputs = read_inputs(paths)
    sources, extra_classes, pictures = training_sets(plan, paths)
    assert plan.model is not None
    shape = {"resolution": plan.shape[1], "channels": plan.shape[0], "classes": len(plan.classes)}
    arguments = shape | plan.model.network()
    torch.manual_seed(plan.seed)
    model = UNet(**arguments, extra_classes=extra_classes).to(device())
    ends = [0, *itertools.accumulate(phase.steps for phase in settings.phases)]
    with progress("pretrain") as show:

        def report(phase: int, step: int, steps: int, loss: float) -> None:
            show(ends[phase] + step, ends[-1])

        average = warm_up(
            model, settings.phases, sources, settings, plan.seed, report, label_dropout=plan.model.label_dropout
        )
    ema_model(model, average)
    with writing(out, "pretrain", inputs) as directory:
        save_model(drop_extra_classes(model), arguments, directory)
        for name, grid in pictures.items():
            save_png(directory / f"{name}.png", grid)


def refer_to_public_model(plan: StagePlan, out: Path) -> None:
    """Write what stands for a public text-to-image model: where it is, the sha256 of its parts, the class prompts and their embeddings."""
    from sfumato.artifacts import check_out, writing
    from sfumato.compute import device
    from sfumato.public_model.network import save_reference

    check_out(out, "pretrain")
    assert plan.model is not None
    with writing(out, "pretrain") as directory:
        found = save_reference(plan.model, plan.dataset_id, plan.classes, directory, device())
    typer.echo(
        f"pretrain: {found['directory']} has sha256 {found['sha256']}; set model.sha256 to it, and no other model will be taken",
        err=True,
    )


def wanted(phases: Sequence[Phase]) -> list[str]:
    """The artifacts that the phases need; public images need the selection too, which is read first, for it may be empty."""
    sources = {name for phase in phases for name in phase.sources}
    return [
        name
        for name in ("central", "auxiliary", "select", "public")
        if ("public" if name == "select" else name) in sources
    ]


def read_inputs(paths: Mapping[str, Path]) -> list[Artifact]:
    """Read and verify. Raises ConfigError where public images are wanted and none were selected."""
    from sfumato.artifacts import read_artifact
    from sfumato.errors import ConfigError

    inputs = []
    for name, path in paths.items():
        inputs.append(read_artifact(path, name))
        if name == "select" and not inputs[-1].enabled:
            raise ConfigError(
                f"a phase of pretrain wants public images, but none are selected: {path} is empty. Set select.enabled: true, or drop the source"
            )
    return inputs


def training_sets(
    plan: StagePlan, paths: Mapping[str, Path]
) -> tuple[dict[str, tuple[Images, Tensor]], int, dict[str, np.ndarray]]:
    """What the phases show: images and labels by source, the extra classes they need, and pictures of central and public ones."""
    import numpy as np
    import torch

    from sfumato.data.images import load_images, to_grid
    from sfumato.data.store import load_public
    from sfumato.warmup.central_images import central_training_set
    from sfumato.warmup.curriculum import MappedImages, as_float
    from sfumato.warmup.public_images import public_training_set, some_of_each

    classes, extra_classes = len(plan.classes), 0
    sources: dict[str, tuple[Images, Tensor]] = {}
    pictures = {}
    if "central" in paths:
        found = sorted(paths["central"].glob("*.npy"))[0]  # mean.npy or mode.npy
        images, labels = central_training_set(
            torch.from_numpy(np.load(found)), found.stem, plan.shape, plan.settings.median
        )
        sources["central"] = images, labels
        pictures["central"] = to_grid(images, classes)
    if "auxiliary" in paths:
        drawn = load_images(paths["auxiliary"], plan.classes)
        sources["auxiliary"] = MappedImages(drawn.images), torch.from_numpy(np.array(drawn.labels))
    if "public" in paths:
        public = load_public(paths["public"], plan.shape)
        selected, labels, extra_classes = public_training_set(public, paths["select"], classes)
        sources["public"] = selected, labels
        pictures["public"] = to_grid(as_float(some_of_each(selected, labels)), 10)
    return sources, extra_classes, pictures
