"""Types of functions that show the progress of long work, and defaults that show nothing."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # called with (done, total)
Say = Callable[[str], None]  # shows a line


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def discard(text: str) -> None:
    """Show nothing."""
