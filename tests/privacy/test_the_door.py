"""Test the conditions for drawing a sensitive image, who may draw one, and how records
propagate.
"""

import ast
import json
import os
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock, Timeout
from parts import of_baselines
from program import Terminal
from small_lock import write_lock
from small_record import small_record

from sfumato.data.cards import CARD, Card
from sfumato.data.images import ImageSet
from sfumato.data.lineage import lineage, remember
from sfumato.data.prepare import card_text, secret_key
from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.planning.resolve import inherited_events, make_plan, policy_of
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.authorize import DAY
from sfumato.privacy.check import check_ledger
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, UNITS, ZERO_OUT_ONE, Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.privacy.odometer import Odometer, Seen
from sfumato.privacy.opinions import Opinion
from sfumato.privacy.policy import SpendingPolicy
from sfumato.release.card import PREPARED, cost_of, dataset_card
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.recipes import load_params
from sfumato.settings.release import Synthesize
from sfumato.settings.stage import Kind
from sfumato.settings.stages import BASELINES, QUERIES, STAGES
from sfumato.storage.artifacts import Artifact, read_artifact, writing
from sfumato.storage.records import Records
from stages import ledger as ledger_stage
from stages.runner import QueryRun, StageRun
from stages.screen import progress
from stages.state import check_local

ROOT = Path(__file__).resolve().parents[2]
TWO = Mechanism(noise_multiplier=2.0, uses=2)


def record(number: int, **more) -> dict:
    return small_record(number, Mechanism(noise_multiplier=5.0), **more)


# --- the journal before the images ----------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, BudgetError])
@pytest.mark.parametrize("resumed", [False, True])
def test_where_the_journal_takes_no_entry_no_charge_is_opened(owner, monkeypatch, error, resumed):
    if resumed:
        owner.open(TWO)._lock.close()  # the state after a kill

    def full(*_):
        raise error("no space left on device")

    monkeypatch.setattr(Odometer, "_write", full)
    with pytest.raises(error, match="no space"):
        owner.open(TWO)


def test_the_charge_is_on_the_disk_before_an_image_is_read(owner, monkeypatch):
    """After a power cut, the journal must still contain the charge.

    So the charge's line is not only written, but also flushed, before the first draw.
    """
    happened = []
    flush = os.fsync
    read = ImageSet.batch

    def flushed(descriptor: int) -> None:
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    def seen(self, indices, **keys):
        happened.append("images")
        return read(self, indices, **keys)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(ImageSet, "batch", seen)
    charge = owner.open()
    list(charge.batches(100))
    first = happened.index("images")
    assert str(owner.odometer.path) in happened[:first]


def test_nobody_else_may_write_while_a_charge_is_being_opened(owner, monkeypatch):
    """Two processes that read the same journal at once would both find room in the budget."""
    owner.open(plan="first")._lock.close()
    tried = []
    write = Odometer._write

    def other(self, line):
        # a second lock object, as in another process
        try:
            FileLock(self.path.with_suffix(".lock"), is_singleton=False).acquire(timeout=0)
            tried.append("taken")
        except Timeout:
            tried.append("refused")
        write(self, line)

    monkeypatch.setattr(Odometer, "_write", other)
    owner.open(plan="second")
    owner.odometer.append("progress", id="x", uses=1)
    assert tried == ["refused", "refused"]


def test_a_record_names_the_day_and_not_the_second(owner):
    """The times of two records would reveal how long a query took, and so how many images it
    saw.
    """
    charge = owner.open()
    assert charge.record["time"] % DAY == 0 and charge.record["time"] > 0


# --- who may open the door ------------------------------------------------------------------------

# Door to real images -> the modules that open it, or pass on what comes through it. No other module
# can read real images. An added module must be a query with a charge, or local work, which is
# journalled and marked.
DOORS = {
    "open_charge": {
        *(f"stages/{name}.py" for name in (*QUERIES, "feature_means", "runner")),
        *("sfumato/__init__.py", "sfumato/privacy/own_query.py"),  # for custom queries
        *("sfumato/privacy/authorize.py", "sfumato/privacy/resume.py"),
        "sfumato/dpsgd/run.py",
        *of_baselines("baseline_settings", "OPENING"),
    },
    "open_local": {
        *("sfumato/privacy/authorize.py", "sfumato/evaluation/evaluate.py"),
        *("stages/doctor.py", "stages/prepare.py"),
    },
    # data/prepare verifies that the prepared images are complete
    "load_prepared": {
        "sfumato/privacy/authorize.py",
        "sfumato/data/store.py",
        "sfumato/data/prepare.py",
    },
    "load_latents": {"sfumato/privacy/authorize.py", "sfumato/data/store.py"},
}


