import numpy as np
import pytest

from sfumato.data.images import ImageSet
from sfumato.evaluation import plots
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.plots import framed, plot_neighbours

RNG = np.random.default_rng(0)
PIXELS = Extractor(name="pixels", digest="pixels", embed=lambda images: images.mean(1).flatten(1))


def image_set(count, classes, channels=1):
    images = RNG.integers(0, 256, size=(count, 8, 8, channels), dtype=np.uint8)
    return ImageSet(images, np.arange(count) % classes, tuple(f"class {i}" for i in range(classes)))


@pytest.mark.parametrize(("classes", "channels"), [(2, 3), (10, 1), (30, 1)])
def test_a_copied_image_is_shown_first_and_called_local(tmp_path, monkeypatch, classes, channels):
    synthetic = image_set(60, classes, channels)
    real = image_set(80, classes, channels)
    shown = []
    copied = 1 + classes  # an image of class 1
    synthetic.images[copied] = real.images[31]

    def noted(image, scale, colour):
        shown.append((image.tobytes(), colour))
        return framed(image, scale, colour)

    monkeypatch.setattr(plots, "framed", noted)
    plot_neighbours(PIXELS, synthetic, real, tmp_path / "neighbours.svg")
    text = (tmp_path / "neighbours.svg").read_text()
    assert "local: not for release" in text and "class 1" in text
    copy = shown.index((synthetic.images[copied].tobytes(), (37, 99, 168)))  # blue
    assert shown[copy + 1] == (real.images[31].tobytes(), (224, 122, 31))  # orange
    # The copy is the first picture of class 1
    assert copy == 1 + 2 * min(plots.PAIRS, np.count_nonzero(synthetic.labels == 0))
