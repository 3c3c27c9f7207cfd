"""Low-rank adapters: they start at zero, change what the network computes, and merge into plain
weights.
"""

import json
from pathlib import Path

import pytest
import torch
from small_network import network
from torch import nn
from torch.func import functional_call, grad, vmap

from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.gradients import draw, per_draw, per_image_gradients
from sfumato.dpsgd.lora import LoraLinear, adapted_layers, add_lora, save_adapter
from sfumato.dpsgd.trainable import candidates
from sfumato.errors import ConfigError, DataError
from sfumato.release.synthesizer import load_synthesizer
from sfumato.settings.noise_levels import LogNormal

NAMES = [
    "middle.0.attention.q.weight",
    "up.1.attention.v.weight",
    "down.0.block.modulation.weight",
    "noise.2.weight",
]


RANK = 3
SCALE = 0.5  # not 1, so that a product without the scale is noticed


def inputs(count: int = 3):
    torch.manual_seed(1)
    return torch.randn(count, 1, 8, 8), torch.randn(count), torch.randint(4, (count,))


def adapted(model: nn.Module, names: list[str] = NAMES) -> nn.Module:
    """Add adapters to the model. Their B is not zero, as after training."""
    add_lora(model, names, RANK, 0, SCALE)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.B.normal_(std=0.1)
    return model


class Foreign(nn.Module):
    """A network whose layers have the names of public text-to-image models."""

    def __init__(self) -> None:
        super().__init__()
        attention = nn.Module()
        attention.to_q, attention.to_out = (
            nn.Linear(6, 6, bias=False),
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0)),
        )
        self.transformer_blocks = nn.ModuleList([nn.ModuleDict({"attn1": attention})])

    def forward(self, x):
        attention = self.transformer_blocks[0]["attn1"]
        return attention.to_out(attention.to_q(x))  # (B, 49, 6)


FOREIGN = ["transformer_blocks.0.attn1.to_q.weight", "transformer_blocks.0.attn1.to_out.0.weight"]


def test_adapters_start_as_nothing():
    model = network()
    foreign = Foreign()
    x = inputs()
    before = dict(model.named_parameters())
    expected = model(*x)
    for name in [*NAMES, *FOREIGN]:
        net = foreign if name in FOREIGN else model
        path = name.removesuffix(".weight")
        plain = net.get_submodule(path)
        row = torch.randn(5, plain.weight.shape[1])
        answer = plain(row)
        add_lora(net, [name], RANK, 0, SCALE)
        assert torch.equal(net.get_submodule(path)(row), answer), name  # equal to the last bit
    # In other layers, rounding depends on where their tensors lie in memory
    torch.testing.assert_close(model(*x), expected, rtol=0, atol=1e-5)
    assert list(adapted_layers(model)) == sorted(
        NAMES, key=list(dict(model.named_parameters())).index
    )
    for layer in adapted_layers(model).values():
        assert not layer.B.any() and layer.A.shape[1] == layer.B.shape[0] == 3
    after = dict(model.named_parameters())
    adapters = {name.replace(".weight", part) for name in NAMES for part in (".A", ".B")}
    frozen = {name.replace(".weight", part) for name in NAMES for part in (".weight", ".bias")}
    assert {name for name, value in after.items() if value.requires_grad} == after.keys() - frozen
    assert (
        all(after[name] is value for name, value in before.items())
        and after.keys() - before.keys() == adapters
    )


