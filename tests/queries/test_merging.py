"""Merged counts and means of several owners have the distribution of one owner's release of all
images.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from small_record import small_record

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import read_card
from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.features import CLASSIFIER, FeatureMeans
from sfumato.features.cosine import CosineMoments
from sfumato.features.public_network import build_network
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.authorize import ChargeRequest, open_charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import compose, spent_on_one
from sfumato.privacy.policy import SpendingPolicy
from sfumato.queries.count import (
    public_counts,
    public_several,
    query_count,
    read_counts,
    save_counts,
)
from sfumato.queries.feature_means import COSINE, SQUARES, load_means, moment_features, save_means
from sfumato.queries.merging import (
    check_owner,
    merge_counts,
    merge_means,
    merged_budget,
    same_settings,
)
from sfumato.settings.data import Data
from sfumato.settings.stages import QUERIES
from sfumato.storage.artifacts import Artifact, read_artifact, writing
from sfumato.storage.records import Records, widest_declaration

DRAWS = 100
FALSE_ALARM = 1e-4
SEEDED = Data(source="npz", dataset_id="set", holdout_fraction=0.0)


def record(owner, sigma, stage="count", number=0):
    key = f"{owner}{number}".encode().hex().ljust(32, "0")
    return small_record(0, Mechanism(noise_multiplier=sigma), id=key, stage=stage, dataset_id=owner)


def draws_of(folder, digits, rows, sigma):
    """Release DRAWS noisy counts of some digits under one charge. Returns (DRAWS, 10)."""
    folder.mkdir()
    file = folder / "set.npz"
    np.savez(
        file,
        images=digits.images[rows],
        labels=digits.labels[rows],
        classes=np.array(digits.classes),
    )
    data = SEEDED.model_copy(update={"path": str(file), "different_people": True})
    prepare_sensitive(data, folder / "state", folder / "card.json", folder)
    words = dict.fromkeys(("stage", "plan", "settings", "released", "sensitivity"), "count")
    request = ChargeRequest(
        **words, mechanism=Mechanism(noise_multiplier=sigma, uses=DRAWS), max_norm=1.0
    )
    policy = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited")
    charge = open_charge(folder / "state", read_card(folder / "card.json"), request, policy)
    return torch.stack([query_count(charge, 10) for _ in range(DRAWS)])


def write_counts(folder, noisy, sigma, owner, made=public_counts):
    with writing(folder, "count", records=[record(owner, sigma)]) as directory:
        save_counts(made(noisy, sigma), noisy, directory)
    return read_artifact(folder, "count")


def test_merged_counts_are_distributed_as_one_owners_count(tmp_path, digits):
    """A Kolmogorov–Smirnov test compares the noise of 1000 merged counts with one owner's noise.

    The variance of the one owner's noise is the sum of both owners' variances. The false-alarm rate
    is 1 in 10 000.
    """
    first = 6.0
    second = 8.0
    rows = np.arange(300)
    a = draws_of(tmp_path / "a", digits, rows[:100], first)
    b = draws_of(tmp_path / "b", digits, rows[100:], second)
    whole = draws_of(tmp_path / "ab", digits, rows, math.hypot(first, second))
    merged = []
    for i in range(DRAWS):
        parts = [
            write_counts(tmp_path / "x", a[i], first, "a"),
            write_counts(tmp_path / "y", b[i], second, "b"),
        ]
        found = tmp_path / "m"
        found.mkdir(exist_ok=True)
        merge_counts(parts, found)
        merged.append(json.loads((found / "counts.json").read_text())["noisy"])
    true = np.bincount(digits.labels[rows], minlength=10)
    assert (
        stats.ks_2samp((merged - true).ravel(), (whole.numpy() - true).ravel()).pvalue > FALSE_ALARM
    )
    assert (merged - a.numpy() - b.numpy() == 0).all()


def test_merging_again_adds_the_noise_of_all(tmp_path):
    parts = [write_counts(tmp_path / owner, torch.full((3,), 1.0), 3.0, owner) for owner in "abc"]
    owners = [replace(part, records=Records(part.records, ["a", "b"])) for part in parts[:2]]
    with writing(tmp_path / "ab", "count", owners) as directory:
        merge_counts(parts[:2], directory)
    both = read_artifact(tmp_path / "ab", "count")
    assert both.records.owners == ("a", "b") and {*both.records} == {
        *parts[0].records,
        *parts[1].records,
    }
    found = read_counts(both, 10, 3)
    assert found.total == 6 and found.priors.tolist() == pytest.approx([1 / 3] * 3)
    (tmp_path / "abc").mkdir()
    merged = merge_counts([both, parts[2]], tmp_path / "abc")
    # A count below the noise's standard deviation is replaced by this deviation
    assert merged.per_class.tolist() == pytest.approx([math.sqrt(27)] * 3)
    (tmp_path / "at once").mkdir()
    assert merge_counts(parts, tmp_path / "at once").per_class.tolist() == pytest.approx(
        merged.per_class.tolist()
    )


def test_merged_counts_of_several_labels_are_of_the_sum(tmp_path):
    noisy = torch.arange(8.0).double() * 100
    parts = [write_counts(tmp_path / owner, noisy, 3.0, owner, public_several) for owner in "ab"]
    (tmp_path / "ab").mkdir()
    merged = merge_counts(parts, tmp_path / "ab", several=True)
    expected = public_several(torch.arange(8.0).double() * 200, math.hypot(3, 3))
    assert merged.total == expected.total == 600
    assert torch.equal(merged.priors, expected.priors) and torch.equal(
        merged.row_means, expected.row_means
    )


PLAN = SimpleNamespace(shape=(1, 8, 8), classes=("x", "y"), several=False)


def test_merged_means_are_the_sums_over_all_sizes(tmp_path):
    features = CosineMoments((1, 8, 8), **COSINE, flip=False)
    sizes = [100.0, 300.0]
    tables = [torch.rand(features.size, 2) for _ in range(2)]
    releases = []
    for i, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        with writing(
            tmp_path / str(i), "covariance", records=[record("ab"[i], 4.0, "covariance")]
        ) as directory:
            save_means(
                "covariance",
                FeatureMeans(table, features, 4.0 / size),
                features.arguments,
                directory,
            )
        releases.append(read_artifact(tmp_path / str(i), "covariance"))
    (tmp_path / "m").mkdir()
    merge_means("covariance", releases, sizes, 400.0, tmp_path / "m", PLAN)
    found = load_means("covariance", tmp_path / "m", plan=PLAN)
    assert torch.allclose(found.table, (tables[0] + 3 * tables[1]) / 4, atol=1e-6)
    assert found.deviation == pytest.approx(math.hypot(4, 4) / 400)
    with writing(
        tmp_path / "1", "covariance", records=[record("b", 4.0, "covariance")]
    ) as directory:
        other = CosineMoments((1, 8, 8), **COSINE, flip=True)
        save_means(
            "covariance",
            FeatureMeans(torch.rand(other.size, 2), other, 0.01),
            other.arguments,
            directory,
        )
    with pytest.raises(ConfigError, match="means of different features"):
        merge_means(
            "covariance",
            [releases[0], read_artifact(tmp_path / "1")],
            sizes,
            400.0,
            tmp_path / "m",
            PLAN,
        )


def test_merged_moments_need_the_same_public_network(tmp_path):
    releases = []
    tables = []
    for owner, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(seed)
        network = build_network("whitened", (1, 8, 8), 4, 4).eval()
        features = moment_features(network)
        tables.append(torch.rand(features.size, 2))
        with writing(
            tmp_path / owner, "moments", records=[record(owner, 4.0, "moments")]
        ) as directory:
            about = {"feature": CLASSIFIER, "squares": SQUARES}
            save_means(
                "moments", FeatureMeans(tables[-1], features, 0.04), about, directory, network
            )
        releases.append(read_artifact(tmp_path / owner, "moments"))
    (tmp_path / "m").mkdir()
    merge_means("moments", releases[:2], [100.0, 100.0], 200.0, tmp_path / "m", PLAN)
    found = load_means("moments", tmp_path / "m", plan=PLAN)
    images = torch.rand(3, 1, 8, 8)
    assert torch.allclose(found.table, (tables[0] + tables[1]) / 2, atol=1e-6)
    assert torch.equal(
        found.features(images), load_means("moments", releases[0].path, plan=PLAN).features(images)
    )
    with pytest.raises(ConfigError, match="public network"):
        merge_means(
            "moments", [releases[0], releases[2]], [100.0, 100.0], 200.0, tmp_path / "m", PLAN
        )


# --- what one person costs ------------------------------------------------------------------------


def cost(records, apart=()):
    return spent_on_one(Records.of(records, apart), 1e-5, "rdp", "add-or-remove-one")


def test_one_person_costs_the_releases_of_their_owner():
    a = [record("a", 2.0)]
    b = [record("b", 1.0), record("b", 3.0, "frequency", 1)]
    assert cost(a + b, ("a", "b")) == cost(b) > cost(a)
    assert cost(a + b) > cost(a + b, ("a", "b"))
    found = compose(Records.of(a + b, ("a", "b")), 1e-5)
    assert found["epsilon"]["rdp"] == cost(b) and found["stages"]["count"]["epsilon"] == cost(b[:1])
    assert (
        len(found["stages"]["count"]["records"]) == 2
        and sum(s["share"] for s in found["stages"].values()) == 1
    )


def test_without_a_declaration_all_charges_are_composed():
    mechanisms = {"count": 2.0, "frequency": 3.0, "finetune": 1.5}
    records = [
        record("ab"[i % 2], sigma, stage, i) for i, (stage, sigma) in enumerate(mechanisms.items())
    ]
    events = [Mechanism(noise_multiplier=sigma).event for sigma in mechanisms.values()]
    assert (
        cost(records)
        == compose(Records.of(records), 1e-5)["epsilon"]["rdp"]
        == epsilon(events, 1e-5, "rdp")
    )


def test_a_set_that_is_not_apart_counts_for_all_owners():
    """The public images were made from the set c, which is not declared apart. A person in c may
    also be in a or b, so the cost of c counts for both.
    """
    a, b, c = ([record(name, 2.0)] for name in "abc")
    assert cost(a + b + c, ("a", "b")) == cost(a + c) > cost(a)
    parts = Records.of(a + b + c, ("a", "b")).of_one_person()
    assert {name: len(part) for name, part in parts.items()} == {"a": 2, "b": 2}


def test_declarations_that_overlap_leave_all_costs_added_up():
    one, ab, abc, bd = (Records(owners=owners) for owners in ("", "ab", "abc", "bd"))
    assert widest_declaration([one, ab, abc]) == ("a", "b", "c")
    assert widest_declaration([ab, bd]) == () == widest_declaration([])


def test_the_most_cautious_accountant_of_the_owners_counts():
    """One owner may still use the older accountant, `rdp`. Neither owner has to spend again, and
    the merged target allows the cost that the more cautious accountant computes.
    """
    records = Records.of([record("a", 2.0), record("b", 2.0)], ("a", "b"))
    delta = 1e-5
    budgets = [
        {"recipe": "dp-merf", "accountant": name, "delta": delta, "size_hint": 1000, "target": 1.0}
        for name in ("exact", "rdp")
    ]
    for given, name in ((budgets, "rdp"), (budgets[::-1], "rdp"), (budgets[:1] * 2, "exact")):
        merged = merged_budget(given, 2000, records)
        assert merged["accountant"] == name
        assert merged["target"] >= spent_on_one(records, delta, name, "add-or-remove-one")
    with pytest.raises(ConfigError, match="have different recipes"):
        merged_budget([budgets[0], {**budgets[1], "recipe": "dp-kernel"}], 2000, records)


def budgets_at(*deltas):
    common = {"recipe": "dp-merf", "accountant": "rdp", "size_hint": 2000, "target": 1.0}
    return [{**common, "delta": delta} for delta in deltas]


def test_the_smallest_delta_of_all_owners_counts():
    """At a larger δ, an owner's guarantee would be weaker than planned."""
    records = Records.of([record("a", 2.0), record("b", 2.0)], ("a", "b"))
    for deltas in ((1e-5, 1e-7), (1e-7, 1e-5)):
        merged = merged_budget(budgets_at(*deltas), 4000, records)
        assert merged["delta"] == 1e-7
        assert merged["target"] >= spent_on_one(records, 1e-7, "rdp", "add-or-remove-one")


