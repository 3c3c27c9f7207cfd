import json
import os
import stat
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sources.writers import write_folder, write_idx, write_imagenet32, write_mnist

from sfumato.data import listing, prepare, sources
from sfumato.data.images import ImageSet
from sfumato.data.prepare import fingerprint, is_held_out, prepare_public, prepare_sensitive, refuse_sensitive_as_public
from sfumato.data.store import PublicCard, load_prepared, load_public, read_card, read_public_card
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Public
from sfumato.storage.artifacts import read_artifact
from stages.cli import main

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
    kept = [image for image in images if image.tobytes() in {row for row, _ in rows(sensitive)}]
    assert np.array_equal(sensitive.images[..., 0], np.stack(kept))


def test_an_image_is_held_out_whatever_the_others_are(owner, images):
    owner.prepare(images)
    before = rows(owner.part("holdout"))
    owner.prepare(images[::-1][:150], labels=(np.arange(300) % 3)[::-1][:150])
    left = {image.tobytes() for image in images[150:]}
    assert rows(owner.part("holdout")) == {row for row in before if row[0] in left}


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
    version = owner.prepare(images).version
    facts = {"dataset_id": "set", "source": "npz", "shape": [1, 5, 6], "range": [0, 255], "split": "keyed"}
    assert json.loads(owner.card.read_text()) == facts | {"classes": ["a", "b", "c"], "version": version}


def test_the_card_names_every_class_of_the_source(owner, images):
    """A name that goes with the last image of its class would tell that this image was taken away."""
    names = []
    for labels in (np.arange(300) % 3, np.arange(300) % 2, np.zeros(300, dtype=np.int64)):
        owner.prepare(images, labels)
        names.append(json.loads(owner.card.read_text())["classes"])
    assert names == [["a", "b", "c"]] * 3


def test_the_card_is_the_same_before_and_after_a_withdrawal(owner, images, tmp_path):
    """A fingerprint, keyed or not, that stays equal would tell that who withdrew had not been in the set."""
    labels = np.arange(300) % 3
    owner.prepare(images, labels)
    card = owner.card.read_text()
    for changed in (images[:-1], images[1:], images[:100], images ^ 1, images):
        owner.prepare(changed, labels[: len(changed)])
        assert owner.card.read_text() == card
    other = Owner(tmp_path / "other")
    other.file.parent.mkdir()
    assert other.prepare(images, labels).version != json.loads(card)["version"]  # random, not computed from the images


def test_the_owner_names_the_version_of_the_images(owner, images):
    first = owner.prepare(images).version
    assert owner.prepare(images, version="2026-11").version == "2026-11" != first
    assert owner.prepare(images).version == "2026-11"  # until another is given


def private_fingerprint(owner) -> str:
    return fingerprint(owner.part("sensitive"), (owner.state / "keys" / "set").read_bytes())


def test_the_fingerprint_follows_every_sensitive_pixel_and_label_and_no_other(owner, images):
    labels = np.arange(300) % 3

    def of(images, labels) -> str:
        owner.prepare(images, labels)
        return private_fingerprint(owner)

    first = of(images, labels)
    assert of(images, labels) == first
    held = {image for image, _ in rows(owner.part("holdout"))}
    out = next(i for i, image in enumerate(images) if image.tobytes() in held)
    inside = next(i for i, image in enumerate(images) if image.tobytes() not in held)
    assert of(np.delete(images, out, axis=0), np.delete(labels, out)) == first
    assert of(np.delete(images, inside, axis=0), np.delete(labels, inside)) != first
    other = labels.copy()
    other[inside] = (other[inside] + 1) % 3
    assert of(images, other) != first
    pixel = images.copy()
    pixel[inside, 2, 2] ^= 1
    assert of(pixel, labels) != first


def test_the_fingerprint_follows_the_groups_and_needs_the_key(images):
    labels, groups = np.arange(300) % 3, np.arange(300) // 2
    sets = [ImageSet(images[..., None], labels, ("a", "b", "c"), of) for of in (None, groups, groups[::-1])]
    assert len({fingerprint(one, key) for one in sets for key in (KEY, bytes(32))}) == 6


def test_the_fingerprint_is_kept_for_each_preparation_anew(owner, images):
    seen = []
    for changed in (images, images[:100], images):
        card = owner.prepare(changed)
        kept = owner.state / "data" / "set" / "fingerprint"
        seen.append(kept.read_text())
        kept.unlink()  # as in a set that an older version prepared
        assert prepare.kept_fingerprint(owner.state, card) == seen[-1] == private_fingerprint(owner)
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert seen[0] == seen[2] != seen[1]


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
    found = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (owner.state, *owner.state.rglob("*"))
        if not path.name.endswith(".lock")
    }
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    # two parts of two files, card, origin, fingerprint, key; journal and its key
    assert sum(path.is_file() for path in found) == 10


