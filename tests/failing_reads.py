"""Make files and folders fail to open or to read, as on an unreliable mount."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

# Error number -> message, for errors of disks, mounts, networks, limits and memory
ERRNOS = {
    code: os.strerror(code) for code in (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)
}
ERRNOS |= {code: os.strerror(code) for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)}

refused: list["Refusal"] = []  # the last one is active


class Refusal:
    """Refuse to open paths that contain `text`, except for the first `after` attempts."""

    def __init__(self, text: str, code: int, after: int) -> None:
        self.text = text
        self.code = code
        self.after = after
        self.count = 0

    def check(self, path: str) -> None:
        if self.text in path:
            self.count += 1
            if self.count > self.after:
                raise OSError(self.code, os.strerror(self.code), path)


def listen(event: str, arguments: tuple) -> None:
    if (
        refused
        and event in ("open", "os.listdir", "os.scandir")
        and isinstance(arguments[0], str | bytes | os.PathLike)
    ):
        refused[-1].check(os.fsdecode(arguments[0]))


sys.addaudithook(listen)


@contextmanager
def failing_opens(text: str, code: int = errno.EIO, after: int = 0) -> Iterator[Refusal]:
    """Make files and folders fail to open if their path contains `text`.

    after: number of opens that succeed first.
    """
    refused.append(Refusal(text, code, after))
    try:
        yield refused[-1]
    finally:
        refused.pop()


@contextmanager
def failing_reads(text: str, error: type[Exception] = OSError) -> Iterator[None]:
    """Make files fail to read, though not to open, if their path contains `text`.

    The message of an OSError does not contain the file's name, as in a real failed read.
    """

    class Failing(io.FileIO):
        def fail(self, *_: object) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) if error is OSError else error()

        read = readall = readinto = fail  # type: ignore[assignment]

    usual = Path.open

    def opened(path: Path, mode: str = "r", *rest: object, **more: object) -> object:
        if text in str(path) and mode == "rb":
            return io.BufferedReader(Failing(path))
        return usual(path, mode, *rest, **more)  # type: ignore[call-overload]

    with mock.patch.object(Path, "open", opened):
        yield
