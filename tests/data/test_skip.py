"""Broken pictures, up to a share that the owner sets, are left out one by one, listed, and never
named in a log.
"""

import itertools
import os
import stat
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from program import Terminal
from surveys import survey

from sfumato.data import shards
from sfumato.data.left_out import still_broken
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.sources import read_source
from sfumato.data.store import load_prepared, read_card
from sfumato.errors import DataError
from sfumato.settings.data import Data, Groups
from sfumato.settings.options import ALL

BROKEN = ("cat/00_P0.png", "cat/05_P1.png", "dog/19_P3.png")  # the first, one in between, the last


def folder(root: Path, broken=BROKEN, spare=True) -> Path:
    """Write 40 pictures of four persons in two classes. A picture's value is its number; the files
    `broken` contain no picture. With `spare=False`, one picture is missing.
    """
    for kind, i in itertools.product(("cat", "dog"), range(20)):
        file = root / kind / f"{i:02}_P{i % 4}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if f"{kind}/{file.name}" in broken:
            file.write_bytes(b"no picture")
        elif spare or (kind, i) != ("cat", 1):
            Image.new("L", (6, 6), 100 * (kind == "dog") + i).save(file)
    return root


def data(root: Path, **more) -> Data:
    return Data(dataset_id="pets", source="imagefolder", path=str(root), **more)


def values(source) -> list[int]:
    return [int(image[0, 0, 0]) for image, _ in source.train]


def test_one_more_broken_picture_than_allowed_is_refused(tmp_path):
    root = folder(tmp_path / "in")
    source = read_source(data(root, skip="7.5%"), tmp_path)  # three of forty
    assert values(source) == [v for v in (*range(20), *range(100, 120)) if v not in (0, 5, 119)]
    assert [left.file for left in source.left_out.values()] == [root / name for name in BROKEN]
    assert all(str(left.file) in left.reason for left in source.left_out.values())
    for share in ("7%", 0.0, "0%"):
        with pytest.raises(DataError, match="3 files cannot be used") as error:
            values(read_source(data(root, skip=share), tmp_path))
        assert all(name in str(error.value) for name in BROKEN)


def test_a_file_that_is_no_picture_is_not_counted(tmp_path):
    root = folder(tmp_path / "in", broken=())
    (root / "cat" / "notes.txt").write_text("no picture")
    assert survey(root, skip=0.1, classes=ALL, one_image_each=True).images == 40
    source = read_source(data(root, skip=0.1), tmp_path)
    assert values(source) == [*range(20), *range(100, 120)] and len(source.left_out) == 1


@pytest.mark.parametrize(
    "share, value", [("1%", 0.01), ("29%", 0.29), ("0.5 %", 0.005), (0.25, 0.25), ("0.25", 0.25)]
)
def test_a_share_may_be_written_with_a_percent_sign(share, value):
    assert data(Path("in"), skip=share).skip == value


@pytest.mark.parametrize("share", ["one", "100%", "-1%", 1, "%", "nan%", None])
def test_another_share_is_refused(share):
    with pytest.raises(ValueError, match="skip"):
        data(Path("in"), skip=share)
    with pytest.raises(
        ValueError, match=r"data\.skip applies only to data\.source imagefolder, webdataset"
    ):
        Data(source="digits", skip="1%")


def test_leaving_out_is_of_one_picture_only(tmp_path):
    """If one intact picture is removed, the same broken pictures are left out, and all other
    pictures stay the same.
    """
    ways = {"skip": "10%", "size": 6, "channels": 1}
    first, second = (
        read_source(data(folder(tmp_path / str(spare), spare=spare), **ways), tmp_path)
        for spare in (True, False)
    )
    assert values(first) == sorted([*values(second), 1])
    assert first.left_out and len(first.left_out) == len(second.left_out) == 3


def test_a_picture_of_another_size_is_never_left_out(tmp_path):
    root = folder(tmp_path / "in", broken=())
    Image.new("L", (9, 6)).save(root / "dog/10_P2.png")
    with pytest.raises(DataError, match=r"set data\.size"):
        values(read_source(data(root, skip="10%"), tmp_path))
    tifffile.imwrite(root / "dog/10_P2.png", np.zeros((6, 6), np.uint16))
    with pytest.raises(DataError, match="range"):
        values(read_source(data(root, skip="10%"), tmp_path))