def test_the_seed_draws_the_adapters_and_nothing_else_does():
    drawn = []
    for seed, state in ((5, 1), (5, 2), (6, 1)):
        model = network()
        torch.manual_seed(state)
        expected = torch.rand(1)
        torch.manual_seed(state)
        add_lora(model, NAMES, RANK, seed, SCALE)
        assert torch.equal(torch.rand(1), expected)  # the global generator is unchanged
        drawn.append([layer.A for layer in adapted_layers(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(drawn[0], drawn[2], strict=True))


@pytest.mark.parametrize("name", [*NAMES, *FOREIGN])
def test_an_adapter_does_what_its_product_does(name):
    foreign = name in FOREIGN
    torch.manual_seed(0)
    model, x = (Foreign(), (torch.randn(2, 49, 6),)) if foreign else (network(), inputs())
    plain = model(*x)
    changed = adapted(model, [name])(*x)
    assert (changed - plain).abs().max() > 1e-4  # the adapter changes the output
    layer = adapted_layers(model)[name]
    with torch.no_grad():
        layer.weight.add_(0.5 * (layer.A @ layer.B).view_as(layer.weight))
        layer.B.zero_()
    torch.testing.assert_close(model(*x), changed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draws", [1, 4])
def test_per_image_gradients_equal_a_loops(draws):
    model = adapted(network())
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, 1, 8, 8, generator=generator)
    labels = torch.randint(4, (5,), generator=generator)
    drawn = draw(model, images, draws, LogNormal(), generator, label_dropout=0.2)
    parameters = {
        name: value for name, value in model.named_parameters() if name.endswith((".A", ".B"))
    }
    assert len(parameters) == 2 * len(NAMES)
    rows = per_image_gradients(model, parameters, images, labels, drawn)
    for i in range(5):
        shown = torch.where(drawn.drop[i], model.classes, labels[i])
        loss = per_image_loss(
            model, per_draw(images, drawn)[i], shown, drawn.levels[i], drawn.noise[i]
        ).mean()
        expected = torch.autograd.grad(loss, list(parameters.values()))
        for name, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(
                rows[name][i], value, rtol=1e-3, atol=1e-5 * float(value.abs().max())
            )


def test_gradients_of_foreign_layers_equal_a_loops():
    torch.manual_seed(0)
    model = adapted(Foreign(), FOREIGN)
    assert [type(layer) for layer in adapted_layers(model).values()] == [LoraLinear, LoraLinear]
    parameters = {
        name: value for name, value in model.named_parameters() if name.endswith((".A", ".B"))
    }
    x = torch.randn(4, 49, 6)

    def loss(parameters, row):
        return functional_call(model, parameters, (row[None],)).square().sum()

    rows = vmap(grad(loss), in_dims=(None, 0))(
        {name: value.detach() for name, value in parameters.items()}, x
    )
    for i in range(4):
        expected = torch.autograd.grad(
            model(x[i : i + 1]).square().sum(), list(parameters.values())
        )
        for name, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(rows[name][i], value, rtol=1e-3, atol=1e-4)


def test_a_rank_above_the_matrix_is_refused_by_name():
    model = network()
    with pytest.raises(
        ConfigError, match=r"rank 9 exceeds the shorter side of down\.0\.attention\.q\.weight, a"
    ):
        add_lora(model, ["noise.2.weight", "down.0.attention.q.weight"], 9, seed=0)
    assert not adapted_layers(model)
    assert all(value.requires_grad for value in model.parameters())


@pytest.mark.parametrize(
    "name", ["middle.0.attention.q.bias", "middle.0.attention.q", "weight", "", "nowhere.weight"]
)
def test_a_name_that_is_no_matrix_is_refused(name):
    with pytest.raises(ConfigError, match="is not a weight of a layer"):
        add_lora(network(), [name], RANK, 0, SCALE)


def test_a_layer_whose_weight_is_used_past_it_is_refused():
    # nn.MultiheadAttention reads out_proj.weight and never calls out_proj: an adapter there would
    # train nothing
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "conv": nn.Conv2d(4, 4, 1),
            "norm": nn.BatchNorm2d(4),
        }
    )
    for name in ("attention.out_proj.weight", "conv.weight", "norm.weight"):
        with pytest.raises(ConfigError, match="can be adapted"):
            add_lora(model, [name], 2, seed=0)
    twice = network()
    add_lora(twice, NAMES[:1], RANK, 0, SCALE)
    with pytest.raises(ConfigError, match="can be adapted"):
        add_lora(twice, NAMES[:1], RANK, 1, SCALE)


@pytest.fixture
def saved(tmp_path):
    """Save a network, and adapters for it.

    Returns the folder of the adapters, the folder of the network, and the adapted network's output.
    """
    model = network()
    model.save(tmp_path / "pretrain")
    adapted(model, candidates(model))
    (tmp_path / "finetune").mkdir()
    save_adapter(model, tmp_path / "finetune", tmp_path / "pretrain" / "weights.safetensors")
    return tmp_path / "finetune", tmp_path / "pretrain", model(*inputs())


def test_adapters_survive_the_disk(saved):
    finetune, pretrain, expected = saved
    content = json.loads((finetune / "adapter.json").read_text())
    assert content.keys() == {"base_sha256", "rank", "scale", "matrices"}
    assert (content["rank"], content["scale"]) == (3, 0.5)
    assert sorted(path.name for path in finetune.iterdir()) == [
        "adapter.json",
        "adapter.safetensors",
    ]
    assert (finetune / "adapter.safetensors").stat().st_size < 0.5 * (
        pretrain / "weights.safetensors"
    ).stat().st_size
    loaded = load_synthesizer(finetune, pretrain)
    assert type(loaded) is UNet and not adapted_layers(loaded)
    torch.testing.assert_close(loaded(*inputs()), expected, rtol=1e-4, atol=1e-5)
    # A directory with weights of its own needs no base
    plain = load_synthesizer(pretrain, saved[0])
    torch.testing.assert_close(plain(*inputs()), network()(*inputs()))


def test_adapters_on_another_base_are_refused(saved):
    finetune, pretrain, _ = saved
    network(seed=1).save(pretrain)
    with pytest.raises(DataError, match=r"trained on weights with sha256 .*restore the earlier"):
        load_synthesizer(finetune, pretrain)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.pop("scale"), "cannot be read"),
        (lambda content: content["matrices"].pop(), "does not contain exactly"),
        (lambda content: content.update(scale=float("nan")), "NaN and infinity"),
        (lambda content: content.update(matrices="middle"), "does not contain exactly"),
        (lambda content: content.update(rank=2), "do not fit the model"),
        (lambda content: content.update(rank=99), "do not fit the model"),
        (lambda content: content.update(rank=-1), "cannot be read"),
    ],
)
def test_an_edited_description_is_refused(saved, edit, message):
    finetune, pretrain, _ = saved
    content = json.loads((finetune / "adapter.json").read_text())
    edit(content)
    (finetune / "adapter.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_synthesizer(finetune, pretrain)


def test_missing_or_damaged_files_are_refused(saved):
    finetune, pretrain, _ = saved
    for damage in (lambda file: file.write_bytes(b"no tensors"), Path.unlink):
        damage(finetune / "adapter.safetensors")
        with pytest.raises(DataError, match="cannot be read"):
            load_synthesizer(finetune, pretrain)
