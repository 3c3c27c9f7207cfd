"""Labels in a table beside the pictures (Hugging Face's `imagefolder`), and samples in tar files
(WebDataset).
"""

import io
import json
import tarfile
import unicodedata

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from scans import write_dicom
from surveys import layout_of, survey
from writers import read_all

from sfumato.data.labels_and_ids import Unclear
from sfumato.data.sources import read_source
from sfumato.data.tables import rows_by_file
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Groups
from sfumato.settings.options import ALL

WORDS = ["cat", "dog", "cat", "dog"]
PATIENTS = ["p1", "p2", "p2", "p3"]


def png(value, mode="L"):
    file = io.BytesIO()
    Image.fromarray(np.full((6, 6), value, np.uint8)).convert(mode).save(file, "PNG")
    return file.getvalue()


def write_table(folder, rows, form="csv", pictures=None):
    """Write a table of the rows, and one picture per file name. Each picture has one grey level.

    pictures: file names; by default, the names in the rows.
    """
    for i, name in enumerate(pictures or [row["file_name"] for row in rows]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(i))
    file = folder / f"metadata.{form}"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        file.write_text("\n".join(lines) + "\n")
    return folder


def rows_of(words=WORDS, names=None):
    names = names or [f"scans/{i}.png" for i in range(len(words))]
    return [
        {"file_name": n, "label": w, "patient": p}
        for n, w, p in zip(names, words, PATIENTS, strict=True)
    ]


def data(path, source="imagefolder", **changes):
    given = {"label_column": "label"} if source == "imagefolder" else {}
    return Data(source=source, path=str(path), **{"classes": ("dog", "cat"), **given, **changes})


def write_tar(file, samples):
    """Write a tar file. samples: name and content of each entry."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, content in samples:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file


def samples(words=WORDS, first=0, **more):
    for i, word in enumerate(words, first):
        yield f"shard/{i:03d}.png", png(i)
        yield f"shard/{i:03d}.cls", str(word).encode()
        yield (
            f"shard/{i:03d}.json",
            json.dumps({"finding": word, "patient": PATIENTS[i % 4], **more}).encode(),
        )


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_table_gives_labels_and_groups_in_row_order(tmp_path, form):
    write_table(tmp_path, rows_of(), form)
    source, images, labels = read_all(data(tmp_path, groups={"column": "patient"}), tmp_path)
    assert source.classes == ("dog", "cat") and labels == [1, 0, 1, 0] and source.groups == PATIENTS
    assert [int(image[0, 0, 0]) for image in images] == [0, 1, 2, 3] and source.test is None


def test_labels_may_be_class_numbers_but_not_mixed_with_names(tmp_path):
    write_table(tmp_path, rows_of([1, 0, 1, 0]), "jsonl")
    assert read_all(data(tmp_path), tmp_path)[2] == [1, 0, 1, 0]
    assert read_all(data(tmp_path, classes=("1", "0")), tmp_path)[2] == [0, 1, 0, 1]
    with pytest.raises(DataError, match=r"not in data\.classes"):
        read_all(data(tmp_path, classes=("2", "1")), tmp_path)


def test_spaces_after_commas_are_no_part_of_labels(tmp_path):
    file = write_table(tmp_path, rows_of()) / "metadata.csv"
    file.write_text(file.read_text().replace(",", ", "))
    assert survey(tmp_path, classes=ALL).classes == ("cat", "dog")
    assert read_all(data(tmp_path), tmp_path)[2] == [1, 0, 1, 0]
    earlier = data(tmp_path, classes=(" dog", " cat"))  # as an earlier version named them
    assert read_all(earlier, tmp_path)[2] == [1, 0, 1, 0]


def test_the_line_that_states_the_separator_is_no_row(tmp_path):
    """Some tables begin with a line like `sep=;`, so that Excel can open them in every country."""
    file = write_table(tmp_path, rows_of()) / "metadata.csv"
    file.write_text("sep=;\n" + file.read_text().replace(",", ";"))
    assert read_all(data(tmp_path), tmp_path)[2] == [1, 0, 1, 0]
    file.write_text("sep=;\n")
    with pytest.raises(DataError, match="has no column"):
        read_source(data(tmp_path), tmp_path)


def test_train_and_test_with_a_table_each_bring_the_hold_out(tmp_path):
    write_table(tmp_path / "train", rows_of())
    write_table(tmp_path / "test", rows_of())
    source = read_source(data(tmp_path), tmp_path)
    assert [label for _, label in source.test] == [1, 0, 1, 0] and source.size == 8
    with pytest.raises(DataError, match=r"3 person\(s\) have pictures in both train and test"):
        read_source(data(tmp_path, groups={"column": "patient"}), tmp_path)


@pytest.mark.parametrize(
    "name", ["../out.png", "/etc/out.png", "scans/../../out.png", "C:\\out.png", ""]
)
def test_a_row_naming_an_outside_file_is_refused_unnamed(tmp_path, name):
    (tmp_path / "out.png").write_bytes(png(9))
    kept = [f"{i}.png" for i in range(4)]
    write_table(tmp_path / "in", rows_of(names=[name, *kept[1:]]), "jsonl", kept)
    with pytest.raises(DataError, match="row 1, names a file that is not below") as refused:
        read_source(data(tmp_path / "in"), tmp_path)
    assert "out.png" not in str(refused.value)


@pytest.mark.parametrize("name", ["0.png", "0"])
def test_a_name_that_two_files_have_names_neither(tmp_path, name):
    """If the name stood for one of the two files, this file could get the other's label."""
    kept = ["a/0.png", "b/0.png", "c/1.png", "c/2.png"]
    write_table(tmp_path, rows_of(names=[name, "b/0.png", "1.png", "2"]), pictures=kept)
    with pytest.raises(DataError, match="row 2, names a file that is not below"):
        read_source(data(tmp_path), tmp_path)
    table = tmp_path / "metadata.csv"
    table.write_text(table.read_text().replace(f"\n{name},", "\na/0.png,"))
    assert [label for _, label in read_source(data(tmp_path), tmp_path).train] == [1, 0, 1, 0]


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    write_table(tmp_path / "in", rows_of())
    (tmp_path / "out").mkdir()
    first = (tmp_path / "in/scans/0.png").rename(tmp_path / "out/0.png")
    (tmp_path / "in/scans/0.png").symlink_to(first)
    with pytest.raises(DataError, match="row 2, names a link to a file outside"):
        read_source(data(tmp_path / "in"), tmp_path)
    (tmp_path / "in/scans/0.png").unlink()
    (tmp_path / "in/linked").symlink_to(first.parent)
    table = tmp_path / "in/metadata.csv"
    table.write_text(table.read_text().replace("scans/0.png", "linked/0.png"))
    with pytest.raises(DataError, match="row 2, names a file that is not below"):
        read_source(data(tmp_path / "in"), tmp_path)


