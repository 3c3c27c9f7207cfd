import errno
import json
import os
import shutil
import stat
import time
import tracemalloc
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from PIL import Image
from program import call
from sources.writers import write_folder, write_idx, write_mnist, write_public

from sfumato.data import duplicates, prepare
from sfumato.data.cards import PublicCard, read_card, read_public_card, write_no_public
from sfumato.data.images import ImageSet
from sfumato.data.prepare import (
    CONVERTED,
    fingerprint,
    is_held_out,
    prepare_public,
    prepare_sensitive,
    refuse_sensitive_as_public,
    releases_behind,
    split,
)
from sfumato.data.sources import Source, read_public
from sfumato.data.store import load_prepared, load_public
from sfumato.errors import ConfigError, DataError
from sfumato.planning.folder import resolve_project
from sfumato.settings.data import Data, Public
from sfumato.settings.sources import SOURCES, SourceKind
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.journal import Journal
from stages.cli import main

KEY = bytes(range(32))


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (300, 5, 6), dtype=np.uint8)


class Owner:
    """A data owner with a state directory, a project, and one npz file that may change."""

    def __init__(self, folder):
        self.state = folder / "state"
        self.card = folder / "project" / "card.json"
        self.raw = folder / "raw"
        self.file = folder / "set.npz"
        folder.mkdir(exist_ok=True)

    def prepare(self, images, labels=None, **changes):
        labels = np.arange(len(images)) % 3 if labels is None else labels
        np.savez(self.file, images=images, labels=labels, classes=np.array(["a", "b", "c"]))
        return self.take(
            **{"dataset_id": "set", "source": "npz", "path": str(self.file), **changes}
        )

    def take(self, **data):
        returned = prepare_sensitive(Data(**data), self.state, self.card, self.raw)
        assert json.loads(self.card.read_text()) == json.loads(json.dumps(returned))
        return read_card(self.card)

    def part(self, name):
        return load_prepared(self.state, read_card(self.card), name)

    def files(self):
        found = [
            path
            for path in (self.card, *self.state.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        ]
        return {path: path.read_bytes() for path in found}


@pytest.fixture
def owner(tmp_path):
    return Owner(tmp_path)


def rows(image_set):
    return {
        (image.tobytes(), int(label))
        for image, label in zip(image_set.images, image_set.labels, strict=True)
    }


def test_every_image_goes_to_one_part_in_its_order(owner, images):
    owner.prepare(images)
    sensitive = owner.part("sensitive")
    holdout = owner.part("holdout")
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
    owner.prepare(
        np.concatenate([images, images]), labels=np.arange(600) % 3 * (np.arange(600) < 300)
    )
    parts = [{image for image, _ in rows(owner.part(name))} for name in ("sensitive", "holdout")]
    assert (
        not parts[0] & parts[1] and len(owner.part("sensitive")) + len(owner.part("holdout")) == 600
    )


def test_the_held_out_share_is_the_asked_fraction():
    # 4000 independent draws at 0.2 have a standard deviation of 25.3. Chance exceeds five of these
    # once in 1.7 million cases
    images = np.random.default_rng(0).integers(0, 256, (4000, 4, 4, 1), dtype=np.uint8)
    assert abs(sum(is_held_out(image, KEY, 0.2) for image in images) - 800) < 5 * 25.3
    assert not any(is_held_out(image, KEY, 0.0) for image in images)


def test_another_key_holds_out_other_images_and_the_shape_counts(images):
    a, b, c = (
        [is_held_out(image.reshape(shape), key, 0.5) for image in images]
        for key, shape in ((KEY, (5, 6, 1)), (KEY[::-1], (5, 6, 1)), (KEY, (6, 5, 1)))
    )
    assert a != b and a != c


def test_the_card_is_the_same_before_and_after_a_withdrawal(owner, images, tmp_path):
    """The card must contain no fingerprint of the images, keyed or not. A fingerprint that stayed
    the same would reveal that the person who withdrew had not been in the set.

    Class names must stay, too. If one disappeared with the last image of its class, this would
    reveal that the image was removed.
    """
    version = owner.prepare(images).version
    facts = {
        "dataset_id": "set",
        "source": "npz",
        "shape": [1, 5, 6],
        "range": [0, 255],
        "split": "keyed",
    }
    card = facts | {"classes": ["a", "b", "c"], "version": version}
    sets = [
        (images[:-1], 3),
        (images[1:], 3),
        (images[:100], 3),
        (images ^ 1, 3),
        (images, 2),
        (images, 1),
    ]
    for changed, used in sets:
        owner.prepare(changed, labels=np.arange(len(changed)) % used)
        assert json.loads(owner.card.read_text()) == card
    # The version is random, not computed from the images
    assert Owner(tmp_path / "other").prepare(images).version != version


def test_charged_images_stay_in_or_out_of_the_hold_out(owner, images):
    """If charged images could move into the hold-out, a release would be tested on images from
    which it was made.
    """
    owner.prepare(images, holdout_fraction=0.6)
    version = owner.prepare(images).version  # nothing is spent yet
    drawn = fingerprint(owner.part("sensitive"), KEY)
    record = {"id": "x", "data_version": version}
    Journal(owner.state, "set").append("open", images=drawn, record=record)
    owner.prepare(images[9:])
    owner.prepare(np.concatenate([images, images[:50] ^ 1]))
    before = owner.files()
    for fraction in (0.1, 0.6):
        with pytest.raises(ConfigError, match=rf"version {version}.*set a new data\.version"):
            owner.prepare(images, holdout_fraction=fraction)
        owner.prepare(np.concatenate([images, images[:50] ^ 1]))
        assert owner.files().keys() == before.keys()
    owner.prepare(images, holdout_fraction=0.6, version="2")
    owner.prepare(images, holdout_fraction=0.6)  # `stage evaluate` recognises this change
    owner.prepare(images)
    assert fingerprint(owner.part("sensitive"), KEY) == drawn
    (owner.state / "data/set/sensitive/images.npy").write_bytes(b"damaged")
    owner.prepare(images[9:])


def test_charged_images_are_not_converted_in_another_way(owner, images, tmp_path):
    """If charged images were converted again in another way, the card would not describe the
    pictures from which the release was made.
    """
    owner.prepare(images, fit="pad")
    version = owner.prepare(images).version  # nothing is spent yet
    journal = Journal(owner.state, "set")
    journal.append("open", record={"id": "x", "data_version": version})
    before = owner.files()
    refusal = rf'version={version}, .* data\.fit: "crop".*set a new data\.version'
    with pytest.raises(ConfigError, match=refusal):
        owner.prepare(images, fit="pad")
    assert owner.files() == before
    owner.prepare(images[9:])  # images may still be withdrawn
    owner.prepare(images, fit="pad", version="2")
    with pytest.raises(ConfigError, match=refusal):
        owner.prepare(images, fit="pad")
    params = {"data": {"dataset_id": "set", "source": "npz", "path": str(owner.file), "fit": "pad"}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"recipe": "dp-merf", **params}))
    (tmp_path / "data/sensitive").mkdir(parents=True)
    owner.card.rename(tmp_path / "data/sensitive/card.json")
    with pytest.raises(ConfigError, match=refusal):
        resolve_project(tmp_path, owner.state, Path("params.yaml"), dry_run=True)
    journal.append("open", record={"id": "y", "data_version": "2"})
    (owner.state / "data/set" / CONVERTED).unlink()  # older versions wrote no such file
    owner.prepare(images, version="2")
    with pytest.raises(ConfigError, match="was already spent on data.version=2"):
        owner.prepare(images, fit="pad", version="2")