@pytest.mark.parametrize("deltas", [(4e-4, 4e-4), (default_delta(2000),) * 9])
def test_a_delta_above_one_over_all_images_is_replaced(deltas):
    """Each owner's δ is below 1/2000, but above one over the total `size_hint` of all owners."""
    records = Records.of([record("a", 2.0)])
    size_hint = 2000 * len(deltas)
    merged = merged_budget(budgets_at(*deltas), size_hint, records)
    assert merged["delta"] == default_delta(size_hint)
    spent = spent_on_one(records, merged["delta"], "rdp", "add-or-remove-one")
    assert merged["target"] == pytest.approx(spent, rel=1e-3) and merged["target"] >= spent > 1


# --- whose releases may be merged -----------------------------------------------------------------


@dataclass
class Owner:
    """The parts of a project that `check_owner` reads: plans, budget, and the artifacts of two
    queries.

    id: id of the data set; apart: ids of data sets that are declared to share no person.
    """

    id: str = "a"
    apart: tuple[str, ...] = ()
    target: float = 10.0
    delta: float = 1e-5
    plans: dict = field(default_factory=dict)
    records: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        public = {"dataset_id": self.id, "size_hint": 300}
        for number, (stage, sigma) in enumerate({"count": 6.0, "frequency": 2.0}.items()):
            self.plans[stage] = {**public, "mechanism": {"noise_multiplier": sigma}}
            owners = self.apart or (self.id,)
            self.records[stage] = [record(owner, sigma, stage, number) for owner in owners]
        self.plans["synthesize"] = {**public, "delta": 1e-5}
        self.plans["classifier"] = {}  # reads public images only

    @property
    def spent(self) -> float:
        return cost([one for records in self.records.values() for one in records], self.apart)

    def check(self, **changes) -> tuple[str, ...]:
        """Check this owner. changes: stage -> fields of its artifact to change."""
        budget = {"accountant": "rdp", "delta": self.delta, "size_hint": 300, "target": self.target}
        queries = []
        for stage, records in self.records.items():
            change = dict(changes.get(stage, {}))
            behind = Records.of(records, change.pop("apart", self.apart))
            queries.append(Artifact(Path(stage), stage, behind, **change))
        return check_owner(Path("north"), self.plans, budget, queries)