def doors_of(path: Path) -> set[str]:
    """Return the names in DOORS that a module uses: functions that read real images."""
    names = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {
        getattr(node, names[type(node)]) for node in nodes if type(node) in names
    } & DOORS.keys()


def test_free_stages_have_no_door_to_real_images():
    """The results of `select`, `synthesize` and `pretrain` are shared, so they must not read real
    images.
    """
    for stage in STAGES.values():
        if stage.kind is Kind.FREE:
            assert not doors_of(ROOT / "stages" / f"{stage.name}.py"), stage.name
    for folder in ("release", "generators", "training", "features", "diffusion"):
        paths = list((ROOT / "sfumato" / folder).rglob("*.py"))
        assert paths, folder
        for path in paths:
            assert not doors_of(path), path


def test_every_module_with_a_door_is_known():
    """A new door fails this test until it is added to DOORS."""
    for folder in ("sfumato", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            for door in doors_of(path):
                assert str(path.relative_to(ROOT)) in DOORS[door], (door, path)


def calls_of(path: Path, name: str) -> list[ast.Call]:
    """Return the calls of a function, or of `partial` on it."""
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    named = [
        c
        for c in calls
        if name in {ast.unparse(c.func), *(ast.unparse(argument) for argument in c.args[:1])}
    ]
    return [call for call in named if ast.unparse(call.func) in (name, "partial")]


def test_no_bar_of_a_query_tells_the_time():
    """The duration of a step reveals how many images it drew."""
    seen = 0
    for stage in (*QUERIES, "feature_means"):
        for call in calls_of(ROOT / "stages" / f"{stage}.py", "progress"):
            assert {word.arg: ast.unparse(word.value) for word in call.keywords}.get(
                "clock"
            ) == "False", stage
            seen += 1
    assert seen >= 3 + len(BASELINES)


def test_a_bar_without_a_clock_shows_none(environment):
    environment["TERM"] = "xterm"
    for clock in (False, True):
        with redirect_stderr(Terminal()) as screen, progress("finetune", clock=clock) as report:
            report(3, 10), report(4, 10)
        assert ("-:--:--" in screen.getvalue() or "0:00:" in screen.getvalue()) == clock


# --- every written artifact contains its records --------------------------------------------------


@pytest.fixture
def made_from(tmp_path) -> dict[str, Artifact]:
    """Write two artifacts, each with a record of its own."""
    found = {}
    for number, name in enumerate(("frequency", "count"), start=11):
        with writing(tmp_path / name, name, records=[record(number)]):
            pass
        found[name] = read_artifact(tmp_path / name, name)
    return found


def test_every_artifact_carries_the_records_of_its_inputs(made_from, tmp_path):
    with writing(tmp_path / "model", "model", records=[record(13)]):
        pass
    plan = SimpleNamespace(stage="auxiliary")
    run = StageRun(plan=plan, inputs=made_from, out=tmp_path / "out")
    with run.writing([read_artifact(tmp_path / "model")]):
        pass
    assert read_artifact(tmp_path / "out").records.keys() == {f"{n:032x}" for n in (11, 12, 13)}


def test_a_query_carries_its_record_and_its_inputs_records(owner, made_from, tmp_path, monkeypatch):
    """The artifact is copied to `out` only after the charge is closed.

    If it was copied first, a kill between the two steps would leave a release in `out` under an
    open charge, and a later run would draw the release again.
    """
    charge = owner.open(stage="finetune")
    out = tmp_path / "out"
    run = QueryRun(plan=SimpleNamespace(stage="finetune"), inputs=made_from, out=out)
    closing = charge.close

    def closed(digest: str) -> None:
        assert not out.exists()
        closing(digest)

    monkeypatch.setattr(charge, "close", closed)
    with run.releasing(charge):
        list(charge.batches(500)), charge.release(torch.zeros(1), 1.0)
    assert read_artifact(out).records.keys() == {
        charge.record["id"],
        *(f"{n:032x}" for n in (11, 12)),
    }


def test_a_release_used_as_public_model_brings_its_records(tmp_path):
    """A copy without its privacy.json is recognised by its bytes, however it is declared."""
    with writing(tmp_path / "finetune", "finetune", records=[record(21)]) as directory:
        (directory / "model.safetensors").write_bytes(os.urandom(64))
    remember(tmp_path / "state", [read_artifact(tmp_path / "finetune")], tmp_path / "public")
    copy = tmp_path / "elsewhere" / "renamed.safetensors"
    copy.parent.mkdir()
    copy.write_bytes((tmp_path / "finetune" / "model.safetensors").read_bytes())
    for path in (copy, copy.parent):
        (found,) = lineage(path, "model", True, tmp_path / "state")
        assert found.records.keys() == {f"{21:032x}"}


@pytest.mark.parametrize("key", ["stage", "records", "local", "enabled", "files"])
def test_an_artifact_that_does_not_say_what_it_cost_is_none(made_from, key):
    path = made_from["count"].path / "privacy.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="cannot be read"):
        read_artifact(made_from["count"].path)


# --- records together -----------------------------------------------------------------------------

BUDGET = {"recipe": "r", "accountant": "rdp", "delta": 1e-5, "size_hint": 1000, "target": 10.0}
MIXED = [record(1), record(2, adjacency=ZERO_OUT_ONE)]


def test_one_record_under_add_or_remove_limits_the_whole():
    """The guarantee of a ledger covers only those neighbours that every record covers."""
    ledger = build_ledger(BUDGET, Records.of(MIXED), [])
    assert ledger["adjacency"] == ADD_OR_REMOVE_ONE
    digits = {
        "dataset_id": "d",
        "shape": (1, 8, 8),
        "classes": ("a", "b"),
        "size_hint": 1000,
        "delta": None,
    }
    plan = SimpleNamespace(
        settings=Synthesize(sources={"auxiliary": 1}),
        about={},
        several=False,
        prepared={},
        accountant="rdp",
        **digits,
    )
    made = {"images": 2, "sources": {"auxiliary": 2}, "kinds": {"plain": 2}, "prepared": PREPARED}
    words = {}
    for kind, rows in (("mixed", MIXED), ("zero-out", [MIXED[1]])):
        records = Records.of(rows)
        words[kind] = dataset_card(plan, made | cost_of(plan, records), [1, 1], records)
    assert "added or removed" in words["mixed"] and "replaced by a blank" not in words["mixed"]
    assert "replaced by a blank" in words["zero-out"]


def test_a_plan_over_inherited_records_has_their_adjacency(tmp_path):
    privacy = {"declared_size": True, "size_hint": 1437, "lifetime_epsilon": 12.0}
    (tmp_path / "params.yaml").write_text(json.dumps({"recipe": "dp-merf", "privacy": privacy}))
    params = load_params(tmp_path / "params.yaml", ROOT / "pipelines")
    known = {"dataset_id": "digits", "source": "digits", "split": "keyed", "version": "v"}
    card = Card(**known, shape=(1, 8, 8), classes=tuple("0123456789"))
    alone = make_plan(params, card)
    brought = [record(1, event=Mechanism(noise_multiplier=0.8).to_json())]
    made = make_plan(params, card, records=brought)
    assert policy_of(alone).lifetime_epsilon == params.privacy.lifetime == 12.0
    assert (
        alone.budget["adjacency"] == ZERO_OUT_ONE and made.budget["adjacency"] == ADD_OR_REMOVE_ONE
    )
    own = [mechanism.event for mechanism in made.mechanisms.values()]
    spent = epsilon([*own, *inherited_events(brought, 99.0, 1e-5)], made.budget["delta"])
    assert spent == pytest.approx(made.budget["epsilon"]) and spent <= 10.0
    assert epsilon(own, made.budget["delta"]) < 0.95 * spent


# --- `stage ledger check` -------------------------------------------------------------------------


def check(path: Path, **given) -> None:
    asked = {"epsilon": None, "delta": None, "artifacts": False} | given
    ledger_stage.check(ledger=path, **asked)


@pytest.fixture
def ledger(here) -> Path:
    path = here / "ledger.json"
    path.write_text(ledger_text(build_ledger(BUDGET, Records.of((record(1), record(3))), [])))
    write_lock()
    return path


def test_every_option_of_the_check_is_read(ledger, capsys):
    spent, problems = check_ledger(build_ledger(BUDGET, Records.of((record(1), record(3))), []))
    assert not problems
    check(ledger)
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in ("rdp", "rdp_classic", "pld"))
    assert "Opacus RDP" not in shown and "not compared with Opacus" in shown
    check(ledger, opinions="all")
    shown = capsys.readouterr().out
    assert "Opacus RDP " in shown and "Opacus PRV " in shown and "not compared" not in shown
    check(ledger, epsilon=spent + 0.01)
    with pytest.raises(BudgetError, match="exceeds the limit"):
        check(ledger, epsilon=spent - 0.01)
    with pytest.raises(BudgetError, match="exceeds the limit"):
        check(ledger, epsilon=spent + 0.01, delta=1e-9)  # a smaller δ costs more
    with pytest.raises(BudgetError, match="no artifact to verify") as refused:
        check(ledger, artifacts=True, epsilon=spent - 0.01)
    assert len(refused.value.problems) == 2, "each reason, for the library too"
    (ledger.parent / "dvc.lock").write_text("stages: {}\n")
    with pytest.raises(BudgetError, match=r"dvc.lock"):
        check(ledger)


