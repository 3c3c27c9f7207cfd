"""Compare Opacus's results for a ledger's charges with our own accountants."""

import math
import random
from collections.abc import Callable

import pytest

from sfumato.privacy import opinions
from sfumato.privacy.events import Mechanism
from sfumato.privacy.opinions import (
    Opinion,
    all_opinions,
    disagreements,
    kept_opinions,
    own_opinions,
)


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
    return records(
        *found, adjacency=choose.choice(["add-or-remove-one", "zero-out-one"])
    ), 10 ** choose.uniform(-7, -4)


@pytest.mark.parametrize("seed", range(5))
def test_opacus_agrees_on_compositions(seed):
    rows, delta = drawn(seed)
    found = all_opinions(rows, delta)
    rdp = found["Opacus RDP"]
    prv = found["Opacus PRV"]
    pld = found["pld"].epsilon
    assert rdp.epsilon == pytest.approx(rdp.ours, rel=0.01) and rdp.epsilon <= rdp.ours * (1 + 1e-6)
    assert (
        pld * (1 - 1e-3) <= prv.epsilon <= pld * 1.001 + prv.error and prv.error < 0.02 * pld + 1e-3
    )
    assert (
        disagreements(found, "rdp")
        == disagreements(found, "rdp_classic")
        == disagreements(found, "pld")
        == []
    )


@pytest.fixture
def mistaken(monkeypatch) -> Callable[[str, float], None]:
    """Return a function that makes one of our accountants wrong by a factor.

    name: the accountant, or "curve" for the Rényi curve.
    """
    curve = opinions.rdp_curve
    bound = opinions.epsilon

    def by(name: str, factor: float) -> None:
        monkeypatch.setattr(
            opinions, "rdp_curve", lambda events: (factor if name == "curve" else 1) * curve(events)
        )
        monkeypatch.setattr(
            opinions, "epsilon", lambda *given: bound(*given) * (factor if name in given else 1)
        )

    return by


def test_an_accountant_that_forgets_a_part_is_refuted(mistaken):
    rows = records(
        Mechanism(noise_multiplier=2.0), Mechanism(noise_multiplier=3.0, sample_rate=0.2, uses=20)
    )
    mistaken("curve", 0.9)
    found = all_opinions(rows, 1e-5)
    assert "Opacus RDP" in disagreements(found, "rdp")[0] and disagreements(found, "pld") == []
    mistaken("pld", 0.95)
    found = all_opinions(rows, 1e-5)
    assert (
        "one of the two is wrong" in disagreements(found, "pld")[0]
        and disagreements(found, "rdp") == []
    )


def test_opinions_are_kept_for_their_records_only(tmp_path, monkeypatch):
    rows = records(
        Mechanism(noise_multiplier=2.0), Mechanism(noise_multiplier=3.0, sample_rate=0.2, uses=20)
    )
    state = tmp_path / "state"
    first = kept_opinions(rows, 1e-5, "exact", state)
    assert not state.exists(), "a stranger has no state directory"
    state.mkdir()
    assert kept_opinions(rows, 1e-5, "exact", state) == first == all_opinions(rows, 1e-5, "exact")
    asked = []
    monkeypatch.setattr(opinions, "all_opinions", lambda *given: asked.append(given) or {})
    assert kept_opinions(rows, 1e-5, "exact", state) == first and not asked
    changed = [rows[0], rows[1] | {"event": rows[1]["event"] | {"noise_multiplier": 3.5}}]
    for given in ((changed, 1e-5, "exact"), (rows, 1e-6, "exact"), (rows, 1e-5, "rdp")):
        assert kept_opinions(*given, state) == {}
        assert asked.pop() == given
    (kept,) = [file for file in state.rglob("*.json") if "Opacus" in file.read_text()]
    assert kept.stat().st_mode & 0o077 == 0
    kept.write_text("{}}")
    assert kept_opinions(rows, 1e-5, "exact", state) == {} and len(asked) == 1, (
        "a damaged file is made again"
    )


def test_a_larger_upper_bound_within_its_error_refutes_nothing():
    for value, error, wrong in (
        (10.05, 0.0, False),
        (10.15, 0.1, False),
        (10.15, 0.0, True),
        (float("nan"), 0, True),
    ):
        assert Opinion(value, "pld", 10.0, error).disagrees is wrong
    assert not Opinion(None, "pld", 10.0).disagrees and str(Opinion(None, "pld", 10.0)) == "n/a"


def test_what_opacus_cannot_express_is_not_an_opinion():
    loud = all_opinions(records(Mechanism(noise_multiplier=0.06, sample_rate=0.9, uses=50)), 1e-5)
    long = opinions.opacus_prv([Mechanism(noise_multiplier=1e5, uses=10**9)], 1e-5, 2.0)
    assert (
        str(loud["Opacus PRV"]) == str(long) == str(all_opinions([], 1e-5)["Opacus PRV"]) == "n/a"
    )
    assert disagreements(loud, "pld") == []


GAUSSIANS = records(Mechanism(noise_multiplier=2.0), Mechanism(noise_multiplier=30.0, uses=60))
DRAWN = records(
    Mechanism(noise_multiplier=2.0), Mechanism(noise_multiplier=3.0, sample_rate=0.2, uses=20)
)


@pytest.mark.parametrize("rows", [GAUSSIANS, DRAWN, records(Mechanism(noise_multiplier=0.05))])
def test_distributions_agree_on_an_exact_ledger(rows):
    found = all_opinions(rows, 1e-5, "exact")
    assert disagreements(found, "exact") == []
    assert (
        found["exact"].epsilon <= found["pld"].epsilon + 1e-8
        and found["exact"].epsilon <= found["rdp"].epsilon
    )


@pytest.mark.parametrize("delta", [1e-14, 2e-15, 1e-16])
@pytest.mark.parametrize("rows", [GAUSSIANS, DRAWN])
def test_a_tiny_delta_refutes_no_valid_ledger(rows, delta):
    assert disagreements(own_opinions(rows, delta, "exact"), "exact") == []
    assert all(math.isfinite(opinion.ours) for opinion in own_opinions(rows, delta).values())


def test_too_small_an_exact_bound_is_refuted(mistaken):
    mistaken("exact", 0.95)
    refuted = disagreements(all_opinions(GAUSSIANS, 1e-5, "exact"), "exact")
    assert (
        len(refuted) == 2
        and refuted[0].startswith("pld computes")
        and refuted[1].startswith("Opacus PRV computes")
    )
    refuted = disagreements(all_opinions(DRAWN, 1e-5, "exact"), "exact")
    assert any(sentence.startswith("Opacus PRV computes") for sentence in refuted)


def test_an_exact_bound_above_renyis_refutes_only_exact(mistaken):
    mistaken("rdp", 0.8)
    found = all_opinions(GAUSSIANS, 1e-5, "exact")
    assert "exact computes epsilon=" in disagreements(found, "exact")[0]
    assert disagreements(all_opinions(GAUSSIANS, 1e-5), "rdp") == []
