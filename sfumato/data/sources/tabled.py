"""List pictures whose labels are in a table or in tar files (WebDataset), not in folder names."""

import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL.Image import registered_extensions

from sfumato.data.decoding import Member, PictureFile
from sfumato.data.deep import is_dicom
from sfumato.data.formats import link_format
from sfumato.data.sources.bids import is_bids, rows_of_volumes
from sfumato.data.sources.source import Listing, Place, Request
from sfumato.data.sources.splits import is_test, split_of, visible
from sfumato.data.tables import (
    BETWEEN,
    FILE,
    METADATA,
    TABLE_SUFFIXES,
    TABLES,
    cell_text,
    heads_of,
    rows_by_file,
    table_in,
    table_path,
)
from sfumato.data.volumes import is_volume
from sfumato.errors import UNREADABLE, DataError, explained
from sfumato.settings.data import Volume
from sfumato.settings.fields import composed
from sfumato.storage.documents import parse_json
from sfumato.storage.files import files_in, reading
from sfumato.storage.limits import LARGEST_DIRECTORY, BoundedReader

VALUES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
LABEL = "label"  # default name of the column, or of the key, with the label
Sample = dict[str, Member]  # the files of a sample, by suffix


def list_metadata(request: Request, label: str) -> Listing:
    """List the pictures of a folder with a table (see `table_in`), or of a BIDS folder.

    The table has the column that `label` names, and perhaps a column of persons' ids. Another
    column names the pictures (see `heads_of`) or, in a BIDS folder, the participants. Each part of
    the folder (see `split_of`) may have its own table. Raises DataError if the path is not a
    folder. Also raises the errors of `table_cells` and `encode_labels`.
    """
    path = request.required_path()
    if not path.is_dir():
        raise DataError(
            f"data.path={path} is not a folder: expected a folder with pictures and {METADATA[0]}."
        )
    held_out = split_of(path)[1]
    rows = [
        Place(file, text, person, any(map(file.is_relative_to, held_out)))
        for file, (text, person) in table_cells(
            path, [label, request.id_column or label], request.volume
        ).items()
    ]
    return encode_labels(rows, bool(held_out), request)


def column_of(
    path: Path, column: str, files: Iterable[PictureFile], volume: Volume | None = None
) -> list[str]:
    """Return each file's cell in `column`; "" for a file without a row.

    Raises the errors of `table_cells`.
    """
    rows: Mapping = table_cells(path, [column], volume)
    return [rows.get(file, [""])[0] for file in files]


def table_cells(
    path: Path, columns: Sequence[str], volume: Volume | None = None
) -> dict[Path, list[str]]:
    """Map each picture of a folder to its cells in `columns`, from the tables of the folder.

    Raises DataError if a table is missing. Also raises the errors of `table_in`, `heads_of` and
    `rows_by_file`. For a BIDS folder, raises the errors of `participants_of` and `rows_of_volumes`.
    """
    if is_bids(path):
        return rows_of_volumes(path, columns, (volume or Volume()).suffix)
    train, test = split_of(path)
    rows = dict[Path, list[str]]()
    for part in [path] if table_in(path) else train + test:
        if (table := table_in(part)) is None:
            for suffix in TABLE_SUFFIXES:
                for unused_table in files_in(part, f"[!.]*{suffix}"):
                    heads_of(unused_table)  # raises DataError if it cannot be read
            expected = ", ".join([FILE, *columns])
            raise DataError(
                f"{part} contains none of {', '.join(METADATA)}: write one of them, with the "
                f"columns {expected}."
            )
        table_columns = [heads_of(table)[0], *columns]
        rows |= rows_by_file(table, table_columns, pictures_below(part), part, files_below(part))
    return rows


def files_below(root: Path) -> Iterator[Path]:
    """Yield every visible file below a folder: first its own files by name, then each subfolder's.

    Links to folders are not followed.
    """
    entries = visible(root)
    yield from (entry for entry in entries if not entry.is_dir())
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            yield from files_below(entry)


def pictures_below(root: Path) -> list[Path]:
    """Return the pictures, DICOM files and volumes below a folder, and links of git-annex or DVC to
    missing content.
    """
    return [
        file
        for file in files_below(root)
        if is_picture(file) or (link_format(file) and not file.exists())
    ]


def is_picture(file: Path) -> bool:
    pictures = registered_extensions().keys() - {".pdf"}  # Pillow can write, but not read PDFs
    by_name = file.suffix.lower() in pictures or is_volume(file)
    return file.is_file() and (by_name or is_dicom(file))


