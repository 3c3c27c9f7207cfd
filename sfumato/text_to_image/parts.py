"""Build the parts of a public text-to-image model.

Only this module imports `diffusers` and `transformers`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.errors import DataError, explained
from sfumato.text_to_image.directory import (
    AGAIN,
    WEIGHTS_OF,
    ModelDirectory,
    first_line,
    require_library,
    weights_of,
)

# Maximum number of pixels to decode together, by device. At least one image is decoded.
# On a GPU, decoding this many pixels takes 3 GiB of memory.
DECODED = {"cpu": 1, "cuda": 2**20}
# Maximum number of tokens per prompt for T5. Prompts are far shorter, and padding takes time.
LONGEST_T5 = 120


def class_named(name: str) -> Any:
    """Return a class of `diffusers` or `transformers`, with progress bars and warnings off."""
    require_library()
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    kind = getattr(diffusers, name, None) or getattr(transformers, name, None)
    if kind is None:
        raise DataError(
            f"the installed diffusers and transformers have no {name}, which the model requires: "
            "update both packages"
        )
    return kind


def load_part(model: ModelDirectory, part: str) -> Any:
    """Load a part of a model, as frozen float32 weights in evaluation mode.

    Raises DataError if the part's files are damaged or do not fit its class.
    """
    kind = class_named(model.classes[part])
    options: dict[str, Any] = {"local_files_only": True}
    if part in WEIGHTS_OF:
        variant = weights_of(model.path, part)[1].removeprefix(".") or None
        options |= {"use_safetensors": True, "torch_dtype": torch.float32, "variant": variant}
    message = f"{model.path / part} cannot be loaded as {model.classes[part]}"
    # All exceptions are caught, because the type depends on what is wrong with the files.
    with explained(
        DataError, lambda error: f"{message} ({first_line(error)}): {AGAIN}", causes=(Exception,)
    ):
        loaded = kind.from_pretrained(str(model.path / part), **options)
    if isinstance(loaded, nn.Module):
        if missing_weights := [
            name for name, value in loaded.named_parameters() if value.device.type == "meta"
        ]:
            raise DataError(f"{model.path / part} lacks the weight {missing_weights[0]}: {AGAIN}")
        loaded.eval().requires_grad_(False)
    return loaded


class PlainAttention:
    """Exact attention in plain operations, which works under `vmap(grad)`.

    It has no in-place updates, which `vmap` does not support. If no gradient is needed, the fused
    kernel is used.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Return the attended tokens, (B, n, D). hidden_states has the same shape.

        encoder_hidden_states: (B, m, E), or None for self-attention; attention_mask: (B, 1, m),
        added to the scores.
        """
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = (
            # (B, heads, n or m, D/heads)
            project(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for project, tokens in (
                (attn.to_q, hidden_states),
                (attn.to_k, context),
                (attn.to_v, context),
            )
        )
        bias = None if attention_mask is None else attention_mask[:, None]  # (B, 1, 1, m)
        if torch.is_grad_enabled():
            scores = q @ k.transpose(-2, -1) * attn.scale
            if bias is not None:
                scores = scores + bias
            weights = scores.softmax(dim=-1)
            output = weights.to(v.dtype) @ v
        else:
            if bias is not None:
                bias = bias.to(q.dtype)
            output = F.scaled_dot_product_attention(q, k, v, bias, scale=attn.scale)
        return (
            attn.to_out[1](attn.to_out[0](output.transpose(1, 2).flatten(2)))
            / attn.rescale_output_factor
        )


class PartNorm(nn.GroupNorm):
    """`nn.GroupNorm`, computed by `F.layer_norm` over the values of each group. The result is the
    same, apart from rounding.

    Under vmap the backward pass of `F.group_norm` splits into many small operations. The backward
    pass of `F.layer_norm` stays one operation.
    """

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(x.shape[0], self.num_groups, -1)
        normed = F.layer_norm(groups, groups.shape[-1:], eps=self.eps).reshape(x.shape)
        shape = (-1, *[1] * (x.ndim - 2))
        return torch.addcmul(self.bias.view(shape), normed, self.weight.view(shape))


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in float32 or wider, because mixed precision fails under vmap on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class SiLU(torch.autograd.Function):
    """x·sigmoid(x) with its backward pass in one kernel. Second derivatives raise an error.

    Under `torch.func.grad`, the built-in backward pass goes five times over temporary tensors of
    the size of x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(gradient, *ctx.saved_tensors)


