"""Test that other programs can read the exports to Parquet, WebDataset and PNG folders."""

import csv
import io
import json
import tarfile

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pyarrow import parquet

from sfumato.data.images import ImageSet
from sfumato.release import exports
from sfumato.release.exports import (
    PARQUET,
    PNG,
    mark_of,
    save_parquet,
    save_png_folders,
    save_webdataset,
)
from sfumato.storage.files import csv_text

NAMES = ("T-shirt/top", "Bag", "été")
KINDS = np.array(["plain"] * 25 + ["distorted"] * 15)
MARK = mark_of(["finetune"])


@pytest.fixture(params=[1, 3], ids=["grey", "colour"])
def release(digits, request) -> ImageSet:
    chosen = np.flatnonzero(digits.labels < 3)[:40]
    images = digits.images[chosen]
    if request.param == 3:
        images = np.concatenate([images, 255 - images, images // 2], axis=3)
    return ImageSet(images, digits.labels[chosen], NAMES)


def test_pandas_gives_back_the_pixels_and_labels(release, tmp_path):
    rows = np.arange(1050) % len(release)
    release = release.take(rows)
    kinds = KINDS[rows]
    save_parquet(tmp_path, release, kinds, MARK)
    assert parquet.ParquetFile(tmp_path / PARQUET).num_row_groups == 2
    table = pd.read_parquet(tmp_path / PARQUET)
    assert (
        list(table.columns) == ["image", "label", "kind"]
        and table["label"].tolist() == release.labels.tolist()
    )
    assert table["kind"].tolist() == kinds.tolist()
    for row, image in zip(table["image"], release.images, strict=True):
        assert row["path"] is None
        with Image.open(io.BytesIO(row["bytes"])) as opened:
            assert np.array_equal(np.asarray(opened).reshape(image.shape), image)


def test_the_schema_has_images_and_named_class_labels(release, tmp_path):
    save_parquet(tmp_path, release, KINDS, MARK)
    features = json.loads(parquet.read_schema(tmp_path / PARQUET).metadata[b"huggingface"])["info"][
        "features"
    ]
    label = {"_type": "ClassLabel", "names": list(NAMES)}
    kind = {"_type": "Value", "dtype": "string"}
    assert features == {"image": {"_type": "Image"}, "label": label, "kind": kind}


def test_the_same_release_gives_the_same_bytes(release, tmp_path):
    for name in "ab":
        save_parquet(tmp_path / name, release, KINDS, MARK)
        save_webdataset(tmp_path / name, release, KINDS, MARK)
    for name in (PARQUET, "webdataset/train-00000.tar"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_large_releases_are_parted_and_read_as_one(release, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "SHARD", release.images.nbytes // 3)
    save_parquet(tmp_path, release, KINDS, MARK)
    parts = sorted((tmp_path / "parquet").iterdir())
    assert [part.name for part in parts] == [
        f"train-0000{i}-of-0000{len(parts)}.parquet" for i in range(len(parts))
    ]
    assert len(parts) > 2
    assert pd.concat(map(pd.read_parquet, parts))["label"].tolist() == release.labels.tolist()

    save_webdataset(tmp_path, release, KINDS, MARK)
    found = []
    for shard in sorted((tmp_path / "webdataset").iterdir()):
        with tarfile.open(shard) as file:
            members = file.getmembers()
            for picture, about in zip(members[::2], members[1::2], strict=True):
                said = json.load(file.extractfile(about))
                assert (
                    picture.name[:-4] == about.name[:-5] and said["class"] == NAMES[said["label"]]
                )
                pixels = np.asarray(Image.open(file.extractfile(picture))).reshape(
                    release.images.shape[1:]
                )
                found.append((said["label"], said["kind"], pixels))
    assert [label for label, *_ in found] == release.labels.tolist()
    assert [kind for _, kind, _ in found] == KINDS.tolist()
    assert np.array_equal(np.stack([pixels for *_, pixels in found]), release.images)


@pytest.mark.parametrize("name", ["=cmd|'/C calc'!A0", "+1", "-1", "@SUM(1)"])
def test_a_spreadsheet_computes_no_name(tmp_path, name):
    images = ImageSet(np.zeros((2, 4, 4, 1), np.uint8), np.array([0, 1]), (name, "b"))
    save_png_folders(tmp_path, images, np.full(2, "plain"), mark_of(["finetune"]))
    with (tmp_path / PNG / "metadata.csv").open(newline="") as file:
        heads, *rows = csv.reader(file)
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in (heads, *rows) for cell in row)
    assert all((tmp_path / PNG / row[0]).is_file() for row in rows)
    # A negative number stays a number
    assert csv_text([{"x": -1.5, "y": "a"}], {"x": ".1f", "y": ""}) == "x,y\n-1.5,a\n"
