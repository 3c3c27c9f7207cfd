import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from sfumato.evaluation.downstream import (
    aggregate,
    bootstrap_interval,
    calibration_error,
    evaluate_classifier,
    fit_classifier,
    schedule_of,
)
from sfumato.training.supervised import accuracy, apply, logits

STEPS = 40  # steps of a training, unless a test sets them


@pytest.fixture(scope="module")
def halves(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    return digits.take(order[:1437]), digits.take(order[1437:])


def train_classifier(name, images, labels, seed, steps=STEPS):
    return fit_classifier(name, images, labels, 10, schedule_of(name, len(images), 1, steps), seed)


def score(name, train, holdout, schedule, seeds):
    found = [evaluate_classifier(name, train, holdout, schedule, {}, seed) for seed in seeds]
    return aggregate(found, train.classes)


# 360 digits are scored, so the standard error of an accuracy of 0.98 is 0.007. The measured
# accuracies are 0.95, 0.98 and 0.99.
@pytest.mark.parametrize(
    ("name", "at_least", "steps"), [("lr", 0.92, 600), ("mlp", 0.955, 600), ("cnn", 0.97, 250)]
)
def test_each_classifier_learns_real_digits(halves, name, at_least, steps):
    train, holdout = halves
    assert (
        accuracy(train_classifier(name, train.images, train.labels, 0, steps), holdout) >= at_least
    )


def test_shuffled_labels_teach_nothing(halves):
    train, holdout = halves
    labels = np.random.default_rng(1).permutation(train.labels)
    assert accuracy(train_classifier("mlp", train.images, labels, 0), holdout) < 0.3


def test_a_seed_fixes_the_result_without_the_global_generator(halves):
    train, _ = halves
    before = torch.get_rng_state()
    trained = [train_classifier("cnn", train.images, train.labels, seed) for seed in (0, 0, 1)]
    a, b, c = (
        apply(model.features, train.images[:50], next(model.parameters()).device.type)
        for model in trained
    )
    assert (
        np.array_equal(a, b)
        and not np.allclose(a, c)
        and a.shape == (50, 128)
        and a.dtype == np.float32
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 10])
def test_any_number_of_steps_trains_a_set_of_any_size(halves, steps):
    schedule = schedule_of("mlp", 50, 1, steps=steps)
    assert schedule.steps == steps
    assert not fit_classifier(
        "mlp", halves[0].images[:50], halves[0].labels[:50], 10, schedule, seed=0
    ).training
    assert (
        schedule_of("lr", 100, 12).steps == 600 and schedule_of("lr", 10_000, 12).steps == 12 * 79
    )


@pytest.mark.parametrize("count", [1, 2, 129])
def test_any_number_of_images_trains(halves, count):
    train, _ = halves
    model = train_classifier("cnn", train.images[:count], train.labels[:count], 0)
    predicted = logits(model, train.images[:count]).argmax(axis=1)
    assert predicted.shape == (count,) and predicted.dtype == np.int64
    if count <= 2:
        assert np.array_equal(predicted, train.labels[:count])


def test_a_network_without_parameters_gives_scores(halves):
    """A teacher on fixed features has no parameters, because its weights are buffers."""
    train, _ = halves
    model = nn.Flatten()
    model.register_buffer("weights", torch.zeros(1))
    assert np.allclose(logits(model, train.images[:3]), train.images[:3].reshape(3, -1) / 255)


def test_a_score_holds_every_seed_their_mean_and_spread(halves):
    train, holdout = halves
    schedule = schedule_of("lr", len(train), 1, STEPS)
    result = score("lr", train, holdout, schedule, (3, 4))
    a, b = result["per_seed"]
    assert a == accuracy(train_classifier("lr", train.images, train.labels, 3), holdout)
    assert result["mean"] == pytest.approx((a + b) / 2) and result["std"] == pytest.approx(
        abs(a - b) / 2**0.5
    )
    assert score("lr", train, holdout, schedule, (3,))["std"] is None


