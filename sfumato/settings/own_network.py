"""A network of one's own, whose features a teacher or a distance may use."""

from typing import Annotated, Any, Literal

from pydantic import Field

from sfumato.settings.fields import Positive, PositiveFloat, Strict


class OwnNetwork(Strict):
    """A local TorchScript file, or safetensors of an architecture of torchvision; never a pickle."""

    path: str  # of the file
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # hex sha256 of the file
    # of torchvision, such as resnet18, whose last linear layer is left out; None: the file is TorchScript
    architecture: str | None = None
    side: Positive | None = None  # that images are resized to; None: as they are
    channels: Literal[1, 3] = 3  # that it expects; grey is repeated
    mean: tuple[float, ...] = (0.0,)  # subtracted from the pixels, which are from 0 to 1: one number, or one a channel
    std: tuple[PositiveFloat, ...] = (1.0,)  # by which they are then divided
    declared_public: bool = False  # owner's confirmation: it was not trained on sensitive images

    def arguments(self) -> dict[str, Any]:
        """Those of `sfumato.features.own_network.OwnFeatures`."""
        return self.model_dump(exclude={"declared_public"})
