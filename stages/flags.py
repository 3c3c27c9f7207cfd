"""Options that several commands share, and commands that take all their options as one
dataclass.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

OutPath = Annotated[
    Path | None, typer.Option("--out", help="Directory to write. Default: artifacts/<stage>.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be read, written and charged, and stop.")
]
CardPath = Annotated[Path, typer.Option("--card", help="Public card of the sensitive set.")]


def flag(name: str) -> str:
    """Return the name of an option on the command line, such as --size-hint."""
    return f"--{name.replace('_', '-')}"


def with_flags(
    descriptions: Mapping[str, str],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a Typer command whose first parameter is a dataclass: on the command line, each
    field of the dataclass is an option.

    descriptions: help texts by field.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        first, *other_parameters = inspect.signature(command, eval_str=True).parameters.values()
        kind = first.annotation

        @wraps(command)
        def called(**given: Any) -> None:
            options = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            command(options, **given)

        vars(called)["__signature__"] = inspect.Signature(
            [*parameters_of(kind, descriptions), *other_parameters]
        )
        return called

    return decorate


def parameters_of(kind: type, descriptions: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    """Yield one parameter per field: a flag for a boolean field, otherwise a text that the
    dataclass parses.
    """
    for field in fields(kind):
        default = field.default
        annotation: Any = Annotated[str | None, typer.Option(help=descriptions[field.name])]
        if default is MISSING:
            default = inspect.Parameter.empty
            annotation = Annotated[str, typer.Argument(help=descriptions[field.name])]
        elif default is False:
            annotation = Annotated[
                bool, typer.Option(flag(field.name), help=descriptions[field.name])
            ]
        elif default is True:
            annotation = Annotated[bool, typer.Option(help=descriptions[field.name])]
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation=annotation,
        )
