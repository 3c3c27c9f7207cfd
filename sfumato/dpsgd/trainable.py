"""Which weights DP-SGD trains: the candidates, the choice, and the check afterwards that only those were trained.

Everything here works on names and on public or released numbers, so it charges nothing.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.lora import add_lora, merge, save_adapter
from sfumato.errors import ConfigError, DataError, SfumatoError
from sfumato.settings.dpsgd import SALIENT, Finetune
from sfumato.storage.files import write_json

ATTENTION = r"(.*\.)?(attention|attn\d*)\."  # the names of our U-Net and of public text-to-image models
PATTERNS = {"qkv": ATTENTION + r"(to_)?[qkv]\.weight", "qkvo": ATTENTION + r"((to_)?[qkv]|out|to_out\.0)\.weight"}
# The sets whose result is adapters on an unchanged base
ADAPTED = ("attention-lora", "salient-lora", "random-lora", "synflow-lora")
Ranking = Sequence[Sequence[str]]  # the parameters of each candidate, the most salient first


def candidates(model: nn.Module, pattern: str = "qkv") -> dict[str, list[str]]:
    """The candidates for training: candidate name -> the names of its parameters, in the order of the model.

    pattern: "qkv", the query, key and value matrices of every attention; "qkvo", its output matrix too; "matrices",
    every weight of a linear layer or a convolution; "layers", all parameters of a residual block, of an attention, or
    of a module outside both. A matrix is named after its weight, without `.weight`.
    Raises ConfigError where nothing matches.
    """
    found: dict[str, list[str]] = {}
    if pattern == "layers":
        for name, _ in model.named_parameters():
            found.setdefault(layer_name(name), []).append(name)
    elif pattern == "matrices":
        found = {
            path: [f"{path}.weight"]
            for path, layer in model.named_modules()
            if path and isinstance(layer, (nn.Linear, nn.Conv2d))
        }
    elif pattern in PATTERNS:
        names = [name for name, _ in model.named_parameters() if re.fullmatch(PATTERNS[pattern], name)]
        found = {name.removesuffix(".weight"): [name] for name in names}
    else:
        raise ConfigError(f"saliency.candidates={pattern!r}: expected qkv, qkvo, matrices or layers")
    if not found:
        raise ConfigError(
            f"candidates {pattern!r}: nothing in this model matches. Give it attention (model.attention), "
            "or choose matrices or layers"
        )
    return found


def layer_name(parameter: str) -> str:
    """The block or attention of a parameter, else its topmost module: `down.0.block.conv1.bias` -> `down.0.block`."""
    inner = re.match(r"(.*\.)?(block|attention|attn\d*|resnets\.\d+)(?=\.)", parameter)
    outer = re.match(r"(network\.)?[^.]+", parameter)
    assert outer is not None
    return inner[0] if inner else outer[0]


def how_many(ratio: float, total: int) -> int:
    """`ratio` of `total`, rounded half up, at least 1."""
    return max(1, math.floor(ratio * total + 0.5))


def choose_trainable(model: Denoiser, settings: Finetune, ranking: Ranking | None, seed: int) -> list[str]:
    """Make exactly the chosen parameters trainable, in place, and return their names, in the order of the model.

    ranking: the parameters of each candidate of `stage saliency`, the most salient first; None without it. The first
    `settings.ratio` of them are selected.
    `settings.trainable` is one of:
    - all: every parameter.
    - attention: every parameter of the attention layers, with norms and biases (DP-LDM, without its conditioning
      embedder).
    - attention-lora: adapters on all query, key and value matrices (DP-LoRA).
    - salient: the selected parameters in full.
    - salient-lora: adapters on the selected matrices (DP-SAPF). Of a selected layer, its linear layers and convolutions
      get adapters; its biases, norms and embeddings stay frozen.
    - random-lora: adapters on `settings.ratio` of the query, key and value matrices, drawn with the public `seed`.
    - synflow-lora: adapters on the `settings.ratio` of them with the largest SynFlow score, which needs no data.
    - noisy: as salient-lora, with random values in the candidates that were not selected (DP-SAPF Figure 4).
    `settings.lora` describes the adapters; `seed` draws them. Raises ConfigError: a salient set without a saliency
    release, nothing to train, a rank above a matrix's; DataError: a release that names parameters not in this model.
    """
    kind = settings.trainable
    everything = [name for name, _ in model.named_parameters()]
    chosen: list[str]
    if kind in SALIENT:
        if ranking is None:
            raise ConfigError(
                f"finetune.trainable={kind} needs the choice that saliency makes: "
                "switch saliency on (add saliency to run)"
            )
        selected = {name for names in ranking[: how_many(settings.ratio, len(ranking))] for name in names}
        others = {name for names in ranking for name in names} - selected
        if missing := sorted((selected | others) - set(everything)):
            raise DataError(
                f"the saliency artifact names {missing[0]}, which is not in this model: "
                "run `stage saliency` on the same pretrain artifact"
            )
        chosen = [name for name in everything if name in selected]
    elif kind == "all":
        chosen = everything
    elif kind == "attention":
        chosen = [name for name in everything if re.match(ATTENTION, name)]
    else:
        chosen = matrices_to_adapt(model, settings, seed)
    model.requires_grad_(False)
    if kind == "noisy":
        randomise(model, [name for name in everything if name in others], seed)
    if kind in ADAPTED or kind == "noisy":
        if not (adaptable := [name for name in chosen if name in set(flat(candidates(model, "matrices")))]):
            raise ConfigError(
                f"finetune.trainable={kind}: the selection holds no matrix that an adapter can be put on. "
                "Use trainable: salient"
            )
        add_lora(model, adaptable, settings.lora, seed)
    else:
        for name in chosen:
            model.get_parameter(name).requires_grad_(True)
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    if not trained:
        raise ConfigError(
            f"finetune.trainable={kind}: this model has nothing to train. Give it attention (model.attention), "
            "or use trainable: all"
        )
    return trained


def flat(groups: Mapping[str, Sequence[str]] | Ranking) -> list[str]:
    """The parameters of all candidates."""
    return [name for names in (groups.values() if isinstance(groups, Mapping) else groups) for name in names]


def matrices_to_adapt(model: Denoiser, settings: Finetune, seed: int) -> list[str]:
    """The query, key and value matrices chosen without data: all, random ones, or the largest by SynFlow."""
    names = flat(candidates(model))
    count = how_many(settings.ratio, len(names))
    if settings.trainable == "random-lora":
        chosen = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))[:count].tolist()
        return [names[i] for i in sorted(chosen)]
    if settings.trainable == "synflow-lora":
        scores = synflow_scores(model, names)
        # a stable sort: equal scores stay in the order of the model
        kept = set(sorted(names, key=lambda name: -scores[name])[:count])
        return [name for name in names if name in kept]
    return names


def synflow_scores(model: Denoiser, names: Sequence[str]) -> dict[str, float]:
    """Σ |∂R/∂W ⊙ W| of each named matrix. R is the summed output for an all-ones image without label.

    Every parameter enters as its absolute value; normalisations stay as they are. It uses no data, so it charges
    nothing. In float64 on the CPU, so that a run resumed elsewhere makes the same choice.
    Source: Tanaka et al. 2020 (SynFlow), one round.
    """
    linear = copy.deepcopy(model).cpu().double()
    wanted = set(names)
    weights = {name: value.detach().abs().requires_grad_(name in wanted) for name, value in linear.named_parameters()}
    ones = torch.ones(1, model.channels, model.resolution, model.resolution, dtype=torch.float64)
    arguments = ones, torch.zeros(1, dtype=torch.float64), torch.tensor([model.classes])
    output = functional_call(linear, weights, arguments)
    gradients = torch.autograd.grad(output.sum(), [weights[name] for name in names])
    return {
        name: float((gradient * weights[name]).detach().abs().sum())
        for name, gradient in zip(names, gradients, strict=True)
    }


@torch.no_grad()
def randomise(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Fill the named matrices with values uniform in ±1/√inputs, as in a new layer; biases and norms stay."""
    public = torch.Generator().manual_seed(seed)
    for name in names:
        value = model.get_parameter(name)
        if value.ndim >= 2:
            value.copy_((2 * torch.rand(value.shape, generator=public) - 1) / math.sqrt(value[0].numel()))


