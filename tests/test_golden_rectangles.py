"""Pin each query's releases of images of 24×32 pixels, as `test_golden.py` does for 8×8.

`python tests/test_golden_rectangles.py` pins the cases that `golden_rectangles.json` lacks.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import test_golden
from test_golden import CASES, Case, Summary, as_text, computed

from sfumato.data.images import Shape
from sfumato.settings.stages import QUERIES, STAGES

GOLDEN = Path(__file__).with_name("golden_rectangles.json")
# Stage -> name of its first case
FIRST = {case.stage: name for name, case in reversed(CASES.items()) if not case.given}
PINNED = [*(FIRST[query] for query in QUERIES), "central mode", "frequency of blocks"]


@dataclass(frozen=True, kw_only=True)
class Oblong(Case):
    """A case whose digits are enlarged to 24×32."""

    @property
    def shape(self) -> Shape:
        return (3 if self.colour else 1), 24, 32


def released(name: str) -> dict[str, Summary]:
    digits = test_golden.digits

    def enlarged(*which):
        images, labels = digits(*which)
        return images.repeat(3, axis=1).repeat(4, axis=2), labels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_golden, "digits", enlarged)
        found = computed(Oblong(**vars(CASES[name])))
    return {
        what: Summary.of(tensor) for what, tensor in found.items() if what.startswith("release")
    }


def test_every_query_is_pinned():
    pinned = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert pinned.keys() == {*PINNED}, (
        "pin what is missing: PYTHONPATH=tests python tests/test_golden_rectangles.py"
    )


@pytest.mark.parametrize("name", PINNED)
def test_a_query_of_rectangles_is_pinned_by_its_revision(name):
    pinned = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    case = CASES[name]
    found = released(name)
    known = {what: Summary(**content) for what, content in pinned["tensors"].items()}
    assert (known.keys(), STAGES[case.stage].revision) == (found.keys(), pinned["revision"])
    changed = [
        line for what in known for line in known[what].differences(found[what], case.tolerance)
    ]
    assert not changed, f"what {case.stage} releases has changed: {changed[:4]}"


if __name__ == "__main__":
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for name in PINNED:
        if name not in golden:
            tensors = {what: asdict(summary) for what, summary in released(name).items()}
            stage = CASES[name].stage
            golden[name] = {"stage": stage, "revision": STAGES[stage].revision, "tensors": tensors}
    GOLDEN.write_text(as_text({name: golden[name] for name in PINNED}), encoding="utf-8")
