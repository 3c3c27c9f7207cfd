import copy
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from small_record import small_record

from sfumato.errors import BudgetError, ConfigError
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.check import (
    Bound,
    artifact_problems,
    check_ledger,
    empty_artifact_md5,
    lock_problems,
    verify,
)
from sfumato.privacy.events import SEEDED, UNITS, ZERO_OUT_ONE, Mechanism, event_of
from sfumato.privacy.ledger import build_ledger, by_id, ledger_text, read_ledger
from sfumato.settings.data import GROUP
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import Artifact, write_empty, writing
from sfumato.storage.digest import digest_of
from sfumato.storage.records import Records

HINT = 1500
BUDGET = {
    "recipe": "feta-pro",
    "accountant": "rdp",
    "delta": default_delta(HINT),
    "size_hint": HINT,
    "target": 10.0,
}


COUNT = small_record(1, Mechanism(noise_multiplier=5))
STEPS = small_record(2, Mechanism(noise_multiplier=1.5, sample_rate=0.3, uses=20), stage="finetune")

OF_GROUPS = {"unit": UNITS[GROUP], "group_weight": "mean"}


def ledger_of(*records: dict, **budget) -> dict:
    return build_ledger(BUDGET | budget, Records.of(records), [])


def sealed(ledger: dict) -> dict:
    """Return an edited ledger with a correct digest."""
    body = {key: value for key, value in ledger.items() if key != "digest"}
    return {**body, "digest": digest_of(body)}


def test_a_written_ledger_holds_and_reads_back(tmp_path):
    ledger = ledger_of(COUNT, STEPS)
    (tmp_path / "ledger.json").write_text(ledger_text(ledger))
    read = read_ledger(tmp_path / "ledger.json")
    assert read["stages"]["saliency"] == {"epsilon": 0.0, "share": 0.0, "records": []}
    spent, problems = check_ledger(read, limit=10)
    assert problems == [] and spent == pytest.approx(ledger["epsilon"]["rdp"])


def test_the_same_query_twice_costs_twice():
    again = {**COUNT, "id": f"{9:032x}"}
    once = ledger_of(COUNT)
    twice = ledger_of(COUNT, again)
    assert twice["epsilon"]["rdp"] > 1.3 * once["epsilon"]["rdp"]
    assert twice["stages"]["count"]["records"] == sorted([COUNT["id"], again["id"]])


def test_the_odometers_line_is_the_union_of_all_charges():
    """An earlier version did not count the release's charges that were missing from the journal.

    Such charges are missing if the state directory is empty or the journal is an older copy.
    """
    other = {**COUNT, "id": f"{8:032x}"}
    aborted = {**STEPS, "id": f"{9:032x}"}
    released = Records.of((COUNT, STEPS))
    lines = {}
    for name, journal, head in (
        ("empty", [], None),
        ("older", [COUNT], None),
        ("whole", [COUNT, aborted, STEPS, other], "0" * 64),
        ("older, of more", [COUNT, aborted, other], None),
    ):
        ledger = build_ledger(BUDGET, released, journal, dataset_id="digits", head=head)
        assert check_ledger(ledger)[1] == []
        lines[name] = ledger["odometer"]
    assert [line["charges"] for line in lines.values()] == [2, 2, 4, 4]
    assert lines["empty"]["epsilon"] == pytest.approx(ledger["epsilon"]["rdp"])
    assert lines["whole"]["epsilon"] == pytest.approx(lines["older, of more"]["epsilon"])
    assert lines["whole"]["epsilon"] > lines["empty"]["epsilon"]
    assert [line["complete"] for line in lines.values()] == [False, False, True, False]


def test_records_of_another_dataset_are_composed_separately():
    foreign = {**STEPS, "id": f"{9:032x}", "dataset_id": "another"}
    ledger = build_ledger(BUDGET, Records.of((COUNT, STEPS, foreign)), [], dataset_id="digits")
    assert check_ledger(ledger)[1] == [] and ledger["odometer"]["charges"] == 2
    assert ledger["epsilon"]["rdp"] > ledger["odometer"]["epsilon"]


def edited(change) -> dict:
    ledger = copy.deepcopy(ledger_of(COUNT, STEPS))
    change(ledger)
    return ledger


