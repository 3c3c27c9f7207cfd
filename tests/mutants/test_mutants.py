"""Each mutant still applies, and its tests exist. Each known mistake has at least two mutants."""

import ast
import re
from collections import Counter

import pytest
from run import ROOT, load_mutants

MUTANTS = load_mutants()
KNOWN = 27  # mistakes found in public code of these methods, or by attacks on this project


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_existing_tests(mutant):
    code = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert code.count(mutant.find) == 1, (
        "change its fragment in tests/mutants to what the code is now"
    )
    changed = code.replace(mutant.find, mutant.replace)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(code))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("[")[0].partition("::")
        assert not name or re.search(
            rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M
        ), test


def test_every_known_mistake_has_two_mutants():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    variants = Counter(mutant.mistake for mutant in MUTANTS if not mutant.harmless)
    assert [number for number in range(1, KNOWN + 1) if variants[str(number)] < 2] == []