@pytest.mark.parametrize("parts", [False, True])
def test_persons_keep_their_pictures_where_others_are_left_out(tmp_path, parts):
    root = folder(tmp_path / "in" / "train" if parts else tmp_path / "in")
    if parts:
        for kind, i in itertools.product(("cat", "dog"), range(4)):
            (root.parent / "test" / kind).mkdir(parents=True, exist_ok=True)
            Image.new("L", (6, 6), 200 + i).save(root.parent / "test" / kind / f"{i}_Q{i}.png")
        (root.parent / "test/cat/0_Q0.png").write_bytes(b"no picture")
    (root / "cat/notes.txt").write_text("no picture, and of nobody")
    (root / "dog/list.csv").write_text("file,group\n")
    ways = {"groups": Groups(pattern=r"_([PQ]\d)"), "holdout_fraction": 0.4}
    asked = data(tmp_path / "in", skip="20%", **ways)
    prepare_sensitive(asked, tmp_path / "state", tmp_path / "card.json", tmp_path)
    card = read_card(tmp_path / "card.json")
    sets = [load_prepared(tmp_path / "state", card, part) for part in ("sensitive", "holdout")]
    assert sum(map(len, sets)) == 37 + 7 * parts
    for image_set in sets:
        of_image = image_set.images[:, 0, 0, 0].astype(int) % 100 % 4  # the number of its person
        pairs = {*zip(of_image.tolist(), image_set.groups.tolist(), strict=True)}
        assert len(pairs) == len({*of_image.tolist()}) == len({*image_set.groups.tolist()})
    listed = tmp_path / "state/data/pets/left_out.txt"
    assert (
        stat.S_IMODE(listed.stat().st_mode) == 0o600
        and len(listed.read_text().splitlines()) == 5 + parts
    )
    assert all(name in listed.read_text() for name in (*BROKEN, "notes.txt", "list.csv"))
    with pytest.raises(DataError):
        read_source(data(tmp_path / "in", **ways), tmp_path)


def test_strays_beyond_the_share_are_refused_by_name(tmp_path):
    root = folder(tmp_path / "in", broken=())
    for name in ("a.txt", "b.csv"):
        (root / "cat" / name).write_text("no picture")
    groups = Groups(pattern=r"_(P\d)")
    with pytest.raises(DataError, match=r"2 files cannot be used:\n.*a\.txt .*\n.*b\.csv "):
        read_source(data(root, skip="3%", groups=groups), tmp_path)
    assert len(read_source(data(root, skip="5%", groups=groups), tmp_path).groups) == 40


def test_conversions_are_counted_once_on_a_terminal_only(tmp_path):
    root = folder(tmp_path / "in")
    for i in range(3):
        Image.new("RGB", (6, 6), (9, i, 0)).save(root / "cat" / f"1{i}_P0.png")
    # Grey, but saved in colour: not counted as made grey
    Image.new("RGB", (6, 6), (9, 9, 9)).save(root / "cat/13_P0.png")
    Image.new("L", (9, 6), 7).save(root / "dog/10_P2.png")
    for terminal, fit in itertools.product((False, True), ("crop", "pad")):
        asked = data(root, skip="10%", size=6, channels=1, fit=fit)
        with redirect_stderr(Terminal() if terminal else StringIO()) as screen:
            prepare_sensitive(
                asked, tmp_path / f"{terminal}{fit}", tmp_path / "card.json", tmp_path
            )
        said = [
            line
            for line in screen.getvalue().splitlines()
            if " made grey" in line or "left out" in line
        ]
        way = "cropped to the middle: 1" if fit == "crop" else "padded with black: 1"
        listed = tmp_path / f"{terminal}{fit}" / "data/pets/left_out.txt"
        expected = f"colour pictures made grey: 3, {way}, left out (listed in {listed}): 3"
        assert len(said) == terminal and all(line.endswith(expected) for line in said)


def test_a_survey_leaves_out_like_preparation_for_its_share(tmp_path):
    root = folder(tmp_path / "in")
    state = tmp_path / "state"
    state.mkdir()
    assert survey(root, classes=ALL, skip=0.1, state=state).data == {"skip": 0.1}
    with pytest.raises(DataError, match="3 files"):
        survey(root, classes=ALL, state=state)


@pytest.mark.parametrize("block", [2**20, 10])
def test_names_that_are_not_utf_8_are_prepared_and_listed(tmp_path, monkeypatch, block):
    """The person P1 gets a name in Latin-1. A file of this person is broken."""
    monkeypatch.setattr(shards, "BLOCK_SIZE", block)
    root = folder(tmp_path / "in")
    for file in root.rglob("*_P1.png"):
        file.rename(os.fsdecode(os.fsencode(file).replace(b"P1", b"M\xfcller")))
    groups = Groups(pattern=r"_(.+)\.png")
    asked = data(root, skip="10%", groups=groups, holdout_fraction=0.4)
    prepare_sensitive(asked, tmp_path / "state", tmp_path / "card.json", tmp_path)
    card = read_card(tmp_path / "card.json")
    parts = [load_prepared(tmp_path / "state", card, part) for part in ("sensitive", "holdout")]
    assert [sum(map(len, parts)), sum(len({*part.groups.tolist()}) for part in parts)] == [37, 4]
    home = tmp_path / "state/data/pets"
    assert "05_M\\udcfcller.png" in (home / "left_out.txt").read_text()
    assert still_broken(home, asked)