def test_the_owner_names_the_version_of_the_images(owner, images):
    first = owner.prepare(images).version
    assert owner.prepare(images, version="2026-11").version == "2026-11" != first
    assert owner.prepare(images).version == first  # without a name, the first version


def test_the_fingerprint_follows_exactly_the_sensitive_set(owner, images):
    labels = np.arange(300) % 3
    kept = owner.state / "data" / "set" / "fingerprint"

    def of(images, labels) -> str:
        """Prepare the set. Returns its fingerprint, after checking how it is stored."""
        card = owner.prepare(images, labels)
        found = kept.read_text()
        kept.unlink()  # older versions did not store it
        assert (
            prepare.kept_fingerprint(owner.state, card)
            == found
            == fingerprint(owner.part("sensitive"), KEY)
        )
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        return found

    first = of(images, labels)
    held = {image for image, _ in rows(owner.part("holdout"))}
    inside, out = (
        [image.tobytes() in held for image in images].index(part) for part in (False, True)
    )
    other = labels.copy()
    pixel = images.copy()
    other[inside] = (other[inside] + 1) % 3
    pixel[inside, 2, 2] ^= 1
    assert first == of(images, labels) == of(np.delete(images, out, axis=0), np.delete(labels, out))
    assert of(np.delete(images, inside, axis=0), np.delete(labels, inside)) != first
    assert of(images, other) != first and of(pixel, labels) != first


