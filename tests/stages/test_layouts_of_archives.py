"""Zips, tar files, Parquet and arrays are read like the layouts packed in them."""

import numpy as np
import pytest
from layouts import (
    ASKED,
    IDS,
    REPEATED,
    archive,
    bring,
    folders,
    hub,
    images,
    littered,
    persons,
    refused,
    shards,
    splits,
    tabled,
    zipped,
)

ROWS = {
    "zip": images(zipped(folders())),
    "zip, splits": images(zipped(splits("train", "val", "test")), held_out=True),
    "zip, a table": persons("column", zipped(tabled("label=kind, Patient ID=id"))),
    "zip, <id>/": refused(zipped(folders("{person}/{kind}{i}.png")), ASKED),
    "zip, shards": persons("column", zipped(shards("train-0.tar", "test-0.tar")), held_out=True),
    "zip, arrays": images(zipped(archive())),
    "Parquet": images(hub("train")),
    "Parquet, splits and persons": persons(
        "column", hub("train", "test", Patient_ID="id"), held_out=True
    ),
    "Parquet in a zip": persons("column", zipped(hub("train", MRN="id"))),
    "tar files": persons("column", shards("a.tar")),
    "tar files, parts": persons(
        "column", shards("x-train-0.tar", "x-val-0.tar", "x-test-0.tar"), held_out=True
    ),
    "tar files of names": refused(shards("people.tar"), ASKED),
    "an archive": images(archive()),
    "an archive, persons": persons("column", archive(Patient_IDs=np.array(IDS * 3)[:48])),
    "MedMNIST's, persons": persons(
        "column", archive(True, subject=np.arange(48) + 1), classes=("0", "1"), held_out=True
    ),
    "MedMNIST's, in both": refused(
        archive(True, subject=np.arange(48) % 9 + 1), "pictures in both train and test"
    ),
    "a wrapper in a zip": images(zipped(folders("anonymised/{kind}/{i}.png"))),
    "zip, within a person's folder": images(zipped(folders(), "Smith_MRN1001")),
    "zip, littered": images(zipped(littered(splits("train", "test"))), held_out=True),
    "Parquet, a column of names": persons("column", hub("train", name="name"), "repeat", REPEATED),
    "tar files, names in keys": persons(
        "pattern", shards("a.tar", key="{person}_{i}"), "repeat", REPEATED
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_no_layout_makes_a_class_of_a_person(desk, quick, tmp_path, name):
    bring(ROWS[name], desk, tmp_path)