def record_in(ledger: dict, of: dict) -> dict:
    return next(r for r in ledger["records"] if r["id"] == of["id"])


def sampled(ledger: dict) -> dict:
    return record_in(ledger, STEPS)["event"]["event"]


NO_NUMBER = {
    "dataset_id": "d",
    "charges": 2,
    "epsilon": None,
    "others": [],
    "complete": False,
    "head": None,
}
NO_OTHERS = {key: value for key, value in NO_NUMBER.items() if key not in ("others", "epsilon")}
EDITS = {
    "epsilon lowered": (lambda x: x["epsilon"].update(rdp=0.1), "records cost"),
    "epsilon lowered a little": (
        lambda x: x["epsilon"].update(rdp=0.999 * x["epsilon"]["rdp"]),
        "records cost",
    ),
    "epsilon added": (
        lambda x: x["epsilon"].update(best=0.01),
        "epsilon for an unknown accountant \\(best\\)",
    ),
    "epsilon of a stage lowered": (
        lambda x: x["stages"]["count"].update(epsilon=0.0),
        "states epsilon=0.0 for count",
    ),
    "share of a stage lowered": (
        lambda x: x["stages"]["count"].update(share=0.0),
        "states share=0.0 for count",
    ),
    "cost of a stage without records": (
        lambda x: x["stages"]["central"].update(epsilon=-1.0),
        "epsilon=-1.0 for central",
    ),
    "neighbours of another kind": (
        lambda x: x.update(adjacency=ZERO_OUT_ONE),
        "its adjacency is 'zero-out-one'",
    ),
    "neighbours of no kind": (lambda x: x.update(adjacency="none"), "its adjacency is 'none'"),
    "accountant unknown": (lambda x: x.update(accountant="gdp"), "accountant='gdp' is unknown"),
    "record trimmed": (lambda x: x["records"].remove(STEPS), "records cost|table of stages"),
    "noise raised": (lambda x: sampled(x)["event"].update(noise_multiplier=50.0), "records cost"),
    "seeded noise": (
        lambda x: record_in(x, COUNT).update(noise_source=SEEDED),
        "seeded noise source",
    ),
    "unknown mechanism": (
        lambda x: record_in(x, COUNT).update(event={"type": "Free"}),
        "not a mechanism",
    ),
    "no noise": (
        lambda x: record_in(x, COUNT)["event"].update(noise_multiplier=0),
        "gives no guarantee",
    ),
    "type no text": (
        lambda x: record_in(x, COUNT)["event"].update(type=["Gaussian"]),
        "not a mechanism",
    ),
    "noise too small": (
        lambda x: record_in(x, COUNT)["event"].update(noise_multiplier=1e-200),
        "noise_multiplier=",
    ),
    "noise too large": (
        lambda x: record_in(x, COUNT)["event"].update(noise_multiplier=1e155),
        "noise_multiplier=",
    ),
    "rate too small": (
        lambda x: sampled(x).update(sampling_probability=1e-320),
        "sampling_probability=",
    ),
    "delta too large": (lambda x: x.update(delta=0.01), "1/size_hint"),
    "delta that means nothing": (
        lambda x: x.update(delta=0.3, size_hint=3),
        "the probability that there is no",
    ),
    "record renamed": (lambda x: record_in(x, COUNT).update(id=f"{7:032x}"), "table of stages"),
    "record twice": (lambda x: x["records"].append(COUNT), "contains a record twice"),
    "record no record": (lambda x: x["records"].append(None), "record 2 is not a complete record"),
    "id no text": (lambda x: record_in(x, COUNT).update(id=7), "record 0 has no id"),
    "id a path": (lambda x: record_in(x, COUNT).update(id="../odometer"), "record 0 has no id"),
    "stage unknown": (lambda x: record_in(x, COUNT).update(stage="select"), "is not a query"),
    "stage missing": (lambda x: record_in(x, COUNT).pop("stage"), "not a complete record"),
    "field missing": (lambda x: record_in(x, COUNT).pop("adjacency"), "not a complete record"),
    "odometer emptied": (
        lambda x: x["odometer"].update(charges=0, epsilon=0.0),
        "its odometer states charges=0",
    ),
    "odometer lowered": (
        lambda x: x["odometer"].update(epsilon=0.1),
        "its odometer states epsilon=0.1",
    ),
    "odometer complete": (
        lambda x: x["odometer"].update(complete=True),
        "is marked as complete, but `head`",
    ),
    "odometer incomplete, with a head": (
        lambda x: x["odometer"].update(complete=False, head="f" * 64),
        "is marked as incomplete, but contains `head`",
    ),
    "odometer with any head": (
        lambda x: x["odometer"].update(complete=True, head="all"),
        "its odometer's head is 'all'",
    ),
    "odometer with more than a head": (
        lambda x: x["odometer"].update(complete=True, head="f" * 64 + " <p>"),
        "expected 64 hexadecimal digits",
    ),
    "odometer of another": (
        lambda x: x["odometer"].update(dataset_id="other"),
        "the ledger contains no record of that dataset",
    ),
    "units mixed": (lambda x: record_in(x, COUNT).update(OF_GROUPS), "different privacy units"),
    "unit unknown": (
        lambda x: record_in(x, COUNT).update(unit="one person"),
        "has the unknown unit 'one person'",
    ),
    "unit without a weight": (
        lambda x: record_in(x, COUNT).update(unit=UNITS[GROUP]),
        "has no group_weight",
    ),
    "a weight without groups": (
        lambda x: record_in(x, COUNT).update(group_weight="mean"),
        "protects single images, but has a group_weight",
    ),
    "a claim of groups": (
        lambda x: record_in(x, COUNT).update(OF_GROUPS | {"claim": "c"}),
        "protects groups, but has the key `claim`",
    ),
    "adjacency unknown": (lambda x: record_in(x, COUNT).update(adjacency="none"), "adjacency"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_even_with_its_digest_mended(name):
    change, message = EDITS[name]
    ledger = edited(change)
    assert any("digest" in p for p in check_ledger(ledger)[1])
    problems = check_ledger(sealed(ledger))[1]
    assert any(re.search(message, p) for p in problems), problems


def test_delta_asked_for_above_one_over_the_hint_is_refused():
    assert check_ledger(ledger_of(COUNT), delta=1 / HINT + 1e-6)[1]
    assert check_ledger(ledger_of(COUNT), delta=1e-6)[1] == []


@pytest.mark.parametrize(
    ("delta", "hint", "reason"), [(0.01, HINT, "1/size_hint"), (0.3, 3, "no guarantee")]
)
def test_a_check_at_another_delta_excuses_no_delta_of_a_ledger(delta, hint, reason):
    ledger = ledger_of(COUNT, delta=delta, size_hint=hint)
    for at in (None, 1e-6):
        assert any(reason in problem for problem in check_ledger(ledger, delta=at)[1])


def test_the_target_is_held_to_the_ledgers_own_delta():
    assert any(
        "the ledger's target" in p for p in check_ledger(ledger_of(COUNT, STEPS, target=1.0))[1]
    )
    ledger = ledger_of(COUNT, STEPS)
    tight = ledger | {"target": ledger["epsilon"]["rdp"] + 1e-3}
    assert check_ledger(sealed(tight))[1] == []
    spent, problems = check_ledger(sealed(tight), delta=ledger["delta"] / 10)
    assert spent > tight["target"] and problems == []
    assert check_ledger(sealed(tight), delta=ledger["delta"] / 10, limit=tight["target"])[1] != []


WRITTEN = ledger_text(ledger_of(COUNT))
UNREADABLE = {
    **dict.fromkeys(("", "{", "[]", "{}", '{"schema": 1}', "[" * 200_000), r"ledger\.json"),
    ledger_text(ledger_of(COUNT) | {"schema": 1}): "schema 1.*stage ledger write",
    ledger_text(
        ledger_of(COUNT) | {"schema": 4}
    ): "schema 4, which version 0.2 wrote. Commit 7569af49 of",
    **{
        WRITTEN.replace(' "target": 10.0', f' "target": {no}'): no
        for no in ("NaN", "Infinity", "-Infinity")
    },
}


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: text[:20])
def test_a_file_that_is_not_a_ledger_is_refused_in_a_sentence(tmp_path, text):
    with pytest.raises(BudgetError, match="ledger write"):
        read_ledger(tmp_path / "ledger.json")
    (tmp_path / "ledger.json").write_text(text)
    with pytest.raises(BudgetError, match=UNREADABLE[text]):
        read_ledger(tmp_path / "ledger.json")


def locked(tmp_path, ledger: dict, **outs: str):
    path = tmp_path / "ledger.json"
    path.write_text(ledger_text(ledger))
    of_file = {
        "path": "ledger.json",
        "hash": "md5",
        "md5": hashlib.md5(path.read_bytes()).hexdigest(),
    }
    of_stages = {
        name: {"path": f"artifacts/{name}", "hash": "md5", "md5": md5} for name, md5 in outs.items()
    }
    stages = {name: {"outs": [out]} for name, out in of_stages.items()}
    stages["ledger"] = {"cmd": "stage ledger write", "outs": [of_file]}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    return path, tmp_path / "dvc.lock"


def test_every_query_of_the_lock_must_be_in_the_ledger(tmp_path):
    ledger = ledger_of(COUNT)
    assert (
        lock_problems(
            ledger, *locked(tmp_path, ledger, count="a.dir", central=empty_artifact_md5("central"))
        )
        == []
    )
    problems = lock_problems(ledger, *locked(tmp_path, ledger, count="a.dir", frequency="b.dir"))
    assert any("frequency ran" in p for p in problems)
    # A record without a stage once caused a KeyError
    nowhere = edited(lambda x: record_in(x, COUNT).pop("stage"))
    assert any(
        "count ran" in p for p in lock_problems(nowhere, *locked(tmp_path, nowhere, count="a.dir"))
    )


def test_a_ledger_that_the_lock_does_not_know_is_found(tmp_path):
    ledger = ledger_of(COUNT)
    path, lock = locked(tmp_path, ledger)
    path.write_text(path.read_text() + " ")
    assert any("a different md5" in p for p in lock_problems(ledger, path, lock))
    lock.write_text("schema: '2.0'\nstages: {}")
    assert any("does not list" in p for p in lock_problems(ledger, path, lock))


@pytest.mark.parametrize(
    "text", ["{", "[]", "stages: 5", "stages: {count: {outs: [{path: artifacts/count}]}}"]
)
def test_a_lock_that_cannot_be_read_is_a_reason(tmp_path, text):
    ledger = ledger_of(COUNT)
    path, lock = locked(tmp_path, ledger)
    lock.write_text(text)
    assert any("cannot be read" in problem for problem in lock_problems(ledger, path, lock))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["limit", "delta"])
