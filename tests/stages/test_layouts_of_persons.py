"""Persons in the names of folders and files.

Each person becomes one group, within one part. If this is unclear or impossible, `stage init` asks
or refuses. A person never becomes a class.
"""

from pathlib import Path

import pytest
from layouts import (
    ASKED,
    IDS,
    KINDS,
    NAMES,
    ORDER,
    PERSONS,
    REPEATED,
    WHOLE,
    bring,
    draw,
    folders,
    hub,
    images,
    persons,
    refused,
    shards,
    splits,
    table,
    tabled,
    zipped,
)

DATES = [f"2026-{month:02}-01" for month in range(1, 13)]
YEARS = ("2025", "2026")


def odd_names(root: Path) -> None:
    """Write pictures with names that begin with a person's id, except two pictures."""
    draw(root, [f"{kind}/{IDS[i % 20]}_{i}.png" for kind in KINDS for i in range(30)])
    draw(root, [f"{kind}/lost.png" for kind in KINDS], 90)


def beside_parts(root: Path) -> None:
    """Write two parts with class folders, each with a table of persons. Some are in both parts."""
    for number, part in enumerate(("train", "test")):
        names = draw(
            root / part, [f"{kind}/{i}.png" for kind in KINDS for i in range(24)], 100 * number
        )
        table(root / part, {"file_name": names, "Subject": [IDS[i % 9] for i in range(48)]})


def glued_in_one_part(root: Path) -> None:
    """Write cells of 20 smears. A smear has cells of both classes, in both parts.

    Only in valid/, the names of malignant cells begin with the class.
    """
    for number, (part, glued) in enumerate((("train", ""), ("valid", "Malignant"))):
        names = [f"C{100 + i % 20}P{61 + i % 20}thinF_IMG_cell_{i // 20}.png" for i in range(60)]
        draw(root / part / "benign", names, 200 * number)
        draw(root / part / "malignant", [glued + name for name in names], 200 * number + 100)


