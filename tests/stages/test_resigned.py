"""Artifacts whose hashes fit and whose content does not: each has one strict form."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet, load_array, save_images, write_header
from sfumato.errors import DataError
from sfumato.features import FeatureMeans
from sfumato.features.cosine import CosineMoments
from sfumato.features.projection import CELLS, ProjectedFeatures
from sfumato.features.public_network import arguments_of, build_network
from sfumato.queries.feature_means import load_means, save_means
from sfumato.release.synthesis import draw_mixture
from sfumato.settings.release import Synthesize
from sfumato.storage.weights import save_tensors
from sfumato.training.selection import read_votes
from sfumato.training.training_sets import training_sets

SHAPE, CLASSES = (1, 8, 8), ("a", "b", "c")
PLAN = SimpleNamespace(shape=SHAPE, classes=CLASSES, several=False)


def covariance(folder, shape=SHAPE):
    features = CosineMoments(shape, 5, 2, 0.3, 0.7, True)
    save_means("covariance", FeatureMeans(torch.zeros(features.size, 3), features, 1e-4), features.arguments, folder)


def embedding(folder):
    network = ProjectedFeatures(CELLS, SHAPE, 6, arguments_of(build_network("whitened", SHAPE, 4, 4)))
    about = {"seed": 3, "size": 16, "length_scales": (1.2, 0.6), "teacher": 0.5}
    save_means("embedding", FeatureMeans(torch.zeros(16, 3), None), about, folder, network)


MAKE = {"covariance": covariance, "embedding": embedding}
WRONG = [
    *(("covariance", key, value) for key, value in {
        "shape": [1, 9, 9], "frequencies": -1, "contrasts": "2", "bound": 0, "products": 1.5, "flip": 1, "more": 1,
        "deviation": -1.0,
    }.items()),
    *(("embedding", key, value) for key, value in {
        "size": 10**9, "seed": 0.5, "length_scales": [], "teacher": 7, "more": 1, "deviation": "no",
    }.items()),
    ("embedding", "length_scales", [1.0, -1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "key", "value"), WRONG)
def test_features_of_another_form_are_refused(tmp_path, stage, key, value):
    MAKE[stage](tmp_path)
    teacher = ProjectedFeatures("pixels", SHAPE, 8)
    load_means(stage, tmp_path, teacher, plan=PLAN)
    file = tmp_path / "features.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(DataError, match=f"run `stage {stage}` again"):
        load_means(stage, tmp_path, teacher, plan=PLAN)


@pytest.mark.parametrize("stage", MAKE)
@pytest.mark.parametrize("wrong", ["rows", "classes", "dimensions", "type"])
def test_a_release_of_another_shape_than_its_features_is_refused(tmp_path, stage, wrong):
    MAKE[stage](tmp_path)
    teacher = ProjectedFeatures("pixels", SHAPE, 8)
    rows = len(load_means(stage, tmp_path, teacher).table)
    tables = {
        "rows": torch.zeros(rows + 2, 3),
        "classes": torch.zeros(rows, 4),
        "dimensions": torch.zeros(rows, 3, 1),
        "type": torch.zeros(rows, 3, dtype=torch.int32),
    }
    save_tensors({stage: tables[wrong]}, tmp_path / f"{stage}.safetensors")
    with pytest.raises(DataError, match="expected"):
        load_means(stage, tmp_path, teacher, plan=PLAN)


def drawn_from(population: Path, shape: tuple[int, ...] = (8, 8, 1), classes: tuple[str, ...] = CLASSES) -> None:
    """Draw from a population of such images and classes."""
    images = np.zeros((6, *shape), np.uint8)
    save_images(population, ImageSet(images, np.arange(6) % len(classes), classes))
    settings = Synthesize(count=5, sources={"evolve": 1})
    draw_mixture({"evolve": population}, settings, torch.ones(3) / 3, 0, shape=SHAPE)


@pytest.mark.parametrize("shape", [(9, 9, 1), (8, 8, 3)])
def test_a_population_of_other_images_is_not_released(tmp_path, shape):
    drawn_from(tmp_path)
    with pytest.raises(DataError, match="labels 0..5"):
        drawn_from(tmp_path, classes=tuple("abcdef"))
    with pytest.raises(DataError, match=r"images\.npy is"):
        drawn_from(tmp_path, shape)
    with pytest.raises(DataError, match=r"images\.npy is"):
        training_sets({"evolve": tmp_path}, SHAPE, CLASSES)


@pytest.mark.parametrize("shape", [(2, 3, 3, 8, 8), (2, 3, 1, 4, 4), (2, 4, 1, 8, 8), (3, 1, 8, 8), (2, 3, 1, 0, 8)])
def test_central_images_of_another_shape_are_refused(tmp_path, shape):
    np.save(tmp_path / "mean.npy", np.zeros(shape, np.float32))
    with pytest.raises(DataError):
        training_sets({"central": tmp_path}, SHAPE, CLASSES)


def test_votes_that_are_no_numbers_are_refused(tmp_path):
    np.save(tmp_path / "histogram.npy", np.array([[1.0, np.nan]]))
    (tmp_path / "histogram.json").write_text(json.dumps({"per_class": False, "public_classes": ["x", "y"]}))
    with pytest.raises(DataError, match="no numbers"):
        read_votes(tmp_path, ("x", "y"), 3)


@pytest.mark.parametrize("shape", [(-1, 8), (-8, -8), (0, -1), (2**40,)])
def test_an_array_of_a_shape_that_no_array_has_is_refused(tmp_path, shape):
    with (tmp_path / "x.npy").open("wb") as file:
        write_header(file, np.dtype(np.uint8), shape)
        file.write(bytes(64))
    with pytest.raises(DataError, match="not a whole"):
        load_array(tmp_path / "x.npy")
