"""Sources without files: scikit-learn's handwritten digits, and public images that the program
draws.
"""

from pathlib import Path

import numpy as np

from sfumato.data.rendered import DRAWN, draw_all
from sfumato.data.sources.source import Request, Source, examples
from sfumato.errors import ConfigError


def read_digits(request: Request, raw: Path) -> Source:
    """Read 1797 images of 8×8 pixels, with values 0..16 scaled to 0..255."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Source(
        tuple("0123456789"), examples(images, bunch.target, request, "digits"), None, len(images)
    )


def read_drawn(request: Request, raw: Path) -> Source:
    """Draw `request.per_class` images of each class, with the requested size and channels."""
    if request.path is not None:
        raise ConfigError(
            f"public.path={request.path} has no effect, because public.source={request.name} "
            "reads no files: leave public.path out."
        )
    assert request.size is not None and request.channels is not None  # set for all public sources
    classes, draw = DRAWN[request.name]((request.channels, *request.size))
    count = len(classes) * request.per_class
    return Source(
        classes, draw_all(draw, len(classes), request.per_class, request.seed), None, count
    )
