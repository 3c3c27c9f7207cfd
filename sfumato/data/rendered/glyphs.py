"""Draw digits and letters in many fonts, rotated, sheared, shifted, thinned or thickened.

There are 62 classes, as in EMNIST's full split.

Grey images are white on black, like sets of handwriting. Colour images have a random foreground and
background.
"""

import math
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from sfumato.errors import DataError

CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
CONTRAST = 110.0  # minimum distance of foreground and background colours, in units of 1/255


def glyph_drawer(shape: tuple[int, int, int]) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Return a function (random stream, label) -> glyph, (H, W, C) uint8.

    shape: (C, H, W).
    """
    basic = ImageFont.Layout.BASIC
    # Characters are 96 pixels high before they are transformed
    faces = [ImageFont.truetype(str(path), 96, layout_engine=basic) for path in font_files()]
    thinnest = max(-1.0, 48 / min(shape[1:]) - 3)  # strokes should not be much thinner than a pixel

    def draw(random: np.random.Generator, label: int) -> np.ndarray:
        picture = glyph_picture(
            faces[random.integers(len(faces))], CHARACTERS[label], random.uniform(thinnest, 5.0)
        )
        mask = place(picture, shape[1:], random)
        if shape[0] == 1:
            return mask[..., None]
        return coloured(mask, random)

    return draw


def font_files() -> list[Path]:
    """Return the paths of the matplotlib fonts that contain all of CHARACTERS.

    Raises DataError if a file is missing.
    """
    import matplotlib

    names = (
        *(
            f"DejaVuSans{kind}{style}"
            for kind in ("", "Mono")
            for style in ("-Bold", "-BoldOblique", "-Oblique", "")
        ),
        *(f"DejaVuSerif{style}" for style in ("-Bold", "-BoldItalic", "-Italic", "")),
        *(f"STIXGeneral{style}" for style in ("", "Bol", "BolIta", "Italic")),
        *("cmb10", "cmmi10", "cmr10", "cmss10", "cmti10", "cmtt10"),
    )
    files = [Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf") for name in names]
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(f"{missing[0]} is missing. Install matplotlib again.")
    return files


def glyph_picture(face: ImageFont.FreeTypeFont, character: str, weight: float) -> Image.Image:
    """Draw a character in white on black, cropped to its bounds.

    The character's outline moves outwards by `weight`, rounded to whole pixels. If `weight` is
    below -0.5, the outline moves inwards by one pixel.
    """
    stroke = max(0, round(weight))
    left, top, right, bottom = face.getbbox(character, stroke_width=stroke)
    size = (math.ceil(right - left) + 2, math.ceil(bottom - top) + 2)
    picture = Image.new("L", size)
    ImageDraw.Draw(picture).text(
        (1 - left, 1 - top), character, fill=255, font=face, stroke_width=stroke
    )
    if weight >= -0.5:
        return picture
    return picture.filter(ImageFilter.MinFilter(3))


def place(picture: Image.Image, size: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Place a glyph on a black canvas (H, W), scaled, sheared, rotated and shifted at random.

    Returns (H, W) uint8.
    """
    height, width = size
    side = min(height, width)
    fine = max(2, round(112 / side))  # the glyph is drawn this many times larger, then averaged
    # Size of the glyph as a share of the side, larger for small images
    fraction = random.uniform(min(0.85, 0.7 + 1.2 / side), 1.0)
    scale = side * fine * fraction / max(picture.size)
    stretched = np.array([[random.uniform(0.8, 1.2), random.uniform(-0.2, 0.2)], [0, 1]])
    angle = math.radians(random.uniform(-15, 15))
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    turned = rotation @ stretched * scale
    back = np.linalg.inv(turned)  # Pillow needs the map from the canvas to the picture
    room = side * fine * max(0.04, (1 - fraction) / 2)
    centre = np.array([width, height]) * fine / 2 + random.uniform(-room, room, 2)
    offset = np.array(picture.size) / 2 - back @ centre
    affine = (*back[0], offset[0], *back[1], offset[1])
    placed = picture.transform(
        (width * fine, height * fine), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR
    )
    return np.asarray(placed.reduce(fine))


def coloured(mask: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Colour a mask, (H, W) uint8, with two colours at least CONTRAST apart.

    Returns (H, W, 3) uint8.
    """
    ground, ink = random.uniform(0, 255, (2, 3))
    while np.linalg.norm(ground - ink) < CONTRAST:
        ink = random.uniform(0, 255, 3)
    return np.rint(ground + (mask[..., None] / 255.0) * (ink - ground)).astype(np.uint8)