ROWS = {
    "<class>/<id>/": persons("folder", folders("{kind}/{person}/{i}.png"), ORDER, "- " + PERSONS),
    "<id>/<class>/": persons("folder", folders("{person}/{kind}/{i}.png"), ORDER, "- " + PERSONS),
    "<name>/<date>/": refused(
        folders("{kind}/{person}/{i}.png", kinds=NAMES[:2], people=DATES), ORDER, "x"
    ),
    "<year>/<name>/": refused(
        folders("{kind}/{person}/{i}.png", kinds=YEARS, people=NAMES[:5]), ORDER, "x"
    ),
    "<name>/<class>/": persons(
        "folder", folders("{person}/{kind}/{i}.png", people=NAMES), ORDER, "person/class " + PERSONS
    ),
    "<class>/<name>/": persons(
        "folder", folders("{kind}/{person}/{i}.png", people=NAMES), ORDER, "class/person " + PERSONS
    ),
    "<id>/": refused(folders("{person}/{kind}{i}.png"), ASKED),
    "<name>/": refused(folders("{person}/{kind}{i}.png", people=NAMES), ASKED),
    "<name>/, nine": refused(
        folders("{person}/{i}.png", each=18, people=NAMES[:9], kinds=("a",)), ASKED
    ),
    "<first and last name>/": refused(
        folders("{person}/{kind}{i}.png", people=["Tony_Blair", "Colin_Powell", "Hugo_Chavez"]),
        ASKED,
    ),
    "one person": refused(folders(kinds=("Smith",)), "has 1 class(es)"),
    "numbered persons": refused(folders("{person}/{i}.png", 300, ("a",), list(range(30))), ASKED),
    "ids as classes": images(
        folders(kinds=("BIRADS100", "BIRADS200")),
        ASKED,
        "all " + WHOLE,
        classes=("BIRADS100", "BIRADS200"),
    ),
    "splits, <class>/<id>/": persons(
        "folder",
        splits("train", "val", "test", form="{kind}/{person}/{i}.png"),
        ORDER,
        "- " + PERSONS,
        held_out=True,
    ),
    "splits, <id>/<class>/": persons(
        "folder",
        splits("train", "val", "test", form="{person}/{kind}/{i}.png"),
        ORDER,
        "- " + PERSONS,
        held_out=True,
    ),
    "splits, somebody in both": refused(
        splits("train", "test", form="{kind}/{person}/{i}.png", shared=True), ORDER, "- -"
    ),
    "names and dates": persons(
        "pattern",
        folders("{kind}/{person}_2026-01-{i:02}.png", people=[f"{name}_Anna" for name in NAMES]),
        "repeat",
        REPEATED,
    ),
    **{
        f"names such as {form}": persons("pattern", folders("{kind}/" + form), "repeat", REPEATED)
        for form in ("{person}_{i}.png", "{person}-left-{i}.png", "{person}_{i}_x.png")
    },
    "names of persons": persons(
        "pattern", folders("{kind}/{person}_{i}.png", people=NAMES), "repeat", REPEATED
    ),
    **{
        f"scheme {form}": persons("pattern", folders("{kind}/" + form), "repeat", REPEATED)
        for form in (
            "BraTS20_Training_{person}_{i}.png",
            "{i:03}_{person}.png",
            "Mass-Training_P_{person}_LEFT_{i}.png",
            "{person}(2{i}).png",
            "SOB_B_A-14-{person}-40-{i:03}.png",
            "CheXpert_train_{person}_study1_view{i}_frontal.jpg",
            "OAS1_{person}_MR1_mpr-1_{i}.jpg",
            "{person}_2CH_ED_{i}.png",
            "{person}__M_Left_index_finger_{i}.png",
            "TCGA_CS_{person}_19960909_{i}.png",
            "C33{person}thinF_IMG_20150619_114756a_cell_{i}.png",
            "p10_{person}_s5041_0{i:03}.png",
        )
    },
    **{
        f"scheme {form}": refused(folders("{kind}/" + form, people=people), "repeat")
        for form, people in (
            ("frame{i:03}_video{person}.png", [*range(9)]),
            ("{person}_{i:02}.png", NAMES[:3]),
            ("{i}_{person}.png", [*range(1, 20)]),
            (
                "TCGA-{person}-01Z_{i}.png",
                ["0D-71QC", "A1-51QC", "0D-9XK2", "A1-QQ77", "0D-5ZZ1"] * 2,
            ),
        )
    },
    "photographs in a row": refused(
        folders("{kind}/IMG_20260131_1200{i:02}.png"), "within seconds"
    ),
    "class in the id": persons(
        "pattern",
        lambda root: [
            draw(root / kind, [f"{kind[:3]}-{IDS[i // 2]}-{i % 2}.png" for i in range(40)], 100 * n)
            for n, kind in enumerate(KINDS)
        ],
        "repeat",
        REPEATED,
    ),
    "class glued in one part": persons("pattern", glued_in_one_part, "repeat", REPEATED),
    "scan (1).png, train0.png": images(
        lambda root: [
            draw(
                root / kind,
                [f"{word}.png" for i in range(30) for word in (f"scan ({i})", f"train{i}")],
                100 * n,
            )
            for n, kind in enumerate(KINDS)
        ]
    ),
    "names, but for two": persons("pattern", odd_names, "repeat", "- - - alone - - y"),
    "names, another pattern": persons(
        "pattern", odd_names, "repeat", "- - (a)(b) ^(X) ^([a-zA-Z]+\\d*) - - y"
    ),
    "splits, <id>/": refused(splits("Train", "Test", form="{person}/{i}{kind}.png"), ASKED),
    "splits, <name>/": refused(
        lambda root: [
            draw(root / part, [f"{NAMES[5 * n + i % 5]}/{i}.png" for i in range(60)])
            for n, part in enumerate(("train", "test"))
        ],
        "may therefore stand for persons",
    ),
    "<class>/<id>/<date>/": refused(
        folders("{kind}/{person}/2026-01-02/{i}.png"), "three levels of folders"
    ),
    "<name of DICOM>/": refused(
        folders("{person}/{kind}{i}.png", people=["Smith^John", "Müller^Hans", "Ito^Aiko"]), ASKED
    ),
    "dates before ids": persons(
        "pattern",
        folders(
            "{kind}/{person}_{i}.png",
            people=[f"{y}-0{m}-12_{IDS[y % 9]}" for y in range(2015, 2025) for m in (1, 2)],
        ),
        "repeat",
        REPEATED,
    ),
    "dates after ids": persons(
        "pattern", folders("{kind}/{person}_2024-05-03_{i}.png"), "repeat", REPEATED
    ),
    "<initials>/": refused(folders("{person}/{kind}{i}.png", people=["TB", "CP", "HC"]), ASKED),
    "augmented copies": persons(
        "pattern",
        lambda root: [
            draw(
                root / kind,
                [f"s{i:02}{way}.png" for i in range(12) for way in ("", "_aug1", "_hflip")],
                100 * n,
            )
            for n, kind in enumerate(KINDS)
        ],
        "repeat",
        REPEATED,
    ),
    "<id>/<study>/<series>/": refused(
        folders("{person}/study1/{kind}/{i}.png"), "three levels of folders"
    ),
    "<fold>/<class>/": refused(
        folders("{person}/{kind}/{i}.png", people=[f"fold{i}" for i in range(5)]),
        ORDER,
        "- " + PERSONS,
    ),
    **{
        f"{name}, somebody in both": refused(
            write, "person(s) have pictures in both train and test"
        )
        for name, write in {
            "Hugging Face's parts": tabled(
                "label=kind, Patient ID=same id", parts=("train", "test")
            ),
            "zip of a table": zipped(tabled("label=kind, MRN=same id", parts=("train", "test"))),
            "folders and a table": beside_parts,
            "Parquet": hub("train", "test", Patient_ID="same id"),
            "Parquet in a zip": zipped(hub("train", "test", subject="same id")),
            "tar files": shards("train-0.tar", "test-0.tar", shared=True),
            "zip of tar files": zipped(shards("train-0.tar", "test-0.tar", shared=True)),
        }.items()
    },
    **{
        f"{name}, somebody in both": refused(write, why, answers)
        for name, (write, why, answers) in {
            "names": (
                splits("train", "test", form="{kind}/{person}_{i}.png", shared=True),
                "repeat",
                "- - - -",
            ),
            "zip, folders": (
                zipped(splits("train", "test", form="{kind}/{person}/{i}.png", shared=True)),
                ORDER,
                "- -",
            ),
            "<id>/<class>/": (
                splits("train", "test", form="{person}/{kind}/{i}.png", shared=True),
                ORDER,
                "- -",
            ),
        }.items()
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_no_layout_makes_a_class_of_a_person(desk, quick, tmp_path, name):
    bring(ROWS[name], desk, tmp_path)
