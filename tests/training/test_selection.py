"""Selection from a noisy histogram, and the stages classifier, histogram and select, run one after
another.
"""

import csv
import json
import math
import re
import resource
from secrets import token_hex

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from opened_files import opened_files

from sfumato.data.images import ImageSet, save_images
from sfumato.data.prepare import prepare_sensitive
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Select
from sfumato.storage.artifacts import read_artifact, writing
from sfumato.training.selection import (
    Kept,
    example_grid,
    number_to_keep,
    read_votes,
    relabel,
    save_selection,
    select_classes,
    select_public,
    surest,
)
from stages.runner import run_stage


def all_of(count: int) -> list[Kept]:
    return select_public(Select(ratio=1.0), None, count)


# ---- the classes


def test_one_row_keeps_the_most_voted_equal_ones_in_their_order():
    kept = select_classes(np.array([[3.0, 9.0, -2.0, 9.0, 3.0]]), 4)
    assert kept == [Kept(1, 0, 9.0), Kept(3, 0, 9.0), Kept(0, 0, 3.0), Kept(4, 0, 3.0)]


def test_a_class_goes_to_the_row_with_most_votes():
    votes = np.array([[10.0, 9.0, 1.0, 0.0], [8.0, 7.0, 6.0, 5.0]])
    assert select_classes(votes, 4) == [
        Kept(0, 0, 10.0),
        Kept(1, 0, 9.0),
        Kept(2, 1, 6.0),
        Kept(3, 1, 5.0),
    ]
    assert select_classes(votes, 2) == [Kept(0, 0, 10.0), Kept(1, 1, 7.0)]


def test_what_does_not_divide_goes_to_the_most_voted():
    votes = np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 9.0, 8.0, 7.0, 6.0]])
    assert [choice.row for choice in select_classes(votes, 3)] == [1, 1, 0]


@given(st.data())
def test_every_row_is_served_equally_under_any_noise(data):
    rows = data.draw(st.integers(1, 6))
    public = data.draw(st.integers(rows, 20))
    keep = data.draw(st.integers(rows, public))
    seed = data.draw(st.integers(0, 2**32 - 1))
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e12]))
    votes = np.random.default_rng(seed).normal(0, scale, (rows, public)).round(2)
    kept = select_classes(votes, keep)
    assert len(kept) == keep == len({choice.public for choice in kept})
    share = np.bincount([choice.row for choice in kept], minlength=rows)
    assert share.min() >= keep // rows and share.max() <= math.ceil(keep / rows)
    assert [choice.votes for choice in kept] == [
        votes[choice.row, choice.public] for choice in kept
    ]
    assert kept == sorted(kept, key=lambda choice: -choice.votes)
    assert kept == select_classes(votes.copy(), keep)


@pytest.mark.parametrize(("ratio", "number"), [(0.05, 3), (0.001, 1), (1.0, 62)])
def test_how_many_to_keep(ratio, number):
    assert number_to_keep(Select(ratio=ratio), 62) == number


# ---- relabelling

LABELS = np.array([4, 0, 2, 2, 1, 4, 3], dtype=np.int64)
KEPT = [Kept(2, 1, 9.0), Kept(4, 0, 8.0), Kept(1, 1, 7.0)]


def test_images_of_kept_classes_take_their_rank_or_class():
    indices, labels = relabel(LABELS, KEPT, 5, per_class=False)
    assert indices.tolist() == [0, 2, 3, 4, 5] and labels.tolist() == [1, 0, 0, 2, 1]
    indices, labels = relabel(LABELS, KEPT, 5, per_class=True)
    assert indices.tolist() == [0, 2, 3, 4, 5] and labels.tolist() == [0, 1, 1, 1, 0]
    assert indices.dtype == labels.dtype == np.int64


def test_without_a_histogram_all_classes_keep_all_images():
    indices, labels = relabel(LABELS, all_of(5), 5, per_class=False)
    assert indices.tolist() == [*range(7)] and labels.tolist() == LABELS.tolist()


