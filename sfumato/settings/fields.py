"""Types of settings: numbers in a range, the frozen models that refuse unknown keys, and machine settings."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeGuard, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

from sfumato.errors import ConfigError
from sfumato.settings.shares import part_of

REST = "rest"


def is_positive(value: object) -> TypeGuard[float]:
    """Whether this is a number above 0, and finite as a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def size_of(sides: int | Sequence[int]) -> int | tuple[int, int]:
    """The size of images as settings and networks keep it: one number for squares, else rows and columns."""
    rows, columns = both_sides(sides)
    if rows == columns:
        return rows
    return rows, columns


def both_sides(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    rows, columns = size
    return rows, columns


def checked_size(value: Any, read: Callable[[Any], Any]) -> int | tuple[int, int]:
    """The size that `read` finds. Raises ValueError for another form, in one sentence."""
    try:
        return size_of(read(value))
    except ValueError as error:
        raise ValueError("give the pixels of a side, as in 64, or [rows, columns]") from error


def by(size: int | Sequence[int]) -> str:
    """A size in words: 24×32."""
    return "{}×{}".format(*both_sides(size))


Positive = Annotated[int, Field(gt=0, le=10**9)]
Size = Annotated[Positive | tuple[Positive, Positive], WrapValidator(checked_size)]
Draws = Annotated[int, Field(gt=0, le=1024)]
# limits of floats: beyond them a query would fail, or release nothing of use, after it was charged
PositiveFloat = Annotated[float, Field(ge=1e-9, le=1e10)]
Scale = Annotated[float, Field(ge=1e-5, le=1e5)]
LearningRate = Annotated[float, Field(ge=1e-9, le=10)]  # of Adam, which moves each weight by about so much a step
Norm = Annotated[float, Field(ge=1e-8, le=1e6)]  # an L2 clip
Fraction = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[Fraction, BeforeValidator(part_of)]
Share = Annotated[float, Field(ge=1e-4, le=1)]

# Machine settings: they change speed only, so no plan holds them. A stage reads them from its environment.
MACHINE = {"microbatch_size": "SFUMATO_MICROBATCH", "checkpoint_every": "SFUMATO_CHECKPOINT_EVERY"}


def machine(default: int | None) -> Any:
    """The field of a machine setting: it is not written into a plan."""
    return Field(default=default, exclude=True)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in the type of a field: it, or those that it is a list or a choice of."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


class Settings(Strict):
    """The parameters of one stage, which `sfumato.settings.stages` lists. A stage runs if `Params.run` names it."""

    chooser: ClassVar[str] = ""  # the key that decides which inputs are read, if one does

    def on_this_machine(self) -> Self:
        """With the machine settings of the environment. Raises ConfigError for one that is not a number."""
        set_here = {}
        for key, variable in MACHINE.items():
            if key in type(self).model_fields and (text := os.environ.get(variable)):
                if not text.isdigit() or int(text) < 1:
                    raise ConfigError(f"{variable}={text}: expected a whole number of at least 1")
                set_here[key] = int(text)
        return self.model_copy(update=set_here)

    def reads(self, name: str) -> bool:
        """Whether the stage reads its input `name` under these settings."""
        return True
