"""Entries that the baselines add to the tables of general tests.

The baselines may be deleted together with `tests/baselines`, so no other test names them. A general
test adds the entries of the same table in `tests/baselines` to its own.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from sfumato.settings.stages import BASELINES

TESTS = Path(__file__).parent
sys.path += [str(TESTS / "privacy"), str(TESTS / "baselines")]


def of_baselines(module: str, table: str) -> Any:
    """Return a table of a module in `tests/baselines`; empty if the baselines were deleted."""
    return getattr(import_module(module), table) if BASELINES else {}
