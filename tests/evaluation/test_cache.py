import dataclasses
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from sfumato.evaluation import cache
from sfumato.evaluation.cache import features_of, key_of
from sfumato.evaluation.extractors import Extractor
from sfumato.storage import files

IMAGES = np.random.default_rng(0).integers(0, 256, size=(9, 4, 4, 1), dtype=np.uint8)


@pytest.fixture
def counted():
    """An extractor of two features that counts the images it was shown."""
    shown = []

    def embed(images):
        shown.append(len(images))
        return images.flatten(1)[:, :2]

    return Extractor(name="two", digest="weights-1", dimension=2, embed=embed), shown


def test_features_are_computed_once_and_dates_do_not_matter(counted, tmp_path):
    extractor, shown = counted
    first = features_of(extractor, IMAGES, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    os.utime(file, (1, 1))
    again = features_of(extractor, np.array(IMAGES), tmp_path / "cache")
    assert sum(shown) == 9 and np.array_equal(first, again) and first.dtype == np.float32
    assert np.array_equal(first, extractor(IMAGES))


def test_other_images_other_weights_or_another_shape_are_other_features(counted):
    extractor, _ = counted
    changed = IMAGES.copy()
    changed[4, 2, 1, 0] ^= 1
    other = dataclasses.replace(extractor, digest="weights-2")
    keys = {
        key_of(extractor, rows) for rows in (IMAGES, changed, IMAGES[:8], IMAGES.reshape(9, 2, 8, 1), IMAGES[::-1])
    } | {key_of(other, IMAGES)}
    assert len(keys) == 6
    assert key_of(dataclasses.replace(extractor, name="renamed"), np.asfortranarray(IMAGES)) == key_of(
        extractor, IMAGES
    )


def test_the_last_of_many_images_has_a_part_in_the_key(counted):
    many = np.zeros((5000, 2, 2, 1), dtype=np.uint8)
    other = many.copy()
    other[-1, -1, -1] = 1
    assert key_of(counted[0], many) != key_of(counted[0], other)


def test_the_key_does_not_depend_on_where_the_images_lie(counted, tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    assert key_of(counted[0], np.load(tmp_path / "images.npy", mmap_mode="r")) == key_of(counted[0], IMAGES)


def test_the_cache_is_the_owners_alone(counted, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    features_of(counted[0], IMAGES, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("spoil", ["cut", "text", "shape", "nan", "pickle"])
def test_a_damaged_file_is_computed_again(counted, tmp_path, spoil):
    extractor, shown = counted
    first = features_of(extractor, IMAGES, tmp_path)
    (file,) = tmp_path.iterdir()
    if spoil == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif spoil == "text":
        file.write_text("no array")
    elif spoil == "pickle":
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    else:
        np.save(file, first[:3] if spoil == "shape" else np.full_like(first, np.nan))
    assert np.array_equal(features_of(extractor, IMAGES, tmp_path), first) and sum(shown) == 18
    assert np.array_equal(np.load(file), first)


def test_a_failed_write_leaves_nothing(counted, tmp_path, monkeypatch):
    def fail(source, target):
        assert Path(source).stat().st_size > 70  # written, not yet in place
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        features_of(counted[0], IMAGES, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_the_cache_does_not_grow_for_ever(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "KEPT", 3)
    for i in range(6):
        features_of(counted[0], IMAGES[i : i + 2], tmp_path)
        os.utime(tmp_path / f"{key_of(counted[0], IMAGES[i : i + 2])}.npy", (i, i))
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / f"{key_of(counted[0], IMAGES[5:7])}.npy").exists()
