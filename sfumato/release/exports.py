"""Write image sets in other formats: `.npz`, folders of PNGs, Parquet, tar files."""

import io
import itertools
import json
import re
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.data.tables import check_parquet
from sfumato.release.card_check import PUBLIC_SOURCE, source_type
from sfumato.storage.files import FORMULA, csv_text, replace_file
from sfumato.storage.png import png_bytes

PNG = "png"
PARQUET = "parquet/train-00000-of-00001.parquet"  # Dataset hubs name the parts of a split this way
PARQUET_FILES = "parquet/*.parquet"
SHARD = 2**30  # Maximum bytes of pixels in a Parquet or tar file
SOURCE_TYPE = "Iptc4xmpExt:DigitalSourceType"
# Article 50 of the EU's AI Act requires a machine-readable mark in generated pictures.
# In exported files, the mark is IPTC's digital source type, in this XMP packet.
XMP = Path(__file__).with_name("mark.xmp").read_text(encoding="utf-8").strip("\n")
# Maximum bytes of a class name in the name of a file or folder. File systems allow names of 143 to
# 255 bytes, and temporary names are about 35 bytes longer
CLASS_BYTES = 100
# Names that Windows reserves for devices, with or without an extension
DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³]) *(\..*)?", re.IGNORECASE)
ROWS_PER_GROUP = 1000  # Rows of a Parquet file that a writer or reader has in memory at a time


@dataclass(frozen=True)
class Mark:
    """A statement about the origin of images, which is written into the files of a release.

    source_type: address of a term in IPTC's vocabulary, or None if the images were not generated.
    """

    source_type: str | None
    description: str
    everywhere: bool = False  # whether to write the mark into all files, not only PNG and Parquet

    @property
    def xmp(self) -> str:
        element = ""
        if self.source_type:
            element = f"<{SOURCE_TYPE}>{self.source_type}</{SOURCE_TYPE}>"
        return XMP.format(source_type=element, description=escape(self.description))

    @property
    def metadata(self) -> dict[str, str]:
        return {"description": self.description, SOURCE_TYPE: self.source_type or "not generated"}


def mark_of(sources: Collection[str]) -> Mark:
    """Return the mark of images from these sources.

    A mixture of generated and public images has one mark, the same for all its files.
    """
    if set(sources) == {PUBLIC_SOURCE}:
        return Mark(None, "A public image, privately selected and labelled. Not generated.")
    text = "AI-generated image. Drawn by a model that was trained with differential privacy."
    if PUBLIC_SOURCE in sources:
        text = (
            "From a set of AI-generated images and of public images, privately selected and "
            "labelled."
        )
    return Mark(source_type(sources), text)


def save_npz(directory: Path, image_set: ImageSet, kinds: np.ndarray, mark: Mark) -> None:
    """Write one archive: `images` (N, H, W, C) uint8, `labels`, `classes` and `kinds`.

    If `mark.everywhere` is true, the mark is written as the comment of the zip archive.
    """
    archive = io.BytesIO()
    classes = np.array(image_set.classes, dtype=np.str_)
    np.savez_compressed(
        archive, images=image_set.images, labels=image_set.labels, classes=classes, kinds=kinds
    )
    if mark.everywhere:
        with zipfile.ZipFile(archive, "a") as zip_file:
            zip_file.comment = mark.xmp.encode()
    replace_file(directory / "images.npz", archive.getvalue())


