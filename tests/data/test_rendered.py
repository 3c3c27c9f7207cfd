import numpy as np
import pytest
from matplotlib.ft2font import FT2Font
from sklearn.neighbors import KNeighborsClassifier

from sfumato.data.rendered import DRAWN, drawn_set
from sfumato.data.rendered.glyphs import CHARACTERS, CONTRAST, font_files
from sfumato.data.rendered.procedural import FAMILIES

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


@pytest.mark.parametrize("source", DRAWN)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_class_is_drawn_equally_often_and_no_image_twice(source, shape):
    drawn = drawn_set(source, shape, 3)
    assert (
        drawn.shape == shape and drawn.images.dtype == np.uint8 and drawn.labels.dtype == np.int64
    )
    assert drawn.labels.tolist() == list(range(len(drawn.classes))) * 3
    assert len({image.tobytes() for image in drawn.images}) == len(drawn)
    assert all(image.min() < image.max() for image in drawn.images)


@pytest.mark.parametrize("source", DRAWN)
def test_an_image_depends_on_seed_class_and_number_alone(source):
    small = drawn_set(source, (3, 9, 13), 1, seed=4)
    large = drawn_set(source, (3, 9, 13), 2, seed=4)
    assert np.array_equal(large.images[: len(small)], small.images)
    classes, draw = DRAWN[source]((3, 9, 13))
    last = len(classes) - 1
    assert np.array_equal(draw(np.random.default_rng((4, last, 1)), last), large.images[-1])
    assert not np.array_equal(drawn_set(source, (3, 9, 13), 1, seed=5).images, small.images)


# ---- glyphs


def test_every_font_shows_every_character():
    for file in font_files():
        places = FT2Font(str(file)).get_charmap()
        assert len({places[ord(character)] for character in CHARACTERS}) == len(CHARACTERS), (
            file.name
        )


def test_grey_glyphs_are_white_on_black_and_centred():
    images = drawn_set("glyphs", (1, 28, 28), 8).images / 255
    edge = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], axis=1)
    assert np.median(edge) == 0 and (images.max(axis=(1, 2, 3)) > 0.6).all()
    assert 0.08 < images.mean() < 0.35 and 0.02 < ((images > 0.1) & (images < 0.9)).mean() < 0.3
    weight = images[..., 0]
    axis = np.arange(28) - 13.5
    off = np.stack([weight.sum(2) @ axis, weight.sum(1) @ axis]) / weight.sum((1, 2))
    assert np.abs(off).max() < 28 / 4


def test_colour_glyphs_have_two_colours_that_differ():
    for image in drawn_set("glyphs", (3, 32, 32), 2).images:
        pixels = image.reshape(-1, 3).astype(float)
        ground = np.median(np.concatenate([image[0], image[-1]]), axis=0)
        assert np.linalg.norm(pixels - ground, axis=1).max() > 0.6 * CONTRAST


def digits_of_fonts(size, per_class):
    """Return glyphs of the ten digits only, (10 · per_class, size²) in [0, 1], and their labels."""
    _, draw = DRAWN["glyphs"]((1, size, size))
    images = [
        draw(np.random.default_rng((0, label, i)), label)
        for i in range(per_class)
        for label in range(10)
    ]
    return np.stack(images).reshape(len(images), -1) / 255, np.tile(np.arange(10), per_class)


def test_characters_can_be_told_apart():
    """More than half the digits are of their nearest neighbour's class (0.64 to 0.7 measured);
    chance is a tenth.
    """
    x, y = digits_of_fonts(28, 60)
    assert KNeighborsClassifier(1).fit(x[:300], y[:300]).score(x[300:], y[300:]) > 0.5


def test_small_digits_resemble_handwritten_ones(digits):
    """Trained on glyphs only, a nearest-neighbour classifier recognises more than 45 % of
    scikit-learn's digits.

    60 % was measured; chance is 10 %.
    """
    fitted = KNeighborsClassifier(5).fit(*digits_of_fonts(8, 120))
    assert fitted.score(digits.images.reshape(len(digits), -1) / 255, digits.labels) > 0.45


# ---- textures and photographs


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_texture_stays_in_range_and_varies(name, channels):
    images = np.stack(
        [FAMILIES[name](np.random.default_rng(i), 24, 31, channels) for i in range(20)]
    )
    assert images.shape == (20, 24, 31, channels) and np.isfinite(images).all()
    pixels = images.reshape(20, -1)
    assert (
        pixels.min(1).mean() > -0.6 and pixels.max(1).mean() < 1.6 and pixels.mean(1).std() > 0.01
    )


def test_families_can_be_told_apart_by_their_roughness():
    """Roughness is the mean step between neighbouring pixels. 1/f noise and dead leaves are rougher
    than plain shapes.
    """
    drawn = drawn_set("procedural", (1, 32, 32), 40)
    step = np.abs(np.diff(drawn.images[..., 0].astype(float), axis=2)).mean((1, 2))
    mean = {name: step[drawn.labels == label].mean() for label, name in enumerate(drawn.classes)}
    assert mean["shapes"] < mean["dead-leaves"] and mean["shapes"] < mean["fractal-noise"]


def test_photographs_keep_colours_and_turn_grey_by_luminance():
    colour = drawn_set("photos", (3, 16, 16), 30)
    grey = drawn_set("photos", (1, 16, 16), 30)
    red, _, blue = colour.images[colour.labels == 0].mean((0, 1, 2))  # the sky over the palace
    assert colour.classes == ("china", "flower") and blue > 100 and red > 100
    assert np.abs(grey.images[..., 0] - colour.images @ np.array([0.299, 0.587, 0.114])).mean() < 2
