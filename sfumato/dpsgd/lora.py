"""Low-rank adapters (LoRA): a layer uses W + scale·A·B instead of W.

W is frozen, and only A and B are trained. Training never computes A·B. So with rank r, the
per-image gradient of an m×n matrix has r·(m + n) numbers instead of m·n.

Source: Hu et al. 2022 (LoRA); DP-SAPF Eq. 9 and Algorithm 2, for the initial values.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from sfumato.errors import ConfigError, DataError, explained
from sfumato.storage.digest import digest_of_file
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_tensors, save_tensors

ADAPTER = "adapter.safetensors"
ADAPTER_CONFIG = "adapter.json"
TUNE_AGAIN = "run `stage finetune` again"


class LoraLinear(nn.Linear):
    """A frozen linear layer with weight (m, n), and its adapter: A, (m, r), and B, (r, n)."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, device="meta"
        )
        self.weight = layer.requires_grad_(False).weight
        self.bias = layer.bias
        self.train(layer.training)
        self.A = nn.Parameter(a)
        self.B = nn.Parameter(b)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.B), self.A)


def add_lora(
    model: nn.Module, names: Sequence[str], rank: int, seed: int, scale: float = 1.0
) -> None:
    """Add an adapter to each named weight, in place.

    A is drawn from N(0, 1) with the public `seed`. B is 0, so the output does not change yet. The
    weights and biases of the adapted layers are frozen; the caller decides what else is trained.

    Raises ConfigError, before any change, if a weight does not exist, a layer cannot be adapted, or
    the rank is too high.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[str, nn.Linear] = {}
    for name in names:
        path, _, last = name.rpartition(".")
        layer = modules.get(path)
        if layer is None or not path or last != "weight":
            raise ConfigError(
                f"{name} is not a weight of a layer of this model: expected a name such as "
                "middle.0.attention.q.weight"
            )
        # A subclass is refused, because an adapter has no effect if other code reads the weight
        # instead of calling the layer, as nn.MultiheadAttention does with its output projection.
        if type(layer) is not nn.Linear:
            raise ConfigError(
                f"{name} belongs to a {type(layer).__name__}: only a plain nn.Linear can be adapted"
            )
        rows, columns = layer.weight.shape
        if rank > min(rows, columns):
            raise ConfigError(
                f"adapter rank {rank} exceeds the shorter side of {name}, a matrix of size "
                f"{rows}×{columns}: raise model.width, or change finetune.trainable"
            )
        layers[path] = layer
    public = torch.Generator().manual_seed(seed)
    for path, layer in layers.items():
        weight = layer.weight.detach()
        a = torch.randn(len(weight), rank, generator=public).to(weight)
        model.set_submodule(
            path, LoraLinear(layer, a, weight.new_zeros(rank, weight.shape[1]), scale)
        )


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted layers by the name of their weight, in the order of the model."""
    return {
        f"{path}.weight": layer
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLinear)
    }


def save_adapter(model: nn.Module, directory: Path, base: Path) -> None:
    """Write A and B of each adapted layer, and `adapter.json`. base: file of the frozen weights."""
    layers = adapted_layers(model)
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors |= {
            f"{name}.{part}": getattr(layer, part).detach().cpu().contiguous()
            for part in ("A", "B")
        }
    first = next(iter(layers.values()))
    content = {"base_sha256": digest_of_file(base), "rank": first.A.shape[1], "scale": first.scale}
    save_tensors(tensors, directory / ADAPTER)
    write_json(directory / ADAPTER_CONFIG, content | {"matrices": list(layers)}, sort_keys=True)


@torch.no_grad()
def apply_adapter(model: nn.Module, directory: Path, base: Path) -> None:
    """Load adapters from a folder, and add them to the weights of `model`: W + scale·A·B.

    directory: folder that `save_adapter` wrote; base: file of the weights of `model`. Raises
    DataError if files are missing or damaged, if the adapters were trained on a different base, or
    if shapes do not match.
    """
    files = f"{directory}: {ADAPTER_CONFIG} and {ADAPTER}"
    with explained(DataError, lambda error: f"{files} cannot be read ({error}): {TUNE_AGAIN}"):
        content = read_json(directory / ADAPTER_CONFIG)
        base_sha256 = str(content["base_sha256"])
        scale = float(content["scale"])
        rank = validated(PositiveInt, content["rank"])
        matrices = [str(name) for name in content["matrices"]]
        tensors = load_tensors(directory / ADAPTER)
    if (digest := digest_of_file(base)) != base_sha256:
        raise DataError(
            f"the adapters in {directory} were trained on weights with sha256 {base_sha256[:12]}…, "
            f"but {base} has sha256 {digest[:12]}…: restore the earlier weights (`dvc checkout`), "
            f"or {TUNE_AGAIN}"
        )
    if tensors.keys() != {f"{name}.{part}" for name in matrices for part in ("A", "B")}:
        raise DataError(
            f"{directory}: {ADAPTER} does not contain exactly the matrices that {ADAPTER_CONFIG} "
            f"lists: {TUNE_AGAIN}"
        )
    with explained(
        DataError,
        lambda error: (
            f"the adapters in {directory} do not fit the model in {base.parent} ({error}): "
            f"{TUNE_AGAIN}"
        ),
        causes=(AttributeError, RuntimeError),
    ):
        for name in dict.fromkeys(matrices):
            weight = model.get_parameter(name)
            a = tensors[f"{name}.A"].to(weight).view(len(weight), rank)
            b = tensors[f"{name}.B"].to(weight).view(rank, -1)
            weight.add_(scale * (a @ b).view_as(weight))