def test_the_table_names_what_each_class_became(tmp_path):
    images = ImageSet(np.zeros((7, 8, 8, 1), dtype=np.uint8), LABELS, tuple("abcde"))
    for kept, sensitive, expected in (
        (KEPT, ["cat", "dog"], ["c,9.00,1,dog", "e,8.00,2,cat", "b,7.00,3,dog"]),
        (all_of(2), None, ["a,,1,a", "b,,2,b"]),
    ):
        save_selection(tmp_path, images, kept, LABELS, LABELS, sensitive)
        assert (tmp_path / "selection.csv").read_text().splitlines()[1:] == expected


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_has_a_row_of_examples_for_each_kept_class(channels):
    """Every class but the first has one image; the first has none."""
    pixels = np.zeros((69, 8, 6, channels), dtype=np.uint8)
    images = ImageSet(
        pixels, np.arange(1, 70, dtype=np.int64), tuple(f"class {i}" for i in range(70))
    )
    grid = example_grid(images, all_of(70))
    cell = 8 * 8 + 2  # pixels: each image is magnified by 8 and stands in a frame of 2
    assert grid.shape == (60 * cell + 2, 6 * (8 * 6 + 2) + 2, channels)
    assert (grid[:cell] == 255).all() and (grid[cell + 2 : 2 * cell, 2:50] == 0).all()


# ---- the stages, in a row


@pytest.fixture(scope="module")
def public(digits, tmp_path_factory):
    """Write a public set: the digits, and inverted digits as ten more classes."""
    images = np.concatenate([digits.images, 255 - digits.images])
    labels = np.concatenate([digits.labels, digits.labels + 10])
    both = ImageSet(images, labels, tuple("0123456789") + tuple(f"dark {i}" for i in range(10)))
    out = tmp_path_factory.mktemp("public") / "public"
    with writing(out, "public") as directory:
        save_images(directory, both)
        card = {
            "enabled": True,
            "source": "digits twice",
            "shape": [1, 8, 8],
            "classes": both.classes,
        }
        (directory / "card.json").write_text(json.dumps(card | {"images": len(both)}))
    return out


@pytest.fixture
def desk(here, public):
    """Prepare digits in a new folder. Returns a function that plans and runs a stage."""
    prepare_sensitive(Data(), here / "state", here / "data/sensitive/card.json", here / "raw")
    plans = here / "artifacts/plan"
    plans.mkdir(parents=True)
    (here / "data/public").symlink_to(public)
    (plans / "permission.json").write_text(
        json.dumps({"delta": 1e-5, "lifetime_epsilon": "unlimited"})
    )

    def run(
        stage, *, enabled=True, noise=None, sample_rate=1.0, uses=1, shape=(1, 8, 8), **settings
    ):
        content = {
            "stage": stage,
            "enabled": enabled,
            "revision": STAGES[stage].revision,
            "seed": 0,
        }
        content |= {"settings": settings, "shape": list(shape)}
        content |= {
            "dataset_id": "digits",
            "classes": list("0123456789"),
            "size_hint": 1400,
            "delta": 1e-5,
        }
        if noise is not None:
            content["mechanism"] = {
                "noise_multiplier": noise,
                "sample_rate": sample_rate,
                "uses": uses,
            }
            lineage = {stage: {"plan": token_hex()}}
            (plans / "lineage.json").write_text(json.dumps(lineage))
        (plans / f"{stage}.yaml").write_text(yaml.safe_dump(content))
        run_stage(STAGES[stage])
        return here / "artifacts" / stage

    return run


QUICK = {"width": 8, "steps": 80}


