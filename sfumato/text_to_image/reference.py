"""A reference to a public text-to-image model, which `stage pretrain` writes instead of weights.

A reference contains the model's path, the sha256 of the model's parts, and the embedded prompts of
the classes.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import ConfigError, DataError, explained, nearest
from sfumato.settings.training import Model
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import CONFIG, LATENT_DIFFUSION, save_tensors
from sfumato.text_to_image.directory import (
    ModelDirectory,
    choose_image_size,
    part_digest,
    read_model_directory,
)
from sfumato.text_to_image.parts import LatentCodec, embed_prompts, make_scheduler

PROMPTS = "prompts.safetensors"
# Default template of the prompts. Prompts contain class names, which are public.
TEMPLATE = "An image of {article} {class}"
# Other prompts for some values of data.dataset_id: a template, or the prompt of each class
PROMPTS_OF: dict[str, str | dict[str, str]] = {
    "celeba": "An image of {article} {class} face",
    "octmnist": "An optical coherence tomography (OCT) image for retinal disease {number}",
    "camelyon": {
        "normal": "A normal lymph node image",
        "tumor": "A lymph node histopathology image",
    },
}  # Source: DP-SAPF Table 14


def class_prompts(model: Model, dataset_id: str, classes: Sequence[str]) -> list[str]:
    """Return one prompt per class.

    For each class, the first of these that exists is used: its entry in `model.prompts`, the
    template `model.prompt`, the prompts for `dataset_id` in PROMPTS_OF, and TEMPLATE. In a
    template, {class} is the class's name with spaces instead of underscores, {article} is "a" or
    "an", and {number} is the class's number, from 1. Raises ConfigError for an unknown field, a
    prompt for an unknown class, or two classes with the same prompt.
    """
    for name in model.prompts:
        if name not in classes:
            hint = nearest(name, classes, f"the classes are {', '.join(classes)}")
            raise ConfigError(f"model.prompts names {name!r}, which is not a class: {hint}")
    template = model.prompt or PROMPTS_OF.get(dataset_id, TEMPLATE)
    by_class: dict[str, str] = {}
    if isinstance(template, dict):
        by_class = template
        template = TEMPLATE
    for field in re.findall(r"\{[^{}]*\}", template):
        if field not in ("{class}", "{article}", "{number}"):
            raise ConfigError(
                f"model.prompt={template!r} has the unknown field {field}: use only {{class}}, "
                "{article} and {number}"
            )
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", template)):
        raise ConfigError(
            f"model.prompt={template!r} contains a brace without its counterpart: write a template "
            f"such as {TEMPLATE!r}"
        )
    prompts = []
    for number, name in enumerate(classes, start=1):
        words = re.sub(r"[_\s]+", " ", name).strip()
        article = "an" if re.match("[aeiou]", words, re.IGNORECASE) else "a"
        fields = {"class": words, "article": article, "number": str(number)}
        prompts.append(model.prompts.get(name) or by_class.get(name) or template.format(**fields))
    if len(classes) > 1 and (
        duplicates := [prompt for prompt in prompts if prompts.count(prompt) > 1]
    ):
        raise ConfigError(
            f"two classes share the prompt {duplicates[0]!r}: put {{class}} into model.prompt, or "
            "give them different entries in model.prompts"
        )
    return prompts


def save_reference(
    settings: Model, dataset_id: str, classes: Sequence[str], directory: Path, device: torch.device
) -> dict[str, Any]:
    """Check the model that `settings` names, embed the class prompts, and write the reference.

    The files are `config.json`, whose content is returned, and `prompts.safetensors`. Raises
    ConfigError or DataError if there is no such model, a part is missing, the model's sha256 is not
    `settings.sha256`, or the model does not accept the image size.
    """
    assert settings.directory is not None
    model = read_model_directory(settings.directory)
    image_size = choose_image_size(model, settings)
    texts = class_prompts(settings, dataset_id, classes)
    parts = {part: part_digest(model.path, part) for part in sorted(model.classes)}
    digest = digest_of(parts)
    if settings.sha256 is not None and digest != settings.sha256.lower():
        raise DataError(
            f"{model.path} is damaged, or is a different model: its sha256 is {digest}, but "
            f"model.sha256 is {settings.sha256.lower()}. Download the model again, or correct "
            "model.sha256"
        )
    make_scheduler(model)
    embeddings, mask = embed_prompts(model, texts, device)
    content = {
        "kind": LATENT_DIFFUSION,
        "directory": settings.directory,
        "sha256": digest,
        "parts": {
            part: {"class": model.classes[part], "sha256": sha256} for part, sha256 in parts.items()
        },
        "prediction": model.prediction,
        "image_size": image_size,
        "prompts": dict(zip(classes, texts, strict=True)),
    }
    tensors = {"embeddings": embeddings}
    if mask is not None:
        tensors["mask"] = mask.to(torch.uint8)
    save_tensors(tensors, directory / PROMPTS)
    write_json(directory / CONFIG, content, ensure_ascii=False)
    return content


def read_reference(directory: Path) -> dict[str, Any]:
    """Read `config.json` of a reference. Raises DataError if it cannot be used."""
    file = directory / CONFIG
    with explained(
        DataError,
        lambda error: (
            f"{file} is not a valid reference to a model ({error}): run `stage pretrain` again"
        ),
    ):
        content = read_json(file)
        _ = content["directory"], int(content["image_size"])
        _ = [(part["class"], part["sha256"]) for part in content["parts"].values()]
    return content


def referred(reference: Mapping[str, Any], *parts: str) -> ModelDirectory:
    """Return the model that a reference names, after checking the sha256 of some of its parts.

    parts: names of the parts to check; "denoiser" means the U-Net or the transformer. Raises
    DataError if a part has changed.
    """
    model = read_model_directory(reference["directory"])
    for part in parts:
        if part == "denoiser":
            part = model.denoiser
        if part_digest(model.path, part) != reference["parts"].get(part, {}).get("sha256"):
            raise DataError(
                f"{model.path / part} no longer has the bytes that `stage pretrain` read: restore "
                "the former files, or run `stage pretrain` again"
            )
    return model


def load_codec(directory: Path, device: torch.device) -> LatentCodec:
    reference = read_reference(directory)
    return LatentCodec(referred(reference, "vae"), int(reference["image_size"]), device)
