"""Whether the files of a source are those that were prepared last: by names, sizes and times, without reading them."""

import hmac
import json
import os
import stat
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from sfumato.errors import reading_sensitive
from sfumato.settings.data import Data
from sfumato.storage.digest import canonical

PREPARE_REVISION = 2  # raise it when the same source would be stored differently
FRESH = 2.0  # seconds: a file that changed so shortly before may change again without its time showing it


def listing_of(data: Data, key: bytes) -> str | None:
    """A keyed digest of what decides a prepared set: settings, PREPARE_REVISION, and every file that they name or hold.

    A file counts by name, size, inode and the times of its last change: of its content, and of its status, which no
    program can set back. None without a path, if a file changed just now, or if there is a link.
    """
    named = [data.path, data.groups.csv] if data.groups is not None else [data.path]
    paths = [Path(name).expanduser().resolve() for name in named if name is not None]
    if data.path is None or not all(path.exists() for path in paths):
        return None
    reading_sensitive()
    decides = {"data": data.model_dump(mode="json"), "path": str(paths[0]), "revision": PREPARE_REVISION}
    mac = hmac.new(key, canonical(decides), "sha256")
    latest = time.time_ns() - int(FRESH * 1e9)
    for name, status in chain.from_iterable(map(statuses, paths)):
        if stat.S_ISLNK(status.st_mode) or max(status.st_ctime_ns, status.st_mtime_ns) > latest:
            return None
        entry = [name, status.st_mode, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        mac.update(json.dumps(entry).encode())
    return mac.hexdigest()


def statuses(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file, folder and link at and below `path`, in the order of their names."""
    yield str(path), path.stat()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted([*folders, *files]):
            file = os.path.join(folder, name)
            yield file, os.lstat(file)
