"""Test properties that every ledger, journal and plan must have, on random examples."""

import hashlib
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_record import small_record

from sfumato.data.store import Card
from sfumato.errors import BudgetError
from sfumato.planning.resolve import make_plan, plan_texts
from sfumato.privacy.accountant import default_delta, epsilon
from sfumato.privacy.check import check_ledger, lock_problems
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text, read_ledger
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.resolved import read_lineage, read_stage_plan
from sfumato.settings.params import Params
from sfumato.storage.records import Records

HINT = 1500
BUDGET = {
    "recipe": "r",
    "accountant": "rdp",
    "delta": default_delta(HINT),
    "size_hint": HINT,
    "target": 10.0,
}
ROOT = Path(__file__).resolve().parents[2]


def record(number: int, noise_multiplier: float = 4.0) -> dict:
    return small_record(number, Mechanism(noise_multiplier=noise_multiplier))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a ledger of two charges, and its entry in DVC's lock. Returns the folder."""
    folder = tmp_path_factory.mktemp("ledger")
    ledger = build_ledger(BUDGET, Records.of(map(record, (1, 2))), [])
    (folder / "ledger.json").write_text(ledger_text(ledger))
    md5 = hashlib.md5((folder / "ledger.json").read_bytes()).hexdigest()
    stages = {"ledger": {"outs": [{"path": "ledger.json", "hash": "md5", "md5": md5}]}}
    (folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    assert reasons(folder) == []
    return folder


def reasons(folder: Path) -> list[str]:
    """Return why `stage ledger check` refuses the ledger; empty if it does not."""
    try:
        ledger = read_ledger(folder / "ledger.json")
        return [
            *check_ledger(ledger)[1],
            *lock_problems(ledger, folder / "ledger.json", folder / "dvc.lock"),
        ]
    except BudgetError as error:
        return [str(error)]


def turned(content: bytes, place: int) -> bytes:
    """Flip one bit."""
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_ledger_with_one_bit_turned_is_never_accepted(written, data):
    content = (written / "ledger.json").read_bytes()
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    try:
        (written / "ledger.json").write_bytes(turned(content, place))
        assert reasons(written) != []
    finally:
        (written / "ledger.json").write_bytes(content)


@given(
    noises=st.lists(st.floats(0.5, 50), min_size=1, max_size=5),
    damage=st.sampled_from(
        ["line out", "line twice", "swap", "bit", "cut", "anchor bit", "anchor gone", "gone"]
    ),
    data=st.data(),
)
@settings(max_examples=100)
def test_a_changed_journal_is_refused_or_counts_no_less(noises, damage, data):
    with tempfile.TemporaryDirectory(prefix="journal-") as folder:
        state = Path(folder)
        odometer = Odometer(state, "digits")
        odometer.begin()
        (state / "data" / "digits").mkdir(parents=True)  # images were prepared
        for i, noise in enumerate(noises):
            odometer.append("open", record=record(i, noise), plan=f"p{i}", work=f"w{i}")
        before = epsilon(odometer.events(), 1e-5)
        file = odometer.anchor if damage.startswith("anchor") else odometer.path
        content = file.read_bytes()
        lines = content.splitlines(keepends=True)
        i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        if damage == "line out":
            del lines[i]
        elif damage == "line twice":
            lines.insert(j, lines[i])
        elif damage == "swap":
            lines[i], lines[j] = lines[j], lines[i]
        elif damage == "cut":
            lines = [content[: place // 8]]
        else:
            lines = [turned(content, place)]
        file.write_bytes(b"".join(lines))
        if damage.endswith("gone"):
            file.unlink()
        try:
            after = epsilon(odometer.events(), 1e-5)
        except BudgetError:
            return
        assert after >= before


CARD = Card(
    dataset_id="digits",
    source="digits",
    shape=(1, 8, 8),
    classes=("a", "b", "c"),
    split="keyed",
    version="v",
)


@given(
    target=st.floats(0.3, 20),
    hint=st.integers(200, 100_000),
    steps=st.integers(1, 300),
    batch=st.integers(1, 5000),
    repeats=st.integers(1, 20),
    share=st.floats(0.5, 60),
)
@settings(max_examples=6)
def test_a_plan_holds_its_budget_and_reads_back_or_is_refused(
    target, hint, steps, batch, repeats, share
):
    params = Params.model_validate(
        {
            "run": ["count", "central", "pretrain", "finetune", "synthesize"],
            "privacy": {"epsilon": target, "size_hint": hint},
            "central": {"repeats": repeats, "batch": batch, "noise": f"{share:.3f}%"},
            "pretrain": {"phases": [{"sources": {"central": 1}}]},
            "finetune": {"steps": steps, "batch": batch, "noise": "rest"},
        }
    )
    try:
        made = make_plan(params, CARD)
    except BudgetError:
        return
    assert made.budget["epsilon"] <= target * (1 + 1e-9)
    events = [mechanism.event for mechanism in made.mechanisms.values()]
    # Computed again, because the plan may state a wrong ε
    assert epsilon(events, made.budget["delta"]) <= target * (1 + 1e-9)
    with tempfile.TemporaryDirectory(prefix="plan-") as place:
        folder = Path(place)
        for name, text in plan_texts(made).items():
            (folder / name).write_text(text)
        for name, mechanism in made.mechanisms.items():
            read = read_stage_plan(folder / f"{name}.yaml", name)
            assert read.mechanism == mechanism
            assert read_lineage(folder, name).plan == made.lineage[name].plan
            # with another mechanism, the plan has another digest, and no earlier release is used
            content = yaml.safe_load((folder / f"{name}.yaml").read_text())
            content["mechanism"]["noise_multiplier"] /= 2
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
            assert read_stage_plan(folder / f"{name}.yaml", name).digest != read.digest
