import numpy as np
import pytest
import torch

from sfumato.evaluation import downstream
from sfumato.evaluation.downstream import aggregate, evaluate_classifier, fit, schedule_of
from sfumato.training.supervised import accuracy, apply, logits


@pytest.fixture(scope="module")
def halves(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    return digits.take(order[:1437]), digits.take(order[1437:])


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(downstream, "MIN_STEPS", 40)


def train_classifier(name, images, labels, classes, epochs, seed):
    return fit(name, images, labels, classes, schedule_of(name, len(images), epochs), seed)


def score(name, train, holdout, schedule, seeds):
    found = [evaluate_classifier(name, train, holdout, schedule, {}, seed) for seed in seeds]
    return aggregate(found, train.classes, schedule)


# 360 scored digits: the standard error of an accuracy of 0.98 is 0.007; measured 0.95, 0.98, 0.99
@pytest.mark.parametrize(("name", "at_least", "steps"), [("lr", 0.92, 600), ("mlp", 0.955, 600), ("cnn", 0.97, 250)])
def test_each_classifier_learns_real_digits(halves, monkeypatch, name, at_least, steps):
    monkeypatch.setattr(downstream, "MIN_STEPS", steps)
    train, holdout = halves
    assert accuracy(train_classifier(name, train.images, train.labels, 10, epochs=1, seed=0), holdout) >= at_least


def test_shuffled_labels_teach_nothing(halves):
    train, holdout = halves
    labels = np.random.default_rng(1).permutation(train.labels)
    assert accuracy(train_classifier("mlp", train.images, labels, 10, epochs=1, seed=0), holdout) < 0.3


def test_a_seed_fixes_the_result_and_the_global_generator_is_left_alone(halves):
    train, _ = halves
    before = torch.get_rng_state()
    trained = [train_classifier("cnn", train.images, train.labels, 10, 1, seed) for seed in (0, 0, 1)]
    a, b, c = (apply(model.features, train.images[:50], next(model.parameters()).device.type) for model in trained)
    assert np.array_equal(a, b) and not np.allclose(a, c) and a.shape == (50, 128) and a.dtype == np.float32
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 10])
def test_any_number_of_steps_trains_and_a_small_set_gets_as_many_as_it_needs(halves, steps):
    schedule = schedule_of("mlp", 50, 1, steps=steps)
    assert schedule.steps == steps
    assert not fit("mlp", halves[0].images[:50], halves[0].labels[:50], 10, schedule, seed=0).training
    assert schedule_of("lr", 100, 12).steps == 40 and schedule_of("lr", 10_000, 12).steps == 12 * 79


@pytest.mark.parametrize("count", [1, 2, 129])
def test_any_number_of_images_trains(halves, count):
    train, _ = halves
    model = train_classifier("cnn", train.images[:count], train.labels[:count], 10, 1, seed=0)
    predicted = logits(model, train.images[:count]).argmax(axis=1)
    assert predicted.shape == (count,) and predicted.dtype == np.int64
    if count <= 2:
        assert np.array_equal(predicted, train.labels[:count])


def test_a_score_holds_every_seed_their_mean_and_spread(halves):
    train, holdout = halves
    schedule = schedule_of("lr", len(train), 1)
    result = score("lr", train, holdout, schedule, (3, 4))
    a, b = result["per_seed"]
    assert a == accuracy(train_classifier("lr", train.images, train.labels, 10, 1, 3), holdout)
    assert result["mean"] == pytest.approx((a + b) / 2) and result["std"] == pytest.approx(abs(a - b) / 2**0.5)
    assert score("lr", train, holdout, schedule, (3,))["std"] is None


def test_the_accuracies_of_the_classes_make_up_the_whole_and_absent_ones_are_left_out(halves):
    train, holdout = halves
    part = holdout.take(np.flatnonzero(holdout.labels != 4))
    result = score("lr", train, part, schedule_of("lr", len(train), 1), (0, 1))
    counts = np.bincount(part.labels, minlength=10)
    assert [row["class"] for row in result["per_class"]] == [name for name in part.classes if name != "4"]
    whole = sum(counts[int(row["class"])] * row["mean"] for row in result["per_class"]) / counts.sum()
    assert whole == pytest.approx(result["mean"]) and len({row["mean"] for row in result["per_class"]}) > 3
