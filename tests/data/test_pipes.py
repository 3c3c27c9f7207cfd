"""A pipe or a socket among pictures, tables and archives is refused or skipped at once, because
reading it would never end.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from surveys import survey
from test_failing_disk import idx, prepare, tar, with_table
from test_skip import data, folder

from sfumato.data.decoding import decode
from sfumato.data.prepare import prepare_public
from sfumato.errors import DataError, SfumatoError
from sfumato.settings.data import Data, Groups, Public
from sfumato.settings.options import ALL

SECONDS = 5  # longer than any call here takes


@contextmanager
def in_time(pipe: Path) -> Iterator[None]:
    """Fail the test if something waits for `pipe` for longer than SECONDS. The wait is ended first,
    so that the test can fail.
    """
    done = threading.Event()
    waited = False

    def release() -> None:
        nonlocal waited
        while not done.wait(SECONDS):
            waited = True
            with suppress(OSError):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    watching = threading.Thread(target=release)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()
        assert not waited, f"{pipe} was waited for"


def put(kind: str, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        before = Path.cwd()
        os.chdir(place.parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place.name)
        os.chdir(before)
    return place


AMONG = [
    "cat/x.png",
    "cat/x",
    "x",
    "x.png",
    "x.dcm",
    "labels.csv",
    "metadata.csv",
    "metadata.jsonl",
    "x.csv",
    "x.txt",
]
AMONG += [
    "metadata.parquet",
    "x.parquet",
    "data/x.parquet",
    "x.tar",
    "x.zip",
    "x.npz",
    "groups.npy",
    "test/cat/x.png",
]
AMONG += ["readme", "cat/labels.csv"]


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", AMONG)
@pytest.mark.parametrize("skip", [0.0, 0.2])
def test_a_pipe_among_pictures_and_tables_is_not_waited_for(tmp_path, name, kind, skip):
    place = put(kind, folder(tmp_path / "in", broken=()) / name)
    with in_time(place), suppress(SfumatoError):
        survey(tmp_path / "in", classes=ALL, skip=skip)
    with in_time(place), suppress(SfumatoError):
        prepare(data(tmp_path / "in", skip=skip), tmp_path)
    with in_time(place), suppress(SfumatoError):
        public = Public(source="imagefolder", path=str(tmp_path / "in"), declared_public=True)
        prepare_public(public, (1, 6, 6), tmp_path / "public", tmp_path, 0)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", ["set.zip", "set.npz", "set.tar", "set.parquet", "set", "set.csv"])
def test_a_pipe_in_place_of_an_archive_is_refused(tmp_path, name, kind):
    place = put(kind, tmp_path / name)
    with in_time(place), pytest.raises((SfumatoError, OSError)):
        survey(place, classes=ALL)
    for source in ("imagefolder", "npz", "webdataset"):
        settings = Data(dataset_id="pets", source=source, path=str(place), classes=("cat", "dog"))
        with in_time(place), pytest.raises(SfumatoError):
            prepare(settings, tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", ["set.parquet", "data/set.parquet", "set.tar"])
def test_a_pipe_in_place_of_a_part_is_refused(tmp_path, name, kind):
    place = put(kind, tmp_path / "in" / name)
    with in_time(place), pytest.raises(SfumatoError, match=r"set\.(parquet|tar)"):
        survey(tmp_path / "in", classes=ALL)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", ["ids.csv", "ids.parquet", "ids.jsonl", "ids"])
def test_a_pipe_in_place_of_a_table_of_persons_is_refused(tmp_path, name, kind):
    root = folder(tmp_path / "in", broken=())
    place = put(kind, tmp_path / name)
    with in_time(place), pytest.raises(DataError, match=r"data\.groups\.csv=.*ids"):
        prepare(data(root, groups=Groups(csv=str(place))), tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_pipe_in_place_of_what_was_listed_is_refused(tmp_path, kind):
    """A pipe or socket replaces a picture that a table lists, a file in MNIST's format, or a tar
    file.
    """
    table = with_table(tmp_path / "tabled").settings
    place = put(kind, tmp_path / "tabled/in/cat/03_P3.png")
    with in_time(place), pytest.raises(DataError, match=r"row \d+, names"):
        prepare(table, tmp_path)
    numbers = idx(tmp_path).settings
    with (
        in_time(put(kind, tmp_path / "train-labels-idx1-ubyte")),
        pytest.raises(DataError, match="no folder contains all of the files"),
    ):
        prepare(numbers, tmp_path)
    shards = tar(tmp_path).settings
    with in_time(put(kind, tmp_path / "set.tar")), pytest.raises(DataError, match=r"set\.tar"):
        prepare(shards, tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_pipe_is_no_picture(tmp_path, kind):
    place = put(kind, tmp_path / "x.png")
    with in_time(place), pytest.raises(DataError, match="not a regular file"):
        decode(place)