def test_class_accuracies_add_up_and_absent_ones_are_left_out(halves):
    train, holdout = halves
    part = holdout.take(np.flatnonzero(holdout.labels != 4))
    result = score("lr", train, part, schedule_of("lr", len(train), 1, STEPS), (0, 1))
    counts = np.bincount(part.labels, minlength=10)
    assert [row["class"] for row in result["per_class"]] == [
        name for name in part.classes if name != "4"
    ]
    whole = (
        sum(counts[int(row["class"])] * row["mean"] for row in result["per_class"]) / counts.sum()
    )
    assert (
        whole == pytest.approx(result["mean"])
        and len({row["mean"] for row in result["per_class"]}) > 3
    )


def calibration_by_bins(probabilities, labels):
    """Sum over 15 bins: the share of images in a bin, times the difference between their mean
    confidence and their accuracy.
    """
    rows = [
        (max(p), list(p).index(max(p)) == y)
        for p, y in zip(probabilities.tolist(), labels.tolist(), strict=True)
    ]
    total = 0.0
    for i in range(15):
        inside = [
            row for row in rows if i / 15 <= row[0] < (i + 1) / 15 or (i == 14 and row[0] == 1)
        ]
        if inside:
            confidence, right = (sum(column) / len(inside) for column in zip(*inside, strict=True))
            total += len(inside) / len(rows) * abs(confidence - right)
    return total


def test_the_calibration_error_follows_its_definition():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(4, 0.5), size=5000)
    honest = np.array([rng.choice(4, p=row) for row in probabilities])
    found = calibration_error(np.log(probabilities), honest)
    sure = 900 * np.eye(4)[honest]
    assert found == pytest.approx(calibration_by_bins(probabilities, honest)) and found < 0.03
    assert calibration_error(sure, honest) == 0 and calibration_error(sure, (honest + 1) % 4) == 1
    assert calibration_error(np.zeros((4, 4)), np.arange(4)) == pytest.approx(0)


def test_an_interval_has_its_stated_coverage():
    """With fresh seeds, correct intervals at 95 % would fail in one of 700 runs: fewer than 88 of
    100 would contain the true accuracy.
    """
    rng = np.random.default_rng(0)
    ends = [bootstrap_interval(rng.random(300) < 0.8) for _ in range(100)]
    assert sum(low <= 0.8 <= high for low, high in ends) >= 88
    assert np.mean([high - low for low, high in ends]) == pytest.approx(
        2 * 1.96 * (0.8 * 0.2 / 300) ** 0.5, rel=0.05
    )


def test_an_interval_is_as_wide_as_the_persons_allow():
    """If 50 persons have 6 identical images each, the interval is the same as for 50 images."""
    right = np.random.default_rng(0).random(50) < 0.7
    low, high = bootstrap_interval(np.repeat(right, 6), np.repeat(np.arange(50) * 7, 6))
    assert [low, high] == pytest.approx(bootstrap_interval(right))
    assert high - low > 2 * np.ptp(bootstrap_interval(np.repeat(right, 6)))


def test_a_perfect_accuracy_has_an_exact_interval():
    """All resamples are equal, so the bootstrap would state 100.0 to 100.0."""
    for count, groups in ((22, None), (88, np.arange(88) % 22)):
        exact = binomtest(22, 22).proportion_ci(0.95)
        assert bootstrap_interval(np.ones(count), groups) == pytest.approx([exact.low, 1])
        assert bootstrap_interval(np.zeros(count), groups) == pytest.approx([0, 1 - exact.low])


def test_a_score_has_a_mean_an_interval_and_calibration(halves):
    train, holdout = halves
    result = score("lr", train, holdout, schedule_of("lr", len(train), 1, STEPS), (0, 1))
    low, high = result["interval"]
    assert low < result["mean"] < high < low + 0.2 and 0 < result["calibration"] < 0.6
    one = score("lr", train, holdout, schedule_of("lr", len(train), 1, STEPS), (0,))
    model = train_classifier("lr", train.images, train.labels, 0)
    probabilities = torch.from_numpy(logits(model, holdout.images)).double().softmax(dim=1).numpy()
    assert one["calibration"] == pytest.approx(calibration_by_bins(probabilities, holdout.labels))
