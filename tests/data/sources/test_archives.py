"""Archives and tables as owners have them. They are read, or refused with advice that works when
followed.
"""

import io
import tarfile
import zipfile

import numpy as np
import pyarrow
import pytest
from bombs import MEGABYTE
from pyarrow import parquet
from surveys import survey
from writers import read_all, write_folder, write_idx

from sfumato.data.prepare import prepare_sensitive
from sfumato.errors import DataError
from sfumato.settings.data import Data, Groups
from sfumato.settings.options import ALL


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "set", per_class=12)


def packed(file, folder, mode="w:gz"):
    with tarfile.open(file, mode) as archive:
        archive.add(folder, "set")
    return file


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.xz", "tar.bz2"])
def test_a_tar_file_of_class_folders_is_read_as_the_folder(suffix, folder, tmp_path):
    form = {"tgz": "gz", "tar": ""}.get(suffix, suffix[4:])
    file = packed(tmp_path / f"in.{suffix}", folder, f"w:{form}")
    seen = survey(file, classes=ALL)
    assert (seen.classes, seen.counts, seen.data) == (("cat", "dog"), (12, 12), {})
    _, images, labels = read_all(Data(source="imagefolder", path=str(file)), tmp_path)
    _, same, others = read_all(Data(source="imagefolder", path=str(folder)), tmp_path)
    assert np.array_equal(images, same) and labels == others


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_tar_file_with_a_link_or_a_pipe_is_refused(kind, folder, tmp_path):
    file = packed(tmp_path / "in.tar", folder, "w")
    with tarfile.open(file, "a") as archive:
        entry = tarfile.TarInfo("set/cat/9.png")
        entry.type = kind
        entry.linkname = "/etc/passwd"
        archive.addfile(entry)
    with pytest.raises(DataError, match="is a link, a device or a sparse file"):
        survey(file, classes=ALL)


@pytest.mark.parametrize("name", ["../out.png", "set/../../out.png", "/../out.png"])
def test_a_tar_file_with_a_path_out_of_its_folder_is_refused(name, folder, tmp_path):
    file = packed(tmp_path / "in.tar", folder, "w")
    with tarfile.open(file, "a") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=r"in\.tar cannot be read .*would lie outside"):
        survey(file, classes=ALL)
    assert not [*tmp_path.rglob("out.png")]


def test_a_tar_file_that_inflates_without_end_is_refused(folder, tmp_path):
    file = tmp_path / "in.tar.gz"
    with tarfile.open(file, "w:gz", compresslevel=1) as archive:
        archive.add(folder, "set")
        entry = tarfile.TarInfo("set/cat/large.png")
        entry.size = 300 * MEGABYTE
        archive.addfile(entry, io.BytesIO(bytes(entry.size)))
    with pytest.raises(DataError, match=r"in\.tar\.gz expands to more than"):
        survey(file, classes=ALL)


def test_a_damaged_tar_file_is_named(folder, tmp_path):
    file = packed(tmp_path / "in.tar.gz", folder)
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(DataError, match=r"in\.tar\.gz cannot be read as a tar file .*intact copy"):
        survey(file, classes=ALL)


def zipped(file, folder, between="/", more=()):
    with zipfile.ZipFile(file, "w") as archive:
        for picture in sorted(folder.rglob("*.png")):
            entry = zipfile.ZipInfo("x")
            entry.filename = between.join(["set", *picture.relative_to(folder).parts])
            archive.writestr(entry, picture.read_bytes())
        for name, content in more:
            archive.writestr(name, content)
    return file


def test_a_zip_with_backslashes_is_read(folder, tmp_path):
    seen = survey(zipped(tmp_path / "in.zip", folder, "\\"), classes=ALL)
    assert (seen.classes, seen.counts) == (("cat", "dog"), (12, 12))


@pytest.mark.parametrize("encoding", ["utf-8", "cp437"])
def test_names_in_a_zip_are_read_without_their_encoding(encoding, folder, tmp_path):
    """If a zip lacks the flag for UTF-8, macOS wrote its names in UTF-8, and older programs in
    cp437.
    """
    name = "Hündin".encode(encoding)
    placeholder = "x" * len(name)
    (folder / "dog").rename(folder / placeholder)
    file = zipped(tmp_path / "in.zip", folder)
    file.write_bytes(file.read_bytes().replace(placeholder.encode(), name))
    assert survey(file, classes=ALL).classes == ("Hündin", "cat")