def test_a_bound_that_bounds_nothing_is_refused(tmp_path, name, bound):
    (tmp_path / "ledger.json").write_text(WRITTEN)
    with pytest.raises(ConfigError, match="is not a bound"):
        verify(tmp_path / "ledger.json", Bound(**{name: bound}))


def test_all_opinions_need_opacus(tmp_path, uninstall):
    (tmp_path / "ledger.json").write_text(WRITTEN)
    uninstall("opacus")
    with pytest.raises(ConfigError, match="requires Opacus"):
        verify(tmp_path / "ledger.json", all_opinions=True)


@pytest.mark.parametrize("records", [None, 5, "records", [5, {"id": 5}]])
def test_records_without_an_id_are_not_listed(records):
    assert by_id({"records": records}) == {}


def test_dvc_gives_an_empty_artifact_the_hash_that_we_expect(tmp_path):
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    write_empty(tmp_path / "central", "central")
    tree = Tree()
    md5 = hashlib.md5((tmp_path / "central" / "privacy.json").read_bytes()).hexdigest()
    tree.add(("privacy.json",), None, HashInfo("md5", md5))
    tree.digest()
    assert tree.hash_info.value == empty_artifact_md5("central")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("target", value) for value in (None, "10", -1.0, True)),
        ("delta", None),
        *(("epsilon", value) for value in (9.5, None)),
        ("stages", []),
        *(("odometer", value) for value in ("none", NO_NUMBER, NO_OTHERS)),
        ("records", {}),
    ],
)
def test_an_unknown_entry_is_a_reason_and_not_a_traceback(key, value):
    spent, problems = check_ledger(ledger_of(COUNT, STEPS) | {key: value}, limit=10)
    assert spent == float("inf") and any(key in problem for problem in problems)


