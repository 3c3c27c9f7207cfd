import pytest
import torch

from sfumato.config import Phase, Pretrain
from sfumato.errors import ConfigError
from sfumato.models.unet import UNet
from sfumato.training.curriculum import mixed_batch, rand_augment, warm_up

CONFIG = Pretrain(ema=0.99)
SOURCES = {
    "central": (torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3),
    "auxiliary": (torch.full((9, 1, 8, 8), 255, dtype=torch.uint8), torch.full((9,), 2)),
}


def tiny() -> UNet:
    torch.manual_seed(0)
    return UNet(8, 1, 3, width=8, multipliers=(1,), attention=(0,))


def phase(**options) -> Phase:
    return Phase(**{"sources": {"central": 1.0, "auxiliary": 1.0}, "steps": 3, "batch": 8, "learning_rate": 2e-3, **options})


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    torch.manual_seed(1)
    first = warm_up(tiny(), [phase(augment=2)], SOURCES, CONFIG, 7, autocast=False)
    torch.manual_seed(2)  # the global generator has no say
    second = warm_up(tiny(), [phase(augment=2)], SOURCES, CONFIG, 7, autocast=False)
    third = warm_up(tiny(), [phase(augment=2)], SOURCES, CONFIG, 8, autocast=False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_the_loss_falls_and_progress_is_reported():
    rows = []
    warm_up(
        tiny(), [phase(steps=1), phase(steps=300, batch=32)], SOURCES, CONFIG, 0, lambda *row: rows.append(row), autocast=False
    )
    assert [row[:3] for row in rows[:2]] == [(0, 1, 1), (1, 20, 300)]
    assert rows[-1][:3] == (1, 300, 300)
    early, late = [row[3] for row in rows[1:4]], [row[3] for row in rows[-3:]]
    assert sum(late) < 0.6 * sum(early)


def test_sources_are_mixed_by_weight():
    generator = torch.Generator().manual_seed(0)
    images, labels = mixed_batch(phase(sources={"central": 1.0, "auxiliary": 3.0}, batch=4000), SOURCES, generator)
    white = (images == 1).all(dim=(1, 2, 3))
    assert float(white.double().mean()) == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 4000) ** 0.5)  # false alarm below 1e-6
    assert (labels[white] == 2).all()
    assert images.dtype == torch.float32
    assert images.max() <= 1


def test_augmentation_changes_images_keeps_range_order_and_the_global_generator():
    images = SOURCES["central"][0].repeat(20, 1, 1, 1)
    before = torch.random.get_rng_state()
    changed = rand_augment(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert changed.shape == images.shape
    assert changed.min() >= 0
    assert changed.max() <= 1
    moved = (changed - images).abs().amax(dim=(1, 2, 3)) > 0.01
    assert 0.5 < moved.double().mean() <= 1
    assert len(torch.unique(changed, dim=0)) > 60  # not one operation for all

    # order: dim images stay dim, bright ones bright (brightness changes by at most a third)
    pair = torch.cat([torch.full((40, 1, 8, 8), 0.1), torch.full((40, 1, 8, 8), 0.6)])
    out = rand_augment(pair, 1, torch.Generator().manual_seed(0)).amax(dim=(1, 2, 3))
    assert out[:40].median() < 0.3 < out[40:].median()


def test_colour_images_can_be_augmented():
    assert rand_augment(torch.rand(5, 3, 12, 12), 14, torch.Generator().manual_seed(0)).shape == (5, 3, 12, 12)


def test_labels_are_dropped_at_the_given_rate():
    model = tiny()
    seen = []
    model.label.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    warm_up(model, [phase(steps=20, batch=100)], SOURCES, CONFIG, 0, label_dropout=0.3, autocast=False)
    dropped = (torch.cat(seen) == 3).double()
    assert float(dropped.mean()) == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / 2000) ** 0.5)  # false alarm below 1e-6


def test_a_missing_source_is_named():
    with pytest.raises(ConfigError, match=r"phases\[0\] wants images from 'central'"):
        warm_up(tiny(), [phase()], {"auxiliary": SOURCES["auxiliary"]}, CONFIG, 0)


def test_frozen_parameters_stay():
    model = tiny()
    model.label.weight.requires_grad_(False)
    before = model.label.weight.clone()
    average = warm_up(model, [phase()], SOURCES, CONFIG, 0, autocast=False)
    assert torch.equal(model.label.weight, before)
    assert "label.weight" not in average
