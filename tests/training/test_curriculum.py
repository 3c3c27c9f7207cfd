import json
import threading

import numpy as np
import pytest
import torch
from torchvision.transforms import RandAugment

from sfumato.data.images import ImageSet, as_floats
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.unet import UNet, drop_extra_classes
from sfumato.errors import DataError
from sfumato.settings.training import Amp, Architecture, Phase
from sfumato.training.curriculum import (
    IMAGES_PER_DRAW,
    MappedImages,
    mean_loss,
    mixed_batch,
    prefetch,
    rand_augment,
    warm_up,
)
from sfumato.training.training_sets import public_training_set

SOURCES = {
    "central": (
        torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(6) % 3,
    ),
    "auxiliary": (torch.full((9, 1, 8, 8), 255, dtype=torch.uint8), torch.full((9,), 2)),
}


def tiny() -> UNet:
    torch.manual_seed(0)
    return UNet(8, 1, 3, Architecture(width=8, multipliers=(1,), attention=(0,)))


def phase(**options) -> Phase:
    sources = {"central": 1.0, "auxiliary": 1.0}
    return Phase(**{"sources": sources, "steps": 3, "batch": 8, "learning_rate": 2e-3, **options})


def test_equal_seeds_give_equal_weights():
    torch.manual_seed(1)
    first = warm_up(tiny(), [phase(augment=2)], SOURCES, 7)
    torch.manual_seed(2)  # the global generator does not matter
    second = warm_up(tiny(), [phase(augment=2)], SOURCES, 7)
    third = warm_up(tiny(), [phase(augment=2)], SOURCES, 8)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_the_loss_falls_and_progress_is_reported():
    rows = []
    model = tiny()
    images = as_floats(SOURCES["auxiliary"][0])
    labels = SOURCES["auxiliary"][1]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    batch = images, labels, torch.full((len(images),), 0.5), noise
    before = mean_loss(model, batch, False, len(images)).item()
    phases = [phase(steps=1), phase(steps=80, batch=32)]
    warm_up(model, phases, SOURCES, 0, lambda *row: rows.append(row))
    assert rows[:2] == [(1, 81), (20, 81)] and rows[-1] == (81, 81)
    assert mean_loss(model, batch, False, len(images)).item() < 0.6 * before


def test_augmentation_keeps_range_order_and_the_generator():
    images = SOURCES["central"][0].repeat(20, 1, 1, 1)
    before = torch.random.get_rng_state()
    changed = rand_augment(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert changed.shape == images.shape and changed.min() >= 0 and changed.max() <= 1
    moved = (changed - images).abs().amax(dim=(1, 2, 3)) > 0.01
    assert 0.5 < moved.double().mean() <= 1
    assert len(torch.unique(changed, dim=0)) > 60  # images get different operations

    # Dim images stay dim, and bright ones bright: brightness changes by at most a third
    pair = torch.cat([torch.full((40, 1, 8, 8), 0.1), torch.full((40, 1, 8, 8), 0.6)])
    out = rand_augment(pair, 1, torch.Generator().manual_seed(0)).amax(dim=(1, 2, 3))
    assert out[:40].median() < 0.3 < out[40:].median()
    assert rand_augment(torch.rand(5, 3, 12, 12), 14, torch.Generator().manual_seed(0)).shape == (
        5,
        3,
        12,
        12,
    )


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 12, 20)])
def test_augmentation_equals_torchvision_group_by_group(shape):
    images = torch.rand(101, *shape)
    random = torch.Generator().manual_seed(3)
    again = torch.Generator().manual_seed(3)
    order = torch.randperm(len(images), generator=again)
    expected = (images * 255).round().to(torch.uint8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=again)))
        for group in order.split(IMAGES_PER_DRAW):
            expected[group] = RandAugment(num_ops=3)(expected[group])
    assert torch.equal(rand_augment(images, 3, random), expected.float() / 255)
    assert torch.equal(random.get_state(), again.get_state())


def test_batches_made_ahead_are_the_same():
    made = [threading.Event() for _ in range(4)]

    def batches():
        for number, event in enumerate(made):
            event.set()
            yield (torch.tensor(number),)

    seen = []
    for (number,) in prefetch(batches()):
        seen.append(int(number))
        assert made[min(len(seen), 3)].wait(60)
    assert seen == [0, 1, 2, 3]


def test_labels_are_dropped_at_the_given_rate():
    model = tiny()
    seen = []
    model.label.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    warm_up(model, [phase(steps=20, batch=100)], SOURCES, 0, label_dropout=0.3)
    dropped = (torch.cat(seen) == 3).double()
    # False alarm below 1e-6
    assert float(dropped.mean()) == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / 2000) ** 0.5)


# ---- public images


def public(images: int = 30) -> ImageSet:
    """Return grey images in five classes. All pixels of image i have the value i."""
    pixels = np.broadcast_to(
        np.arange(images, dtype=np.uint8)[:, None, None, None], (images, 8, 8, 1)
    )
    return ImageSet(pixels, np.arange(images) % 5, tuple("abcde"))


def selection(directory, rows, labels, kind="public", classes=("a", "d")):
    directory.mkdir(exist_ok=True)
    np.save(directory / "indices.npy", np.array(rows))
    np.save(directory / "labels.npy", np.array(labels))
    about = {"labels": kind, "classes": list(classes), "images": len(rows)}
    (directory / "selection.json").write_text(json.dumps(about))
    return directory


