"""A release as tables, folders and datasets of other libraries."""

import json

import numpy as np
import pandas
import pyarrow.parquet as parquet
import pytest
import yaml
from small_release import write_release

import sfumato
from sfumato.errors import DataError
from sfumato.release.exports import PARQUET, TABLES


@pytest.fixture
def release(digits, tmp_path):
    return sfumato.load_release(write_release(tmp_path / "release", digits, export=["png"]))


def test_the_cost_is_that_of_the_card(release):
    card = json.loads((release.path / "card.json").read_text())
    assert release.cost["epsilon"] == card["epsilon"] > 0 and release.cost["units"] == card["units"]


def test_a_table_has_a_row_for_each_image(release):
    table = release.to_pandas()
    assert isinstance(table, pandas.DataFrame) and len(table) == len(release)
    assert np.array_equal(np.stack(table["image"]), release.images) and table["label"].tolist() == list(release.labels)
    assert table["class"].tolist() == [release.classes[label] for label in release.labels]


def test_a_hub_finds_the_parquet_file_by_the_readme(release, tmp_path):
    folder = release.to_huggingface(tmp_path / "hub")
    front = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert front["configs"] == [{"config_name": "default", "data_files": TABLES}] and front["tags"]
    table = parquet.read_table(folder / PARQUET)
    assert table["label"].to_pylist() == list(release.labels) and len(table["image"][0].as_py()["bytes"]) > 50
    with pytest.raises(DataError, match="not empty"):
        release.to_huggingface(folder)
