import json

import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet
from sfumato.errors import DataError
from sfumato.evaluation import downstream
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.distances import frechet_distance
from sfumato.evaluation.scores import COMPARED, absent_classes, evaluate_release, subsample
from sfumato.evaluation.shift import SHIFTS
from sfumato.settings.evaluate import Evaluate

CONFIG = Evaluate(classifiers=("lr", "mlp"), seeds=(0, 1), steps=60)
PIXELS = Extractor(name="pixels-64", digest="pixels", embed=lambda images: images.flatten(1))


@pytest.fixture(scope="module")
def sets(digits):
    """Return training and hold-out digits, a good synthetic set of other digits, and a bad one.

    The images of the bad set are inverted, and its labels are raised by one.
    """
    order = np.random.default_rng(0).permutation(len(digits))
    train, holdout, good = (digits.take(part) for part in np.array_split(order, 3))
    bad = ImageSet(255 - good.images, (good.labels + 1) % 10, good.classes)
    return train, holdout, good, bad


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def metrics(sets, told):
    train, holdout, good, bad = sets
    return evaluate_release(
        {"release": good, "auxiliary": bad}, train, holdout, CONFIG, PIXELS, told.append
    )


def quick(**values) -> Evaluate:
    return Evaluate(**{"classifiers": ("lr",), "seeds": (0,), "steps": 20, **values})


def test_the_metrics_are_local_survive_json_and_are_not_fid(metrics):
    sets = ["release", "auxiliary", "real", "blurred"]
    assert metrics["scope"] == "local" and list(metrics) == ["scope", "warnings", *sets]
    text = json.dumps(metrics, allow_nan=False)
    assert json.loads(text) == metrics and metrics["release"]["fidelity"]["space"] == "pixels-64"
    assert not any(name in text.lower() for name in ('"fid"', '"kid"', "inception"))
    assert all(
        list(metrics[name]) == ["lr", "mlp", "fidelity"]
        and len(metrics[name]["lr"]["per_seed"]) == 2
        for name in sets[:3]
    )


def test_a_good_set_scores_near_the_bound_and_a_bad_one_far(metrics):
    assert abs(metrics["release"]["mlp"]["mean"] - metrics["real"]["mlp"]["mean"]) < 0.08
    assert metrics["auxiliary"]["mlp"]["mean"] < 0.3 < 0.8 < metrics["release"]["mlp"]["mean"]
    good, bad, real = (metrics[name]["fidelity"] for name in ("release", "auxiliary", "real"))
    assert (
        abs(good["frechet"] / real["frechet"] - 1) < 0.3 and bad["frechet"] > 10 * good["frechet"]
    )
    assert (
        good["precision"] > 0.7
        and good["recall"] > 0.7
        and bad["precision"] < 0.05
        and bad["coverage"] < 0.05
    )
    assert abs(good["fld"]) < 5 and bad["fld"] > 30 and abs(real["fld"]) < 5


def test_synthetic_and_training_images_meet_the_hold_out(sets):
    train, holdout, good, _ = sets
    pixels = [rows.images.reshape(len(rows), -1) / 255 for rows in (good, train, holdout)]
    config = quick(fidelity=("frechet",))
    found = evaluate_release({"release": good}, train, holdout, config, PIXELS)
    for name, own in (("release", pixels[0]), ("real", pixels[1])):
        assert found[name]["fidelity"]["reference"] == "holdout"
        assert found[name]["fidelity"]["frechet"] == pytest.approx(
            frechet_distance(own, pixels[2]), rel=1e-4
        )


def test_a_release_of_training_images_is_flagged(sets):
    train, holdout, good, _ = sets
    copies = ImageSet(
        np.concatenate([train.images[:300], good.images[:300]]),
        np.concatenate([train.labels[:300], good.labels[:300]]),
        good.classes,
    )
    found = evaluate_release(
        {"copies": copies, "fresh": good}, train, holdout, quick(bound=False), PIXELS
    )
    assert (
        all(line.startswith("copies:") for line in found["warnings"])
        and "copied" in found["warnings"][0]
    )
    assert (
        found["copies"]["fidelity"]["authenticity"]
        < found["fresh"]["fidelity"]["authenticity"] - 0.2
    )


def test_progress_is_told_of_every_training(metrics, told):
    trainings = [
        f"{name}: {classifier}"
        for name in ("release", "auxiliary", "real")
        for classifier in ("lr", "mlp")
    ]
    assert (
        told[:6] == trainings
        and told[6] == "real: features in pixels-64"
        and told[-1] == "real: fidelity"
    )


