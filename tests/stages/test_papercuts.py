"""Small mistakes of a user, each answered by one sentence that says what to do."""

import errno
import os
import sys

import numpy as np
import pytest
from PIL import Image

from sfumato.data.decoding import decode
from sfumato.data.prepare import split
from sfumato.data.sources import Source
from sfumato.errors import DataError
from stages.cli import beyond_the_machine


@pytest.mark.parametrize("command", ["init ~nosuch/x --epsilon 1 --yes", "prepare sensitive"])
def test_the_home_of_nobody_is_one_sentence(desk, command):
    desk.params(recipe="dp-merf", data={"source": "imagefolder", "dataset_id": "a", "path": "~nosuch/x"})
    desk.run(command, "begins with ~", code=4)


def test_who_stops_a_stage_is_told_what_goes_on_and_what_starts_again(desk, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.prepare.load_params", stop)
    desk.run("prepare sensitive", "a query goes on and is not charged twice, anything else starts again", code=130)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\u202eb", os.fsdecode(b"a\xff")])
def test_init_refuses_the_class_names_that_prepare_refuses(desk, tmp_path, name):
    for folder in (name, "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "in" / folder / "1.png")
    text = desk.run("init in --epsilon 5 --yes --out out", "not a valid class name", "Rename it", code=4)
    assert "\x1b" not in text and "\u202e" not in text


def test_equal_images_that_are_all_held_out_are_called_that(tmp_path):
    image = np.zeros((4, 4, 1), np.uint8)
    source = Source(("a", "b"), [(image, i % 2) for i in range(100)], None, 100)
    with pytest.raises(DataError, match="no sensitive image: equal images .* stay together"):
        split(source, bytes(32), 1.0, tmp_path)


def test_delta_is_rounded_up_on_every_page(desk):
    """1 / (3600 ln 3600) is 3.3922e-5."""
    desk.params(recipe="dpdm", privacy={"size_hint": 3600})
    desk.run("prepare sensitive")
    desk.run("plan", "δ = 3.4e-05")


def test_permission_denied_says_which_command_gives_it(tmp_path):
    said = beyond_the_machine(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "x")))
    assert said.endswith(f"Permission denied. Give yourself access: chmod u+rwX {tmp_path / 'x'}")
    assert "chmod" not in beyond_the_machine(OSError(errno.ENOENT, "No such file", "x"))


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_a_fully_transparent_picture_is_refused_and_a_partly_transparent_one_is_not(tmp_path, mode):
    pixels = np.full((4, 4, len(mode)), 200, np.uint8)
    pixels[..., -1] = 0
    Image.fromarray(pixels, mode).save(tmp_path / "clear.png")
    with pytest.raises(DataError, match=r"clear\.png is fully transparent"):
        decode(tmp_path / "clear.png")
    pixels[0, 0, -1] = 255
    Image.fromarray(pixels, mode).save(tmp_path / "part.png")
    assert decode(tmp_path / "part.png").max() == 200


def test_parquet_without_its_library_is_refused_by_the_plan(desk, monkeypatch):
    desk.params(recipe="dp-merf", synthesize={"export": ["parquet"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    desk.run("plan", "sfumato[parquet]", code=2)
