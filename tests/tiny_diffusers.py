"""Tiny random text-to-image models in the on-disk layout of `diffusers`.

They replace Stable Diffusion and PixArt.
"""

import json
from pathlib import Path

import torch

KINDS = ("unet-epsilon", "unet-v", "transformer")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789()"


def save_clip_text(directory: Path, width: int) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    words = [
        *LETTERS,
        *(f"{letter}</w>" for letter in LETTERS),
        "an</w>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    (directory / "tokenizer").mkdir(parents=True)
    source = directory / "tokenizer"
    (source / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (source / "merges.txt").write_text("#version: 0.2\na n</w>\n")
    about = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    CLIPTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(source)
    end = len(words) - 1
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )
    CLIPTextModel(config).save_pretrained(directory / "text_encoder")


def save_t5_text(directory: Path, width: int) -> None:
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    first = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), ("▁", -2.0)]
    pieces = [*first, *((letter, -3.0) for letter in LETTERS), ("▁an", -1.0)]
    T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64).save_pretrained(
        directory / "tokenizer"
    )
    config = T5Config(
        vocab_size=len(pieces),
        d_model=width,
        d_ff=2 * width,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    T5EncoderModel(config).save_pretrained(directory / "text_encoder")


def save_tiny_model(directory: Path, kind: str, width: int = 16) -> Path:
    """Write a model of one of KINDS for images of 16×16, whose latents are 4×8×8."""
    import diffusers

    torch.manual_seed(0)
    (save_t5_text if kind == "transformer" else save_clip_text)(directory, width)
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )
    vae.save_pretrained(directory / "vae")
    if kind == "transformer":
        network = diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=16,
            sample_size=8,
            patch_size=2,
            caption_channels=width,
            norm_num_groups=4,
        )
        # The last layer of a new network is not zero, but its first scale is small
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        scheduler = diffusers.DPMSolverMultistepScheduler(
            prediction_type="epsilon", beta_schedule="linear"
        )
    else:
        network = diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=width,
            attention_head_dim=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            use_linear_projection=kind == "unet-v",
        )
        schedule = {
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "steps_offset": 1,
        }
        if kind == "unet-v":
            scheduler = diffusers.DDIMScheduler(
                prediction_type="v_prediction", clip_sample=False, **schedule
            )
        else:
            scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, **schedule)
    part = "transformer" if kind == "transformer" else "unet"
    network.save_pretrained(directory / part)
    scheduler.save_pretrained(directory / "scheduler")
    text = (
        ("T5Tokenizer", "T5EncoderModel")
        if kind == "transformer"
        else ("CLIPTokenizer", "CLIPTextModel")
    )
    index = {
        "_class_name": (
            "PixArtAlphaPipeline" if kind == "transformer" else "StableDiffusionPipeline"
        ),
        "tokenizer": ["transformers", text[0]],
        "text_encoder": ["transformers", text[1]],
        "vae": ["diffusers", "AutoencoderKL"],
        part: ["diffusers", type(network).__name__],
        "scheduler": ["diffusers", type(scheduler).__name__],
        "safety_checker": [None, None],
    }
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory


def save_references(root: Path, classes: tuple[str, ...]) -> Path:
    """Write a model of each kind, and the artifact of `stage pretrain` for it. Returns `root`.

    For each kind in KINDS, the model is in `<kind>` and the artifact in `<kind>-reference`.
    """
    from sfumato.settings.training import Model
    from sfumato.text_to_image.reference import save_reference

    for kind in KINDS:
        save_tiny_model(root / kind, kind)
        reference = root / f"{kind}-reference"
        reference.mkdir()
        save_reference(
            Model(directory=str(root / kind)), "some", classes, reference, torch.device("cpu")
        )
    return root
