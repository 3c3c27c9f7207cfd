import json

import pytest
import torch
from safetensors.torch import save_file
from small_network import perturbed

from sfumato.diffusion.denoiser import Sampling
from sfumato.diffusion.unet import (
    Attention,
    GroupNorm,
    UNet,
    double,
    drop_extra_classes,
    halve,
    load_model,
)
from sfumato.errors import ConfigError, DataError
from sfumato.settings.fields import both_sides
from sfumato.settings.training import Architecture

TINY = Architecture(width=8, multipliers=(1, 2), attention=(1,))


@pytest.mark.parametrize(
    ("resolution", "channels", "options"),
    [
        (8, 1, {}),
        (28, 1, {"unshuffle": 2}),
        (28, 1, {"multipliers": (1, 1, 2), "attention": (1, 2)}),  # levels of 28, 14, 7 pixels
        # Levels of 14, 7 and 4 pixels: upsampling must give an odd side
        (28, 1, {"multipliers": (1, 1, 1), "unshuffle": 2}),
        (32, 3, {"blocks": 2, "attention": ()}),
        (7, 2, {"multipliers": (1, 1, 1), "attention": (0, 1, 2)}),
        ((1, 2), 1, {"attention": ()}),  # one of the sides is not halved
        # Levels of 6×10, 3×5 and 2×3 pixels
        ((12, 20), 3, {"multipliers": (1, 1, 2), "attention": (2,), "unshuffle": 2}),
    ],
)
def test_sizes_are_kept_and_images_are_independent(resolution, channels, options):
    model = perturbed(UNet(resolution, channels, 4, TINY.model_copy(update=options)))
    x = torch.randn(3, *model.shape)
    c_noise = torch.randn(3)
    labels = torch.tensor([0, 3, 4])
    together = model(x, c_noise, labels)
    assert together.shape == (3, channels, *both_sides(resolution)) and together.isfinite().all()
    alone = torch.cat(
        [model(x[i : i + 1], c_noise[i : i + 1], labels[i : i + 1]) for i in range(3)]
    )
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_new_network_answers_zero():
    model = UNet(8, 1, 4, TINY)
    assert not model(torch.randn(2, 1, 8, 8), torch.zeros(2), torch.tensor([0, 4])).any()


def test_noise_level_label_and_every_parameter_matter():
    model = perturbed(UNet(8, 1, 4, TINY))
    x = torch.randn(1, 1, 8, 8).expand(5, -1, -1, -1)
    c_noise = torch.zeros(5)
    outputs = model(x, c_noise, torch.arange(5)).flatten(1)
    assert torch.pdist(outputs).min() > 1e-3  # four labels and no label: all differ
    assert (model(x, c_noise + 0.3, torch.arange(5)).flatten(1) - outputs).norm(dim=1).min() > 1e-3
    outputs.square().sum().backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    # A constant added to all keys does not change the softmax, so the keys' bias has no gradient
    assert all(name.endswith("attention.k.bias") for name in idle)


def test_every_set_of_labels_shows_and_none_is_not_unlabelled(tmp_path):
    model = perturbed(UNet(8, 1, 3, TINY, several=True))
    sets = torch.tensor([[i >> 2, i >> 1 & 1, i & 1] for i in range(8)] + [[model.no_label] * 3])
    outputs = model(torch.randn(1, 1, 8, 8).expand(9, -1, -1, -1), torch.zeros(9), sets).flatten(1)
    assert torch.pdist(outputs).min() > 1e-3
    model.save(tmp_path)
    assert load_model(tmp_path).several
    (drawn,) = model.drawing(
        sets[:8].to(torch.uint8), Sampling(steps=2, guidance=1.0), torch.Generator().manual_seed(0)
    )
    assert drawn.shape == (8, 1, 8, 8) and torch.pdist(drawn.flatten(1)).min() > 0


def test_attention_agrees_with_the_fused_one():
    layer = Attention(64)
    torch.nn.init.normal_(layer.out.weight, std=0.1)
    x = torch.randn(2, 64, 5, 5)
    tokens = layer.norm(x).flatten(2).transpose(1, 2)
    q, k, v = (
        p(tokens).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for p in (layer.q, layer.k, layer.v)
    )
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    expected = (x + layer.out(fused).transpose(1, 2).reshape(x.shape)) / 2**0.5
    assert torch.allclose(layer(x), expected, atol=1e-5)
    parameters = list(layer.parameters())
    gradients = (
        torch.autograd.grad(out.square().sum(), parameters, retain_graph=True)
        for out in (layer(x), expected)
    )
    for spelled_out, one in zip(*gradients, strict=True):
        assert torch.allclose(spelled_out, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(4, 6), (7, 7), (1, 1), (2, 3)])