def test_the_fingerprint_follows_the_groups_and_needs_the_key(images):
    labels = np.arange(300) % 3
    groups = np.arange(300) // 2
    sets = [
        ImageSet(images[..., None], labels, ("a", "b", "c"), of)
        for of in (None, groups, groups[::-1])
    ]
    assert len({fingerprint(one, key) for one in sets for key in (KEY, bytes(32))}) == 6


def test_the_key_is_drawn_once_and_survives_preparing_again(owner, images):
    owner.prepare(images)
    key = (owner.state / "keys" / "set").read_bytes()
    owner.prepare(images[:100], size=4, channels=3)
    assert (owner.state / "keys" / "set").read_bytes() == key and len(key) == 32
    assert owner.part("sensitive").shape == (3, 4, 4)
    (owner.state / "keys" / "set").write_bytes(key[:7])
    with pytest.raises(DataError, match="7 bytes"):
        owner.prepare(images)


def test_only_the_owner_may_read_what_is_stored(owner, images, monkeypatch):
    """A state directory that others may read gets stricter permissions, or it is refused."""
    for folder in (owner.state, owner.state / "keys"):
        folder.mkdir()
        folder.chmod(0o755)
    owner.prepare(images)
    found = [path for path in (owner.state, *owner.state.rglob("*")) if path.suffix != ".lock"]
    assert all(
        stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600) for path in found
    )
    # Of the set: two files in each of two parts, card, origin, fingerprint, version without a name,
    # conversions and key. Further files: the journal, its key, and the access log
    assert sum(path.is_file() for path in found) == 13
    monkeypatch.setattr(
        Path, "chmod", Mock(side_effect=PermissionError(1, "Operation not permitted"))
    )
    with pytest.raises(ConfigError, match="run `chmod 700 .*state` as its owner"):
        owner.prepare(images)


def test_an_official_test_image_does_not_change_the_card(owner):
    arrays = write_mnist(owner.raw / "mnist")
    card = owner.take(dataset_id="m", source="mnist")
    sensitive = rows(owner.part("sensitive"))
    holdout = rows(owner.part("holdout"))
    assert card.split == "official" and len(sensitive) == 5 and len(holdout) == 3
    arrays["t10k"][0][1, 3, 3] ^= 1
    write_idx(owner.raw / "mnist" / "t10k-images-idx3-ubyte.gz", arrays["t10k"][0])
    assert owner.take(dataset_id="m", source="mnist") == card
    assert rows(owner.part("sensitive")) == sensitive and rows(owner.part("holdout")) != holdout


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failure_leaves_the_old_files_and_no_partial_ones(owner, tmp_path, earlier):
    folder = {
        "dataset_id": "set",
        "source": "imagefolder",
        "path": str(write_folder(tmp_path / "in", per_class=60)),
    }
    if earlier:
        owner.take(**folder)
    before = owner.files()
    (tmp_path / "in/dog/9.png").write_bytes(b"broken")  # the last picture that is read
    with pytest.raises(DataError, match="cannot be read"):
        owner.take(**folder)
    changed = {path.parent.name for path, _ in owner.files().items() ^ before.items()}
    # Folders of the key, the journal and the access log, which the first call writes
    begun = set() if earlier else {"keys", "odometer", "state"}
    assert changed == begun
    assert [path.name for path in (owner.state / "data").iterdir() if path.is_dir()] == [
        "set"
    ] * earlier


