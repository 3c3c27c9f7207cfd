"""Accuracy for each value in a column of the owner's table, and what `stage prepare` stores of
this column.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.data.images import ImageSet
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import load_prepared, read_card
from sfumato.evaluation.downstream import Scored, aggregate, by_column
from sfumato.evaluation.holdout import without_copies
from sfumato.evaluation.tables import interval as table_interval
from sfumato.settings.data import Data


def column_of(**parts: tuple[int, float]) -> dict:
    """Return the result of `by_column`.

    parts: for each group, its number of images and the share that is classified correctly.
    """
    right = np.concatenate(
        [np.arange(count) < count * share for count, share in parts.values()]
    ).astype(float)
    return by_column(right, None, np.repeat([*parts], [count for count, _ in parts.values()]))


def test_each_group_has_an_accuracy_an_interval_and_a_gap():
    """The bootstrap interval of 400 images is within 2 percentage points of the normal
    approximation. With other resamples, one run in 10 000 would fail.
    """
    found = column_of(f=(400, 0.8), m=(200, 0.5))
    assert [(row["group"], row["images"], row["mean"]) for row in found["groups"]] == [
        ("f", 400, 0.8),
        ("m", 200, 0.5),
    ]
    assert found["gap"] == pytest.approx(0.3) and found["withheld"] == 0
    assert found["groups"][0]["interval"] == pytest.approx([0.7608, 0.8392], abs=0.02)


def test_a_group_of_one_person_has_no_interval():
    """All images of a group may be slices of one person, so all resamples would be equal."""
    right = np.tile([1.0, 0.0], 20)
    found = by_column(right, np.repeat([4, 7, 9], [20, 10, 10]), np.repeat(["a", "b"], 20))
    intervals = [row["interval"] for row in found["groups"]]
    assert intervals[0] == [] and len(intervals[1]) == 2
    assert table_interval(found["groups"][0]) == "–"


def test_groups_of_fewer_than_ten_are_merged_or_withheld():
    merged = column_of(a=(10, 1.0), b=(9, 0.0), c=(1, 0.0))
    assert [(row["group"], row["images"]) for row in merged["groups"]] == [
        ("a", 10),
        ("others", 10),
    ]
    alone = column_of(a=(10, 1.0), b=(9, 0.0))
    assert [row["group"] for row in alone["groups"]] == ["a"] and (
        alone["gap"],
        alone["withheld"],
    ) == (0.0, 9)


def test_numbers_without_a_column_are_as_they_were():
    row = aggregate([Scored(0.5, [0.5], right=np.ones(20), calibration=0.1)], ("a",))
    assert "by_column" not in row


@pytest.fixture
def clinic(tmp_path) -> Data:
    """Write pictures whose brightness depends on their site, and a table of the sites.

    Returns the settings of this set.
    """
    rows = ["file_name,site"]
    random = np.random.default_rng(0)
    for i in range(60):
        path = tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        site = i % 3
        Image.fromarray(random.integers(80 * site, 80 * site + 60, (8, 8), dtype=np.uint8)).save(
            path
        )
        rows.append(f"{'ab'[i % 2]}/{i}.png,site {site}")
    (tmp_path / "pictures" / "metadata.csv").write_text("\n".join(rows))
    path = str(tmp_path / "pictures")
    return Data(
        dataset_id="clinic",
        source="imagefolder",
        path=path,
        compare_by="site",
        holdout_fraction=0.5,
    )


def test_compared_cells_stay_in_the_private_hold_out(clinic, tmp_path):
    state = tmp_path / "state"
    card = tmp_path / "card.json"
    prepare_sensitive(clinic, state, card, tmp_path / "raw")
    holdout = load_prepared(state, read_card(card), "holdout")
    assert holdout.compared.tolist() == [
        f"site {image.mean() // 80:.0f}" for image in holdout.images
    ]
    assert [path.parent.name for path in state.rglob("compared.npy")] == ["holdout"]
    assert "site" not in json.dumps(json.loads(card.read_text()))
    train = ImageSet(holdout.images[:1], holdout.labels[:1], holdout.classes)
    assert (
        without_copies(holdout, train, "keyed")[0].compared.tolist()
        == holdout.compared[1:].tolist()
    )


def test_a_column_without_a_table_is_refused(clinic, tmp_path):
    with pytest.raises(ValueError, match="compare_by applies only to data.source imagefolder"):
        Data(dataset_id="x", source="npz", path="x.npz", compare_by="sex")
    Path(clinic.path, "metadata.csv").unlink()
    with pytest.raises(Exception, match="contains none of metadata"):
        prepare_sensitive(clinic, tmp_path / "state", tmp_path / "card.json", tmp_path / "raw")