class CheapSiLU(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return SiLU.apply(x)


def build_denoiser(model: ModelDirectory) -> nn.Module:
    """Build the U-Net or the transformer with untrained weights, on the current device."""
    kind = class_named(model.classes[model.denoiser])
    message = f"{model.path / model.denoiser}: config.json does not describe a {kind.__name__}"
    with explained(DataError, lambda error: f"{message} ({error}): {AGAIN}", causes=(Exception,)):
        return kind.from_config(model.configs[model.denoiser])


def make_differentiable(network: Any) -> None:
    """Change the network in place so that it works under `vmap(grad)`.

    The weights, their names, and the outputs stay the same. Raises DataError if the network has an
    attention layer for which this is impossible.
    """
    # Unsupported attributes of attention layers
    unsupported = (
        "group_norm",
        "spatial_norm",
        "norm_q",
        "norm_k",
        "norm_cross",
        "add_k_proj",
        "residual_connection",
    )
    # Classes to replace, and replacements with the same weights but a different forward pass
    kinds: dict[type, type] = {nn.GroupNorm: PartNorm, nn.LayerNorm: LayerNorm, nn.SiLU: CheapSiLU}
    for path, module in network.named_modules():
        attributes = [name for name in unsupported if getattr(module, name, None)]
        if attributes and hasattr(module, "to_q") and hasattr(module, "processor"):
            raise DataError(
                f"the attention layer {path} has {attributes[0]}, which is not supported: use "
                "Stable Diffusion 1.x, 2.x or PixArt"
            )
        if getattr(module, "affine", True):
            module.__class__ = kinds.get(type(module), type(module))
    network.set_attn_processor(PlainAttention())
    network.eval()


@torch.no_grad()
def embed_prompts(
    model: ModelDirectory, prompts: Sequence[str], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Embed the prompts, followed by the empty prompt.

    Returns, on the CPU, embeddings, (len(prompts) + 1, tokens, D) float32, and masks,
    (len(prompts) + 1, tokens) bool, which are false for padding. For a U-Net, the masks are None,
    because it does not need them.
    """
    tokenizer = load_part(model, "tokenizer")
    encoder = load_part(model, "text_encoder").to(device)
    masked = model.denoiser == "transformer"
    length = min(int(tokenizer.model_max_length), LONGEST_T5 if masked else 10**6)
    rows: list[Tensor] = []
    masks: list[Tensor] = []
    for prompt in [*prompts, ""]:
        text = prompt.lower().strip() if masked else prompt
        if len(tokenizer(text).input_ids) > length:
            raise DataError(
                f"the prompt {prompt[:60]!r}… has more than {length} tokens, the limit of this "
                "model: shorten the prompt in model.prompt or model.prompts"
            )
        tokens = tokenizer(
            text, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        attends = masked or getattr(encoder.config, "use_attention_mask", False)
        attended = tokens.attention_mask.to(device) if attends else None
        rows.append(
            encoder(tokens.input_ids.to(device), attention_mask=attended)[0][0].float().cpu()
        )
        masks.append(tokens.attention_mask[0].bool())
    return torch.stack(rows), torch.stack(masks) if masked else None


class LatentCodec:
    """The model's frozen VAE, which encodes images and decodes latents.

    It encodes images one at a time. On a GPU, it decodes several latents at a time.
    """

    def __init__(self, model: ModelDirectory, image_size: int, device: torch.device) -> None:
        self.vae = load_part(model, "vae").to(device)
        self.image_size = image_size
        self.device = device
        self.scale = float(self.vae.config.scaling_factor)
        self.channels = int(self.vae.config.in_channels)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode (B, C, H, W) float32 in [0, 1] as (B, c, h, w) float32.

        Images are resized, the channel of grey images is repeated, and the latents are the mean of
        the VAE's posterior.

        Guarantee: row i depends only on image i, bit for bit, regardless of the content and
        the number of other images.
        """
        rows = []
        for image in images.to(self.device).split(1):
            pixels = resize(with_channels(image, self.channels), self.image_size) * 2 - 1
            rows.append(self.vae.encode(pixels).latent_dist.mode() * self.scale)
        return torch.cat(rows)

    @torch.no_grad()
    def decode(self, latents: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Decode (B, c, h, w) to (B, C, H, W) float32 in [0, 1], on the CPU. shape: (C, H, W)."""
        channels, height, _ = shape
        size = max(1, DECODED[self.device.type] // self.image_size**2)
        rows = [
            self.vae.decode(part / self.scale).sample.float()
            for part in latents.to(self.device).split(size)
        ]
        images = ((torch.cat(rows) + 1) / 2).clamp(0, 1)
        return resize(with_channels(images, channels), height).cpu()


def with_channels(images: Tensor, channels: int) -> Tensor:
    """Convert (B, C, H, W) to `channels` channels: repeat grey, average colour."""
    if images.shape[1] == channels:
        return images
    return images.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)


def resize(images: Tensor, size: int) -> Tensor:
    """Resize (B, C, H, W) in [0, 1] to (B, C, size, size), antialiased."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def make_scheduler(model: ModelDirectory) -> Any:
    """Build the model's own sampler, a scheduler of `diffusers`.

    Raises DataError if this scheduler has no discrete noise schedule.
    """
    scheduler = load_part(model, "scheduler")
    alphas_cumprod = getattr(scheduler, "alphas_cumprod", None)
    if not isinstance(alphas_cumprod, Tensor) or alphas_cumprod.ndim != 1:
        raise DataError(
            f"{model.path / 'scheduler'}: {type(scheduler).__name__} has no discrete noise "
            "schedule (alphas_cumprod). Flow-matching models are not supported: use Stable "
            "Diffusion 1.x, 2.x or PixArt"
        )
    return scheduler
