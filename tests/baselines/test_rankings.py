"""Selectors without data: random, and by SynFlow."""

import math

import pytest
import torch
from small_network import QKV, network

from sfumato.baselines.selectors import public_ranking, synflow_scores
from sfumato.errors import ConfigError


def test_a_random_order_follows_only_its_seed():
    orders = []
    for seed, state in ((1, 0), (1, 9), (2, 0)):
        model = network()
        torch.manual_seed(state)
        orders.append(public_ranking(model, "random-lora", seed))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(QKV)
    assert public_ranking(network(), "salient-lora", 0) is None


@pytest.mark.parametrize("kind", ["random-lora", "synflow-lora"])
def test_a_model_without_attention_has_nothing_to_rank(kind):
    with pytest.raises(ConfigError, match=r"model\.attention"):
        public_ranking(network(attention=()), kind, 0)


def test_synflow_needs_no_data_and_ranks_by_its_scores():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = synflow_scores(model, QKV)
    assert scores == pytest.approx(synflow_scores(model, QKV), rel=1e-9)  # nothing random
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(math.isfinite(score) and score > 0 for score in scores.values())
    assert public_ranking(model, "synflow-lora", 7) == sorted(QKV, key=lambda name: -scores[name])
    with torch.no_grad():  # a matrix that nothing flows through
        silent = network()
        silent.get_parameter(QKV[2]).zero_()
        negated = network()
        negated.get_parameter(QKV[2]).neg_()
    assert synflow_scores(silent, QKV)[QKV[2]] == 0
    assert synflow_scores(negated, QKV) == pytest.approx(scores, rel=1e-9)  # absolute weights
