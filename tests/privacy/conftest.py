"""Fixtures of the privacy tests."""

from owners import owner  # noqa: F401
