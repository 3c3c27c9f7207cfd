"""All parameters: the sections of `params.yaml`, completed by defaults, profile and recipe."""

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, create_model, field_validator, model_validator

from sfumato.errors import ConfigError, explained, nearest, reason_of
from sfumato.settings.data import Data, Public
from sfumato.settings.fields import Settings, Strict, is_positive
from sfumato.settings.noise import noise_at, weights_at
from sfumato.settings.privacy import Privacy
from sfumato.settings.queries import Teacher
from sfumato.settings.release import Release
from sfumato.settings.stage import Stage
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.settings.training import Model


class Common(Strict):
    """The sections and values that do not belong to a single stage."""

    recipe: str = "full"  # Method: the name of a file in pipelines/
    # Settings that suit a data set and the speed of a machine: the name of a file in
    # pipelines/profiles/; None: no profile
    profile: str | None = "digits"
    run: tuple[str, ...] = ()  # Stages to run. A list in params.yaml replaces the recipe's list
    # Seed of initialisation, augmentation and image generation, below 2³². The privacy noise and
    # the draws of sensitive images do not depend on it
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    data: Data = Data()
    privacy: Privacy = Privacy()
    release: Release = Release()
    model: Model = Model()
    public: Public = Public()

    @model_validator(mode="before")
    @classmethod
    def by_epsilon(cls, values: dict[str, object]) -> dict[str, object]:
        """Before validation, resolve the settings that depend on ε: the constants of the teacher,
        the shares of queries and the weights of sources.

        If ε is not a positive number, nothing is resolved. The validation then refuses this ε, even
        if it is text such as '1', because the field `epsilon` is strict.
        """
        privacy = values.get("privacy", {})
        epsilon = None
        if isinstance(privacy, dict):
            epsilon = privacy.get("epsilon", Privacy().epsilon)
        if not is_positive(epsilon):
            return values
        resolved: dict[str, object] = {"teacher": {}, **values}
        for name, section in resolved.items():
            if not isinstance(section, dict):
                continue
            if name == "teacher":
                fitted_on = section.get("fitted_on", Teacher().fitted_on)
                section = Teacher.constants(str(fitted_on), epsilon) | section
            try:
                if isinstance(table := section.get("noise"), dict):
                    section = {**section, "noise": noise_at(epsilon, table)}
                if name == "synthesize" and isinstance(weights := section.get("sources"), dict):
                    section = {**section, "sources": weights_at(epsilon, weights)}
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            resolved[name] = section
        return resolved

    @field_validator("run")
    @classmethod
    def known_stages(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in STAGES:
                raise ValueError(f"{name!r} is not a stage: {nearest(name, STAGES)}")
        return names

    @model_validator(mode="after")
    def spends_on_queries(self) -> Self:
        for name in self.privacy.spend_again:
            if name not in QUERIES:
                raise ValueError(
                    f"privacy.spend_again: {name!r} is not a query, and only queries spend: "
                    "remove it"
                )
        return self

    def runs(self, stage: str) -> bool:
        return stage in self.run

    def inputs_of(self, stage: str) -> list[str]:
        """Return the inputs that a stage reads under its settings.

        One of these may be "public". Others may come from stages that are not in `run`.
        """
        return [*filter(getattr(self, stage).reads, STAGES[stage].inputs)]

    @property
    def reads_public(self) -> bool:
        """Return whether a stage in `run` reads public images. Otherwise, none are prepared."""
        return any("public" in self.inputs_of(name) for name in self.run)


def defaults(stage: Stage) -> tuple[type[Settings], Settings]:
    """Return the type and the default of a stage's section. Raises ConfigError if there is no
    default, or if another section already has this name.
    """
    failed = f"stage {stage.name}: the class {stage.settings_in} cannot be used for its settings"
    with explained(
        ConfigError,
        lambda error: f"{failed} ({reason_of(error)}): fix the stage's package, or uninstall it",
        causes=(Exception,),
    ):
        if stage.name in Common.model_fields:
            raise ValueError("params.yaml has another section with this name")
        return stage.settings, stage.settings()


if TYPE_CHECKING:

    class Params(Common):
        """The parameters in `params.yaml`, completed by the recipe, the profile and the defaults.

        Each stage has a section, named after the stage, with the settings that the stage declares.
        """

        def __getattr__(self, stage: str) -> Any: ...

else:
    Params = create_model(
        "Params",
        __base__=Common,
        __doc__=(
            "The parameters in `params.yaml`, completed by the recipe, the profile and the "
            "defaults."
        ),
        **{name: defaults(stage) for name, stage in STAGES.items()},
    )
