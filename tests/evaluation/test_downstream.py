import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet
from sfumato.evaluation import downstream
from sfumato.evaluation.downstream import (
    Schedule,
    accuracy,
    apply,
    fit,
    kept_apart,
    logits,
    predict,
    schedule_of,
    score,
    steps_of,
    train_classifier,
)


@pytest.fixture(scope="module")
def halves(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    return tuple(
        ImageSet(digits.images[part], digits.labels[part], digits.classes) for part in (order[:1437], order[1437:])
    )


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(downstream, "MIN_STEPS", 40)


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


def test_a_small_set_gets_as_many_steps_as_it_needs(monkeypatch):
    monkeypatch.setattr(downstream, "MIN_STEPS", 600)
    assert steps_of(100, 12) == 600 and steps_of(10_000, 12) == 12 * 79


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 10])
def test_any_number_of_steps_trains(halves, steps):
    assert (
        fit("lr", halves[0].images[:50], halves[0].labels[:50], 10, schedule_of("lr", 50, 1, steps=steps), seed=0)[1]
        == steps
    )


@pytest.mark.parametrize("count", [1, 2, 129])
def test_any_number_of_images_trains(halves, count):
    train, _ = halves
    model = train_classifier("cnn", train.images[:count], train.labels[:count], 10, 1, seed=0)
    predicted = predict(model, train.images[:count])
    assert predicted.shape == (count,) and predicted.dtype == np.int64
    if count <= 2:
        assert np.array_equal(predicted, train.labels[:count])


def test_no_images_are_refused(halves):
    with pytest.raises(ValueError, match="no images"):
        train_classifier("lr", halves[0].images[:0], halves[0].labels[:0], 10, 1, seed=0)


def test_a_score_holds_every_seed_their_mean_and_spread(halves):
    train, holdout = halves
    schedule = schedule_of("lr", len(train), 1)
    result = score("lr", train, holdout, schedule, (3, 4))
    a, b = result["per_seed"]
    assert a == accuracy(train_classifier("lr", train.images, train.labels, 10, 1, 3), holdout)
    assert result["mean"] == pytest.approx((a + b) / 2) and result["std"] == pytest.approx(abs(a - b) / 2**0.5)
    assert score("lr", train, holdout, schedule, (3,))["std"] is None
    with pytest.raises(ValueError, match="no seeds"):
        score("lr", train, holdout, schedule, ())


def test_the_accuracies_of_the_classes_make_up_the_whole_and_absent_ones_are_left_out(halves):
    train, holdout = halves
    part = ImageSet(holdout.images[holdout.labels != 4], holdout.labels[holdout.labels != 4], holdout.classes)
    result = score("lr", train, part, schedule_of("lr", len(train), 1), (0, 1))
    counts = np.bincount(part.labels, minlength=10)
    assert [row["class"] for row in result["per_class"]] == [name for name in part.classes if name != "4"]
    whole = sum(counts[int(row["class"])] * row["mean"] for row in result["per_class"]) / counts.sum()
    assert whole == pytest.approx(result["mean"]) and len({row["mean"] for row in result["per_class"]}) > 3


CHOOSING = Schedule(steps=60, learning_rate=2e-3, weight_decay=0.0, kept=0.1)


def test_the_epoch_is_the_best_on_the_images_kept_apart(halves, monkeypatch):
    train, _ = halves
    judged = kept_apart(len(train), 0.1, 0)[1]
    seen = []

    def watched(model, images):
        seen.append((len(images), [model.state_dict()["head.bias"].clone()]))
        found = predict(model, images)
        wrong = {1: 1, 2: 0, 3: 2}.get(len(seen), 3)  # the second epoch is made the best
        found[:wrong] = (train.labels[judged][:wrong] + 1) % 10
        found[wrong:] = train.labels[judged][wrong:]
        return found

    monkeypatch.setattr(downstream, "predict", watched)
    model, epoch = fit("mlp", train.images, train.labels, 10, CHOOSING, seed=0)
    assert epoch == 2 and len(seen) == 6 and {count for count, _ in seen} == {len(judged)}
    assert torch.equal(model.state_dict()["head.bias"], seen[1][1][0]) and not torch.equal(seen[5][1][0], seen[1][1][0])


def test_the_images_kept_apart_are_not_learnt_from(halves):
    train, _ = halves
    learnt, judged = kept_apart(len(train), 0.1, 0)
    assert (
        not set(learnt.tolist()) & set(judged.tolist())
        and len(judged) == 144
        and len(learnt) + len(judged) == len(train)
    )
    poisoned = train.images.copy()
    poisoned[judged] = 255 - poisoned[judged]  # changes which epoch is best at most, and here there is only one
    once = Schedule(steps=8, learning_rate=2e-3, weight_decay=0.0, kept=0.1)
    a, b = (fit("mlp", images, train.labels, 10, once, seed=0)[0] for images in (train.images, poisoned))
    assert np.array_equal(logits(a, train.images[:20]), logits(b, train.images[:20]))
    assert (
        kept_apart(5, 0.0, 0)[1].size == 0
        and kept_apart(1, 0.5, 0)[0].tolist() == [0]
        and len(kept_apart(100_000, 0.5, 0)[1]) == downstream.CHOSEN_ON
    )


def test_the_averaged_weights_are_the_result_where_asked_for(halves):
    train, _ = halves
    plain, averaged, slow = (
        fit(
            "mlp",
            train.images,
            train.labels,
            10,
            Schedule(steps=20, learning_rate=2e-3, weight_decay=0.0, one_cycle=False, ema=decay),
            0,
        )[0]
        for decay in (0, 0.5, 0.9999)
    )
    biases = [model.state_dict()["head.bias"] for model in (plain, averaged, slow)]
    start = fit(
        "mlp",
        train.images[:1],
        train.labels[:1],
        10,
        Schedule(steps=1, learning_rate=1e-12, weight_decay=0.0, one_cycle=False),
        0,
    )[0].state_dict()["head.bias"]
    moved = [float((bias - start).norm()) for bias in biases]
    assert moved[0] > moved[1] > moved[2] > 0


def test_the_papers_schedule_is_theirs_and_the_small_classifiers_keep_the_light_one():
    deep = schedule_of("wrn", 10_000, 12, "paper")
    assert (deep.steps, deep.batch, deep.learning_rate, deep.ema, deep.size, deep.one_cycle) == (
        50 * 20,
        512,
        1e-4,
        0.9999,
        "paper",
        False,
    )
    assert schedule_of("cnn", 10_000, 12, "paper") == schedule_of("cnn", 10_000, 12)
    assert schedule_of("wrn", 10_000, 12).size == "light" and schedule_of("lr", 10, 3, steps=7).steps == 7
