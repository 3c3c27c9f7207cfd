import numpy as np
import pytest
from PIL import Image

from sfumato.data.images import ImageSet
from sfumato.evaluation import plots
from sfumato.evaluation.plots import framed, plot_accuracy, plot_neighbours

RNG = np.random.default_rng(0)
METRICS = {
    "scope": "local",
    "warnings": [],
    "release": {name: {"mean": 0.8, "std": 0.01, "per_seed": [0.8]} for name in ("lr", "cnn")}
    | {"fidelity": {"space": "x", "frechet": 3.0}},
    "real": {name: {"mean": 0.9, "std": 0.01, "per_seed": [0.9]} for name in ("lr", "cnn")},
}


def image_set(count, classes, channels=1):
    images = RNG.integers(0, 256, size=(count, 8, 8, channels), dtype=np.uint8)
    return ImageSet(images, np.arange(count) % classes, tuple(f"class {i}" for i in range(classes)))


def test_the_accuracies_are_drawn_where_asked(tmp_path):
    plot_accuracy(METRICS, tmp_path / "plots" / "accuracy.png")
    with Image.open(tmp_path / "plots" / "accuracy.png") as picture:
        assert picture.width > 700 and picture.height > 500
    plot_accuracy(METRICS, tmp_path / "accuracy.svg")
    text = (tmp_path / "accuracy.svg").read_text()
    assert "release" in text and "local" in text and "fidelity" not in text


@pytest.mark.parametrize(("classes", "channels"), [(2, 3), (10, 1), (30, 1)])
def test_pictures_of_features_say_that_they_are_local(tmp_path, classes, channels):
    synthetic, real = image_set(60, classes, channels), image_set(80, classes, channels)
    features, known = RNG.normal(size=(60, 5)).astype(np.float32), RNG.normal(size=(80, 5)).astype(np.float32)
    plot_neighbours(synthetic, real, features, known, tmp_path / "neighbours.svg")
    text = (tmp_path / "neighbours.svg").read_text()
    assert "local: not for release" in text and "class 1" in text


def test_a_copied_image_is_shown_first_beside_its_source(tmp_path, monkeypatch):
    synthetic, real = image_set(40, 4), image_set(50, 4)
    features, known = RNG.normal(size=(40, 5)), RNG.normal(size=(50, 5))
    features[9] = known[31]  # class 1
    shown = []
    monkeypatch.setattr(
        plots,
        "framed",
        lambda image, scale, colour: shown.append((image.tobytes(), colour)) or framed(image, scale, colour),
    )
    plot_neighbours(synthetic, real, features, known, tmp_path / "neighbours.png", pairs=3)
    del shown[0]  # what stands where a class has fewer images
    assert (
        shown[6:8] == [(synthetic.images[9].tobytes(), plots.SYNTHETIC), (real.images[31].tobytes(), plots.REAL)]
        and len(shown) == 4 * 3 * 2
    )
