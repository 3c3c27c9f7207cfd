"""Tables beside pictures: the column of labels, the column of persons, and files that only look
like a table.
"""

import unicodedata
from pathlib import Path

import pytest
from layouts import (
    ASKED,
    CELLS,
    IDS,
    KINDS,
    NAMES,
    PERSONS,
    REPEATED,
    WHOLE,
    both,
    bring,
    draw,
    folders,
    images,
    pairs,
    persons,
    refused,
    table,
    tabled,
)


def accented(root: Path) -> None:
    """Write files with names in macOS's form of Unicode, and a table in the usual form."""
    names = draw(root, [unicodedata.normalize("NFD", f"schädel/{i}.png") for i in range(48)])
    table(
        root,
        {
            "file_name": [unicodedata.normalize("NFC", name) for name in names],
            "label": [*KINDS] * 24,
        },
    )


def listed(
    head: str,
    columns: str,
    form: str = "{i:03}.png",
    named=lambda path: path.name,
    tables=("export.csv",),
):
    """Return a function that writes pictures, and tables of them. Folder names mean nothing.

    The tables are as clinics export them: not called `metadata.csv`, and some with semicolons.
    """

    def write(root: Path) -> None:
        names = draw(root, [form.format(i=i, part=1 + i % 2) for i in range(48)])
        cells = {what: [CELLS[cell](i, 0) for i in range(48)] for what, cell in pairs(columns)}
        for name in tables:
            table(root, {head: [named(Path(one)) for one in names], **cells}, name)
            if ";" in name:
                (root / name).write_text((root / name).read_text().replace(",", ";"))

    return write


def beside_folders(name: str, content: bytes = b"PK", form: str = "{kind}/{i}.png"):
    """Return a function that writes folders of pictures, and an unread file beside them."""
    return both(folders(form), lambda root: (root / name).write_bytes(content))