def test_a_kill_between_the_two_renames_is_mended(owner, images):
    owner.prepare(images)
    before = rows(owner.part("sensitive"))
    home = owner.state / "data" / "set"
    home.rename(home.with_name(".set.old"))
    # A killed process leaves such a folder. Linux assigns no process id as high as this one
    home.with_name(".set.4194305.tmp").mkdir()
    with pytest.raises(DataError, match="expected uint8"):
        owner.prepare(images.astype(np.float32))
    assert rows(owner.part("sensitive")) == before
    assert {path.name for path in home.parent.iterdir()} == {"set", ".set.lock"}


@pytest.mark.parametrize(("part", "fraction"), [("sensitive", 0.9999999999), ("holdout", 1e-10)])
def test_a_set_with_an_empty_part_is_refused_before_spending(owner, images, part, fraction):
    with pytest.raises(DataError, match=f"leaves the part '{part}' without images"):
        owner.prepare(images[:1], labels=np.array([0]), holdout_fraction=fraction)


# ---- public sets


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("source", ["glyphs", "procedural", "photos"])
def test_a_public_set_is_an_artifact_of_equal_bytes(tmp_path, source):
    public = Public(source=source, per_class=2)
    card = prepare_public(public, (1, 8, 8), tmp_path / "a", tmp_path, seed=3)
    prepare_public(public, (1, 8, 8), tmp_path / "b", tmp_path, seed=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {
        "images.npy",
        "labels.npy",
        "card.json",
        "grid.png",
        "privacy.json",
    }
    artifact = read_artifact(tmp_path / "a", "public")
    assert artifact.records == {} and not artifact.local
    assert json.loads((tmp_path / "a" / "card.json").read_text()) == json.loads(json.dumps(card))
    prepare_public(public, (1, 8, 8), tmp_path / "b", tmp_path, seed=4)  # replaces the older set
    assert contents(tmp_path / "a")["images.npy"] != contents(tmp_path / "b")["images.npy"]


def test_a_public_set_that_no_stage_reads_is_its_card_alone(tmp_path):
    write_no_public(tmp_path / "a")
    assert set(contents(tmp_path / "a")) == {"card.json", "privacy.json"}
    assert read_public_card(tmp_path / "a" / "card.json") == PublicCard(enabled=False)
    read_artifact(tmp_path / "a", "public")
    with pytest.raises(DataError, match="to the setting `run`, then run `stage prepare public`"):
        load_public(tmp_path / "a", (1, 8, 8))


def test_the_picture_shows_the_first_images_of_the_first_classes(tmp_path):
    prepare_public(Public(per_class=12), (3, 48, 48), tmp_path / "public", tmp_path, seed=0)
    grid = np.asarray(Image.open(tmp_path / "public" / "grid.png"))
    images = load_public(tmp_path / "public", (3, 48, 48))
    assert grid.shape == (20 * 50 + 2, 10 * 50 + 2, 3)
    assert np.array_equal(grid[52:100, 102:150], images.images[images.labels == 1][2])


def test_a_public_source_that_fails_leaves_what_was_there(tmp_path):
    root = write_folder(tmp_path / "in")
    public = Public(source="imagefolder", path=str(root), declared_public=True)
    prepare_public(public, (3, 6, 6), tmp_path / "public", tmp_path, seed=0)
    before = contents(tmp_path / "public")
    (root / "dog" / "2.png").write_bytes(b"no picture")
    for name in ("public", "new"):
        with pytest.raises(DataError, match="repair or remove"):
            prepare_public(public, (3, 6, 6), tmp_path / name, tmp_path, seed=0)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "public"}
    assert contents(tmp_path / "public") == before