def test_the_check_fails_if_another_accountant_refutes_it(ledger, monkeypatch):
    wrong = {"Opacus RDP": Opinion(2.0, "rdp", 1.0), "Opacus PRV": Opinion(None, "pld", 1.0)}
    monkeypatch.setattr("sfumato.privacy.opinions.all_opinions", lambda *_: wrong)
    with pytest.raises(BudgetError, match="Opacus RDP computes epsilon=2"):
        check(ledger, opinions="all")
    check(ledger)


def test_a_unit_that_was_not_asked_for_is_never_taken():
    other = record(1, unit="one patient")
    with pytest.raises(BudgetError, match="unit"):
        build_ledger(BUDGET, Records.of((record(2), other)), [])
    ledger = build_ledger(BUDGET, Records.of((record(2), record(1))), []) | {
        "records": [record(2), other]
    }
    assert any("unit" in problem for problem in check_ledger(ledger)[1])
    with pytest.raises(BudgetError, match="unit"):
        inherited_events([other], 99.0, 1e-5)
    grouped = record(3, unit=UNITS[GROUP], group_weight="mean")
    assert inherited_events([record(2)], 99.0, 1e-5) and inherited_events(
        [grouped], 99.0, 1e-5, GROUP
    )
    # Both units are known, but a cost for images is not a cost for persons
    for one, asked in ((grouped, IMAGE), (record(2), GROUP)):
        with pytest.raises(BudgetError, match="protects the unit"):
            inherited_events([one], 99.0, 1e-5, asked)


