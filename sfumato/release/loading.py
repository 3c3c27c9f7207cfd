"""Load a release as arrays. Recipients need only NumPy.

import sfumato
release = sfumato.load_release("artifacts/synthesize")
release.images, release.labels, release.classes
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from sfumato.errors import UNREADABLE, DataError, explained, requiring
from sfumato.release.card_check import (
    ClassifierCard,
    KnownCost,
    ReleaseCard,
    check_card,
    known_cost,
)
from sfumato.storage.arrays import read_array
from sfumato.storage.digest import digest_of_file
from sfumato.storage.files import ATTRIBUTES, write_json
from sfumato.storage.plain_json import read_json, read_text
from sfumato.storage.records import Records

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from sfumato.release.torch_dataset import ReleaseDataset

KINDS_FILE = "kinds.npy"
# Sections of a release's README that do not describe its files
SECTIONS = ("Privacy", "Classes", "About")


@dataclass(frozen=True, eq=False)  # arrays have no truth value to compare, and no hash
class Release:
    """A released set.

    Args:
        images: (N, H, W, C) uint8, memory-mapped and read-only.
        labels: (N,) int64 below len(classes), or (N, len(classes)) uint8 of 0 and 1 if images have
            several labels.
        kinds: (N,) text: "plain" for an image as a model drew it, "distorted", "blend" or "public".
        classes: Class names, in the order of the labels.
        card: Content of `card.json`, with ε and δ. If only some kinds were loaded, the card's
            entries `images`, `kinds` and `sources` count only these images. The entry `sources` is
            then empty if the release has several sources, because it is not recorded which image
            is from which source.
        ledger: Record of every privacy mechanism behind the set, by id.
        path: Folder that the set was read from.
        cost: Cost of everything behind the set: ε, δ, the neighbour relation and the protected
            units. `basis` states whether ε was recomputed from the records or, if the packages
            for accounting are not installed, copied from the card.
    """

    images: np.ndarray
    labels: np.ndarray
    kinds: np.ndarray
    classes: tuple[str, ...]
    card: ReleaseCard
    ledger: Records
    path: Path
    cost: KnownCost

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        height, width, channels = self.images.shape[1:]
        shape = f"{len(self)} images of {height}×{width}×{channels} ({kinds_text(self.card)})"
        classes = f"{len(self.classes)} classes: {', '.join(self.classes)}"
        units = " and ".join(self.cost["units"])
        cost = (
            f"ε = {self.cost['epsilon']:.4g} at δ = {self.cost['delta']:.3g}, for {units}, "
            f"{self.cost['basis']}"
        )
        return f"<Release {self.path}: {shape}\n {classes}\n {cost}>"

    def prepare(self, picture: str | Path | np.ndarray) -> np.ndarray:
        """Prepare a picture in the same way as the sensitive pictures.

        The picture is cropped or padded, resized, and converted to grey or colour. A file is first
        rotated as its EXIF data state.

        Args:
            picture: A file, or (H, W, C) uint8 of any size.

        Returns:
            (H, W, C) uint8, with the shape of the release's images.

        Raises:
            DataError: The file cannot be read, or the array has the wrong type or shape.
        """
        return prepared(self.card, picture)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with one row per image. Needs pandas.

        The columns are `image` with (H, W, C) uint8, `label`, `class` and `kind`. If images have
        several labels, one column per label replaces `label` and `class`.
        """
        with requiring("to_pandas"):
            import pandas

        table = pandas.DataFrame({"image": list(self.images), "kind": self.kinds})
        if self.labels.ndim == 2:  # concat, because a label may be named like another column
            labels = pandas.DataFrame(np.array(self.labels), columns=list(self.classes))
            return pandas.concat([table, labels], axis=1)
        table.insert(1, "label", self.labels)
        table.insert(2, "class", [self.classes[label] for label in self.labels])
        return table

    def to_huggingface(self, path: str | Path) -> Path:
        """Write a folder that `datasets.load_dataset` reads and a hub accepts.

        It contains `card.json`, `privacy.json`, a README, and the images as Parquet. If pyarrow is
        not installed, the images are PNGs with a table.

        Args:
            path: Path of the folder to write.

        Returns:
            The same path.

        Raises:
            DataError: The path exists and is not an empty folder.
        """
        with requiring("to_huggingface"):
            import yaml

            from sfumato.data.images import ImageSet
            from sfumato.release.exports import (
                PARQUET_FILES,
                PNG,
                mark_of,
                save_parquet,
                save_png_folders,
            )
            from sfumato.storage.documents import parse_yaml

        folder = Path(path).expanduser()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} exists and is not an empty folder: name another folder")
        readme = self.path / "README.md"
        with explained(
            DataError,
            lambda error: f"{readme} has no front matter ({error!r}): fetch the release again",
        ):
            _, front, text = read_text(readme).split("---\n", 2)
            metadata = dict(parse_yaml(front))
        metadata.pop("size_categories", None)  # a hub counts the images itself
        images = ImageSet(self.images, self.labels, self.classes)
        mark = mark_of(read_json(self.path / "card.json").get("sources", ()))
        if find_spec("pyarrow") is None:
            save_png_folders(folder, images, self.kinds, mark)
            data_option = {"data_dir": PNG}
            files = f"{PNG}/"
        else:
            save_parquet(folder, images, self.kinds, mark)
            data_option = {"data_files": PARQUET_FILES}
            files = PARQUET_FILES
        write_json(folder / "card.json", self.card, ensure_ascii=False)
        shutil.copyfile(self.path / "privacy.json", folder / "privacy.json")
        metadata |= {"configs": [{"config_name": "default", **data_option}]}
        front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=120)
        text = hub_page(self, text, files)
        (folder / "README.md").write_text(f"---\n{front}---\n\n{text}", encoding="utf-8")
        return folder

    def to_torch(self, transform: Callable[[Tensor], object] | None = None) -> ReleaseDataset:
        """Return a torch `Dataset` of ((C, H, W) float32 in [0, 1], label).

        A label is an integer. If images have several labels, it is a (classes,) float32 tensor of 0
        and 1, as `binary_cross_entropy_with_logits` expects.

        Args:
            transform: Function applied to an image's tensor.
        """
        with requiring("to_torch"):
            from sfumato.release.torch_dataset import ReleaseDataset

        return ReleaseDataset(self.images, self.labels, self.classes, transform)


