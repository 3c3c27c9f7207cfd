"""The owner's own network as a public map.

The owner names a torchvision architecture and a safetensors file with the weights. Such a file
contains only numbers, and no part of it is run. TorchScript and pickles are refused and never run,
because they are programs that could store images or write files. The only exception is one pickle
with a known sha256, from which only tensors are read (see `of_architecture`).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.errors import UNREADABLE, ConfigError, DataError, explained, nearest
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.efficientnet_lite import (
    LITE0,
    MIDDLE,
    SHA256,
    efficientnet_lite0,
    imagenet_network,
    imagenet_weights,
)
from sfumato.runtime.compute import device
from sfumato.settings.queries import CONVERT, OwnNetwork
from sfumato.storage.digest import digest_of_file
from sfumato.storage.weights import load_tensors


class OwnFeatures(nn.Module):
    """Features of a network that the owner supplies: (B, C, H, W) in [0, 1] -> (B, d) float32.

    Images are resized and normalised first.

    layers: torchvision's names of layers. `of_architecture` computes the features from the outputs
    of these layers. If there are no layers, the features are the input of the last linear layer.

    The network is not part of the module's state, because its file and sha256 identify it. The
    features are differentiable with respect to the images. Raises DataError if the file is missing,
    has changed or does not contain weights of this architecture, and ConfigError for an unknown
    architecture.
    """

    def __init__(self, settings: OwnNetwork, layers: Sequence[str] = ()) -> None:
        super().__init__()
        self.settings = settings
        self.layers = layers
        self.file = Path(settings.path).expanduser()
        remedy = "restore the file, or name another file and its sha256"
        if not self.file.is_file():
            raise DataError(f"the network {self.file} is missing: {remedy}")
        if (digest := digest_of_file(self.file)) != settings.sha256:
            raise DataError(
                f"the network {self.file} has sha256 {digest}, expected {settings.sha256}: {remedy}"
            )
        self.network = of_architecture(settings, self.file, layers)
        self.mean = nn.Buffer(torch.tensor(settings.mean)[:, None, None], persistent=False)
        self.std = nn.Buffer(torch.tensor(settings.std)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # In small batches, so that their tensors fit into the processor's caches
        return torch.cat([self.rows(part) for part in images.split(4)])

    def rows(self, images: Tensor) -> Tensor:
        if self.settings.channels == 1:
            images = images.mean(1, keepdim=True)
        inputs = images.expand(-1, self.settings.channels, -1, -1)
        if side := self.settings.side:
            inputs = F.interpolate(inputs, (side, side), mode="bilinear", align_corners=False)
        inputs = ((inputs - self.mean) / self.std).to(device())
        size = "×".join(map(str, inputs.shape[1:]))
        problem = f"the network {self.file} does not accept images of shape {size}"
        with explained(
            ConfigError,
            lambda error: f"{problem} ({error}): set `side` to a size in pixels that it accepts",
            causes=(RuntimeError, ValueError, AssertionError),
        ):
            rows = self.network(inputs)
        return rows.float().to(images.device)


def imagenet(_: Shape) -> OwnFeatures:
    """Build the feature map "imagenet"."""
    return OwnFeatures(imagenet_network())


def imagenet_middle(_: Shape) -> OwnFeatures:
    """Build the map "imagenet-middle"."""
    return OwnFeatures(imagenet_network(side=128), MIDDLE)


def of_architecture(
    settings: OwnNetwork, file: Path, layers: Sequence[str]
) -> Callable[[Tensor], Tensor]:
    """Build the network that `settings` names, with weights from `file`.

    Returns a function from images to features. Without `layers`, the features are the input of the
    last linear layer. Otherwise, the output of each of the `layers` is averaged over all positions
    and scaled to norm 1, and the features are the concatenated results; later layers are not run.

    The file must be safetensors. The only exception is a pickle with a known sha256, from which
    `imagenet_weights` reads only tensors. Because a function is returned, the network does not
    become a submodule of its caller, and stays in evaluation mode.
    """
    from torchvision import models
    from torchvision.models.feature_extraction import create_feature_extractor

    architecture = settings.architecture
    names = [*models.list_models(models), LITE0]
    if architecture not in names:
        raise ConfigError(
            f"torchvision has no classification model {architecture!r}: "
            f"{nearest(architecture, names)}"
        )
    network = (
        efficientnet_lite0()
        if architecture == LITE0
        else models.get_model(architecture, weights=None)
    )
    if settings.channels == 1:  # torchvision's models expect three channels
        first = next(layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
        first.weight = nn.Parameter(first.weight[:, :1])
    last = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)][-1:]
    for name in last:
        network.set_submodule(name, nn.Identity())
    problem = f"{file} does not contain the weights of a {architecture} as safetensors"
    with explained(
        DataError,
        lambda error: f"{problem} ({error}): {CONVERT}",
        causes=(*UNREADABLE, RuntimeError),
    ):
        tensors = imagenet_weights(file) if settings.sha256 == SHA256 else load_tensors(file)
        left_out = tuple(f"{name}." for name in last)
        weights = OrderedDict(
            (name, value) for name, value in tensors.items() if not name.startswith(left_out)
        )
        # MNASNet refuses weights without a version, and safetensors files contain no version
        weights._metadata = {"": {"version": network._version}}  # type: ignore[attr-defined]
        network.load_state_dict(weights)
    network = network.eval().requires_grad_(False).to(device())
    if not layers:
        return lambda images: network(images)  # type: ignore[no-any-return]
    extractor = create_feature_extractor(network, [*layers])
    return lambda images: torch.cat(
        [F.normalize(out.mean((2, 3))) for out in extractor(images).values()], dim=1
    )


def check_rows(features: OwnFeatures, shape: Shape, where: torch.device) -> None:
    """Raise DataError if features of random images are not finite, or differ when computed again.

    Before the second computation, the network is reloaded and the order of the images is reversed.
    """
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0)).to(where)
    repeated_rows = rows_alone(
        OwnFeatures(features.settings, features.layers).to(where), images.flip(0)
    ).flip(0)
    rows = rows_alone(features, images)
    if not torch.stack([rows, repeated_rows]).isfinite().all():
        raise DataError(
            f"the network {features.file} returns features that are not finite numbers: name "
            "another architecture"
        )
    if not torch.equal(rows, repeated_rows):
        raise DataError(
            f"the network {features.file} returns different features for the same image: name "
            "another architecture"
        )
