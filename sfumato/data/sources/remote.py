"""Read shards by URL, such as s3://bucket/{0000..0999}.tar, with `fsspec`.

Local copies are private and temporary.
"""

import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from sfumato.data.sources.packed import CHUNK, MADE_HERE, private_folder
from sfumato.errors import FULL, ConfigError, DataError, SfumatoError, public, reading_sensitive
from sfumato.settings.data import is_url
from sfumato.storage.files import open_private

# Entries of fsspec's description of a file that change with the file's content
CHANGING = (
    "ETag",
    "etag",
    "Content-MD5",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "updated",
)


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server.

    state: values that change with the file's content; None if the server does not provide them.
    """

    url: str
    state: tuple[str | int, ...] | None


def remote_files(pattern: str) -> list[RemoteFile]:
    """List the files of a URL with a range {0000..0999}, alternatives {a,b}, or `*`.

    Raises DataError if there is no file, or if a file is missing or named twice. Raises ConfigError
    if the server does not answer or refuses access.
    """
    with reaching(pattern):
        system = system_of(pattern)
        urls = expand_braces(pattern)
        if "*" in pattern:
            urls = [
                system.unstrip_protocol(path) for url in urls for path in sorted(system.glob(url))
            ]
        if not urls:
            raise public(DataError(f"data.path={pattern} matches no file: correct data.path"))
        if len({*urls}) < len(urls):
            raise public(
                DataError(
                    f"data.path={pattern} names a file more than once: correct data.path, so that "
                    "it names each file once"
                )
            )
        with ThreadPoolExecutor(16) as threads:
            return [*threads.map(lambda url: remote_file(system, url), urls)]


def system_of(url: str) -> Any:
    """Return a new file system of fsspec for a URL, without cached facts about its files."""
    from fsspec.core import url_to_fs

    return url_to_fs(url, skip_instance_cache=True)[0]


def remote_file(system: Any, url: str) -> RemoteFile:
    with reaching(url):
        info = system.info(url)
    state = [str(info[name]) for name in CHANGING if info.get(name)]
    if not state:
        return RemoteFile(url, None)
    return RemoteFile(url, (int(info["size"] or 0), *state))


def expand_braces(pattern: str) -> list[str]:
    """Return the URLs that a pattern with {0000..0999} or {a,b} names."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    values = match[1].split(",")
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        values = [f"{number:0{len(span[1])}d}" for number in range(int(span[1]), int(span[2]) + 1)]
    return [
        url
        for value in values
        for url in expand_braces(pattern[: match.start()] + value + pattern[match.end() :])
    ]


@contextmanager
def local_copy(path: str) -> Iterator[Path]:
    """Yield a local path with the content of a path or URL.

    A URL is copied to a file of mode 600, which is deleted when the context `unpacking` ends.
    """
    if not is_url(path):
        yield Path(path)
        return
    reading_sensitive()
    file = private_folder() / PurePosixPath(urlsplit(path).path).name
    MADE_HERE[path, 0, threading.get_native_id()] = file
    with reaching(path), system_of(path).open(path, "rb") as remote, open_private(file) as local:
        shutil.copyfileobj(remote, local, CHUNK)
    yield file


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Replace an error about `url` with an error that does not contain the server's message.

    The server's message may repeat credentials.
    """
    try:
        yield
    except SfumatoError:
        raise
    except ImportError as error:
        raise public(
            ConfigError(
                f"{url} cannot be read without a package that is not installed ({error}): install "
                "this package (for s3://, pip install 'sfumato[s3]')"
            )
        ) from None
    except FileNotFoundError:
        raise public(
            DataError(f"{url} does not exist: correct data.path, or upload the file")
        ) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        kind = type(error).__name__
        if isinstance(error, PermissionError) or kind == "NoCredentialsError":
            raise public(
                ConfigError(
                    f"{url} cannot be accessed with these credentials ({kind}): correct them in "
                    "the environment (for s3://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or "
                    "in the credentials file of the library that reads such URLs"
                )
            ) from None
        raise public(
            ConfigError(
                f"{url} cannot be read ({kind}): check the network and the address of the "
                "server (for s3://, AWS_ENDPOINT_URL), and run the command again"
            )
        ) from None