@pytest.mark.parametrize("name", ["set/cat/9x.png", "set/loose.png", "set/cat/deep/0.png"])
def test_messages_name_the_archive_and_no_temporary_folder(name, folder, tmp_path):
    file = zipped(tmp_path / "in.zip", folder, more=[(name, b"no picture")])
    data = Data(source="imagefolder", dataset_id="zipped", path=str(file))
    for read in (
        lambda: survey(file, classes=ALL),
        lambda: prepare_sensitive(data, tmp_path / "state", tmp_path / "card.json", tmp_path),
    ):
        with pytest.raises(DataError) as error:
            read()
        assert str(file) in str(error.value) and ".unpacked" not in str(error.value)


def test_the_list_of_what_was_left_out_names_the_archive(folder, tmp_path):
    file = zipped(tmp_path / "in.zip", folder, more=[("set/cat/9x.png", b"no picture")])
    data = Data(source="imagefolder", dataset_id="zipped", path=str(file), skip="10%")
    prepare_sensitive(data, tmp_path / "state", tmp_path / "card.json", tmp_path)
    (listed,) = tmp_path.glob("state/data/*/left_out.txt")
    assert listed.read_text().startswith(f"{file}/set/cat/9x.png cannot be read")


def rows_of(folder):
    pictures = sorted(folder.rglob("*.png"))
    return [
        {"image": {"bytes": p.read_bytes(), "path": p.name}, "label": p.parent.name}
        for p in pictures
    ]


COLUMNS = {  # name -> function that makes the columns of a table from the bytes of its pictures
    "one large": lambda cells: {"image": pyarrow.array(cells, pyarrow.large_binary())},
    "path first": lambda cells: {"image": [{"path": "x.png", "bytes": cell} for cell in cells]},
    "ids first": lambda cells: {
        "patient_id": [f"P{number // 3}".encode() for number in range(len(cells))],
        "image": [b"no picture", *cells[1:]],
    },
}


@pytest.mark.parametrize("name", COLUMNS)
def test_pictures_in_parquet_are_known_by_type_and_content(name, folder, tmp_path):
    rows = rows_of(folder)
    columns = COLUMNS[name]([row["image"]["bytes"] for row in rows])
    table = pyarrow.table(columns | {"label": [row["label"] for row in rows]})
    parquet.write_table(table, tmp_path / "in.PARQUET")
    seen = survey(tmp_path / "in.PARQUET", skip=0.1)
    assert (seen.classes, seen.counts) == (("cat", "dog"), (12, 12))
    assert seen.groups == (Groups(column="patient_id") if "patient_id" in columns else None)


@pytest.mark.parametrize("cell", [{"bytes": None, "path": "x.png"}, None])
def test_an_empty_picture_in_parquet_is_named_by_its_row(cell, folder, tmp_path):
    rows = rows_of(folder)
    rows[3]["image"] = cell
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"in\.parquet, row 4, has no picture: .*remove the row"):
        survey(tmp_path / "in.parquet")
    parquet.write_table(
        pyarrow.Table.from_pylist([row for row in rows if row["image"] != cell]),
        tmp_path / "in.parquet",
    )
    assert survey(tmp_path / "in.parquet").images == 23


def test_an_empty_label_and_a_table_without_pictures_are_named(folder, tmp_path):
    rows = rows_of(folder)
    rows[3]["label"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    with pytest.raises(
        DataError, match=r"in\.parquet: picture 4 has no label: add one\. .* in the order"
    ):
        survey(tmp_path / "in.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"label": "cat"}]), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"other\.parquet has no column of pictures"):
        survey(tmp_path / "other.parquet")


def test_a_set_saved_by_datasets_is_named_with_the_way(folder, tmp_path):
    table = pyarrow.Table.from_pylist(rows_of(folder))
    place = tmp_path / "saved/train"
    place.mkdir(parents=True)
    file = str(place / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("train/dataset_info.json", "train/state.json", "dataset_dict.json"):
        (tmp_path / "saved" / name).write_text("{}")
    for path in (tmp_path / "saved", place):
        with pytest.raises(
            DataError, match=r"`datasets` saved to disk: write it as Parquet.*to_parquet"
        ):
            survey(path)
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in/train.parquet")  # as pandas' `to_parquet` does
    assert survey(tmp_path / "in").classes == ("cat", "dog")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_mnist_are_named_with_a_way_that_works(suffix, tmp_path):
    images = np.arange(40 * 36, dtype=np.uint8).reshape(40, 6, 6)
    write_idx(tmp_path / f"in/train-images-idx3-ubyte{suffix}", images)
    write_idx(tmp_path / f"in/train-labels-idx1-ubyte{suffix}", np.arange(40) % 2)
    with pytest.raises(
        DataError, match=r"an array in the idx format of MNIST: .*one \.npz with the arrays images"
    ):
        survey(tmp_path / "in")
    np.savez(
        tmp_path / "in.npz", images=images, labels=np.arange(40) % 2, classes=np.array(["a", "b"])
    )
    assert survey(tmp_path / "in.npz").images == 40
