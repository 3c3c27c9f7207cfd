"""`stage pretrain`: train the diffusion model on released and public images, in phases, before DP-SGD."""

import torch

from sfumato.data.lineage import lineage
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.unet import UNet, drop_extra_classes
from sfumato.runtime.compute import device
from sfumato.settings.training import Pretrain
from sfumato.storage.png import save_png, to_grid
from sfumato.text_to_image.directory import locate
from sfumato.text_to_image.reference import save_reference
from sfumato.training.curriculum import warm_up
from sfumato.training.training_sets import training_sets
from stages.runner import StageRun
from stages.screen import progress, say
from stages.state import state_dir


def pretrain(run: StageRun, settings: Pretrain) -> None:
    plan = run.plan
    classes = plan.classes
    if plan.network.directory is not None:  # a public text-to-image model
        brought = lineage(locate(str(plan.network.directory)), "model", True, state_dir())
        with run.writing(brought) as directory:
            reference = save_reference(plan.network, plan.dataset_id, classes, directory, device())
        where = f"{reference['directory']} has sha256 {reference['sha256']}"
        return say(f"pretrain: {where}; set model.sha256 to refuse any other model")
    paths = {name: artifact.path for name, artifact in run.inputs.items()}
    sources, extra_classes = training_sets(paths, plan.shape, classes)
    torch.manual_seed(plan.seed)
    network = plan.network.network() | {"extra_classes": extra_classes, "several": plan.several}
    model = UNet(plan.shape[1:], plan.shape[0], len(classes), **network).to(device())
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