def test_releases_without_counts_cannot_be_weighted():
    plan = {name: {"enabled": name == "frequency"} for name in QUERIES}
    with pytest.raises(ConfigError, match="count is not in `run`"):
        same_settings([Path("north"), Path("south")], [plan, plan])


def test_an_owner_whose_releases_are_as_planned_is_merged():
    assert Owner().check() == ("a",)
    assert Owner(apart=("a", "b")).check() == ("a", "b")


def test_an_owner_who_released_by_another_mechanism_is_refused():
    for sigma in (1.9, 2.1):
        owner = Owner()
        owner.records["frequency"] = [record("a", sigma, "frequency", 1)]
        with pytest.raises(DataError, match="with another mechanism than its plan contains"):
            owner.check()


def test_an_owner_who_spent_more_than_the_budget_is_refused():
    for apart in ((), ("a", "b")):
        spent = Owner(apart=apart).spent
        Owner(apart=apart, target=spent).check()
        with pytest.raises(BudgetError, match=rf"spent ε = {spent:.4g}, above the target"):
            Owner(apart=apart, target=0.99 * spent).check()


def test_an_owner_whose_delta_gives_no_guarantee_is_refused():
    with pytest.raises(ConfigError, match="1/size_hint"):
        Owner(delta=1 / 200).check()


