import json
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from small_network import draw_images
from torch.nn.modules.module import register_module_forward_pre_hook

from sfumato.features import FeatureMeans
from sfumato.features.fourier import FourierFeatures
from sfumato.generators.network import Generator
from sfumato.generators.one_step import (
    PATIENCE,
    EarlyStopping,
    Target,
    balanced_labels,
    block_of_steps,
    drawing,
    fit_generator,
    labels_to_fit,
    load_generator,
    mismatch,
    new_generator,
    save_generator,
)
from sfumato.settings.queries import FeatureMap
from sfumato.settings.training import Auxiliary

SHAPE = (1, 8, 8)
FEATURES = FourierFeatures(SHAPE, [FeatureMap()], 1000, seed=0)
CONFIG = Auxiliary(latent=8, width=8, steps=500, batch=100)
EQUAL = torch.full((3,), 1 / 3)


def fit(means, config=CONFIG, priors=EQUAL, seed=0, judge=(), **options):
    generator = new_generator(SHAPE, 3, config.latent, config.width, seed)
    target = Target([FeatureMeans(means, FEATURES)], *judge)
    return fit_generator(generator, target, config, priors, seed, **options)


def joint_embedding(images, labels, classes):
    with torch.no_grad():
        return FEATURES.embed(images, F.one_hot(labels, classes).float()) / len(images)


@pytest.fixture(scope="module")
def three_digits(digits):
    """Return images of the digits 0, 1 and 2, their labels, target and priors.

    There is a tenth as many images of the digit 2 as of each other digit.
    """
    images, labels = digits.batch(range(len(digits)))
    keep = torch.cat(
        [(labels == m).nonzero()[:count, 0] for m, count in ((0, 170), (1, 170), (2, 17))]
    )
    images, labels = images[keep], labels[keep]
    return images, labels, joint_embedding(images, labels, 3), torch.bincount(labels) / len(labels)


@pytest.fixture(scope="module")
def fitted(three_digits):
    """Fit a generator to the target of `three_digits`."""
    _, _, target, priors = three_digits
    return fit(target, priors=priors)


def test_the_fit_meets_the_target_of_unequal_classes(three_digits, fitted):
    _, _, target, priors = three_digits
    drawn, drawn_labels = draw_images(fitted, 2000, seed=1)
    for m in range(3):
        own = drawn[drawn_labels == m]
        mine = joint_embedding(own, torch.zeros(len(own), dtype=torch.int64), 1)[:, 0]
        goal = target[:, m] / priors[m]
        others = [target[:, k] / priors[k] for k in range(3) if k != m]
        error = torch.linalg.vector_norm(mine - goal)
        assert error < 0.4 * torch.linalg.vector_norm(goal)
        assert all(error < 0.7 * torch.linalg.vector_norm(mine - other) for other in others)


def test_images_of_one_class_differ(three_digits, fitted):
    images, labels, target, priors = three_digits
    # With a batch of 4, each batch shows two of the three classes
    small = fit(target, CONFIG.model_copy(update={"batch": 4}), priors)
    for generator in (fitted, small):
        drawn, drawn_labels = draw_images(generator, 600)
        assert drawn[drawn_labels == 0].std(0).mean() > 0.3 * images[labels == 0].std(0).mean()


@pytest.mark.parametrize("fast", [False, True])
def test_the_fit_is_in_bfloat16_on_a_device_that_has_it(fast, bfloat16):
    """A processor that only emulates bfloat16 takes up to sixteen times as long."""
    bfloat16(fast)
    seen = []

    def note(module, given) -> None:
        if isinstance(module, Generator):
            seen.append(torch.is_autocast_enabled("cpu"))

    with register_module_forward_pre_hook(note):
        fit(torch.zeros(1000, 3), CONFIG.model_copy(update={"steps": 2}))
    assert seen[:2] == [fast, fast]  # later calls compute the final statistics


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("count", [2, 9, 10, 13])
def test_no_class_has_a_single_image_in_a_batch(count, several):
    """In each batch, a class is absent or has at least two images. No class is absent from all
    batches.
    """
    random = torch.Generator().manual_seed(0)
    drawn = [labels_to_fit(count, torch.full((5,), 0.2), several, random)[1] for _ in range(100)]
    numbers = torch.stack([(weights > 0).sum(0) for weights in drawn])
    assert numbers.sum(1).eq(count).all() and not numbers.eq(1).any()
    assert numbers.sum(0).gt(0).all()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.5), (1.0, 1.0, 1.0)])