def shards(images: np.ndarray, max_files: int | None = None) -> list[range]:
    """Divide the images equally among files with at most SHARD bytes of pixels each.

    Returns the range of images in each file.

    max_files: maximum number of files. If more would be needed, files exceed SHARD bytes instead.
    """
    number = -(-images.nbytes // SHARD) or 1
    number = min(number, max_files or number)
    edges = [len(images) * i // number for i in range(number + 1)]
    return [range(*pair) for pair in itertools.pairwise(edges)]


def label_columns(label: int | list[int], classes: Sequence[str]) -> dict[str, object]:
    """Return an image's row in a table of labels, by column.

    The columns are the number and the name of its class or, if `label` is a list, one column per
    class with 0 or 1.
    """
    if isinstance(label, list):
        return dict(zip(classes, label, strict=True))
    return {"label": label, "class": classes[label]}


def save_webdataset(directory: Path, image_set: ImageSet, kinds: np.ndarray, mark: Mark) -> None:
    """Write tar files with `<index>.png` and `<index>.json` for each image.

    The JSON contains `kind`, `label` and `class`. With several labels per image, it contains
    `labels` instead of `label` and `class`.
    """
    folder = directory / "webdataset"
    folder.mkdir(parents=True, exist_ok=True)
    comment = {"comment": mark.xmp} if mark.everywhere else {}
    for shard, rows in enumerate(shards(image_set.images)):
        with tarfile.open(folder / f"train-{shard:05d}.tar", "w", pax_headers=comment) as file:
            for i in rows:
                label = image_set.labels[i]
                metadata: dict[str, object] = {"kind": str(kinds[i])}
                if image_set.labels.ndim == 2:
                    metadata["labels"] = [
                        image_set.classes[index] for index in np.flatnonzero(label)
                    ]
                else:
                    metadata |= {"label": int(label), "class": image_set.classes[label]}
                picture = png_bytes(image_set.images[i], mark.xmp)
                for end, content in (
                    ("png", picture),
                    ("json", json.dumps(metadata, ensure_ascii=False).encode()),
                ):
                    entry = tarfile.TarInfo(f"{i:08d}.{end}")
                    entry.size = len(content)
                    file.addfile(entry, io.BytesIO(content))


def save_parquet(directory: Path, image_set: ImageSet, kinds: np.ndarray, mark: Mark) -> None:
    """Write tables with one row per image: `image`, `label` or `labels`, and `kind`.

    `image` has the PNG's bytes and an empty path. The schema describes the columns for Hugging
    Face's `datasets`, so that `load_dataset` returns pictures and class names. The same set always
    gives the same bytes. Raises ConfigError if pyarrow is not installed.
    """
    check_parquet()
    import pyarrow
    from pyarrow import parquet

    name = "label"
    number = pyarrow.int64()
    feature: dict[str, object] = {"names": list(image_set.classes), "_type": "ClassLabel"}
    labels = image_set.labels.tolist()
    if image_set.labels.ndim == 2:
        name = "labels"
        number = pyarrow.list_(number)
        feature = {"feature": feature, "_type": "Sequence"}
        labels = [np.flatnonzero(row).tolist() for row in image_set.labels]
    features = {
        "image": {"_type": "Image"},
        "kind": {"dtype": "string", "_type": "Value"},
        name: feature,
    }
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema(
        [("image", image), (name, number), ("kind", pyarrow.string())],
        metadata={"huggingface": json.dumps({"info": {"features": features}}, ensure_ascii=False)}
        | mark.metadata,
    )
    (directory / PARQUET).parent.mkdir(parents=True, exist_ok=True)
    files = shards(image_set.images)
    for shard, indices in enumerate(files):
        path = directory / PARQUET_FILES.replace("*", f"train-{shard:05d}-of-{len(files):05d}")
        # No compression, because PNGs are already compressed.
        with (
            path.open("wb") as file,
            parquet.ParquetWriter(file, schema, compression="none") as writer,
        ):
            for start in range(indices.start, indices.stop, ROWS_PER_GROUP):
                rows = []
                for i in range(start, min(start + ROWS_PER_GROUP, indices.stop)):
                    picture = {"bytes": png_bytes(image_set.images[i], mark.xmp), "path": None}
                    rows.append({"image": picture, name: labels[i], "kind": str(kinds[i])})
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def save_png_folders(directory: Path, image_set: ImageSet, kinds: np.ndarray, mark: Mark) -> None:
    """Write one PNG per image, `<class>/<index>.png`, and `metadata.csv` with one row per image.

    The columns are file_name, label, class and kind. Sorted by name, the folders are in the order
    of the labels, as torchvision expects. The folder of a class without images is empty; git and
    DVC do not store it. If images have several labels, all images are in one folder, and the table
    has one column per label in place of label and class.
    """
    classes = image_set.classes
    folders = folder_names(classes)
    columns: tuple[str, ...] = ("file_name", "label", "class", "kind")
    if image_set.labels.ndim == 2:
        columns = ("file_name", "kind", *classes)
        folders = ("",)
    for folder in folders:
        (directory / PNG / folder).mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (image, label) in enumerate(
        zip(image_set.images, image_set.labels.tolist(), strict=True)
    ):
        name = f"{i:06d}.png"
        if image_set.labels.ndim == 1:
            name = f"{folders[label]}/{name}"
        (directory / PNG / name).write_bytes(png_bytes(image, mark.xmp))
        rows.append(label_columns(label, classes) | {"file_name": name, "kind": str(kinds[i])})
    replace_file(
        directory / PNG / "metadata.csv", csv_text(rows, dict.fromkeys(columns, "")).encode()
    )


def folder_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Return one valid folder name per class, in alphabetical order.

    A folder has the name of its class. Characters that file names cannot contain are replaced by
    "_", and the name is cut to CLASS_BYTES. In four cases, every name begins with the number of the
    class and a hyphen: if the names are not in alphabetical order; if a name was cut; if a name is
    empty, looks like a spreadsheet formula or is reserved by Windows; or if two names are equal,
    apart from upper and lower case and the encoding of accents.
    """
    safe = [re.sub(r'[\x00-\x1f/\\:*?"<>|]', "_", name).strip(" .") for name in classes]
    short = [name.encode()[:CLASS_BYTES].decode(errors="ignore").rstrip(" .") for name in safe]
    distinct_names = {unicodedata.normalize("NFC", name.casefold()) for name in short}
    valid = all(
        name and not name.startswith(FORMULA) and not DEVICE.fullmatch(name) for name in short
    )
    if valid and short == safe == sorted(safe) and len(distinct_names) == len(short):
        return tuple(short)
    digits = len(str(len(classes) - 1))
    return tuple(f"{label:0{digits}d}-{name}".rstrip("-") for label, name in enumerate(short))


# Functions that write a release in a further format, by the name of the format in params.yaml
EXPORTS: dict[str, Callable[[Path, ImageSet, np.ndarray, Mark], None]] = {
    "png": save_png_folders,
    "npz": save_npz,
    "parquet": save_parquet,
    "webdataset": save_webdataset,
}
