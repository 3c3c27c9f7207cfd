import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base

from sfumato.data.decoding import decode
from sfumato.errors import DataError


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_only_a_fully_transparent_picture_is_refused(tmp_path, mode):
    pixels = np.full((4, 4, len(mode)), 200, np.uint8)
    pixels[..., -1] = 0
    Image.fromarray(pixels, mode).save(tmp_path / "clear.png")
    with pytest.raises(DataError, match=r"clear\.png is fully transparent"):
        decode(tmp_path / "clear.png")
    pixels[0, 0, -1] = 255
    Image.fromarray(pixels, mode).save(tmp_path / "part.png")
    assert decode(tmp_path / "part.png").max() == 200


@pytest.mark.parametrize(
    "form", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP"]
)
def test_each_form_of_a_plain_picture_is_read(tmp_path, form):
    Image.init()
    if form not in Image.SAVE:
        pytest.skip("this Pillow does not write it")
    Image.new("RGB", (16, 8), (200, 200, 200)).save(tmp_path / "x", form)
    assert decode(tmp_path / "x").shape == (8, 16, 3)
    assert abs(int(np.median(decode(tmp_path / "x"))) - 200) < 5


def test_an_icon_is_refused_because_pillow_decodes_it_unchecked(tmp_path):
    """The header of an icon may state 16 pixels per side for a picture of 13,000. Pillow would take
    646 MB of memory before it checks the size.
    """
    Image.new("L", (16, 16), 200).save(tmp_path / "x.ico")
    with pytest.raises(DataError, match="is an icon"):
        decode(tmp_path / "x.ico")


def test_a_photograph_with_a_preview_is_read_upright(tmp_path):
    exif = Image.Exif()
    exif[Base.Orientation] = 6  # the camera was turned by 90 degrees
    photograph = Image.new("RGB", (16, 8), (200, 200, 200))
    preview = Image.new("RGB", (4, 2))
    photograph.save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=[preview], exif=exif)
    image = decode(tmp_path / "x.jpg")
    assert image.shape == (16, 8, 3) and abs(int(np.median(image)) - 200) < 5
