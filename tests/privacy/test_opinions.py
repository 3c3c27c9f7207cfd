"""What Opacus makes of a ledger's charges, beside our own accountants."""

import random

import pytest

from sfumato.privacy import opinions
from sfumato.privacy.events import Mechanism
from sfumato.privacy.opinions import Opinion, all_opinions, disagreements


def records(*mechanisms: Mechanism, adjacency: str = "add-or-remove-one") -> list[dict]:
    return [{"event": mechanism.to_json(), "adjacency": adjacency} for mechanism in mechanisms]


def drawn(seed: int) -> tuple[list[dict], float]:
    choose = random.Random(seed)
    found = [
        Mechanism(
            noise_multiplier=10 ** choose.uniform(0.2, 1.5),
            sample_rate=choose.choice([1.0, choose.uniform(0.005, 0.5)]),
            uses=choose.choice([1, 5, 100]),
        )
        for _ in range(choose.randint(1, 3))
    ]
    return records(*found, adjacency=choose.choice(["add-or-remove-one", "zero-out-one"])), 10 ** choose.uniform(-7, -4)


@pytest.mark.parametrize("seed", range(5))
def test_opacus_agrees_on_compositions(seed):
    rows, delta = drawn(seed)
    found = all_opinions(rows, delta)
    rdp, prv, pld = found["Opacus RDP"], found["Opacus PRV"], found["pld"].epsilon
    assert rdp.epsilon == pytest.approx(rdp.ours, rel=0.01) and rdp.epsilon <= rdp.ours * (1 + 1e-6)
    assert pld * (1 - 1e-3) <= prv.epsilon <= pld * 1.001 + prv.error and prv.error < 0.02 * pld + 1e-3
    assert disagreements(found, "rdp") == disagreements(found, "rdp_classic") == disagreements(found, "pld") == []


def test_an_accountant_that_forgets_a_part_is_refuted_by_the_other_of_its_kind(monkeypatch):
    rows = records(Mechanism(noise_multiplier=2.0), Mechanism(noise_multiplier=3.0, sample_rate=0.2, uses=20))
    curve, bound = opinions.rdp_curve, opinions.epsilon
    monkeypatch.setattr(opinions, "rdp_curve", lambda events: 0.9 * curve(events))
    found = all_opinions(rows, 1e-5)
    assert "Opacus RDP" in disagreements(found, "rdp")[0] and disagreements(found, "pld") == []
    monkeypatch.setattr(opinions, "rdp_curve", curve)
    monkeypatch.setattr(opinions, "epsilon", lambda *given: bound(*given) * (0.95 if "pld" in given else 1))
    found = all_opinions(rows, 1e-5)
    assert "one of the two is wrong" in disagreements(found, "pld")[0] and disagreements(found, "rdp") == []


def test_an_upper_bound_that_is_larger_within_its_own_error_refutes_nothing():
    for value, error, wrong in ((10.05, 0.0, False), (10.15, 0.1, False), (10.15, 0.0, True), (float("nan"), 0, True)):
        assert Opinion(value, "pld", 10.0, error).disagrees is wrong
    assert not Opinion(None, "pld", 10.0).disagrees and str(Opinion(None, "pld", 10.0)) == "n/a"


def test_what_opacus_cannot_express_is_not_an_opinion():
    loud = all_opinions(records(Mechanism(noise_multiplier=0.06, sample_rate=0.9, uses=50)), 1e-5)
    long = opinions.opacus_prv([Mechanism(noise_multiplier=1e5, uses=10**9)], 1e-5, 2.0)
    assert str(loud["Opacus PRV"]) == str(long) == str(all_opinions([], 1e-5)["Opacus PRV"]) == "n/a"
    assert disagreements(loud, "pld") == []