SPOILED = {
    "a row more": (lambda t: t + "scans/0.png,cat,p1\n", "row 6, names a file a second time"),
    "a row less": (
        lambda t: t.replace("scans/0.png,cat,p1\n", ""),
        r"has no row for .*scans/0\.png",
    ),
    "a cell less": (
        lambda t: t.replace("cat,p1", "cat"),
        "row 2, has 2 cell\\(s\\), but the table has 3",
    ),
    "no label": (lambda t: t.replace("cat,p1", ",p1"), "picture 1 has no label"),
    "an unknown label": (lambda t: t.replace("cat,p1", "cow,p1"), r"not in data\.classes"),
    "no column": (
        lambda t: t.replace("label", "finding"),
        "has no column label, but has the columns file_name, finding, patient: use one of these",
    ),
    "no names": (lambda t: t.split("\n", 1)[1], "has no column file_name .*: add it"),
    "an open quote": (lambda t: t + '"', "is not a table"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_malformed_table_is_one_sentence_that_quotes_no_id(tmp_path, spoil, message):
    file = write_table(tmp_path, rows_of()) / "metadata.csv"
    file.write_text(spoil(file.read_text()))
    with pytest.raises(DataError, match=message) as refused:
        read_source(data(tmp_path), tmp_path)
    assert "p1" not in str(refused.value)


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"file_name": "scans/0.png", "label": ["cat", "dog"]}', '{"label": true}']
)
def test_a_malformed_json_line_is_named_by_its_number(tmp_path, line):
    file = write_table(tmp_path, rows_of(), "jsonl") / "metadata.jsonl"
    file.write_text(file.read_text() + line)
    with pytest.raises(DataError, match="row 5"):
        read_source(data(tmp_path), tmp_path)


