"""A folder of pictures whose table has a column of 0 and 1 for each label."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from surveys import layout_of
from writers import write_npz

from sfumato.data.labels_and_ids import Unclear
from sfumato.data.sources import read_source
from sfumato.errors import ConfigError, DataError, SfumatoError
from sfumato.settings.data import Data
from sfumato.settings.options import ALL

TABLE = "nodule,file_name,mass\n1,b/2.png,0\n0, a.png ,1.0\n1,b/10.png,1\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with a.png, b/10.png and b/2.png (grey levels 10, 20 and 30), a hidden file,
    a text file and the table.
    """
    (tmp_path / "b").mkdir()
    for level, name in ((10, "a.png"), (20, "b/10.png"), (30, "b/2.png")):
        Image.fromarray(np.full((6, 4), level, np.uint8)).save(tmp_path / name)
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "README.txt").write_text("not a picture")
    (tmp_path / "labels.csv").write_text(TABLE)
    return tmp_path


def read(folder: Path, **more):
    settings = {
        "source": "imagefolder",
        "dataset_id": "chests",
        "path": str(folder),
        "labels": "several",
        **more,
    }
    source = read_source(Data(**settings), folder)
    return source, [(int(image[0, 0, 0]), labels.tolist()) for image, labels in source.train]


@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv"])
def test_each_picture_gets_the_labels_of_its_row(folder, name):
    (folder / "labels.csv").rename(folder / name)
    source, found = read(folder)
    assert source.classes == ("nodule", "mass") and source.test is None
    assert found == [(10, [0, 1]), (20, [1, 1]), (30, [1, 0])]
    (folder / name).write_text(TABLE.replace(",", ", "))
    assert read(folder)[1] == found and layout_of(folder, None)[0]["classes"] == source.classes


def test_the_columns_that_are_labels_may_be_named(folder):
    (folder / "labels.csv").write_text(
        "file_name,age,mass,nodule\na.png,61,1,0\nb/2.png,7,0,1\nb/10.png,5,0,0\n"
    )
    source, found = read(folder, classes=["nodule", "mass"])
    assert source.classes == ("nodule", "mass")
    assert found == [(10, [0, 1]), (20, [0, 0]), (30, [1, 0])]
    with pytest.raises(DataError, match="neither 0 nor 1"):
        read(folder)


LISTS = {
    "metadata.csv": (
        "file_name,found,patient\na.png,mass| nodule,p1\nb/2.png,,p2\nb/10.png,mass,p1\n"
    ),
    "metadata.jsonl": (
        """{"file_name": "b/2.png", "found": [], "patient": "p2"}
        {"file_name": "a.png", "found": ["nodule", "mass"], "patient": "p1"}
        {"file_name": "b/10.png", "found": ["mass"], "patient": "p1"}"""
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_column_may_list_the_labels_and_another_the_persons(folder, name):
    (folder / "labels.csv").unlink()
    (folder / name).write_text(LISTS[name])
    form, groups = layout_of(folder, None)
    classes = form["classes"]
    column = form["label_column"]
    assert (classes, column, groups.column) == (("mass", "nodule"), "found", "patient") and form[
        "several"
    ]
    source, found = read(
        folder, classes=classes, label_column=column, groups={"column": groups.column}
    )
    assert found == [(10, [1, 1]), (20, [1, 0]), (30, [0, 0])] and source.groups == [
        "p1",
        "p1",
        "p2",
    ]
    with pytest.raises(DataError, match="lists a label that is not in data.classes"):
        read(folder, classes=["mass"], label_column=column)
    with pytest.raises(ConfigError, match="data.classes is missing"):
        read(folder, label_column=column)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("file_name,age,mass,patient_id,nodule\na.png,61.5,1,7,0\n", ("mass", "nodule")),
        ("file_name,label,male\na.png,1,0\n", None),  # one label per picture
        ("file_name,mass\na.png,1\n", None),
        ("file_name,found,seen,label\na.png,a|b,c|d,x\n", None),  # two columns of lists
    ],
)
def test_several_labels_are_recognised_by_columns_or_lists(folder, table, expected):
    (folder / "labels.csv").rename(folder / "metadata.csv")
    (folder / "metadata.csv").write_text(table)
    if expected is None and "label" not in table:
        # A single column of 0 and 1 may mean anything, so the owner is asked
        with pytest.raises(Unclear, match="the column that contains the labels"):
            layout_of(folder, None)
    form, groups = layout_of(folder, None if "label" in table or expected else "mass")
    assert form.get("classes") == expected and form.get("several", False) == (expected is not None)
    assert (groups and groups.column) == ("patient_id" if "patient_id" in table else None)
    (folder / "another class").mkdir()
    assert layout_of(folder, None, classes=("b", "another class"))[0] == {"name": "imagefolder"}
    if table != "file_name,mass\na.png,1\n":
        with pytest.raises(Unclear, match="could define the classes"):
            layout_of(folder, None)