def kinds_text(card: ReleaseCard) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in card["kinds"].items())


def hub_page(release: Release, text: str, files: str) -> str:
    """Describe a folder that `to_huggingface` writes.

    text: README of the release. Its passages about files are left out, because the folder has
    other files; files: path or pattern of the files with images.
    """
    start, *sections = text.strip().split("\n## ")
    title, _, intro = start.partition("\n")
    intro = re.sub(r"(?m)^!\[.*", "", intro).strip()  # without grid.png, which the folder lacks
    labelling = text.rpartition("```\n")[2].strip()
    kept_sections = [section.strip() for section in sections if section.startswith(SECTIONS)]
    return read_text(Path(__file__).with_name("hub.md")).format(
        title=title,
        images=len(release),
        kinds=kinds_text(release.card),
        files=files,
        release="\n\n## ".join([f"{intro}\n\n{labelling}", *kept_sections]),
    )


def prepared(card: ClassifierCard, picture: str | Path | np.ndarray) -> np.ndarray:
    """Prepare a picture in the same way as the sensitive pictures: (H, W, C) uint8.

    card: content of `card.json`, which states how the sensitive pictures were prepared.
    """
    with requiring("prepare"):
        from sfumato.data.decoding import PictureForm, decode, fit  # needs only Pillow

    with explained(
        DataError,
        "card.json was written by an older version and does not state how pictures were "
        "prepared: ask the owner for a release made by a newer version",
    ):
        preparation = card["prepared"]
    channels, height, width = card["shape"]
    form = PictureForm(size=(height, width), channels=channels, pad=preparation["fit"] == "pad")
    image = picture
    if not isinstance(image, np.ndarray):
        with explained(
            DataError,
            lambda error: (
                f"{picture} cannot be read ({error}): name the file of a picture, "
                "or give its pixels as a NumPy array"
            ),
        ):
            image = decode(Path(image).expanduser(), preparation["range"])
    pixels = np.atleast_3d(image)
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or pixels.shape[2] not in (1, 3):
        raise DataError(
            f"the picture is {image.dtype} {image.shape}, expected uint8 (H, W), (H, W, 1) or "
            "(H, W, 3): give the path of its file, or convert it to 8 bits like the sensitive "
            'pictures. card["prepared"]["range"] contains the values that became 0 and 255'
        )
    return fit(pixels, form, "the picture")