def with_persons(write, name: str = "persons.csv", head: str = "image"):
    """Return a function that calls `write`, and then writes a table with three pictures per person.

    head: title of the column with the pictures' names.
    """

    def also(root: Path) -> None:
        write(root)
        names = sorted(str(file.relative_to(root)) for file in root.rglob("*.png"))
        ids = [IDS[number // 3] for number in range(len(names))]
        table(root, {head: names, "Patient ID": ids}, name)
        if name.endswith("tsv"):
            (root / name).write_text((root / name).read_text().replace(",", "\t"))

    return also


ROWS = {
    "a table": images(tabled("label=kind")),
    "a table, by meaning": images(tabled("Diagnosis=kind, age=age")),
    "a table, one column": images(
        tabled("what=kind"), "the column that contains the labels", "- " + WHOLE
    ),
    "a table, two columns": images(
        tabled("what=kind, age=age"), "contains the labels", "waht what " + WHOLE
    ),
    "a table, sole id": refused(tabled("code=id"), "the column that contains the labels", "- -"),
    "a table, sole name": refused(tabled("who=name"), "the column that contains the labels", "- -"),
    "a table, sole age": refused(tabled("age=age"), "the column that contains the labels", "- -"),
    "a table, label of ids": refused(tabled("label=id"), ASKED),
    "a table, label of names": images(
        tabled("label=name"), ASKED, "all " + WHOLE, classes=tuple(sorted(NAMES))
    ),
    **{
        f"a table, sole {head}": refused(tabled(f"{head}=id"), "and no labels: add a column")
        for head in ("Patient ID", "Case")  # others: tests/data/test_labels_and_ids.py
    },
    **{
        f"a table, {head}": persons("column", tabled(f"label=kind, {head}=id"))
        for head in ("MRN", "Patient ID")
    },
    "a table, two of persons": persons(
        "column",
        tabled("label=kind, PID=id, subject=id"),
        "persons' ids could be in",
        "subject " + PERSONS,
    ),
    "a table without heads": refused(
        lambda root: table(root, {f"{IDS[0]}.png": draw(root, ["a.png"])}), "no column"
    ),
    "Hugging Face's parts": persons(
        "column",
        tabled("label=kind, Patient ID=id", parts=("train", "validation", "test")),
        held_out=True,
    ),
    "a table above parts": images(
        tabled("label=kind", form="{kind}/{i}.png", classes=("train", "test")), held_out=True
    ),
    "a table of any name": persons(
        "column", listed("Image Index", "Diagnosis=kind, Patient ID=id")
    ),
    "a table with semicolons": images(listed("Bild", "label=kind", tables=(";.csv",))),
    "a table without suffixes, pictures in parts": images(
        listed(
            "image_id",
            "lesion=age, dx=kind",
            "X10000_images_part_{part}/X_{i:04}.jpg",
            lambda path: path.stem,
        )
    ),
    "a table, ids that repeat": persons(
        "column",
        listed(
            "image_id", "lesion_id=id, dx=kind, date=date", "{i:04}.jpg", lambda path: path.stem
        ),
        "in a column repeat",
        REPEATED,
    ),
    "a table, dates and scanners that repeat": images(
        listed(
            "image_id",
            "date=same date, scanner=scanner, dx=kind",
            "{i:04}.jpg",
            lambda path: path.stem,
        )
    ),
    "a list of labels, pictures in parts": persons(
        "column",
        listed(
            "Image Index", "Finding Labels=both, Patient ID=id", "images_00{part}/images/{i:04}.png"
        ),
    ),
    "a table, one column, beside train": images(
        listed("image", "level=kind", "train/{i}_left.png", lambda path: path.stem),
        "the column that contains the labels",
        "- " + WHOLE,
    ),
    "two tables": refused(
        listed("id_code", "dx=kind", tables=("a.csv", "b.csv")), "one table is read"
    ),
    "several labels": persons(
        "column", tabled("mass=bit, nodule=other, MRN=id"), classes=("mass", "nodule")
    ),
    "labels in a list": persons("column", tabled("found=both, patient=id", "labels.csv")),
    "folders and a table": images(
        tabled("label=kind", form="{kind}/{i}.png", classes=("left", "right")),
        "could define the classes",
        "all " + WHOLE,
        classes=("left", "right"),
    ),
    "folders and a like table": images(tabled("label=kind", form="{kind}/{i}.png")),
    "a table, labels spelled in two ways": refused(tabled("label=spelled"), "may be one class"),
    "a table, missing labels": refused(tabled("label=gap"), "may mean a missing label"),
    "a table, label of e-mails": refused(tabled("label=mail"), ASKED),
    **{
        f"a table, {head} that repeats": persons(
            "column", tabled(f"{head}={cell}, dx=kind"), "in a column repeat", REPEATED
        )
        for head, cell in {
            "e-mail": "own mail",
            "Date of birth": "birthday",
            "DOB": "birthday",
            "Nachname": "name",
            "Name": "name",
            "radiographer": "full name",
        }.items()
    },
    **{
        f"a table, {head} that repeats": persons(
            "column", tabled(f"{head}={cell}, dx=kind"), "in a column repeat", REPEATED
        )
        for head, cell in {
            "patient_hash": "number",
            "id_patient": "number",
            "HN": "number",
            "signer": "word of a person",
            "dicom_uid": "number",
        }.items()
    },
    **{
        f"a table, {head} that may be a person's": images(
            tabled(f"{head}={cell}, dx=kind"), "in a column repeat", "- n - - y"
        )
        for head, cell in {
            "ID": "number",
            "lesion": "number",
            "StudyInstanceUID": "number",
            "barcode": "number",
            "nickname": "word of a person",
        }.items()
    },
    "a table, a diagnosis beside sex": images(tabled("dx=kind, male=bit, smoker=other")),
    "one column per class": persons(
        "column", tabled("MEL=word, NV=not, MRN=id"), classes=("MEL", "NV")
    ),
    **{
        f"{name} beside pictures": refused(
            beside_folders(name, content, "scans/{kind}{i}.png"), why
        )
        for name, (content, why) in {
            "Befunde.xlsx": (b"PK", "save it as metadata.csv"),
            "labels.txt": (b"scans/benign0.png 1", "save it as metadata.csv"),
            "labels.json": (b"{}", "save it as metadata.csv"),
            "cp1252.csv": (
                "Datei,Patient\nbenign0.png,Müller".encode("cp1252"),
                "save it as a regular file of UTF-8",
            ),
            "UTF-16.csv": (
                "Datei,Diagnose\nbenign0.png,x".encode("utf-16"),
                "save it as a regular file of UTF-8",
            ),
            "rows.csv": (b"patientId,Target\nSmith,1", "has no column file_name"),
            "more.zip": (b"PK", "unpack it in this folder"),
        }.items()
    },
    "Patients.xlsx beside class folders": images(
        beside_folders("Patients.xlsx"), "save it as metadata.csv", "alone " + WHOLE
    ),
    "cp1252.csv beside class folders": images(
        beside_folders("cp1252.csv", "Datei,Patient\nbenign/0.png,Müller".encode("cp1252")),
        "save it as a regular file of UTF-8",
        "alone " + WHOLE,
    ),
    "notes beside class folders": images(beside_folders("README.txt")),
    **{
        f"persons in {name} beside class folders": persons("column", with_persons(folders(), name))
        for name in ("metadata.csv", "PERSONS.CSV", "metadata.CSV", "persons.tsv")
    },
    **{
        f"persons in an unread table beside {kind}": images(
            write, "its column Patient ID may contain persons' ids", "alone " + WHOLE, classes
        )
        for kind, write, classes in [
            ("class folders", with_persons(folders(), head="image_file"), KINDS),
            ("another table", with_persons(folders(), "a.csv", "where"), KINDS),
            ("labels", with_persons(tabled("label=kind")), KINDS),
            ("a folder", with_persons(tabled("label=kind"), "scans/persons.csv"), KINDS),
            (
                "several labels",
                with_persons(tabled("mass=bit, nodule=other", "labels.csv"), "metadata.csv"),
                ("mass", "nodule"),
            ),
        ]
    },
    "labels beside folders of persons": refused(
        listed("Bild", "Befund=kind", "MRN10{i:02}/{i}.png", str),
        "both the table export.csv and the folders could define the classes",
    ),
    "ids beside folders of persons": refused(
        listed("Bild", "Patient=id", "MRN10{i:02}/{i}.png", str), "look like ids"
    ),
    "a table each for train and valid": refused(
        lambda root: [
            table(
                root,
                {"Path": draw(root, [f"{part}/{IDS[n]}/study1/{i}.jpg" for i in range(9)])},
                f"{part}.csv",
            )
            for n, part in enumerate(("train", "valid"))
        ],
        "one table is read",
    ),
    "a table with spaces": persons("column", tabled(" label =kind,  Patient ID  =id")),
    "a table in another form of Unicode": images(accented),
}


@pytest.mark.parametrize("name", ROWS)
def test_no_layout_makes_a_class_of_a_person(desk, quick, tmp_path, name):
    bring(ROWS[name], desk, tmp_path)


def test_a_column_of_labels_requires_a_readable_table(desk, tmp_path):
    folders()(tmp_path / "in")
    desk.terminal = True
    command = f"init {tmp_path}/in --out {tmp_path}/out --epsilon 5 --yes --label-column Befund"
    desk.run(command, "contains none of metadata.csv", code=4)
    (tmp_path / "in" / "export.csv").write_bytes("Datei,Befund\na.png,gesünd".encode("cp1252"))
    desk.run(command, "export.csv is not a table", "save it as a regular file of UTF-8", code=4)