def test_labels_in_a_table_are_not_ids_of_persons(tmp_path):
    names = [f"{kind}/{person}/0.png" for kind in "ab" for person in ("p1", "p2")]
    write_table(tmp_path, rows_of(["cat", "cat", "dog", "dog"], names))
    groups = Groups(folder=True)
    assert survey(tmp_path, groups=groups, label_column="label", classes=ALL).persons == 2
    rows = [f"{name},{number % 2},1" for number, name in enumerate(names)]
    (tmp_path / "labels.csv").write_text("\n".join(["file_name,mass,nodule", *rows]))
    assert survey(tmp_path, groups=groups, classes=ALL).persons == 2


def test_a_document_beside_the_table_needs_no_row(tmp_path):
    write_table(tmp_path, rows_of())
    (tmp_path / "consent.pdf").write_bytes(b"%PDF-1.7")
    assert len(read_all(data(tmp_path, groups={"column": "patient"}), tmp_path)[1]) == len(WORDS)


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path):
    write_table(tmp_path, rows_of())
    (tmp_path / "scans/2.png").write_bytes(b"text")
    with pytest.raises(DataError, match=r"scans/2\.png cannot be read"):
        read_all(data(tmp_path, groups={"column": "patient"}), tmp_path)


def test_labels_in_a_table_need_the_owners_list_of_classes(tmp_path):
    write_table(tmp_path, rows_of())
    with pytest.raises(ConfigError, match=r"data\.classes is missing"):
        read_source(data(tmp_path, classes=None), tmp_path)
    with pytest.raises(ValidationError, match=r"data\.groups"):
        data(tmp_path, groups={"folder": True})


def test_a_table_beside_class_folders_gives_the_persons(tmp_path):
    for part, people in (("train", PATIENTS), ("test", ["q1", "q2", "q2", "q3"])):
        names = [f"{word}/{i}.png" for i, word in enumerate(WORDS)]
        rows = [
            {"file_name": name, "Patient ID": who} for name, who in zip(names, people, strict=True)
        ]
        write_table(tmp_path / part, rows)
    asked = data(tmp_path, groups={"column": "Patient ID"}, label_column=None)
    assert read_source(asked, tmp_path).groups == ["p1", "p2", "p2", "p3", "q1", "q2", "q2", "q3"]
    found = survey(tmp_path, classes=("cat", "dog"))
    assert found.groups.column == "Patient ID" and (found.persons, found.held_out) == (3, 4)
    (tmp_path / "train/metadata.csv").unlink()
    with pytest.raises(
        DataError, match=r"contains none of metadata.csv.* with the columns file_name, Patient ID"
    ):
        read_source(asked, tmp_path)


@pytest.mark.parametrize(
    "held_out", ["test-0.tar", "testset.tar", "x-Testing_0.tar", "x_test_0.tar"]
)
def test_shards_give_samples_in_order_and_test_shards_hold_out(tmp_path, monkeypatch, held_out):
    write_tar(tmp_path / "in/latest-train-0.tar", samples())
    write_tar(tmp_path / "in/train-1.tar", samples(first=4))
    write_tar(tmp_path / f"in/{held_out}", samples(first=8))
    before = {*tmp_path.rglob("*")}
    monkeypatch.setattr(tarfile.TarFile, "extract", None)
    monkeypatch.setattr(tarfile.TarFile, "extractall", None)
    source, images, labels = read_all(data(tmp_path / "in", "webdataset"), tmp_path)
    assert labels == 2 * [1, 0, 1, 0] and [int(image[0, 0, 0]) for image in images] == [*range(8)]
    assert [int(image[0, 0, 0]) for image, _ in source.test] == [8, 9, 10, 11]
    assert {*tmp_path.rglob("*")} == before


