"""Types of settings: numbers in a range, frozen models that refuse unknown keys, and machine
settings (see MACHINE).
"""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeGuard, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

from sfumato.errors import ConfigError

REST = "rest"


def is_positive(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number above 0."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 < value <= sys.float_info.max
    )


def size_of(sides: int | Sequence[int]) -> int | tuple[int, int]:
    """Return a size as settings and networks use it: one number for squares, otherwise (rows,
    columns).
    """
    rows, columns = both_sides(sides)
    if rows == columns:
        return rows
    return rows, columns


def both_sides(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    rows, columns = size
    return rows, columns


def checked_size(
    value: object, read: Callable[[object], int | Sequence[int]]
) -> int | tuple[int, int]:
    """Parse a size with `read`. If this fails, raise a ValueError that shows the accepted forms."""
    try:
        return size_of(read(value))
    except ValueError as error:
        raise ValueError("expected the side in pixels, such as 64, or [rows, columns]") from error


def parse_share(value: object) -> float:
    """Parse a share. It is a number, or has a percent sign: "1%" is 0.01.

    Raises ValueError for any other text.
    """
    text = str(value)
    if text.endswith("%"):
        return float(text[:-1]) / 100
    return float(text)


def by(size: int | Sequence[int]) -> str:
    """Return a size as text, such as 24×32."""
    return "{}×{}".format(*both_sides(size))


def composed(text: str) -> str:
    """Return a text in the composed form of Unicode (NFC), because macOS decomposes file names."""
    return unicodedata.normalize("NFC", text)


Positive = Annotated[int, Field(gt=0, le=10**9)]
Size = Annotated[Positive | tuple[Positive, Positive], WrapValidator(checked_size)]
Draws = Annotated[int, Field(gt=0, le=1024)]
# Limits of floats. Beyond them, a query could fail or release nothing useful after it was charged.
PositiveFloat = Annotated[float, Field(ge=1e-9, le=1e10)]
Scale = Annotated[float, Field(ge=1e-5, le=1e5)]
# At most 10, because a step of Adam changes a weight by about the learning rate
LearningRate = Annotated[float, Field(ge=1e-9, le=10)]
Norm = Annotated[float, Field(ge=1e-8, le=1e6)]  # an L2 clip
Fraction = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[Fraction, BeforeValidator(parse_share)]
Share = Annotated[float, Field(ge=1e-4, le=1)]

# Machine settings change only speed, so no plan contains them. A stage reads them from environment
# variables.
MACHINE = {"microbatch_size": "SFUMATO_MICROBATCH", "checkpoint_every": "SFUMATO_CHECKPOINT_EVERY"}


def machine(default: int | None) -> Any:
    """Return the field of a machine setting (see MACHINE)."""
    return Field(default=default, exclude=True)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field: the type itself, the members of a union, or the
    elements of a list.
    """
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


class Settings(Strict):
    """The parameters of one stage of `sfumato.settings.stages`.

    A stage runs if its name is in `Params.run`.
    """

    chooser: ClassVar[str] = ""  # key of the setting that decides which inputs are read

    def on_this_machine(self) -> Self:
        """Return a copy in which environment variables, if set, replace the settings in MACHINE.

        Raises ConfigError if one of these variables is not a whole number of at least 1.
        """
        set_here = {}
        for key, variable in MACHINE.items():
            if key in type(self).model_fields and (text := os.environ.get(variable)):
                if not text.isdigit() or int(text) < 1:
                    raise ConfigError(f"{variable}={text}: expected a whole number of at least 1")
                set_here[key] = int(text)
        return self.model_copy(update=set_here)

    def reads(self, name: str) -> bool:
        """Return whether the stage reads its input `name` under these settings."""
        return True
