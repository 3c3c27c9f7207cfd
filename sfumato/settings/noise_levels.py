"""Distributions of a diffusion model's noise levels."""

from typing import Annotated, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from sfumato.settings.fields import Scale, Strict


class NoiseLaw(Strict):
    """A distribution of noise levels, identified by its name in `law`."""

    law: str

    @model_serializer(mode="wrap")
    def with_law(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Keep `law` even if defaults are left out, because it is needed to choose the class."""
        return {"law": self.law, **handler(self)}


class LogNormal(NoiseLaw):
    """Log-normal noise levels: ln σ ~ N(mean, std²) (EDM)."""

    law: Literal["log-normal"] = "log-normal"
    mean: Annotated[float, Field(ge=-10, le=10)] = -1.2  # Mean of ln σ
    std: Annotated[float, Field(ge=1e-3, le=5)] = 1.2  # Standard deviation of ln σ


class TimestepMixture(NoiseLaw):
    """Timesteps t from a mixture of uniform distributions (DP-Diffusion §3.3).

    Range i has the probability wᵢ/Σw. Within it, t is uniform on {bᵢ, …, bᵢ₊₁ − 1}, where b is
    `bounds`. The timesteps refer to a schedule of 1000 steps.
    """

    law: Literal["timesteps"] = "timesteps"
    # Weight wᵢ of each range
    weights: Annotated[tuple[Scale, ...], Field(min_length=1)] = (0.05, 0.9, 0.05)
    # Ends of the ranges: increasing integers from 0 to 1000. n weights need n + 1 ends
    bounds: Annotated[tuple[int, ...], Field(min_length=2)] = (0, 200, 800, 1000)

    @model_validator(mode="after")
    def one_more_bound_than_weights(self) -> Self:
        increasing = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if (
            len(self.bounds) != len(self.weights) + 1
            or not increasing
            or self.bounds[0] < 0
            or self.bounds[-1] > 1000
        ):
            raise ValueError(
                f"bounds={list(self.bounds)}: expected {len(self.weights) + 1} increasing integers "
                "from 0 to 1000, one more than the number of weights"
            )
        return self


NoiseLevels = Annotated[LogNormal | TimestepMixture, Field(discriminator="law")]
