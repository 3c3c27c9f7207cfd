"""The section `privacy`: the target, the unit, and the limit on spending."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from sfumato.errors import ConfigError
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.fields import PositiveFloat, Strict, is_positive

FEWEST_UNITS = 3
MOST_UNITS = 10**10
UNLIMITED = "unlimited"  # lifetime budget, for public images


def parse_lifetime(value: object) -> object:
    """Return a lifetime budget unchanged. Raise ValueError unless it is None, a positive number or
    "unlimited".
    """
    if value is not None and value != UNLIMITED and not is_positive(value):
        raise ValueError("expected a positive number, or `unlimited` if the images are public")
    return value


Lifetime = Annotated[float | str | None, BeforeValidator(parse_lifetime)]


class Privacy(Strict):
    """The unit of protection, the target of one release, and the limit on all spending."""

    epsilon: Annotated[PositiveFloat, Field(strict=True)] = 10.0  # Target ε of one release
    # Target δ, at most 1 / size_hint and at most 0.001; None: 1 / (size_hint · ln size_hint), but
    # at most 0.001
    delta: Annotated[float, Field(ge=1e-300, lt=1)] | None = None
    # Unit of protection: `image` is one image with its labels, `group` all images of one person
    # (data.groups). Writing `image` also confirms that no person has two images; None: like
    # `image`, without this confirmation
    unit: Literal["image", "group"] | None = None
    # Public number m of images per person. In every measurement, a person with n images has the
    # weight min(n, m)/m, so a person with m or more images has the full weight; None: all persons
    # have the full weight. Requires the stage `count`
    group_cap: Annotated[int, Field(ge=2)] | None = None
    # Public, rounded number of units: of images or, if `unit` is `group`, of persons. Sample rates,
    # σ and δ are computed from it. Required
    size_hint: Annotated[int, Field(ge=FEWEST_UNITS, le=MOST_UNITS)] | None = None
    # Owner's statement that the number of units is public and equals size_hint exactly. The
    # guarantee then compares the set with a set in which one unit is replaced by a blank
    # (zero-out-one)
    declared_size: bool = False
    # Method to compute ε: `rdp` (Rényi DP), `pld` (privacy loss distributions), or `exact` (a
    # closed form if all queries use all images, otherwise PLD). `stage init` writes `exact`. If you
    # change the method after a release, queries spend again
    accountant: Literal["rdp", "pld", "exact"] = "rdp"
    # Queries to pay for again, each with its total number of repeat payments. Example: {count: 1},
    # or [count] for short; a later {count: 2} pays once more. Queries that depend on them are
    # charged again too
    spend_again: dict[str, Annotated[int, Field(ge=1)]] = Field(default={})
    # Limit on the total ε ever charged to the dataset; None: `epsilon`; `unlimited`: no limit, for
    # public images only. If a profile sets `unlimited`, it applies only to the profile's images
    lifetime_epsilon: Lifetime = None

    @field_validator("spend_again", mode="before")
    @classmethod
    def once_each(cls, value: object) -> object:
        if value is True:
            raise ValueError(
                "expected each query with the number of times to pay for it again, such as "
                "{count: 1}"
            )
        if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            return dict.fromkeys(value, 1)
        return value or {}

    @model_validator(mode="after")
    def cap_of_groups(self) -> Self:
        if self.group_cap is not None and self.unit != GROUP:
            raise ValueError(
                f"group_cap={self.group_cap} requires `unit: group`: set the unit, or remove "
                "group_cap"
            )
        return self

    @property
    def protected(self) -> Literal["image", "group"]:
        return self.unit or IMAGE

    @property
    def size(self) -> int:
        """Return `size_hint`. Raises ConfigError if it is missing."""
        if self.size_hint is None:
            raise ConfigError(
                "privacy.size_hint is missing: set it to the public, rounded number of sensitive "
                "images (with `unit: group`, of persons), such as 50000"
            )
        return self.size_hint

    @property
    def lifetime(self) -> float | str:
        return self.lifetime_epsilon or self.epsilon