def test_a_state_directory_that_others_may_read_is_tightened_or_refused(tmp_path, monkeypatch):
    for directory in (tmp_path / "state", tmp_path / "state" / "keys"):
        directory.mkdir(mode=0o755)
        directory.chmod(0o755)
    data, card = Data(), tmp_path / "card.json"
    prepare_sensitive(data, tmp_path / "state", card, tmp_path / "raw")
    for name in ("", "data", "keys"):
        assert stat.S_IMODE((tmp_path / "state" / name).stat().st_mode) == 0o700

    def of_another(path, mode):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", of_another)
    with pytest.raises(ConfigError, match="run `chmod 700 .*state` as its owner"):
        prepare_sensitive(data, tmp_path / "state", card, tmp_path / "raw")


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
            yield False, None, example

    with monkeypatch.context() as patch, pytest.raises(DataError, match="unreadable"):
        patch.setattr(prepare, "assigned", breaks_off)
        owner.prepare(images[:200])
    begun = ("keys",) if earlier else ("keys", "odometer")  # the key, and the journal that the first call begins
    after, before = (
        {p: content for p, content in files.items() if p.suffix != ".lock" and p.parent.name not in begun}
        for files in (owner.files(), before)
    )
    assert after == before
    assert (owner.card.exists() and owner.card.read_bytes()) == card
    assert [path.name for path in (owner.state / "data").iterdir() if path.is_dir()] == ["set"] * earlier


def test_a_kill_between_the_two_renames_is_mended(owner, images):
    owner.prepare(images)
    before = rows(owner.part("sensitive"))
    home = owner.state / "data" / "set"
    home.rename(home.with_name(".set.old"))
    home.with_name(".set.4194305.tmp").mkdir()  # of a killed process: Linux gives no such id
    with pytest.raises(DataError, match="expected uint8"):
        owner.prepare(images.astype(np.float32))
    assert rows(owner.part("sensitive")) == before
    assert {path.name for path in home.parent.iterdir()} == {"set", ".set.lock"}


@pytest.mark.parametrize(("part", "fraction"), [("sensitive", 0.9999999999), ("holdout", 1e-10)])
def test_a_set_that_leaves_a_part_empty_is_refused_before_anything_is_spent(owner, images, part, fraction):
    with pytest.raises(DataError, match=f"no {part} image"):
        owner.prepare(images[:1], labels=np.array([0]), holdout_fraction=fraction)


