"""The card of a release, and its exports to other programs."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from small_record import small_record
from torchvision.datasets import ImageFolder

from sfumato.data.images import ImageSet
from sfumato.data.rendered import DRAWN
from sfumato.data.sources import read_source
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, Mechanism
from sfumato.release.card import PREPARED, WORDS, cost_of, dataset_card, page
from sfumato.release.exports import PNG, folder_names, mark_of, save_npz, save_png_folders
from sfumato.settings.data import Data
from sfumato.storage.records import Records

MECHANISMS = {
    "count": Mechanism(noise_multiplier=5),
    "finetune": Mechanism(noise_multiplier=2, sample_rate=0.3, uses=20),
}


def records(adjacency: str = ADD_OR_REMOVE_ONE) -> dict[str, dict]:
    found = {}
    for number, (name, mechanism) in enumerate(MECHANISMS.items()):
        record = small_record(
            number, mechanism, stage=name, released=f"what | {name} gave", adjacency=adjacency
        )
        found[record["id"]] = record
    return found


def card(**more) -> str:
    of_card = {"sources": {"finetune": 1200}, "kinds": {"plain": 1200}, "prepared": PREPARED}
    behind = Records(more.pop("records", records()))
    per_class = more.pop("per_class", [700, 500])
    public_source = more.pop("public_source", None)
    of_plan = {"dataset_id": "clinic-2026", "shape": (1, 8, 8), "classes": ("benign", "mal|ignant")}
    of_plan |= {
        "size_hint": 1500,
        "delta": None,
        "about": {},
        "several": False,
        "prepared": {},
        "accountant": "rdp",
    }
    settings = SimpleNamespace(
        export=more.pop("export", ()), relabel=False, herding=1, mark="pictures", mixed=0
    )
    plan = SimpleNamespace(
        settings=settings, **of_plan | {key: more.pop(key) for key in of_plan if key in more}
    )
    of_card |= more | cost_of(plan, behind)
    of_card |= {"images": sum(of_card["sources"].values())}
    return dataset_card(plan, of_card, per_class, behind, public_source)


def front(text: str) -> dict:
    _, header, _ = text.split("---\n", 2)
    return yaml.safe_load(header)


def test_the_front_matter_is_what_hubs_expect():
    found = front(card())
    assert found["license"] == "other" and found["task_categories"] == ["image-classification"]
    assert found["size_categories"] == ["1K<n<10K"] and set(found["tags"]) == {
        "synthetic",
        "differential-privacy",
    }
    assert (
        "configs" not in found and front(card(export=("png",)))["configs"][0]["data_dir"] == "png"
    )
    assert front(card(dataset_id="yes"))["pretty_name"].startswith("yes")
    for count, category in ((999, "n<1K"), (1000, "1K<n<10K"), (10**7, "n>10M")):
        assert front(card(per_class=[count, 0], sources={"finetune": count}))[
            "size_categories"
        ] == [category]


def test_the_card_never_states_less_than_its_records_cost():
    text = card()
    said = float(text.split("ε = ")[1].split("**")[0])
    exact = epsilon([m.event for m in MECHANISMS.values()], default_delta(1500))
    assert exact <= said <= exact * 1.001
    of_exact = card(accountant="exact")
    assert "(privacy-loss distribution accounting; 2" in card(accountant="pld")
    less = epsilon([m.event for m in MECHANISMS.values()], default_delta(1500), "exact")
    assert "(exact accounting; 2 charges)" in of_exact and "(Rényi accounting; 2 charges)" in text
    assert less <= float(of_exact.split("ε = ")[1].split("**")[0]) <= less * 1.001 < exact
    assert "added or removed" in text and "replaced by a blank" in card(
        records=records("zero-out-one")
    )
    assert "ε = 0**" in card(records={}) and "2 charges" in text


def test_the_card_is_the_same_bytes_each_time():
    text = card()
    assert text == card(records=dict(reversed(records().items())))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "| 1 | mal\\|ignant | 500 |" in rows and any(
        "what \\| count gave" in row for row in rows
    )


# Kinds of the 40 images of `release`, and the mark of their origin
PLAIN = np.full(40, "plain")
MARK = mark_of(["finetune"])


@pytest.fixture
def release(digits) -> ImageSet:
    """Return images of classes whose names sort in another order than their labels. One name cannot
    be the name of a folder.
    """
    chosen = np.flatnonzero(digits.labels < 3)[:40]
    return ImageSet(digits.images[chosen], digits.labels[chosen], ("T-shirt/top", "Bag", "été"))


def test_an_archive_gives_back_pixels_labels_and_classes(release, tmp_path):
    bytes_of = []
    for _ in range(2):
        save_npz(tmp_path, release, PLAIN, MARK)
        bytes_of.append((tmp_path / "images.npz").read_bytes())
    assert bytes_of[0] == bytes_of[1]
    source = read_source(
        Data(dataset_id="x", source="npz", path=str(tmp_path / "images.npz")), tmp_path / "raw"
    )
    images, labels = zip(*source.train, strict=True)
    assert source.classes == release.classes
    assert (
        np.array_equal(np.stack(images), release.images) and list(labels) == release.labels.tolist()
    )


def test_folders_of_pngs_load_with_torchvision(release, tmp_path):
    save_png_folders(tmp_path, release, PLAIN, MARK)
    folder = tmp_path / PNG
    found = ImageFolder(str(folder))
    rows = {
        row["file_name"]: row
        for row in csv.DictReader((folder / "metadata.csv").open(encoding="utf-8"))
    }
    assert len(found) == len(release) == len(rows)
    for path, label in found.samples:
        row = rows[path.removeprefix(f"{folder}/")]
        index = int(path[-10:-4])
        assert (
            label == release.labels[index] == int(row["label"])
            and row["class"] == release.classes[label]
        )
        assert np.array_equal(np.asarray(found.loader(path))[..., :1], release.images[index])
    source = read_source(
        Data(dataset_id="x", source="imagefolder", path=str(folder)), tmp_path / "raw"
    )
    order = np.argsort(release.labels, kind="stable")
    images, labels = zip(*source.train, strict=True)
    assert np.array_equal(np.stack(images), release.images[order])
    assert list(labels) == release.labels[order].tolist()


@pytest.mark.parametrize(
    ("classes", "folders"),
    [
        (("cat", "dog"), ("cat", "dog")),
        (("dog", "cat"), ("0-dog", "1-cat")),
        (("a/b", "a_b"), ("0-a_b", "1-a_b")),
        (("..", "x"), ("0", "1-x")),
        (("a", "A"), ("0-a", "1-A")),
        (("é", "e\u0301"), ("0-é", "1-e\u0301")),
        (("AD", "Con", "MCI"), ("0-AD", "1-Con", "2-MCI")),
        (("console", "nul.x"), ("0-console", "1-nul.x")),
        (("漢" * 255, "z"), ("0-" + "漢" * 33, "1-z")),
        (("a" * 99 + " b", "a" * 255), ("0-" + "a" * 99, "1-" + "a" * 100)),
        (tuple(str(i) for i in range(10)), tuple(str(i) for i in range(10))),
        (tuple(str(i) for i in range(120)), tuple(f"{i:03d}-{i}" for i in range(120))),
    ],
)
def test_folders_sort_as_their_labels_and_stay_inside(classes, folders):
    assert folder_names(classes) == folders
    assert len(set(folders)) == len(classes) and sorted(folders) == list(folders)


def test_image_folder_refuses_a_class_without_images(digits, tmp_path):
    """If the empty class had no folder, ImageFolder would number the later classes differently."""
    images = ImageSet(digits.images[:2], np.array([0, 2]), ("a", "b", "c"))
    save_png_folders(tmp_path, images, PLAIN, MARK)
    with pytest.raises(FileNotFoundError, match="classes b"):
        ImageFolder(str(tmp_path / PNG))
    assert ImageFolder(str(tmp_path / PNG), allow_empty=True).targets == [0, 2]
    assert "ImageFolder" in card(export=("png",))
    assert "ImageFolder" not in card(export=("png",), per_class=[1200, 0])


def test_the_card_states_which_images_are_public():
    chosen = card(sources={"select": 1200})
    assert (
        "All are **public images, privately selected and labelled**" in chosen
        and "drawn by" not in chosen
    )
    assert "synthetic" not in chosen.split("## Privacy")[0]
    both = card(sources={"select": 400, "finetune": 800})
    assert "800 were drawn by generative models" in both and "400 are **public images" in both
    varied = card(kinds={"plain": 600, "distorted": 400, "blend": 200})
    assert "600 images are unchanged, 400 are warped, textured" in varied
    assert (
        "![Up to ten images per class, none of them distorted or blended](grid.png)" in varied
        and 'kinds=["plain"]' in varied
    )
    assert "images are unchanged" not in card()


def test_the_card_states_the_licence_of_public_images():
    assert set(WORDS["licences"]) == set(DRAWN)
    chosen = {"sources": {"select": 1200}}
    assert "The licence of that set applies to them." in card(**chosen, public_source="npz")
    for source, words in (
        ("glyphs", "no licence of their own"),
        ("photos", "the licence CC BY 2.0"),
    ):
        told = card(**chosen, public_source=source)
        assert words in told and "The licence of that set" not in told
    assert "licence of their own" not in card(public_source="glyphs"), (
        "none of them is in the release"
    )


def test_the_card_states_what_is_public_in_gaussians():
    of_gaussians = {name: record | {"stage": "covariance"} for name, record in records().items()}
    told = card(sources={"auxiliary": 1200}, records=of_gaussians)
    assert "only in their low frequencies" in told and "recoloured public images" in told
    stream = {"sources": {"auxiliary": 1200}, "stream": {"mirrored": False}, "kinds": {"plain": 1}}
    drawing = card(**stream, records=of_gaussians, public_source="procedural")
    assert drawing.count("no licence of their own") == 2 and "keep their own" not in drawing
    assert "low frequencies" not in card(sources={"auxiliary": 1200})
    assert "low frequencies" not in card(sources={"finetune": 1200}, records=of_gaussians)


def test_a_page_has_one_main_part_and_tables_that_fit_a_phone():
    """Screen readers jump to <main>. Cells wrap, so that a table is not wider than the screen."""
    html = page("# Form\n\n| one | two |\n|---|---|\n| `a` | b |", "Form")
    main = html.split("<main>")[1].split("</main>")[0]
    assert "<h1>Form</h1>" in main and "</table>" in main and html.count("<main>") == 1
    assert "nowrap" not in html and "overflow-wrap: anywhere" in html