def test_relabelled_public_digits_take_sensitive_labels(desk, public):
    about = json.loads((desk("classifier", **QUICK) / "card.json").read_text())
    assert about["public_validation_accuracy"] > 0.8
    assert len(about["classes"]) == 20 and about["source"] == "digits twice"
    counted = desk("histogram", noise=5.0, sample_rate=0.7, votes=1, per_class=True)
    votes = np.load(counted / "histogram.npy", allow_pickle=False)
    assert votes.shape == (10, 20) and votes.dtype == np.float64
    told = {"public_classes": about["classes"], "votes": 1, "per_class": True}
    assert json.loads((counted / "histogram.json").read_text()) == told
    (record,) = read_artifact(counted, "histogram").records.values()
    assert record["sensitivity"].startswith("√1") and record["event"]["type"] == "PoissonSampled"
    half = np.load(desk("select", ratio=0.5) / "indices.npy", allow_pickle=False)
    out = desk("select")
    indices, labels = (
        np.load(out / name, allow_pickle=False) for name in ("indices.npy", "labels.npy")
    )
    original = np.load(public / "labels.npy")[indices]
    assert (np.diff(indices) > 0).all() and len(indices) == 1797
    assert np.array_equal(indices, half), "by default, each class gets at least one public class"
    assert np.array_equal(original, labels), "each digit's own class has the most votes of it"
    chosen = json.loads((out / "selection.json").read_text())
    assert chosen["labels"] == "sensitive"
    assert chosen["classes"] == list("0123456789") == sorted(chosen["kept"])
    assert chosen["images"] == len(indices) and (out / "selection.png").is_file()
    assert list(read_artifact(out, "select").records.values()) == [record], (
        "the selection carries the histogram's cost"
    )
    with (out / "selection.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["rank"] for row in rows] == [str(i) for i in range(1, 11)]
    assert all(row["public_class"] == row["relabelled_as"] for row in rows)


def test_a_teacher_labels_public_digits_that_are_released(desk, public):
    desk("classifier", network="whitened", **QUICK)
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    desk("count", noise=5.0)
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0, "a query leaves no core dump"
    taught = desk("teacher", noise=1.0, uses=20, steps=20, dimension=32, learning_rate=30.0)
    records = {
        record["stage"]: record for record in read_artifact(taught, "teacher").records.values()
    }
    assert set(records) == {"count", "teacher"} and records["teacher"]["event"]["count"] == 20
    default = desk("select", by="teacher")
    assert len(np.load(default / "indices.npy")) == 10 * (2 * 1797 // 10), "fewer than 20 000"
    chosen = desk("select", by="teacher", images=600)
    indices, labels = (
        np.load(chosen / name, allow_pickle=False) for name in ("indices.npy", "labels.npy")
    )
    original = np.load(public / "labels.npy")[indices]
    assert np.bincount(labels).tolist() == [60] * 10 and len(set(indices.tolist())) == 600
    assert (original == labels).mean() > 0.7, (
        "most are digits of their own class, few are inverted ones"
    )
    with (chosen / "selection.csv").open(newline="") as file:
        assert [row["most_frequent"].split()[0] for row in csv.DictReader(file)] == list(
            "0123456789"
        )
    too_few = r"class '0', but .* has 60: lower synthesize.count, or raise select.images"
    with pytest.raises(DataError, match=too_few):
        desk("synthesize", sources={"select": 1}, count=1000, labels="uniform")
    out = desk("synthesize", sources={"select": 1}, count=300, labels="uniform")
    images, labels = (
        np.load(out / name, allow_pickle=False) for name in ("images.npy", "labels.npy")
    )
    known = {image.tobytes() for image in np.load(public / "images.npy")[indices]}
    assert np.bincount(labels).tolist() == [30] * 10 and all(
        image.tobytes() in known for image in images
    )
    assert len(read_artifact(out, "synthesize").records) == 2, (
        "it carries the cost of the teacher and of the counts"
    )
    card = json.loads((out / "card.json").read_text())
    text = (out / "README.md").read_text()
    assert card["sources"] == {"select": 300} and not card["synthetic"]
    assert (
        "All are **public images, privately selected and labelled**" in text
        and "drawn by" not in text
    )


def test_the_mixture_is_chosen_without_sensitive_images(desk, tmp_path, monkeypatch):
    monkeypatch.setattr("sfumato.evaluation.mixture.STEPS", 20)
    desk("count", noise=5.0)
    desk("frequency", noise=1.0, size=40)
    desk("auxiliary", steps=5, images=50, batch=20, width=8, latent=4)
    desk(
        "teacher", noise=1.0, uses=20, steps=20, dimension=32, learning_rate=30.0, feature="pixels"
    )
    desk("select", by="teacher", images=200)
    mixed = {
        "sources": {"auxiliary": 1, "select": 1},
        "labels": "uniform",
        "choose": True,
        "relabel": True,
        "herding": 2,
    }
    with opened_files() as opened:
        out = desk("synthesize", **mixed, count=300)
    assert opened and not any(str(tmp_path / "state/data") in name for name in opened)
    card = json.loads((out / "card.json").read_text())
    text = (out / "README.md").read_text()
    said = card["mixture"]
    assert said["chosen"] in said["agreement"] and f"The set was released {said['chosen']}" in text
    assert (
        ("select" in card["sources"])
        == (said["chosen"] == "with public images")
        == ("public" in card["kinds"])
    )
    assert "selected from 2 times as many" in text
    assert all(
        (out / name).exists() for name in re.findall(r"^\| `([^`*]+)` \|", text, re.MULTILINE)
    )
    assert len(read_artifact(out, "synthesize").records) == 3, (
        "no charges except count, frequency and teacher"
    )


def test_in_one_row_the_kept_classes_are_renumbered_by_rank(desk, public):
    desk("classifier", **QUICK)
    desk("histogram", noise=5.0, votes=5)
    out = desk("select", ratio=0.25)
    chosen = json.loads((out / "selection.json").read_text())
    assert (
        chosen["labels"] == "public"
        and len(chosen["classes"]) == 5
        and chosen["kept"] == chosen["classes"]
    )
    names = json.loads((public / "card.json").read_text())["classes"]
    indices, labels = (
        np.load(out / name, allow_pickle=False) for name in ("indices.npy", "labels.npy")
    )
    original = np.load(public / "labels.npy")[indices]
    assert [chosen["classes"][label] for label in labels] == [names[label] for label in original]
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    desk("select", ratio=0.25)
    assert files == {path.name: path.read_bytes() for path in out.iterdir()}, (
        "the same plan selects the same bytes"
    )


def test_disabled_stages_write_empty_artifacts(desk):
    for stage in ("classifier", "histogram"):
        assert [path.name for path in desk(stage, enabled=False).iterdir()] == ["privacy.json"]
    out = desk("select", ratio=1.0)
    assert json.loads((out / "selection.json").read_text())["images"] == 2 * 1797
    assert not read_artifact(out, "select").records
    assert [path.name for path in desk("select", enabled=False).iterdir()] == ["privacy.json"]


def test_what_does_not_fit_is_refused_before_anything_is_spent(desk, tmp_path):
    desk("classifier", enabled=False)
    with pytest.raises(ConfigError, match="add classifier to `run`"):
        desk("histogram", noise=5.0)
    desk("classifier", width=4, steps=2)
    with pytest.raises(ConfigError, match="histogram.votes=21"):
        desk("histogram", noise=5.0, votes=21)
    with pytest.raises(DataError, match="stage classifier"):
        desk("histogram", noise=5.0, shape=(1, 9, 9))
    with pytest.raises(DataError, match="prepare public"):
        desk("classifier", shape=(1, 9, 9))
    assert (
        not list((tmp_path / "state" / "runs").glob("*"))
        and not (tmp_path / "artifacts/histogram").exists()
    )
    desk("histogram", noise=5.0)
    file = tmp_path / "artifacts/histogram/histogram.json"
    about = json.loads(file.read_text())
    votes = np.load(file.with_name("histogram.npy"))
    with writing(tmp_path / "artifacts/histogram", "histogram") as directory:
        np.save(directory / "histogram.npy", votes)
        (directory / "histogram.json").write_text(
            json.dumps(about | {"public_classes": about["public_classes"][::-1]})
        )
    with pytest.raises(DataError, match="votes for classes that differ"):
        desk("select", ratio=0.1)


# ---- by a teacher


def test_the_surest_images_are_taken_greedily_each_for_one_class():
    probabilities = np.array([[0.9, 0.8], [0.85, 0.1], [0.2, 0.3], [0.1, 0.25], [0.95, 0.0]])
    indices, labels = surest(probabilities, 2)
    assert indices.tolist() == [4, 0, 2, 3] and labels.tolist() == [0, 0, 1, 1]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2**31))
def test_every_class_gets_its_number_and_no_image_two(classes, per_class, spare, seed):
    probabilities = np.random.default_rng(seed).random((classes * per_class + spare, classes))
    indices, labels = surest(probabilities, per_class)
    assert len(set(indices.tolist())) == len(indices) == classes * per_class
    assert np.bincount(labels, minlength=classes).tolist() == [per_class] * classes
    for label in range(classes):
        own = probabilities[indices[labels == label], label]
        assert (np.diff(own) <= 0).all()


@pytest.mark.parametrize(
    ("votes", "reason"),
    [([[1.0, math.nan]], "not finite numbers"), ([[1.0], [2.0]], r"shape \(2, 1\)")],
)
def test_votes_that_are_no_numbers_or_misshapen_are_refused(tmp_path, votes, reason):
    np.save(tmp_path / "histogram.npy", np.array(votes))
    (tmp_path / "histogram.json").write_text(
        json.dumps({"per_class": False, "public_classes": ["x", "y"]})
    )
    with pytest.raises(DataError, match=reason):
        read_votes(tmp_path, ("x", "y"), 3)