@pytest.mark.parametrize("source", ["emnist", "cifar100"])
def test_files_in_a_path_must_be_declared_public(tmp_path, source):
    """The name of a public set is no proof, because an owner's files may have the set's format."""
    public = Public(source=source, path=str(tmp_path))
    with pytest.raises(ConfigError, match="set public.declared_public: true"):
        releases_behind(public, tmp_path / "state")
    assert releases_behind(public.model_copy(update={"declared_public": True}), tmp_path) == []
    assert releases_behind(public.model_copy(update={"path": None}), tmp_path) == []


def test_a_public_set_needs_images_of_two_classes(tmp_path):
    write_public(tmp_path / "in.npz", 3, labels=np.array([2, 2, 2]))
    public = Public(source="npz", path=str(tmp_path / "in.npz"), declared_public=True)
    with pytest.raises(DataError, match="add images of another class"):
        prepare_public(public, (3, 8, 8), tmp_path / "public", tmp_path, seed=0)
    assert not (tmp_path / "public").exists()


def test_a_large_public_set_passes_through_little_memory(tmp_path):
    write_public(tmp_path / "in.npz", 12000)
    public = Public(source="npz", path=str(tmp_path / "in.npz"), declared_public=True)
    tracemalloc.start()
    card = prepare_public(public, (3, 32, 32), tmp_path / "public", tmp_path, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The images have 37 MB, but are read and written one by one
    assert card["images"] == 12000 and peak < 12e6


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
    with (
        pytest.raises(ConfigError, match="sensitive images themselves")
        if refused
        else nullcontext()
    ):
        refuse_sensitive_as_public(data, public)


def test_a_source_that_may_be_sensitive_is_not_public(tmp_path, monkeypatch, images):
    """A new source needs no code for this refusal, only its entry in SOURCES."""
    monkeypatch.setitem(SOURCES, "histology", SourceKind("drawn:read_digits", ("data", "public")))
    read_public(Public(source="histology"), (1, 5, 6), tmp_path, seed=0)
    with pytest.raises(ConfigError, match="sensitive images themselves"):
        refuse_sensitive_as_public(
            Data(source="histology"), Public(source="histology", path="elsewhere")
        )


# ---- the commands


@pytest.fixture
def desk(here):
    """Run a command in a folder with one recipe and a state directory. It must end with `code`.
    Returns its output.
    """
    Path("pipelines").mkdir()
    Path("pipelines/one.yaml").write_text("description: one\nrun: [select, synthesize]\n")

    def stage(command, code=0, **params):
        Path("params.yaml").write_text(yaml.safe_dump({"recipe": "one", "profile": None, **params}))
        screen = StringIO()
        ended = call(main, "stage", *command.split(), screen=screen)
        said = screen.getvalue()
        assert ended == code and "Traceback" not in said, said
        return said.replace(str(here), "")

    return stage


def test_the_command_takes_the_shape_from_the_card(desk):
    assert "stage prepare sensitive" in desk("prepare public", code=4) and not Path("data").exists()
    desk("prepare sensitive")
    said = desk("prepare public", public={"per_class": 1})
    assert "62 images from the source 'glyphs', shape [1, 8, 8], 62 classes" in said
    assert len(load_public(Path("data/public"), (1, 8, 8))) == 62
    assert "no stage reads public images" in desk("prepare public", run=["synthesize"])
    assert "public.path is missing" in desk("prepare public", code=2, public={"source": "npz"})


OWN = {
    "data": {"dataset_id": "own", "source": "npz", "path": "real.npz", "holdout_fraction": 0.5},
    "public": {"source": "npz", "path": "public.npz", "declared_public": True},
}


def write_own(images, public) -> None:
    for name, array in (("real", images), ("public", public)):
        np.savez(
            f"{name}.npz",
            images=array,
            labels=np.arange(len(array)) % 2,
            classes=np.array(["a", "b"]),
        )


def journalled_checks() -> int:
    return sum(path.read_text().count("overlap check") for path in Path("state").rglob("*.jsonl"))


@pytest.fixture
def others():
    """Return 30 images, none of them in `images`."""
    return np.random.default_rng(9).integers(0, 256, (30, 5, 6), dtype=np.uint8)


def test_a_public_set_that_holds_real_images_is_refused(desk, images, others):
    """If such a set were accepted, a copy of the sensitive folder, or of a part of it, would be
    published as it is.
    """
    mixed = others.copy()
    mixed[[4, 17]] = images[[3, 200]]
    for public, size, words in (
        (mixed, None, ("2 of the 30", "4, 17")),  # two sensitive images among others
        (images, None, ("300 of the 300",)),  # a copy of the sensitive set
        (images, 4, ("300 of the 300",)),  # the same, with both sets resized
    ):
        params = OWN | {"data": OWN["data"] | {"size": size}}
        write_own(images, public)
        desk("prepare sensitive", **params)
        said = desk("prepare public", code=4, **params)
        why = Path("state/refused.txt").read_text()
        assert "refused.txt" in said and not any(word in said for word in words)
        assert "do not share this message" in why and all(word in why for word in words)
        assert not Path("data/public").exists()
    write_own(images, others)
    desk("prepare public", **OWN)
    assert journalled_checks() == 4


def test_later_real_images_are_found_by_preparing_public_again(desk, images, others):
    others[[4, 17]] = images[[3, 200]]
    write_own(np.delete(images, [3, 200], axis=0), others)
    desk("prepare sensitive", **OWN)
    desk("prepare public", **OWN)
    write_own(images, others)
    desk("prepare sensitive", **OWN)
    assert "30" not in desk("prepare public", code=4, **OWN)
    why = Path("state/refused.txt").read_text()
    assert "do not share this message" in why and "2 of the 30" in why and "4, 17" in why
    assert journalled_checks() == 2


@pytest.fixture
def take_folder(owner, tmp_path, settled):
    """Return a function that prepares the folder `in`.

    The function returns how often the set has been stored so far.
    """
    root = write_folder(tmp_path / "in", per_class=20)
    homes = [0]

    def take(**changes):
        owner.take(dataset_id="set", source="imagefolder", path=str(root), **changes)
        # A new set gets a new inode, because it is written beside the old one
        home = (owner.state / "data" / "set").stat().st_ino
        homes.extend([home] * (home != homes[-1]))
        return len(homes) - 1

    return take


def test_unchanged_files_are_prepared_once(take_folder, owner, tmp_path):
    assert take_folder() == 1
    before = rows(owner.part("sensitive"))
    owner.card.unlink()
    assert take_folder() == 1 and rows(owner.part("sensitive")) == before
    # A file with a change time in the future is treated as if it had just changed
    os.utime(tmp_path / "in/cat/0.png", times=2 * (time.time() + 3600,))
    assert [take_folder(), take_folder()] == [2, 3]


def repaint(file):
    """Change pixels, but neither size nor times, so that a careless comparison would see no
    change.
    """
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    content = bytearray(file.read_bytes())
    content[:] = (
        Path(file.with_name("1.png")).read_bytes().ljust(len(content), b"\0")[: len(content)]
    )
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
        lambda root: (root / "cat/_.png").symlink_to((root / "cat/0.png").rename(root / ".0.png")),
    ],
)
def test_changed_files_are_always_prepared_again(take_folder, tmp_path, change):
    take_folder()
    change(tmp_path / "in")
    assert take_folder() == 2


