"""The section `privacy`: the target, the unit, and what may be spent."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from sfumato.errors import ConfigError
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.fields import PositiveFloat, Strict, is_positive

FEWEST_UNITS = 3  # of a dataset
MOST_UNITS = 10**10
UNLIMITED = "unlimited"  # a lifetime budget: for images that are public


def parse_lifetime(value: object) -> object:
    """A lifetime budget: a positive number, or "unlimited"."""
    if value is not None and value != UNLIMITED and not is_positive(value):
        raise ValueError("expected a positive number, or unlimited if the images are public")
    return value


Lifetime = Annotated[float | str | None, BeforeValidator(parse_lifetime)]


class Privacy(Strict):
    """What is protected, how strongly, and what may be spent on the images in all."""

    epsilon: PositiveFloat = 10.0  # target ε of one release
    # target δ, at most 1 / size_hint; None: 1 / (size_hint · ln size_hint)
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    # unit of privacy: an image with its label (writing `image` confirms that no two images are of one person), or all
    # images of one person (data.groups); None: an image, without that confirmation
    unit: Literal["image", "group"] | None = None
    # m, a public number of images: a group of n counts as min(n, m)/m; None: all groups count alike
    group_cap: Annotated[int, Field(ge=2)] | None = None
    # public, rounded number of units (images, or persons with unit: group); fixes sample rate, steps, σ and δ; required
    size_hint: Annotated[int, Field(ge=FEWEST_UNITS, le=MOST_UNITS)] | None = None
    declared_size: bool = False  # the number of units is exactly size_hint and public; records then use zero-out-one
    # how mechanisms are composed: Rényi DP, privacy loss distributions (PLD), or `exact`, as new projects have: a
    # closed form if no query samples, else PLD. A change of it spends again
    accountant: Literal["rdp", "pld", "exact"] = "rdp"
    # queries to pay for again, with those that depend on them, and how often in all: {count: 1}; [count] means the same
    spend_again: dict[str, Annotated[int, Field(ge=1)]] = Field(default={})
    # limit on everything ever charged to the dataset; None: `epsilon`. `unlimited` is for public images; a profile's
    # holds for the profile's own images only
    lifetime_epsilon: Lifetime = None

    @field_validator("spend_again", mode="before")
    @classmethod
    def once_each(cls, value: object) -> object:
        if value is True:
            raise ValueError("it names queries and how often to pay for each again, such as {count: 1}")
        return dict.fromkeys(value, 1) if isinstance(value, (list, tuple)) else value or {}

    @model_validator(mode="after")
    def cap_of_groups(self) -> Self:
        if self.group_cap is not None and self.unit != GROUP:
            raise ValueError("group_cap goes with unit: group")
        return self

    @property
    def protected(self) -> Literal["image", "group"]:
        return self.unit or IMAGE

    @property
    def size(self) -> int:
        """`size_hint`, which must be known by now."""
        if self.size_hint is None:
            what = "a public, rounded number of sensitive images (of persons under unit: group), such as 50000"
            raise ConfigError(f"privacy.size_hint is missing: give {what}")
        return self.size_hint

    @property
    def lifetime(self) -> float | str:
        return self.lifetime_epsilon or self.epsilon
