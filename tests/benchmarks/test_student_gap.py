"""`benchmarks/student_gap.py` splits the hold-out into halves, by person if persons are known."""

from dataclasses import replace

import numpy as np
from student_gap import halves


def test_no_person_is_in_both_halves(digits):
    few = digits.take(np.arange(100))
    for persons in (np.arange(100) // 4, np.arange(100) % 3):
        parts = halves(replace(few, groups=persons))
        assert not {*parts[0].groups} & {*parts[1].groups}
        assert sum(map(len, parts)) == 100
    assert [len(part) for part in halves(few)] == [50, 50]
