"""Per-image gradients in the layers agree with one backward pass per image, and every use of a
weight counts.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_network import network, perturbed
from torch import Tensor, nn
from torch.func import functional_call

from sfumato.diffusion.unet import GroupNorm, UNet, build_unet
from sfumato.dpsgd import per_image
from sfumato.dpsgd.gradients import by_layers, by_vmap, draw, per_image_gradients
from sfumato.dpsgd.lora import add_lora
from sfumato.dpsgd.per_image import (
    Convolution,
    NoRuleError,
    PerImage,
    grouped_weight_gradients,
    shifted_weight_gradients,
)
from sfumato.settings.noise_levels import LogNormal
from sfumato.settings.training import Architecture

IMAGES = 3
DRAWS = 2


def rows_of(
    module: nn.Module, x: Tensor, use=None, names: set[str] | None = None
) -> dict[str, Tensor]:
    """Return the per-image gradients of a sum of squares.

    x: (K·B, ...); row k·B + b is the k-th draw of image b.
    """
    parameters = {
        name: value.detach()
        for name, value in module.named_parameters()
        if names is None or name in names
    }
    mode = PerImage(parameters, IMAGES)
    with mode:
        y = functional_call(module, parameters, (x,)) if use is None else use(parameters, x)
    rows = torch.autograd.grad(y.square().sum(), list(mode.rows.values()), materialize_grads=True)
    return dict(zip(parameters, rows, strict=True))


def loop_of(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for image in range(IMAGES):
        module.zero_grad()
        module(x[image::IMAGES]).square().sum().backward()
        for name, value in module.named_parameters():
            found[name].append(value.grad.clone())
    return {name: torch.stack(parts) for name, parts in found.items()}


class Indexed(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())


LAYERS = {
    "linear": (lambda: nn.Linear(4, 5), (4,)),
    "linear without a bias, on tokens": (lambda: nn.Linear(4, 5, bias=False), (7, 4)),
    "linear on a grid": (lambda: nn.Linear(4, 5), (2, 3, 4)),
    "convolution": (lambda: nn.Conv2d(4, 20, 3, padding=1), (4, 5, 5)),
    "convolution to few channels": (lambda: nn.Conv2d(4, 3, 3, padding=1), (4, 5, 5)),
    "convolution with a stride": (
        lambda: nn.Conv2d(4, 6, (3, 2), 2, padding=(1, 0), dilation=(1, 2)),
        (4, 8, 9),
    ),
    "convolution of single pixels": (lambda: nn.Conv2d(4, 6, 1), (4, 5, 5)),
    "single pixels with a stride": (lambda: nn.Conv2d(4, 6, 1, stride=2), (4, 5, 5)),
    "norm": (lambda: GroupNorm(8), (8, 3, 3)),
    "linear, used twice": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2), (4,)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_the_gradients_of_a_layer_equal_a_loops(name, layout):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    module = make().double()
    x = torch.randn(DRAWS * IMAGES, *shape, dtype=torch.float64)
    if layout == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    expected = loop_of(module, x)
    for name, rows in rows_of(module, x).items():
        assert torch.allclose(rows, expected[name], atol=1e-10), name


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "given", [{}, {"stride": 2, "padding": (2, 1)}, {"dilation": (2, 1), "padding": 1}]
)
def test_shifted_and_grouped_weight_gradients_are_the_same(given, layout):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, (3, 2), **given).double()
    x = torch.randn(DRAWS * IMAGES, 3, 9, 8, dtype=torch.float64).to(memory_format=layout)
    gradient = torch.randn_like(layer(x)).to(memory_format=layout)
    geometry = list(layer.stride), list(layer.padding), list(layer.dilation)
    grouped = grouped_weight_gradients(
        gradient.contiguous(), x.contiguous(), layer.weight, geometry, IMAGES
    )
    shifted = shifted_weight_gradients(gradient, x, layer.weight, geometry, IMAGES)
    assert shifted.shape == (IMAGES, *layer.weight.shape) and torch.allclose(
        shifted, grouped, atol=1e-12
    )


@pytest.mark.parametrize(
    "given", [{"padding": 1}, {"stride": 2, "padding": (2, 1)}, {"dilation": (2, 1)}]
)
def test_by_products_an_image_of_infinities_touches_no_other_row(given):
    """The computation of a row must not multiply other images by zero, because zero times infinity
    is NaN.
    """
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, (3, 2), **given)
    x = torch.randn(DRAWS * IMAGES, 3, 9, 8)
    gradient = torch.randn_like(layer(x))
    geometry = (list(layer.stride), list(layer.padding), list(layer.dilation))
    before = shifted_weight_gradients(gradient, x, layer.weight, geometry, IMAGES)
    x[1::IMAGES] = torch.inf
    after = shifted_weight_gradients(gradient, x, layer.weight, geometry, IMAGES)
    others = torch.arange(IMAGES) != 1
    assert not after[1].isfinite().any() and torch.equal(after[others], before[others])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_has_the_same_gradients_by_products(autocast, monkeypatch):
    ways = []
    for way in (shifted_weight_gradients, grouped_weight_gradients):
        spy = partial(lambda way, *given: ways.append(way) or way(*given), way)
        monkeypatch.setattr(per_image, way.__name__, spy)
    model = network((1,))
    parameters = dict(model.named_parameters())
    images = torch.rand(5, 1, 8, 8)
    labels = torch.arange(5) % 4
    drawn = draw(model, images, 3, LogNormal(), torch.Generator().manual_seed(0))
    rows = []
    for products in (False, True):
        model.use_products = products
        ways.clear()
        found = per_image_gradients(model, parameters, images, labels, drawn, autocast)
        assert (shifted_weight_gradients in ways) == products
        rows.append(torch.cat([value.flatten(1) for value in found.values()], dim=1))
    apart = torch.linalg.vector_norm(rows[1] - rows[0], dim=1) / torch.linalg.vector_norm(
        rows[0], dim=1
    )
    assert apart.max() < (2e-2 if autocast else 1e-5)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"padding": 1},
        {"padding": (2, 1)},
        {"padding": 3},
        {"stride": 2},
        {"dilation": 2, "padding": 1},
    ],
)
def test_a_convolutions_input_gradient_is_equal_in_half(given, half):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 6, (3, 2), **given)
    x = torch.randn(2, 8, 9, 8).bfloat16().float().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())
    y = layer(x)
    gradient = torch.randn_like(y).bfloat16()
    (expected,) = torch.autograd.grad(y, x, gradient.float())
    kind = Convolution((list(layer.stride), list(layer.padding), list(layer.dilation)))
    precision = torch.bfloat16 if half else torch.float32
    found = kind.to_input(*(value.detach().to(precision) for value in (gradient, x, layer.weight)))
    assert found.dtype == precision and found.shape == x.shape
    assert (found.float() - expected).abs().max() < (1e-2 if half else 1e-5) * expected.abs().max()


def test_each_image_has_its_own_rows_of_a_table():
    torch.manual_seed(0)
    table = Indexed(5, 3).double()
    index = torch.tensor([0, 4, 4, 0, 2, 4])
    expected = loop_of(table, index.double())["weight"]
    assert torch.allclose(rows_of(table, index.double())["weight"], expected, atol=1e-12)
    assert not expected[1, :2].any()  # image 1 has labels 4 and 2


@pytest.mark.parametrize("trained", [{"weight"}, {"bias"}])
def test_a_frozen_part_of_a_layer_stays_so(trained):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3)
    x = torch.randn(DRAWS * IMAGES, 4, 5, 5)
    expected = loop_of(layer, x)
    rows = rows_of(layer, x, names=trained)
    assert set(rows) == trained
    assert all(torch.allclose(value, expected[name], atol=1e-4) for name, value in rows.items())


def test_an_unused_weight_has_no_gradient():
    def use(weights, x):
        return (
            F.linear(x, weights["weight"])
            * weights["bias"].shape[0]
            * weights["weight"].dtype.itemsize
        )

    rows = rows_of(nn.Linear(4, 5), torch.randn(DRAWS * IMAGES, 4), use)
    assert not rows["bias"].any() and rows["weight"].any()


@pytest.mark.parametrize(
    "use",
    [
        lambda weight, x: x * weight.sum(),
        lambda weight, x: F.linear(x, weight * 2),
        lambda weight, x: F.linear(x, weight.t()),
        lambda weight, x: F.linear(x, weight[:2]),
        lambda weight, x: F.linear(x, torch.cat([weight, weight])),
        lambda weight, x: F.linear(input=x, weight=torch.stack(tensors=(weight,))[0]),
        lambda weight, x: x @ weight,
        lambda weight, x: weight.expand(4, 4).sum() * x,
        lambda weight, x: sum(part.sum() for part in weight.unbind()) * x,
        lambda weight, x: sum(part.sum() for part in weight) * x,
        lambda weight, x: F.conv2d(x[:, :, None, None], weight[:, :, None, None][:, :1], groups=4),
        lambda weight, x: F.conv2d(x[:, :, None, None], weight[:, :, None, None], padding="same"),
        lambda weight, x: F.embedding(torch.zeros(len(x), 2, dtype=torch.long), weight),
        lambda weight, x: F.embedding(torch.zeros(len(x), dtype=torch.long), weight, padding_idx=0),
    ],
)
def test_a_use_without_a_rule_is_refused(use):
    """If such a use were accepted, a part of the weight's gradient would be missing, without any
    sign of it.
    """
    with pytest.raises(NoRuleError, match="per-image gradients do not support"):
        layer = nn.Linear(4, 4, bias=False)
        x = torch.randn(DRAWS * IMAGES, 4)
        rows_of(layer, x, lambda weights, x: use(weights["weight"], x))


NETWORKS = {
    "digits": {
        "resolution": 8,
        "channels": 1,
        "width": 32,
        "multipliers": (1, 2),
        "attention": (1,),
    },
    "unshuffled": {
        "resolution": 12,
        "channels": 3,
        "multipliers": (1, 2, 2),
        "attention": (0, 2),
        "unshuffle": 2,
    },
    "oblong": {
        "resolution": (6, 10),
        "channels": 1,
        "multipliers": (1, 2, 2),
        "attention": (1,),
        "unshuffle": 2,
    },
    "deep": {"resolution": 7, "channels": 2, "multipliers": (1, 1), "attention": (), "blocks": 2},
}  # the levels of the second network have sides of 6, 3 and 2 pixels


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_has_the_gradients_that_vmap_finds(name, adapted):
    """vmap never mixes the gradients of different images. So if the network computes the same
    gradients by its layers, it does not mix them either.
    """
    torch.manual_seed(0)
    model = perturbed(build_unet(classes=4, **{"width": 8, **NETWORKS[name]}))
    if adapted:
        matrices = [
            f"{path}.weight" for path, layer in model.named_modules() if type(layer) is nn.Linear
        ]
        add_lora(model, matrices, 2, seed=0)
        with torch.no_grad():
            for path, value in model.named_parameters():
                if path.endswith(".B"):
                    value.normal_(std=0.1)
    parameters = {path: value for path, value in model.named_parameters() if value.requires_grad}
    images = torch.rand(IMAGES, DRAWS, *model.shape)
    noise = torch.randn(IMAGES, DRAWS, *model.shape)
    batch = (images, torch.randint(5, (IMAGES, DRAWS)), torch.rand(IMAGES, DRAWS) + 0.1, noise)
    rows = by_layers(model, parameters, *batch)
    expected = by_vmap(model, parameters, *batch)
    assert list(rows) == list(parameters)
    for path, value in expected.items():
        assert torch.allclose(
            rows[path], value, atol=1e-5 * max(1, float(value.detach().abs().max()))
        ), path


@pytest.mark.parametrize("autocast", [False, True])
def test_a_gradient_depends_on_neither_place_nor_company(autocast):
    """If one image is left out, others get other places in the batch.

    If rounding depended on the place, the sum of thousands of images would move by more than the
    clip.
    """
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = perturbed(
        UNet(28, 1, 10, Architecture(width=32, multipliers=(1, 2), attention=(1,), unshuffle=2)),
        0.02,
    )
    parameters = dict(model.named_parameters())
    count = 16
    image = torch.rand(1, 1, 28, 28, generator=generator)
    drawn = draw(model, torch.empty(count, 1, 28, 28), DRAWS, LogNormal(), generator)
    labels = torch.randint(10, (count,), generator=generator)
    found = []
    for place in (0, 1, 7, count - 1):
        images = torch.cat([image, torch.rand(count - 1, 1, 28, 28, generator=generator)])
        order = torch.arange(count).roll(place)
        rows = per_image_gradients(
            model, parameters, images[order], labels[order], drawn.rows(order), autocast
        )
        found.append(torch.cat([value[place].flatten() for value in rows.values()]))
    apart = [torch.linalg.vector_norm(other - found[0]) for other in found[1:]]
    assert max(apart) <= 1e-6 * torch.linalg.vector_norm(found[0])


def test_gradients_at_foreign_parameters_are_refused():
    """Each layer computes gradients only for its own weights. If copies of the weights were
    accepted, all their gradients would be 0.
    """
    model = network()
    copies = {name: value.detach().clone() for name, value in model.named_parameters()}
    batch = (
        torch.rand(1, 1, 1, 8, 8),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.ones(1, 1),
        torch.rand(1, 1, 1, 8, 8),
    )
    with pytest.raises(ValueError, match="must be parameters of the model"):
        by_layers(model, copies, *batch)
