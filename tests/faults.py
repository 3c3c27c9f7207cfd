"""Faults in a stage that `forked_stages` runs: a kill, Ctrl-C, no memory or a full disk, at a
chosen moment.

The environment variable FAULT, which `fault` builds, requests a fault. Each entry of the journal
has four moments. They are counted over all stages that run with this variable. The project's code
does not contain any of this.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

import file_faults
import safetensors.torch

from sfumato.storage.journal import Journal

KINDS = ("kill", "interrupt", "memory", "full")
# Moments of a journal entry. within: half of the entry is written; unanchored: it is written, but
# the stored head is still the previous entry's
MOMENTS = ("before", "within", "unanchored", "after")
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "memory": signal.SIGUSR1}


def fault(folder: Path, state: Path, kind: str = "", number: int = 0) -> dict[str, str]:
    """Return the variable FAULT for a fault at moment `number`, counted from 1; 0 means no fault.

    folder: gets the file `moments`, with one line per moment. While it contains a file `full`, the
    disk of `state` is full.
    """
    for name in ("moments", "full"):
        (folder / name).unlink(missing_ok=True)
    return {"FAULT": json.dumps([str(folder), str(state), kind, number])}


def install(folder: str, state: str, kind: str, number: int) -> None:
    """Install the fault in this process. It cannot be removed."""
    if kind == "file":  # `number` counts file events
        return file_faults.install(folder, number)
    moments = Path(folder, "moments")
    full = Path(folder, "full")
    append = Journal._append
    write = os.write
    flush = os.fsync
    save = safetensors.torch.serialize_file
    cut = False  # whether to cut the next line of the journal

    def reached(name: str) -> bool:
        with moments.open("a") as file:
            file.write(f"{name}\n")
        return len(moments.read_text().splitlines()) == number

    def strike() -> None:
        if kind == "full":
            full.touch()
        elif kind == "memory":
            raise MemoryError
        else:
            signal.raise_signal(SIGNALS[kind])

    def needs_room(path: str | Path) -> None:
        if full.exists() and Path(path).absolute().is_relative_to(state):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def append_entry(journal: Journal, salt: bytes, before: str, entry: str, fields: dict) -> None:
        nonlocal cut
        if reached(f"{entry} before"):
            strike()
        cut = reached(f"{entry} within")
        append(journal, salt, before, entry, fields)
        if reached(f"{entry} after"):
            strike()

    def write_bytes(descriptor: int, content: bytes) -> int:
        nonlocal cut
        needs_room(path_of(descriptor))
        if cut:
            cut = False
            written = write(descriptor, content[: len(content) // 2])
            strike()
            return written
        return write(descriptor, content)

    def flush_file(descriptor: int) -> None:
        needs_room(path_of(descriptor))
        flush(descriptor)

    def save_file(tensors: object, path: str, metadata: object = None) -> None:
        try:
            needs_room(path)
        except OSError as error:  # as the library reports it
            raise safetensors.SafetensorError(
                f"Error while serializing: I/O error: {error}"
            ) from error
        save(tensors, path, metadata)

    def listen(event: str, about: tuple) -> None:
        if event == "os.rename" and str(about[1]).endswith(".journal") and reached("unanchored"):
            strike()
        if event == "os.mkdir" or (
            event == "open" and about[2] & os.O_CREAT and not isinstance(about[0], int)
        ):
            path = os.fsdecode(about[0])
            if not os.path.exists(path):
                needs_room(path)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    Journal._append = append_entry
    os.write = write_bytes
    os.fsync = flush_file
    safetensors.torch.serialize_file = save_file
    sys.addaudithook(listen)
    signal.signal(SIGNALS["memory"], out_of_memory)


def path_of(descriptor: int) -> str:
    """Return the path of an open file, or /dev/null if the system does not provide it."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.devnull
