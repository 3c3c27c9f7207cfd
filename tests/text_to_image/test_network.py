"""Tiny random text-to-image models compute the same numbers as the library.

Other tests cover latents, training, prompts and bad folders.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from pretended_gpu import pretended_gpu
from tiny_diffusers import KINDS

from sfumato.dpsgd.gradients import Microbatch, clipped_gradient_sum, draw
from sfumato.dpsgd.lora import adapted_layers, save_adapter
from sfumato.dpsgd.trainable import candidates, check_trained, choose_trainable
from sfumato.errors import ConfigError, DataError
from sfumato.release.synthesizer import load_synthesizer
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import LogNormal, TimestepMixture
from sfumato.settings.training import Model
from sfumato.text_to_image import parts
from sfumato.text_to_image.directory import HUB, ModelDirectory, locate, read_model_directory
from sfumato.text_to_image.network import LatentDiffusion, Prompts, load_latent
from sfumato.text_to_image.parts import embed_prompts, load_part, make_scheduler
from sfumato.text_to_image.reference import (
    class_prompts,
    load_codec,
    read_reference,
    save_reference,
)

CPU = torch.device("cpu")
CLASSES = ("zero", "one", "two")
PART = {"unet-epsilon": "unet", "unet-v": "unet", "transformer": "transformer"}
UNIFORM = TimestepMixture(weights=(1,), bounds=(0, 1000))


def reference(models: Path, kind: str) -> Path:
    return models / f"{kind}-reference"


@pytest.fixture
def copied(models, tmp_path) -> Path:
    """Copy a model, so that a test can damage it."""
    return Path(shutil.copytree(models / "unet-epsilon", tmp_path / "spoiled"))


# ---- the same numbers as the library's


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_the_librarys_number_for_number(models, kind):
    import diffusers

    model = load_latent(reference(models, kind))
    own = (
        getattr(diffusers, type(model.network).__name__)
        .from_pretrained(models / kind / PART[kind])
        .eval()
    )
    x = torch.randn(3, 4, 8, 8)
    t = torch.tensor([0, 400, 999])
    labels = torch.tensor([0, 2, 3])
    more = {}
    if kind == "transformer":
        assert model.mask is not None and not model.mask.all()
        more = {
            "encoder_attention_mask": model.mask[labels].float(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    with torch.no_grad():
        expected = own(x, encoder_hidden_states=model.prompts[labels], timestep=t, **more).sample[
            :, :4
        ]
        # Without gradients, attention is fused
        torch.testing.assert_close(model(x, t, labels), expected, rtol=1e-4, atol=1e-5)
    with torch.enable_grad():
        # With gradients, attention is computed step by step
        torch.testing.assert_close(model(x, t, labels), expected, rtol=1e-4, atol=1e-5)
    assert float(expected.std()) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_encoded_once_per_class_as_by_the_library(models, kind):
    import diffusers
    import transformers

    calls = []
    encoder = transformers.T5EncoderModel if kind == "transformer" else transformers.CLIPTextModel
    found = read_model_directory(str(models / kind))
    texts = ["An image of an airplane", "An image of a bird"]
    with register_module_forward_pre_hook(
        lambda module, _: calls.append(1) if type(module) is encoder else None
    ):
        embeddings, mask = embed_prompts(found, texts, CPU)
    assert len(calls) == 3  # two classes and no label
    if kind == "transformer":
        pipe = diffusers.PixArtAlphaPipeline.from_pretrained(models / kind)
        expected, attended, *_ = pipe.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            device=CPU,
            max_sequence_length=64,
            clean_caption=False,
        )
        assert torch.equal(mask[:2].long(), attended.long())
        embeddings, expected = (
            embeddings[:2] * mask[:2, :, None],
            (expected * attended[:, :, None]).float(),
        )
    else:
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(models / kind, safety_checker=None)
        expected, none = pipe.encode_prompt(texts, CPU, 1, True)
        expected = torch.cat([expected, none[:1]])
    torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    load_latent(reference(models, kind))
    assert not calls  # later stages need no text encoder


@pytest.mark.parametrize("kind", ["unet-epsilon", "unet-v"])
def test_guided_samples_are_the_pipelines(models, kind):
    import diffusers

    model = load_latent(reference(models, kind))
    codec = load_codec(reference(models, kind), CPU)
    generator = torch.Generator().manual_seed(3)
    start = torch.stack([torch.randn(4, 8, 8, generator=generator) for _ in range(2)])
    scheduler = make_scheduler(read_model_directory(str(models / kind)))
    again = torch.Generator().manual_seed(3)
    drawn = model.sample_latents(scheduler, torch.tensor([1, 2]), 6, 1.5, again, False)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(models / kind, safety_checker=None)
    texts = [read_reference(reference(models, kind))["prompts"][name] for name in CLASSES[1:]]
    expected = pipe(
        texts,
        height=16,
        width=16,
        num_inference_steps=6,
        guidance_scale=2.5,
        latents=start,
        output_type="pt",
    ).images
    torch.testing.assert_close(
        codec.decode(drawn, (3, 16, 16)), expected.float(), rtol=1e-3, atol=1e-3
    )


def test_a_transformer_gets_the_size_under_vmap_too():
    import diffusers

    torch.manual_seed(0)
    network = diffusers.PixArtTransformer2DModel(
        num_attention_heads=3, attention_head_dim=4, in_channels=4, out_channels=8, num_layers=1,
        cross_attention_dim=12, sample_size=8, patch_size=2, caption_channels=6, norm_num_groups=4,
        use_additional_conditions=True,
    )  # fmt: skip
    prompts = torch.randn(3, 5, 6)
    mask = torch.ones(3, 5, dtype=torch.bool)
    configs: dict = {"scheduler": {}, "vae": {"block_out_channels": [4, 4]}}
    directory = ModelDirectory(
        path=Path("none"), classes={"transformer": "PixArtTransformer2DModel"}, configs=configs
    )
    alphas_cumprod = torch.linspace(0.99, 0.01, 1000)
    models = [
        LatentDiffusion(directory, network, Prompts(prompts, mask), alphas_cumprod, size)
        for size in (16, 32)
    ]
    x = torch.randn(2, 4, 8, 8)
    t = torch.tensor([3, 700])
    labels = torch.tensor([0, 1])
    assert not torch.equal(*(model(x, t, labels) for model in models))
    drawn = draw(models[0], x, 2, UNIFORM, torch.Generator().manual_seed(0))
    parameters = dict(models[0].named_parameters())
    total = clipped_gradient_sum(models[0], parameters, x, labels, drawn, 1.0, Microbatch(2))
    assert total.isfinite().all()


def test_what_is_learned_is_read_from_the_scheduler(models, monkeypatch):
    latents = torch.randn(2, 4, 8, 8)
    noise = torch.randn(2, 4, 8, 8)
    t = torch.tensor([10, 700])
    labels = torch.tensor([0, 3])
    for kind in KINDS:
        model = load_latent(reference(models, kind))
        alphas_cumprod = model.alphas_cumprod[t][:, None, None, None]
        signal = alphas_cumprod.sqrt()
        spread = (1 - alphas_cumprod).sqrt()
        target = signal * noise - spread * latents if kind == "unet-v" else noise
        seen = []

        def perfect(x, timesteps, labels, seen=seen, target=target):
            seen.append(x)
            return target

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", perfect)
            assert model.per_image_loss(latents, labels, t, noise).abs().max() < 1e-10
        torch.testing.assert_close(seen[0], signal * latents + spread * noise)
        assert model.per_image_loss(latents, labels, t, noise).min() > 0.1


def test_timesteps_follow_the_law(models):
    model = load_latent(reference(models, "unet-epsilon"))
    generator = torch.Generator().manual_seed(0)
    t = model.draw_levels(UNIFORM, 20_000, generator)
    assert t.dtype == torch.int64 and t.min() == 0 and t.max() == 999
    # The tolerance is six standard errors, with a false-alarm rate of 2e-9
    assert float(t.float().mean()) == pytest.approx(499.5, abs=6 * 288.7 / 20_000**0.5)
    t = model.draw_levels(TimestepMixture(weights=(1, 3), bounds=(0, 100, 1000)), 20_000, generator)
    assert float((t < 100).float().mean()) == pytest.approx(0.25, abs=6 * (0.1875 / 20_000) ** 0.5)
    t = model.draw_levels(LogNormal(mean=0, std=1e-3), 5, generator)
    middle = int((model.alphas_cumprod >= 0.5).sum())  # σ = 1 where ᾱ = 1/2
    assert {*t.tolist()} <= {middle, middle + 1}
    assert len(model.draw_levels(UNIFORM, 0, generator)) == 0


@pytest.mark.parametrize("size", [8, 16, 28])
def test_a_latent_depends_on_its_own_image_alone_bit_for_bit(models, size):
    codec = load_codec(reference(models, "unet-epsilon"), CPU)
    images = torch.rand(5, 1, size, size)
    whole = codec.encode(images)
    assert whole.shape == (5, 4, 8, 8)
    for i in range(5):
        assert torch.equal(whole[i], codec.encode(images[i : i + 1])[0])
        rest = torch.arange(5) != i
        assert torch.equal(whole[rest], codec.encode(images[rest]))
    assert torch.equal(whole, codec.encode(images))  # no randomness
    back = codec.decode(whole, (1, size, size))
    assert back.shape == images.shape and back.min() >= 0 and back.max() <= 1


def test_a_gpu_decodes_as_many_latents_as_fit(models, monkeypatch):
    monkeypatch.setitem(parts.DECODED, "cuda", 2 * 16**2)
    codec = load_codec(reference(models, "unet-epsilon"), CPU)
    with pretended_gpu() as card:
        codec.device = torch.device("cuda")
        codec.vae.to(codec.device)
        decode = codec.vae.decode
        sizes = []
        codec.vae.decode = lambda latents: sizes.append(len(latents)) or decode(latents)
        card.waits.clear()
        assert codec.decode(torch.rand(5, 4, 8, 8), (1, 16, 16)).shape == (5, 1, 16, 16)
    assert sizes == [2, 2, 1] and card.waits.total() == 1


# ---- what is trained, saved and loaded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainable", ["salient-lora", "attention-lora", "attention", "all"])
def test_frozen_parts_stay_bit_identical(models, tmp_path, kind, trainable):
    model = load_latent(reference(models, kind))
    ranking = candidates(model)
    settings = Finetune(trainable=trainable)
    names = choose_trainable(model, settings, [*ranking[::3], *ranking[1::3], *ranking[2::3]], 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.Adam(
        [value for value in model.parameters() if value.requires_grad], lr=0.01
    )
    for _ in range(2):  # B starts at zero, so A moves from the second step on
        images, noise = torch.randn(2, 4, 4, 8, 8)
        model.per_image_loss(
            images, torch.arange(4), torch.tensor([5, 100, 500, 900]), noise
        ).mean().backward()
        optimiser.step()
    after = model.state_dict()
    for name in before:
        assert name in names or torch.equal(before[name], after[name])
    # In a tiny model, some weights that do not depend on the class have no gradient
    if trainable != "all":
        check_trained(before, model, names)
    if trainable.endswith("-lora"):
        save_adapter(model, tmp_path, reference(models, kind) / "config.json")
    else:
        model.save(tmp_path, names)
    adapted = {
        name: layer.weight + layer.scale * (layer.A @ layer.B)
        for name, layer in adapted_layers(model).items()
    }
    expected = model.state_dict() | adapted
    for name, value in load_synthesizer(tmp_path, reference(models, kind)).state_dict().items():
        assert torch.equal(value, expected[name]), name


# ---- prompts


def prompts(dataset_id: str, classes, **more) -> list[str]:
    return class_prompts(Model(directory="somewhere", **more), dataset_id, classes)


RETINA = "An optical coherence tomography (OCT) image for retinal disease"
AIR = ("airplane", "automobile", "bird", "cat")


@pytest.mark.parametrize(
    ("dataset_id", "classes", "more", "expected"),
    [  # the four datasets of the paper get its prompts
        (
            "cifar10",
            AIR,
            {},
            [f"An image of {name}" for name in ("an airplane", "an automobile", "a bird", "a cat")],
        ),
        (
            "celeba",
            ("female", "male"),
            {},
            ["An image of a female face", "An image of a male face"],
        ),
        (
            "camelyon",
            ("normal", "tumor"),
            {},
            ["A normal lymph node image", "A lymph node histopathology image"],
        ),
        ("octmnist", ("CNV", "DME", "drusen"), {}, [f"{RETINA} {i}" for i in (1, 2, 3)]),
        ("clinic", ("old_cat", "cow"), {}, ["An image of an old cat", "An image of a cow"]),
        (
            "clinic",
            ("x", "y"),
            {"prompt": "{number}: {class}", "prompts": {"y": "Else"}},
            ["1: x", "Else"],
        ),
        ("octmnist", ("x", "y"), {"prompts": {"x": "A scan"}}, ["A scan", f"{RETINA} 2"]),
    ],
)
def test_prompts_are_the_user_s_then_the_paper_s_then_a_template(
    dataset_id, classes, more, expected
):
    assert prompts(dataset_id, classes, **more) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": "An image"}, "two classes"),
        ({"prompt": "A {kind}"}, r"field \{kind\}.*\{class\}"),
        ({"prompt": "A {class.__doc__}"}, "field"),
        ({"prompt": "A {class"}, "brace without"),
        ({"prompts": {"ca": "A cat"}}, "did you mean 'cat'"),
    ],
)
def test_prompts_that_cannot_be_made_are_named(more, message):
    with pytest.raises(ConfigError, match=message):
        prompts("clinic", ("cat", "dog"), **more)


def refer(directory: Path, out: Path, classes=CLASSES, **more) -> dict:
    out.mkdir(exist_ok=True)
    return save_reference(Model(directory=str(directory), **more), "some", classes, out, CPU)


def test_a_prompt_too_long_for_the_model_is_refused(models, tmp_path):
    with pytest.raises(DataError, match="77 tokens"):
        refer(models / "unet-epsilon", tmp_path, ("aa", "bb"), prompt="{class} " * 90)


# ---- bad input


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_part_is_named(models, tmp_path, kind):
    spoiled = Path(shutil.copytree(models / kind, tmp_path / "spoiled"))
    for part in (PART[kind], "scheduler", "vae", "text_encoder", "tokenizer"):
        (spoiled / part).rename(spoiled / "away")
        with pytest.raises(DataError, match=rf"{part}.*is missing"):
            read_model_directory(str(spoiled))
        (spoiled / "away").rename(spoiled / part)


def spoil_json(path: Path, **change) -> None:
    content = json.loads(path.read_text())
    content.update(change)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_unusable_directories_are_refused_in_one_sentence(copied, tmp_path):
    (tmp_path / "model.ckpt").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, kind, message in [
        ("nowhere", ConfigError, r"does not exist.*docs/public-models"),
        ("model.ckpt", ConfigError, "single file"),
        ("empty", DataError, r"model_index.json is missing"),
    ]:
        with pytest.raises(kind, match=message):
            read_model_directory(str(tmp_path / name))
    network = ["diffusers", "UNet2DConditionModel"]
    for file, change, message in [
        (
            "model_index.json",
            {"unet": network, "transformer": network},
            "expected a directory as diffusers saves it",
        ),
        (
            "model_index.json",
            {"transformer": None, "vae": None},
            "expected a directory as diffusers saves it",
        ),
        ("model_index.json", {"vae": ["diffusers", "VQModel"]}, "VQModel, which is not supported"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, None),
        (
            "model_index.json",
            {"scheduler": ["diffusers", "DiffusionPipeline"]},
            "DiffusionPipeline, which is not supp",
        ),
        ("model_index.json", {"scheduler": ["diffusers", "DDIMScheduler"]}, None),
        (
            "scheduler/scheduler_config.json",
            {"prediction_type": "sample"},
            "'sample', expected epsilon or v_pred",
        ),
    ]:
        spoil_json(copied / file, **change)
        with pytest.raises(DataError, match=message) if message else nullcontext():
            read_model_directory(str(copied))


@pytest.mark.parametrize(
    "named",
    [
        {"auto_map": {"AutoModel": "someone/model--code.Model"}},
        {"attn_implementation": "someone/kernel"},
        {"text_config": {"_attn_implementation": "someone/kernel"}},
        {"quantization_config": {"quant_method": "someone"}},
        None,
    ],
)
def test_a_part_that_names_code_is_refused_before_loading(copied, named):
    """`transformers` fetches kernels and adapters by name, if packages for them are installed."""
    config = copied / "text_encoder" / "config.json"
    if named is None:
        config.with_name("adapter_config.json").write_text("{}")
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | named))
    with pytest.raises(DataError, match="contains an adapter|refers to code"):
        read_model_directory(str(copied))


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_pickle_is_never_opened(copied, part):
    weights = next((copied / part).glob("*.safetensors"))
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(
        DataError, match=r"contains no .*\.safetensors\. Pickles \(\.bin, \.ckpt\) are not read"
    ):
        read_model_directory(str(copied))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "../x.safetensors", "/x.safetensors", "evil.py"]
)
def test_shards_are_safetensors_in_their_folder(copied, name):
    weights = next((copied / "unet").glob("*.safetensors"))
    index = {"metadata": {}, "weight_map": {"conv_in.weight": name}}
    (copied / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(index)
    )
    weights.rename(copied / "unet" / "pytorch_model.bin")
    with pytest.raises(DataError, match="expected a safetensors file in the same folder"):
        read_model_directory(str(copied))


def test_half_precision_and_sharded_files_are_read_as_they_are(models, copied):
    whole, half = (
        copied / f"unet/diffusion_pytorch_model{kind}.safetensors" for kind in ("", ".fp16")
    )
    network = load_file(whole)
    whole.unlink()
    save_file({name: value.half() for name, value in network.items()}, half, {"format": "pt"})
    loaded = load_part(read_model_directory(str(copied)), "unet")
    assert all(value.dtype == torch.float32 for value in loaded.parameters())
    assert torch.equal(loaded.conv_in.weight, network["conv_in.weight"].half().float())
    loaded.save_pretrained(copied / "unet", max_shard_size="100KB")
    half.unlink()
    assert len(list((copied / "unet").glob("*.safetensors"))) > 1
    assert torch.equal(
        load_part(read_model_directory(str(copied)), "unet").conv_in.weight, loaded.conv_in.weight
    )
    next((copied / "unet").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(DataError, match="is missing"):
        read_model_directory(str(copied))


def test_another_hash_is_refused(models, copied, tmp_path):
    known = read_reference(reference(models, "unet-epsilon"))["sha256"]
    assert refer(copied, tmp_path / "out", sha256=known)["sha256"] == known
    weights = copied / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["conv_in.bias"] += 1e-3
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(DataError, match="model.sha256 is"):
        refer(copied, tmp_path / "out", sha256=known)
    with pytest.raises(DataError, match="no longer has the bytes"):
        load_latent(tmp_path / "out")
    (copied / "vae" / "config.json").write_text((copied / "vae" / "config.json").read_text() + " ")
    with pytest.raises(DataError, match=r"vae no longer has the bytes"):
        load_codec(tmp_path / "out", CPU)


def test_damaged_weights_are_named(copied, tmp_path):
    weights = copied / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refer(copied, tmp_path / "out")
    with pytest.raises(DataError, match=r"unet cannot be loaded as UNet2DConditionModel"):
        load_latent(tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "size"), [("unet-epsilon", 18), ("unet-epsilon", 15), ("transformer", 18)]
)
def test_a_size_that_the_vae_cannot_take_is_refused(models, tmp_path, kind, size):
    with pytest.raises(ConfigError, match=f"model.image_size={size} .* multiples of 4: use"):
        refer(models / kind, tmp_path, image_size=size)


def test_other_sizes_than_the_models_own_work(models, tmp_path):
    for kind in ("unet-epsilon", "transformer"):
        refer(models / kind, tmp_path / kind, image_size=24)
        model = load_latent(tmp_path / kind)
        assert model.resolution == 12
        assert model(
            torch.randn(2, 4, 12, 12), torch.tensor([1, 2]), torch.tensor([0, 1])
        ).shape == (2, 4, 12, 12)


def test_the_hub_is_asked_by_name_and_revision(models, monkeypatch):
    import huggingface_hub

    download = Mock(return_value=str(models / "unet-epsilon"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_model_directory(f"{HUB}owner/name@abc").denoiser == "unet"
    asked = download.call_args
    assert asked.args == ("owner/name",) and asked.kwargs["revision"] == "abc"
    assert not any(
        pattern.endswith((".bin", ".ckpt", "*")) for pattern in asked.kwargs["allow_patterns"]
    )
    download.side_effect = OSError("no network")
    with pytest.raises(ConfigError, match="no network"):
        locate("hub:owner/name")
    with pytest.raises(ConfigError, match="hub:owner/name"):
        locate("hub:name")
