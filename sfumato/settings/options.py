"""The options of `stage init` and of `sfumato.Project.create`, and the parsing of their text."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from sfumato.errors import ConfigError
from sfumato.settings.data import OUTER, DatasetId, Groups, Range, Volume
from sfumato.settings.fields import Part, PositiveFloat, Size, both_sides, composed

ALL: Literal["all"] = "all"  # the owner's confirmation that no class name identifies a person
Classes = tuple[Annotated[str, AfterValidator(composed)], ...] | Literal["all"]


def parse_groups(text: str) -> Groups:
    """Parse the rule for finding persons' ids.

    The text is the path of a CSV file, the nesting of folders ("class/person" or "person/class"),
    the name of a column, or a pattern.
    """
    if text == "class/person":
        return Groups(folder=True)
    if text == "person/class":
        return Groups(folder=OUTER)
    if Path(text).expanduser().is_file() or text.lower().endswith(".csv"):
        return Groups(csv=str(Path(text).expanduser().resolve()))
    if "(" not in text:  # A pattern has parentheses around the id
        return Groups(column=text)
    return Groups(pattern=text)


def parse_classes(text: str) -> Classes:
    """Parse class names from a line of CSV.

    A name that contains a comma must be in double quotes.
    """
    if text == ALL:
        return ALL
    try:
        (names,) = csv.reader([text], skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise ValueError(
            f"the class names cannot be parsed ({error}): write them as a,b,c, and put a name that "
            "contains a comma in double quotes"
        ) from error
    return tuple(name.strip() for name in names)


def parse_range(text: str) -> tuple[float, float]:
    """Parse the pixel values of black and white, separated by a comma."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError("expected two numbers, such as 0,4095") from error
    return low, high


def parse_volume(text: str) -> Volume:
    """Parse the slices that become images: keys and values separated by commas, as in
    axis=axial,from=30.
    """
    pairs = [pair.partition("=") for pair in text.replace(" ", "").split(",")]
    try:
        return Volume.model_validate({key: value for key, _, value in pairs})
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        if first["type"] == "extra_forbidden":
            keys = "axis, from, to, step or suffix, as in axis=axial,from=30"
            raise ValueError(f"{key!r} is not a key of a volume: expected {keys}") from error
        raise ValueError(f"{key}={first['input']} is not valid: {first['msg']}") from error


SIZES = "expected 8 pixels per side or more, such as 64 or 192x256"


def parse_size(text: str) -> Size | None:
    """Parse a size: the side of square images, such as 64, or rows x columns, such as 192x256."""
    form = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", text)
    if form is None:
        raise ValueError(SIZES)
    return at_least_8((int(form[1]), int(form[2] or form[1])))


def at_least_8(size: Size | None) -> Size | None:
    if size is not None and min(both_sides(size)) < 8:
        raise ValueError(SIZES)
    return size


def from_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Return a validator that parses text or a path, and returns any other value unchanged."""

    def read(value: object) -> object:
        if not isinstance(value, (str, Path)):
            return value
        try:
            return parse(str(value))
        except ValidationError as error:
            raise ValueError(reason_of_invalid(error)) from error

    return BeforeValidator(read)


def reason_of_invalid(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")


def absolute(path: Path) -> Path:
    return path.expanduser().resolve()


STRICT_OPTIONS = ConfigDict(extra="forbid", validate_default=True, coerce_numbers_to_str=True)
Place = Annotated[Path, AfterValidator(absolute)]


@dataclass(frozen=True, kw_only=True, config=STRICT_OPTIONS)
class InitOptions:
    """An owner's choices for a folder of images and its project.

    If an option is None, a value is proposed, and the owner may be asked to confirm or replace it.
    Without `public`, no public images are used.

    Raises:
        ConfigError: A value is not valid.
    """

    images: Place
    epsilon: PositiveFloat | None = None
    # Rule for finding persons' ids
    groups: Annotated[Groups | None, from_text(parse_groups)] = None
    alone: bool = False  # confirmation that each image without an id is its person's only image
    one_image_each: bool = False  # confirmation that no person has two images
    range: Annotated[Range, from_text(parse_range)] = None  # values shown as black and white
    volume: Annotated[Volume | None, from_text(parse_volume)] = None  # slices that become images
    label_column: str | None = None
    classes: Annotated[Classes | None, from_text(parse_classes)] = None
    skip: Part = 0.0  # share of the pictures that may be broken
    fit: Literal["crop", "pad"] = "crop"
    minutes: PositiveFloat | None = None
    size: Annotated[Size | None, from_text(parse_size), AfterValidator(at_least_8)] = None
    # Published number of images or persons
    size_hint: Annotated[int, Field(ge=3, le=10**9)] | None = None
    dataset_id: DatasetId | None = None
    public: Place | None = None  # folder of public images
    evaluate: bool = True
    out: Place = Path()  # folder of the project
    force: bool = False  # replace the files of an earlier project

    @model_validator(mode="wrap")
    @classmethod
    def explain(cls, values: ArgsKwargs, validate: Callable[[ArgsKwargs], Self]) -> Self:
        """Validate the options. Raise the first mistake as a ConfigError about its option, or as a
        TypeError if there is no such option.
        """
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if first["type"] == "unexpected_keyword_argument":
                raise TypeError(f"{name!r} is not an option of a new project") from error
            text = f"{{option.{name}}}={{given}}: {{reason}}"
            given = (values.kwargs or {}).get(name)
            raise ConfigError(
                text, option=name, given=given, reason=reason_of_invalid(error)
            ) from error
