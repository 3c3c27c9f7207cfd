"""The card of a release, and its exports to other programs."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from sfumato.data.images import ImageSet
from sfumato.data.sources import read_source
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.events import Mechanism
from sfumato.release.card import dataset_card
from sfumato.release.exports import METADATA, folder_names, save_npz, save_png_folders
from sfumato.settings.data import Data

MECHANISMS = {
    "count": Mechanism(noise_multiplier=5),
    "finetune": Mechanism(noise_multiplier=2, sample_rate=0.3, uses=20),
}


def records(adjacency: str = "add-or-remove-one") -> dict[str, dict]:
    return {
        name: {
            "id": name,
            "stage": name,
            "released": f"what | {name} gave",
            "adjacency": adjacency,
            "unit": "one (image, label)",
            "event": mechanism.to_json(),
        }
        for name, mechanism in MECHANISMS.items()
    }


def card(**more) -> str:
    of_card = {"per_class": [700, 500], "sources": {"finetune": 1200}, "kinds": {"plain": 1200}, "records": records()}
    of_plan = {
        "dataset_id": "clinic-2026",
        "shape": (1, 8, 8),
        "classes": ("benign", "mal|ignant"),
        "size_hint": 1500,
        "delta": None,
        "about": {},
        "several": False,
    }
    settings = SimpleNamespace(export=more.pop("export", ()), relabel=False)
    plan = SimpleNamespace(settings=settings, **of_plan | {key: more.pop(key) for key in of_plan if key in more})
    return dataset_card(plan, **of_card | more)


def front(text: str) -> dict:
    _, header, _ = text.split("---\n", 2)
    return yaml.safe_load(header)


def test_the_front_matter_is_what_hubs_expect():
    found = front(card())
    assert found["license"] == "other" and found["task_categories"] == ["image-classification"]
    assert found["size_categories"] == ["1K<n<10K"] and set(found["tags"]) == {"synthetic", "differential-privacy"}
    assert "configs" not in found and front(card(export=("png",)))["configs"][0]["data_dir"] == "png"
    assert front(card(dataset_id="yes"))["pretty_name"].startswith("yes")
    assert [front(card(per_class=[n, 0], sources={"finetune": n}))["size_categories"] for n in (999, 1000, 10**7)] == [
        ["n<1K"],
        ["1K<n<10K"],
        ["n>10M"],
    ]


def test_the_card_states_the_cost_of_its_own_records_and_never_less():
    text = card()
    said = float(text.split("ε = ")[1].split("**")[0])
    exact = epsilon([m.event for m in MECHANISMS.values()], default_delta(1500))
    assert exact <= said <= exact * 1.001
    assert "added or removed" in text and "replaced by a blank" in card(records=records("zero-out-one"))
    assert "ε = 0**" in card(records={}) and "2 charges" in text


def test_the_card_is_the_same_bytes_each_time_and_keeps_its_tables_whole():
    text = card()
    assert text == card(records=dict(reversed(records().items())))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "| 1 | mal\\|ignant | 500 |" in rows and any("what \\| count gave" in row for row in rows)


PLAIN = np.full(40, "plain")  # the kinds of as many images


@pytest.fixture
def release(digits) -> ImageSet:
    """Classes whose names sort in another order than their labels and cannot be names of folders."""
    chosen = np.flatnonzero(digits.labels < 3)[:40]
    return ImageSet(digits.images[chosen], digits.labels[chosen], ("T-shirt/top", "Bag", "été"))


def test_an_archive_gives_back_pixels_labels_and_classes(release, tmp_path):
    save_npz(tmp_path / "a.npz", release, PLAIN)
    save_npz(tmp_path / "b.npz", release, PLAIN)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    source = read_source(Data(dataset_id="x", source="npz", path=str(tmp_path / "a.npz")), tmp_path / "raw")
    examples = list(source.train)
    assert source.classes == release.classes
    assert (
        np.array_equal(np.stack([image for image, _ in examples]), release.images)
        and [label for _, label in examples] == release.labels.tolist()
    )


def test_folders_of_pngs_load_with_torchvision(release, tmp_path):
    from torchvision.datasets import ImageFolder

    save_png_folders(tmp_path, release, PLAIN)
    found = ImageFolder(str(tmp_path))
    rows = {row["file_name"]: row for row in csv.DictReader((tmp_path / METADATA).open(encoding="utf-8"))}
    assert len(found) == len(release) == len(rows)
    for path, label in found.samples:
        name = path.removeprefix(f"{tmp_path}/")
        index = int(name[-10:-4])
        assert (
            label == release.labels[index] == int(rows[name]["label"]) and rows[name]["class"] == release.classes[label]
        )
        assert np.array_equal(np.asarray(found.loader(path))[..., :1], release.images[index])


def test_folders_of_pngs_load_as_a_source_of_this_program(release, tmp_path):
    save_png_folders(tmp_path, release, PLAIN)
    source = read_source(Data(dataset_id="x", source="imagefolder", path=str(tmp_path)), tmp_path / "raw")
    order = np.argsort(release.labels, kind="stable")
    examples = list(source.train)
    assert np.array_equal(np.stack([image for image, _ in examples]), release.images[order])
    assert [label for _, label in examples] == release.labels[order].tolist()


@pytest.mark.parametrize(
    ("classes", "folders"),
    [
        (("cat", "dog"), ("cat", "dog")),
        (("dog", "cat"), ("0-dog", "1-cat")),
        (("a/b", "a_b"), ("0-a_b", "1-a_b")),
        (("..", "x"), ("0", "1-x")),
        (("a", "A"), ("0-a", "1-A")),
        (tuple(str(i) for i in range(10)), tuple(str(i) for i in range(10))),
    ],
)
def test_folders_sort_as_their_labels_and_stay_inside(classes, folders):
    assert folder_names(classes) == folders
    assert len(set(folders)) == len(classes) and sorted(folders) == list(folders)


def test_folders_of_many_classes_keep_their_order():
    names = folder_names([str(i) for i in range(120)])
    assert names[7] == "007-7" and list(names) == sorted(names)


def test_the_card_says_which_images_are_public_and_which_are_no_plain_ones():
    chosen = card(sources={"select": 1200})
    assert "All are **public images, privately selected and labelled**" in chosen and "drawn by" not in chosen
    assert "synthetic" not in chosen.split("## Privacy")[0]
    both = card(sources={"select": 400, "finetune": 800})
    assert "800 were drawn by generative models" in both and "400 are **public images" in both
    varied = card(kinds={"plain": 600, "distorted": 400, "blend": 200})
    assert "600 are as they were drawn, 400 warped, textured" in varied
    assert "kind by kind: plain, distorted, blend](grid.png)" in varied and 'kinds=["plain"]' in varied
    assert "as they were drawn" not in card()


def test_the_card_says_of_gaussians_what_is_not_of_the_sensitive_images():
    of_gaussians = {name: record | {"stage": "covariance"} for name, record in records().items()}
    told = card(sources={"auxiliary": 1200}, records=of_gaussians)
    assert "in their low frequencies only" in told and "public images, recoloured" in told
    assert "low frequencies" not in card(sources={"auxiliary": 1200})
    assert "low frequencies" not in card(sources={"finetune": 1200}, records=of_gaussians)
