"""The verdict places a release between guessing and real images, by thresholds in its module."""

import numpy as np
import pytest

from sfumato.evaluation.verdict import VERDICT_LEVELS, verdict

LABELS = np.repeat(np.arange(4), 250)


def scored(accuracy: float, classes: int = 4) -> dict:
    rows = [{"class": str(i), "mean": accuracy, "std": None} for i in range(classes)]
    return {
        "cnn": {"mean": accuracy, "std": None, "per_class": rows},
        "lr": {"mean": 0.1, "std": None, "per_class": [{"mean": 0.1}]},
    }


def judged(release: float, real: float | None = 0.95, labels=LABELS, **more) -> dict:
    found = {"release": scored(release), **({} if real is None else {"real": scored(real)}), **more}
    return verdict(found, labels, 4)


BOUNDS = {
    0.25: "useless",
    0.31: "useless",
    0.33: "poor",
    0.59: "poor",
    0.61: "fair",
    0.87: "fair",
    0.89: "good",
}


@pytest.mark.parametrize(("release", "level"), BOUNDS.items())
def test_the_level_is_the_part_of_what_there_is_to_learn(release, level):
    """Chance is 25 %, and real images reach 95 %, so the thresholds are at 32, 60 and 88 %."""
    found = judged(release)
    assert found["level"] == level and found["learned"] == pytest.approx((release - 0.25) / 0.7)
    assert (
        VERDICT_LEVELS[level][1] in found["sentence"]
        and f"{100 * found['learned']:.0f} %" in found["sentence"]
    )


def test_an_accuracy_near_chance_on_few_images_is_useless():
    few = np.arange(40) % 4
    assert judged(0.40, labels=few)["level"] == "useless" and judged(0.40)["level"] == "poor"
    assert judged(0.40, real=0.42, labels=few)["level"] == "unknown"


