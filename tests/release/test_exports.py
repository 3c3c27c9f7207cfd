"""The Parquet export, as others read it."""

import io
import json

import numpy as np
import pytest

from sfumato.data.images import ImageSet
from sfumato.errors import ConfigError
from sfumato.release import exports
from sfumato.release.exports import PARQUET, check_parquet, save_parquet

NAMES = ("T-shirt/top", "Bag", "été")
KINDS = np.array(["plain"] * 25 + ["distorted"] * 15)


@pytest.fixture(params=[1, 3], ids=["grey", "colour"])
def release(digits, request) -> ImageSet:
    chosen = np.flatnonzero(digits.labels < 3)[:40]
    images = digits.images[chosen]
    if request.param == 3:
        images = np.concatenate([images, 255 - images, images // 2], axis=3)
    return ImageSet(images, digits.labels[chosen], NAMES)


def test_pandas_gives_back_the_pixels_and_labels(release, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    import pandas as pd
    from PIL import Image

    monkeypatch.setattr(exports, "GROUP", 16)  # several row groups
    save_parquet(tmp_path / PARQUET, release, KINDS)
    table = pd.read_parquet(tmp_path / PARQUET)
    assert list(table.columns) == ["image", "label", "kind"] and table["label"].tolist() == release.labels.tolist()
    assert table["kind"].tolist() == KINDS.tolist()
    for row, image in zip(table["image"], release.images, strict=True):
        assert row["path"] is None
        with Image.open(io.BytesIO(row["bytes"])) as opened:
            found = np.asarray(opened)
        assert np.array_equal(found if found.ndim == 3 else found[..., None], image)


def test_the_schema_says_image_and_class_label_with_the_names(release, tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    save_parquet(tmp_path / "a.parquet", release, KINDS)
    features = json.loads(parquet.read_schema(tmp_path / "a.parquet").metadata[b"huggingface"])["info"]["features"]
    kind = {"_type": "Value", "dtype": "string"}
    assert features == {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": list(NAMES)},
        "kind": kind,
    }


def test_the_same_release_gives_the_same_bytes(release, tmp_path):
    pytest.importorskip("pyarrow")
    for name in "ab":
        save_parquet(tmp_path / name, release, KINDS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_hugging_face_datasets_gives_back_pictures_and_names(release, tmp_path):
    datasets = pytest.importorskip("datasets")
    save_parquet(tmp_path / "a.parquet", release, KINDS)
    found = datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))[
        "train"
    ]
    assert found.features["label"].names == list(NAMES) and found["label"][:] == release.labels.tolist()
    pixels = np.stack([np.asarray(image).reshape(release.images.shape[1:]) for image in found["image"]])
    assert np.array_equal(pixels, release.images)


def test_without_pyarrow_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"sfumato\[parquet\]"):
        check_parquet()
