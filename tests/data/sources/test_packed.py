"""Zip archives of any layout, and Parquet files with pictures inside, are read like a folder with
the same content. They leave no files behind.
"""

import atexit
import json
import os
import stat
import zipfile
from io import BytesIO

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image
from surveys import layout_of, survey
from writers import read_all, write_folder, write_npz

from sfumato.data.images import ImageSet
from sfumato.data.sources import read_public, read_source
from sfumato.data.sources.packed import remove_unpacked
from sfumato.errors import DataError
from sfumato.release.exports import mark_of, save_parquet
from sfumato.settings.data import Data, Public

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

NAMES = ["normal", "sick"]


@pytest.fixture
def state(here, monkeypatch):
    """Yield the state directory. Then run what was registered with `atexit`, and require that no
    file is left.
    """
    ends = []
    monkeypatch.setattr(
        atexit, "register", lambda function, *given, **more: ends.append((function, given, more))
    )
    yield here / "state"
    for function, given, more in ends:
        function(*given, **more)
    assert not [path for path in (here / "state").rglob("*") if path.is_file()]


def data(path, **changes):
    return Data(source="imagefolder", path=str(path), **changes)


def zipped(folder, file):
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder.parent))
    return file


def picture(grey):
    file = BytesIO()
    Image.fromarray(np.full((6, 6), grey, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_rows(file, labels, paths=None, first=0, **columns):
    """Write pictures with labels in the form of Hugging Face's `datasets`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    paths = paths or [None] * len(labels)
    cells = [{"bytes": picture(first + i), "path": path} for i, path in enumerate(paths)]
    features = {"label": {"names": NAMES, "_type": "ClassLabel"}}
    made = pyarrow.table({"image": pyarrow.array(cells, image), "label": labels, **columns})
    parquet.write_table(
        made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}),
        file,
    )
    return file


def test_a_zip_is_unpacked_where_only_its_owner_can_read(tmp_path, state):
    write_folder(tmp_path / "set")
    plain, images, labels = read_all(data(tmp_path / "set"), tmp_path)
    file = zipped(tmp_path / "set", tmp_path / "set.zip")
    source, packed, packed_labels = read_all(data(file), tmp_path)
    assert (
        source.classes == plain.classes
        and labels == packed_labels
        and np.array_equal(images, packed)
    )
    assert survey(file, classes=("cat", "dog")).counts == (3, 3)
    (place,) = state.glob(".unpacked.*.tmp")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 and len([*place.iterdir()]) == 1


def test_an_npz_is_unpacked_once_where_only_its_owner_reads(tmp_path, state):
    archive = write_npz(tmp_path)
    for _ in range(2):
        read_all(archive, tmp_path)
    (place,) = state.glob(".unpacked.*.tmp")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_zip_may_hold_an_archive_of_arrays(tmp_path, state):
    write_npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "set.npz", "deep/in/set.npz")
    assert layout_of(tmp_path / "a.zip", None)[0]["name"] == "npz"


def test_what_a_killed_program_unpacked_is_removed_by_the_next(tmp_path, state):
    left = state / f".unpacked.{2**22 + 1}.tmp" / "x"
    left.mkdir(parents=True)
    (left / "a.png").write_bytes(b"somebody")
    write_folder(tmp_path / "set")
    read_source(data(zipped(tmp_path / "set", tmp_path / "set.zip")), tmp_path)
    assert not left.exists()


def test_what_a_program_of_another_host_has_unpacked_stays(tmp_path, state):
    """The process id of a program on another host is unused on this host, or belongs to a different
    program. But the program's lock is visible on all hosts.
    """
    theirs = state / f".unpacked.{2**22 + 1}-1.tmp"
    theirs.mkdir(parents=True)
    write_folder(tmp_path / "set")
    with FileLock(theirs.with_suffix(".lock")):
        read_source(data(zipped(tmp_path / "set", tmp_path / "set.zip")), tmp_path)
        remove_unpacked(state)
        assert theirs.exists()
    remove_unpacked(state)
    assert not [*state.glob(".unpacked.*")]


def test_files_unpacked_by_a_killed_program_are_removed(tmp_path, state):
    left = state / f".unpacked.{os.getppid()}-1.tmp"
    (left / "x").mkdir(parents=True)
    remove_unpacked(state)
    assert not left.exists()


@pytest.mark.parametrize("split", [False, True])
def test_parquet_gives_classes_persons_and_the_hold_out(tmp_path, state, split):
    people = {"Patient ID": ["p1", "p1", "p2", "p3"]}
    write_rows(tmp_path / "in/data/train-00000-of-00001.parquet", [0, 1, 1, 0], **people)
    if split:
        others = {"Patient ID": ["q1", "q2", "q3", "q3"]}
        write_rows(
            tmp_path / "in/data/test-00000-of-00001.parquet", [1, 0, 1, 0], first=4, **others
        )
    found = survey(tmp_path / "in", classes=tuple(NAMES))
    assert (found.counts, found.groups.column, found.persons) == ((2, 2), "Patient ID", 3)
    assert found.held_out == (4 if split else None) and found.data["label_column"] == "label"
    asked = data(
        tmp_path / "in", classes=NAMES, label_column="label", groups={"column": "Patient ID"}
    )
    source, images, labels = read_all(asked, tmp_path)
    assert labels == [0, 1, 1, 0] and [int(image[0, 0, 0]) for image in images] == [0, 1, 2, 3]
    assert [(int(image[0, 0, 0]), label) for image, label in source.test or ()] == [
        (4, 1),
        (5, 0),
        (6, 1),
        (7, 0),
    ][: 4 * split]


def test_picture_paths_in_parquet_show_persons_and_stay_inside(tmp_path, state):
    names = ["a/p1.png", "../../p1.png", "p2.png", "p2.png", "..", "C:\\b\\.p1.png", "/c/../p1.png"]
    file = write_rows(tmp_path / "x.parquet", [0, 1, 1, 0, 0, 0, 0], names)
    source, images, _ = read_all(data(file, classes=NAMES, label_column="label"), tmp_path)
    places = ["/".join(file.parts[-2:]) for file in source.files]
    assert places[:3] + places[5:] == [
        *("a/p1.png", "images/p1.png", "images/p2.png"),
        *("b/p1.png", "c/p1.png"),
    ]
    assert len(images) == len({*places}) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"x.parquet", "state"}


def test_pictures_with_unusable_paths_are_renamed(tmp_path, state):
    names = ["a.png", "a.png/b.png", 60 * "c/" + "d.png", f"{300 * 'e'}.png", "f\0.png", "g/h.png"]
    file = write_rows(tmp_path / "x.parquet", [0, 1, 0, 1, 0, 1], names)
    source, images, _ = read_all(data(file, classes=NAMES, label_column="label"), tmp_path)
    renamed = [f"x-{number:08d}.png" for number in range(1, 5)]
    assert sorted(path.name for path in source.files) == ["a.png", "h.png", *renamed]
    assert sorted(int(image[0, 0, 0]) for image in images) == [*range(6)]


def test_a_folder_in_a_picture_path_is_evidence_of_a_person(tmp_path, state):
    names = [f"P{i // 4:03}/scan_{i % 4}.png" for i in range(40)]
    file = write_rows(tmp_path / "x.parquet", [i % 2 for i in range(40)], names)
    assert survey(file, label_column="label").repeats.why.startswith("Each folder contains")
    assert survey(file, label_column="label", groups={"folder": True}).persons == 10


def test_a_release_in_parquet_is_read_as_what_was_released(tmp_path, state, digits):
    released = digits.take(np.arange(60))
    save_parquet(tmp_path, released, np.full(60, "plain"), mark_of(["auxiliary"]))
    asked = data(tmp_path / "parquet", classes=digits.classes, label_column="label")
    _, images, labels = read_all(asked, tmp_path)
    assert np.array_equal(images, released.images) and labels == released.labels.tolist()
    both = (
        np.eye(10, dtype=np.uint8)[released.labels]
        | np.eye(10, dtype=np.uint8)[(released.labels + 1) % 10]
    )
    several = ImageSet(released.images, both, digits.classes)
    save_parquet(tmp_path / "two", several, np.full(60, "plain"), mark_of(["auxiliary"]))
    form, _ = layout_of(tmp_path / "two/parquet", "labels")
    assert form["several"] and form["classes"] == digits.classes


def test_parquet_beside_folders_or_a_table_of_pictures_is_let_be(tmp_path, state):
    write_folder(tmp_path / "set")
    parquet.write_table(pyarrow.table({"feature": [1.0]}), tmp_path / "set/features.parquet")
    assert read_source(data(tmp_path / "set"), tmp_path).size == 6 and not state.exists()


def test_what_cannot_be_unpacked_is_one_sentence(tmp_path, state):
    (tmp_path / "a.zip").write_bytes(b"PK no zip")
    with (
        zipfile.ZipFile(tmp_path / "b.zip", "w") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr("cat/0.png", picture(0))
        archive.writestr("cat/0.png", picture(1))
    parquet.write_table(pyarrow.table({"label": [1]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    write_rows(tmp_path / "e.parquet", [0, 5])
    said = {
        "a.zip": "cannot be read .File is not a zip",
        "b.zip": "two of its files have the same name",
    }
    said["c.parquet"] = "has no column of pictures"
    for name in ("a.zip", "b.zip", "c.parquet", "d.parquet", "e.parquet"):
        with pytest.raises(
            DataError, match=said.get(name, "cannot be read as a Parquet file with pictures inside")
        ):
            read_source(data(tmp_path / name, classes=NAMES, label_column="label"), tmp_path)


def test_a_public_zip_is_refused_for_its_hidden_records(tmp_path, state):
    write_folder(tmp_path / "set")
    public = Public(source="imagefolder", path=str(zipped(tmp_path / "set", tmp_path / "set.zip")))
    with pytest.raises(DataError, match="is not a folder"):
        read_public(public, (1, 6, 6), tmp_path, 0)
