"""Low-rank adapters (LoRA): a layer computes with W + scale·A·B. W stays frozen; only A and B are trained.

Training never forms A·B, so per-image gradients cost r·(m + n) numbers per image, not m·n.
Source: Hu et al. 2022 (LoRA); DP-SAPF Eq. 9 and Algorithm 2, for A Gaussian and B zero.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.dpsgd import Lora
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_tensors, save_tensors

ADAPTER, ADAPTER_CONFIG = "adapter.safetensors", "adapter.json"
AGAIN = "run `stage finetune` again"


class Adapted(nn.Module):
    """A layer that shares the parameters of `layer`, frozen, beside an adapter A (m, r), B (r, n)."""

    bias: Any

    def __init__(self, layer: nn.Linear | nn.Conv2d, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__(**arguments(layer))
        self.weight, self.bias = layer.requires_grad_(False).weight, layer.bias
        self.train(layer.training)
        self.A, self.B, self.scale = nn.Parameter(a), nn.Parameter(b), scale


class LoraLinear(Adapted, nn.Linear):
    """A linear layer with a frozen weight (m, n) and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.B), self.A)


class LoraConv2d(Adapted, nn.Conv2d):
    """A convolution with frozen weight, read as (m, n) with n = in·height·width, and bias."""

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.B.unflatten(1, self.weight.shape[1:])  # (r, in, height, width): the convolution to r channels
        hidden = F.conv2d(x, narrow, None, self.stride, self.padding, self.dilation)
        return super().forward(x) + self.scale * F.conv2d(hidden, self.A[:, :, None, None])


def arguments(layer: nn.Linear | nn.Conv2d) -> dict[str, Any]:
    """Arguments that build a layer of the same shape on the meta device."""
    names: tuple[str, ...] = ("in_features", "out_features")
    if isinstance(layer, nn.Conv2d):
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None, "device": "meta"}


def layer_of(model: nn.Module, name: str) -> nn.Linear | nn.Conv2d:
    """The plain layer whose weight is `name`. Raises ConfigError if an adapter would not change the output."""
    path, _, last = name.rpartition(".")
    layers = dict(model.named_modules(remove_duplicate=False))
    layer = layers.get(path) if path and last == "weight" else None
    if layer is None:
        raise ConfigError(f"{name} is not a weight of a layer of this model, such as middle.0.attention.q.weight")
    # A subclass, as in nn.MultiheadAttention, may use its weight without a call of the layer: the adapter does nothing.
    if type(layer) is nn.Linear:
        return layer
    if type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        return layer
    kind = type(layer).__name__
    raise ConfigError(
        f"{name} is of {kind}: only plain nn.Linear and nn.Conv2d (one group, zero padding) can be adapted"
    )


def add_lora(model: nn.Module, names: Sequence[str], lora: Lora, seed: int) -> None:
    """Put an adapter beside each named weight, in place. A ~ N(0, 1) from the public `seed`; B = 0 keeps the output.

    It freezes the weights and biases of the adapted layers; the caller decides what else is trained.
    Raises ConfigError before it changes anything: no such weight, a layer that cannot be adapted, too high a rank.
    """
    layers = {name: layer_of(model, name) for name in dict.fromkeys(names)}
    for name, layer in layers.items():
        rows, columns = len(layer.weight), layer.weight[0].numel()
        if lora.rank > min(rows, columns):
            raise ConfigError(
                f"finetune.lora.rank={lora.rank} is above min({rows}, {columns}), the shape of {name}: "
                "lower the rank, or leave this matrix out of the candidates"
            )
    public = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        weight = layer.weight.detach()
        a = torch.randn(len(weight), lora.rank, generator=public).to(weight)
        b = weight.new_zeros(lora.rank, weight[0].numel())
        kind = LoraLinear if isinstance(layer, nn.Linear) else LoraConv2d
        model.set_submodule(name.removesuffix(".weight"), kind(layer, a, b, lora.scale))


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear | LoraConv2d]:
    """The adapted layers by the name of their weight, in the order of the model."""
    return {
        f"{path}.weight": layer for path, layer in model.named_modules() if isinstance(layer, (LoraLinear, LoraConv2d))
    }


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Back to plain layers, in place: W ← W + scale·A·B. Does nothing to a model without adapters."""
    for name, layer in adapted_layers(model).items():
        plain: nn.Linear | nn.Conv2d = (nn.Linear if isinstance(layer, LoraLinear) else nn.Conv2d)(**arguments(layer))
        change = layer.scale * (layer.A @ layer.B)
        plain.weight, plain.bias = nn.Parameter(layer.weight + change.view_as(layer.weight)), layer.bias
        plain.train(layer.training).requires_grad_(True)
        model.set_submodule(name.removesuffix(".weight"), plain)


def save_adapter(model: nn.Module, directory: Path, base: Path) -> None:
    """Write A and B of each matrix, and `adapter.json`. base: the file that the frozen weights came from."""
    layers = adapted_layers(model)
    tensors = {
        f"{name}.{part}": getattr(layer, part).detach().cpu().contiguous()
        for name, layer in layers.items()
        for part in ("A", "B")
    }
    first = next(iter(layers.values()))
    content = {"base_sha256": digest_of_file(base), "rank": first.A.shape[1], "scale": first.scale}
    save_tensors(tensors, directory / ADAPTER)
    write_json(directory / ADAPTER_CONFIG, content | {"matrices": list(layers)}, sort_keys=True)


@torch.no_grad()
def apply_adapter(model: nn.Module, directory: Path, base: Path) -> None:
    """Merge the adapters that `save_adapter` wrote into `model`, in place. base: the weights file of `model`.

    Raises DataError: files missing or damaged, adapters that were trained on another base, shapes that do not fit.
    """
    files = f"{directory}: {ADAPTER_CONFIG} and {ADAPTER}"
    with explained(DataError, lambda error: f"{files} cannot be read ({error}): {AGAIN}"):
        content = read_json(directory / ADAPTER_CONFIG)
        expected, scale, lora = str(content["base_sha256"]), float(content["scale"]), Lora(rank=content["rank"])
        matrices = [str(name) for name in content["matrices"]]
        tensors = load_tensors(directory / ADAPTER)
    if (found := digest_of_file(base)) != expected:
        raise DataError(
            f"the adapters of {directory} were trained on a base with sha256 {expected[:12]}…, "
            f"not on {base} ({found[:12]}…): restore that base (`dvc checkout`), or {AGAIN}"
        )
    if tensors.keys() != {f"{name}.{part}" for name in matrices for part in ("A", "B")}:
        raise DataError(f"{directory}: {ADAPTER} does not hold what {ADAPTER_CONFIG} lists: {AGAIN}")
    misfit = f"{directory} does not fit the model of {base.parent}"
    with explained(DataError, lambda error: f"{misfit} ({error}): {AGAIN}", causes=(ConfigError, RuntimeError)):
        add_lora(model, matrices, lora, seed=0)
        for name, layer in adapted_layers(model).items():
            layer.load_state_dict({part: tensors[f"{name}.{part}"] for part in ("A", "B")}, strict=False)
            layer.scale = scale
    merge(model)
