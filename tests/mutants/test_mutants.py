"""Each mutant still applies, and its tests exist. Each known mistake has at least two mutants."""

import ast
import functools
import re
from collections import Counter
from itertools import zip_longest

import pytest
from run import ROOT, load_mutants

MUTANTS = load_mutants()
# Number of known mistakes. They were found in public code of these methods, or by attacks on this
# project
KNOWN = 27


@functools.cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)  # one is enough, because mutants of one file follow each other
def statements_of(file: str) -> list[ast.stmt]:
    """Parse a module of the product. Returns its statements."""
    return ast.parse(text_of(file)).body


@functools.cache
def functions_of(file: str) -> set[str]:
    """Return the names of a module's functions, outside classes."""
    return {*re.findall(r"(?m)^def (\w+)\(", text_of(file))}


def is_other_program(file: str, changed: str, line: int) -> bool:
    """Return whether a change of a module's text also changes what Python parses from it.

    line: the first line that differs. The statements before it are equal.
    """
    before, after = (
        (ast.dump(node) for node in body if node.end_lineno >= line)
        for body in (statements_of(file), ast.parse(changed).body)
    )
    return any(one != other for one, other in zip_longest(before, after))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_existing_tests(mutant):
    code = text_of(mutant.file)
    assert code.count(mutant.find) == 1, (
        "change its fragment in tests/mutants to what the code is now"
    )
    changed = code.replace(mutant.find, mutant.replace)
    if mutant.file.endswith(".py"):
        line = code[: code.index(mutant.find)].count("\n") + 1
        assert is_other_program(mutant.file, changed, line)
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("[")[0].partition("::")
        assert not name or name in functions_of(file), test


def test_every_known_mistake_has_two_mutants():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    variants = Counter(mutant.mistake for mutant in MUTANTS if not mutant.harmless)
    assert [number for number in range(1, KNOWN + 1) if variants[str(number)] < 2] == []
