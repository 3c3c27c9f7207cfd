"""Load the diffusion model of an artifact: a network of our own, or a public model."""

from pathlib import Path
from types import ModuleType

import torch
from torch.overrides import TorchFunctionMode

from sfumato.diffusion.denoiser import Denoiser
from sfumato.diffusion.unet import UNet, load_model
from sfumato.dpsgd.lora import ADAPTER_CONFIG, apply_adapter
from sfumato.settings.training import Model
from sfumato.storage.weights import CONFIG, WEIGHTS, refers_to_public_model


def public_models() -> ModuleType:
    """Import the networks of public text-to-image models.

    Only this function and `stages/pretrain.py` import `sfumato/text_to_image`. This folder can
    therefore be deleted, together with its recipes.
    """
    from sfumato.text_to_image import network

    return network


def load_start(pretrain: Path) -> Denoiser:
    """Load the network that fine-tuning starts from: our own, or a public model that `pretrain`
    refers to.
    """
    if refers_to_public_model(pretrain):
        return public_models().load_latent(pretrain)
    return load_model(pretrain)


def load_synthesizer(finetune: Path, pretrain: Path) -> Denoiser:
    """Load the fine-tuned network: its own weights, or adapters on the weights of `pretrain`."""
    if (finetune / ADAPTER_CONFIG).is_file():
        model = load_start(pretrain)
        apply_adapter(model, finetune, start_file(pretrain))
        return model
    if refers_to_public_model(finetune):
        return public_models().load_trained(finetune)
    return load_model(finetune)


def start_file(pretrain: Path) -> Path:
    """Return the file whose sha256 identifies the weights of the artifact `pretrain`.

    For a public model, this file is a reference. It contains one sha256 for each part of the model.
    """
    return pretrain / (CONFIG if refers_to_public_model(pretrain) else WEIGHTS)


class WithoutInitialValues(TorchFunctionMode):
    """Skip the initialisation of weights.

    On the meta device, initialising weights would import PyTorch's compiler, which takes seconds.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def outline(settings: Model, shape: tuple[int, int, int], classes: int) -> Denoiser:
    """Build a network on the meta device, for estimates: it has shapes, but no weights."""
    if settings.directory is not None:
        return public_models().latent_outline(settings, classes)
    with torch.device("meta"), WithoutInitialValues():
        return UNet(shape[1:], shape[0], classes, settings)