def test_without_a_bound_no_classifier_is_scored_on_real_images(sets):
    train, holdout, good, _ = sets
    found = evaluate_release({"release": good}, train, holdout, quick(bound=False), PIXELS)
    assert list(found) == ["scope", "warnings", "release", "real", "blurred"]
    assert list(found["real"]) == list(found["blurred"]) == ["fidelity"]


def test_yardsticks_place_blurred_real_images_behind_real_ones(metrics):
    real, blurred = (metrics[name]["fidelity"] for name in ("real", "blurred"))
    assert blurred["frechet"] > 3 * real["frechet"] and blurred["recall"] < real["recall"]


def test_likeness_is_measured_on_plain_images(sets):
    train, holdout, good, bad = sets
    config = quick(fidelity=("frechet",), seeds=(0, 1))
    found = evaluate_release({"release": bad, "plain": good}, train, holdout, config, PIXELS)
    assert list(found["release"]) == ["lr"] and list(found["plain"]) == ["lr", "fidelity"]
    assert [len(found[name]["lr"]["per_seed"]) for name in ("release", "plain")] == [2, 1], (
        "one is enough"
    )
    alone = evaluate_release({"release": good}, train, holdout, config, PIXELS)
    assert found["plain"]["fidelity"] == alone["release"]["fidelity"]


def test_shifted_images_cost_accuracy_of_every_classifier(metrics):
    found = metrics["real"]["mlp"]
    assert set(found["shifted"]) == set(SHIFTS) and all(
        share < found["mean"] for share in found["shifted"].values()
    )
    assert len(set(found["shifted"].values())) == len(SHIFTS)


def test_a_poisoned_hold_out_moves_no_training(sets, monkeypatch):
    """The models do not depend on the hold-out images."""
    train, holdout, good, _ = sets
    poisoned = ImageSet(255 - holdout.images, (holdout.labels + 1) % 10, holdout.classes)
    config = quick(classifiers=("mlp",), steps=40, fidelity=())
    trained = []
    original = downstream.fit_classifier
    monkeypatch.setattr(
        downstream, "fit_classifier", lambda *given: trained.append(original(*given)) or trained[-1]
    )
    found = [
        evaluate_release({"release": good}, train, real, config) for real in (holdout, poisoned)
    ]
    for a, b in zip(trained[:2], trained[2:], strict=True):
        assert all(
            torch.equal(x, y)
            for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
        )
    assert found[0]["release"]["mlp"]["mean"] > 0.6 > 0.3 > found[1]["release"]["mlp"]["mean"]


def test_the_bound_is_trained_by_the_same_schedule(sets):
    train, holdout, good, _ = sets
    fewer = good.take(np.arange(200))
    found = evaluate_release({"release": fewer}, train, holdout, quick(steps=7, fidelity=()))
    assert list(found["release"]) == list(found["real"]) == ["lr"]
    assert found["release"]["lr"]["steps"] == found["real"]["lr"]["steps"] == 7


def test_a_hold_out_without_a_class_is_warned_of(sets):
    train, holdout, good, _ = sets
    part = holdout.take(np.flatnonzero(holdout.labels != 4))
    found = evaluate_release({"release": good}, train, part, quick(fidelity=("frechet",)), PIXELS)
    assert any("without hold-out images: '4'" in line for line in found["warnings"])


def test_a_large_set_is_thinned_for_the_distance(sets):
    thinned = subsample(sets[0], 50)
    rows = {
        (image.tobytes(), label)
        for image, label in zip(sets[0].images, sets[0].labels, strict=True)
    }
    assert len(thinned) == 50 and all(
        (image.tobytes(), label) in rows
        for image, label in zip(thinned.images, thinned.labels, strict=True)
    )
    assert len(subsample(sets[0])) == len(sets[0]) <= COMPARED


def test_sets_that_do_not_fit_are_refused_before_any_training(sets):
    train, holdout, good, _ = sets
    with pytest.raises(DataError, match="release set is too small to evaluate"):
        evaluate_release(
            {"release": good.take(np.arange(0))}, train, holdout, CONFIG, PIXELS, pytest.fail
        )
    for other, problem in (
        (ImageSet(good.images[:, :7], good.labels, good.classes), "release set have shape"),
        (ImageSet(good.images, good.labels, good.classes[::-1]), "the classes differ"),
    ):
        with pytest.raises(DataError, match=problem):
            evaluate_release({"release": other}, train, holdout, CONFIG, PIXELS, pytest.fail)
    assert absent_classes(good.take(np.flatnonzero(~np.isin(good.labels, (3, 7))))) == "'3', '7'"
