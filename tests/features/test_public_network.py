import json
from itertools import product
from pathlib import Path

import pytest
import torch

from sfumato.errors import DataError
from sfumato.features.public_network import ResNet, WhitenedCNN, arguments_of, load_classifier
from sfumato.storage.weights import save_network


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *product([ResNet, WhitenedCNN], [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)]),
        *((ResNet, shape) for shape in [(1, 4, 4), (1, 9, 13), (3, 16, 12)]),
    ],
)
def test_every_parameter_learns_and_loads_bit_for_bit(kind, shape, tmp_path):
    torch.manual_seed(0)
    model = kind(shape, 7, width=4)
    images = torch.rand(8, *shape)
    if kind is WhitenedCNN:
        model.whiten(images)
    else:  # in a new network, these weights are zero, so a block equals its shortcut
        for block in model.blocks:
            torch.nn.init.ones_(block.second_norm.weight)
    logits = model(images)  # this updates the batch statistics, too
    assert logits.shape == (8, 7)
    logits.square().sum().backward()
    assert all(
        value.grad is not None and value.grad.abs().sum() > 0 for value in model.parameters()
    )
    assert "filters" not in dict(model.named_parameters())  # whitening is not trained
    save_network(model, arguments_of(model), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "weights.safetensors",
    ]
    again = load_classifier(tmp_path)
    assert (
        type(again) is kind
        and not again.training
        and torch.equal(again(images), model.eval()(images))
    )
    assert again.features(images).shape == (8, again.head.in_features)


def test_eval_logits_ignore_other_images():
    torch.manual_seed(0)
    model = ResNet((1, 8, 8), 5, width=8).eval()
    images = torch.rand(6, 1, 8, 8)
    other = images.clone()
    other[3] = 7.0
    keep = torch.arange(6) != 3
    torch.testing.assert_close(model(images)[keep], model(other)[keep])
    assert not torch.allclose(model(images)[3], model(other)[3])


def test_a_shape_too_small_is_refused():
    with pytest.raises(ValueError, match="too small"):
        ResNet((1, 3, 3), 5)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("weights.safetensors", Path.unlink),
        ("weights.safetensors", lambda file: file.write_bytes(file.read_bytes()[:100])),
        (
            "config.json",
            lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {"width": 8})),
        ),
        ("config.json", lambda file: file.write_text("[]")),
    ],
)
def test_files_that_do_not_fit_together_are_refused(file, spoil, tmp_path):
    model = ResNet((1, 8, 8), 5, width=4)
    save_network(model, arguments_of(model), tmp_path)
    spoil(tmp_path / file)
    with pytest.raises(DataError, match="stage classifier"):
        load_classifier(tmp_path)


def test_whitened_patches_have_no_correlation():
    noise = torch.rand(200, 3, 18, 18, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.avg_pool2d(noise, 3, 1)
    model = WhitenedCNN((3, 16, 16), 5, width=4)
    model.whiten(images)
    answers = torch.nn.functional.conv2d(images * 2 - 1, model.filters).transpose(0, 1).flatten(1)
    half = len(answers) // 2
    torch.testing.assert_close(answers[:half], -answers[half:])
    correlation = torch.corrcoef(answers[:half])
    assert (correlation - torch.eye(half)).abs().max() < 0.05