def check_trained(before: Mapping[str, Tensor], model: nn.Module, names: Sequence[str]) -> None:
    """Check that training changed every named parameter and left every other bit as it was.

    before: a copy of `model.state_dict()` from just before training. Raises SfumatoError, an internal error: a run must
    not report a set of weights other than the one that it trained (METHODS §10, 18).
    """
    after = model.state_dict()
    if before.keys() != after.keys() or not set(names) <= after.keys():
        odd = (before.keys() ^ after.keys()) | (set(names) - after.keys())
        raise internal(f"{min(odd)} is not in the model both before and after training")
    same = {name for name, value in after.items() if torch.equal(value.to(before[name].device), before[name])}
    if idle := [name for name in names if name in same]:
        raise internal(f"{idle[0]} was to be trained and did not change ({len(idle)} such)")
    if moved := sorted(after.keys() - same - set(names)):
        raise internal(f"{moved[0]} was frozen and changed ({len(moved)} such)")


def internal(what: str) -> SfumatoError:
    return SfumatoError(f"internal error: {what}. Nothing is written: please report it")


def save_trained(
    model: Denoiser, kind: str, names: Sequence[str], ranking: Ranking | None, directory: Path, base: Path
) -> None:
    """Write what was trained: adapters on an untouched base, or the network's own weights; and the list of names.

    kind: `finetune.trainable`; base: the weights file of the network before training. The adapters of the set "noisy"
    are merged: their base was randomised and is not on disk.
    """
    count = sum(model.get_parameter(name).numel() for name in names)
    content = {"set": kind, "trained": list(names), "parameters": count}
    write_json(directory / "trainable.json", content)
    if kind in ADAPTED:
        return save_adapter(model, directory, base)
    merge(model)
    model.save(directory, flat(ranking) if ranking and kind == "noisy" else names)
