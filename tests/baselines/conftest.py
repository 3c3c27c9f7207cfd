"""Fixtures of the privacy tests, for the queries of the baselines."""

import parts  # noqa: F401 - adds tests/privacy to the path
from owners import owner  # noqa: F401
