"""Unpack archives (zip, tar, .npz, Parquet with pictures) into private folders, which are deleted
when the program ends.
"""

from __future__ import annotations

import atexit
import bz2
import gzip
import lzma
import shutil
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import Timeout

from sfumato.data.decoding import decode
from sfumato.data.formats import HEAD, AnotherFormat
from sfumato.data.sources.splits import TEST, TRAIN, folders_in, is_test, visible
from sfumato.data.sources.tabled import samples_in
from sfumato.data.tables import FILE, METADATA, check_parquet, records_of, table_path
from sfumato.errors import UNREADABLE, DataError, SfumatoError, explained
from sfumato.storage.documents import parse_json
from sfumato.storage.files import files_in, reading, sync, temporary_name
from sfumato.storage.limits import (
    DEEPEST_ARCHIVE,
    DEEPEST_FOLDER,
    DISK_BLOCK,
    LARGEST_DIRECTORY,
    Allowance,
    BoundedReader,
)
from sfumato.storage.locks import file_lock, holding
from sfumato.storage.state_directory import state_dir

if TYPE_CHECKING:
    from pyarrow import DataType
    from pyarrow.parquet import ParquetFile

# Functions that open a compressed tar file, by its last suffix
COMPRESSED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((".gz", ".tgz"), gzip.open),
    **dict.fromkeys((".xz", ".txz"), lzma.open),
    **dict.fromkeys((".bz2", ".tbz2"), bz2.open),
}
CHUNK = 2**20  # bytes to inflate at a time
FIRST_CELLS = 10  # number of cells to decode, to find out whether a column contains pictures
UTF8_FLAG = 0x800  # flag in a zip: the name of this file is in UTF-8
# RuntimeError: a zip is encrypted; OverflowError, ValueError: the header of an array states more
# bytes than the file has
DAMAGED = (
    *UNREADABLE,
    EOFError,
    OverflowError,
    RuntimeError,
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
)
# Folder for the pictures of a table. `is_filing` recognises this name, so the folder does not count
# as a class
PICTURE_FOLDER = "images"
UNPACKED = "unpacked"  # folder in the state directory for unpacked archives
# Private folders with unpacked archives, and private copies of files from URLs. A key consists of
# the path or the URL, the time of the last change (0 for a URL), and the thread.
MADE_HERE: dict[tuple[Path | str, int, int], Path] = {}
# Locks of private folders, by (thread, folder). A lock shows other processes that this process
# still runs.
HELD: dict[tuple[int, Path], ExitStack] = {}


def unpacked(path: Path, allowance: Allowance | None = None, depth: int = 0) -> Path:
    """Unpack a zip, a tar file or Parquet files.

    Returns the folder with the content, or the only file in it. Any other path is returned
    unchanged. A tar file of labelled samples (WebDataset) is read in place, so it is returned
    unchanged too. If `path` is a folder, only the Parquet files that `tables_at` returns are
    unpacked. Raises DataError if unpacking fails.

    allowance: how much may still be written to disk for the outermost archive and all archives in
    it; None if `path` itself is the outermost archive;
    depth: number of archives that contain this one.
    """
    tables = tables_at(path)
    suffix = ""
    if path.is_file():
        suffix = path.suffix.lower()
    archive = suffix == ".zip" or (suffix in COMPRESSED and is_compressed_tar(path))
    if not tables and not archive and not (suffix == ".tar" and holds_folders(path)):
        return path
    if depth == DEEPEST_ARCHIVE:
        raise DataError(f"{path.name} is nested in {depth} archives: unpack it by hand.")
    allowance = allowance or Allowance(
        path, sum(file.stat().st_size for file in tables or [path]), state_dir()
    )
    if tables:
        folder = unpacked_folder(path, lambda folder: unpack_tables(tables, folder, allowance))
    elif suffix == ".tar":
        folder = unpacked_folder(path, lambda folder: extract_tar(path, folder, allowance))
    elif suffix in COMPRESSED:
        folder = unpacked_folder(
            path, lambda folder: inflate_tar(path, folder / "set.tar", allowance)
        )
    else:
        fix = "replace it with an intact copy, or unpack it by hand"
        with readable_archive(f"{path} cannot be read", fix):
            folder = unpacked_folder(path, lambda folder: extract(path, folder, allowance))
    while folder.is_dir() and len(entries := visible(folder)) == 1:
        folder = entries[0]
    return unpacked(folder, allowance, depth + 1)