def list_labels(request: Request) -> Listing:
    """List each picture of a folder with its labels, (classes,) uint8 of 0 and 1, and its person's
    id, if there is one.

    The labels are in a table beside the pictures. By default, the table has one column of 0 and 1
    per label: the columns that `request.classes` names, or all columns except file names and ids.
    If `label_column` is set, each cell of that column lists the labels of one picture. Class names
    are the names of the columns, or `request.classes`, so they do not depend on the images. Raises
    DataError if the table is unsuitable.
    """
    root = request.required_path()
    table = table_path(root)
    column = request.label_column
    id_column = request.id_column
    if table is None:
        raise DataError(
            f"the setting `data.labels: several` requires a table, but data.path={root} contains "
            f"none of {', '.join(TABLES)}: write one of them, with the column {FILE} and one "
            "column of 0 and 1 per label."
        )
    files = pictures_below(root)
    file_column, other_columns = heads_of(table)
    classes = request.classes or tuple(name for name in other_columns if name != id_column)
    rows = rows_by_file(
        table,
        (file_column, *([column] if column else classes), id_column or file_column),
        files,
        root,
    )
    places: list[Place] = []
    for file in files:
        *cells, person = rows[file]
        cells = [cell.strip() for cell in cells]
        if column:
            picture_labels = {*labels_listed(cells[0])}
            if not picture_labels <= {*classes}:
                raise DataError(
                    f"{table} lists a label that is not in data.classes: add all labels to "
                    "data.classes"
                )
            row = [int(name in picture_labels) for name in classes]
        elif {*cells} <= {*VALUES}:
            row = [VALUES[cell] for cell in cells]
        else:
            raise DataError(
                f"{table} has a cell that is neither 0 nor 1 in a label column: write 0 or 1 in "
                "each cell, even if the label is uncertain. If the table also has other columns, "
                "name the label columns in data.classes: [a, b, …]"
            )
        places.append(Place(file, np.array(row, dtype=np.uint8), person))
    return Listing(classes, places)


def labels_listed(cell: str) -> list[str]:
    return [part.strip() for part in cell.split(BETWEEN) if part.strip()]


def encode_labels(rows: list[Place], official: bool, request: Request) -> Listing:
    """Replace the labels of rows, which are text, by the numbers of classes.

    The classes are `request.classes` or, if that is None, all labels that occur. In the second
    case, the classes depend on the images. A label may be the name of a class, with or without
    spaces around it. If no class has a number as its name, a label may also be the number of a
    class, from 0.

    official: whether there is a test split.

    Raises DataError for an empty or unknown label.
    """
    rows = sorted(rows, key=lambda row: row.held_out)
    labels = [row.label for row in rows]
    classes = request.classes or classes_in([label.strip() for label in labels])
    labels = [label if label in classes else label.strip() for label in labels]
    if "" in labels:
        raise DataError(
            f"{request.path}: picture {labels.index('') + 1} has no label: add one. Pictures are "
            "counted in the order of the table or the tar files, and hold-out pictures come last"
        )
    numbers = {text: i for i, text in enumerate(classes)}
    if not any(name.isdecimal() for name in classes):
        numeric_labels = {text: int(text) for text in labels if text.isdecimal() and len(text) < 10}
        numbers |= {
            text: number for text, number in numeric_labels.items() if number < len(classes)
        }
    if unknown := next((text for text in labels if text not in numbers), None):
        raise DataError(
            f"{request.path} contains the label {unknown[:40]!r}, which is not in data.classes: "
            "add all labels to data.classes."
        )
    places = [row._replace(label=numbers[label]) for row, label in zip(rows, labels, strict=True)]
    return Listing(classes, places, official)