@pytest.mark.parametrize(
    ("stage", "key", "value", "problem"),
    [
        ("synthesize", "delta", 1e-4, "size_hint or δ differs between its plan"),
        ("count", "size_hint", 3000, "size_hint or δ differs between its plan"),
        ("frequency", "size_hint", 30, "size_hint or δ differs between its plan"),
        ("frequency", "dataset_id", "b", "are for different datasets"),
        ("synthesize", "dataset_id", "b", "are for different datasets"),
    ],
)
def test_an_owner_whose_plans_contradict_each_other_is_refused(stage, key, value, problem):
    owner = Owner()
    owner.plans[stage][key] = value
    with pytest.raises(DataError, match=problem):
        owner.check()


@pytest.mark.parametrize("stage", ["count", "frequency"])
def test_an_owner_without_a_release_of_the_data_set_is_refused(stage):
    with pytest.raises(DataError, match="no release of this owner"):
        Owner().check(**{stage: {"enabled": False}})
    # The release is another owner's, or only one of two merged owners'
    for apart, found in (((), "b"), (("a", "b"), "a")):
        owner = Owner(apart=apart)
        owner.records[stage] = [{**owner.records[stage][0], "dataset_id": found}]
        with pytest.raises(DataError, match="no release of this owner"):
            owner.check()


def test_an_owner_whose_noise_can_be_replayed_is_refused():
    owner = Owner()
    owner.records["frequency"][0]["noise_source"] = "seeded(0)"
    with pytest.raises(DataError, match="seeded noise source"):
        owner.check()


def test_an_owner_whose_releases_disagree_on_apart_is_refused():
    different = "come from different merges"
    for owner, apart, message in (
        (Owner(), ("a", "b"), different),
        (Owner(apart=("a", "b")), (), different),
        (Owner(apart=("a",)), ("a",), "names only one of them"),
    ):
        with pytest.raises(DataError, match=message):
            owner.check(frequency={"apart": apart})
