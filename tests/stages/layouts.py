"""Layouts of owners' images: the result of `stage init`, with and without a terminal, and of `stage
prepare`.

The id or name of a person may never appear in a log, or in a file that git would commit.
"""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import yaml
from PIL import Image
from pyarrow import parquet

KINDS = ("benign", "malignant")
IDS = [f"MRN10{i:02}" for i in range(20)]
NAMES = ["Smith", "Jones", "Garcia", "Mueller", "Rossi", "Novak", "Silva", "Kim", "Ali", "Ito"]
SECRET = [*IDS, *NAMES, "lost"]


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    array = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def draw(root: Path, names: list[str], first: int = 0) -> list[str]:
    """Write a different picture to each path below `root`. Returns the paths."""
    for i, name in enumerate(names, first):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(i))
    return names


def table(root: Path, columns: dict[str, list], name: str = "metadata.csv") -> None:
    heads = list(columns)
    lines = [
        ",".join(heads),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    (root / name).write_text("\n".join(lines) + "\n")


def folders(name: str = "{kind}/{i}.png", each: int = 30, kinds=KINDS, people=IDS):
    """Return a function that writes pictures of 20 persons in class folders.

    name: template of the paths, with `kind`, `person`, and `i`, the number of the picture.
    """
    return lambda root: draw(
        root,
        [
            name.format(kind=k, i=i, person=people[i % len(people)])
            for k in kinds
            for i in range(each)
        ],
    )


def splits(*names: str, form: str = "{kind}/{i}.png", shared: bool = False):
    """Return a function that writes class folders below one folder per part.

    Unless `shared`, each part has its own persons.
    """

    def write(root: Path) -> None:
        for number, name in enumerate(names):
            people = IDS[:6] if shared else IDS[6 * number : 6 * number + 6]
            made = [
                form.format(kind=k, i=i, person=people[i % 6]) for k in KINDS for i in range(12)
            ]
            draw(root / name, made, 100 * number)

    return write


def tabled(
    columns: str,
    name: str = "metadata.csv",
    parts=("",),
    form: str = "scans/{i}.png",
    classes=KINDS,
):
    """Return a function that writes pictures, and a table of them.

    columns: heads and contents, such as "label=kind"; the contents are keys of CELLS.
    """

    def write(root: Path) -> None:
        for number, part in enumerate(parts):
            names = draw(
                root / part,
                [form.format(i=i, kind=classes[i % 2]) for i in range(48)],
                100 * number,
            )
            cells = {
                head: [CELLS[what](i, number) for i in range(48)] for head, what in pairs(columns)
            }
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
    "number": lambda i, part: 7 + i // 4,
    "word of a person": lambda i, part: "abcdefghkmnp"[i // 4] * 3,
    "birthday": lambda i, part: f"19{50 + i // 2}-02-03",
    "gap": lambda i, part: ("benign", "malignant", "NaN")[i % 3],
    "spelled": lambda i, part: ("benign", "Benign ", "malignant")[i % 3],
    "word": lambda i, part: f"{i % 2}.0",
    "not": lambda i, part: f"{1 - i % 2}.0",
}


def pairs(columns: str) -> list[tuple[str, str]]:
    """Split columns, such as "Patient ID=id, label=kind", into pairs of a name and a content."""
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
                    for suffix, content in (
                        ("png", picture(100 * number + i)),
                        ("json", json.dumps(about).encode()),
                    ):
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
            arrays = {
                f"{part}{name}": array[where]
                for part, where in cut.items()
                for name, array in arrays.items()
            }
        else:
            arrays["classes"] = np.array(KINDS)
        np.savez(root.with_suffix(".npz"), **arrays)

    return write


def zipped(write, folder: str = "set"):
    """Return a function that writes the layout into a folder, and zips the folder."""

    def pack(root: Path) -> None:
        (root.parent / "loose").mkdir()
        write(root.parent / "loose" / folder)
        shutil.make_archive(str(root), "zip", root.parent / "loose")

    return pack


def hub(*parts: str, **columns: str):
    """Return a function that writes Parquet files with pictures inside, as on the Hugging Face Hub.

    The labels are numbers. The names of the classes are in the metadata of the schema.
    """

    def write(root: Path) -> None:
        (root / "data").mkdir(parents=True)
        for number, part in enumerate(parts):
            pictures = [{"bytes": picture(100 * number + i), "path": f"{i}.png"} for i in range(48)]
            cells = {
                name.replace("_", " "): [CELLS[what](i, number) for i in range(48)]
                for name, what in columns.items()
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


def littered(write):
    """Return a function that also writes the files that systems leave beside pictures."""

    def leave(root: Path) -> None:
        write(root)
        for folder in (root, *(entry for entry in root.iterdir() if entry.is_dir())):
            for name in (".DS_Store", "Thumbs.db", "desktop.ini", "DICOMDIR", "._0.png"):
                (folder / name).write_bytes(b"Smith")
        draw(root, [f"__MACOSX/{name}/._{name}.png" for name in NAMES])

    return leave


# ---- the expected results

# Answers to the questions of `stage init`: "-" accepts the default
WHOLE = "- n - - y"  # name, no person in two images, minutes, size, write
PERSONS = "- - - y"
REPEATED = "- - - - - y"  # persons are found by the beginnings of names, or by the ids in a column
ASKED = "the class names that were found would be published"
ORDER = "according to the order of the levels"


@dataclass(frozen=True)
class Layout:
    """A source of images, and what `stage init` should understand of it.

    - write: function that writes the source to a path
    - why: message of `--yes` if it refuses, or None
    - answers: answers to the questions on a terminal
    - classes: classes that are then prepared, or None if no project is created
    - way: rule for finding persons
    - held_out: whether there is a hold-out
    """

    write: Callable[[Path], object]
    why: str | None
    answers: str
    classes: tuple[str, ...] | None
    way: str | None = None
    held_out: bool = False


def images(write, why=None, answers=WHOLE, classes=KINDS, held_out=False) -> Layout:
    """Describe a layout in which each image is protected separately."""
    return Layout(write, why, answers, classes, held_out=held_out)


def persons(way, write, why=None, answers=PERSONS, classes=KINDS, held_out=False) -> Layout:
    """Describe a layout in which all images of a person are protected as one."""
    return Layout(write, why, answers, classes, way, held_out)


def refused(write, why, answers="-") -> Layout:
    """Describe a layout for which `stage init` creates no project with these answers."""
    return Layout(write, why, answers, None)


def committed() -> str:
    """Return the files of this project that git would add."""
    files = [
        Path(name) for name in ("params.yaml", "dvc.yaml", "README.md", "data/sensitive/card.json")
    ]
    return "".join(file.read_text() for file in files if file.exists())


def bring(layout: Layout, desk, place: Path) -> None:
    """Write a layout, create a project with --yes and one with answers, and check them.

    Each created project is also prepared.
    """
    layout.write(place / "in")
    (brought,) = place.glob("in*")
    secret = {*SECRET} - {*(layout.classes or ())}  # class names are public
    for name, begun in {"yes": layout.why is None, "asked": layout.classes is not None}.items():
        (place / name / ".dvc").mkdir(parents=True)  # a repository is there already
        os.chdir(place / name)
        os.environ["SFUMATO_STATE"] = str(place / f"state-{name}")
        if name == "yes":
            code, said = desk(
                "init", str(brought), "--epsilon", "5", "--yes", "--dataset-id", "yes"
            )
            reason = (
                Path(os.environ["SFUMATO_STATE"], "refused.txt").read_text()
                if "refused.txt" in said
                else said
            )
            assert (layout.why or "written to") in " ".join(reason.split()), reason
        else:
            desk.answers = "".join(
                "\n" if word == "-" else f"{word}\n" for word in layout.answers.split()
            )
            code, said = desk("init", str(brought), "--epsilon", "5")
        assert (code == 0) == Path("params.yaml").exists() == begun, said
        assert "local " not in said and "hold-out: " not in said, "counts are of a terminal"
        if begun:
            check_prepared(layout, desk)
        assert not [word for word in secret if word in said + committed()], said


def check_prepared(layout: Layout, desk) -> None:
    """Prepare this project, and compare its classes, persons and hold-out with the layout."""
    own = yaml.safe_load(Path("params.yaml").read_text())
    assert next(iter(own["data"].get("groups", {None: 0}))) == layout.way
    assert own["privacy"].get("unit") == ("group" if layout.way else own["privacy"].get("unit"))
    desk.run("plan --dry-run", "the images are not prepared yet")
    desk.run("prepare sensitive")
    card = json.loads(Path("data/sensitive/card.json").read_text())
    assert (card["classes"], card["split"]) == (
        [*layout.classes],
        "official" if layout.held_out else "keyed",
    )