# --- the state directory --------------------------------------------------------------------------


def test_a_journal_that_lacks_a_ledgers_charge_opens_none(owner):
    """Such a journal is an older copy, which lacks later charges."""
    bounded = SpendingPolicy(delta=1e-5, lifetime_epsilon=50.0)
    with pytest.raises(BudgetError, match="older copy"):
        owner.open(permission=bounded, seen=Seen(frozenset(["f" * 32])))
    first = owner.open(permission=bounded)
    known = Seen(frozenset([first.record["id"], str(owner.odometer.head())]))
    owner.open(permission=bounded, plan="next", seen=known)
    owner.open(plan="public images", seen=Seen(frozenset(["f" * 32])))  # this plan has no budget
    owner.card = replace(owner.card, source="npz")
    (owner.state / "data/digits" / CARD).write_bytes(card_text(asdict(owner.card)))
    # A custom charge is refused, whatever the lifetime budget is
    with pytest.raises(BudgetError, match="older copy"):
        owner.open(plan="one's own", seen=Seen(frozenset(["f" * 32])))


def test_keys_are_drawn_and_not_derived_from_what_others_know(tmp_path):
    keys = set()
    for name in ("here", "there"):
        (tmp_path / name / "keys").mkdir(parents=True)
        keys.add(secret_key(tmp_path / name, "digits"))
    assert len(keys) == 2


def test_numbers_from_real_images_never_land_in_an_artifact(here):
    """Artifacts are shared. So a file with such numbers may not be in an artifact's folder, at any
    depth, or in the folder of all artifacts.
    """
    with writing(here / "shared", "count"):
        pass
    for file in (
        here / "shared" / "x.csv",
        here / "shared" / "deep" / "x.csv",
        Path("artifacts/x/y.csv"),
    ):
        with pytest.raises(ConfigError, match="is in the artifact"):
            check_local("--out", file)
    check_local("--out", here / "evaluation" / "x.csv")
