"""A reference: what `stage pretrain` writes in place of weights where the network is a public text-to-image model.

It holds the path of the model, the sha256 of its parts, the prompts of the classes and their embeddings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sfumato.config import Model
from sfumato.diffusion.noise_levels import TIMESTEPS
from sfumato.errors import DataError
from sfumato.public_model.directory import (
    ModelDirectory,
    choose_image_size,
    digests,
    part_digest,
    read_model_directory,
    whole_digest,
)
from sfumato.public_model.network import CONFIG, PROMPTS, TRAINED, LatentDiffusion, Origin
from sfumato.public_model.parts import LatentCodec, build_network, embed_prompts, load_part, make_scheduler
from sfumato.public_model.prompts import class_prompts

KIND = "latent-diffusion"


def is_latent(directory: Path) -> bool:
    """Does the artifact refer to a public text-to-image model? Otherwise it holds a network of our own."""
    try:
        return json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def save_reference(
    settings: Model, dataset_id: str, classes: Sequence[str], directory: Path, device: torch.device
) -> dict[str, Any]:
    """Check the model that `settings` names, encode the class prompts, write `config.json` and `prompts.safetensors`.

    It copies no weights. Returns the content of `config.json`. Raises ConfigError or DataError: no such model, a
    missing part, another sha256, an image size that the model cannot take.
    """
    assert settings.directory is not None
    model = read_model_directory(settings.directory)
    image_size = choose_image_size(model, settings)
    texts = class_prompts(settings, dataset_id, classes)
    parts = digests(model)
    check_digest(model, whole_digest(parts), settings.sha256)
    make_scheduler(model)
    embeddings, mask = embed_prompts(model, texts, device)
    content = {
        "kind": KIND,
        "directory": settings.directory,
        "sha256": whole_digest(parts),
        "parts": {part: {"class": model.classes[part], "sha256": digest} for part, digest in parts.items()},
        "prediction": model.prediction,
        "image_size": image_size,
        "prompts": dict(zip(classes, texts, strict=True)),
    }
    save_file(
        {"embeddings": embeddings} | ({} if mask is None else {"mask": mask.to(torch.uint8)}), directory / PROMPTS
    )
    (directory / CONFIG).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return content


def check_digest(model: ModelDirectory, found: str, expected: str | None) -> None:
    if expected is not None and found != expected.lower():
        raise DataError(
            f"{model.path} has sha256 {found}, but model.sha256 is {expected.lower()}: "
            "this is another model, or a damaged one. Download it again, or correct model.sha256"
        )


def read_reference(directory: Path) -> dict[str, Any]:
    """`config.json` of a reference. Raises DataError where it cannot be used."""
    file = directory / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["kind"] != KIND:
            raise ValueError(f"it is of kind {content['kind']}")
        _ = (
            content["directory"],
            int(content["image_size"]),
            {part: (value["class"], value["sha256"]) for part, value in content["parts"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} refers to no public model ({error}): run `stage pretrain` again") from error
    return content


def referred(reference: Mapping[str, Any], *parts: str) -> ModelDirectory:
    """The model that a reference names, after a check of the bytes of `parts`.

    In `parts`, "denoiser" stands for U-Net or transformer.
    """
    model = read_model_directory(reference["directory"])
    for part in parts:
        part = model.denoiser if part == "denoiser" else part
        if part_digest(model.path, part) != reference["parts"].get(part, {}).get("sha256"):
            raise DataError(
                f"{model.path / part} no longer has the bytes that `stage pretrain` saw: put that model back, "
                "or run `stage pretrain` on this one"
            )
    return model


def load_latent(directory: Path) -> LatentDiffusion:
    """The network of a reference with the model's own weights, float32, frozen."""
    reference = read_reference(directory)
    model = referred(reference, "denoiser", "scheduler")
    try:
        tensors = load_file(directory / PROMPTS)
        embeddings, mask = tensors["embeddings"], tensors.get("mask")
    except (OSError, KeyError, SafetensorError) as error:
        raise DataError(f"{directory / PROMPTS} cannot be read ({error}): run `stage pretrain` again") from error
    image_size = int(reference["image_size"])
    origin = Origin(
        directory,
        f"{reference['parts']['vae']['sha256']} at {image_size}",
        functools.partial(load_codec, directory),
        functools.partial(load_scheduler, directory),
    )
    network, alphas_cumprod = load_part(model, model.denoiser), make_scheduler(model).alphas_cumprod
    return assemble(
        model, network, image_size, embeddings, None if mask is None else mask.bool(), alphas_cumprod, origin
    )


def assemble(
    model: ModelDirectory,
    network: Any,
    image_size: int,
    embeddings: Tensor,
    mask: Tensor | None,
    alphas_cumprod: Tensor,
    origin: Origin | None = None,
) -> LatentDiffusion:
    expected = (
        network.config.caption_channels if model.denoiser == "transformer" else network.config.cross_attention_dim
    )
    if isinstance(expected, int) and embeddings.shape[2] != expected:
        raise DataError(
            f"{model.path}: its text encoder gives {embeddings.shape[2]} numbers a token, "
            f"its {model.denoiser} takes {expected}: the parts are of different models. Download the model again"
        )
    if model.denoiser == "unet":
        mask = None  # these models see every token, also padding, as in their training
    side = image_size // model.factor
    return LatentDiffusion(
        network, embeddings, mask, alphas_cumprod.float(), model.prediction, side, image_size, origin
    )


def outline(settings: Model, classes: int) -> LatentDiffusion:
    """The network that `settings` names, on the meta device: shapes without weights, for estimates."""
    assert settings.directory is not None
    model = read_model_directory(settings.directory)
    image_size = choose_image_size(model, settings)
    text = model.configs["text_encoder"]
    width = int(text.get("hidden_size") or text.get("d_model") or text.get("text_config", {}).get("hidden_size", 768))
    tokens = int(
        min(model.configs["tokenizer"].get("model_max_length", 77), 120 if model.denoiser == "transformer" else 77)
    )
    with torch.device("meta"):
        network = build_network(model).to("meta")
        mask = torch.ones(classes + 1, tokens, dtype=torch.bool) if model.denoiser == "transformer" else None
        return assemble(
            model, network, image_size, torch.empty(classes + 1, tokens, width), mask, torch.empty(TIMESTEPS)
        ).requires_grad_(False)


def load_codec(directory: Path, device: torch.device) -> LatentCodec:
    """The frozen VAE of a reference."""
    reference = read_reference(directory)
    return LatentCodec(referred(reference, "vae"), int(reference["image_size"]), device)


def load_scheduler(directory: Path) -> Any:
    return make_scheduler(referred(read_reference(directory), "scheduler"))


@torch.no_grad()
def load_trained(directory: Path) -> LatentDiffusion:
    """The network that `LatentDiffusion.save` wrote. Raises DataError where the files do not fit the model."""
    model = load_latent(directory)
    try:
        tensors = load_file(directory / TRAINED)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{directory / TRAINED} cannot be read ({error}): run `stage finetune` again") from error
    named = dict(model.named_parameters())
    for name, value in tensors.items():
        if name not in named or named[name].shape != value.shape:
            raise DataError(
                f"{directory / TRAINED} holds {name}, which does not fit the model: run `stage finetune` again"
            )
        named[name].copy_(value)
    return model
