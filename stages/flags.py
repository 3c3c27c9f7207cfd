"""Commands that take their options as one dataclass, in place of a parameter each."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any


def flag(name: str) -> str:
    """Return the name of an option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def with_flags(flags: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Show Typer one parameter for each field of a dataclass, which is the first parameter of the command.

    flags: how Typer reads each field. The defaults are those of the dataclass.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        first, *others = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def called(**given: Any) -> None:
            options = first.annotation(**{name: given.pop(name) for name in flags})
            command(options, **given)

        vars(called)["__signature__"] = inspect.Signature([*parameters_of(first.annotation, flags), *others])
        return called

    return decorate


def parameters_of(kind: type, flags: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        form = inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(field.name, form, default=default, annotation=flags[field.name])