def test_a_sample_takes_its_label_and_person_from_json_if_asked(tmp_path):
    file = write_tar(tmp_path / "a.tar", samples())
    asked = data(file, "webdataset", label_column="finding", groups={"column": "patient"})
    source, _, labels = read_all(asked, tmp_path)
    assert labels == [1, 0, 1, 0] and source.groups == PATIENTS
    with pytest.raises(DataError, match=r"sample 1: the label `finding` in the .json is missing"):
        write_tar(file, [("0.png", png(0)), ("0.cls", b"cat")])
        read_source(asked, tmp_path)
    with pytest.raises(
        DataError, match=r"sample 1: `patient` in the .json is neither text nor a whole number"
    ):
        write_tar(file, [("0.png", png(0)), ("0.json", b'{"finding": "cat", "patient": 1.5}')])
        read_source(asked, tmp_path)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_in_a_shard_are_refused(tmp_path, kind):
    file = write_tar(tmp_path / "a.tar", samples())
    with tarfile.open(file, "a") as archive:
        entry = tarfile.TarInfo("9.png")
        entry.type = kind
        entry.linkname = "/etc/passwd"
        archive.addfile(entry)
    with pytest.raises(DataError, match="entry 13 is a link"):
        read_source(data(file, "webdataset"), tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tar").symlink_to(file)
    with pytest.raises(DataError, match="must be a file, or a link to a file in"):
        read_source(data(tmp_path / "in", "webdataset"), tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("0.png", png(0))], "sample 1: the label is missing"),
        ([("0.cls", b"cat")], "sample 1 has 0 pictures"),
        ([("0.png", png(0)), ("0.jpg", png(0)), ("0.cls", b"cat")], "sample 1 has 2 pictures"),
        ([("0.png", png(0)), ("0.cls", b"\xff")], r"\.cls that is not"),
        ([("0.png", png(0)), ("0.json", b"[]")], "the label is missing|not a JSON object"),
        ([("0.png", png(0)), ("0.json", b'{"label": NaN}')], "not a JSON object"),
        ([("0.png", png(0)), ("0.cls", b"cow")], r"not in data\.classes"),
        (
            [("0.png", png(0)), ("0.png", png(0)), ("0.cls", b"cat")],
            "the same name as an earlier entry",
        ),
        ([("0.png", b"text"), ("0.cls", b"cat")], r"0\.png in .*a\.tar cannot be read"),
    ],
)
def test_a_malformed_sample_is_named_by_its_place(tmp_path, entries, message):
    file = write_tar(tmp_path / "a.tar", entries)
    with pytest.raises(DataError, match=message):
        read_all(data(file, "webdataset"), tmp_path)


@pytest.mark.parametrize("cut", [700, 1536, 5200])
def test_a_cut_compressed_or_damaged_shard_is_refused(tmp_path, cut):
    file = write_tar(tmp_path / "a.tar", samples())
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    with pytest.raises(DataError, match="cut short|cannot be read"):
        read_source(data(file, "webdataset"), tmp_path)
    file.write_bytes(whole[:1024] + b"\x01" * 512 + whole[1536:])  # the header of the second entry
    with pytest.raises(DataError, match="damaged after entry"):
        read_source(data(file, "webdataset"), tmp_path)


def test_what_a_folder_holds_is_recognised_by_its_layout(tmp_path):
    write_table(tmp_path / "a", rows_of())
    found = survey(tmp_path / "a", classes=ALL)
    assert found.data == {
        "source": "imagefolder",
        "classes": ["cat", "dog"],
        "label_column": "label",
    }
    assert found.groups.column == "patient" and found.persons == 3 and found.counts == (2, 2)
    with pytest.raises(ConfigError, match="looks like a column of persons' ids, which"):
        survey(tmp_path / "a", label_column="patient")
    write_tar(tmp_path / "b/a.tar", samples([10, 9, 10, 9]))
    found = survey(tmp_path / "b", classes=ALL)
    assert (
        found.data == {"source": "webdataset", "classes": ["9", "10"]}
        and found.groups.column == "patient"
    )
    for name in ("cat", "dog"):  # folders that contradict the table: the owner decides
        (tmp_path / "c" / name).mkdir(parents=True)
        (tmp_path / "c" / name / "0.png").write_bytes(png(1))
    (tmp_path / "c/metadata.csv").write_text("file_name,label\ncat/0.png,x\ndog/0.png,y\n")
    with pytest.raises(Unclear, match="could define the classes"):
        survey(tmp_path / "c")
    folders = survey(tmp_path / "c", classes=ALL)
    assert folders.data == {} and folders.classes == ("cat", "dog")
    assert survey(tmp_path / "c", label_column="label", classes=ALL).classes == ("x", "y")
    (tmp_path / "c/metadata.csv").write_text("file_name,label\ncat/0.png,cat\ndog/0.png,dog\n")
    assert layout_of(tmp_path / "c", None)[0] == {"name": "imagefolder"}, "both agree"
    (tmp_path / "c/cat/1.png").write_bytes(png(1))
    for rows, different in {
        "cat/0.png,dog\ndog/0.png,cat": 3,
        "0.png,cat\n1,cat": 1,
        "cat/0.png,cat,?\ncat/1.png,cat\ndog/0.png,dog": 1,
    }.items():
        (tmp_path / "c/metadata.csv").write_text(f"file_name,label\n{rows}\n")
        with pytest.raises(Unclear, match=f"and they differ for {different} images"):
            layout_of(tmp_path / "c", None)
    same = [{"file_name": f"{kind}/0.png", "label": kind} for kind in ("cat", "dog")]
    write_table(tmp_path / "parts/train", same)
    write_table(tmp_path / "parts/test", [{"file_name": row["file_name"]} for row in same])
    with pytest.raises(Unclear, match="and they differ for 2 images"):
        layout_of(tmp_path / "parts", None)
    write_table(tmp_path / "d", [{"file_name": "0.png", "sex": "f", "age": 3}])
    with pytest.raises(ConfigError, match="label_column"):
        layout_of(tmp_path / "d", None)