@pytest.mark.parametrize("cell", ["-1", "-1.0", "", "U", "0.5", "NaN"])
@pytest.mark.parametrize(
    "table",
    [
        "file_name,mass,nodule,effusion\na.png,1,0,{}\nb/2.png,0,1,1\n",
        "file_name,mass,disease\na.png,1,{}\nb/2.png,0,1\n",
        "file_name,nodule,mass\na.png,{0},1\nb/2.png,1,{0}\n",
    ],
)
def test_columns_with_uncertain_cells_are_not_dropped(folder, table, cell):
    (folder / "labels.csv").write_text(table.format(cell))
    for classes in (None, ALL):
        with pytest.raises(Unclear, match="empty cells: .*Write 0 or 1 in.*label_column"):
            layout_of(folder, None, classes=classes)
    if "nodule,effusion" in table:
        form, _ = layout_of(folder, None, classes=("nodule", "mass"))
        assert form["several"] and form["classes"] == ("nodule", "mass")


def test_uncertain_numbers_in_json_are_not_dropped(folder):
    (folder / "labels.csv").unlink()
    rows = [{"file_name": name, "mass": 0, "nodule": 1, "effusion": 1} for name in ("a", "2", "10")]
    rows[1]["effusion"] = -1.0
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(Unclear, match="with uncertain or empty cells: effusion. Write 0 or 1"):
        layout_of(folder, None)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "requires a table"),
        (
            "file_name,mass,mass\n"
            + "".join(f"{n},0,1\n" for n in ("a.png", "b/2.png", "b/10.png")),
            "has 2 columns named mass: give each column its own name",
        ),
        (TABLE.replace("1.0", ""), "neither 0 nor 1"),
        (TABLE.replace("1.0", "-1"), "neither 0 nor 1"),
        (TABLE.replace("1.0", "0.5"), "neither 0 nor 1"),
        (TABLE.replace("0, a.png ,1.0\n", ""), r"has no row for .*a\.png: add a row"),
        (TABLE.replace("mass", "kind"), "'kind' cannot be a label, .* Rename the class"),
        (TABLE + "1,c.png,1\n", "row 5, names a file that is not below"),
    ],
)
def test_a_table_that_does_not_fit_the_pictures_is_refused(folder, table, message):
    (
        (folder / "labels.csv").unlink()
        if table is None
        else (folder / "labels.csv").write_text(table)
    )
    with pytest.raises(SfumatoError, match=message):
        read(folder)


def test_a_bad_picture_is_named(folder):
    (folder / "b/10.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"b/10\.png cannot be read"):
        read(folder)


def test_persons_are_found_by_file_names_not_class_folders(folder):
    source, _ = read(folder, groups={"pattern": r"^(\w+)[.]png"})
    assert source.groups == ["a", "10", "2"]
    with pytest.raises(
        ValueError,
        match="folder cannot be used.*use data.groups.column, csv, pattern, array or dicom",
    ):
        read(folder, groups={"folder": True})


def test_a_folder_with_only_a_table_states_how_to_read_it(folder):
    shutil.rmtree(folder / "b")
    with pytest.raises(DataError, match=r"in labels\.csv, set data\.labels: several"):
        read(folder, labels="one")


def test_a_matrix_of_labels_in_an_archive_holds_0_and_1_only(tmp_path):
    rows = np.array([[0, 1, 0], [1, 1, 0]])
    more = {"source": "npz", "path": str(tmp_path / "set.npz")}
    for labels, way, message in (
        (rows, "several", None),
        (rows, "one", "set data.labels: several"),
        (rows[:, :2], "several", r"expected integers \(2, 3\)"),
        (rows + 1, "several", "labels other than 0 and 1"),
        (rows - 1, "several", "labels other than 0 and 1"),
        (rows == 1, "several", "a matrix of the integers 0 and 1"),
    ):
        write_npz(
            tmp_path,
            images=np.zeros((2, 4, 4), np.uint8),
            labels=labels,
            classes=np.array(["a", "b", "c"]),
        )
        with pytest.raises(DataError, match=message) if message else nullcontext():
            source, found = read(tmp_path, **more, labels=way)
            assert [row for _, row in found] == rows.tolist() and source.classes == ("a", "b", "c")
