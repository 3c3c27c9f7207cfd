"""Decoding in several threads gives the pictures, order and messages of one thread. The threads end
when reading stops.
"""

import errno
import threading
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from program import Terminal

from sfumato.data import decoding
from sfumato.data.decoding import decoded
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.sources.source import Request
from sfumato.errors import DataError, SfumatoError
from sfumato.settings.data import Data, Groups

REQUEST = {"section": "data", "name": "imagefolder", "path": None, "size": (6, 6), "channels": 1}


def pictures(root: Path, broken=()) -> list[Path]:
    """Write 90 pictures of 30 persons in three classes, some in colour and some not square. The
    files `broken` contain no picture.
    """
    for i in range(90):
        file = root / "abc"[i // 30] / f"P{i % 30:02}_{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if i in broken:
            file.write_bytes(b"no picture")
        else:
            shape = (8, 8 + i % 3, 3)[: 2 + i % 2]
            Image.fromarray(np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)).save(
                file
            )
    return sorted(root.glob("*/*"))


@pytest.mark.parametrize(
    "skip, broken", [("5%", (0, 44, 89)), ("1%", (3, 50, 88)), (0.0, ()), ("5%", (7,))]
)
def test_any_number_of_threads_gives_the_same_bytes(tmp_path, monkeypatch, skip, broken):
    pictures(tmp_path / "in", broken)
    ways = {
        "size": 6,
        "channels": 1,
        "skip": skip,
        "version": "one",
        "groups": Groups(pattern=r"(P\d+)_"),
    }
    data = Data(dataset_id="set", source="imagefolder", path=str(tmp_path / "in"), **ways)
    outcomes = []
    for threads in (1, 2, 4):
        state = tmp_path / f"state{threads}"
        (state / "keys").mkdir(parents=True)
        (state / "keys/set").write_bytes(b"k" * 32)
        monkeypatch.setattr(decoding, "DECODERS", threads)
        try:
            with redirect_stderr(Terminal()):  # on a terminal, messages name files
                prepare_sensitive(data, state, tmp_path / "card.json", tmp_path)
            message = ""
        except DataError as error:
            message = str(error)
        home = state / "data/set"
        kept = {str(file.relative_to(home)): file.read_bytes() for file in home.rglob("*.*")}
        said = {name: value for name, value in kept.items() if name != "listing"}
        outcomes.append((message, said, (tmp_path / "card.json").exists()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert bool(outcomes[0][0]) == (skip == "1%")


def test_conversions_are_counted_once(tmp_path, monkeypatch):
    files = pictures(tmp_path / "in")
    counted = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(decoding, "DECODERS", threads)
        request = Request(**REQUEST)
        assert len([*decoded(files, request)]) == 90
        counted.append(dict(request.converted))
    assert (
        counted[0]
        == counted[1]
        == counted[2]
        == {"colour pictures made grey": 45, "cropped to the middle": 60}
    )


def test_an_unreadable_file_is_not_called_a_broken_picture(tmp_path, monkeypatch):
    files = pictures(tmp_path / "in")

    def refused(path, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError) as error:
        list(decoded(files, Request(**REQUEST, skip=1.0)))
    assert error.value.filename == str(files[0]), "the first failure stops it, even with skip"


def test_who_reads_no_further_ends_them_all(tmp_path):
    before = threading.active_count()
    images = decoded(pictures(tmp_path / "in"), Request(**REQUEST))
    assert [next(images) for _ in range(5)] and threading.active_count() > before
    images.close()
    assert threading.active_count() == before


def test_a_missing_range_ends_reading_as_in_one_thread(tmp_path, monkeypatch):
    """A 16-bit picture without a range ends the reading with an error, so that `stage init` asks
    for the range. With one thread and with two, the error comes after the same picture.
    """
    files = pictures(tmp_path / "in")
    Image.fromarray(np.zeros((6, 6), np.uint16)).save(files[40])
    files[20].write_bytes(b"no picture")
    raised = []
    for threads in (1, 2):
        monkeypatch.setattr(decoding, "DECODERS", threads)
        with pytest.raises(SfumatoError) as error:
            for number, image in enumerate(decoded(files, Request(**REQUEST))):
                assert isinstance(image, DataError) == (number == 20)
        raised.append((type(error.value), str(error.value), number))
    assert raised[0] == raised[1] and raised[0][2] == 39