UNEQUAL = {
    "few of one class": (np.repeat([0, 1], [10, 990]), None),
    "many images of a person": (np.repeat([0, 1], 200), np.arange(400) // 10),
    "one person with most images": (
        np.repeat([0, 1], 100),
        np.tile(np.maximum(np.arange(100) - 79, 0), 2) + np.repeat([0, 100], 100),
    ),
}


@pytest.mark.parametrize(("labels", "persons"), UNEQUAL.values(), ids=UNEQUAL)
def test_random_guesses_are_useless(labels, persons):
    """Either all images of a person are classified correctly, or none of them is."""
    random = np.random.default_rng(0)
    real = {"cnn": {"mean": 0.9, "per_class": [{"mean": 0.9}, {"mean": 0.9}]}}
    levels = []
    for _ in range(100):
        right = random.random(len(labels)) < 0.5
        right = right if persons is None else right[persons]
        rows = [{"mean": right[labels == label].mean()} for label in (0, 1)]
        found = {"release": {"cnn": {"mean": right.mean(), "per_class": rows}}, "real": real}
        levels.append(verdict(found, labels, 2, persons)["level"])
    assert levels.count("useless") + levels.count("unknown") >= 98


def test_naming_only_the_largest_class_is_useless():
    labels = np.array([0] * 950 + [1] * 50)
    rows = [{"mean": 1.0}, {"mean": 0.0}]
    constant = {"cnn": {"mean": 0.95, "std": None, "per_class": rows}}
    real = {"cnn": {"mean": 0.97, "std": None, "per_class": [{"mean": 0.98}, {"mean": 0.8}]}}
    found = verdict({"release": constant, "real": real}, labels, 2)
    assert found["level"] == "useless" and "do not rely on it" in found["sentence"]
    assert found["accuracy"]["majority class"] == found["accuracy"]["release"] == 0.95


def test_a_teacher_that_beats_real_training_is_the_ruler():
    """Trained on real images for few steps, a student once reached 67.8 %, but the private teacher
    reached 84.9 %.
    """
    teacher = {"accuracy": 0.849, "balanced_accuracy": 0.849}
    found = judged(0.66, real=0.678, teacher=teacher)
    assert (
        found["learned"] == pytest.approx((0.66 - 0.25) / (0.849 - 0.25))
        and found["level"] == "fair"
    )
    assert (
        "The result of the teacher (85 %) counts as 100 % of what there is to learn, because the "
        "best classifier trained on the real images reaches only 68 %" in found["sentence"]
    )
    assert judged(0.66, real=0.678)["level"] == "good"
    assert "counts as" not in judged(0.66, real=0.9, teacher=teacher)["sentence"]


@pytest.mark.parametrize(
    ("agreement", "chance", "stated"),
    [
        (0.2, 0.25, True),
        (0.25, 0.25, True),
        (0.3, 0.25, True),
        (0.35, 0.25, False),
        (0.9, 0.25, False),
        (0.82, 0.82, True),
        (0.9, 0.82, False),
        (1.0, 1.0, False),
    ],
)
def test_labels_that_agree_with_requests_by_chance_are_named(agreement, chance, stated):
    """If nine of ten images are of one class, 82 % of the labels agree with requests by chance."""
    teacher = {"accuracy": 0.5, "balanced_accuracy": 0.5}
    found = {"agreement": agreement, "chance_agreement": chance}
    said = judged(0.5, **found, teacher=teacher)["sentence"]
    assert ("label that was requested from the generator" in said) is stated
    assert ("Share the teacher" in said) is stated
    assert "Share" not in judged(0.5, **found)["sentence"], "there is no teacher"
    assert f"({100 * chance:.0f} % would be expected by chance)" in said or not stated


def test_the_teacher_is_recommended_where_it_is_better():
    teacher = {"accuracy": 0.9, "balanced_accuracy": 0.9}
    found = judged(0.8, teacher=teacher)
    assert "teacher" in found["sentence"] and found["accuracy"]["teacher"] == 0.9
    assert "teacher" not in judged(0.89, teacher=teacher)["sentence"]


def test_a_teacher_near_chance_is_not_recommended():
    """On 40 images, 30 % is not clearly better than 25 %."""
    few = np.arange(40) % 4
    teacher = {"accuracy": 0.3, "balanced_accuracy": 0.3, "membership": {"rings": True}}
    by_chance = {"agreement": 0.25, "chance_agreement": 0.25}
    found = judged(0.25, real=0.26, labels=few, **by_chance, teacher=teacher)
    assert found["level"] == "unknown" and "label that was requested" in found["sentence"]
    for words in ("use the teacher", "Share", "counts as"):
        assert words not in found["sentence"]
    assert "A SIGN THAT THE TEACHER REMEMBERS" in found["sentence"]


def test_without_the_bound_the_verdict_is_never_kinder():
    order = list(VERDICT_LEVELS)
    for release in (0.3, 0.5, 0.7, 0.9):
        assert order.index(judged(release, real=None)["level"]) >= order.index(
            judged(release)["level"]
        )


@pytest.mark.parametrize(
    "labels", [np.repeat(np.arange(4), [250, 250, 250, 9]), np.repeat(np.arange(3), 250)]
)
def test_a_handful_of_images_per_class_is_not_judged(labels):
    """With 7 hold-out images, an earlier version stated that a classifier learns nothing from real
    images either. But no classifier had been trained on real images.
    """
    teacher = {"accuracy": 1.0, "balanced_accuracy": 1.0}
    for more in ({}, {"real": None}, {"teacher": teacher}):
        found = judged(0.9, labels=labels, **more)
        assert found["level"] == "cannot be judged" and found["learned"] is None
        assert (
            "the hold-out needs at least 10 images of each class, but has only "
            f"{len(labels) - 750} of the smallest class" in found["sentence"]
        )
        assert "real images" not in found["sentence"] and "teacher" not in found["sentence"]
    assert judged(0.9, labels=np.repeat(np.arange(4), [250, 250, 250, 10]))["level"] == "good"


def test_chance_counts_only_classes_of_the_hold_out():
    """If the hold-out lacked a class, an earlier version compared a mean over the other classes
    with the chance over all classes.
    """
    found = judged(0.9, labels=np.repeat(np.arange(3), 250))
    assert found["accuracy"]["chance"] == found["balanced_accuracy"]["chance"] == 1 / 3


def test_the_verdict_states_whether_public_images_joined():
    chosen = {"chosen": "without public images", "agreement": {}}
    assert (
        "The release was made without public images. This choice is based on a comparison of two "
        "classifiers, one trained with public images and one without."
        in judged(0.89, mixture=chosen)["sentence"]
    )
    assert "public" not in judged(0.89)["sentence"] + judged(0.89, mixture=None)["sentence"]