def load_release(path: str | Path, kinds: str | Collection[str] | None = None) -> Release:
    """Load a release from a folder that `stage synthesize` wrote or that a dataset hub provides.

    Files must have the sha256 that `privacy.json` lists. Exports may be missing, and a hub may have
    added files.

    Args:
        path: Path of that folder.
        kinds: Kinds of images to keep, such as "plain" or ["plain", "public"]; None for all.

    Raises:
        DataError: The folder is not a release, a file is missing or was changed, or there are no
            images of a requested kind. It is also raised if the card and the files disagree on the
            images, classes, kinds or units, or if the card states a smaller ε than the records
            cost.
    """
    # Absolute, because methods of `Release` read files, perhaps after a change of directory
    folder = Path(path).expanduser().absolute()
    fetch = "fetch the release again"
    files, records = read_privacy(folder, fetch)
    check_bytes(folder, files, fetch)
    with explained(DataError, lambda error: f"{folder} cannot be read ({error!r}): {fetch}"):
        card = cast(ReleaseCard, dict(read_json(folder / "card.json")))
        images, labels = (read_array(folder / name) for name in ("images.npy", "labels.npy"))
        kind = np.full(len(images), "plain")  # version 0.2 wrote no kinds
        if KINDS_FILE in files:
            kind = read_array(folder / KINDS_FILE)
    with explained(
        DataError,
        lambda error: (
            f"{folder / 'card.json'} does not fit the release ({str(error).rstrip('.')}): {fetch}"
        ),
        causes=(*UNREADABLE, DataError),
    ):
        check_card(card, images, labels, kind, records)
        cost = known_cost(card, records)
        card.setdefault("kinds", {"plain": len(images)})
    classes = tuple(card["classes"])
    release = Release(images, labels, kind, classes, card, records, folder, cost)
    if kinds is None:
        return release
    if isinstance(kinds, str):
        kinds = [kinds]
    return only_kinds(release, {*kinds})


def read_privacy(folder: Path, fetch: str) -> tuple[dict[str, str], Records]:
    """Read the `privacy.json` of a release: the sha256 of each file, and the records.

    fetch: advice at the end of error messages. Raises DataError if the folder is not a release, or
    if the file cannot be read or lists a file outside of the folder.
    """
    file = folder / "privacy.json"
    if not file.is_file():
        inside = folder / "artifacts/synthesize"
        if inside.is_dir():
            raise DataError(f"{folder} is a project folder: name {inside}, its release")
        raise DataError(
            f"{folder} is not a release, because it has no {file.name}: name a folder that has "
            "this file"
        )
    with explained(DataError, lambda error: f"{file} cannot be read ({error!r}): {fetch}"):
        content = read_json(file)
        files = dict(content["files"])
        records = Records(content["records"], content.get("apart", ()))
        if wrong_keys := [key for key, record in records.items() if record["id"] != key]:
            raise ValueError(
                f"the record under the key {wrong_keys[0][:32]!r} states a different id"
            )
        stage = content["stage"]
        released = stage == "synthesize" and content["enabled"] and not content["local"]
    if not released:
        raise DataError(
            f"{folder} is the artifact of `{stage}`, not a release: name the artifact of "
            "`synthesize`"
        )
    if outside := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise DataError(
            f"{file} lists {outside[0][:80]!r}, which lies outside of {folder}: {fetch}"
        )
    return files, records


def check_bytes(folder: Path, files: Mapping[str, str], fetch: str) -> None:
    """Raise DataError if a required file is missing, or a file has another sha256 than in `files`.

    Exports may be missing. fetch: advice at the end of error messages.
    """
    exported = any((folder / name).is_dir() for name in ("parquet", "png"))
    if exported and not (folder / "images.npy").exists():
        raise DataError(
            f"{folder} is an export without images.npy: load its pictures with "
            f'`datasets.load_dataset({str(folder)!r})["train"]`, or get the release itself'
        )
    for name in ("images.npy", "labels.npy", "card.json"):
        if name not in files or not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing: {fetch}")
    for name, sha256 in files.items():
        if (
            Path(name).name != ATTRIBUTES
            and (folder / name).is_file()
            and digest_of_file(folder / name) != sha256
        ):
            raise DataError(
                f"{folder / name} no longer has the bytes that privacy.json lists: {fetch}"
            )


def only_kinds(release: Release, kinds: set[str]) -> Release:
    """Keep only the images of some kinds. Raises DataError if the release has none of a kind."""
    card = release.card
    numbers = card["kinds"]
    if missing := kinds - {*numbers}:
        raise DataError(
            f"{release.path} contains no images of kind {min(missing)!r}: choose among its kinds, "
            f"{', '.join(numbers)}"
        )
    if kinds == {*numbers}:
        return release
    chosen = np.isin(release.kinds, [*kinds])
    images = release.images[chosen]
    sources = card.get("sources", {})
    new_card: ReleaseCard = {
        **card,
        "images": len(images),
        "kinds": {name: number for name, number in numbers.items() if name in kinds},
        "sources": dict.fromkeys(sources, len(images)) if len(sources) == 1 else {},
    }
    return replace(
        release,
        images=images,
        labels=release.labels[chosen],
        kinds=release.kinds[chosen],
        card=new_card,
    )