# ---- public sets


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("source", ["glyphs", "procedural", "photos"])
def test_a_public_set_is_an_artifact_of_the_same_bytes_every_time(tmp_path, source):
    public = Public(source=source, per_class=2)
    card = prepare_public(public, (1, 8, 8), tmp_path / "a", tmp_path, seed=3)
    prepare_public(public, (1, 8, 8), tmp_path / "b", tmp_path, seed=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {"images.npy", "labels.npy", "card.json", "grid.png", "privacy.json"}
    artifact = read_artifact(tmp_path / "a", "public")
    assert artifact.records == {} and not artifact.local
    written = json.loads((tmp_path / "a" / "card.json").read_text())
    assert written == json.loads(json.dumps(card))
    assert set(written) == {"enabled", "source", "shape", "classes", "images"}
    prepare_public(public, (1, 8, 8), tmp_path / "b", tmp_path, seed=4)  # replaces the older set
    assert contents(tmp_path / "a")["images.npy"] != contents(tmp_path / "b")["images.npy"]


def test_switched_off_the_set_is_its_card_alone_whatever_else_is_asked(tmp_path):
    prepare_public(None, (1, 8, 8), tmp_path / "a", tmp_path, seed=0)
    prepare_public(None, (3, 32, 32), tmp_path / "b", tmp_path / "raw", seed=9)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {"card.json", "privacy.json"}
    assert read_public_card(tmp_path / "a" / "card.json") == PublicCard(enabled=False)
    read_artifact(tmp_path / "a", "public")
    with pytest.raises(DataError, match="into run"):
        load_public(tmp_path / "a", (1, 8, 8))


def test_the_picture_shows_the_first_images_of_the_first_classes(tmp_path):
    prepare_public(Public(per_class=12), (3, 48, 48), tmp_path / "public", tmp_path, seed=0)
    grid = np.asarray(Image.open(tmp_path / "public" / "grid.png"))
    images = load_public(tmp_path / "public", (3, 48, 48))
    assert grid.shape == (20 * 50 + 2, 10 * 50 + 2, 3)
    assert np.array_equal(grid[52:100, 102:150], images.images[images.labels == 1][2])


@pytest.mark.parametrize("earlier", [False, True])
def test_a_public_source_that_fails_leaves_what_was_there(tmp_path, earlier):
    root = write_folder(tmp_path / "in")
    public = Public(source="imagefolder", path=str(root), declared_public=True)
    if earlier:
        prepare_public(public, (3, 6, 6), tmp_path / "public", tmp_path, seed=0)
    before = contents(tmp_path / "public") if earlier else None
    (root / "dog" / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="repair or remove"):
        prepare_public(public, (3, 6, 6), tmp_path / "public", tmp_path, seed=0)
    assert {path.name for path in tmp_path.iterdir()} == ({"in", "public"} if earlier else {"in"})
    assert not earlier or contents(tmp_path / "public") == before


def test_a_public_set_needs_images_of_two_classes(tmp_path):
    write_imagenet32(tmp_path / "train_data_batch_1.npz", 3, labels=np.array([5, 5, 5]))
    for public in (
        Public(source="imagenet32", path=str(tmp_path)),
        Public(source="imagefolder", path=str(write_folder(tmp_path / "in", classes=("cat",)))),
    ):
        with pytest.raises(DataError, match=r"two or more|one class only"):
            prepare_public(public, (3, 8, 8), tmp_path / "public", tmp_path, seed=0)
    assert not (tmp_path / "public").exists()


def test_nothing_of_the_user_s_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for public in (None, Public(source="photos")):
        with pytest.raises(ConfigError, match="--out"):
            prepare_public(public, (1, 8, 8), tmp_path / "mine", tmp_path, seed=0)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_large_public_set_passes_through_little_memory(tmp_path):
    for i in (1, 2):
        write_imagenet32(tmp_path / f"train_data_batch_{i}.npz", 6000, seed=i)  # 18 MB each
    public = Public(source="imagenet32", path=str(tmp_path))
    tracemalloc.start()
    card = prepare_public(public, (3, 32, 32), tmp_path / "public", tmp_path, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert card["images"] == 12000 and peak < 12e6  # of 37 MB: a piece of 512 images, the picture, the headers


@pytest.mark.parametrize(
    ("data", "public", "refused"),
    [
        (Data(source="cifar10"), Public(source="cifar10"), True),
        (Data(source="cifar10"), Public(source="cifar100"), False),
        (Data(source="imagefolder", path="a/b"), Public(source="imagefolder", path="./a/b/"), True),
        (Data(source="imagefolder", path="a/b"), Public(source="imagefolder", path="a/c"), False),
        (Data(source="npz", path="a"), Public(), False),
        (Data(), Public(), False),
    ],
)
def test_the_sensitive_images_are_never_taken_for_public_ones(data, public, refused):
    with pytest.raises(ConfigError, match="sensitive images themselves") if refused else nullcontext():
        refuse_sensitive_as_public(data, public)


# ---- the commands


@pytest.fixture
def desk(tmp_path, monkeypatch, capsys):
    """A working folder with one recipe and a state directory; `stage` as a function: (exit code, output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "one.yaml").write_text("description: one\nrun: [select, synthesize]\n")

    def stage(*words, **params):
        (tmp_path / "params.yaml").write_text(yaml.safe_dump({"recipe": "one", "profile": None, **params}))
        monkeypatch.setattr(sys, "argv", ["stage", *words])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        output = capsys.readouterr()
        return code, output.out + output.err

    return stage


def test_the_command_takes_the_shape_from_the_card_and_says_what_it_made(desk, tmp_path):
    code, text = desk("prepare", "public", public={"per_class": 1})
    assert code == 4 and "stage prepare sensitive" in text and not (tmp_path / "data").exists()
    assert desk("prepare", "sensitive")[0] == 0
    code, text = desk("prepare", "public", public={"per_class": 1})
    assert code == 0 and "62 images of glyphs, shape [1, 8, 8], 62 classes" in text
    assert len(load_public(tmp_path / "data" / "public", (1, 8, 8))) == 62
    code, text = desk("prepare", "public", run=["synthesize"])
    assert code == 0 and "no stage reads public images" in text
    assert set(contents(tmp_path / "data" / "public")) == {"card.json", "privacy.json"}
    code, text = desk("prepare", "public", public={"source": "npz"})
    assert code == 2 and "public.path is missing" in text and "Traceback" not in text


def own_params(**data) -> dict:
    """Images of the owner's own, and a public set from a file."""
    return {
        "data": {"dataset_id": "own", "source": "npz", "path": "real.npz", "holdout_fraction": 0.5, **data},
        "public": {"source": "npz", "path": "public.npz", "declared_public": True},
    }


def write_both(images, public) -> None:
    np.savez("real.npz", images=images, labels=np.arange(len(images)) % 3, classes=np.array(["a", "b", "c"]))
    np.savez("public.npz", images=public, labels=np.arange(len(public)) % 2, classes=np.array(["x", "y"]))


def test_a_public_set_that_holds_real_images_is_refused(desk, tmp_path, images):
    """A copy of the sensitive folder, or of a part of it, would be given away as it is."""
    other = np.random.default_rng(9).integers(0, 256, (30, 5, 6), dtype=np.uint8)
    mixed = other.copy()
    mixed[[4, 17]] = images[[3, 200]]
    for public, data, words in (
        (mixed, {}, ("2 of the 30", "4, 17")),  # some of them
        (images, {}, ("300 of the 300",)),  # a copy under another name
        (images, {"size": 4}, ("300 of the 300",)),  # which both get the stored shape
    ):
        write_both(images, public)
        assert desk("prepare", "sensitive", **own_params(**data))[0] == 0
        code, text = desk("prepare", "public", **own_params(**data))
        assert code == 4 and "refused.txt" in text and not any(word in text for word in words)
        why = (tmp_path / "state" / "refused.txt").read_text()
        assert "local" in why and all(word in why for word in words)
        assert not (tmp_path / "data" / "public").exists()
    write_both(images, other)
    assert desk("prepare", "public", **own_params())[0] == 0
    journal = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.jsonl"))
    assert journal.count("overlap check") == 4


def test_doctor_finds_public_images_among_the_real_ones_and_journals_that_it_looked(desk, tmp_path, images):
    """Real images may come after the public ones."""
    other = np.random.default_rng(9).integers(0, 256, (30, 5, 6), dtype=np.uint8)
    other[[4, 17]] = images[[3, 200]]
    write_both(np.delete(images, [3, 200], axis=0), other)
    params = own_params()
    assert desk("prepare", "sensitive", **params)[0] == 0 and desk("prepare", "public", **params)[0] == 0
    write_both(images, other)
    assert desk("prepare", "sensitive", **params)[0] == 0
    code, text = desk("doctor", "--overlap", **params)
    why = (tmp_path / "state" / "refused.txt").read_text()
    assert code == 4 and "30" not in text.replace(str(tmp_path), "")
    assert "local" in why and "2 of the 30" in why and "4, 17" in why
    journal = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.jsonl"))
    assert journal.count("overlap check") == 2
    other[[4, 17]] ^= 1
    write_both(images, other)
    desk("prepare", "public", **params)
    code, text = desk("doctor", "--overlap", **params)
    assert code == 0 and "local" in text and "none of the 30" in text
    with (tmp_path / "data" / "public" / "images.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    code, text = desk("doctor", "--overlap", **params)
    assert code == 4 and "images.npy no longer has the bytes" in text


def test_doctor_compares_nothing_where_there_are_no_public_images(desk, tmp_path):
    desk("prepare", "sensitive")
    code, text = desk("doctor", "--overlap")
    assert code == 4 and "data/public" in text
    desk("prepare", "public", run=["synthesize"])
    code, text = desk("doctor", "--overlap")
    assert code == 0 and "nothing to compare" in text
    assert not any("overlap" in path.read_text() for path in (tmp_path / "state").rglob("*.jsonl"))


class Folder:
    """A folder of pictures that was prepared once; `read` counts how often its source is opened."""

    def __init__(self, tmp_path, monkeypatch):
        monkeypatch.setattr(listing, "FRESH", 0.0)
        self.tmp_path, self.root, self.read = tmp_path, write_folder(tmp_path / "in", per_class=20), 0

        def read_source(data, raw):
            self.read += 1
            return sources.read_source(data, raw)

        monkeypatch.setattr(prepare, "read_source", read_source)
        self.prepare()

    def prepare(self, **changes):
        data = Data(**{"dataset_id": "set", "source": "imagefolder", "path": str(self.root), **changes})
        prepare_sensitive(data, self.tmp_path / "state", self.tmp_path / "card.json", self.tmp_path)
        return load_prepared(self.tmp_path / "state", read_card(self.tmp_path / "card.json"), "sensitive")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return Folder(tmp_path, monkeypatch)


def test_the_same_files_are_prepared_once(folder, tmp_path):
    before = rows(folder.prepare())
    assert folder.read == 1
    (tmp_path / "card.json").unlink()
    assert rows(folder.prepare()) == before and folder.read == 1


def repaint(file):
    """Other pixels, as many bytes, under the same times: what a careless comparison takes for unchanged."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    content = bytearray(file.read_bytes())
    content[:] = Path(file.with_name("1.png")).read_bytes().ljust(len(content), b"\0")[: len(content)]
    file.write_bytes(content)
    os.utime(file, ns=times)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: repaint(root / "cat" / "0.png"),
        lambda root: (root / "cat" / "0.png").unlink(),
        lambda root: (root / "cat" / "0.png").rename(root / "dog" / "new.png"),
        lambda root: Image.new("RGB", (6, 6)).save(root / "dog" / "new.png"),
        lambda root: (root / "owl").mkdir(),
        lambda root: (root / "cat" / "link.png").symlink_to(root / "dog" / "0.png"),
    ],
)
def test_changed_files_are_always_prepared_again(folder, change):
    change(folder.root)
    folder.prepare()
    assert folder.read == 2


def test_other_settings_or_a_damaged_store_prepare_again(folder, tmp_path):
    folder.prepare(size=4)
    folder.prepare(size=4, holdout_fraction=0.5)
    assert folder.read == 3
    images = tmp_path / "state" / "data" / "set" / "holdout" / "images.npy"
    images.write_bytes(images.read_bytes()[:-10])
    folder.prepare(size=4, holdout_fraction=0.5)
    assert folder.read == 4
    (tmp_path / "state" / "keys" / "set").write_bytes(bytes(32))  # another key holds out others
    folder.prepare(size=4, holdout_fraction=0.5)
    assert folder.read == 5


def test_files_that_changed_just_now_are_not_taken_for_known(folder, monkeypatch):
    monkeypatch.setattr(listing, "FRESH", 3600.0)
    folder.prepare()
    folder.prepare()
    assert folder.read == 3


def test_a_log_shows_parts_and_no_number_of_images(folder, capsys):
    capsys.readouterr()
    folder.prepare(size=5)
    assert capsys.readouterr().err.splitlines() == [f"preparing: {10 * tenth} %" for tenth in range(1, 11)]


def test_images_that_are_counted_under_one_id_are_not_counted_under_another(owner, images):
    """A second name was a second odometer, from nought, for the same people."""
    owner.prepare(images)
    card = owner.card.read_text()
    some = np.concatenate([images[:1], np.random.default_rng(5).integers(0, 256, (80, 5, 6), dtype=np.uint8)])
    for changed, more in ((images, {}), (some, {}), (images, {"size": 4})):  # all, one of them, the same file resized
        with pytest.raises(ConfigError, match=r"counted as 'set' already.*data\.different_people"):
            owner.prepare(changed, dataset_id="again", **more)
        assert owner.card.read_text() == card and not (owner.state / "data" / "again").exists()
    assert owner.prepare(images, dataset_id="again", different_people=True).dataset_id == "again"
    with pytest.raises(ConfigError, match="counted as 'again' already"):
        owner.prepare(images)  # it is said under both names
    owner.prepare(images, different_people=True)


def test_resized_copies_under_another_id_are_found(owner, tmp_path, digits):
    """Copied, resized and named anew, the same people had a fresh odometer."""
    large = np.kron(digits.images[..., 0], np.ones((1, 3, 3), dtype=np.uint8))  # 24×24
    owner.prepare(large[:400], size=20)
    second = Owner(tmp_path / "second")
    second.state, second.file = owner.state, tmp_path / "copies.npz"
    for changes in ({"size": 12}, {"size": 16, "channels": 3}):
        with pytest.raises(ConfigError, match=r"counted as 'set' already"):
            second.prepare(large[100:300], dataset_id="again", **changes)
    with pytest.raises(ConfigError, match=r"counted as 'set' already"):  # stored alike, and no byte is the same
        second.prepare(np.kron(large[100:300], np.ones((1, 2, 2), dtype=np.uint8)), dataset_id="again", size=20)
    assert second.prepare(large[400:700], dataset_id="others", size=12).dataset_id == "others"
    assert second.prepare(large[:400], dataset_id="again", size=12, different_people=True).dataset_id == "again"
