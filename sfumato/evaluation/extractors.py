"""Feature spaces in which sets of images are compared.

The extractors `embedded` and `pixels` need no download.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.images import ImageSet, Shape
from sfumato.data.rendered import drawn_set
from sfumato.errors import DataError, explained
from sfumato.evaluation.classifiers import PENULTIMATE_WIDTH
from sfumato.evaluation.downstream import fit_classifier, schedule_of
from sfumato.features.own_network import OwnFeatures
from sfumato.runtime import compute
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.queries import OwnNetwork
from sfumato.storage.digest import digest_of, digest_of_file
from sfumato.training.supervised import apply

# Digest of pytorch-fid's weights
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
# Minimum number of passes over the drawn images. More passes are made to reach MIN_STEPS steps
EPOCHS = 4
# Number of images per class that train the embedded feature network, by the source of the images
DRAWN_PER_CLASS = {"glyphs": 200, "procedural": 2000}


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A feature space. Distances are called FID and KID only in the space of Inception.

    embed: function from images, (B, C, H, W) float32 in [0, 1] on `device`, to features, (B, D);
    digest: sha256 that changes with the weights and with the preprocessing of images;
    head: (classes, D) weights of the last layer, only for Inception.
    """

    name: str
    digest: str
    embed: Callable[[Tensor], Tensor]
    device: str = "cpu"
    batch: int = 32
    head: np.ndarray | None = None
    # Features that were already computed, by the digest of their images
    known: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Compute the features of images: (N, H, W, C) uint8, with C 1 or 3 -> (N, D) float32.

        Features of the same images are computed once per process, and never written to disk. Raises
        DataError for non-finite features.
        """
        digest = hashlib.sha256(f"{images.dtype} {images.shape} ".encode())
        digest.update(np.ascontiguousarray(images).data)
        if (key := digest.hexdigest()) not in self.known:
            features = apply(self.embed, images, self.device, self.batch)
            if not np.isfinite(features).all():
                raise DataError(
                    f"the extractor {self.name} returned non-finite features: check its weights "
                    "file."
                )
            self.known[key] = features
        return self.known[key]


def build_extractor(config: Evaluate, shape: Shape, log: Callable[[str], None]) -> Extractor | None:
    """Build the extractor that `config` names. Returns None if `config` requests no metrics.

    log: called with a message before a network is trained. Raises DataError for wrong weights.
    """
    if config.fidelity == ():
        return None
    if config.extractor == "inception":
        return inception_extractor(Path(config.weights) if config.weights else None)
    if config.extractor == "pixels":  # copies of any kind of image are near the original in pixels
        rows, columns = (min(side, 16) for side in shape[1:])
        name = f"pixels-{rows}x{columns}"
        pool = nn.Sequential(nn.AdaptiveAvgPool2d((rows, columns)), nn.Flatten())
        return Extractor(name=name, digest=digest_of([name]), embed=pool, batch=1000)
    if config.network is not None:
        return own_extractor(config.network)
    source: Literal["glyphs", "procedural"] = "glyphs" if shape[0] == 1 else "procedural"
    log(f"training of a feature network on computer-generated images ({source})")
    return embedded_extractor(drawn_set(source, shape, DRAWN_PER_CLASS[source]), source)


def embedded_extractor(public: ImageSet, name: str) -> Extractor:
    """Build the extractor `cnn-<name>-128`, and train its CNN on `public`.

    The features are the input of the CNN's last layer.
    """
    schedule = schedule_of("cnn", len(public), EPOCHS)
    network = fit_classifier(
        "cnn", public.images, public.labels, len(public.classes), schedule, seed=0
    )
    digest = hashlib.sha256(b"embedded")
    for key, value in sorted(network.state_dict().items()):
        digest.update(key.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    device = next(network.parameters()).device.type
    unit = (
        float(np.sqrt(np.mean(apply(network.features, public.images[:2000], device) ** 2))) or 1.0
    )
    digest.update(repr(unit).encode())
    return Extractor(
        name=f"cnn-{name}-{PENULTIMATE_WIDTH}",
        digest=digest.hexdigest(),
        embed=lambda images: network.features(images) / unit,
        device=device,
        batch=1000,
    )


def own_extractor(settings: OwnNetwork) -> Extractor:
    """Build the extractor of the owner's own network, named after the sha256 of the weights."""
    digest = digest_of({**settings.arguments(), "path": ""})
    return Extractor(name=f"own-{settings.sha256[:8]}", digest=digest, embed=OwnFeatures(settings))


def inception_extractor(path: Path | None = None) -> Extractor:
    """Build the extractor `inception`: the pooled features of pytorch-fid's Inception network.

    path: file with the network's weights; None for torch.hub's copy, which is downloaded if it is
    missing. Raises DataError if the file is missing or has the wrong content.
    """
    from pytorch_fid import inception

    if path is None:
        path = (
            Path(torch.hub.get_dir()) / "checkpoints" / inception.FID_WEIGHTS_URL.rsplit("/", 1)[1]
        )
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with explained(
                DataError,
                lambda e: (
                    f"the Inception weights could not be downloaded ({e}). Download "
                    f"{inception.FID_WEIGHTS_URL} on another computer, copy the file to this one "
                    "and set evaluate.weights to its path."
                ),
                causes=(OSError, RuntimeError),
            ):
                torch.hub.download_url_to_file(
                    inception.FID_WEIGHTS_URL, str(path), hash_prefix=INCEPTION_SHA256
                )
    if not path.is_file():
        raise DataError(
            f"evaluate.weights={path} does not exist. Set it to the path of the Inception weights."
        )
    digest = digest_of_file(path)
    if digest != INCEPTION_SHA256:
        raise DataError(
            f"{path} is damaged, or is not the file of the Inception weights: its sha256 is "
            f"{digest}, expected {INCEPTION_SHA256}. Download {inception.FID_WEIGHTS_URL} again."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    # pytorch-fid loads weights only by its own download function, which is replaced here
    with mock.patch.object(inception, "load_state_dict_from_url", lambda *_, **__: state):
        network = inception.InceptionV3([inception.InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).eval()
    device = compute.device().type
    network = network.to(device)
    return Extractor(
        name="inception-2015-12-05",
        digest=hashlib.sha256(f"{digest} inception pool3, bilinear 299".encode()).hexdigest(),
        # Inception expects three channels, so the channel of grey images is repeated
        embed=lambda images: network(images.expand(-1, 3, -1, -1))[0].flatten(1),
        device=device,
        head=state["fc.weight"].double().numpy(),
    )
