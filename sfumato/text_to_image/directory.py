"""A public text-to-image model on disk, in the layout of `diffusers`.

This module parses only JSON files. It only lists or hashes all other files, so a plan can be
checked without `diffusers` and `transformers`. Pickles are never opened.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.training import Model
from sfumato.storage import documents
from sfumato.storage.digest import digest_of, digest_of_file

INDEX = "model_index.json"
KNOWN = {  # supported classes of diffusers and transformers, by part of the model
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast"),
    "text_encoder": ("CLIPTextModel", "T5EncoderModel"),
    "vae": ("AutoencoderKL",),
    "unet": ("UNet2DConditionModel",),
    "transformer": ("PixArtTransformer2DModel",),
}
MODEL_PARTS = (*KNOWN, "scheduler")
# Configuration files with other names than config.json
CONFIG_OF = {"tokenizer": "tokenizer_config.json", "scheduler": "scheduler_config.json"}
WEIGHTS_OF = {"text_encoder": "model"} | dict.fromkeys(
    ("vae", "unet", "transformer"), "diffusion_pytorch_model"
)
HUB = "hub:"
AGAIN = "download the model again"
LAYOUT = (
    "expected a directory as diffusers saves it, with model_index.json, tokenizer, text_encoder, "
    "vae, scheduler, and unet or transformer"
)


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """A complete model in a directory.

    classes: name of each part's class, such as {"unet": "UNet2DConditionModel"};
    configs: content of each part's configuration file.
    """

    path: Path
    classes: dict[str, str]
    configs: dict[str, dict[str, Any]]

    @property
    def denoiser(self) -> str:
        """Name of the trained part: "unet" or "transformer"."""
        if "unet" in self.classes:
            return "unet"
        return "transformer"

    @property
    def prediction(self) -> str:
        """The quantity that the network predicts: "epsilon" (the noise) or "v_prediction"."""
        return str(self.configs["scheduler"].get("prediction_type", "epsilon"))

    @property
    def factor(self) -> int:
        """Ratio of the sides of an image, in pixels, to the sides of its latents."""
        return 2 ** (len(self.configs["vae"]["block_out_channels"]) - 1)

    @property
    def multiple(self) -> int:
        """Number by which both sides of an image, in pixels, must be divisible."""
        config = self.configs[self.denoiser]
        if self.denoiser == "unet":
            return self.factor * 2 ** (len(config["block_out_channels"]) - 1)
        return self.factor * config.get("patch_size", 2)

    @property
    def image_size(self) -> int:
        """Side, in pixels, of the images that the model was trained on."""
        return int(self.configs[self.denoiser]["sample_size"]) * self.factor


def require_library() -> None:
    """Raise ConfigError if `diffusers` or `transformers` is not installed.

    This function imports neither of them.
    """
    for name in ("diffusers", "transformers"):
        if find_spec(name) is None:
            raise ConfigError(
                f"model.directory names a public text-to-image model, which requires {name}: "
                "pip install 'sfumato[diffusers]'"
            )


def locate(directory: str) -> Path:
    """Return the local directory of `model.directory`.

    For `hub:owner/name[@revision]`, this is the directory in the hub's cache; the model is
    downloaded if it is not there. Raises ConfigError if there is no such directory or model.
    """
    if not directory.startswith(HUB):
        path = Path(directory).expanduser()
        if path.is_file():
            raise ConfigError(
                f"model.directory={directory} is a single file: {LAYOUT}. Convert the file with "
                "diffusers (docs/public-models.md)"
            )
        if not path.is_dir():
            raise ConfigError(
                f"model.directory={directory} does not exist: {LAYOUT}. Download a model "
                "(docs/public-models.md)"
            )
        return path
    require_library()
    match = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", directory)
    if not match:
        raise ConfigError(
            f"model.directory={directory}: expected hub:owner/name or hub:owner/name@revision"
        )
    from huggingface_hub import snapshot_download

    parts = [INDEX, "tokenizer/*.txt", "tokenizer/*.model"]
    parts += [f"{part}/*.json" for part in MODEL_PARTS]
    parts += [f"{part}/*.safetensors" for part in WEIGHTS_OF]
    # All exceptions are caught, because the type depends on what fails: network, name, permission.
    with explained(
        ConfigError,
        lambda error: (
            f"model.directory={directory} cannot be downloaded from the hub ({first_line(error)}): "
            "download the model on another computer, and set model.directory to its folder"
        ),
        causes=(Exception,),
    ):
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=parts))


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message, or the error's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def supported_classes(path: Path) -> dict[str, str]:
    """Read the class of each part of a model from the index of its directory.

    Raises DataError if a part is missing or not supported.
    """
    entries = {
        part: value for part, value in read_config(path / INDEX).items() if part in MODEL_PARTS
    }
    classes = {
        k: str(v[1]) for k, v in entries.items() if isinstance(v, list) and len(v) == 2 and v[1]
    }
    other_parts = classes.keys() - {"unet", "transformer"}
    if len(other_parts) < len(MODEL_PARTS) - 2 or len(classes) - len(other_parts) != 1:
        raise DataError(f"{path / INDEX} names {', '.join(classes) or 'no part'}: {LAYOUT}")
    for part, name in classes.items():
        # Loading a part of an unknown class might run a program
        if not (name in KNOWN[part] if part in KNOWN else name.endswith("Scheduler")):
            expected = (
                f"{' or '.join(KNOWN.get(part, ['a scheduler']))}, as in Stable Diffusion 1.x and "
                "2.x or PixArt"
            )
            raise DataError(
                f"{path}: the {part} is a {name}, which is not supported: expected {expected}"
            )
    return classes


def read_model_directory(directory: str) -> ModelDirectory:
    """Read the model's JSON files and check that it is complete.

    Raises ConfigError if there is no directory, DataError if a part is missing or not supported.
    """
    path = locate(directory)
    classes = supported_classes(path)
    configs = {
        part: read_config(path / part / CONFIG_OF.get(part, "config.json")) for part in classes
    }
    for part in classes:
        part_files(path, part)
        if (path / part / "adapter_config.json").exists():
            raise DataError(
                f"{path / part} contains an adapter (adapter_config.json): use a model with plain "
                "weights only"
            )
        if names_code(configs[part]):
            raise DataError(
                f"{path / part} refers to code in its configuration: use a model with plain "
                "weights only"
            )
    model = ModelDirectory(path=path, classes=classes, configs=configs)
    vae = f"{path / 'vae' / 'config.json'} lacks a valid block_out_channels"
    with explained(DataError, lambda error: f"{vae} ({error!r}): {AGAIN}"):
        _ = model.factor
    network = (
        f"{path / model.denoiser / 'config.json'} lacks a valid sample_size, block_out_channels or "
        "patch_size"
    )
    with explained(DataError, lambda error: f"{network} ({error!r}): {AGAIN}"):
        _ = model.multiple, model.image_size
    if model.prediction not in ("epsilon", "v_prediction"):
        raise DataError(
            f"{path}: prediction_type is {model.prediction!r}, expected epsilon or v_prediction. "
            "Use another model"
        )
    return model


def names_code(config: Any) -> bool:
    """Return whether a configuration names code, such as kernels or classes, that `transformers`
    would download or run.
    """
    if not isinstance(config, dict):
        return False
    attention = {config.get("attn_implementation"), config.get("_attn_implementation")}
    has_code = bool({"auto_map", "quantization_config"} & config.keys()) or not attention <= {
        None,
        "eager",
        "sdpa",
    }
    return has_code or any(map(names_code, config.values()))


def read_config(path: Path) -> dict[str, Any]:
    missing = f"{path} is missing: {LAYOUT}; {AGAIN}"
    with explained(
        DataError, lambda error: f"{path} cannot be read ({error}): {AGAIN}", missing=missing
    ):
        content = documents.read_json(path, infinite=True)
    if not isinstance(content, dict):
        raise DataError(f"{path} must contain a JSON object: {AGAIN}")
    return content


def weights_of(path: Path, part: str) -> tuple[Path, str]:
    """Return the file with a part's weights, and its variant: "" or ".fp16".

    If the weights are in several shards, this is the file with their index. Raises DataError if
    there are no safetensors files; pickles are ignored.
    """
    directory = path / part
    stem = WEIGHTS_OF[part]
    for variant in ("", ".fp16"):  # half-precision weights are used only if there are no others
        for name in (f"{stem}{variant}.safetensors", f"{stem}.safetensors.index{variant}.json"):
            if (directory / name).is_file():
                return directory / name, variant
    raise DataError(
        f"{directory} contains no {stem}.safetensors. Pickles (.bin, .ckpt) are not read, because "
        "they may run any program: use the model's safetensors files, or convert its pickles to "
        "safetensors"
    )


def part_files(path: Path, part: str) -> list[Path]:
    """Return the files that have to be read to load a part, sorted by name.

    Raises DataError if a file is missing, and the errors of `weights_of`.
    """
    directory = path / part
    files = {directory / CONFIG_OF.get(part, "config.json")}
    if part == "tokenizer":
        files |= {
            file for file in directory.iterdir() if file.suffix in (".json", ".txt", ".model")
        }
    if part in WEIGHTS_OF:
        weights, _ = weights_of(path, part)
        files.add(weights)
        shards = None
        if weights.suffix == ".json":
            shards = read_config(weights).get("weight_map")
        for name in map(str, shards.values()) if isinstance(shards, dict) else ():
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise DataError(
                    f"{weights} names {name!r}, expected a safetensors file in the same folder: "
                    f"{AGAIN}"
                )
            files.add(directory / name)
    for file in sorted(files):
        if not file.is_file():
            raise DataError(f"{file} is missing: {AGAIN}")
    return sorted(files)


def part_digest(path: Path, part: str) -> str:
    """Compute one sha256 over the names and bytes of all files of a part."""
    return digest_of({file.name: digest_of_file(file) for file in part_files(path, part)})


def choose_image_size(model: ModelDirectory, settings: Model) -> int:
    """Return the side of images in pixels: `settings.image_size`, or by default `model.image_size`.

    Raises ConfigError if the VAE or the network does not accept this size.
    """
    size = settings.image_size or model.image_size
    multiple = model.multiple
    if size % multiple:
        lower = max(multiple, size // multiple * multiple)
        raise ConfigError(
            f"model.image_size={size} does not fit {model.path}, which accepts only multiples of "
            f"{multiple}: use {lower} or {lower + multiple}"
        )
    return size
