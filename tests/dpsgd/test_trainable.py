"""Exactly the chosen parameters of a network are trained.

If training changes any other parameter, or leaves a chosen one unchanged, an error is raised.
"""

import math

import pytest
import torch
from small_network import CHOSEN, PLACES, QKV, network
from torch import nn

from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.run import State, update
from sfumato.dpsgd.trainable import candidates, check_trained, choose_trainable, how_many
from sfumato.errors import ConfigError, DataError, SfumatoError
from sfumato.settings.dpsgd import SALIENT, Finetune


def settings(trainable: str, **more) -> Finetune:
    return Finetune(trainable=trainable, microbatch_size=4, draws=1, learning_rate=1e-3, **more)


def adapters(names: list[str]) -> list[str]:
    return [name.replace(".weight", part) for name in names for part in (".A", ".B")]


def test_candidates_are_query_key_and_value_of_each_attention():
    assert candidates(network()) == QKV
    assert [
        f"{place}.attention.{part}.weight" for place in PLACES for part in ("q", "k", "v")
    ] == QKV


def test_candidates_of_a_public_text_to_image_model():
    block = nn.ModuleDict({"attn1": nn.Module(), "attn2": nn.Module(), "ff": nn.Linear(4, 4)})
    for part in ("attn1", "attn2"):
        for name in ("to_q", "to_k", "to_v"):
            setattr(block[part], name, nn.Linear(4, 4, bias=False))
        block[part].to_out = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    model = nn.Module()
    parts = {
        "transformer_blocks": nn.ModuleList([block]),
        "resnets": nn.ModuleList([nn.Linear(4, 4)]),
    }
    model.down_blocks = nn.ModuleList([nn.ModuleDict(parts)])
    path = "down_blocks.0.transformer_blocks.0"
    assert candidates(model) == [
        f"{path}.{part}.{name}.weight"
        for part in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v")
    ]


@pytest.mark.parametrize(
    ("ratio", "total", "count"),
    [(0.3, 15, 5), (0.01, 15, 1), (1.0, 15, 15), (0.5, 5, 3), (0.5, 1, 1), (0.3, 10, 3)],
)
def test_a_part_is_rounded_and_at_least_one(ratio, total, count):
    assert how_many(ratio, total) == count


def ranked(chosen: list[str]) -> list[str]:
    """Return a ranking of the candidates that begins with the chosen ones."""
    return [*chosen, *(name for name in QKV if name not in chosen)]


def expected(kind: str, model: UNet) -> list[str]:
    everything = [name for name, _ in model.named_parameters()]
    return {
        "all": everything,
        "attention": [name for name in everything if ".attention." in name],
        "attention-lora": adapters(QKV),
        "salient": CHOSEN,
    }.get(kind, adapters(CHOSEN))


@pytest.mark.parametrize("kind", ["all", "attention", "attention-lora", "salient", "salient-lora"])
def test_exactly_the_chosen_parameters_are_trained(kind):
    model = network()
    wanted = expected(kind, model)
    # The order of the ranked names has no influence on the set
    names = choose_trainable(model, settings(kind), ranked(CHOSEN[::-1]), seed=0)
    reference = network().named_parameters()  # adapters leave the weights of the base unchanged
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in reference)
    assert names == [name for name, value in model.named_parameters() if value.requires_grad]
    assert sorted(names) == sorted(wanted)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = State(model, settings(kind), public_batch=16.0, autocast=False)
    assert list(run.parameters) == names
    update(run, torch.randn(run.size, generator=torch.Generator().manual_seed(0)))
    check_trained(before, model, names)  # raises for any other outcome
    moved = [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert moved == names
    with pytest.raises(SfumatoError, match="did not change"):
        check_trained(model.state_dict(), model, names)


@pytest.mark.parametrize("kind", SALIENT)
def test_salient_sets_need_a_saliency_release_of_this_model(kind):
    with pytest.raises(ConfigError, match=rf"trainable={kind} .*add saliency to"):
        choose_trainable(network(), settings(kind), None, 0)
    with pytest.raises(
        DataError, match=r"contains down\.7\.attention\.q\.weight, which is not in this model"
    ):
        choose_trainable(
            network(), settings(kind), ranked([*CHOSEN, "down.7.attention.q.weight"]), 0
        )


def test_a_model_without_attention_has_nothing_for_these_sets():
    bare = network(attention=())
    with pytest.raises(ConfigError, match=r"has no attention.*model\.attention"):
        candidates(bare)
    for kind in ("attention", "attention-lora"):
        with pytest.raises(ConfigError, match=r"model\.attention"):
            choose_trainable(bare, settings(kind), None, 0)


def trained(names: list[str]):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).add_(1)
    return before, model


def test_a_lost_selection_and_an_unknown_name_are_caught():
    before, model = trained(CHOSEN[:4])
    check_trained(before, model, CHOSEN[:4])
    with pytest.raises(
        SfumatoError,
        match=r"trained parameters did not change, such as up\.1\.attention\.v\.weight",
    ):
        check_trained(before, model, CHOSEN)
    with pytest.raises(SfumatoError, match="attention is missing from the model"):
        check_trained(before, model, [*CHOSEN, "attention"])
    before.pop("conv_in.weight")
    with pytest.raises(SfumatoError, match=r"conv_in\.weight is missing from the model"):
        check_trained(before, model, CHOSEN)


def test_a_frozen_weight_that_moved_is_caught_to_the_last_bit():
    before, model = trained(CHOSEN)
    with torch.no_grad():
        bias = model.get_parameter("down.0.attention.q.bias")
        bias[0] = torch.nextafter(bias[0], torch.tensor(math.inf))
    with pytest.raises(
        SfumatoError, match=r"frozen parameters changed, such as down\.0\.attention\.q\.bias"
    ):
        check_trained(before, model, CHOSEN)