def test_other_settings_or_a_damaged_store_prepare_again(take_folder, owner):
    assert [take_folder(), take_folder(size=4), take_folder(size=4, holdout_fraction=0.5)] == [
        1,
        2,
        3,
    ]
    images = owner.state / "data" / "set" / "holdout" / "images.npy"
    images.write_bytes(images.read_bytes()[:-10])
    assert take_folder(size=4, holdout_fraction=0.5) == 4
    (owner.state / "keys" / "set").write_bytes(bytes(32))  # another key selects another hold-out
    assert take_folder(size=4, holdout_fraction=0.5) == 5


def test_a_log_shows_nothing_of_reading_images(take_folder, capsys):
    """The log shows neither the number of images nor whether any image was read. Both would reveal
    a withdrawal.
    """
    take_folder()
    assert capsys.readouterr() == ("", "")


def test_images_counted_under_one_id_are_not_counted_again(owner, images):
    """If the same images could be prepared under a second id, the same people would get a second
    odometer, which begins at zero.
    """
    owner.prepare(images)
    card = owner.card.read_text()
    some = np.concatenate(
        [images[:1], np.random.default_rng(5).integers(0, 256, (80, 5, 6), dtype=np.uint8)]
    )
    # All images; one of the images among others; all images, resized
    for changed, more in ((images, {}), (some, {}), (images, {"size": 4})):
        with pytest.raises(ConfigError, match=r"dataset id 'set'.*data\.different_people"):
            owner.prepare(changed, dataset_id="again", **more)
        assert owner.card.read_text() == card and not (owner.state / "data" / "again").exists()
    assert owner.prepare(images, dataset_id="again", different_people=True).dataset_id == "again"
    with pytest.raises(ConfigError, match="already counted under the dataset id 'again'"):
        owner.prepare(images)  # both names are recognised
    owner.prepare(images, different_people=True)


