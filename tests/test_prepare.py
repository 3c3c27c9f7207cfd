import json
import stat

import numpy as np
import pytest
from test_sources import write_idx, write_mnist

from sfumato import prepare
from sfumato.config import Data
from sfumato.errors import DataError
from sfumato.prepare import is_held_out, prepare_sensitive
from sfumato.prepared import load_prepared, read_card

KEY = bytes(range(32))


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (300, 5, 6), dtype=np.uint8)


class Owner:
    """A data owner with a state directory, a project, and one npz file that may change."""

    def __init__(self, folder):
        self.state, self.card, self.raw = folder / "state", folder / "project" / "card.json", folder / "raw"
        self.file = folder / "set.npz"

    def prepare(self, images, labels=None, **changes):
        labels = np.arange(len(images)) % 3 if labels is None else labels
        np.savez(self.file, images=images, labels=labels, classes=np.array(["a", "b", "c"]))
        data = Data(**{"dataset_id": "set", "source": "npz", "path": str(self.file), **changes})
        returned = prepare_sensitive(data, self.state, self.card, self.raw)
        assert json.loads(self.card.read_text()) == json.loads(json.dumps(returned))
        return read_card(self.card)

    def part(self, name):
        return load_prepared(self.state, read_card(self.card), name)

    def files(self):
        return {path: path.read_bytes() for path in sorted(self.state.rglob("*")) if path.is_file()}


@pytest.fixture
def owner(tmp_path):
    return Owner(tmp_path)


def rows(image_set):
    return {(image.tobytes(), int(label)) for image, label in zip(image_set.images, image_set.labels, strict=True)}


def test_every_image_goes_to_one_part_in_its_order(owner, images):
    owner.prepare(images)
    sensitive, holdout = owner.part("sensitive"), owner.part("holdout")
    everything = {(image.tobytes(), i % 3) for i, image in enumerate(images)}
    assert rows(sensitive) | rows(holdout) == everything and not rows(sensitive) & rows(holdout)
    kept = [image for image in images if (image.tobytes()) in {row for row, _ in rows(sensitive)}]
    assert np.array_equal(sensitive.images[..., 0], np.stack(kept))


def test_an_image_is_held_out_whatever_the_others_are(owner, images):
    owner.prepare(images)
    before = rows(owner.part("holdout"))
    owner.prepare(images[::-1][:150], labels=(np.arange(300) % 3)[::-1][:150])
    assert rows(owner.part("holdout")) == {row for row in before if row[0] in {image.tobytes() for image in images[150:]}}


def test_duplicates_land_together_even_with_other_labels(owner, images):
    owner.prepare(np.concatenate([images, images]), labels=np.arange(600) % 3 * (np.arange(600) < 300))
    parts = [{image for image, _ in rows(owner.part(name))} for name in ("sensitive", "holdout")]
    assert not parts[0] & parts[1] and len(owner.part("sensitive")) + len(owner.part("holdout")) == 600


def test_the_held_out_share_is_the_asked_fraction():
    # 4000 independent draws at 0.2: standard deviation 25; five of them: false alarm in 1.7 million
    images = np.random.default_rng(0).integers(0, 256, (4000, 4, 4, 1), dtype=np.uint8)
    assert abs(sum(is_held_out(image, KEY, 0.2) for image in images) - 800) < 5 * 25.3
    assert not any(is_held_out(image, KEY, 0.0) for image in images)


def test_another_key_holds_out_other_images_and_the_shape_counts(images):
    a, b, c = (
        [is_held_out(image.reshape(shape), key, 0.5) for image in images]
        for key, shape in ((KEY, (5, 6, 1)), (KEY[::-1], (5, 6, 1)), (KEY, (6, 5, 1)))
    )
    assert a != b and a != c


def test_the_card_holds_the_public_facts_and_no_number_of_images(owner, images):
    texts = []
    for count in (300, 211):
        owner.prepare(images[:count])
        card = json.loads(owner.card.read_text())
        texts.append(owner.card.read_text().replace(card.pop("fingerprint"), ""))
        facts = {"dataset_id": "set", "source": "npz", "shape": [1, 5, 6], "range": [0, 255], "classes": ["a", "b", "c"], "split": "keyed"}
        assert card == facts
    assert texts[0] == texts[1]  # but for the fingerprint, sets of any size have one card