def classes_in(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels that occur, sorted. The result depends on the images, so only the owner may
    publish it.
    """
    return tuple(sorted({*labels}, key=int if all(text.isdecimal() for text in labels) else None))


def shards_of(path: Path) -> list[Path]:
    """Return the tar file at a path, or all tar files in a folder.

    Raises DataError if there are none.
    """
    if path.is_file():
        return [path]
    shards = files_in(path, "*.tar")
    if not shards:
        raise DataError(
            f"data.path={path} is neither a tar file nor a folder with tar files (*.tar): correct "
            "the path."
        )
    for file in shards:
        if not file.is_file() or not file.resolve().is_relative_to(path.resolve()):
            raise DataError(
                f"{file} must be a file, or a link to a file in {path}: copy the shard into {path}."
            )
    return shards


def list_shards(request: Request) -> Listing:
    """List the samples of tar files. A sample is a picture with a `.cls` or a `.json`.

    The label is the name or the number of a class. If `request.label_column` is set, the label is
    the value of this key in the .json. Otherwise it is the content of the .cls or, if there is no
    .cls, the value of `label` in the .json. If `request.id_column` is set, the person's id is the
    value of this key in the .json.

    If there are several tar files, the files that `is_test` recognises by name are the hold-out.
    Raises DataError with the position of a faulty sample.

    Guarantee: nothing is unpacked, and links within an archive are refused.
    """
    rows: list[Place] = []
    shards = shards_of(request.required_path())
    for shard in shards:
        held_out = len(shards) > 1 and is_test(shard.name)
        for number, sample in enumerate(samples_in(shard), 1):
            sample_name = f"{shard}: sample {number}"
            pictures = [
                member
                for suffix, member in sample.items()
                if f".{suffix}" in registered_extensions()
            ]
            if len(pictures) != 1:
                raise DataError(
                    f"{sample_name} has {len(pictures)} pictures: expected exactly one. The "
                    f"suffixes of its files are {', '.join(sorted(sample))}."
                )
            words = sample_words(sample, request.label_column, request.id_column, sample_name)
            rows.append(Place(pictures[0], *words, held_out))
    return encode_labels(rows, any(row.held_out for row in rows), request)


def samples_in(shard: Path) -> Iterable[Sample]:
    """Return the samples of a tar file.

    A sample consists of files with the same name up to the first dot. Hidden files are skipped.
    """
    samples: dict[str, Sample] = {}
    message = (
        f"{shard} cannot be read as a plain tar file: write it without compression, or use a "
        "folder, .zip or .npz."
    )
    causes = (*UNREADABLE, tarfile.TarError, EOFError, OverflowError, RecursionError)
    with (
        explained(DataError, message, causes=causes),
        reading(shard),
        BoundedReader(shard, LARGEST_DIRECTORY) as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        for number, entry in enumerate(archive, 1):
            if entry.isdir():
                continue
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.sparse:
                raise DataError(
                    f"{shard}: entry {number} is a link, a device or a sparse file: store the file "
                    "itself instead."
                )
            folder, _, last = entry.name.rpartition("/")
            key, _, suffix = last.partition(".")
            member = Member(shard, entry.offset_data, entry.size, f"{key}.{suffix.lower()}")
            if (
                key
                and samples.setdefault(f"{folder}/{key}", {}).setdefault(suffix.lower(), member)
                is not member
            ):
                raise DataError(
                    f"{shard}: entry {number} has the same name as an earlier entry, apart from "
                    "capitals in the suffix: remove one of the two files."
                )
        file.seek(archive.offset)
        if any(file.read(tarfile.BLOCKSIZE)) or archive.offset > shard.stat().st_size:
            count = len(archive.getmembers())
            raise DataError(
                f"{shard} is cut short, or damaged after entry {count}: replace it with an intact "
                "copy"
            )
    return samples.values()


def sample_words(
    sample: Sample, label: str | None, group: str | None, name: str
) -> tuple[str, str]:
    """Return the label and the person's id from a sample's `.cls` and `.json`.

    label, group: keys of the label and of the id in the .json, or None; name: the name of the
    sample, for errors. A missing id is "".

    Raises DataError if the label is missing, or if the label or the id is neither text nor a whole
    number.
    """
    content: dict = {}
    if "json" in sample and (label or group or "cls" not in sample):
        with explained(DataError, f"{name} has a .json that is not a JSON object: correct it."):
            content = json_of(sample)
    if label is None and "cls" in sample:
        with explained(DataError, f"{name} has a .cls that is not a line of text: correct it."):
            content[LABEL] = text_of(sample["cls"]).strip()
    text = cell_text(content.get(composed(label or LABEL)))
    person = cell_text(content.get(group and composed(group)))
    if person is None:
        raise DataError(
            f"{name}: `{group}` in the .json is neither text nor a whole number: correct it."
        )
    if not text and label is None:
        raise DataError(
            f"{name}: the label is missing, or neither text nor a whole number. Give it in a .cls, "
            f"or as `{LABEL}` in the .json."
        )
    if not text:
        raise DataError(
            f"{name}: the label `{label}` in the .json is missing, or neither text nor a whole "
            "number: correct it."
        )
    return text, person


def text_of(member: Member) -> str:
    if member.size > 1_000_000:  # bytes
        raise ValueError("it is too large")
    return member.opened().read().decode("utf-8")


def json_of(sample: Sample) -> dict[str, object]:
    """Return the content of a sample's .json. {"a": {"b": 1}} becomes {"a.b": 1}.

    The keys are in the composed form of Unicode.
    """
    content = flatten(dict(parse_json(text_of(sample["json"]))))
    return {composed(key): value for key, value in content.items()}


def flatten(content: dict) -> dict[str, object]:
    flattened: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flattened |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            flattened[key] = value
    return flattened
