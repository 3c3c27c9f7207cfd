"""What owners bring: what `stage init` makes of it, asked and not asked, and what `stage prepare` reads then.

No row may print the id or the name of a person into a file that is committed, nor into a log.
"""

import io
import json
import os
import shutil
import subprocess
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
from PIL import Image
from pyarrow import parquet

from sfumato.data import prepare
from sfumato.planning import estimate

KINDS = ("benign", "malignant")
IDS = [f"MRN10{i:02}" for i in range(20)]
NAMES = ["Smith", "Jones", "Garcia", "Mueller", "Rossi", "Novak", "Silva", "Kim", "Ali", "Ito"]
HEXADECIMAL = ["a3f9c2", "b1e07d", "9c4d2e", "d8a6f1"]
COUNTS = {"benign": 30, "malignant": 30}


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    array = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def draw(root: Path, names: list[str], first: int = 0) -> list[str]:
    """A picture of its own for each path below `root`. Returns the paths."""
    for i, name in enumerate(names, first):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(i))
    return names


def table(root: Path, columns: dict[str, list], name: str = "metadata.csv") -> None:
    heads = list(columns)
    lines = [",".join(heads), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (root / name).write_text("\n".join(lines) + "\n")


def folders(name: str = "{kind}/{i}.png", each: int = 30, kinds=KINDS, people=IDS):
    """Pictures of 20 persons in class folders: `name` is a form of kind, person, number of the picture."""
    return lambda root: draw(
        root, [name.format(kind=k, i=i, person=people[i % len(people)]) for k in kinds for i in range(each)]
    )


def splits(*names: str, form: str = "{kind}/{i}.png", shared: bool = False):
    """The same in folders for parts, of which each has its own persons, if not `shared`."""

    def write(root: Path) -> None:
        for number, name in enumerate(names):
            people = IDS[:6] if shared else IDS[6 * number : 6 * number + 6]
            made = [form.format(kind=k, i=i, person=people[i % 6]) for k in KINDS for i in range(12)]
            draw(root / name, made, 100 * number)

    return write


def tabled(columns: str, name: str = "metadata.csv", parts=("",), form: str = "scans/{i}.png", classes=KINDS):
    """A table with columns: what is in each by its name, as `CELLS` has it."""

    def write(root: Path) -> None:
        for number, part in enumerate(parts):
            names = draw(root / part, [form.format(i=i, kind=classes[i % 2]) for i in range(48)], 100 * number)
            cells = {head: [CELLS[what](i, number) for i in range(48)] for head, what in pairs(columns)}
            table(root / part, {"file_name": names, **cells}, name)

    return write


CELLS = {
    "kind": lambda i, part: KINDS[i % 2],
    "id": lambda i, part: IDS[6 * part + i // 8],
    "name": lambda i, part: NAMES[i % 10],
    "age": lambda i, part: 20 + i,
    "bit": lambda i, part: i % 2,
    "other": lambda i, part: i // 3 % 2,
    "both": lambda i, part: ("benign", "malignant|benign", "malignant")[i % 3],
    "part": lambda i, part: ("train", "test")[i % 2],
    "date": lambda i, part: f"{2000 + i}-01-31",
    "same date": lambda i, part: f"{2000 + i // 3}-01-31",
    "scanner": lambda i, part: ("Discovery 750w", "Avanto 15")[i % 2],
    "same id": lambda i, part: IDS[i // 8],
    "full name": lambda i, part: f"{chr(65 + i // 6)}nna {NAMES[i // 6]}",
    "mail": lambda i, part: f"{NAMES[i % 3]}@clinic.org",
    "own mail": lambda i, part: f"{NAMES[i % 10]}@clinic.org",
    "birthday": lambda i, part: f"19{50 + i // 2}-02-03",
    "gap": lambda i, part: ("benign", "malignant", "NaN")[i % 3],
    "spelled": lambda i, part: ("benign", "Benign ", "malignant")[i % 3],
    "word": lambda i, part: f"{i % 2}.0",
    "not": lambda i, part: f"{1 - i % 2}.0",
}


def pairs(columns: str) -> list[tuple[str, str]]:
    """ "Patient ID=id, label=kind" -> the names and what is in them."""
    return [tuple(pair.split("=")) for pair in columns.split(", ")]


def shards(*names: str, key: str = "{i}", shared: bool = False):
    def write(root: Path) -> None:
        root.mkdir()
        for number, name in enumerate(names):
            with tarfile.open(root / name, "w") as archive:
                for i in range(24):
                    word = KINDS[i % 2] if name[0] != "p" else NAMES[i % 10] + str(i % 10)
                    about = {"label": word}
                    if key == "{i}":
                        about["Patient-ID"] = IDS[(0 if shared else 6 * number) + i // 4]
                    named = key.format(i=i, person=NAMES[i % 10])
                    for suffix, content in (("png", picture(100 * number + i)), ("json", json.dumps(about).encode())):
                        entry = tarfile.TarInfo(f"{named}.{suffix}")
                        entry.size = len(content)
                        archive.addfile(entry, io.BytesIO(content))

    return write


def archive(split: bool = False, **more):
    def write(root: Path) -> None:
        images = np.random.default_rng(0).integers(0, 256, (48, 8, 8), dtype=np.uint8)
        labels = np.arange(48) % 2
        arrays = {"images": images, "labels": labels, **more}
        if split:
            cut = {"train_": slice(0, 24), "val_": slice(24, 32), "test_": slice(32, 48)}
            arrays = {f"{part}{name}": array[where] for part, where in cut.items() for name, array in arrays.items()}
        else:
            arrays["classes"] = np.array(KINDS)
        np.savez(root.with_suffix(".npz"), **arrays)

    return write


def zipped(write, folder: str = "set"):
    """The same in a zip, within a folder."""

    def pack(root: Path) -> None:
        (root.parent / "loose").mkdir()
        write(root.parent / "loose" / folder)
        shutil.make_archive(str(root), "zip", root.parent / "loose")

    return pack


def hub(*parts: str, **columns: str):
    """Parquet with pictures inside, as hubs have them: numbers of classes, whose names stand beside the schema."""

    def write(root: Path) -> None:
        (root / "data").mkdir(parents=True)
        for number, part in enumerate(parts):
            pictures = [{"bytes": picture(100 * number + i), "path": f"{i}.png"} for i in range(48)]
            cells = {
                name.replace("_", " "): [CELLS[what](i, number) for i in range(48)] for name, what in columns.items()
            }
            made = pyarrow.Table.from_pylist(
                [
                    {"image": one, "label": i % 2, **{k: v[i] for k, v in cells.items()}}
                    for i, one in enumerate(pictures)
                ]
            )
            about = {"info": {"features": {"label": {"names": KINDS, "_type": "ClassLabel"}}}}
            made = made.replace_schema_metadata({"huggingface": json.dumps(about)})
            parquet.write_table(made, root / f"data/{part}-00000-of-00001.parquet")

    return write


def both(*writers):
    return lambda root: [write(root) for write in writers]


def beside(root: Path) -> None:
    """Class folders, and a table that names the person of each picture."""
    names = folders()(root)
    table(root, {"file_name": names, "participant-id": [IDS[i % 20] for i in range(60)]})


def beside_parts(root: Path) -> None:
    """Parts with class folders, each with a table of persons; some are in both."""
    for number, part in enumerate(("train", "test")):
        names = draw(root / part, [f"{kind}/{i}.png" for kind in KINDS for i in range(24)], 100 * number)
        table(root / part, {"file_name": names, "Subject": [IDS[i % 9] for i in range(48)]})


def accented(root: Path) -> None:
    """Files as macOS names them, and a table as others do."""
    names = draw(root, [unicodedata.normalize("NFD", f"schädel/{i}.png") for i in range(48)])
    table(root, {"file_name": [unicodedata.normalize("NFC", name) for name in names], "label": [*KINDS] * 24})


def listed(head: str, columns: str, form: str = "{i:03}.png", named=lambda path: path.name, tables=("export.csv",)):
    """Pictures in folders that say nothing, and tables as clinics export them: other names, and semicolons in one."""

    def write(root: Path) -> None:
        names = draw(root, [form.format(i=i, part=1 + i % 2) for i in range(48)])
        cells = {what: [CELLS[cell](i, 0) for i in range(48)] for what, cell in pairs(columns)}
        for name in tables:
            table(root, {head: [named(Path(one)) for one in names], **cells}, name)
            if ";" in name:
                (root / name).write_text((root / name).read_text().replace(",", ";"))

    return write


def beside_folders(name: str, content: bytes = b"PK", form: str = "{kind}/{i}.png"):
    """Class folders, or others, and a file beside them that is not read."""
    return both(folders(form), lambda root: (root / name).write_bytes(content))


def twice(root: Path) -> None:
    """Class folders, and two tables, one of which names persons."""
    beside(root)
    (root / "metadata.csv").rename(root / "persons.csv")
    table(root, {"image": ["benign/0.png"], "site": ["north"]}, "sites.csv")


def odd_names(root: Path) -> None:
    """Names that repeat their beginnings, but for two."""
    draw(root, [f"{kind}/{IDS[i % 20]}_{i}.png" for kind in KINDS for i in range(30)])
    draw(root, [f"{kind}/lost.png" for kind in KINDS], 90)


def littered(write):
    """With what systems leave beside pictures."""

    def leave(root: Path) -> None:
        write(root)
        for folder in (root, *(entry for entry in root.iterdir() if entry.is_dir())):
            for name in (".DS_Store", "Thumbs.db", "desktop.ini", "DICOMDIR", "._0.png"):
                (folder / name).write_bytes(b"Smith")
        draw(root, [f"__MACOSX/{name}/._{name}.png" for name in NAMES])

    return leave


# what is brought, what --yes says if it refuses (or None), what is answered ("-": the default; None: as --yes), what
# is prepared then: the classes, the way to persons or None, and whether a hold-out was brought
ASKED, NO_ID = "the names found for classes would be published", "- - 50"
ORDER = "which are classes"
DATES, YEARS = [f"2026-{month:02}-01" for month in range(1, 13)], ("2025", "2026")
WHOLE = "- n - - y"  # name, no two of one person, minutes, size, write
PERSONS = "- - - y"
ROWS: dict[str, tuple] = {
    "class folders": (folders(), None, WHOLE, KINDS, None, False),
    "<class>/<id>/": (folders("{kind}/{person}/{i}.png"), ORDER, "- " + PERSONS, KINDS, "folder", False),
    "<id>/<class>/": (folders("{person}/{kind}/{i}.png"), ORDER, "- " + PERSONS, KINDS, "folder", False),
    "<name>/<date>/": (
        folders("{kind}/{person}/{i}.png", kinds=NAMES[:2], people=DATES),
        ORDER,
        "x",
        None,
        None,
        False,
    ),
    "<year>/<name>/": (
        folders("{kind}/{person}/{i}.png", kinds=YEARS, people=NAMES[:5]),
        ORDER,
        "x",
        None,
        None,
        False,
    ),
    "<name>/<class>/": (
        folders("{person}/{kind}/{i}.png", people=NAMES),
        "which are classes",
        "person/class " + PERSONS,
        KINDS,
        "folder",
        False,
    ),
    "<class>/<name>/": (
        folders("{kind}/{person}/{i}.png", people=NAMES),
        "which are classes",
        "class/person " + PERSONS,
        KINDS,
        "folder",
        False,
    ),
    "<class>/train, test": (
        folders("{kind}/{person}/{i}.png", people=["train", "test"]),
        "which are",
        "-",
        None,
        None,
        0,
    ),
    "<id>/": (folders("{person}/{kind}{i}.png"), ASKED, "-", None, None, False),
    "<name>/": (folders("{person}/{kind}{i}.png", people=NAMES), ASKED, "-", None, None, False),
    "<name>/, nine": (folders("{person}/{i}.png", each=18, people=NAMES[:9], kinds=("a",)), ASKED, "-", None, None, 0),
    "<first and last name>/": (
        folders("{person}/{kind}{i}.png", people=["Tony_Blair", "Colin_Powell", "Hugo_Chavez"]),
        ASKED,
        "-",
        None,
        None,
        False,
    ),
    "one person": (folders(kinds=("Smith",)), "one class only", "-", None, None, False),
    "numbered persons": (folders("{person}/{i}.png", 300, ("a",), list(range(30))), ASKED, "-", None, None, False),
    "ids that are classes": (
        folders(kinds=("BIRADS100", "BIRADS200")),
        ASKED,
        "all " + WHOLE,
        ("BIRADS100", "BIRADS200"),
        None,
        False,
    ),
    "grades": (folders(kinds=("grade 1", "grade 2")), None, WHOLE, ("grade 1", "grade 2"), None, False),
    "images beside masks": (folders(kinds=("images", "masks")), ASKED, "-", None, None, False),
    "Images beside Labels": (folders(kinds=("Images", "Labels")), ASKED, "-", None, None, False),
    "train and others": (folders(kinds=("train", "bus")), ASKED, "bus,train " + WHOLE, ("bus", "train"), None, False),
    "splits beside others": (
        both(splits("train", "test"), folders("extra/{kind}/{i}.png")),
        "which are classes",
        "-",
        None,
        None,
        False,
    ),
    **{
        " ".join(names): (splits(*names), None, WHOLE, KINDS, None, True)
        for names in [
            ("train", "test"),
            ("train", "val", "test"),
            ("Train", "Val", "Test"),
            ("TRAINING", "VALIDATION", "TESTING"),
            ("training", "valid", "testing"),
            ("train", "dev", "test"),
            ("train_images", "Val-Images", "test2017"),
        ]
    },
    "train val": (splits("train", "val"), None, WHOLE, KINDS, None, False),
    "train alone": (splits("train"), None, WHOLE, KINDS, None, False),
    "splits, <class>/<id>/": (
        splits("train", "val", "test", form="{kind}/{person}/{i}.png"),
        ORDER,
        "- " + PERSONS,
        KINDS,
        "folder",
        True,
    ),
    "splits, <id>/<class>/": (
        splits("train", "val", "test", form="{person}/{kind}/{i}.png"),
        ORDER,
        "- " + PERSONS,
        KINDS,
        "folder",
        True,
    ),
    "splits, somebody in both": (
        splits("train", "test", form="{kind}/{person}/{i}.png", shared=True),
        ORDER,
        "- -",
        None,
        None,
        True,
    ),
    "pictures in train": (splits("train", "test", form="{i}.png"), "no folder of a class", "-", None, None, True),
    "a table": (tabled("label=kind"), None, WHOLE, KINDS, None, False),
    "zip": (zipped(folders()), None, WHOLE, KINDS, None, False),
    "zip, splits": (zipped(splits("train", "val", "test")), None, WHOLE, KINDS, None, True),
    "zip, a table": (zipped(tabled("label=kind, Patient ID=id")), None, PERSONS, KINDS, "column", False),
    "zip, <id>/": (zipped(folders("{person}/{kind}{i}.png")), ASKED, "-", None, None, False),
    "zip, shards": (zipped(shards("train-0.tar", "test-0.tar")), None, PERSONS, KINDS, "column", True),
    "zip, arrays": (zipped(archive()), None, WHOLE, KINDS, None, False),
    "Parquet": (hub("train"), None, WHOLE, KINDS, None, False),
    "Parquet, splits and persons": (hub("train", "test", Patient_ID="id"), None, PERSONS, KINDS, "column", True),
    "Parquet in a zip": (zipped(hub("train", MRN="id")), None, PERSONS, KINDS, "column", False),
    "a table, by meaning": (tabled("Diagnosis=kind, age=age"), None, WHOLE, KINDS, None, False),
    "a table, one column": (tabled("what=kind"), "name that of the labels", "- " + WHOLE, KINDS, None, False),
    "a table, two columns": (tabled("what=kind, age=age"), "name that of", "what " + WHOLE, KINDS, None, False),
    "a table, sole id": (tabled("code=id"), "name that of the labels", "- -", None, None, False),
    "a table, sole name": (tabled("who=name"), "name that of the labels", "- -", None, None, False),
    "a table, sole age": (tabled("age=age"), "name that of the labels", "- -", None, None, False),
    "a table, label of ids": (tabled("label=id"), ASKED, "-", None, None, False),
    "a table, label of names": (tabled("label=name"), ASKED, "all " + WHOLE, tuple(sorted(NAMES)), None, False),
    **{
        f"a table, sole {head}": (tabled(f"{head}=id"), "has no column of labels", "-", None, None, False)
        for head in ("MRN", "Patient ID", "patient-id", "PID", "subject_ID", "StudyPatientID", "Case", "Participant No")
    },
    **{
        f"a table, {head}": (tabled(f"label=kind, {head}=id"), None, PERSONS, KINDS, "column", False)
        for head in ("MRN", "Patient ID", "patient-id", "PatientID", "subject", "Anon Patient Id", "case")
    },
    "a table, two of persons": (
        tabled("label=kind, PID=id, subject=id"),
        "may all hold",
        "subject " + PERSONS,
        KINDS,
        "column",
        False,
    ),
    "a table without heads": (
        lambda root: table(root, {f"{IDS[0]}.png": draw(root, ["a.png"])}),
        "no column",
        "-",
        0,
        0,
        0,
    ),
    "Hugging Face's parts": (
        tabled("label=kind, Patient ID=id", parts=("train", "validation", "test")),
        None,
        PERSONS,
        KINDS,
        "column",
        True,
    ),
    "a table above parts": (
        tabled("label=kind", form="{kind}/{i}.png", classes=("train", "test")),
        0,
        WHOLE,
        KINDS,
        0,
        1,
    ),
    "a table of any name": (listed("Image Index", "Diagnosis=kind, Patient ID=id"), None, PERSONS, KINDS, "column", 0),
    "a table with semicolons": (listed("Bild", "label=kind", tables=(";.csv",)), None, WHOLE, KINDS, None, False),
    "a table without suffixes, pictures in parts": (
        listed("image_id", "lesion=age, dx=kind", "X10000_images_part_{part}/X_{i:04}.jpg", lambda path: path.stem),
        None,
        WHOLE,
        KINDS,
        None,
        False,
    ),
    "a table, ids that repeat": (
        listed("image_id", "lesion_id=id, dx=kind, date=date", "{i:04}.jpg", lambda path: path.stem),
        "ids in a column repeat",
        "- - - - - y",
        KINDS,
        "column",
        False,
    ),
    "a table, dates and scanners that repeat": (
        listed("image_id", "date=same date, scanner=scanner, dx=kind", "{i:04}.jpg", lambda path: path.stem),
        None,
        WHOLE,
        KINDS,
        None,
        False,
    ),
    "names and dates": (
        folders("{kind}/{person}_2026-01-{i:02}.png", people=[f"{name}_Anna" for name in NAMES]),
        "repeat",
        "- - - - - y",
        KINDS,
        "pattern",
        False,
    ),
    "a list of labels, pictures in parts": (
        listed("Image Index", "Finding Labels=both, Patient ID=id", "images_00{part}/images/{i:04}.png"),
        None,
        PERSONS,
        KINDS,
        "column",
        False,
    ),
    "a table, one column, beside train": (
        listed("image", "level=kind", "train/{i}_left.png", lambda path: path.stem),
        "name that of the labels",
        "- " + WHOLE,
        KINDS,
        None,
        False,
    ),
    "two tables": (listed("id_code", "dx=kind", tables=("a.csv", "b.csv")), "one table is read", "-", 0, 0, 0),
    "pictures in train_images": (splits("train_images", "test_images", form="{i}.png"), "no folder of", "-", 0, 0, 1),
    "pictures in parts": (splits("images_001", "images_002", form="{i}.png"), ASKED, "-", None, None, False),
    "several labels": (tabled("mass=bit, nodule=other, MRN=id"), None, PERSONS, ("mass", "nodule"), "column", False),
    "labels in a list": (tabled("found=both, patient=id", "labels.csv"), None, PERSONS, KINDS, "column", False),
    "folders and a table": (
        tabled("label=kind", form="{kind}/{i}.png", classes=("left", "right")),
        "either may hold the classes",
        "all " + WHOLE,
        ("left", "right"),
        None,
        False,
    ),
    "folders and a like table": (tabled("label=kind", form="{kind}/{i}.png"), None, WHOLE, KINDS, None, False),
    "folders and persons": (beside, None, PERSONS, KINDS, "column", False),
    **{
        f"names such as {form}": (
            folders("{kind}/" + form),
            "repeat their beginnings",
            "- - - - - y",
            KINDS,
            "pattern",
            0,
        )
        for form in ("{person}_{i}.png", "{person}-left-{i}.png", "{person}_{i}_x.png")
    },
    "names of persons": (
        folders("{kind}/{person}_{i}.png", people=NAMES),
        "repeat",
        "- - - - - y",
        KINDS,
        "pattern",
        0,
    ),
    "names, but for two": (odd_names, "repeat", "- - - alone - - y", KINDS, "pattern", False),
    "names, another pattern": (odd_names, "repeat", "- - (a)(b) ^(X) ^([a-zA-Z]+\\d*) - - y", KINDS, "pattern", False),
    "tar files": (shards("a.tar"), None, PERSONS, KINDS, "column", False),
    "tar files, parts": (shards("x-train-0.tar", "x-val-0.tar", "x-test-0.tar"), None, PERSONS, KINDS, "column", True),
    "tar files of names": (shards("people.tar"), ASKED, "-", None, None, False),
    "splits, <id>/": (splits("Train", "Test", form="{person}/{i}{kind}.png"), ASKED, "-", None, None, 0),
    "splits, <name>/": (
        lambda root: [
            draw(root / part, [f"{NAMES[5 * n + i % 5]}/{i}.png" for i in range(60)])
            for n, part in enumerate(("train", "test"))
        ],
        "other names in training",
        "-",
        None,
        None,
        False,
    ),
    "an archive": (archive(), None, WHOLE, KINDS, None, False),
    "an archive, persons": (archive(Patient_IDs=np.array(IDS * 3)[:48]), None, PERSONS, KINDS, "column", False),
    "MedMNIST's, persons": (archive(True, subject=np.arange(48) + 1), None, PERSONS, ("0", "1"), "column", True),
    "MedMNIST's, in both": (
        archive(True, subject=np.arange(48) % 9 + 1),
        "pictures in both train and test",
        "-",
        None,
        None,
        True,
    ),
    "<class>/<id>/<date>/": (folders("{kind}/{person}/2026-01-02/{i}.png"), "three deep", "-", None, None, False),
    "<hexadecimal id>/": (folders("{person}/{kind}{i}.png", people=HEXADECIMAL), ASKED, "-", None, None, False),
    "<P01>/": (folders("{person}/{kind}{i}.png", people=[f"P0{i}" for i in range(1, 5)]), ASKED, "-", None, None, 0),
    "<initials and date>/": (
        folders("{person}/{kind}{i}.png", people=["AB 1.2.80", "CD 30.4.79", "EF 5-6-90"]),
        ASKED,
        "-",
        None,
        None,
        False,
    ),
    **{
        f"<{name}>/": (folders("{person}/{kind}{i}.png", people=people), ASKED, "-", None, None, False)
        for name, people in {
            "name, given name": ["Smith, John", "Müller, Hans", "Иванова, Анна"],
            "name of DICOM": ["Smith^John", "Müller^Hans", "Ito^Aiko"],
        }.items()
    },
    "a wrapper": (folders("anonymised/{kind}/{i}.png"), ORDER, "x", None, None, False),
    "a wrapper in a zip": (zipped(folders("anonymised/{kind}/{i}.png")), None, WHOLE, KINDS, None, False),
    "zip, within a person's folder": (zipped(folders(), "Smith_MRN1001"), None, WHOLE, KINDS, None, False),
    "class folders, littered": (littered(folders()), None, WHOLE, KINDS, None, False),
    "zip, littered": (zipped(littered(splits("train", "test"))), None, WHOLE, KINDS, None, True),
    "Parquet, a column of names": (hub("train", name="name"), "repeat", "- - - - - y", KINDS, "column", False),
    "tar files, names in keys": (shards("a.tar", key="{person}_{i}"), "repeat", "- - - - - y", KINDS, "pattern", False),
    "dates before ids": (
        folders(
            "{kind}/{person}_{i}.png", people=[f"{y}-0{m}-12_{IDS[y % 9]}" for y in range(2015, 2025) for m in (1, 2)]
        ),
        "repeat their beginnings",
        "- - - - - y",
        KINDS,
        "pattern",
        False,
    ),
    "dates after ids": (
        folders("{kind}/{person}_2024-05-03_{i}.png"),
        "repeat their beginnings",
        "- - - - - y",
        KINDS,
        "pattern",
        False,
    ),
    **{
        f"{name} differ little": (folders(kinds=kinds), "may be one", "-", None, None, False)
        for name, kinds in {
            "capitals": ("Benign", "benign", "malignant"),
            "spaces": ("benign", "benign ", "malignant"),
            "forms of Unicode": ("s\u00e9v\u00e8re", "se\u0301ve\u0300re", "benign"),
        }.items()
    },
    "a table, labels spelled in two ways": (tabled("label=spelled"), "may be one", "-", None, None, False),
    "a table, missing labels": (tabled("label=gap"), "may stand for a missing label", "-", None, None, False),
    "a table, label of e-mails": (tabled("label=mail"), ASKED, "-", None, None, False),
    "<initials>/": (folders("{person}/{kind}{i}.png", people=["TB", "CP", "HC"]), ASKED, "-", None, None, False),
    **{
        f"a table, {head} that repeats": (
            tabled(f"{head}={cell}, dx=kind"),
            "ids in a column repeat",
            "- - - - - y",
            KINDS,
            "column",
            False,
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
    "a table, a diagnosis beside sex": (tabled("dx=kind, male=bit, smoker=other"), None, WHOLE, KINDS, None, False),
    "one column a class": (tabled("MEL=word, NV=not, MRN=id"), None, PERSONS, ("MEL", "NV"), "column", False),
    "augmented copies": (
        lambda root: [
            draw(root / kind, [f"s{i:02}{way}.png" for i in range(12) for way in ("", "_aug1", "_hflip")], 100 * n)
            for n, kind in enumerate(KINDS)
        ],
        "repeat their beginnings",
        "- - - - - y",
        KINDS,
        "pattern",
        False,
    ),
    **{
        f"{name} beside pictures": (beside_folders(name, content, "scans/{kind}{i}.png"), refused, "-", None, None, 0)
        for name, (content, refused) in {
            "Befunde.xlsx": (b"PK", "save it as metadata.csv"),
            "labels.txt": (b"scans/benign0.png 1", "save it as metadata.csv"),
            "labels.json": (b"{}", "save it as metadata.csv"),
            "cp1252.csv": ("Datei,Patient\nbenign0.png,Müller".encode("cp1252"), "write a regular file of UTF-8"),
            "UTF-16.csv": ("Datei,Diagnose\nbenign0.png,x".encode("utf-16"), "write a regular file of UTF-8"),
            "rows.csv": (b"patientId,Target\nSmith,1", "has no column file_name"),
            "more.zip": (b"PK", "unpack it there"),
        }.items()
    },
    "Patients.xlsx beside class folders": (
        beside_folders("Patients.xlsx"),
        "save it as metadata.csv",
        "all " + WHOLE,
        KINDS,
        None,
        False,
    ),
    "cp1252.csv beside class folders": (
        beside_folders("cp1252.csv", "Datei,Patient\nbenign/0.png,Müller".encode("cp1252")),
        "write a regular file of UTF-8",
        "all " + WHOLE,
        KINDS,
        None,
        False,
    ),
    "notes beside class folders": (beside_folders("README.txt"), None, WHOLE, KINDS, None, False),
    "two tables beside class folders": (twice, "one table is read", "-", None, None, False),
    "a table each for train and valid": (
        lambda root: [
            table(root, {"Path": draw(root, [f"{part}/{IDS[n]}/study1/{i}.jpg" for i in range(9)])}, f"{part}.csv")
            for n, part in enumerate(("train", "valid"))
        ],
        "one table is read",
        "-",
        None,
        None,
        False,
    ),
    "<id>/<study>/<series>/": (folders("{person}/study1/{kind}/{i}.png"), "three deep", "-", None, None, False),
    "<fold>/<class>/": (
        folders("{person}/{kind}/{i}.png", people=[f"fold{i}" for i in range(5)]),
        ORDER,
        "- " + PERSONS,
        None,
        None,
        False,
    ),
    "class folders in mixed case": (
        lambda root: [
            splits("Train", form="{kind}/{i}.png")(root),
            *((root / "Train" / kind).rename(root / "Train" / kind.title()) for kind in KINDS),
            draw(root / "TEST", [f"{kind}/x{i}.png" for kind in KINDS for i in range(9)], 500),
        ],
        "may be one",
        "-",
        None,
        None,
        True,
    ),
    "class folders with spaces": (
        folders(kinds=(" benign", "malignant ")),
        None,
        WHOLE,
        (" benign", "malignant "),
        None,
        0,
    ),
    "a table with spaces": (tabled(" label =kind,  Patient ID  =id"), None, PERSONS, KINDS, "column", False),
    "class folders in two forms of Unicode": (
        lambda root: [
            draw(
                root / part,
                [f"{unicodedata.normalize(form, kind)}/{i}.png" for kind in ("bénin", "sévère") for i in range(20)],
                100 * n,
            )
            for n, (part, form) in enumerate((("train", "NFC"), ("test", "NFD")))
        ],
        "may be one",
        "-",
        None,
        None,
        True,
    ),
    "a table in another form of Unicode": (accented, None, WHOLE, KINDS, None, False),
    **{
        f"{name}, somebody in both": (write, "person(s) have pictures in both train and test", "-", None, None, True)
        for name, write in {
            "Hugging Face's parts": tabled("label=kind, Patient ID=same id", parts=("train", "test")),
            "zip of a table": zipped(tabled("label=kind, MRN=same id", parts=("train", "test"))),
            "folders and a table": lambda root: beside_parts(root),
            "Parquet": hub("train", "test", Patient_ID="same id"),
            "Parquet in a zip": zipped(hub("train", "test", subject="same id")),
            "tar files": shards("train-0.tar", "test-0.tar", shared=True),
            "zip of tar files": zipped(shards("train-0.tar", "test-0.tar", shared=True)),
        }.items()
    },
    **{
        f"{name}, somebody in both": (write, refused, answers, None, None, True)
        for name, (write, refused, answers) in {
            "names": (splits("train", "test", form="{kind}/{person}_{i}.png", shared=True), "repeat", "- - - -"),
            "zip, folders": (
                zipped(splits("train", "test", form="{kind}/{person}/{i}.png", shared=True)),
                ORDER,
                "- -",
            ),
            "<id>/<class>/": (splits("train", "test", form="{person}/{kind}/{i}.png", shared=True), ORDER, "- -"),
        }.items()
    },
}
SECRET = [*IDS, *NAMES, "lost"]


@pytest.fixture
def quick(monkeypatch, expect_seconds):
    expect_seconds(lambda params: {name: 1.0 for name in estimate.FRAME})
    monkeypatch.setattr(prepare, "secret_key", lambda *_: b"\2" * 32)  # another may hold none of a few out
    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda call, **more: real(["true"], **more) if "dvc" in call else real(call, **more)
    )


def committed() -> str:
    """What git would take of the project here."""
    files = [Path(name) for name in ("params.yaml", "dvc.yaml", "README.md", "data/sensitive/card.json")]
    return "".join(file.read_text() for file in files if file.exists())


@pytest.mark.parametrize("name", ROWS)
def test_no_layout_makes_a_class_of_a_person(desk, quick, tmp_path, environment, name):
    write, refused, answers, classes, way, held_out = ROWS[name]
    write(tmp_path / "in")
    place = next(tmp_path.glob("in*"))
    public = {*SECRET} - {*(classes or ())}  # of names that their owner called classes

    def begin(folder: str) -> None:
        (tmp_path / folder).mkdir()
        os.chdir(tmp_path / folder)

    def check(said: str, prepared: bool) -> None:
        assert not [word for word in public if word in said + committed()]
        assert "local " not in said and "hold-out: " not in said, "counts are of a terminal"
        if not prepared:
            return
        own = yaml.safe_load(Path("params.yaml").read_text())
        assert next(iter(own["data"].get("groups", {None: 0}))) == (way or None)
        assert own["privacy"].get("unit") == ("group" if way else own["privacy"].get("unit"))
        desk.run("prepare sensitive")
        card = json.loads(Path("data/sensitive/card.json").read_text())
        assert (card["classes"], card["split"]) == ([*classes], "official" if held_out else "keyed")
        assert not [word for word in public if word in committed()]

    begin("yes")
    code, said = desk("init", str(place), "--epsilon", "5", "--yes", "--dataset-id", "yes")
    assert (code == 0) == Path("params.yaml").exists() == (not refused), said
    reason = Path(os.environ["SFUMATO_STATE"], "refused.txt").read_text() if "refused.txt" in said else said
    assert (refused or "written to") in " ".join(reason.split())
    check(said, not refused)
    environment["SFUMATO_STATE"] = str(tmp_path / "another")
    begin("asked")
    desk.answers = "".join("\n" if word == "-" else f"{word}\n" for word in answers.split())
    code, said = desk("init", str(place), "--epsilon", "5")
    assert (code == 0) == (classes not in (None, 0)), said
    check(said, code == 0)
