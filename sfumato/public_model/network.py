"""Public text-to-image latent diffusion models (Stable Diffusion 1.x and 2.x, PixArt) as the network that the queries differentiate.

What is trained lives in `network`; the text encoder has spoken once, when the reference was written, and images come as latents. A
*reference* is what `stage pretrain` writes in place of weights: where the model is, the sha256 of its parts, the prompts and their embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sfumato.config import LogNormal, Model, TimestepMixture
from sfumato.diffusion.objective import TIMESTEPS
from sfumato.diffusion.unet import UNet
from sfumato.errors import DataError
from sfumato.public_model.directory import (
    ModelDirectory,
    choose_image_size,
    digests,
    part_digest,
    read_model_directory,
    whole_digest,
)
from sfumato.public_model.parts import (
    LatentCodec,
    build_network,
    embed_prompts,
    load_part,
    make_differentiable,
    make_scheduler,
)
from sfumato.public_model.prompts import class_prompts

KIND = "latent-diffusion"
CONFIG, PROMPTS, TRAINED = "config.json", "prompts.safetensors", "trained.safetensors"
Network = Callable[..., Tensor]


class LatentDiffusion(nn.Module):
    """A text-conditional denoiser over latents, which looks like our own network to whoever differentiates it.

    network: U-Net or transformer of `diffusers`; prompts: (classes + 1, tokens, D), the last of no label; mask: (classes + 1, tokens)
    bool, or None; kept: (T,) ᾱ of the model's own schedule; prediction: "epsilon" or "v_prediction"; resolution: side of the latents.
    """

    kept: Tensor
    prompts: Tensor
    mask: Tensor | None

    def __init__(
        self,
        network: Any,
        prompts: Tensor,
        mask: Tensor | None,
        kept: Tensor,
        prediction: str,
        resolution: int,
        image_size: int,
    ) -> None:
        super().__init__()
        make_differentiable(network)
        self.network = network
        self.prediction, self.resolution, self.image_size = prediction, resolution, image_size
        self.classes, self.channels = len(prompts) - 1, int(network.config.in_channels)
        self.is_transformer = hasattr(network, "transformer_blocks")
        self.sized = bool(getattr(network, "use_additional_conditions", False))
        for name, value in (("prompts", prompts), ("mask", mask), ("kept", kept)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """x: (B, c, h, w) noisy latents; timesteps: (B,); labels: (B,) int64 in 0..classes. Returns (B, c, h, w), what the model predicts."""
        context = self.prompts[labels]  # (B, tokens, D)
        if not self.is_transformer:
            output = self.network(x, timesteps, encoder_hidden_states=context, return_dict=False)[0]
        else:
            sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
            if self.sized:
                side = x.new_full((len(x), 2), float(self.image_size))
                sizes = {"resolution": side, "aspect_ratio": torch.ones_like(side[:, :1])}
            mask = None if self.mask is None else self.mask[labels].to(x.dtype)
            output = self.network(
                x,
                encoder_hidden_states=context,
                timestep=timesteps,
                encoder_attention_mask=mask,
                added_cond_kwargs=sizes,
                return_dict=False,
            )[0]
        return output[:, : self.channels]  # some predict a variance too, which nothing here uses

    def per_image_loss(
        self, network: Network, latents: Tensor, labels: Tensor, timesteps: Tensor, noise: Tensor
    ) -> Tensor:
        """Mean squared error of the model's own prediction. latents, noise: (B, c, h, w); labels, timesteps: (B,) int64. Returns (B,) float32.

        x_t = √ᾱ·x + √(1 − ᾱ)·ε; the target is ε, or v = √ᾱ·ε − √(1 − ᾱ)·x. Source: Ho et al. 2020; Salimans & Ho 2022 for v.
        """
        kept = self.kept[timesteps][:, None, None, None]
        signal, loud = kept.sqrt(), (1 - kept).sqrt()
        target = noise if self.prediction == "epsilon" else signal * noise - loud * latents
        output = network(signal * latents + loud * noise, timesteps, labels).float()
        return (output - target).square().mean(dim=(1, 2, 3))

    def draw_levels(self, law: LogNormal | TimestepMixture, n: int, generator: torch.Generator) -> Tensor:
        """n independent timesteps of the law, (n,) int64, on the generator's device.

        Timesteps: as the mixture says, its bounds being of 1000 steps and stretched to the model's own number. Log-normal: the
        timestep whose σ = √((1 − ᾱ)/ᾱ) comes next above the σ drawn.
        """
        device, steps = generator.device, len(self.kept)
        if n == 0:
            return torch.empty(0, dtype=torch.int64, device=device)
        if isinstance(law, LogNormal):
            sigma = (law.mean + law.std * torch.randn(n, generator=generator, device=device)).exp()
            levels = ((1 - self.kept) / self.kept.clamp(min=1e-12)).sqrt().to(device)  # rising
            return torch.searchsorted(levels, sigma).clamp(max=steps - 1)
        bounds = torch.tensor(law.bounds, device=device) * (steps / TIMESTEPS)
        part = torch.multinomial(torch.tensor(law.weights, device=device), n, replacement=True, generator=generator)
        uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
        return (bounds[part] + uniform * (bounds[part + 1] - bounds[part])).floor().long().clamp(max=steps - 1)


Denoiser = UNet | LatentDiffusion


# --- references -------------------------------------------------------------------------------------------------------------------


def is_latent(directory: Path) -> bool:
    """Does the artifact refer to a public text-to-image model, rather than hold a network of our own?"""
    try:
        return json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def save_reference(
    settings: Model, dataset_id: str, classes: Sequence[str], directory: Path, device: torch.device
) -> dict[str, Any]:
    """Check the model that `settings` names, encode the class prompts, write `config.json` and `prompts.safetensors`; returns the former's content.

    No weights are copied. Raises ConfigError or DataError: no such model, a part missing, another sha256, an image size it cannot take.
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
            f"{model.path} has sha256 {found}, but model.sha256 is {expected.lower()}: this is another model, or a damaged one. Download it again, or mend model.sha256"
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
    """The model that a reference names, the bytes of the named parts verified; "denoiser" stands for U-Net or transformer."""
    model = read_model_directory(reference["directory"])
    for part in parts:
        part = model.denoiser if part == "denoiser" else part
        if part_digest(model.path, part) != reference["parts"].get(part, {}).get("sha256"):
            raise DataError(
                f"{model.path / part} no longer has the bytes that `stage pretrain` saw: put that model back, or run `stage pretrain` on this one"
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
    network = load_part(model, model.denoiser)
    return assemble(
        model,
        network,
        int(reference["image_size"]),
        embeddings,
        None if mask is None else mask.bool(),
        make_scheduler(model).alphas_cumprod,
    )


def assemble(
    model: ModelDirectory, network: Any, image_size: int, embeddings: Tensor, mask: Tensor | None, kept: Tensor
) -> LatentDiffusion:
    expected = (
        network.config.caption_channels if model.denoiser == "transformer" else network.config.cross_attention_dim
    )
    if isinstance(expected, int) and embeddings.shape[2] != expected:
        raise DataError(
            f"{model.path}: its text encoder gives {embeddings.shape[2]} numbers a token, its {model.denoiser} takes {expected}: the parts are of different models"
        )
    if model.denoiser == "unet":
        mask = None  # these see every token, padding included: so they were trained
    return LatentDiffusion(
        network, embeddings, mask, kept.float(), model.prediction, image_size // model.factor, image_size
    )


def outline(settings: Model, classes: int) -> LatentDiffusion:
    """The network that `settings` names on the meta device: shapes and no weights, for estimates."""
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


# --- weights of its own -----------------------------------------------------------------------------------------------------------


def save_trained(model: LatentDiffusion, names: Sequence[str], directory: Path, pretrain: Path) -> None:
    """Write the named parameters as `trained.safetensors`, and the reference that they belong to. What differs from it elsewhere is lost."""
    tensors = {name: model.get_parameter(name).detach().cpu().contiguous() for name in names}
    save_file(tensors, directory / TRAINED)
    for name in (CONFIG, PROMPTS):
        (directory / name).write_bytes((pretrain / name).read_bytes())


@torch.no_grad()
def load_trained(directory: Path) -> LatentDiffusion:
    """The network that `save_trained` wrote. Raises DataError where the files do not fit the model."""
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