def test_resized_copies_under_another_id_are_found(owner, tmp_path, digits):
    """If such copies were not recognised, the same people would get a second odometer, which begins
    at zero.
    """
    large = np.kron(digits.images[..., 0], np.ones((1, 3, 3), dtype=np.uint8))  # 24×24
    owner.prepare(large[:400], size=20)
    owner.file = tmp_path / "copies.npz"
    for changes in ({"size": 12}, {"size": 16, "channels": 3}):
        with pytest.raises(ConfigError, match=r"already counted under the dataset id 'set'"):
            owner.prepare(large[100:300], dataset_id="again", **changes)
    # These copies are stored at the size of the originals. But their bytes differ, because they are
    # enlarged first
    with pytest.raises(ConfigError, match=r"already counted under the dataset id 'set'"):
        owner.prepare(
            np.kron(large[100:300], np.ones((1, 2, 2), dtype=np.uint8)), dataset_id="again", size=20
        )
    assert owner.prepare(large[400:700], dataset_id="others", size=12).dataset_id == "others"
    assert (
        owner.prepare(large[:400], dataset_id="again", size=12, different_people=True).dataset_id
        == "again"
    )


def test_equal_images_are_found_whatever_stands_around_them(owner):
    images = np.random.default_rng(3).integers(0, 256, (400, 5, 6), dtype=np.uint8)
    owner.prepare(images[:300])
    owner.prepare(images[200:], dataset_id="other", different_people=True)
    homes = [owner.state / "data" / name for name in ("set", "other")]
    every = [*map(duplicates.content_hashes, homes)]
    assert [len(one) for one in every] == [300, 200] and len(np.intersect1d(*every)) == 100
    with pytest.raises(ConfigError, match="already counted under the dataset id 'other'"):
        owner.prepare(images[:300])


def test_thumbnails_are_compared_in_blocks_of_a_fixed_sample(owner, monkeypatch):
    images = np.random.default_rng(4).integers(0, 256, (90, 12, 12), dtype=np.uint8)
    owner.prepare(images)
    home = owner.state / "data/set"
    whole = np.concatenate([*duplicates.grey_thumbnails(home)])
    monkeypatch.setattr(duplicates, "THUMBNAILS_AT_ONCE", 7)
    blocks = [*duplicates.grey_thumbnails(home)]
    assert (
        max(map(len, blocks)) == 7
        and np.array_equal(np.concatenate(blocks), whole)
        and len(whole) == 90
    )
    few, again = (np.concatenate([*duplicates.grey_thumbnails(home, 20)]) for _ in range(2))
    assert (
        np.array_equal(few, again)
        and 20 < len(few) <= 40
        and (few @ whole.T).max(axis=1).min() > 0.999
    )
    assert duplicates.resized_copies(home, home)


