"""Class folders: with parts for training and test, with names that no class should have, and with
other files or folders beside them.
"""

import unicodedata

import pytest
from layouts import (
    ASKED,
    KINDS,
    ORDER,
    WHOLE,
    both,
    bring,
    draw,
    folders,
    images,
    littered,
    refused,
    splits,
)


def masked(root):
    for kind in KINDS:
        draw(root / kind, [f"{i}{end}.png" for i in range(10) for end in ("", "_segmentation")])


def with_folders(*names):
    return both(folders(), lambda root: [(root / name).mkdir() for name in names])


ROWS = {
    "folders of systems": images(
        with_folders("lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir")
    ),
    "a folder without pictures": refused(
        with_folders("New folder", "venv", "backup"), "without pictures (New folder"
    ),
    "a class without pictures": images(
        with_folders("unsure"), "without pictures", "all " + WHOLE, classes=(*KINDS, "unsure")
    ),
    "class folders": images(folders()),
    "<class>/train, test": refused(
        folders("{kind}/{person}/{i}.png", people=["train", "test"]), "the order of the levels"
    ),
    "grades": images(folders(kinds=("grade 1", "grade 2")), classes=("grade 1", "grade 2")),
    "masks in class folders": refused(masked, "20 of 40 pictures look like masks"),
    "masks used as pictures": images(masked, "look like masks", "- y n - - y"),
    "images beside masks": refused(folders(kinds=("images", "masks")), ASKED),
    "Images beside Labels": refused(folders(kinds=("Images", "Labels")), ASKED),
    "train and others": images(
        folders(kinds=("train", "bus")), ASKED, "bus,train " + WHOLE, classes=("bus", "train")
    ),
    "splits beside others": refused(
        both(splits("train", "test"), folders("extra/{kind}/{i}.png")), ORDER
    ),
    **{
        " ".join(names): images(splits(*names), held_out=True)
        for names in [
            ("train", "test"),
            ("Train", "Val", "Test"),
            ("train_images", "Val-Images", "test2017"),
        ]
    },
    "train val": images(splits("train", "val")),
    "only train": images(splits("train")),
    "pictures in train": refused(splits("train", "test", form="{i}.png"), "no class folder"),
    "pictures in train_images": refused(
        splits("train_images", "test_images", form="{i}.png"), "no class folder"
    ),
    "pictures in parts": refused(splits("images_001", "images_002", form="{i}.png"), ASKED),
    "a wrapper": refused(folders("anonymised/{kind}/{i}.png"), ORDER, "x"),
    "class folders, littered": images(littered(folders())),
    **{
        f"{name} differ little": refused(folders(kinds=kinds), "may be one class")
        for name, kinds in {
            "capitals": ("Benign", "benign", "malignant"),
            "spaces": ("benign", "benign ", "malignant"),
        }.items()
    },
    "class folders in mixed case": refused(
        lambda root: [
            splits("Train", form="{kind}/{i}.png")(root),
            *((root / "Train" / kind).rename(root / "Train" / kind.title()) for kind in KINDS),
            draw(root / "TEST", [f"{kind}/x{i}.png" for kind in KINDS for i in range(9)], 500),
        ],
        "may be one class",
    ),
    "class folders with spaces": images(
        folders(kinds=(" benign", "malignant ")), classes=(" benign", "malignant ")
    ),
    "class folders in two forms of Unicode": images(
        lambda root: [
            draw(
                root / part,
                [
                    f"{unicodedata.normalize(form, kind)}/{i}.png"
                    for kind in ("bénin", "sévère")
                    for i in range(20)
                ],
                100 * n,
            )
            for n, (part, form) in enumerate((("train", "NFC"), ("test", "NFD")))
        ],
        classes=("bénin", "sévère"),
        held_out=True,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_no_layout_makes_a_class_of_a_person(desk, quick, tmp_path, name):
    bring(ROWS[name], desk, tmp_path)