def test_sizes_change_by_means_and_by_copies(size):
    x = torch.randn(2, 3, *size)
    assert torch.allclose(halve(x), torch.nn.functional.avg_pool2d(x, 2, ceil_mode=True), atol=1e-6)
    whole = torch.nn.functional.interpolate(x, scale_factor=2.0)
    for rows, columns in ((2 * size[0], 2 * size[1]), (2 * size[0] - 1, 2 * size[1])):
        assert torch.equal(double(x, (rows, columns)), whole[:, :, :rows, :columns])


def test_a_norm_is_group_normalisation_with_any_scale():
    x = torch.randn(3, 8, 4, 4)
    scale = torch.randn(3, 8)
    shift = torch.randn(3, 8)
    norm = GroupNorm(8)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    assert torch.allclose(
        norm(x), torch.nn.functional.group_norm(x, norm.groups, norm.weight, norm.bias), atol=1e-5
    )
    plain = torch.nn.functional.group_norm(x, norm.groups)
    expected = plain * scale[:, :, None, None] + shift[:, :, None, None]
    assert torch.allclose(GroupNorm(8, affine=False)(x, scale, shift), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"unshuffle": 4}, "unshuffle"),
        ({"width": 10}, "width"),
        ({"attention": (2,)}, "attention"),
        ({"width": 100}, "heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        UNet(10, 1, 4, TINY.model_copy(update={"attention": (0,), **options}))


def test_a_network_of_rectangles_survives_saving(tmp_path):
    for resolution, kept in ((8, 8), ((8, 12), [8, 12])):
        model = UNet(resolution, 1, 4, TINY)
        model.save(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["resolution"] == kept
        assert load_model(tmp_path).shape == model.shape == (1, *both_sides(resolution))


def test_a_broken_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"config\.json is missing"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"resolution": 8, "channels": 1, "classes": 4})
    )
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match="do not match"):
        load_model(tmp_path)


def test_extra_classes_leave_other_initial_weights_unchanged():
    torch.manual_seed(3)
    plain = UNet(8, 1, 4, TINY).state_dict()
    torch.manual_seed(3)
    more = UNet(8, 1, 4, TINY, extra_classes=6).state_dict()
    assert list(plain) == list(more)
    extra = more["label.weight"][5:]
    more["label.weight"] = more["label.weight"][:5]
    assert all(torch.equal(value, more[name]) for name, value in plain.items()) and extra.shape == (
        6,
        32,
    )
    # The standard deviation of 192 normals is 0.5, within six standard errors
    assert 0.35 < extra.std() < 0.65
    assert torch.pdist(extra).min() > 0.1


def test_dropped_classes_leave_the_plain_network_unchanged(tmp_path):
    model = perturbed(UNet(8, 1, 4, TINY, extra_classes=6))
    model.sigma_data = 0.3
    x = torch.randn(5, 1, 8, 8)
    c_noise = torch.randn(5)
    labels = torch.arange(5)
    before = model(x, c_noise, labels)
    assert model(x, c_noise, labels + 6).shape == before.shape  # 6..10 are public classes
    assert drop_extra_classes(model) is model and model.extra_classes == 0
    assert torch.equal(model(x, c_noise, labels), before)
    with pytest.raises(IndexError):
        model(x, c_noise, labels + 6)
    model.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "weights.safetensors",
    ]
    again = load_model(tmp_path)
    assert torch.equal(again(x, c_noise, labels), before) and again.sigma_data == 0.3


def test_dropping_nothing_changes_nothing():
    model = UNet(8, 1, 4, TINY)
    table = model.label
    assert drop_extra_classes(model).label is table
    model = UNet(8, 1, 4, TINY, extra_classes=2)
    model.label.weight.requires_grad_(False)
    assert not drop_extra_classes(model).label.weight.requires_grad
    assert drop_extra_classes(UNet(8, 1, 4, TINY, extra_classes=2)).label.weight.requires_grad


def test_larger_images_are_drawn_in_smaller_batches():
    def network(size, **options) -> UNet:
        return UNet(size, 1, 2, Architecture(width=8, multipliers=(1,), attention=(), **options))

    assert [network(size).at_a_time for size in (8, 28, 32, 64, (32, 128), 256)] == [
        256,
        167,
        128,
        32,
        32,
        2,
    ]
    assert network(64, unshuffle=2).at_a_time == 128
