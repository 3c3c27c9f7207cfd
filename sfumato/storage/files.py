"""Write files under a temporary name, then rename them, so that no reader finds an incomplete file,
even after a kill.
"""

import csv
import glob
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from sfumato.errors import FULL, is_failure

ATTRIBUTES = ".gitattributes"
UNTOUCHED = "* -text\n"  # without it, git on Windows changes line ends, and so the files' hashes
CLOCK_SKEW = 2.0  # Seconds by which the clocks of a file system and of processes may differ
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # First characters of a formula in a spreadsheet


def temporary_name(path: Path) -> Path:
    """Return a hidden path beside `path`, with this process's ID in its name.

    No other thread, process or container gets the same name.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file.

    If the disk, the mount or the memory fails (`is_failure`), the original error is raised, even if
    a library replaced it with its own. Raises ValueError at once for a pipe, a socket or a device,
    which may never answer.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            yield file
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not is_failure(cause):
            hidden = cause.__suppress_context__
            cause = cause.__cause__ or (None if hidden else cause.__context__)
        if cause is None:
            raise
        if isinstance(cause, OSError) and cause.filename is None and cause.errno not in FULL:
            cause.filename = str(path)
        raise cause from None


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Return the entries of a folder with names that match a pattern, sorted.

    pattern: pattern in lower case. Names match it in upper and lower case.

    Raises every OSError, even one that `Path.glob` would ignore.
    """
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if fnmatchcase(entry.name.lower(), pattern))


def entries_below(folder: Path) -> Iterator[str]:
    """Yield the path of everything below a folder, sorted within each folder.

    An unreadable folder is skipped. Raises OSError if the disk or the mount fails (`is_failure`),
    which `os.walk` would ignore.
    """

    def refuse(error: OSError) -> None:
        if is_failure(error):
            raise error

    for directory, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        yield from (os.path.join(directory, name) for name in sorted([*folders, *files]))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an error of a full disk that names no file, such as an error of `write`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file that the block writes there then replaces `path`.

    If the block fails, the temporary file is removed. Content and name are on disk when the block
    has ended: a power cut leaves either the old file or the new file, never an empty one.
    """
    make_folder(path.parent)
    sweep(path)
    temporary = temporary_name(path)
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file. Readers find the old content or the new content, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_local(path: Path, content: bytes | memoryview) -> None:
    """Write numbers or pixels of real images in mode 0600 (owner only), regardless of the umask."""
    with replacing(path) as temporary, open_private(temporary) as file:
        file.write(content)


def replace_private(path: Path, content: bytes | memoryview) -> None:
    """Write a file as `write_local` does, and set the mode of its folder to 0700."""
    make_folder(path.parent)
    path.parent.chmod(0o700)
    write_local(path, content)


def open_private(path: Path) -> BinaryIO:
    """Create a file that only its owner may read (mode 0600)."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b")


def json_text(content: object, **options: Any) -> str:
    """Format indented JSON. options: options of `json.dumps`."""
    return json.dumps(content, **{"indent": 1} | options) + "\n"


def write_json(path: Path, content: object, **options: Any) -> None:
    """Write indented JSON, under a temporary name first. options: options of `json.dumps`."""
    replace_file(path, json_text(content, **options).encode())


def csv_text(rows: Iterable[Mapping[str, object]], columns: Mapping[str, str]) -> str:
    """Format CSV with a header.

    columns: format of the values in each column, by the column's name. The value None becomes an
    empty cell. A text that a spreadsheet would read as a formula gets an apostrophe in front.
    """

    def cell(value: object, form: str) -> str:
        text = "" if value is None else format(value, form)
        if isinstance(value, str) and text.startswith(FORMULA):
            return f"'{text}"
        return text

    cells = [[cell(row[name], form) for name, form in columns.items()] for row in rows]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[cell(name, "") for name in columns], *cells])
    return text.getvalue()


def write_csv(path: Path, rows: Iterable[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    """Write the result of `csv_text`."""
    path.write_text(csv_text(rows, columns), encoding="utf-8")


@contextmanager
def replacing_directory(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty directory to write into, which replaces `path` if the block succeeds.

    Its content is flushed to disk first. If the block fails, the new directory is removed. If the
    process is killed after it has renamed the old directory and before it has renamed the new one,
    the next call restores the old directory. private: whether the directory gets the mode 0700.
    """
    make_folder(path.parent)
    clear_leftovers(path)
    aside = old_name(path)
    temporary = temporary_name(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700 if private else 0o777)
    try:
        with naming(path):
            yield temporary
            for entry in [*temporary.rglob("*"), temporary]:
                sync(entry)
        if path.is_dir() and not path.is_symlink():
            path.rename(aside)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        clear_leftovers(path)


def old_name(path: Path) -> Path:
    """Return the hidden name that a directory has while another one replaces it."""
    return path.with_name(f".{path.name}.old")


def clear_leftovers(path: Path) -> None:
    """Remove what killed processes left beside the directory `path`.

    If a process was killed while it replaced the directory, the old directory is restored.
    """
    sweep(path)
    aside = old_name(path)
    if aside.exists() and not path.exists():
        aside.rename(path)
    elif aside.exists():
        shutil.rmtree(aside, ignore_errors=True)
        sync(path.parent)


def sweep(path: Path) -> None:
    """Remove the temporary files that killed processes left beside `path`."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if is_left_over(leftover):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def is_left_over(path: Path) -> bool:
    """Return whether `path` is a `temporary_name` whose process no longer runs."""
    process = path.name.removesuffix(".tmp").rpartition(".")[2].partition("-")[0]
    if not path.name.endswith(".tmp") or not process.isdigit():
        return False
    return not is_running(int(process), path.lstat().st_ctime + CLOCK_SKEW)


def check_writable(path: Path) -> None:
    """Raise OSError if nothing can be written beside `path`.

    Leftovers of killed processes are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path)
    probe = temporary_name(path)
    probe.mkdir(exist_ok=True)
    probe.rmdir()


def is_running(process: int, since: float) -> bool:
    """Return whether the process with this ID runs, and already ran at `since`.

    `since` is in seconds since 1970. Process IDs are reused after a reboot and in every new
    container. A process that has ended, but was not collected by its parent, does not count as
    running.
    """
    import psutil

    try:
        proc = psutil.Process(process)
        return bool(proc.create_time() <= since and proc.status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:  # it runs, but belongs to another account
        return True
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents if missing. Their names are on disk when this returns."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def keep_private(directory: Path) -> None:
    """Create a folder, and let only its owner read it and its files, regardless of the umask."""
    make_folder(directory)
    directory.chmod(0o700)
    for path in directory.iterdir():
        if path.is_file():
            path.chmod(0o600)


def copy_directory(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`. The copy is on disk when this returns."""
    with replacing_directory(target) as temporary:
        try:
            shutil.copytree(source, temporary, dirs_exist_ok=True)
        except shutil.Error as error:  # its argument is a list of files and their errors
            raise OSError(
                f"{source} cannot be copied to {target}: {error.args[0][0][-1]}"
            ) from error


def delete(paths: Iterable[Path]) -> None:
    """Delete files and folders so that they stay deleted after a power cut."""
    paths = list(paths)
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths if path.parent.is_dir()}:
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
