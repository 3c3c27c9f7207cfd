"""Feature means with invalid content are refused, even if their hashes are correct.

Each file has one strict form.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from sfumato.errors import DataError
from sfumato.features import CELLS, FeatureMeans
from sfumato.features.cosine import CosineMoments
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.public_network import arguments_of, build_network
from sfumato.queries.feature_means import load_means, save_means
from sfumato.storage.weights import save_tensors

SHAPE = (1, 8, 8)
CLASSES = ("a", "b", "c")
PLAN = SimpleNamespace(shape=SHAPE, classes=CLASSES, several=False)


def covariance(folder, shape=SHAPE):
    features = CosineMoments(shape, 5, 2, 0.3, 0.7, True)
    save_means(
        "covariance",
        FeatureMeans(torch.zeros(features.size, 3), features, 1e-4),
        features.arguments,
        folder,
    )


def embedding(folder):
    network = ProjectedFeatures(
        CELLS, SHAPE, 6, arguments_of(build_network("whitened", SHAPE, 4, 4))
    )
    about = {"seed": 3, "size": 16, "length_scales": (1.2, 0.6), "teacher": 0.5}
    save_means("embedding", FeatureMeans(torch.zeros(16, 3), None), about, folder, network)


MAKE = {"covariance": covariance, "embedding": embedding}
WRONG = [
    *(("covariance", key, value) for key, value in {
        "shape": [1, 9, 9], "frequencies": -1, "contrasts": "2", "bound": 0, "products": 1.5,
        "flip": 1, "more": 1, "deviation": -1.0,
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


def test_an_embedding_without_its_teacher_is_refused(tmp_path):
    embedding(tmp_path)
    with pytest.raises(DataError, match="without the teacher's feature map"):
        load_means("embedding", tmp_path, None, plan=PLAN)


@pytest.mark.parametrize("stage", MAKE)
@pytest.mark.parametrize("wrong", ["rows", "classes", "dimensions", "type"])
def test_a_release_of_another_shape_than_its_features_is_refused(tmp_path, stage, wrong):
    MAKE[stage](tmp_path)
    teacher = ProjectedFeatures("pixels", SHAPE, 8)
    rows = len(load_means(stage, tmp_path, teacher, plan=PLAN).table)
    tables = {
        "rows": torch.zeros(rows + 2, 3),
        "classes": torch.zeros(rows, 4),
        "dimensions": torch.zeros(rows, 3, 1),
        "type": torch.zeros(rows, 3, dtype=torch.int32),
    }
    save_tensors({stage: tables[wrong]}, tmp_path / f"{stage}.safetensors")
    with pytest.raises(DataError, match="expected"):
        load_means(stage, tmp_path, teacher, plan=PLAN)
