"""Find the records of charges behind public inputs, and sensitive images among public images.

Public images and models cost nothing, unless they were made from sensitive images. In that case,
their `privacy.json` contains the records of the charges. Files that were released from this state
directory are recognised by their bytes, even without `privacy.json`.

The guarantee does not cover public images, so no sensitive or hold-out image may be among them.
Only exact duplicates in the stored shape are found, because copies that were recoloured or
compressed with loss have different bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from sfumato.data.cards import CARD
from sfumato.data.images import IMAGES, ImageSet, load_array
from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.queries import OwnNetwork
from sfumato.storage.artifacts import PRIVACY, Artifact, as_text, read_artifact
from sfumato.storage.digest import digest_of, digest_of_file
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import entries_below, files_in, replace_private
from sfumato.storage.records import Record, Records

# Folder in the state directory with one file per released artifact
RELEASED = "released"


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """The content of a file in the folder RELEASED: the records of a release, and the hashes of its
    files and images.
    """

    records: dict[str, Record]
    hashes: tuple[str, ...]


def lineage(path: Path, section: str, declared_public: bool, state: Path | None) -> list[Artifact]:
    """Return the releases from which the file or folder `path` was made.

    If `path` was made only from public data, the list is empty, or its entries have no records.

    section: "public", "model" or "network", for the message. Raises ConfigError if there is no
    privacy.json and the files are not declared public. Raises DataError if there is a privacy.json
    that does not match the files.
    """
    resolved = path.expanduser().resolve()  # `path` may be an artifact, or a file in one
    folders = (folder for folder in (resolved, *resolved.parents) if (folder / PRIVACY).is_file())
    carried = next(map(read_artifact, folders), None)
    if carried is None and not declared_public:
        raise ConfigError(
            f"{path} has no {PRIVACY}, so its privacy cost is unknown. If nothing in it was made "
            f"from sensitive images, set {section}.declared_public: true. If it is a release, give "
            "the path of the release's folder, complete and unchanged"
        )
    return [*filter(None, [carried]), *recognised(state, hashes(path))]


def refuse_private_network(network: OwnNetwork, state: Path) -> None:
    """Raise ConfigError if the owner's network was, or may have been, made from sensitive
    images.
    """
    if any(
        release.records
        for release in lineage(Path(network.path), "network", network.declared_public, state)
    ):
        raise ConfigError(
            f"the network {network.path} was made from sensitive images, so it is not public: "
            "choose a public network"
        )


def remember(state: Path, artifacts: Iterable[Artifact], public: Path) -> None:
    """Store the hashes of the files and images of released artifacts, with their records.

    public: folder of the prepared public set. If a release contains unchanged images of this set,
    the hashes of these images are not stored, because the images stay public.
    """
    for artifact in artifacts:
        if artifact.records:
            release_hashes = set(hashes(artifact.path))
            if (images := artifact.path / IMAGES).is_file():
                release_hashes |= {value.hex() for value in digests(load_array(images))}
                card = artifact.path / CARD
                if (
                    card.is_file()
                    and not read_json(card)["synthetic"]
                    and (public / IMAGES).is_file()
                ):
                    release_hashes -= {
                        value.hex() for value in digests(load_array(public / IMAGES))
                    }
            remember_hashes(state, artifact.records, release_hashes)


def remember_hashes(state: Path, records: Records, release_hashes: Iterable[str]) -> None:
    """Store hashes of released files and images, with the records of the release."""
    content = {"records": records, "hashes": sorted(release_hashes)}
    replace_private(state / RELEASED / f"{digest_of(content)[:32]}.json", as_text(content).encode())


def recognised(state: Path | None, candidates: Iterable[str]) -> list[Artifact]:
    """Return the releases of this state directory that contain any of the hashes `candidates`."""
    files = [] if state is None else files_in(state / RELEASED, "*.json")
    if not files:
        return []  # `candidates` is a generator that hashes files: returning early avoids this work
    candidate_set = {*candidates}
    releases = []
    for file in files:
        message = (
            f"{file} cannot be read ({{}}): restore this file from a backup, because without it "
            "earlier releases are not recognised"
        )
        with explained(DataError, message.format, causes=(OSError, ValueError)):
            content = validated(Remembered, read_json(file))
        if not candidate_set.isdisjoint(content.hashes):
            releases.append(Artifact(file, RELEASED, Records(content.records)))
    return releases


def hashes(path: Path) -> Iterator[str]:
    """Yield the sha256 of a file, or of the images and weights in a folder."""
    path = path.expanduser()
    for file in [path] if path.is_file() else map(Path, entries_below(path)):
        # Only files of the kinds that a copy of a release would contain
        if file.is_file() and (
            file == path or file.suffix.lower() in {".safetensors", ".png", ".npz", ".parquet"}
        ):
            yield digest_of_file(file)


def refuse_overlap(public: ImageSet, private: Iterable[ImageSet]) -> None:
    """Raise DataError if a public image is among the private ones."""
    indices = overlapping(public, private)
    if len(indices):
        examples = ", ".join(map(str, indices[:10])) + (", …" if len(indices) > 10 else "")
        raise DataError(
            "do not share this message, because it depends on sensitive images: "
            f"{len(indices)} of the {len(public)} public images are also sensitive or hold-out "
            f"images (indices from 0: {examples}). The guarantee does not cover public images: "
            "remove these images from the public source, or choose another source"
        )


def overlapping(public: ImageSet, private: Iterable[ImageSet]) -> np.ndarray:
    """Return the ascending indices of public images with the same bytes as a private one, (n,)
    int64.
    """
    private_digests = {digest for image_set in private for digest in digests(image_set.images)}
    return np.array(
        [i for i, digest in enumerate(digests(public.images)) if digest in private_digests],
        dtype=np.int64,
    )


def digests(images: np.ndarray) -> Iterator[bytes]:
    """Yield a digest of 16 bytes for each image, over its shape and its pixels.

    images: (N, H, W, C) uint8.
    """
    height, width, channels = images.shape[1:]
    shape = repr((channels, height, width)).encode()
    for image in images:
        yield blake2b(shape + image.tobytes(), digest_size=16).digest()
