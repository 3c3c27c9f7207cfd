"""Public latent diffusion models (Stable Diffusion 1.x and 2.x, PixArt) as a `Denoiser`."""

import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sfumato.data.store import Encode
from sfumato.diffusion.denoiser import (
    TIMESTEPS,
    Denoiser,
    Sampler,
    Sampling,
    draw_noise_levels,
    draw_timesteps,
)
from sfumato.diffusion.sampler import with_guidance
from sfumato.errors import UNREADABLE, DataError, explained
from sfumato.runtime import distributed
from sfumato.runtime.compute import prefers_bfloat16
from sfumato.settings.noise_levels import NoiseLevels, TimestepMixture
from sfumato.settings.training import Model
from sfumato.storage.weights import CONFIG, load_tensors, save_tensors
from sfumato.text_to_image.directory import ModelDirectory, choose_image_size, read_model_directory
from sfumato.text_to_image.parts import (
    LONGEST_T5,
    build_denoiser,
    load_part,
    make_differentiable,
    make_scheduler,
)
from sfumato.text_to_image.reference import PROMPTS, load_codec, read_reference, referred

TRAINED = "trained.safetensors"


class Prompts(NamedTuple):
    """Embedded prompts of all classes; the last is for images without a label.

    embeddings: (classes + 1, tokens, D);
    mask: (classes + 1, tokens) bool, false for padding; or None.
    """

    embeddings: Tensor
    mask: Tensor | None