def test_the_fingerprint_follows_every_sensitive_pixel_and_label_and_no_other(owner, images):
    labels = np.arange(300) % 3
    first = owner.prepare(images, labels).fingerprint
    assert owner.prepare(images, labels).fingerprint == first
    held = {image for image, _ in rows(owner.part("holdout"))}
    out = next(i for i, image in enumerate(images) if image.tobytes() in held)
    inside = next(i for i, image in enumerate(images) if image.tobytes() not in held)
    assert owner.prepare(np.delete(images, out, axis=0), np.delete(labels, out)).fingerprint == first
    assert owner.prepare(np.delete(images, inside, axis=0), np.delete(labels, inside)).fingerprint != first
    other = labels.copy()
    other[inside] = (other[inside] + 1) % 3
    assert owner.prepare(images, other).fingerprint != first
    pixel = images.copy()
    pixel[inside, 2, 2] ^= 1
    assert owner.prepare(pixel, labels).fingerprint != first


def test_the_fingerprint_needs_the_key(tmp_path, images):
    a, b = Owner(tmp_path / "a"), Owner(tmp_path / "b")
    for each in (a, b):
        each.file.parent.mkdir()
    assert a.prepare(images).fingerprint != b.prepare(images).fingerprint


def test_the_key_is_drawn_once_and_survives_preparing_again(owner, images):
    owner.prepare(images)
    key = (owner.state / "keys" / "set").read_bytes()
    owner.prepare(images[:100], size=4, channels=3)
    assert (owner.state / "keys" / "set").read_bytes() == key and len(key) == 32
    assert owner.part("sensitive").shape == (3, 4, 4)
    (owner.state / "keys" / "set").write_bytes(key[:7])
    with pytest.raises(DataError, match="7 bytes"):
        owner.prepare(images)


def test_only_the_owner_may_read_what_is_stored(owner, images):
    owner.prepare(images)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (owner.state, *owner.state.rglob("*")) if not path.name.endswith(".lock")}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert sum(path.is_file() for path in found) == 6  # two parts of two files, the card, the key


def test_an_official_test_image_changes_neither_card_nor_sensitive_set(owner):
    owner.file.parent.mkdir(exist_ok=True)
    arrays = write_mnist(owner.raw / "mnist")
    data = Data(dataset_id="m", source="mnist")
    card = prepare_sensitive(data, owner.state, owner.card, owner.raw)
    sensitive, holdout = rows(owner.part("sensitive")), rows(owner.part("holdout"))
    assert card["split"] == "official" and len(sensitive) == 5 and len(holdout) == 3
    arrays["t10k"][0][1, 3, 3] ^= 1
    write_idx(owner.raw / "mnist" / "t10k-images-idx3-ubyte.gz", arrays["t10k"][0])
    assert prepare_sensitive(data, owner.state, owner.card, owner.raw) == card
    assert rows(owner.part("sensitive")) == sensitive and rows(owner.part("holdout")) != holdout


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failure_leaves_what_was_there_and_nothing_half_written(owner, images, monkeypatch, earlier):
    if earlier:
        owner.prepare(images)
    before, card = owner.files(), owner.card.exists() and owner.card.read_bytes()

    def breaks_off(source, key, fraction):
        for number, example in enumerate(source.train):
            if number == 100:
                raise DataError("unreadable image")
            yield False, example

    with monkeypatch.context() as patch, pytest.raises(DataError, match="unreadable"):
        patch.setattr(prepare, "assigned", breaks_off)
        owner.prepare(images[:200])
    after = {path: content for path, content in owner.files().items() if path.suffix != ".lock" and path.parent.name != "keys"}
    assert after == {path: content for path, content in before.items() if path.suffix != ".lock" and path.parent.name != "keys"}
    assert (owner.card.exists() and owner.card.read_bytes()) == card
    assert [path.name for path in (owner.state / "data").iterdir() if path.is_dir()] == ["set"] * earlier


def test_a_kill_between_the_two_renames_is_mended(owner, images):
    owner.prepare(images)
    before = rows(owner.part("sensitive"))
    home = owner.state / "data" / "set"
    home.rename(home.with_name(".set.old"))
    home.with_name(".set.new.abc").mkdir()
    with pytest.raises(DataError, match="expected uint8"):
        owner.prepare(images.astype(np.float32))
    assert rows(owner.part("sensitive")) == before
    assert {path.name for path in home.parent.iterdir()} == {"set", ".set.lock"}


def test_a_card_of_other_images_is_refused(owner, images):
    owner.prepare(images)
    text = owner.card.read_text()
    owner.prepare(images[:200])
    owner.card.write_text(text)
    with pytest.raises(DataError, match="prepare sensitive"):
        owner.part("sensitive")
    owner.card.unlink()
    with pytest.raises(DataError, match=r"card\.json is missing"):
        owner.part("sensitive")


def test_a_set_without_sensitive_images_is_refused(owner, images):
    with pytest.raises(DataError, match="no sensitive image"):
        owner.prepare(images[:1], labels=np.array([0]), holdout_fraction=0.9999999999)