def described(about):
    """Yield 40 samples. about: maps the number of a sample to the content of its .json."""
    for i in range(40):
        yield f"{i:03}.png", png(i)
        yield f"{i:03}.cls", b"ab"[i % 2 : i % 2 + 1]
        yield f"{i:03}.json", json.dumps(about(i)).encode()


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("pat", lambda i: {"pat": f"P{i // 4 + 100}"}),
        ("anon_mrn", lambda i: {"anon_mrn": i // 4 + 70_000}),
        ("eid", lambda i: {f"only {i}": i, "eid": 7919 * (i // 4) + 10**6}),
        ("meta.patient_id", lambda i: {"meta": {"patient_id": f"P{i // 4 + 100}"}}),
    ],
)
def test_ids_in_any_key_of_samples_are_noticed_and_usable(tmp_path, name, about):
    file = write_tar(tmp_path / "a.tar", described(about))
    assert survey(file, classes=ALL).repeats.groups == name
    assert survey(file, classes=ALL, groups=name).persons == 10


def test_a_key_of_persons_missing_from_the_first_sample_is_found(tmp_path):
    file = write_tar(
        tmp_path / "a.tar", described(lambda i: {"patient_id": f"P{i // 4 + 100}"} if i else {})
    )
    with pytest.raises(DataError, match="image 1 .* has no id"):
        survey(file, classes=ALL)
    assert survey(file, classes=ALL, alone=True).persons == 11


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_labels_match_classes_in_any_form_of_unicode(tmp_path, form):
    words = [unicodedata.normalize(form, word) for word in ["café", "b"] * 2]
    write_table(tmp_path, rows_of(words))
    for other in ("NFC", "NFD"):
        names = (unicodedata.normalize(other, "café"), "b")
        assert survey(tmp_path, classes=names).classes == ("café", "b")
        assert read_all(data(tmp_path, classes=names), tmp_path)[2] == [0, 1, 0, 1]


def test_keys_of_samples_match_in_any_form_of_unicode(tmp_path):
    forms = ("NFC", "NFD")
    keys = [unicodedata.normalize(form, "befünde") for form in forms]
    names = [unicodedata.normalize(form, "prénom") for form in forms]
    for key, name in zip(keys, names, strict=True):
        about = ({key: WORDS[i], name: PATIENTS[i]} for i in range(4))
        content = [(f"{i}.json", json.dumps(one).encode()) for i, one in enumerate(about)]
        pictures = [(f"{i}.png", png(i)) for i in range(len(content))]
        file = write_tar(tmp_path / "a.tar", pictures + content)
        for label, column in zip(keys, names, strict=True):
            persons = {"column": column}
            chosen = data(file, "webdataset", label_column=label, groups=persons)
            assert read_source(chosen, tmp_path).groups == PATIENTS


def test_labels_that_are_the_same_number_are_asked_about(tmp_path):
    write_table(tmp_path, rows_of(["0", "0.0", "1", "1.0"]))
    with pytest.raises(Unclear, match=r"a final \.0, so they may be one class"):
        survey(tmp_path)


def test_rows_that_name_folders_do_not_scan_all_files_each(tmp_path):
    class Counted(list):
        scans = 0

        def __iter__(self):
            type(self).scans += 1
            return super().__iter__()

    names = [f"s{i}" for i in range(50)]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name", *names]))
    for name in names:
        write_dicom(tmp_path / name / "ct" / "1.dcm", np.zeros((2, 2)), name)
    files = Counted(sorted(tmp_path.rglob("*.dcm")))
    rows = rows_by_file(tmp_path / "metadata.csv", ["file_name"], files, tmp_path)
    assert len(rows) == 50 and Counted.scans < 10