class LatentDiffusion(Denoiser):
    """A text-conditional denoiser of latents.

    Raises DataError if the prompts do not fit the network.

    network: U-Net or transformer of `model`, the only trained part;
    alphas_cumprod: (T,), ᾱ of the model's own noise schedule;
    image_size: side of images before they are encoded, in pixels;
    reference: folder with the reference to the model (see `reference.py`), or None for a network
    that `latent_outline` builds.
    """

    at_a_time = 16
    mask: Tensor | None

    def __init__(
        self,
        model: ModelDirectory,
        network: Any,
        prompts: Prompts,
        alphas_cumprod: Tensor,
        image_size: int,
        reference: Path | None = None,
    ) -> None:
        super().__init__()
        self.is_transformer = model.denoiser == "transformer"
        embedding_size = (
            network.config.caption_channels
            if self.is_transformer
            else network.config.cross_attention_dim
        )
        if isinstance(embedding_size, int) and prompts.embeddings.shape[2] != embedding_size:
            raise DataError(
                f"{model.path} contains parts of different models: its text encoder returns "
                f"{prompts.embeddings.shape[2]} numbers per token, but its {model.denoiser} "
                f"expects {embedding_size}. Download the model again"
            )
        make_differentiable(network)
        self.network = network
        self.prediction = model.prediction
        self.resolution = image_size // model.factor
        self.image_size = image_size
        self.classes = len(prompts.embeddings) - 1
        self.channels = int(network.config.in_channels)
        self.sized = bool(getattr(network, "use_additional_conditions", False))
        self.reference = reference
        self.prompts = nn.Buffer(prompts.embeddings, persistent=False)
        # A U-Net attends to every token, including padding, as it did in its training
        mask = None
        if prompts.mask is not None and self.is_transformer:
            mask = prompts.mask.bool()
        self.register_buffer("mask", mask, persistent=False)
        self.alphas_cumprod = nn.Buffer(alphas_cumprod.float(), persistent=False)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Compute the model's prediction for noisy latents.

        x: (B, c, h, w); timesteps: (B,); labels: (B,), in 0..classes. Returns (B, c, h, w).
        """
        arguments: dict[str, Any] = {}
        if self.is_transformer:
            sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
            if self.sized:
                side = x.new_full((len(x), 2), float(self.image_size))
                sizes = {"resolution": side, "aspect_ratio": torch.ones_like(side[:, :1])}
            mask = None
            if self.mask is not None:
                mask = self.mask[labels].to(x.dtype)
            arguments = {"encoder_attention_mask": mask, "added_cond_kwargs": sizes}
        context = self.prompts[labels]  # (B, tokens, D)
        output = self.network(
            x, timestep=timesteps, encoder_hidden_states=context, return_dict=False, **arguments
        )[0]
        return output[:, : self.channels]  # some models also predict a variance

    def per_image_loss(
        self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor
    ) -> Tensor:
        """Compute the mean squared error of the model's own prediction, (B,) float32.

        x_t = √ᾱ·x + √(1 − ᾱ)·ε; the target is ε, or v = √ᾱ·ε − √(1 − ᾱ)·x.

        images: latents; levels: (B,) int64, timesteps. Source: Ho et al. 2020; Salimans & Ho 2022
        for v.
        """
        alphas_cumprod = self.alphas_cumprod[levels][:, None, None, None]
        image_scale = alphas_cumprod.sqrt()
        noise_scale = (1 - alphas_cumprod).sqrt()
        target = (
            noise if self.prediction == "epsilon" else image_scale * noise - noise_scale * images
        )
        output = self(image_scale * images + noise_scale * noise, levels, labels).float()
        return (output - target).square().mean(dim=(1, 2, 3))

    def draw_levels(self, law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
        """Draw n independent timesteps, (n,) int64, on the generator's device.

        If the noise levels have a log-normal law, a level σ is drawn first. The result is then the
        smallest timestep with √((1 − ᾱ)/ᾱ) ≥ σ, or the last timestep.
        """
        steps = len(self.alphas_cumprod)
        if isinstance(law, TimestepMixture):
            return draw_timesteps(law, n, generator, steps)
        sigma = draw_noise_levels(law, n, generator)
        # Noise levels rise with the timestep
        levels = (
            ((1 - self.alphas_cumprod) / self.alphas_cumprod.clamp(min=1e-12))
            .sqrt()
            .to(sigma.device)
        )
        return torch.searchsorted(levels, sigma).clamp(max=steps - 1)

    def sampler(self, sampling: Sampling, generator: torch.Generator) -> Sampler:
        """Return a function that draws images with the model's own scheduler from `diffusers`.

        The function draws latents, decodes them, and resizes the images to `sampling.shape` or, by
        default, to the model's image size. Raises ValueError if `sampling.guide` is set.
        """
        if sampling.guide is not None:
            raise ValueError("a classifier of images cannot guide a model that draws latents")
        assert self.reference is not None
        scheduler = make_scheduler(referred(read_reference(self.reference), "scheduler"))
        codec = load_codec(self.reference, next(self.parameters()).device)
        own_shape = (codec.channels, self.image_size, self.image_size)
        shape = sampling.shape or own_shape
        half = distributed.broadcast_object(prefers_bfloat16(self))

        def draw(labels: Tensor) -> Tensor:
            latents = self.sample_latents(
                scheduler, labels, sampling.steps, sampling.guidance, generator, half
            )
            return codec.decode(latents, shape)

        return draw

    @torch.no_grad()
    def sample_latents(
        self,
        scheduler: Any,
        labels: Tensor,
        steps: int,
        guidance: float,
        generator: torch.Generator,
        autocast: bool,
    ) -> Tensor:
        """Draw one latent per label, by a scheduler of `diffusers`.

        Returns (B, c, h, w) float32 on the model's device.

        guidance: g in ε + g·(ε − ε_no label). In `diffusers`, guidance_scale is g + 1;
        generator: a CPU generator, which fixes the latents;
        autocast: run the network in bfloat16.
        """
        device = next(self.parameters()).device
        labels = labels.to(device)
        scheduler.set_timesteps(steps, device=device)
        # Noise is drawn one latent at a time, so that latent k does not depend on the batch size.
        start = torch.stack([torch.randn(self.shape, generator=generator) for _ in labels])
        x = start.to(device) * float(scheduler.init_noise_sigma)
        draws = (
            {"generator": generator}
            if "generator" in inspect.signature(scheduler.step).parameters
            else {}
        )
        for t in scheduler.timesteps:

            def predict(x: Tensor, labels: Tensor, t: Tensor = t) -> Tensor:
                return self(x, t.expand(len(x)), labels)

            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                output = with_guidance(
                    predict, scheduler.scale_model_input(x, t), labels, self.classes, guidance
                )
            x = scheduler.step(output.float(), t, x, return_dict=False, **draws)[0]
        return x

    def load_encoder(self, device: torch.device) -> Encode:
        assert self.reference is not None
        return load_codec(self.reference, device).encode

    def save(self, directory: Path, trained: Sequence[str]) -> None:
        """Write the parameters that training changed, and the reference to the model.

        trained: names of these parameters. All others can be read from the model's own files.
        """
        tensors = {name: self.get_parameter(name).detach().cpu().contiguous() for name in trained}
        save_tensors(tensors, directory / TRAINED)
        assert self.reference is not None
        for name in (CONFIG, PROMPTS):
            shutil.copyfile(self.reference / name, directory / name)


def load_latent(directory: Path) -> LatentDiffusion:
    """Load the network of a public model from a reference: its own weights, frozen, as float32."""
    reference = read_reference(directory)
    model = referred(reference, "denoiser", "scheduler")
    file = directory / PROMPTS
    with explained(
        DataError, lambda error: f"{file} cannot be read ({error}): run `stage pretrain` again"
    ):
        tensors = load_tensors(file)
        prompts = Prompts(tensors["embeddings"], tensors.get("mask"))
    network = load_part(model, model.denoiser)
    alphas_cumprod = make_scheduler(model).alphas_cumprod
    image_size = int(reference["image_size"])
    denoiser = LatentDiffusion(model, network, prompts, alphas_cumprod, image_size, directory)
    denoiser.encoder = f"{reference['parts']['vae']['sha256']} at {image_size}"
    return denoiser


def latent_outline(settings: Model, classes: int) -> LatentDiffusion:
    """Build the network of `settings.directory`, to estimate its time and memory.

    The network is on PyTorch's meta device, so it has no weights. classes: number of classes.
    """
    assert settings.directory is not None
    model = read_model_directory(settings.directory)
    image_size = choose_image_size(model, settings)
    text = model.configs["text_encoder"]
    width = int(text.get("hidden_size") or text.get("d_model", 768))
    longest = LONGEST_T5 if model.denoiser == "transformer" else 77
    tokens = int(min(model.configs["tokenizer"].get("model_max_length", 77), longest))
    with torch.device("meta"):
        network = build_denoiser(model).to("meta")
        prompts = Prompts(
            torch.empty(classes + 1, tokens, width),
            torch.ones(classes + 1, tokens, dtype=torch.bool),
        )
        return LatentDiffusion(
            model, network, prompts, torch.empty(TIMESTEPS), image_size
        ).requires_grad_(False)


def load_trained(directory: Path) -> LatentDiffusion:
    """Load the network that `LatentDiffusion.save` wrote.

    Raises DataError if files do not fit the model.
    """
    model = load_latent(directory)
    file = directory / TRAINED
    with explained(
        DataError,
        lambda error: (
            f"{file} cannot be read, or does not fit the model ({error}): run `stage finetune` "
            "again"
        ),
        causes=(*UNREADABLE, RuntimeError),
    ):
        tensors = load_tensors(file)
        model.load_state_dict(tensors, strict=False)
        if unknown := tensors.keys() - model.state_dict().keys():
            raise ValueError(f"the model has no parameter {min(unknown)}")
    return model