def test_a_ledger_for_one_unit_never_passes_for_the_other():
    images = ledger_of(COUNT, STEPS)
    groups = ledger_of(COUNT | OF_GROUPS, STEPS | OF_GROUPS)
    for ledger, unit, other in ((images, "image", "group"), (groups, "group", "image")):
        assert check_ledger(ledger)[1] == check_ledger(ledger, unit=unit)[1] == []
        assert any(
            "its privacy unit is" in problem for problem in check_ledger(ledger, unit=other)[1]
        )
    assert check_ledger(ledger_of(COUNT | {"claim": "c"}, STEPS))[1] == []
    assert images["epsilon"] == groups["epsilon"]  # the same mechanisms, of another unit


def test_records_of_different_units_are_never_composed():
    with pytest.raises(BudgetError, match="different privacy units"):
        ledger_of(COUNT | OF_GROUPS, STEPS)


# --- the exact accountant -------------------------------------------------------------------------

LOUD = small_record(3, Mechanism(noise_multiplier=0.7), stage="frequency")
ABORTED = small_record(4, Mechanism(noise_multiplier=2.0))


def test_an_exact_ledger_lists_its_bound_beside_renyis():
    records = Records.of((COUNT, LOUD))
    ledger = build_ledger(
        BUDGET | {"accountant": "exact"}, records, [*records.values(), ABORTED], head="f" * 64
    )
    spent, problems = check_ledger(ledger, limit=10)
    assert problems == [] and spent == ledger["epsilon"]["exact"] < ledger["epsilon"]["rdp"]
    delta = BUDGET["delta"]
    assert ledger["stages"]["frequency"]["epsilon"] == epsilon([event_of(LOUD)], delta, "exact")
    everything = [event_of(record) for record in (COUNT, LOUD, ABORTED)]
    assert ledger["odometer"]["epsilon"] == epsilon(everything, delta, "exact") > spent
    # For Gaussians over all images, the share of the RDP equals the share of μ²
    assert ledger["stages"]["frequency"]["share"] == pytest.approx(0.7**-2 / (0.7**-2 + 5.0**-2))


