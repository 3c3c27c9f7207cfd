"""Simulate a kill, or a power cut, at a chosen file event of a process.

An event is any of these operations below one folder: open a file for writing, write, flush, rename,
remove, create a folder, change a mode. The process ends just before the event with the chosen
number. If this event is a write, half of it is done first, except for safetensors files. Up to two
copies are left beside the folder, as a power cut at that moment could leave the files:

- `<folder>.emptied` has every name. Each file has the content that was last flushed, or is empty if
  none was.
- `<folder>.lost` is the same, but each folder has only the names that it had when the folder itself
  was last flushed.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import safetensors.torch

from sfumato.data import prepare

EMPTIED = ".emptied"
LOST = ".lost"
EVENTS = "events"  # file beside the folder, with one line per event
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
KILLED = 137


class Disk:
    """A record of the names and contents below a folder that would survive a power cut."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[int, bytes] = {}  # last flushed content of each inode
        # Inode of a folder -> inode of each name in it, as last flushed
        self.names: dict[int, dict[str, int]] = {}
        self.modes: dict[int, int] = {}
        self.removed: list[int] = []  # open descriptors, so that no inode is reused
        for path in (folder, *folder.rglob("*")):
            self.flush(path)

    def flush(self, path: Path) -> None:
        status = path.lstat()
        self.modes[status.st_ino] = status.st_mode
        if path.is_dir():
            self.names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            for entry in os.scandir(path):
                self.modes.setdefault(entry.inode(), entry.stat(follow_symlinks=False).st_mode)
        elif path.is_file():
            self.contents[status.st_ino] = path.read_bytes()

    def keep(self, path: str) -> None:
        """Open a file that is about to be removed or replaced, so that its inode is not reused."""
        if os.path.lexists(path):
            self.removed.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))

    def cut_power(self) -> None:
        """Write the two copies. Leaves out a copy that would equal the present files."""
        emptied: dict[str, bytes | None] = {}  # None stands for a folder
        now: dict[str, bytes | None] = {}
        for path in self.folder.rglob("*"):
            name = str(path.relative_to(self.folder))
            now[name] = None if path.is_dir() else path.read_bytes()
            emptied[name] = None if path.is_dir() else self.contents.get(path.stat().st_ino, b"")
        lost: dict[str, bytes | None] = {}
        waiting = [("", self.folder.stat().st_ino)]
        while waiting:
            above, folder = waiting.pop()
            for name, inode in self.names.get(folder, {}).items():
                is_folder = stat.S_ISDIR(self.modes[inode])
                lost[above + name] = None if is_folder else self.contents.get(inode, b"")
                if is_folder:
                    waiting.append((f"{above}{name}/", inode))
        for end, files in ((EMPTIED, emptied), (LOST, lost)):
            if files != now:
                self.write(Path(f"{self.folder}{end}"), files)

    def write(self, copy: Path, files: dict[str, bytes | None]) -> None:
        copy.mkdir()
        for name in sorted(files):
            content = files[name]
            if content is None:
                (copy / name).mkdir(0o700)
            else:
                (copy / name).write_bytes(content)
                private = 0o600 if "state" in name.split("/") else 0o644
                (copy / name).chmod(private)


def install(folder: str, number: int) -> None:
    """Install the fault in this process. It cannot be removed.

    number: event at which the process ends; 0 to only count the events.
    """
    # No file counts as just changed, so the events do not depend on the speed of the machine
    prepare.FRESH = 0.0
    disk = Disk(Path(folder))
    seen = 0
    over = False
    events = Path(folder + "." + EVENTS).open("w", buffering=1)  # noqa: SIM115
    flush = os.fsync
    end = os._exit
    serialize = safetensors.torch.serialize_file
    write = os.write

    def finish(code: int) -> None:
        nonlocal over
        if not over:
            over = True
            if number:
                disk.cut_power()
        end(code)

    def reached(event: str, path: str, begin: Callable[[], object] = lambda: None) -> None:
        """Count an event, and end the process at the chosen one. begin: function for half the
        event.
        """
        nonlocal seen
        if over or not path.startswith(folder + "/"):
            return
        seen += 1
        events.write(f"{event} {path[len(folder) + 1 :]}\n")
        if seen == number:
            begin()
            finish(KILLED)

    class Raw(io.FileIO):
        def write(self, content: bytes) -> int:  # type: ignore[override]
            half = memoryview(content)[: len(content) // 2]
            reached("write", path_of(self.fileno()), lambda: io.FileIO.write(self, half))
            return super().write(content)

    def opened(
        file,
        mode="r",
        buffering=-1,
        encoding=None,
        errors=None,
        newline=None,
        closefd=True,
        opener=None,
    ):
        if not {*mode} & {*"wax+"} or buffering == 0:
            return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return binary
        text = io.TextIOWrapper(binary, encoding, errors, newline, buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    def write_bytes(descriptor: int, content: bytes) -> int:
        half = content[: len(content) // 2]
        reached("write", path_of(descriptor), lambda: write(descriptor, half))
        return write(descriptor, content)

    def flush_file(descriptor: int) -> None:
        path = path_of(descriptor)
        reached("flush", path)
        flush(descriptor)
        if path.startswith(folder) and not over and os.path.exists(path):
            disk.flush(Path(path))

    def serialize_file(tensors: object, path: str, metadata: object = None) -> None:
        reached("write", os.path.abspath(path))
        serialize(tensors, path, metadata)

    def listen(event: str, about: tuple) -> None:
        if over:
            return
        if (
            event == "open"
            and isinstance(about[0], str | bytes | os.PathLike)
            and about[2] & WRITES
        ):
            reached("open", located(about[0]))
        elif event == "os.rename":
            path = located(about[1], about[3])
            reached("rename", path)
            if path.startswith(folder):
                disk.keep(path)
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.chmod"):
            path = located(about[0], about[2] if event in ("os.mkdir", "os.chmod") else about[1])
            reached(event[3:], path)
            if event in ("os.remove", "os.rmdir") and path.startswith(folder):
                disk.keep(path)

    plain = io.open
    builtins.open = io.open = opened  # type: ignore[assignment]
    os.write, os.fsync, os._exit = write_bytes, flush_file, finish  # type: ignore[assignment]
    safetensors.torch.serialize_file = serialize_file
    sys.addaudithook(listen)


def path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.devnull


def located(path: object, folder: int = -1) -> str:
    """Return the absolute path that an event is about.

    folder: descriptor of the folder that the path is relative to, or -1 for the current folder.
    """
    if isinstance(path, int):
        return path_of(path)
    above = path_of(folder) if folder != -1 else os.getcwd()
    return os.path.normpath(os.path.join(above, os.fsdecode(path)))  # type: ignore[arg-type]
