import json

import numpy as np
import pytest

from sfumato.config import Evaluate
from sfumato.errors import DataError
from sfumato.images import ImageSet
from sfumato.metrics import downstream, evaluation
from sfumato.metrics.evaluation import evaluate_release, plot_accuracy

CONFIG = Evaluate(classifiers=("lr", "mlp"), seeds=(0, 1), epochs=1)


@pytest.fixture(scope="module")
def sets(digits):
    """Real training and hold-out digits, a good synthetic set (other digits) and a bad one (their labels moved by one)."""
    order = np.random.default_rng(0).permutation(len(digits))
    train, holdout, good = (ImageSet(digits.images[part], digits.labels[part], digits.classes) for part in np.array_split(order, 3))
    bad = ImageSet(255 - good.images, (good.labels + 1) % 10, good.classes)
    return train, holdout, good, bad


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def metrics(sets, told):
    train, holdout, good, bad = sets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downstream, "MIN_STEPS", 120)
        return evaluate_release({"release": good, "auxiliary": bad}, train, holdout, CONFIG, told.append)


def test_the_metrics_are_marked_local_and_survive_json(metrics):
    assert metrics["scope"] == "local" and list(metrics) == ["scope", "release", "auxiliary", "real"]
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert all(list(metrics[name]) == ["lr", "mlp", "frechet"] and len(metrics[name]["lr"]["per_seed"]) == 2 for name in list(metrics)[1:])


def test_a_good_set_scores_near_the_bound_and_a_bad_one_far_from_it(metrics):
    assert abs(metrics["release"]["mlp"]["mean"] - metrics["real"]["mlp"]["mean"]) < 0.08
    assert metrics["auxiliary"]["mlp"]["mean"] < 0.3 < 0.8 < metrics["release"]["mlp"]["mean"]
    assert metrics["auxiliary"]["frechet"]["value"] > 3 * metrics["release"]["frechet"]["value"]


def test_the_space_of_the_distance_is_named_for_what_it_is(metrics):
    assert metrics["release"]["frechet"]["space"] == "cnn-real-128" and "fid" not in json.dumps(metrics).lower()


def test_progress_is_told_of_every_training(metrics, told):
    trainings = [f"{name}: {classifier}" for name in ("release", "auxiliary", "real") for classifier in ("lr", "mlp")]
    assert told == ["feature network", *trainings]


def test_without_a_bound_no_classifier_is_scored_on_real_images(sets, monkeypatch):
    monkeypatch.setattr(downstream, "MIN_STEPS", 20)
    train, holdout, good, _ = sets
    config = Evaluate(classifiers=("lr",), seeds=(0,), epochs=1, bound=False)
    assert list(evaluate_release({"release": good}, train, holdout, config)) == ["scope", "release"]


def test_a_large_set_is_thinned_for_the_distance(sets, monkeypatch):
    monkeypatch.setattr(evaluation, "FRECHET_IMAGES", 50)
    thinned = evaluation.some(sets[0])
    rows = {(image.tobytes(), label) for image, label in zip(sets[0].images, sets[0].labels, strict=True)}
    assert len(thinned) == 50 and all((image.tobytes(), label) in rows for image, label in zip(thinned.images, thinned.labels, strict=True))


def test_sets_that_do_not_fit_are_refused_before_any_training(sets, monkeypatch):
    monkeypatch.setattr(evaluation, "train_classifier", None)
    train, holdout, good, _ = sets
    empty = ImageSet(holdout.images[:0], holdout.labels[:0], holdout.classes)
    with pytest.raises(DataError, match="hold-out set holds 0 images"):
        evaluate_release({"release": good}, train, empty, CONFIG)
    for other in (ImageSet(good.images[:, :7], good.labels, good.classes), ImageSet(good.images, good.labels, good.classes[::-1])):
        with pytest.raises(DataError, match="release set has shape"):
            evaluate_release({"release": other}, train, holdout, CONFIG)
    with pytest.raises(ValueError, match="'real'"):
        evaluate_release({"real": good}, train, holdout, CONFIG)


def test_the_plot_is_written_where_asked(metrics, tmp_path):
    from PIL import Image

    plot_accuracy(metrics, tmp_path / "plots" / "accuracy.png")
    with Image.open(tmp_path / "plots" / "accuracy.png") as picture:
        assert picture.width > 700 and picture.height > 500
    plot_accuracy({"scope": "local", "release": {"lr": {"mean": 0.5, "std": 0.0}}}, tmp_path / "one.svg")
    assert "release" in (tmp_path / "one.svg").read_text()