def test_the_loss_of_a_few_images_is_unbiased(weights):
    """Average the loss over all batches that can be drawn from three images."""
    random = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(3, 20, generator=random), dim=1)
    target = torch.randn(20, generator=random)
    weights = torch.tensor(weights)
    losses = [
        mismatch(
            (weights @ rows[[*batch]] / weights.sum())[:, None],
            target[:, None],
            weights[:, None],
            torch.ones(1),
        )
        for batch in product(range(3), repeat=len(weights))
    ]
    mean = rows.mean(0)
    number = weights.sum().square() / weights.square().sum()
    distance = mean.square().sum() - 2 * mean @ target
    torch.testing.assert_close(torch.stack(losses).mean(), distance + 1 / (number - 1))


def test_a_class_with_one_image_adds_nothing_to_the_loss():
    embedding = torch.ones(20, 2, requires_grad=True)
    weights = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.7, 0.0]])
    mismatch(embedding, torch.zeros(20, 2), weights, torch.ones(2)).backward()
    assert embedding.grad.abs().sum(0).gt(0).tolist() == [False, True]


def test_the_seed_fixes_the_generator_and_the_images():
    target = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) / 1000
    short = CONFIG.model_copy(update={"steps": 3})
    before = torch.get_rng_state()
    first, second, third = (fit(target, short, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items()
    )
    assert torch.equal(draw_images(first, 10, seed=4)[0], draw_images(second, 10, seed=4)[0])
    assert not torch.equal(draw_images(first, 10, seed=4)[0], draw_images(first, 10, seed=5)[0])
    assert not torch.equal(draw_images(first, 10, seed=4)[0], draw_images(third, 10, seed=4)[0])


def test_absent_classes_and_zero_priors_stay_finite():
    for batch in (4, 2):
        config = CONFIG.model_copy(update={"steps": 3, "batch": batch})
        generator = fit(torch.zeros(1000, 3), config, torch.tensor([0.5, 0.5, 0.0]))
        assert all(p.isfinite().all() for p in generator.parameters())


def test_progress_hears_every_step():
    heard = []
    config = CONFIG.model_copy(update={"steps": 3})
    fit(torch.zeros(1000, 3), config, progress=lambda done, steps: heard.append((done, steps)))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_label_shares_are_met_to_within_one():
    random = torch.Generator().manual_seed(0)
    priors = torch.tensor([0.5, 0.3, 0.0, 0.2])
    for count in (1, 7, 1000):
        labels = balanced_labels(count, priors, 4, random)
        counts = torch.bincount(labels, minlength=4)
        assert len(labels) == count and (counts - count * priors).abs().max() <= 1
    assert torch.bincount(balanced_labels(30, None, 3, random)).tolist() == [10, 10, 10]


def test_label_shares_are_right_on_average():
    """In 1000 draws of 2 labels, a class with a prior of 0.3 is expected 600 times.

    The tolerance is 5 standard deviations, with a false-alarm rate below 1e-6.
    """
    random = torch.Generator().manual_seed(0)
    rare = sum(
        (balanced_labels(2, torch.tensor([0.7, 0.3]), 2, random) == 1).sum().item()
        for _ in range(1000)
    )
    assert abs(rare - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7)


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 24, 32)])
def test_a_saved_generator_draws_the_same_images_or_none(tmp_path, shape):
    generator = new_generator(shape, 4, 9, 8, seed=0).to(memory_format=torch.channels_last)
    save_generator(generator, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["resolution"] == (
        32 if shape[1] == shape[2] else [24, 32]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generator.safetensors",
    ]
    for count in (5, 0):
        images, labels = draw_images(load_generator(tmp_path), count)
        assert images.shape == (count, *shape) and len(labels) == count
        assert torch.equal(images, draw_images(generator, count)[0])


def test_images_of_a_million_pixels_are_drawn_one_at_a_time():
    generator = new_generator((1, 1024, 1024), 2, 2, 2, seed=0)
    parts, labels = drawing(generator, 2)
    assert next(parts).shape == (1, 1, 1024, 1024) and len(labels) == 2


def test_the_statistics_of_the_averaged_network_are_its_own():
    """In eval mode, the averaged network draws nearly the same images as in training mode, which
    uses the statistics of each batch instead of stored ones.
    """
    config = CONFIG.model_copy(update={"steps": 70})
    generator = fit(torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) / 100, config)
    z = torch.randn(3000, generator.latent, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(3000) % 3
    with torch.no_grad():
        settled = generator(z, labels)
        assert (generator.train()(z, labels) - settled).abs().mean() < 0.02


def test_a_second_match_and_a_teacher_both_pull(three_digits):
    """A teacher that assigns bright images to class 0, and dark ones to class 1, makes class 0
    brighter relative to class 1. A second match, of inverted images, makes class 0 brighter too.
    """
    images, labels, target, _ = three_digits
    config = CONFIG.model_copy(update={"steps": 100})

    class Brightness(torch.nn.Module):
        def forward(self, images):
            mean = images.mean((1, 2, 3))
            return 40 * torch.stack([mean, 0.6 - mean, torch.full_like(mean, -1.0)], dim=1)

    def means(generator):
        drawn, asked = draw_images(generator, 600)
        return [drawn[asked == m].mean().item() for m in (0, 1)]

    plain = means(fit(target, config))
    judged = means(fit(target, config, judge=(Brightness(), 0.3)))
    assert judged[0] - judged[1] > plain[0] - plain[1] + 0.05
    generator = new_generator(SHAPE, 3, CONFIG.latent, CONFIG.width, 0)
    other = FeatureMeans(joint_embedding(1 - images, labels, 3), FEATURES, weight=3.0)
    fit_generator(generator, Target([FeatureMeans(target, FEATURES), other]), config, EQUAL, 0)
    assert means(generator)[0] > plain[0] + 0.05  # nearer to the bright inverted images


def stopped_at(noise: float, steps: int = 400) -> tuple[EarlyStopping, list[float]]:
    """Simulate the fit of one class to a release: a signal of norm 1, plus noise of norm `noise`.

    In the first 100 steps, the class's embedding moves from zero to the signal. After that, it also
    takes up noise. In the features that the loss uses, this is the noise of the release. In the
    held-out features, it is independent noise of the same strength.

    Returns the state at the end and, for each step, the share of the noise in the target.
    """
    random = torch.Generator().manual_seed(1)
    signal, chance, other = (
        F.normalize(torch.randn(1000, 1, generator=random), dim=0) for _ in range(3)
    )
    stopping = EarlyStopping([FeatureMeans(signal + noise * chance, FEATURES)], 0)
    seen = (1 - stopping.unseen[0]) * noise * chance
    elsewhere = stopping.unseen[0] * noise * other
    parts = []
    for step in range(steps):  # the class first, then its noise
        learned = min(1.0, step / 100) * signal + max(0.0, (step - 100) / 100) * (seen + elsewhere)
        stopping.observe([learned], torch.ones(5, 1))
        parts.append(
            float(
                ((stopping.targets[0] - signal) * seen).sum() / seen.square().sum().clamp(min=1e-9)
            )
        )
    return stopping, parts


def test_a_class_is_held_where_the_fit_begins_to_learn_its_noise():
    stopping, parts = stopped_at(noise=0.7)
    # At first, the target is the release itself
    assert stopping.held.all() and parts[0] == pytest.approx(1, abs=0.15)
    assert abs(parts[-1]) < 0.35  # at the end, the target contains little noise
    assert (stopping.targets[0] - stopping.matches[0].table).norm() > 0.4  # it is not the release


def test_a_class_that_comes_nearer_is_not_held():
    stopping, _ = stopped_at(noise=0.0, steps=100 + PATIENCE)
    assert not stopping.held.any() and torch.equal(stopping.targets[0], stopping.matches[0].table)


def test_a_class_is_not_held_for_steps_without_its_images():
    stopping = EarlyStopping([FeatureMeans(torch.zeros(1000, 2), FEATURES)], 0)
    for _ in range(2 * PATIENCE):
        stopping.observe([torch.ones(1000, 2)], torch.tensor([[1.0, 0.0]]).repeat(2, 1))
    assert stopping.held.tolist() == [True, False]


def test_a_release_that_is_noise_alone_is_not_followed():
    """Without signal, any move away from zero increases the distance in the held-out features, so
    the target shrinks to zero.
    """
    random = torch.Generator().manual_seed(2)
    match = FeatureMeans(torch.randn(1000, 2, generator=random), FEATURES)
    stopping = EarlyStopping([match], 0)
    other = torch.randn(1000, 2, generator=random)
    seen = torch.where(stopping.unseen[0] > 0, other, match.table)
    for step in range(2 * PATIENCE):
        stopping.observe([step / PATIENCE * seen], torch.eye(2).repeat(2, 1))
    assert stopping.held.all() and stopping.targets[0].norm() < 0.2 * match.table.norm()


def test_the_loss_does_not_see_the_cells_that_judge_it():
    match = FeatureMeans(torch.ones(1000, 1), FEATURES)
    stopping = EarlyStopping([match], 0)
    embedding = torch.zeros(1000, 1, requires_grad=True)
    stopping.loss([embedding], torch.ones(5, 1), torch.ones(1)).backward()
    assert torch.equal(embedding.grad != 0, stopping.unseen[0] == 0)
    assert 0.1 < float(stopping.unseen[0].mean()) < 0.3
    waves = stopping.unseen[0].view(2, 500)
    # Cosine and sine of a frequency are left out together, so φ has a constant norm on the rest
    assert torch.equal(waves[0], waves[1])


@pytest.mark.parametrize("resolution", [8, 28, 33, 64, 97, 128, 224])
def test_each_level_of_a_large_image_doubles_the_one_before(resolution):
    generator = new_generator((1, resolution, resolution), 2, 4, 8, 0).eval()
    z = torch.randn(2, 4)
    labels = torch.tensor([0, 1])
    with torch.no_grad():
        sides = [generator(z, labels, block).shape[-1] for block in generator.blocks]
    assert sides == [-(-resolution // block) for block in generator.blocks] and sides[0] <= 32
    assert sides[-1] == resolution and (len(sides) == 1) == (resolution <= 32)


@pytest.mark.parametrize(
    "sides", [(24, 32), (28, 36), (48, 64), (37, 50), (64, 17), (96, 128), (4, 80)]
)
def test_each_level_of_a_large_rectangle_doubles_the_last(sides):
    generator = new_generator((1, *sides), 2, 4, 8, 0).eval()
    z = torch.randn(2, 4)
    labels = torch.tensor([0, 1])
    with torch.no_grad():
        found = [tuple(generator(z, labels, block).shape[2:]) for block in generator.blocks]
    assert found == [tuple(-(-side // block) for side in sides) for block in generator.blocks]
    assert math.prod(found[0]) <= 32**2 and (len(found) == 1) == (math.prod(sides) <= 32**2)


@pytest.mark.parametrize(
    ("blocks", "steps", "expected"),
    [((1,), 3, [1, 1, 1]), ((4, 2, 1), 8, [4, 4, 4, 4, 2, 2, 1, 1]), ((2, 1), 1, [1])],
)
def test_half_of_the_steps_are_coarse_the_others_shared(blocks, steps, expected):
    assert block_of_steps(blocks, steps) == expected


def test_a_large_image_is_fitted_coarse_to_fine(monkeypatch):
    """Two classes of stripes, of 40 pixels per side, differ in brightness. Coarse levels learn the
    brightness, and the last level learns the stripes.
    """
    side = 40
    stripes = 0.5 + 0.2 * torch.cos(torch.arange(side) * math.pi)[:, None].expand(side, side)
    images = torch.stack([stripes - 0.25, stripes.T + 0.25])[:, None].clamp(0, 1)
    maps = [FeatureMap(block=2), FeatureMap(map="moduli", length_scales=(0.5,))]
    features = FourierFeatures((1, side, side), maps, 400, seed=0)
    target = features.embed(images, torch.eye(2)) / 2
    seen = []
    generator = new_generator((1, side, side), 2, 4, 8, 0)
    generator.register_forward_hook(lambda module, given, found: seen.append(found.shape[-1]))
    config = Auxiliary(latent=4, width=8, steps=120, batch=12)
    half = torch.tensor([0.5, 0.5])
    fit_generator(generator, Target([FeatureMeans(target, features)]), config, half, 0)
    assert seen[:120] == [20] * 60 + [40] * 60
    drawn, labels = draw_images(generator, 40)
    dark, light = (drawn[labels == label].mean(0)[0] for label in (0, 1))
    assert light.mean() - dark.mean() > 0.3
    assert dark.diff(dim=0).abs().mean() > 1.3 * dark.diff(dim=1).abs().mean(), "level stripes"
    assert light.diff(dim=1).abs().mean() > 1.3 * light.diff(dim=0).abs().mean(), "upright stripes"