def test_equal_images_that_are_all_held_out_are_called_that(tmp_path):
    image = np.zeros((4, 4, 1), np.uint8)
    source = Source(("a", "b"), [(image, i % 2) for i in range(100)], None, 100)
    with pytest.raises(
        DataError, match="'sensitive' without images, because identical images, .* stay together"
    ):
        split(source, bytes(32), 1.0, tmp_path)


# ---- the key of the hold-out


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:7])


LOSSES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut short": cut_short,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_key_that_split_images_is_never_drawn_again(tmp_path, images, loss):
    """With another key, training images could get into the hold-out, on which releases are
    measured.
    """
    owner = Owner(tmp_path)
    owner.prepare(images)
    key = owner.state / "keys/set"
    LOSSES[loss](key)
    left = key.read_bytes() if key.exists() else None
    for _ in range(2):
        with pytest.raises(
            DataError, match="keys/set is missing or damaged .* restore it from a backup"
        ):
            owner.prepare(images)
    assert (key.read_bytes() if key.exists() else None) == left
    key.write_bytes(bytes(32))  # a key that the owner wrote
    owner.prepare(images)


@pytest.mark.parametrize(
    "entry", [{"kind": "open", "record": {"id": "x"}}, {"kind": "adopt", "records": []}]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_key_of_charged_images_is_not_drawn_again(tmp_path, images, loss, entry):
    owner = Owner(tmp_path)
    owner.prepare(images)
    Journal(owner.state, "set").append(**entry)
    shutil.rmtree(owner.state / "data/set")  # `stage forget` deletes it too
    LOSSES[loss](owner.state / "keys/set")
    with pytest.raises(DataError, match="restore it from a backup"):
        owner.prepare(images)


def test_a_key_left_empty_by_a_full_disk_is_drawn(tmp_path, images):
    owner = Owner(tmp_path)
    Journal(owner.state, "set").begin()
    (owner.state / "keys/set").touch()
    owner.prepare(images)
    assert (owner.state / "keys/set").stat().st_size == 32


def test_a_full_disk_leaves_no_half_of_a_key(tmp_path, images, monkeypatch):
    owner = Owner(tmp_path)
    Journal(owner.state, "set").begin()

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(os, "fsync", no_room)
        prepare.secret_key(owner.state, "set")
    assert [path.name for path in (owner.state / "keys").iterdir()] == ["set.journal"]
    owner.prepare(images)


def test_a_fingerprint_that_was_cut_short_is_computed_again(tmp_path, images):
    owner = Owner(tmp_path)
    card = owner.prepare(images)
    kept = owner.state / "data/set/fingerprint"
    whole = kept.read_text()
    kept.write_text("")
    assert prepare.kept_fingerprint(owner.state, card) == kept.read_text() == whole


def test_images_replaced_before_a_kill_are_removed_later(tmp_path, images, settled):
    """After the kill, the new set is in place, and its files count as unchanged. So the next
    preparation only removes the old set.
    """
    owner = Owner(tmp_path)
    owner.prepare(images)
    old = owner.state / "data/.set.old"
    shutil.copytree(owner.state / "data/set", old)
    owner.take(dataset_id="set", source="npz", path=str(owner.file))
    assert not old.exists()


def test_a_fingerprint_missed_by_a_kill_is_written_later(tmp_path, images, settled):
    owner = Owner(tmp_path)
    owner.prepare(images)
    kept = owner.state / "data/set/fingerprint"
    kept.unlink()
    owner.take(dataset_id="set", source="npz", path=str(owner.file))
    assert kept.stat().st_size == 64