def test_public_classes_get_rows_unless_relabelled(tmp_path):
    images, labels, extra = public_training_set(
        public(), selection(tmp_path / "s", [3, 5, 8], [1, 0, 1]), classes=3
    )
    assert extra == 2 and labels.tolist() == [5, 4, 5]  # 0..2 are sensitive, 3 stands for no label
    assert images[torch.tensor([2, 0])].flatten(1).float().mean(dim=1).tolist() == [8, 3]
    assert images[torch.tensor([2, 0])].shape == (2, 1, 8, 8)
    relabelled = selection(tmp_path / "s", [3, 5, 8], [2, 0, 1], "sensitive")
    _, labels, extra = public_training_set(public(), relabelled, classes=3)
    assert extra == 0 and labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("rows", "labels", "kind", "named"),
    [
        ([3, 30], [0, 1], "public", r"indices\.npy contains values 3 to 30, expected 0 to 29"),
        ([-1, 3], [0, 1], "public", r"indices\.npy"),
        ([3, 4], [0, 2], "public", r"labels\.npy contains values 0 to 2, expected 0 to 1"),
        ([3, 4], [0, 3], "sensitive", r"labels\.npy contains values 0 to 3, expected 0 to 2"),
        ([3, 4], [0], "public", "2 indices, but 1 labels"),
        ([3.0, 4.0], [0, 1], "public", "float64"),
        ([3, 4], [0, 1], "private", "selection\\.json"),
        (np.empty(0, np.int64), np.empty(0, np.int64), "public", "contains no image"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(tmp_path, rows, labels, kind, named):
    with pytest.raises(DataError, match=named):
        public_training_set(public(), selection(tmp_path / "s", rows, labels, kind), classes=3)


def test_sources_are_mixed_by_weight_with_their_labels(tmp_path):
    images, labels, _ = public_training_set(
        public(), selection(tmp_path / "s", [0, 7, 11], [0, 1, 1]), classes=3
    )
    sources = {**SOURCES, "public": (images, labels)}
    weights = {"central": 1.0, "auxiliary": 2.0, "public": 5.0}
    batch, labels = mixed_batch(
        phase(sources=weights, batch=4000), sources, torch.Generator().manual_seed(0)
    )
    white = (batch == 1).all(dim=(1, 2, 3))
    shown = labels > 3
    for part, share in ((white, 2 / 8), (shown, 5 / 8)):  # false alarm below 1e-6
        assert float(part.double().mean()) == pytest.approx(
            share, abs=5 * (share * (1 - share) / 4000) ** 0.5
        )
    assert (labels[white] == 2).all() and batch.dtype == torch.float32 and batch.max() <= 1
    values = (batch[shown].flatten(1) * 255).round().unique()
    assert values.tolist() == [0, 7, 11]  # the selected rows and no others
    assert ((labels[shown] == 4) == (batch[shown].amax(dim=(1, 2, 3)) == 0)).all()
    assert set(labels[~shown].tolist()) == {0, 1, 2}


def test_a_memory_map_is_read_row_by_row_and_never_copied(tmp_path):
    """The array has 64 GiB, in a sparse file, so a copy would not fit into memory."""
    size = 64 * 2**30 // 64
    # A sparse file: blocks that are not written take no space
    pixels = np.lib.format.open_memmap(tmp_path / "images.npy", "w+", np.uint8, (size, 8, 8, 1))
    pixels[size - 1], pixels[5] = 200, 100
    pixels.flush()
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    images = MappedImages(mapped, np.array([5, size - 1]))
    assert len(images) == 2 and len(MappedImages(mapped)) == size
    assert np.shares_memory(images.images, mapped)
    found = MappedImages(mapped)[torch.tensor([size - 1, 0, 5])]
    assert found.dtype == torch.uint8 and found.amax(dim=(1, 2, 3)).tolist() == [200, 0, 100]
    one = phase(sources={"public": 1.0}, batch=16)
    random = torch.Generator().manual_seed(0)
    whole = {"public": (MappedImages(mapped), torch.zeros(1, dtype=torch.int64).expand(size))}
    assert mixed_batch(one, whole, random)[0].shape == (16, 1, 8, 8)
    batch, _ = mixed_batch(one, {"public": (images, torch.tensor([0, 1]))}, random)
    assert set((batch.amax(dim=(1, 2, 3)) * 255).round().tolist()) == {100, 200}


def test_mapped_images_train_as_the_same_images_in_memory_do():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), dtype=np.uint8)
    held = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    both = [
        SOURCES | {"auxiliary": (images, SOURCES["auxiliary"][1])}
        for images in (MappedImages(pixels), held)
    ]
    first, second = (warm_up(tiny(), [phase(augment=1)], sources, 7) for sources in both)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_public_classes_are_trained_and_leave_with_their_rows():
    torch.manual_seed(0)
    model = UNet(8, 1, 3, Architecture(width=8, multipliers=(1,), attention=(0,)), extra_classes=2)
    start = model.label.weight.detach().clone()
    sources = {"public": (torch.rand(6, 1, 8, 8), torch.tensor([4, 5, 4, 5, 4, 5]))}
    seen = []
    model.label.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    phases = [
        phase(sources={"public": 1.0}, steps=20, amp=Amp()),
        phase(sources={"public": 1.0}, steps=5),
    ]
    average = warm_up(model, phases, sources, 0, label_dropout=0.3)
    # 3 stands for no label. The first input is a blank image, on which memory is measured.
    assert set(torch.cat(seen[1:]).tolist()) == {3, 4, 5}
    moved = (average["label.weight"] != start).any(dim=1)
    assert moved.tolist() == [False, False, False, True, True, True]
    ema_model(model, average)
    plain = drop_extra_classes(model)
    assert plain.label.weight.shape == (4, 32)
    assert torch.equal(plain.label.weight, average["label.weight"][:4])