def tables_at(path: Path) -> list[Path]:
    """Return the Parquet files to unpack: the path itself, or all Parquet files of a folder.

    Returns an empty list if the folder also contains a table of labels (see `table_path`), or a
    folder other than `data`.
    """
    if path.suffix.lower() == ".parquet" and path.is_file():
        return [path]
    if (
        path.is_dir()
        and table_path(path) is None
        and all(folder.name == "data" for folder in folders_in(path))
    ):
        return parquet_in(path)
    return []


def parquet_in(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder and of its folder `data`, which Hugging Face uses."""
    return sorted([*files_in(folder, "*.parquet"), *files_in(folder / "data", "*.parquet")])


def private_folder() -> Path:
    """Create and lock a private folder, which is deleted when the program ends.

    Processes on this and other hosts delete folders that killed programs have left. They do not
    delete a locked folder.
    """
    state = state_dir()
    remove_left(state)
    state.mkdir(0o700, parents=True, exist_ok=True)
    folder = temporary_name(state / UNPACKED)
    stack = ExitStack()
    stack.enter_context(holding(file_lock(folder.with_suffix(".lock"), thread_local=False)))
    HELD[threading.get_native_id(), folder] = stack
    folder.mkdir(0o700)
    atexit.register(remove_locked, folder)
    return folder


def remove_locked(folder: Path) -> None:
    """Delete a folder that this process has locked, and then the lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


def remove_left(state: Path) -> None:
    """Delete the private folders that killed programs have left.

    The operating system releases the locks of a killed program. A folder is deleted only if its
    lock is free.
    """
    for folder in state.glob(f".{UNPACKED}.*.tmp"):
        with suppress(Timeout), holding(file_lock(folder.with_suffix(".lock"), blocking=False)):
            remove_locked(folder)


@contextmanager
def unpacking() -> Iterator[None]:
    """Delete the private folders that this thread created, when the block ends.

    Otherwise, they would stay until the program ends, and a notebook may run for days.
    """
    try:
        yield
    finally:
        remove_held({key for key in HELD if key[0] == threading.get_native_id()})


def remove_unpacked(state: Path) -> None:
    """Delete the private folders of this process and of killed processes now, not when this process
    ends.
    """
    MADE_HERE.clear()
    remove_held({*HELD})
    remove_left(state)
    if state.is_dir():
        sync(state)


def remove_held(keys: Iterable[tuple[int, Path]]) -> None:
    for key in keys:
        with HELD.pop(key):
            remove_locked(key[1])


def unpacked_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """Return a private folder with the content of `path`, which `fill` writes.

    `fill` is called on the first call, and again if `path` has changed or the private folder has
    disappeared. If `fill` fails, the folder is deleted.
    """
    modified = max(part.stat().st_mtime_ns for part in [path, *parquet_in(path)])
    key = path, modified, threading.get_native_id()
    if key not in MADE_HERE or not MADE_HERE[key].exists():
        folder = private_folder()
        try:
            fill(folder)
        except BaseException:
            remove_held({(threading.get_native_id(), folder)})
            raise
        MADE_HERE[key] = folder
    return MADE_HERE[key]


def extract(path: Path, folder: Path, allowance: Allowance) -> None:
    """Write the files of a zip or an .npz into a folder.

    `allowance` is checked against the sizes in the zip's central directory before anything is
    written. No file becomes longer than its size there.
    """
    with (
        reading(path),
        BoundedReader(path, LARGEST_DIRECTORY) as file,
        zipfile.ZipFile(file) as archive,
    ):
        entries = archive.infolist()
        for entry in entries:
            # Some Windows programs separate folders by backslashes
            entry.filename = utf8_name(entry).replace("\\", "/")
        if len({entry.filename for entry in entries}) < len(entries):
            raise ValueError("two of its files have the same name")
        for entry in entries:
            if entry.filename.count("/") > DEEPEST_FOLDER:
                raise ValueError(f"its folders are more than {DEEPEST_FOLDER} levels deep")
            allowance.take(entry.file_size)
        for entry in entries:
            archive.extract(entry, folder)


def utf8_name(entry: zipfile.ZipInfo) -> str:
    """Return the name of a file in a zip.

    macOS writes names in UTF-8 without setting UTF8_FLAG, so `zipfile` decodes them as cp437.
    """
    if not entry.flag_bits & UTF8_FLAG:
        with suppress(UnicodeError):
            return entry.filename.encode("cp437").decode()
    return entry.filename


def is_compressed_tar(path: Path) -> bool:
    """Return whether a compressed file contains a tar file, by its content or, if that is damaged,
    by its name.
    """
    with suppress(*DAMAGED), COMPRESSED[path.suffix.lower()](path) as file:
        return bool(file.read(HEAD)[257:262] == b"ustar")
    return path.suffix.lower().startswith(".t") or ".tar." in path.name.lower()


def inflate_tar(path: Path, target: Path, allowance: Allowance) -> None:
    """Write the tar file that a compressed file contains."""
    with (
        readable_archive(f"{path} cannot be read as a tar file"),
        reading(path),
        COMPRESSED[path.suffix.lower()](path) as file,
        target.open("wb") as tar,
    ):
        while chunk := file.read(CHUNK):
            allowance.take(len(chunk))
            tar.write(chunk)


def holds_folders(path: Path) -> bool:
    """Return whether a tar file has class folders: some entry is in a folder, and no sample has a
    `.cls` or `.json`.
    """
    with suppress(DataError, *DAMAGED):
        if not any({"cls", "json"} & sample.keys() for sample in samples_in(path)):
            with tarfile.open(path, mode="r:") as archive:
                return any(PurePosixPath(member.name).parent.name for member in archive)
    return False


def extract_tar(path: Path, folder: Path, allowance: Allowance) -> None:
    """Write the files of a tar file into a folder.

    `samples_in` has already refused links and devices. Paths outside of the folder are refused
    here, because Python before 3.11.4, as in Debian 12, has no filter for them.
    """
    home = folder.resolve()
    with (
        readable_archive(f"{path} cannot be read as a tar file"),
        reading(path),
        BoundedReader(path, LARGEST_DIRECTORY) as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        for entry in archive:
            if entry.name.count("/") > DEEPEST_FOLDER:
                raise ValueError(f"its folders are more than {DEEPEST_FOLDER} levels deep")
            target = (home / entry.name.lstrip("/")).resolve()
            if not target.is_relative_to(home):
                raise ValueError(f"{entry.name} would lie outside of the folder")
            if entry.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            allowance.take(entry.size)
            target.parent.mkdir(parents=True, exist_ok=True)
            if (content := archive.extractfile(entry)) is None:
                raise ValueError(f"{entry.name} is a link or a device")
            with content, target.open("wb") as copy:
                shutil.copyfileobj(content, copy)


def readable_archive(
    message: str, fix: str = "replace it with an intact copy"
) -> AbstractContextManager[None]:
    return explained(DataError, lambda error: f"{message} ({error}): {fix}", causes=DAMAGED)


def in_archives(text: str) -> str:
    """Replace the private folders in a text by the paths of the archives that were unpacked into
    them, and escape bytes of file names that are not UTF-8.
    """
    for (path, *_), folder in reversed(MADE_HERE.items()):  # the innermost folder first
        text = text.replace(str(folder), str(path))
    return text.encode(errors="backslashreplace").decode()


@contextmanager
def naming_archives() -> Iterator[None]:
    """Change the errors in the block: name the owner's archives instead of the private folders into
    which they were unpacked.
    """
    try:
        yield
    except SfumatoError as error:
        error.args = tuple(in_archives(str(part)) for part in error.args)
        texts = {key: value for key, value in error.values.items() if isinstance(value, str | Path)}
        error.values |= {key: in_archives(str(value)) for key, value in texts.items()}
        raise


def arrays_in(path: Path, fix: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz by name, memory-mapped.

    fix: advice at the end of the error message.

    Raises DataError if the archive contains pickles or cannot be read.
    """
    with readable_archive(f"{path} cannot be read", fix):
        allowance = Allowance(path, path.stat().st_size, state_dir())
        files = sorted(
            unpacked_folder(path, lambda folder: extract(path, folder, allowance)).glob("*.npy")
        )
        return {
            file.stem: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
            for file in files
        }


def unpack_tables(tables: Sequence[Path], folder: Path, allowance: Allowance) -> None:
    """Write the pictures of Parquet tables, and a table with the columns that contain no pictures.

    If there are files for training and for testing, each part gets its own folder and table.
    """
    check_parquet()
    import pyarrow
    from pyarrow import parquet

    test_files = [file for file in tables if is_test(file.name)]
    parts = {TRAIN: [file for file in tables if file not in test_files], TEST: test_files}
    for part, files in parts.items():
        target = folder / part if all(parts.values()) else folder
        target.mkdir(exist_ok=True)
        if rows := [row for file in files for row in unpack_table(file, target, allowance)]:
            parquet.write_table(pyarrow.Table.from_pylist(rows), target / METADATA[2])


def unpack_table(file: Path, folder: Path, allowance: Allowance) -> Iterator[dict[str, object]]:
    """Write the pictures of a Parquet table into `folder`.

    The table may state a path for each picture. This path is used if possible.

    Yields one dict per row: the cells of the columns without pictures, and the path of the
    picture's file below `folder`, with the key FILE.
    """
    from pyarrow import parquet, types

    message = f"{file} cannot be read as a Parquet file with pictures inside"
    causes = (*UNREADABLE, IndexError)
    with (
        explained(
            DataError,
            lambda error: f"{message} ({error!r}): replace it with an intact copy",
            causes=causes,
        ),
        reading(file),
        ExitStack() as stack,
    ):
        table = stack.enter_context(parquet.ParquetFile(file, buffer_size=2**20))
        groups = (table.metadata.row_group(i) for i in range(table.num_row_groups))
        allowance.require(
            max(
                table.metadata.num_rows * DISK_BLOCK, sum(group.total_byte_size for group in groups)
            )
        )
        schema = table.schema_arrow
        binary = [field for field in schema if holds_bytes(field.type)]
        if not binary:
            raise DataError(
                f"{file} has no column of pictures: write the bytes of the pictures into a column, "
                "as Hugging Face's `datasets` does"
            )
        pictures = [
            field.name
            for field in binary
            if types.is_struct(field.type) or contains_pictures(table, field.name, file, folder)
        ] or [field.name for field in binary]
        column = pictures[0]  # other columns of pictures, such as masks, are left out
        # Hugging Face's `datasets` writes the names of classes into the metadata
        metadata = parse_json(
            (schema.metadata or {}).get(b"huggingface", b'{"info": {"features": {}}}').decode()
        )
        names = {
            key: kind.get("feature", kind).get("names")
            for key, kind in metadata["info"]["features"].items()
        }
        other_columns = [field.name for field in schema if field.name not in pictures]
        home = folder / PICTURE_FOLDER
        home.mkdir(exist_ok=True)
        for number, row in enumerate(records_of(table, other_columns, str(file), column)):
            picture = row.pop(column)
            pixels = picture
            stated_path = ""
            if isinstance(picture, dict):
                pixels = picture["bytes"]
                stated_path = picture.get("path") or ""
            if pixels is None:
                raise DataError(
                    f"{file}, row {number + 1}, has no picture: write the picture's bytes, or "
                    "remove the row"
                )
            allowance.take(len(pixels))
            try:
                target = home / path_below(stated_path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch(exist_ok=False)
            except (OSError, ValueError):  # the path is empty, in use, or too long for a file
                suffix = PureWindowsPath(stated_path).suffix or ".png"
                target = home / f"{file.stem}-{number:08d}{suffix}"
            target.write_bytes(pixels)
            cells = {key: label_name(value, names.get(key)) for key, value in row.items()}
            yield cells | {FILE: target.relative_to(folder).as_posix()}


def path_below(path: str) -> str:
    """Convert a path of any operating system to a relative path.

    Each ".." and the dots at the start of names are removed. The folders are kept, because a folder
    may belong to one person. Raises ValueError for too many folders.
    """
    whole = PureWindowsPath(path)  # a separator is / or \
    parts = [*filter(None, (part.lstrip(".") for part in whole.relative_to(whole.anchor).parts))]
    if len(parts) > DEEPEST_FOLDER:
        raise ValueError(f"its folders are more than {DEEPEST_FOLDER} levels deep")
    return "/".join(parts)


def holds_bytes(kind: DataType) -> bool:
    """Return whether the cells of a column are bytes, or structs with a field `bytes`.

    Hugging Face's `datasets` stores pictures in such structs.
    """
    from pyarrow import types

    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def contains_pictures(table: ParquetFile, column: str, file: Path, folder: Path) -> bool:
    """Return whether one of the first cells of a column is a picture.

    A column of bytes may also contain ids.

    file: path of the table; folder: place for a temporary file with the content of a cell.
    """
    picture = temporary_name(folder / file.name)
    for row in islice(records_of(table, [], str(file), column), FIRST_CELLS):
        picture.write_bytes(row[column] or b"")
        try:
            decode(picture, (0, 1))
            return True
        except AnotherFormat:
            return True
        except DataError:
            continue
        finally:
            picture.unlink()
    return False


def label_name(value: Any, names: list[str] | None) -> Any:
    """Return a label's name, or the names of a list of labels. A number below 0 means no label.

    Bytes are returned as text.
    """
    if isinstance(value, list):
        return [label_name(item, names) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if names is None or value is None:
        return value
    if value < 0:
        return None
    return names[value]
