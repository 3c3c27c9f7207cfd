import json

import pytest
import torch

from sfumato.errors import DataError
from sfumato.features.public_network import ResNet, WhitenedCNN, load_classifier, save_classifier

SHAPES = [(1, 4, 4), (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 9, 13)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_learns_once_the_blocks_have_left_their_start(shape):
    torch.manual_seed(0)
    model = ResNet(shape, 7, width=4)
    for block in model.blocks:
        torch.nn.init.ones_(block.second_norm.weight)
    logits = model(torch.rand(8, *shape))
    assert logits.shape == (8, 7)
    logits.square().sum().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in model.parameters())


def test_in_eval_mode_an_image_takes_no_part_in_the_logits_of_another():
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


def test_what_was_saved_is_loaded_bit_for_bit_in_eval_mode(tmp_path):
    torch.manual_seed(0)
    model = ResNet((3, 16, 12), 5, width=4)
    model(torch.rand(4, 3, 16, 12))  # off the initial batch statistics
    save_classifier(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "weights.safetensors"]
    again, images = load_classifier(tmp_path), torch.rand(4, 3, 16, 12)
    assert not again.training and torch.equal(again(images), model.eval()(images))


@pytest.mark.parametrize("broken", ["missing", "other width", "no config", "cut short"])
def test_files_that_do_not_fit_together_are_refused(broken, tmp_path):
    save_classifier(ResNet((1, 8, 8), 5, width=4), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "weights.safetensors"
    if broken == "missing":
        weights.unlink()
    elif broken == "other width":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"width": 8}))
    elif broken == "no config":
        config.write_text("[]")
    else:
        weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="stage classifier"):
        load_classifier(tmp_path)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_the_whitened_network_learns_all_but_its_first_layer_and_is_loaded_as_it_was(shape, tmp_path):
    torch.manual_seed(0)
    model, images = WhitenedCNN(shape, 7, width=4), torch.rand(8, *shape)
    model.whiten(images)
    before = model.filters.clone()
    model(images).square().sum().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in model.parameters())
    assert torch.equal(model.filters, before)
    save_classifier(model, tmp_path)
    again = load_classifier(tmp_path)
    assert isinstance(again, WhitenedCNN) and torch.equal(again(images), model.eval()(images))
    assert again.features(images).shape == (8, again.head.in_features)


def test_whitened_patches_have_no_correlation():
    images = torch.nn.functional.avg_pool2d(
        torch.rand(200, 3, 18, 18, generator=torch.Generator().manual_seed(0)), 3, 1
    )
    model = WhitenedCNN((3, 16, 16), 5, width=4)
    model.whiten(images)
    answers = torch.nn.functional.conv2d(images * 2 - 1, model.filters).transpose(0, 1).flatten(1)
    half = len(answers) // 2
    torch.testing.assert_close(answers[:half], -answers[half:])
    correlation = torch.corrcoef(answers[:half])
    assert (correlation - torch.eye(half)).abs().max() < 0.05
