"""A zip of any layout, an .npz, Parquet with pictures inside: unpacked into a private folder while the program runs."""

import atexit
import shutil
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from sfumato.data.sources.splits import TEST, TRAIN, folders_in, is_test, visible
from sfumato.data.tables import FILE, METADATA, check_parquet, table_of
from sfumato.errors import UNREADABLE, DataError, explained
from sfumato.storage.documents import parse_json
from sfumato.storage.files import sync, temporary_name
from sfumato.storage.locks import file_lock, holding
from sfumato.storage.state_directory import state_dir

UNPACKED = "unpacked"  # below the state directory, in a temporary name
MADE_HERE: dict[tuple[Path, int, int], Path] = {}  # what each thread of this process has unpacked
HELD: dict[tuple[int, Path], ExitStack] = {}  # by thread and folder: the lock that shows that the process lives


def unpacked(path: Path) -> Path:
    """What a zip, a Parquet file or a folder of them holds, as a folder or the one file in it; any other path itself.

    Parquet beside a table or beside folders of pictures is let be. Raises DataError for what cannot be unpacked.
    """
    tables = [path] if path.suffix == ".parquet" and path.is_file() else []
    if path.is_dir() and table_of(path) is None and all(folder.name == "data" for folder in folders_in(path)):
        tables = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])  # as hubs have them
    if tables:
        folder = kept(path, lambda: unpack_tables(tables))
    elif path.suffix.lower() == ".zip" and path.is_file():
        with readable_zip(path, "write it again"):
            folder = kept(path, lambda: extracted(path))
    else:
        return path
    while folder.is_dir() and len(inside := visible(folder)) == 1:
        folder = inside[0]
    return unpacked(folder)


def private_folder() -> Path:
    """A new folder that vanishes when the program ends. Until then it is locked, for processes of other hosts too."""
    state = state_dir()
    remove_left(state)
    state.mkdir(0o700, parents=True, exist_ok=True)
    folder = temporary_name(state / UNPACKED)
    held = ExitStack()
    held.enter_context(holding(file_lock(folder.with_suffix(".lock"))))
    HELD[threading.get_native_id(), folder] = held
    folder.mkdir(0o700)
    atexit.register(remove, folder)
    return folder


def remove(folder: Path) -> None:
    """Delete a folder whose lock this process holds, and then the lock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


def remove_left(state: Path) -> None:
    """Delete what killed programs unpacked: nobody holds its lock."""
    for folder in state.glob(f".{UNPACKED}.*.tmp"):
        with suppress(Timeout), holding(file_lock(folder.with_suffix(".lock"), blocking=False)):
            remove(folder)


@contextmanager
def unpacking() -> Iterator[None]:
    """Delete what this thread unpacked when the block ends: a notebook runs for long after it."""
    try:
        yield
    finally:
        remove_held({key for key in HELD if key[0] == threading.get_native_id()})


def remove_unpacked(state: Path) -> None:
    """Delete what this process unpacked, and what killed ones left: a program may run on for long."""
    MADE_HERE.clear()
    remove_held({*HELD})
    remove_left(state)
    if state.is_dir():
        sync(state)


def remove_held(keys: Iterable[tuple[int, Path]]) -> None:
    for key in keys:
        with HELD.pop(key):
            remove(key[1])


def kept(path: Path, make: Callable[[], Path]) -> Path:
    """What `make` unpacks of a file or folder, once for as long as neither changes nor goes."""
    changed = max(part.stat().st_mtime_ns for part in [path, *path.glob("*.parquet"), *path.glob("data/*.parquet")])
    key = path, changed, threading.get_native_id()
    if key not in MADE_HERE or not MADE_HERE[key].exists():
        MADE_HERE[key] = make()
    return MADE_HERE[key]


def extracted(path: Path) -> Path:
    """The files of a zip, or of an .npz."""
    folder = private_folder()
    with zipfile.ZipFile(path) as archive:
        if len({*archive.namelist()}) < len(archive.namelist()):
            raise ValueError("two of its files have one name")
        archive.extractall(folder)
    return folder


def arrays_in(path: Path, fix: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz by name, memory-mapped. Raises DataError for pickles, or if it cannot be read."""
    with readable_zip(path, fix):
        files = sorted(kept(path, lambda: extracted(path)).glob("*.npy"))
        return {file.stem: np.asarray(np.load(file, mmap_mode="r", allow_pickle=False)) for file in files}


def readable_zip(path: Path, fix: str) -> AbstractContextManager[None]:
    causes = (*UNREADABLE, EOFError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error)
    # RuntimeError: it is encrypted; OverflowError, ValueError: an array claims more than there is
    return explained(DataError, lambda error: f"{path} cannot be read ({error}): {fix}", causes=causes)


def unpack_tables(tables: Sequence[Path]) -> Path:
    """A folder of pictures, with a table of the other columns; those of test and of training apart, if both are."""
    check_parquet()
    import pyarrow
    from pyarrow import parquet

    folder = private_folder()
    tested = [file for file in tables if is_test(file.name)]
    parts = {TRAIN: [file for file in tables if file not in tested], TEST: tested}
    for part, files in parts.items():
        place = folder / part if all(parts.values()) else folder
        place.mkdir(exist_ok=True)
        if rows := [row for file in files for row in unpack_table(file, place)]:
            parquet.write_table(pyarrow.Table.from_pylist(rows), place / METADATA[2])
    return folder


def unpack_table(file: Path, place: Path) -> Iterator[dict[str, Any]]:
    """Write the pictures, under their names if they have them. Yields the other cells of each, and its FILE."""
    from pyarrow import parquet

    wrong = f"{file} cannot be read as Parquet with pictures inside"
    causes = (*UNREADABLE, StopIteration, IndexError)
    with explained(DataError, lambda error: f"{wrong} ({error!r}): write it again", causes=causes):
        table = parquet.ParquetFile(file)
        schema = table.schema_arrow
        # as Hugging Face's `datasets` writes them: bytes, beside a path or alone; and the names of classes
        column = next(field.name for field in schema if str(field.type).startswith(("struct<bytes: ", "binary")))
        about = parse_json((schema.metadata or {}).get(b"huggingface", b'{"info": {"features": {}}}').decode())
        names = {key: kind.get("feature", kind).get("names") for key, kind in about["info"]["features"].items()}
        for number, row in enumerate(row for batch in table.iter_batches(64) for row in batch.to_pylist()):
            picture = row.pop(column)
            pixels, called = picture.values() if isinstance(picture, dict) else (picture, "")
            name = Path(called or "").name
            if not name.strip(".") or (place / name).exists():
                name = f"{file.stem}-{number:08d}{Path(name).suffix or '.png'}"
            (place / name).write_bytes(pixels)
            yield {key: named(value, names.get(key)) for key, value in row.items()} | {FILE: name}


def named(value: Any, names: list[str] | None) -> Any:
    """A label by its name, a list by theirs; a number below 0 stands for none."""
    if isinstance(value, list):
        return [named(one, names) for one in value]
    if names is None or value is None:
        return value
    return names[value] if value >= 0 else None
