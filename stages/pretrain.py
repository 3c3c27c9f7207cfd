"""`stage pretrain`: train the diffusion model on released and public images, in phases, before
DP-SGD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, Stage, one_label_only

if TYPE_CHECKING:
    from pathlib import Path

    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.params import Params
    from sfumato.settings.training import Pretrain
    from sfumato.storage.artifacts import Artifact
    from stages.runner import StageRun


def pretrain(run: StageRun, settings: Pretrain) -> None:
    import torch

    from sfumato.diffusion.ema import ema_model
    from sfumato.diffusion.unet import UNet, drop_extra_classes
    from sfumato.runtime.compute import device
    from sfumato.storage.png import save_png, to_grid
    from sfumato.training.curriculum import warm_up
    from sfumato.training.training_sets import training_sets
    from stages.screen import progress

    plan = run.plan
    classes = plan.classes
    if plan.network.directory is not None:
        from sfumato.data.lineage import lineage
        from sfumato.text_to_image.directory import locate
        from sfumato.text_to_image.reference import save_reference
        from stages.screen import say
        from stages.state import state_dir

        brought = lineage(locate(str(plan.network.directory)), "model", True, state_dir())
        with run.writing(brought) as directory:
            reference = save_reference(plan.network, plan.dataset_id, classes, directory, device())
        summary = f"{reference['directory']} has sha256 {reference['sha256']}"
        return say(f"pretrain: {summary}; set model.sha256 to refuse any other model")
    sources, extra_classes = training_sets(run.paths, plan.shape, classes)
    torch.manual_seed(plan.seed)
    channels, height, width = plan.shape
    model = UNet(
        (height, width), channels, len(classes), plan.network, extra_classes, plan.several
    ).to(device())
    dropout = plan.network.label_dropout
    with progress("pretrain") as report:
        average = warm_up(model, settings.phases, sources, plan.seed, report, label_dropout=dropout)
    ema_model(model, average)
    with run.writing() as directory:
        drop_extra_classes(model).save(directory)
        if "central" in sources:
            images, _ = sources["central"]
            assert isinstance(images, torch.Tensor)  # `load_central` returns tensors
            save_png(directory / "central.png", to_grid(images, len(classes)))


def denoiser_work(workload: Work, block: int) -> int:
    """Count the operations of the diffusion model on one image."""
    from functools import partial

    import torch

    from sfumato.diffusion.unet import UNet

    channels, height, width = workload.shape
    build = partial(UNet, (height, width), channels, workload.classes, workload.params.model)
    return workload.operations(build, workload.shape, (), torch.zeros(1, dtype=torch.int64))


def work(workload: Work) -> float:
    # A perturbed step needs two passes
    passes = sum(
        phase.steps * phase.batch * (1 + bool(phase.amp))
        for phase in workload.params.pretrain.phases
    )
    return workload.TRAINING * passes * workload.network("pretrain")


def problems(setup: Setup) -> Problems:
    """Yield sentences about settings that do not match our own network or a public model.

    Raises ConfigError if our own network cannot be built for images of this size, or if the class
    prompts of a public model are invalid.
    """
    model = setup.params.model
    if model.directory is None:
        model.check_sizes(setup.card.shape[1:])
        trainable = setup.params.finetune.trainable
        if setup.params.runs("finetune") and trainable != "all" and not model.attention:
            yield (
                f"finetune.trainable={trainable} selects no weights, because model.attention is "
                "empty: add levels to model.attention, or set finetune.trainable: all"
            )
        return
    from sfumato.settings.data import SEVERAL
    from sfumato.text_to_image.reference import class_prompts

    if setup.card.labels == SEVERAL:
        yield one_label_only("model.directory")
    if setup.params.pretrain.phases:
        yield (
            f"model.directory={model.directory} sets a public model, which is not trained before "
            "DP-SGD, but pretrain.phases contains training phases. Set pretrain.phases: [], or use "
            "one of the recipes dp-sapf, dp-lora, dp-ldm and dp-finetune"
        )
    class_prompts(model, setup.card.dataset_id, setup.card.classes)


def inherited(folder: Path, params: Params, state: Path) -> list[Artifact]:
    """Return the releases from which the public model was made.

    Raises ConfigError if the model cannot be used.
    """
    model = params.model
    if model.directory is None:
        return []
    from pathlib import Path

    from sfumato.data.lineage import lineage
    from sfumato.text_to_image.directory import (
        HUB,
        choose_image_size,
        locate,
        read_model_directory,
        require_library,
    )

    require_library()
    location = model.directory
    if not location.startswith(HUB):
        location = str(folder / Path(location).expanduser())
    choose_image_size(read_model_directory(location), model)
    return lineage(locate(location), "model", model.declared_public, state)


STAGE = Stage(
    "pretrain",
    FREE,
    "Train the diffusion model on central, auxiliary and public images, in the phases of "
    "`pretrain.phases`.",
    "sfumato.settings.training:Pretrain",
    pretrain,
    inputs=("central", "frequency", "auxiliary", "refine", "evolve", "select", "public", "count"),
    seeded=True,
    network=True,
    shared=True,
    revision=2,
    several_labels=True,
    network_work=denoiser_work,
    work=work,
    problems=problems,
    inherited=inherited,
)
