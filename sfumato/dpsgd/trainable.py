"""Choose which weights DP-SGD trains, and check afterwards that no others were changed."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.lora import add_lora, save_adapter
from sfumato.errors import ConfigError, DataError, SfumatoError
from sfumato.settings.dpsgd import SALIENT, Finetune, Saliency
from sfumato.storage.files import write_json

ATTENTION = (  # matches names in our U-Net and in public text-to-image models
    r"(.*\.)?(attention|attn\d*)\."
)
QKV = ATTENTION + r"(to_)?[qkv]\.weight"
# Values of `trainable` that train adapters and leave the network's own weights unchanged
ADAPTED = ("attention-lora", "salient-lora")


def candidates(model: nn.Module) -> list[str]:
    """List the candidates for a ranking: the names of all query, key and value matrices.

    The names are in the order of the model. Raises ConfigError if the model has no such matrix.
    """
    matrices = [name for name, _ in model.named_parameters() if re.fullmatch(QKV, name)]
    if not matrices:
        raise ConfigError(
            "this model has no attention layers to rank: add attention layers (model.attention)"
        )
    return matrices


def how_many(ratio: float, total: int) -> int:
    """Return `ratio` of `total`, rounded half up, at least 1."""
    return max(1, math.floor(ratio * total + 0.5))


def choose_trainable(
    model: Denoiser, settings: Finetune, ranking: Sequence[str] | None, seed: int
) -> list[str]:
    """Make exactly the chosen parameters trainable, in place.

    Returns their names in the order of the model. `settings.trainable` is one of:
    - all: every parameter.
    - attention: every parameter of the attention layers (DP-LDM, without its conditioning
      embedder).
    - attention-lora: adapters on all query, key and value matrices (DP-LoRA).
    - salient: the matrices at the top of `ranking`, without adapters. Their share of all matrices
      in `ranking` is `settings.ratio`.
    - salient-lora: adapters on the same matrices as `salient`; the rest is frozen (DP-SAPF).

    ranking: names of all `candidates`, the most salient first; None if no ranking is needed.

    Raises ConfigError if a needed ranking is missing, there is nothing to train, or the adapter
    rank is too high; DataError if the ranking names parameters that the model does not have.
    """
    kind = settings.trainable
    all_names = [name for name, _ in model.named_parameters()]
    if kind in SALIENT:
        if ranking is None:
            raise ConfigError(
                f"finetune.trainable={kind} needs a ranking of the weights: add saliency to `run`"
            )
        selected = ranking[: how_many(settings.ratio, len(ranking))]
        if unknown_names := sorted({*ranking} - {*all_names}):
            raise DataError(
                f"the ranking contains {unknown_names[0]}, which is not in this model: run `stage "
                "saliency` again"
            )
        names = [name for name in all_names if name in selected]
    elif kind == "all":
        names = all_names
    elif kind == "attention":
        names = [name for name in all_names if re.match(ATTENTION, name)]
    else:
        names = candidates(model)
    model.requires_grad_(False)
    if kind in ADAPTED:
        add_lora(model, names, settings.rank, seed)
    else:
        for name in names:
            model.get_parameter(name).requires_grad_(True)
    trained_names = [name for name, value in model.named_parameters() if value.requires_grad]
    if not trained_names:
        raise ConfigError(
            f"finetune.trainable={kind} selects no weights of this model. Add attention layers "
            "(model.attention), or set finetune.trainable: all"
        )
    return trained_names


def trained_parameters(
    model: Denoiser, settings: Finetune | Saliency, seed: int
) -> dict[str, Tensor]:
    """Prepare `model` in place as a stage with `settings` does, and return the parameters that the
    stage trains.

    If the stage needs a ranking, the list of `candidates`, in the order of the model, is used
    instead of a ranking.
    """
    if isinstance(settings, Saliency):
        names = candidates(model)
    else:
        ranking = None
        if settings.trainable in SALIENT:
            ranking = candidates(model)
        names = choose_trainable(model, settings, ranking, seed)
    return {name: model.get_parameter(name) for name in names}


def check_trained(
    initial_state: Mapping[str, Tensor], model: nn.Module, names: Sequence[str]
) -> None:
    """Check that training changed every named parameter, and no bit of any other tensor.

    initial_state: copy of `model.state_dict()` from just before training. Raises SfumatoError if
    the check fails. A failure is a bug: a run must not report weights as trained if they were not.
    """
    internal = "internal error, please report it (nothing was written)"
    final_state = model.state_dict()
    if initial_state.keys() != final_state.keys() or not set(names) <= final_state.keys():
        missing_names = (initial_state.keys() ^ final_state.keys()) | (
            set(names) - final_state.keys()
        )
        raise SfumatoError(
            f"{internal}: {min(missing_names)} is missing from the model before training, after "
            "training, or both"
        )
    unchanged_names = {
        name
        for name, value in final_state.items()
        if torch.equal(value.to(initial_state[name].device), initial_state[name])
    }
    if idle := [name for name in names if name in unchanged_names]:
        raise SfumatoError(
            f"{internal}: trained parameters did not change, such as {idle[0]} ({len(idle)} in all)"
        )
    if changed_names := sorted(final_state.keys() - unchanged_names - set(names)):
        raise SfumatoError(
            f"{internal}: frozen parameters changed, such as {changed_names[0]} "
            f"({len(changed_names)} in all)"
        )


def save_trained(
    model: Denoiser, kind: str, names: Sequence[str], directory: Path, base: Path
) -> None:
    """Write the trained weights, as adapters or as a whole network, and the list of their names.

    kind: value of `finetune.trainable`;
    base: file of the weights before training.
    """
    count = sum(model.get_parameter(name).numel() for name in names)
    write_json(
        directory / "trainable.json", {"set": kind, "trained": list(names), "parameters": count}
    )
    if kind in ADAPTED:
        save_adapter(model, directory, base)
    else:
        model.save(directory, names)
