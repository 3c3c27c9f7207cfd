"""Load a release as arrays: with NumPy only, completely or not at all."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bombs
import numpy as np
import pandas
import pytest
import torch
import yaml
from PIL import Image
from pyarrow import parquet
from small_record import small_record
from small_release import RECORD, write_release

import sfumato
from sfumato.data.images import ImageSet, load_array, save_images
from sfumato.data.sources import read_source
from sfumato.errors import ConfigError, DataError
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.events import UNITS, Mechanism, event_of
from sfumato.release.exports import PARQUET, PARQUET_FILES
from sfumato.release.release import plain_images
from sfumato.settings.data import GROUP, Data
from sfumato.storage.artifacts import write_empty, writing
from sfumato.storage.digest import digest_of_file

# A finder that lets the standard library, NumPy, Pillow and the package itself be imported, and
# nothing else.
ALONE = """
import sys
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        allowed = {"numpy", "PIL", "sfumato", *sys.stdlib_module_names}
        if top not in allowed and not top.startswith("_"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Only())
import sfumato
release = sfumato.load_release(sys.argv[1])
images = release.images
print(len(release), images.shape, images.dtype, release.labels[:3].tolist(), release.classes)
assert release.prepare(release.images[0]).shape == release.images.shape[1:]
loaded = {name.split(".")[0] for name in sys.modules}
heavy = sorted(loaded & {"torch", "pandas", "yaml"})
print(release.card["epsilon"] > 0, len(release.ledger), heavy)
print(release.cost["basis"], release.cost["epsilon"] == release.card["epsilon"])
"""

# A finder that lets everything be imported, except this package and torch.
WITHOUT = """
import sys
class Less:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sfumato", "torch"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Less())
"""


@pytest.fixture(scope="module")
def written(digits, tmp_path_factory) -> Path:
    """Write a release that has a folder of images for each class, and a statement of its owner.

    Tests must not change it.
    """
    about = {"owner": "The clinic"}
    path = tmp_path_factory.mktemp("written") / "release"
    return write_release(path, digits, about=about, export=["png", "npz"])


@pytest.fixture
def release(written, tmp_path) -> sfumato.Release:
    """Return a copy of the release, which a test may change."""
    return sfumato.load_release(shutil.copytree(written, tmp_path / "release"))


def test_numpy_alone_reads_a_release(release, digits):
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(release.path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert (
        first == f"40 (40, 8, 8, 1) uint8 {digits.labels[:3].tolist()} {digits.classes}"
        and second == "True 1 []"
    )
    assert third == "as its card states True"


@pytest.mark.parametrize("name", [name for name in bombs.RELEASES if "million" not in name])
def test_a_hostile_release_is_refused_as_it_is_loaded(tmp_path, name):
    reader = bombs.plain_release(tmp_path, **bombs.RELEASES[name])
    with pytest.raises(DataError):
        reader()


def test_a_plain_release_of_the_same_form_is_read(tmp_path):
    bombs.plain_release(tmp_path)()


def test_plain_images_come_with_their_requested_classes(digits, tmp_path):
    asked = torch.arange(40) % 10
    path = write_release(tmp_path / "release", digits, asked=asked, relabel=True)
    released = ImageSet(digits.images[:40], digits.labels[:40], digits.classes)
    plain = plain_images(released, path)
    assert np.array_equal(plain.images, released.images) and np.array_equal(plain.labels, asked)
    assert "asked.npy" in (path / "README.md").read_text()
    other = write_release(tmp_path / "other", digits)
    assert (
        plain_images(released, other) is None
        and "asked.npy" not in (other / "README.md").read_text()
    )


def test_arrays_card_and_ledger_are_those_that_were_released(release, digits):
    assert np.array_equal(release.images, digits.images[:40]) and np.array_equal(
        release.labels, digits.labels[:40]
    )
    assert release.classes == digits.classes and release.ledger == {RECORD["id"]: RECORD}
    assert release.card["about"] == {"owner": "The clinic"} and release.card["units"] == [
        "one (image, label)"
    ]
    assert release.card["digital_source_type"].endswith("Media")
    assert (
        0 < release.cost["epsilon"] == release.card["epsilon"] < 2
        and 0 < release.cost["delta"] < 1 / 1500
    )
    with pytest.raises(ValueError, match="read-only"):
        release.images[0] = 0


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "card.json", "png/3/000003.png"])
def test_a_changed_file_is_refused(release, name):
    content = bytearray((release.path / name).read_bytes())
    content[-1] ^= 1
    (release.path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} no longer has the bytes"):
        sfumato.load_release(release.path)


def test_files_added_by_a_hub_do_no_harm(release):
    (release.path / ".gitattributes").write_text("")
    (release.path / "images.npz").unlink()
    assert len(sfumato.load_release(release.path)) == 40
    (release.path / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels\.npy is missing"):
        sfumato.load_release(release.path)


def test_a_release_is_found_from_any_directory(release, here, environment):
    environment["HOME"] = str(here)
    loaded = [sfumato.load_release(path) for path in ("~/release", "release")]
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    for number, one in enumerate(loaded):
        assert one.path == release.path
        assert (one.to_huggingface(f"~/hub-{number}") / "README.md").is_file()


def test_what_is_no_release_is_refused(digits, tmp_path):
    with pytest.raises(DataError, match=r"it has no privacy\.json"):
        sfumato.load_release(tmp_path)
    write_empty(tmp_path / "off", "synthesize")
    for name, stage in (("local", "synthesize"), ("other", "auxiliary")):
        with writing(tmp_path / name, stage, local=name == "local") as directory:
            save_images(directory, digits.take(np.arange(4)))
    for name in ("off", "local", "other"):
        with pytest.raises(DataError, match="not a release: name the artifact of"):
            sfumato.load_release(tmp_path / name)
    (tmp_path / "off" / "privacy.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        sfumato.load_release(tmp_path / "off")


def test_each_image_is_of_a_kind_and_a_kind_can_be_loaded_alone(digits, tmp_path):
    """Public images lie among the drawn ones; distorted and blended images come last, whatever
    their origin.
    """
    kinds = np.array(["plain", "public"] * 15 + ["distorted"] * 6 + ["blend"] * 4)
    path = write_release(
        tmp_path / "release", digits, ("finetune", "select"), kinds=kinds, export=["png"]
    )
    release = sfumato.load_release(path)
    assert release.kinds.tolist() == kinds.tolist() == release.to_pandas()["kind"].tolist()
    assert release.card["kinds"] == {"plain": 15, "distorted": 6, "blend": 4, "public": 15}
    alone = sfumato.load_release(path, kinds=["plain", "blend"])
    assert alone.card["images"] == 19 and alone.card["kinds"] == {"plain": 15, "blend": 4}
    assert alone.card["sources"] == {}, "it is not recorded which of the models drew these"
    assert "19 images of 8×8×1 (15 plain, 4 blend)" in repr(alone)
    assert len(sfumato.load_release(path, kinds="plain")) == 15
    assert len(alone) == 19 and np.array_equal(
        alone.images, digits.images[:40][np.isin(kinds, ["plain", "blend"])]
    )
    rows = list(csv.DictReader((path / "png" / "metadata.csv").open()))
    assert [
        row["kind"] for row in sorted(rows, key=lambda row: row["file_name"][-10:])
    ] == kinds.tolist()
    with pytest.raises(
        DataError, match="kind 'mixed': choose among its kinds, plain, distorted, blend, public"
    ):
        sfumato.load_release(path, kinds=["mixed"])
    with Image.open(path / "grid.png") as grid:
        assert grid.height == 10 * (96 + 2) + 2 and 10 * (96 + 2) < grid.width < 10 * (96 + 2) + 60
    assert sorted(file.stem for file in (path / "classes").iterdir()) == sorted(release.classes)
    with Image.open(path / "classes" / "3.png") as shown:
        assert shown.size == (5 * (192 + 2) + 2, 2 * (192 + 2) + 2)


def test_the_pictures_show_no_distorted_image(digits, tmp_path):
    """If a grid showed a distorted image, a viewer would think that the model draws such images."""
    few = {"count": 20, "sources": ("finetune",)}
    kinds = np.array(["plain"] * 15 + ["distorted"] * 5)
    names = digits.take(np.arange(20))
    blank = names.images.copy()
    blank[15:] = 255
    varied, plain = (
        write_release(
            tmp_path / name, ImageSet(images, names.labels, names.classes), kinds=kinds, **few
        )
        for name, images in {"varied": names.images, "plain": blank}.items()
    )
    for name in ("grid.png", "classes/3.png"):
        assert (varied / name).read_bytes() == (plain / name).read_bytes()
    pixels = np.asarray(Image.open(varied / "grid.png"))
    margin = pixels[:, : pixels.shape[1] - 10 * 98 - 2]
    assert all((margin[row * 98 : (row + 1) * 98] < 128).any() for row in range(10)), (
        "a name beside each row"
    )


def test_all_images_of_a_release_of_version_0_2_are_plain(release):
    file = release.path / "privacy.json"
    content = json.loads(file.read_text())
    del content["files"]["kinds.npy"]
    file.write_text(json.dumps(content))
    assert sfumato.load_release(release.path, kinds=["plain"]).kinds.tolist() == ["plain"] * 40


def test_as_a_torch_dataset_it_trains_with_a_data_loader(release, digits):
    dataset = release.to_torch()
    assert isinstance(dataset, torch.utils.data.Dataset) and len(dataset) == 40
    assert dataset.classes == list("0123456789")
    images, labels = next(iter(torch.utils.data.DataLoader(dataset, batch_size=40)))
    assert (
        images.shape == (40, 1, 8, 8)
        and images.dtype == torch.float32
        and images.min() >= 0
        and images.max() == 1
    )
    assert labels.tolist() == dataset.targets == digits.labels[:40].tolist()
    assert torch.equal(
        (images * 255).round().permute(0, 2, 3, 1).byte(), torch.tensor(np.array(release.images))
    )
    moved = release.to_torch(lambda image: image.flip(-1))
    assert torch.equal(moved[5][0], dataset[5][0].flip(-1)) and moved[5][1] == dataset[5][1]


def test_a_table_has_a_row_for_each_image(release):
    table = release.to_pandas()
    assert isinstance(table, pandas.DataFrame) and len(table) == len(release)
    assert np.array_equal(np.stack(table["image"]), release.images) and table[
        "label"
    ].tolist() == list(release.labels)
    assert table["class"].tolist() == [release.classes[label] for label in release.labels]


def test_a_hub_finds_the_parquet_file_by_the_readme(release, tmp_path):
    folder = release.to_huggingface(tmp_path / "hub")
    front = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert (
        front["configs"] == [{"config_name": "default", "data_files": PARQUET_FILES}]
        and front["tags"]
    )
    table = parquet.read_table(folder / PARQUET)
    assert (
        table["label"].to_pylist() == list(release.labels)
        and len(table["image"][0].as_py()["bytes"]) > 50
    )
    with pytest.raises(DataError, match=r"is an export without images\.npy.*\.load_dataset"):
        sfumato.load_release(folder)
    for taken in (folder, folder / "README.md"):
        with pytest.raises(DataError, match="not an empty folder: name another"):
            release.to_huggingface(taken)


def test_a_hub_page_describes_the_images_of_its_folder(digits, tmp_path):
    kinds = np.array(["plain"] * 30 + ["distorted"] * 10)
    path = write_release(tmp_path / "release", digits, about={"owner": "The clinic"}, kinds=kinds)
    folder = sfumato.load_release(path, kinds="plain").to_huggingface(tmp_path / "hub")
    card = json.loads((folder / "card.json").read_text())
    assert card["images"] == 30 == parquet.read_table(folder / PARQUET).num_rows
    assert card["kinds"] == {"plain": 30} and card["sources"] == {"finetune": 30}
    page = (folder / "README.md").read_text()
    assert "contains 30 images (30 plain)" in page and "size_categories" not in page
    assert "\n40 labelled synthetic" in page and "not checked by hand" in page
    assert re.findall("^#+ (.*)", page, re.M)[1:] == ["Privacy", "Classes", "About"]
    assert "grid.png" not in page and "load_release" not in page
    listed = re.findall(r"^\| `(.*?)`", page, re.M)
    assert listed == ["parquet/*.parquet", "card.json", "privacy.json"]
    assert all([*folder.glob(name)] for name in listed)


@pytest.mark.parametrize(
    ("name", "package", "method"), [("pandas", "pandas", "to_pandas"), ("PIL", "pillow", "prepare")]
)
def test_a_missing_package_is_named(release, monkeypatch, uninstall, name, package, method):
    monkeypatch.delitem(sys.modules, "sfumato.data.decoding", raising=False)
    uninstall(name)
    arguments = [release.images[0]] if method == "prepare" else []
    with pytest.raises(ConfigError, match=f"{method} requires {package}"):
        getattr(release, method)(*arguments)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_realese'"):
        sfumato.load_realese  # noqa: B018


@pytest.fixture
def picture(digits, tmp_path):
    """Write a file with a digit, 31 pixels wide and 23 high, that EXIF rotates to 23 wide and 31
    high.
    """
    large = Image.fromarray(digits.images[7, :, :, 0]).resize((31, 23), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = 6
    large.save(tmp_path / "x.png", exif=exif)
    return tmp_path / "x.png"


@pytest.mark.parametrize("prepared", [{}, {"fit": "pad"}, {"range": [10, 200]}])
def test_a_picture_is_prepared_like_training_images(digits, tmp_path, picture, prepared):
    """The steps of `stage prepare`: rotate, map the range, crop or pad, resize."""
    if "range" in prepared:
        Image.fromarray(np.asarray(Image.open(picture)).astype(np.uint16)).save(picture)
    (tmp_path / "clinic" / "ill").mkdir(parents=True)
    (tmp_path / "clinic" / "well").mkdir()
    for name in ("ill/x.png", "well/y.png"):
        (tmp_path / "clinic" / name).write_bytes(picture.read_bytes())
    release = sfumato.load_release(write_release(tmp_path / "release", digits, prepared=prepared))
    data = Data(
        dataset_id="c",
        source="imagefolder",
        path=str(tmp_path / "clinic"),
        size=8,
        channels=1,
        **prepared,
    )
    (first, _), *_ = read_source(data, tmp_path).train
    assert (
        np.array_equal(release.prepare(picture), first)
        and release.card["prepared"]["filter"] == "lanczos"
    )
    assert release.card["prepared"] | prepared == release.card["prepared"]
    for odd in (
        np.ones((9, 9, 1)),
        np.ones((9, 9, 1), np.uint16),
        np.ones((9, 9), np.int64),
        np.ones(9, np.uint8),
        np.ones((9, 9, 2), np.uint8),
        np.ones((2, 9, 9, 1), np.uint8),
    ):
        with pytest.raises(DataError, match=rf"is {odd.dtype} .*, expected uint8 \(H, W\)"):
            release.prepare(odd)
    for odd in (tmp_path, tmp_path / "absent.png"):
        with pytest.raises(DataError, match=f"{odd} cannot be read .*: name the file of"):
            release.prepare(odd)
    with pytest.raises(DataError, match="or give its pixels as a NumPy array"):
        release.prepare(Image.new("L", (9, 9)))
    del release.card["prepared"]
    with pytest.raises(DataError, match="written by an older version"):
        release.prepare(picture)


@pytest.mark.parametrize("alpha", [None, 128])
def test_the_readmes_code_runs_with_numpy_and_pillow(digits, tmp_path, picture, alpha):
    """The code prepares the picture as the package does.

    It has at most ten lines, and runs where this package and torch cannot be imported, and where
    the encoding of files is not UTF-8 by default.
    """
    few = digits.take(np.arange(300))
    path = write_release(tmp_path / "release", few, count=300, about={"owner": "Söhne"})
    if alpha is not None:
        with Image.open(picture) as opaque:
            transparent = opaque.copy()
        transparent.putalpha(alpha)
        transparent.save(picture, exif=transparent.getexif())
    shutil.copy(picture, path)
    lines = re.search("```python\n(import json.*?)```", (path / "README.md").read_text(), re.S)[1]
    assert lines.count("\n") <= 10
    shown = f"{WITHOUT}{lines}print(x.tolist(), table['class'][7], len(table), sep='\\n')"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", shown],
        cwd=path,
        env=os.environ | ascii_only,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said, x, *table = done.stdout.splitlines()
    assert said in digits.classes and table == [str(digits.labels[7]), "300"]
    assert np.array_equal(json.loads(x), sfumato.load_release(path).prepare(picture))


def test_a_release_can_be_compared_and_cached(release):
    other = sfumato.load_release(release.path)
    assert release == release and release != other and len({release, other}) == 2


def test_a_release_is_described_in_three_lines(release):
    first, second, third = repr(release).splitlines()
    assert "40 images of 8×8×1 (40 plain)" in first and "10 classes: 0, 1" in second
    assert f"ε = {release.cost['epsilon']:.4g}" in third and third.endswith(
        "for one (image, label), recomputed from the records>"
    )


def test_a_project_names_the_path_of_its_release(digits, tmp_path):
    write_release(tmp_path / "artifacts" / "synthesize", digits)
    with pytest.raises(DataError, match="is a project folder: name .*artifacts/synthesize, its"):
        sfumato.load_release(tmp_path)


def test_a_hub_takes_pictures_and_a_table_without_pyarrow(release, tmp_path, uninstall):
    uninstall("pyarrow")
    folder = release.to_huggingface(tmp_path / "hub")
    front = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert (
        front["configs"] == [{"config_name": "default", "data_dir": "png"}]
        and not (folder / PARQUET).exists()
    )
    rows = list(csv.DictReader((folder / "png" / "metadata.csv").open()))
    assert len(rows) == 40 and all((folder / "png" / row["file_name"]).is_file() for row in rows)


# ---- what the card states, and what is beside it

SAMPLED = Mechanism(noise_multiplier=1.5, sample_rate=0.3, uses=20)
GROUPED = UNITS[GROUP]


def rewrite(path, change) -> None:
    """Edit card and records of a release, and correct the sha256 of the card, as a forger would."""
    card, privacy = (
        json.loads((path / name).read_text()) for name in ("card.json", "privacy.json")
    )
    change(card, privacy)
    (path / "card.json").write_text(json.dumps(card))
    privacy["files"]["card.json"] = digest_of_file(path / "card.json")
    (path / "privacy.json").write_text(json.dumps(privacy))


def replace_array(name, array):
    """Return an edit that puts another array into the release."""

    def change(path) -> None:
        np.save(path / name, array)
        rewrite(
            path, lambda card, privacy: privacy["files"].update({name: digest_of_file(path / name)})
        )

    return change


def stating(**said):
    return lambda path: rewrite(path, lambda card, privacy: card.update(said))


def recording(**said):
    return lambda path: rewrite(
        path, lambda card, privacy: privacy["records"][RECORD["id"]].update(said)
    )


LIES = {
    "a smaller epsilon": (
        stating(epsilon=0.01),
        r"epsilon=0.01 at delta=.*, but the records in privacy\.json cost at least 0.606929",
    ),
    "epsilon a little smaller": (stating(epsilon=0.6), r"privacy\.json cost"),
    "epsilon at another delta": (stating(delta=1e-7), "at delta=1e-07, but the records"),
    "epsilon below zero": (stating(epsilon=-1), "expected a finite number"),
    "epsilon true": (stating(epsilon=True), "expected a finite number"),
    "delta that means nothing": (stating(delta=0.5), "states delta=0.5, expected more than 0"),
    "another unit": (stating(units=[GROUPED]), "states units="),
    "another adjacency": (stating(adjacency="zero-out-one"), "states adjacency="),
    "more images": (
        stating(images=6000),
        "states images=6000, but according to the other files it is 40",
    ),
    "another shape": (stating(shape=[3, 8, 8]), "states shape="),
    "a class less": (
        stating(classes=list("012345678")),
        r"labels\.npy has labels 0\.\.9, expected 0\.\.8",
    ),
    "a class twice": (stating(classes=["0"] * 10), "names a class twice"),
    "classes no names": (stating(classes=list(range(10))), "not a list of names"),
    "other kinds": (stating(kinds={"plain": 30, "public": 10}), "states kinds="),
    "other sources": (stating(sources={"finetune": 30}), "its `sources` add up to 30"),
    "public images as drawn": (
        replace_array("kinds.npy", np.array(["plain", "public"] * 20)),
        "kinds.npy marks 20 images as public, but the card states only 0 public",
    ),
    "synthetic or not": (stating(synthetic=False), "states synthetic="),
    "another mark": (stating(digital_source_type=None), "states digital_source_type="),
    "owners apart": (stating(apart=["north", "south"]), "states apart="),
    "labels of another type": (
        replace_array("labels.npy", np.zeros(40, np.int8)),
        r"labels\.npy is int8",
    ),
    "labels of other images": (
        replace_array("labels.npy", np.zeros(39, np.int64)),
        r"40 images, but labels\.npy contains 39 labels",
    ),
    "a label below zero": (replace_array("labels.npy", np.full(40, -1)), r"has labels -1\.\.-1"),
    "several labels that are counts": (
        replace_array("labels.npy", np.full((40, 10), 2, np.uint8)),
        "labels other than 0 and 1",
    ),
    "images no bytes": (
        replace_array("images.npy", np.zeros((40, 8, 8, 1))),
        r"images\.npy is float64",
    ),
    "kinds of other images": (
        replace_array("kinds.npy", np.full(39, "plain")),
        r"kinds\.npy is <U5 \(39,\)",
    ),
    "noise by a seed": (recording(noise_source="seeded: for tests only"), "no privacy guarantee"),
    "no mechanism": (recording(event={"type": "Free"}), "not a mechanism"),
    "an unknown query": (recording(stage="free"), "install the package that declares it"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_card_that_does_not_fit_is_refused(release, name):
    change, words = LIES[name]
    change(release.path)
    with pytest.raises(DataError, match=rf"card\.json does not fit the release \(.*{words}"):
        sfumato.load_release(release.path)


def test_a_receiver_is_told_the_epsilon_of_the_records(release):
    """A card that states a larger ε, by mistake or caution, does not change the result."""
    stated = release.card["epsilon"]
    assert release.cost == {
        "epsilon": pytest.approx(stated, rel=1e-9),
        "delta": release.card["delta"],
        "adjacency": "add-or-remove-one",
        "units": ["one (image, label)"],
        "basis": "recomputed from the records",
    }
    stating(epsilon=50.0)(release.path)
    assert sfumato.load_release(release.path).cost["epsilon"] == pytest.approx(stated, rel=1e-9)


def test_an_exact_card_holds_by_the_exact_accountant(release):
    """A card with the exact ε is valid, even if a query draws samples of the images.

    A card that states less than the exact ε is refused.
    """
    other = small_record(5, SAMPLED, stage="finetune")
    events = [event_of(RECORD), event_of(other)]
    spent = {name: epsilon(events, release.card["delta"], name) for name in ("rdp", "pld", "exact")}
    assert spent["exact"] < 0.98 * spent["rdp"]
    rewrite(release.path, lambda card, privacy: privacy["records"].update({other["id"]: other}))
    for name, stated in spent.items():
        stating(epsilon=stated)(release.path)
        told = spent["rdp" if name == "rdp" else "exact"]
        assert sfumato.load_release(release.path).cost["epsilon"] == pytest.approx(told, rel=1e-9)
    stating(epsilon=0.999 * spent["exact"])(release.path)
    with pytest.raises(DataError, match=r"privacy\.json cost"):
        sfumato.load_release(release.path)


def test_a_record_under_another_id_is_refused(release):
    rewrite(
        release.path, lambda card, privacy: privacy["records"][RECORD["id"]].update(id="b" * 32)
    )
    with pytest.raises(DataError, match="states a different id"):
        sfumato.load_release(release.path)


DEEP = {
    "brackets": "[" * 100_000,
    "braces": '{"a":' * 100_000,
    "a key twice": '{"epsilon": 0.01, "epsilon": 9.9}',
    "no number": '{"epsilon": NaN}',
}


@pytest.mark.parametrize("name", ["card.json", "privacy.json"])
@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_hostile_document_is_a_data_error(release, name, text):
    (release.path / name).write_text(text)
    if name == "card.json":
        file = release.path / "privacy.json"
        content = json.loads(file.read_text())
        content["files"][name] = digest_of_file(release.path / name)
        file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="cannot be read"):
        sfumato.load_release(release.path)


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    "header", ["-" * 9000 + "1\n", "1" + "+1" * 4000 + "\n", "(" * 9000 + "\n", "[" * 150 + "\n"]
)
def test_an_array_with_a_hostile_header_is_a_data_error(release, header):
    (release.path / "images.npy").write_bytes(npy(header))
    rewrite(
        release.path,
        lambda card, privacy: privacy["files"].update(
            {"images.npy": digest_of_file(release.path / "images.npy")}
        ),
    )
    with pytest.raises(DataError, match="cannot be read"):
        sfumato.load_release(release.path)
    with pytest.raises(DataError, match="is not a complete .npy file"):
        load_array(release.path / "images.npy")


@pytest.mark.parametrize("text", ["", "---\n" + "[" * 100_000 + "\n---\n", "---\na\n---\n"])
def test_a_readme_without_front_matter_goes_to_no_hub(release, tmp_path, text):
    (release.path / "README.md").write_text(text)
    with pytest.raises(DataError, match="has no front matter"):
        release.to_huggingface(tmp_path / "hub")
