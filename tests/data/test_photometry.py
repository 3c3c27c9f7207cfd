"""Picture files of every depth, photometry and alpha are shown as the file states, or refused."""

import struct
import zlib

import imagecodecs
import numpy as np
import pytest
import tifffile

from sfumato.data.decoding import decode
from sfumato.errors import ConfigError, DataError

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # all levels of 12 bits, stored in 16 bits
SHOWN = np.rint(255 * (RAMP / 4095))[..., None]
FULL = np.full_like(RAMP, 65535)
HALF = np.full_like(RAMP, 32768)
CLEAR = np.where(np.arange(64) < 32, FULL, 0)  # opaque on the left only
KINDS = {"RGB": 2, "LA": 4, "RGBA": 6}  # PNG's number for each colour type


def png(file, values, kind, orientation=1):
    """Write (H, W, C) values as a PNG of 16 bits per channel, which Pillow cannot do."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    exif = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 274, 3, 1, orientation, 0, 0)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, KINDS[kind], 0, 0, 0),
        b"eXIf": exif,
    }
    parts |= {b"IDAT": zlib.compress(rows), b"IEND": b""}
    chunks = [
        struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c))
        for n, c in parts.items()
    ]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def tiff(**ways):
    return lambda file, values: tifffile.imwrite(file, values, metadata=None, **ways)


def pnm(kind, maxval):
    def write(file, values):
        file.write_bytes(
            f"{kind} {values.shape[1]} {values.shape[0]} {maxval}\n".encode()
            + values.astype(">u2").tobytes()
        )

    return write


def jpeg_2000(bits, form="jp2"):
    def write(file, values):
        options = {"level": 0, "codecformat": form, "bitspersample": bits}
        file.write_bytes(imagecodecs.jpeg2k_encode(values, **options))

    return write


def stacked(*channels):
    return np.stack(channels, axis=-1)


COLOUR = stacked(RAMP, RAMP[::-1], RAMP.T)
SHOWN_COLOUR = np.rint(255 * (COLOUR / 4095))
ALPHA = {"photometric": "rgb", "extrasamples": ["unassalpha"]}
# file name: writer, values in the file, and pixels shown for the range 0 to 4095 (None: computed in
# the test)
SHOWN_AS = {
    "rgb.png": (lambda f, v: png(f, v, "RGB"), COLOUR, SHOWN_COLOUR),
    "rgba.png": (
        lambda f, v: png(f, v, "RGBA"),
        np.dstack([COLOUR, CLEAR]),
        SHOWN_COLOUR * (CLEAR[..., None] > 0),
    ),
    "la.png": (lambda f, v: png(f, v, "LA"), stacked(RAMP, HALF), np.rint(SHOWN * 32768 / 65535)),
    "rgb.tiff": (tiff(photometric="rgb"), COLOUR, SHOWN_COLOUR),
    "big.tiff": (tiff(photometric="rgb", byteorder=">", bigtiff=True), COLOUR, SHOWN_COLOUR),
    "planes.tiff": (
        tiff(photometric="rgb", planarconfig="separate"),
        COLOUR.transpose(2, 0, 1),
        SHOWN_COLOUR,
    ),
    "lzw.tiff": (tiff(photometric="rgb", compression="lzw", predictor=True), COLOUR, SHOWN_COLOUR),
    "rgba.tiff": (tiff(**ALPHA), np.dstack([COLOUR, CLEAR]), SHOWN_COLOUR * (CLEAR[..., None] > 0)),
    "premultiplied.tiff": (
        tiff(photometric="rgb", extrasamples=["assocalpha"]),
        np.dstack([COLOUR, HALF]),
        SHOWN_COLOUR,
    ),
    "la.tiff": (
        tiff(photometric="minisblack", extrasamples=["unassalpha"], planarconfig="contig"),
        stacked(RAMP, HALF),
        np.rint(SHOWN * 32768 / 65535),
    ),
    "white.tiff": (tiff(photometric="miniswhite"), RAMP, 255 - SHOWN),
    "white-lzw.tiff": (tiff(photometric="miniswhite", compression="lzw"), RAMP, 255 - SHOWN),
    "white-float.tiff": (tiff(photometric="miniswhite"), RAMP.astype(np.float32), 255 - SHOWN),
    "white-uint32.tiff": (tiff(photometric="miniswhite"), RAMP.astype(np.uint32), 255 - SHOWN),
    "float-rgb.tiff": (tiff(photometric="rgb"), COLOUR.astype(np.float32), SHOWN_COLOUR),
    "uint32-rgb.tiff": (tiff(photometric="rgb"), COLOUR.astype(np.uint32), SHOWN_COLOUR),
    "half.tiff": (tiff(photometric="minisblack"), (RAMP // 4 * 4).astype(np.float16), None),
    "uint32.tiff": (tiff(photometric="minisblack"), RAMP.astype(np.uint32), SHOWN),
    "uint32-high.tiff": (
        tiff(photometric="minisblack"),
        RAMP + np.uint32(2**31),
        np.full_like(SHOWN, 255),
    ),
    "uint32-motorola.tiff": (
        tiff(photometric="minisblack", byteorder=">"),
        RAMP.astype(np.uint32),
        SHOWN,
    ),
    "int16.tiff": (tiff(photometric="minisblack"), RAMP.astype(np.int16) - 1, None),
    "12-bits.pgm": (pnm("P5", 4095), RAMP, SHOWN),
    "16-bits.pgm": (pnm("P5", 65535), RAMP, SHOWN),
    "12-bits.jp2": (jpeg_2000(12), RAMP, SHOWN),
    "16-bits.j2k": (jpeg_2000(16, "j2k"), RAMP, SHOWN),
    "signed.jp2": (jpeg_2000(None), RAMP.astype(np.int16) - 1, None),
    "signed-8.jp2": (jpeg_2000(None), (RAMP % 256).astype(np.int16).astype(np.int8), None),
}


@pytest.mark.parametrize("name", SHOWN_AS)
def test_a_picture_of_any_depth_follows_its_metadata(name, tmp_path):
    write, values, expected = SHOWN_AS[name]
    write(tmp_path / name, values)
    image = decode(tmp_path / name, span=(0, 4095))
    if expected is None:
        expected = np.rint(255 * (values.astype(float) / 4095).clip(0, 1))[..., None]
    assert image.dtype == np.uint8 and np.array_equal(image, expected)
    with pytest.raises(DataError, match=r"range: \[0, 4095\]"):
        decode(tmp_path / name)


@pytest.mark.parametrize("bits", [1, 8])
def test_white_at_zero_is_turned_in_shallow_files_too(bits, tmp_path):
    values = (RAMP % 256).astype(np.uint8) if bits == 8 else RAMP % 2 == 1
    tifffile.imwrite(tmp_path / "white.tiff", values, photometric="miniswhite")
    assert np.array_equal(
        decode(tmp_path / "white.tiff")[..., 0], 255 - values * (1 if bits == 8 else 255)
    )


def test_what_cannot_be_shown_whole_is_refused_by_name(tmp_path, uninstall):
    span = (0, 4095)
    for name, write, message in (
        (
            "cmyk.tiff",
            lambda f: tifffile.imwrite(f, np.dstack([COLOUR, RAMP]), photometric="separated"),
            "SEPARATED",
        ),
        (
            "5.tiff",
            lambda f: tifffile.imwrite(f, np.dstack([COLOUR, RAMP, RAMP]), photometric="rgb"),
            "2 band",
        ),
        (
            "two.tiff",
            lambda f: tifffile.imwrite(f, np.stack([COLOUR] * 2), photometric="rgb"),
            "several frames",
        ),
        ("colour.ppm", lambda f: pnm("P6", 4095)(f, COLOUR), "12 bits per value"),
        ("turned.png", lambda f: png(f, COLOUR, "RGB", 6), "EXIF orientation rotates"),
        ("turned.tiff", tiff_turned, "Orientation must be 1 or absent"),
        ("clear.png", lambda f: png(f, stacked(RAMP, 0 * RAMP), "LA"), "fully transparent"),
        ("colour.jp2", lambda f: jpeg_2000(16)(f, COLOUR), "JPEG 2000 in colour with 16 bits"),
        ("colour.sgi", sgi, "cannot be read as an image"),
        (
            "cut.png",
            lambda f: (png(f, COLOUR, "RGB"), f.write_bytes(f.read_bytes()[:300])),
            "repair or remove",
        ),
    ):
        write(tmp_path / name)
        with pytest.raises(DataError, match=message):
            decode(tmp_path / name, span=span)
    tifffile.imwrite(tmp_path / "rgb.tiff", COLOUR, photometric="rgb")
    uninstall("tifffile")
    with pytest.raises(ConfigError, match=r"pip install 'sfumato\[depth\]'"):
        decode(tmp_path / "rgb.tiff", span=span)


def tiff_turned(file):
    tifffile.imwrite(file, COLOUR, photometric="rgb", extratags=[(274, "H", 1, 6, True)])


def sgi(file):
    head = struct.pack(">hBBHHHH", 474, 0, 2, 3, 64, 64, 3)
    file.write_bytes(head.ljust(512, b"\0") + COLOUR.transpose(2, 0, 1).astype(">u2").tobytes())


def test_signed_8_bit_values_need_a_range_and_keep_their_order(tmp_path):
    values = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    tifffile.imwrite(tmp_path / "x.tif", values)
    with pytest.raises(DataError, match="has int8 values: set the values of black and white"):
        decode(tmp_path / "x.tif")
    assert (np.diff(decode(tmp_path / "x.tif", (-128, 127)).flatten().astype(int)) == 1).all()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    "bands, ways",
    [(4, {}), (4, {"planarconfig": "separate"}), (5, {}), (2, {"photometric": "minisblack"})],
)
def test_a_band_that_is_no_alpha_is_refused(kind, bands, ways, tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (16, 16, bands)).astype(kind)
    if ways.get("planarconfig") == "separate":
        values = np.moveaxis(values, -1, 0)
    extra = ["unspecified"] * (1 + bands % 2 * (bands > 3))
    tifffile.imwrite(
        tmp_path / "x.tif", values, **{"photometric": "rgb", "extrasamples": extra, **ways}
    )
    with pytest.raises(DataError, match="is not marked as alpha: save it in grey or RGB, or mark"):
        decode(tmp_path / "x.tif", (0, 255))