@pytest.mark.parametrize("change", [{"exact": 1.0}, {"exact": None}, {"rdp": 1.0}])
def test_an_exact_bound_that_is_edited_or_left_out_is_found(change):
    ledger = ledger_of(COUNT, LOUD, accountant="exact")
    stored = {
        name: value for name, value in {**ledger["epsilon"], **change}.items() if value is not None
    }
    assert any(
        "its epsilon (" in problem
        for problem in check_ledger(sealed({**ledger, "epsilon": stored}))[1]
    )


def test_only_an_exact_ledger_meets_a_target_by_its_bound():
    between = ledger_of(LOUD)["epsilon"]["rdp"] - 0.05
    assert check_ledger(ledger_of(LOUD, target=between, accountant="exact"))[1] == []
    assert "exceeds the ledger's target" in check_ledger(ledger_of(LOUD, target=between))[1][0]


GALLERY = Path(__file__).resolve().parents[2] / "docs" / "gallery"


@pytest.mark.parametrize("name", ["clothes", "digits", "mri"])
def test_a_ledger_of_before_is_built_again_as_it_was(name):
    """A recipient, and the owner's next run, must compute the same numbers as stored."""
    stored = read_ledger(GALLERY / name / "ledger.json")
    line = stored["odometer"]
    records = Records.of_ledger(stored)
    others = [{"id": None, "event": event} for event in line["others"]]
    built = build_ledger(stored, records, others, dataset_id=line["dataset_id"], head=line["head"])
    assert built["epsilon"] == pytest.approx(stored["epsilon"], rel=1e-10)
    assert built["odometer"].pop("epsilon") == pytest.approx(line.pop("epsilon"), rel=1e-12)
    for place in (stored, built):
        for key in ("epsilon", "digest", "stages"):
            del place[key]
    assert built == stored


# --- the artifacts beside the ledger --------------------------------------------------------------


