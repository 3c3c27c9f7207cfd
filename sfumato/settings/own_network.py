"""A network of one's own, whose features a teacher or a distance may use."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sfumato.settings.fields import Positive, PositiveFloat, Strict

CONVERT = (
    "a file that holds its own network, such as TorchScript, is a program, and none is run. Name a classification "
    "model of torchvision in `architecture`, and save its weights as safetensors: docs/howto.md shows how"
)


class OwnNetwork(Strict):
    """A classification model of torchvision by name, with weights in safetensors: nothing of the file is run."""

    path: str  # of the weights, a safetensors file
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # hex sha256 of the file
    architecture: str  # a classification model of torchvision, such as resnet18; its last linear layer is left out
    side: Positive | None = None  # that images are resized to; None: as they are
    channels: Literal[1, 3] = 3  # that it expects; grey is repeated
    mean: tuple[float, ...] = (0.0,)  # subtracted from the pixels, which are from 0 to 1: one number, or one a channel
    std: tuple[PositiveFloat, ...] = (1.0,)  # by which they are then divided
    declared_public: bool = False  # owner's confirmation: it was not trained on sensitive images

    @model_validator(mode="before")
    @classmethod
    def names_an_architecture(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("architecture") is None:
            raise ValueError(f"architecture is missing: {CONVERT}")
        return given

    def arguments(self) -> dict[str, Any]:
        """Those of `sfumato.features.own_network.OwnFeatures`."""
        return self.model_dump(exclude={"declared_public"})
