"""Call a program as a function of its arguments and typed answers, and capture its output."""

import functools
import sys
from collections.abc import Callable
from io import StringIO
from typing import TextIO

import pytest
import typer.main

# Otherwise, Typer builds all commands of a program at each call, which takes 11 ms
get_command = functools.cache(typer.main.get_command)


class Terminal(StringIO):
    """A terminal that records what a program writes."""

    def isatty(self) -> bool:
        return True


def call(main: Callable[[], object], *words: str, answers: str = "", screen: TextIO) -> int:
    """Run `main` with the words of a command line and typed answers. Returns its exit code.

    screen: gets all output.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words])
        patch.setattr(sys, "stdin", StringIO(answers))
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        patch.setattr(typer.main, "get_command", get_command)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