def write_artifacts(folder: Path, records: dict | None = None, apart: Sequence[str] = ()) -> None:
    """Write two queries, a free stage that reads both, and their plans.

    records: artifact -> records to write instead.
    """
    (folder / "artifacts/plan").mkdir(parents=True)
    made = {"count": [COUNT], "frequency": [COUNT, LOUD], "auxiliary": [COUNT, LOUD]}
    for name, held in (made | (records or {})).items():
        out = folder / ("data/public" if name == "public" else f"artifacts/{name}")
        declared = [Artifact(out, name, Records(owners=apart))]
        with writing(out, name, declared, held) as directory:
            (directory / "released").write_text("as it was")
    for name in made:
        plan = {
            "stage": name,
            "revision": STAGES[name].revision,
            "enabled": True,
            "shape": [1, 8, 8],
            "settings": {},
        }
        mechanism = {"mechanism": {"noise_multiplier": 5.0}} if name in QUERIES else {}
        (folder / f"artifacts/plan/{name}.yaml").write_text(yaml.safe_dump(plan | mechanism))


CHEAPER = {**COUNT, "event": Mechanism(noise_multiplier=50).to_json()}
HELD = {
    "as the ledger has them": ({}, None),
    "a record of more noise": (
        {"count": [CHEAPER]},
        "artifacts/count depends on charge 00000000, but the ledger",
    ),
    "another charge": (
        {"auxiliary": [COUNT, LOUD, STEPS]},
        "artifacts/auxiliary depends on charge",
    ),
    "a release among public images": ({"public": [STEPS]}, "data/public depends on charge"),
    "an input's record is missing": (
        {"frequency": [LOUD]},
        "artifacts/frequency lacks records of count",
    ),
    "another input's record is missing": (
        {"auxiliary": [COUNT]},
        "artifacts/auxiliary lacks records of frequency",
    ),
    "its own record is missing": (
        {"frequency": [COUNT], "auxiliary": [COUNT]},
        "artifacts/frequency contains no record of its own charge",
    ),
}


@pytest.mark.parametrize("case", HELD)
def test_an_artifact_holds_its_records_and_all_are_in_the_ledger(tmp_path, case):
    records, problem = HELD[case]
    write_artifacts(tmp_path, records)
    found = artifact_problems(ledger_of(COUNT, LOUD), tmp_path)
    assert len(found) == (problem is not None) and all(problem in one for one in found), found


def test_an_artifact_that_was_changed_is_a_reason(tmp_path):
    write_artifacts(tmp_path)
    (tmp_path / "artifacts/count/released").write_text("as it is now")
    (found,) = artifact_problems(ledger_of(COUNT, LOUD), tmp_path)
    assert "artifacts/count: released no longer has the bytes" in found


# --- ledgers of several owners --------------------------------------------------------------------

NORTH = {**COUNT, "dataset_id": "north"}
SOUTH = {**LOUD, "dataset_id": "south"}
APART = ("north", "south")


def merged_ledger() -> dict:
    return build_ledger(BUDGET, Records.of((NORTH, SOUTH), APART), [])


def test_ledger_and_artifacts_list_the_same_disjoint_sets(tmp_path):
    """A ledger may declare that no person is in two of its datasets. It then counts each record
    only for the people of one set, so the artifacts must contain the same declaration.
    """
    records = {"count": [NORTH], "frequency": [NORTH, SOUTH], "auxiliary": [NORTH, SOUTH]}
    for declared in ((), APART):
        write_artifacts(folder := tmp_path / f"{len(declared)}", records, declared)
        together = build_ledger(BUDGET, Records.of((NORTH, SOUTH)), [])
        for ledger, apart in ((merged_ledger(), APART), (together, ())):
            problems = artifact_problems(ledger, folder)
            assert any("declare different lists" in problem for problem in problems) == (
                apart != declared
            ), problems


def test_the_second_opinion_is_on_the_person_who_pays_most(tmp_path, monkeypatch):
    """The second opinion is computed at the requested δ or, if there is none, the ledger's δ."""
    requested = []

    def recorded(records, delta, _):
        requested.append(([record["id"] for record in records], delta))
        return {}

    monkeypatch.setattr("sfumato.privacy.opinions.all_opinions", recorded)
    ledger, _ = locked(tmp_path, merged_ledger())
    for delta, at in ((None, BUDGET["delta"]), (1e-7, 1e-7)):
        found = verify(ledger, Bound(delta=delta), all_opinions=True)
        assert requested.pop() == ([SOUTH["id"]], at) and found.delta == at
        assert found.epsilon == found.epsilon_by_set["south"] > found.epsilon_by_set["north"]
