"""Small files that claim to be, or expand to, far more than fits in memory or on disk.

They are pictures, DICOM files, archives, tables and releases. Each builder needs little memory,
writes real files into a folder, and returns a function that reads them. `malformed.py` calls each
function in a process with bounded memory.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sfumato.settings.data import Data

Read = Callable[[], object]
BOMBS: dict[str, Callable[[Path], Read]] = {}
MEGABYTE = 2**20


def zeros(size: int, wrapped: bool = True) -> bytes:
    """Compress `size` zeros in repeated blocks of a megabyte.

    wrapped: True for a zlib stream, False for a raw deflate stream.
    """
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = deflater.compress(bytes(MEGABYTE)) + deflater.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    stream = size // MEGABYTE * block + last.compress(bytes(size % MEGABYTE)) + last.flush()
    checksum = size % 65521 << 16 | 1  # Adler-32 of zeros
    return b"\x78\xda" + stream + struct.pack(">I", checksum) if wrapped else stream


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), 9).save(file, "PNG")
    return file.getvalue()


# --- readers --------------------------------------------------------------------------------------


def read(path: Path, source: str = "imagefolder", **settings: Any) -> None:
    """Read every image of a set in the same way as `stage prepare sensitive`."""
    from sfumato.data.sources import read_source

    settings = {"range": (0, 255), "dataset_id": "own", **settings}
    opened = read_source(Data(source=source, path=str(path), **settings), path)
    for _ in chain(opened.train, opened.test or ()):
        pass


def look(path: Path, **settings: Any) -> None:
    """Read every image of a set in the same way as `stage init`."""
    from sfumato.data.survey import survey
    from sfumato.settings.options import InitOptions

    survey(InitOptions(images=path, range=(0, 255), **settings))


def receive(folder: Path) -> None:
    """Do what a recipient does: load a release, make a table of it, and prepare another picture.

    `release.prepare` converts the picture as the sensitive pictures were converted.
    """
    from sfumato.release.loading import load_release

    release = load_release(folder)
    release.to_pandas()
    release.prepare(folder / "picture.png")


def register(name: str, build: Callable[[Path], Read]) -> None:
    assert name not in BOMBS, name
    BOMBS[name] = build


def bomb(build: Callable[[Path], Read]) -> Callable[[Path], Read]:
    register(build.__name__.replace("_", " "), build)
    return build


# --- pictures -------------------------------------------------------------------------------------


def in_folder(folder: Path, name: str, content: bytes, **settings: Any) -> Read:
    """Write an image set of two classes, with `content` as the file `name` in the first class."""
    for label in "ab":
        (folder / label).mkdir()
        (folder / label / "0.png").write_bytes(picture())
    (folder / "a" / name).write_bytes(content)
    return lambda: read(folder, **settings)


def made_in_folder(name: str, make: Callable[[], bytes], folder: Path) -> Read:
    return in_folder(folder, name, make())


def png(width: int, height: int, bits: int, kind: int, rows: bytes, extra: bytes = b"") -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def png_chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def tiff(tags: dict[int, tuple[int, list[int]]], strips: bytes = b"", frames: int = 1) -> bytes:
    """Build a little-endian TIFF.

    tags: number -> type (3: 16-bit, 4: 32-bit) and values. Tag 273 becomes the offset of `strips`.
    """
    tags = {**tags}
    content = bytearray(b"II*\0\0\0\0\0" + strips)
    link = 4
    for _ in range(frames):
        tags[273] = 4, [8] * len(tags.get(279, (4, [0]))[1])
        entries = b""
        for number, (kind, values) in sorted(tags.items()):
            packed = struct.pack(f"<{len(values)}{'H' if kind == 3 else 'I'}", *values)
            if len(packed) > 4:
                place = struct.pack("<I", len(content))
                content += packed
                packed = place
            entries += struct.pack("<HHI", number, kind, len(values)) + packed.ljust(4, b"\0")
        content[link : link + 4] = struct.pack("<I", len(content))
        content += struct.pack("<H", len(tags)) + entries
        link = len(content)
        content += bytes(4)
    return bytes(content)


def tiff_form(
    width: int,
    height: int,
    *,
    bits: int = 8,
    channels: int = 1,
    kind: int = 1,
    packing: int = 8,
    strip: int = 0,
) -> dict[int, tuple[int, list[int]]]:
    """Return the tags of a TIFF with one strip.

    kind: 1 for whole numbers, 3 for floating point; packing: 1 for none, 8 for zlib; strip: size of
    the strip in bytes.
    """
    return {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [bits] * channels),
        259: (3, [packing]),
        262: (3, [2 if channels == 3 else 1]),
        277: (3, [channels]),
        278: (4, [height]),
        279: (4, [strip]),
        284: (3, [1]),
        339: (3, [kind] * channels),
    }


def stamped(kind: str, changes: dict[int, bytes], **options: Any) -> bytes:
    """Write a 16×16 picture with Pillow, and replace bytes. changes: offset -> new bytes."""
    file = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), (16, 16), 9).save(file, kind, **options)
    content = bytearray(file.getvalue())
    for place, value in changes.items():
        content[place : place + len(value)] = value
    return bytes(content)


def after(content: bytes, mark: bytes, step: int, value: bytes) -> bytes:
    """Overwrite bytes of `content` with `value`, from `step` bytes after the start of `mark`."""
    place = content.index(mark) + step
    return content[:place] + value + content[place + len(value) :]


def frame_of_jpeg(height: int, width: int) -> bytes:
    return after(stamped("JPEG", {}, mode="L"), b"\xff\xc0", 5, struct.pack(">HH", height, width))


def ico() -> bytes:
    inside = png(13_000, 13_000, 8, 0, zeros(13_000 * 13_001))
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inside), 22) + inside


def gif_of_frames(frames: int) -> bytes:
    block = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + frames * block + b"\x3b"


def hole(folder: Path, name: str, start: bytes) -> Read:
    done = in_folder(folder, name, start)
    with (folder / "a" / name).open("r+b") as file:
        file.truncate(2**40)
    return done


def wide(side: int, channels: int = 1) -> bytes:
    return zeros(side * (side * channels + 1))


PICTURES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "PNG of 20,000 × 20,000": ("x.png", lambda: png(20_000, 20_000, 8, 0, wide(20_000))),
    "PNG that claims 2³¹ × 2³¹": ("x.png", lambda: png(2**31 - 1, 2**31 - 1, 8, 2, zeros(100))),
    "PNG with a row of 10⁷ pixels": ("x.png", lambda: png(10**7, 1, 8, 0, zeros(10**7 + 1))),
    "PNG in 16 bits": ("x.png", lambda: png(12_000, 12_000, 16, 0, wide(12_000, 2))),
    "PNG in colour and 16 bits": ("x.png", lambda: png(7_000, 7_000, 16, 2, wide(7_000, 6))),
    "PNG with a palette": (
        "x.png",
        lambda: png(
            9_000,
            9_000,
            8,
            3,
            wide(9_000),
            png_chunk(b"PLTE", bytes(3)) + png_chunk(b"tRNS", b"\0"),
        ),
    ),
    "PNG with transparency": ("x.png", lambda: png(9_000, 9_000, 8, 6, wide(9_000, 4))),
    "PNG with a text of 400 MB": (
        "x.png",
        lambda: png(8, 8, 8, 0, zeros(72), png_chunk(b"zTXt", b"a\0\0" + zeros(400 * MEGABYTE))),
    ),
    "PNG with a profile of 400 MB": (
        "x.png",
        lambda: png(
            20_000, 20_000, 8, 0, zeros(72), png_chunk(b"iCCP", b"a\0\0" + zeros(400 * MEGABYTE))
        ),
    ),
    "GIF that claims 65,535 × 65,535": (
        "x.gif",
        lambda: stamped("GIF", {6: b"\xff" * 4}, mode="P"),
    ),
    "GIF of 20,000 frames": ("x.gif", lambda: gif_of_frames(20_000)),
    "BMP that claims 10⁵ × 10⁵": (
        "x.bmp",
        lambda: stamped("BMP", {18: struct.pack("<ii", 10**5, 10**5)}),
    ),
    "BMP upside down": ("x.bmp", lambda: stamped("BMP", {18: struct.pack("<ii", 30_000, -30_000)})),
    "TGA that claims 65,535 × 65,535": (
        "x.tga",
        lambda: stamped("TGA", {12: b"\xff" * 4}, compression="tga_rle"),
    ),
    "PCX that claims 65,535 × 65,535": ("x.pcx", lambda: stamped("PCX", {8: b"\xfe\xff" * 2})),
    "PPM that claims 10⁶ × 10⁶": ("x.ppm", lambda: b"P6\n1000000 1000000\n255\n" + bytes(99)),
    "PGM in text": ("x.pgm", lambda: b"P2\n100000 100000\n255\n" + b"1 " * 99),
    "PFM that claims 10⁵ × 10⁵": ("x.pfm", lambda: b"Pf\n100000 100000\n-1.0\n" + bytes(99)),
    "QOI that claims 2³¹ × 2³¹": (
        "x.qoi",
        lambda: b"qoif" + b"\x7f\xff\xff\xff" * 2 + b"\3\0" + bytes(99),
    ),
    "JPEG that claims 65,500 × 65,500": ("x.jpg", lambda: frame_of_jpeg(65_500, 65_500)),
    "WebP that claims 16,383 × 16,383": (
        "x.webp",
        lambda: stamped("WEBP", {26: b"\xff\x3f\xff\x3f"}, quality=50),
    ),
    "AVIF that claims 60,000 × 60,000": (
        "x.avif",
        lambda: after(stamped("AVIF", {}), b"ispe", 8, struct.pack(">II", 60_000, 60_000)),
    ),
    "ICO with a PNG of 13,000 × 13,000": ("x.ico", ico),
    "TIFF of 20,000 × 20,000": (
        "x.tiff",
        lambda: tiff(tiff_form(20_000, 20_000, strip=len(strip := zeros(20_000**2))), strip),
    ),
    "TIFF of floating point": (
        "x.tiff",
        lambda: tiff(
            tiff_form(9_000, 9_000, bits=32, kind=3, strip=len(strip := zeros(4 * 9_000**2))), strip
        ),
    ),
    "TIFF of 64-bit colours": (
        "x.tiff",
        lambda: tiff(
            tiff_form(
                4_000, 4_000, bits=64, channels=3, kind=3, strip=len(strip := zeros(24 * 4_000**2))
            ),
            strip,
        ),
    ),
    "TIFF that claims 2³¹ × 2³¹": (
        "x.tiff",
        lambda: tiff(tiff_form(2**31 - 1, 2**31 - 1), bytes(9)),
    ),
    "TIFF whose strip expands to 1 GB": (
        "x.tiff",
        lambda: tiff(tiff_form(16, 16, strip=len(strip := zeros(1024 * MEGABYTE))), strip),
    ),
    "TIFF in 16-bit colours whose strip expands to 1 GB": (
        "x.tiff",
        lambda: tiff(
            tiff_form(16, 16, bits=16, channels=3, strip=len(strip := zeros(1024 * MEGABYTE))),
            strip,
        ),
    ),
    "TIFF of 5,000 pages": (
        "x.tiff",
        lambda: tiff(tiff_form(8, 8, packing=1, strip=64), bytes(64), frames=5_000),
    ),
    "TIFF of 5,000 pages in 16-bit colours": (
        "x.tiff",
        lambda: tiff(
            tiff_form(8, 8, bits=16, channels=3, packing=1, strip=384), bytes(384), frames=5_000
        ),
    ),
    "TIFF with a tag of 4 GB": (
        "x.tiff",
        lambda: after(
            tiff(tiff_form(8, 8, bits=16, channels=3, packing=1, strip=384), bytes(384)),
            struct.pack("<HH", 258, 3),
            4,
            b"\xff" * 4,
        ),
    ),
}
for title, (file_name, make) in PICTURES.items():
    register(title, partial(made_in_folder, file_name, make))
register("PNG of a terabyte", lambda folder: hole(folder, "x.png", picture()))
register(
    "TIFF of a terabyte",
    lambda folder: hole(folder, "x.tiff", b"II+\0\x08\0\0\0" + struct.pack("<Q", 16)),
)


# --- DICOM ----------------------------------------------------------------------------------------


def element(
    group: int, number: int, kind: str, value: bytes | int | str, length: int | None = None
) -> bytes:
    """Build an element of a DICOM file in explicit little-endian form.

    length: claimed length; default: the true one.
    """
    if isinstance(value, int):
        value = struct.pack("<H", value)
    if isinstance(value, str):
        value = value.encode() + b"\0" * (len(value) % 2)
    length = len(value) if length is None else length
    form = "<HH2s2xI" if kind in ("OB", "OW", "SQ", "UN") else "<HH2sH"
    return struct.pack(form, group, number, kind.encode(), length) + value


def fragments(frame: bytes) -> bytes:
    """Wrap a compressed frame as DICOM's encapsulated pixel data."""
    frame += bytes(len(frame) % 2)
    item = b"\xfe\xff\x00\xe0"
    return (
        item
        + bytes(4)
        + item
        + struct.pack("<I", len(frame))
        + frame
        + b"\xfe\xff\xdd\xe0"
        + bytes(4)
    )


PLAIN = "1.2.840.10008.1.2.1"
DEFLATED = "1.2.840.10008.1.2.1.99"
RLE = "1.2.840.10008.1.2.5"
JPEG = "1.2.840.10008.1.2.4.50"
JPEG_LS = "1.2.840.10008.1.2.4.80"
JPEG_2000 = "1.2.840.10008.1.2.4.90"


def dicom(
    syntax: str,
    pixels: bytes,
    rows: int = 16,
    columns: int = 16,
    bits: int = 8,
    frames: int = 1,
    more: bytes = b"",
    claimed: int | None = None,
) -> bytes:
    """Build a DICOM file.

    pixels: for PLAIN, the pixels; for DEFLATED, how many zeros to deflate, as a big-endian number;
    for other syntaxes, one compressed frame;
    more: further elements;
    claimed: claimed length of the pixels, for PLAIN only; default: the true one.
    """
    body = element(0x0008, 0x0016, "UI", "1.2.840.10008.5.1.4.1.1.7")
    body += more
    body += element(0x0028, 0x0002, "US", 1) + element(0x0028, 0x0004, "CS", "MONOCHROME2")
    body += element(0x0028, 0x0008, "IS", str(frames))
    body += element(0x0028, 0x0010, "US", rows) + element(0x0028, 0x0011, "US", columns)
    for number, value in ((0x100, bits), (0x101, bits), (0x102, bits - 1), (0x103, 0)):
        body += element(0x0028, number, "US", value)
    if syntax not in (PLAIN, DEFLATED):
        pixels = fragments(pixels)
        claimed = 2**32 - 1
    if syntax == DEFLATED:
        size = int.from_bytes(pixels, "big")
        deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        start = body + element(0x7FE0, 0x0010, "OW", b"", size)
        body = (
            deflater.compress(start)
            + deflater.flush(zlib.Z_FULL_FLUSH)
            + zeros(size, wrapped=False)
        )
    else:
        body += element(0x7FE0, 0x0010, "OB" if bits == 8 else "OW", pixels, claimed)
    meta = element(0x0002, 0x0001, "OB", b"\0\1") + element(0x0002, 0x0010, "UI", syntax)
    return (
        bytes(128)
        + b"DICM"
        + element(0x0002, 0x0000, "UL", struct.pack("<I", len(meta)))
        + meta
        + body
    )


def frame_of_jpeg_2000(height: int, width: int) -> bytes:
    content = stamped("JPEG2000", {}, mode="L", no_jp2=True)
    return after(content, b"\xff\x51", 6, struct.pack(">II", width, height))


def frame_of_rle(size: int) -> bytes:
    """Build an RLE frame with one segment, which expands to `size` zeros."""
    return struct.pack("<16L", 1, 64, *[0] * 14) + b"\x81\0" * (size // 128)


def sequences(depth: int) -> bytes:
    """Nest `depth` sequences of undefined length."""
    item = b"\xfe\xff\x00\xe0" + b"\xff" * 4
    return depth * (element(0x0008, 0x1140, "SQ", b"", 2**32 - 1) + item)


DICOMS: dict[str, Callable[[], bytes]] = {
    "DICOM, deflated, of 20,000 × 20,000": lambda: dicom(
        DEFLATED, (2 * 20_000**2).to_bytes(8, "big"), 20_000, 20_000, 16
    ),
    "DICOM, deflated, that inflates to 3 GB": lambda: dicom(
        DEFLATED, (3 * 2**30).to_bytes(8, "big")
    ),
    "DICOM that claims 65,535 × 65,535": lambda: dicom(PLAIN, bytes(99), 65_535, 65_535, 16),
    "DICOM of 64 bits per pixel": lambda: dicom(PLAIN, bytes(99), 20_000, 20_000, 64),
    "DICOM of 10⁹ frames": lambda: dicom(PLAIN, bytes(99), 512, 512, frames=10**9),
    "DICOM whose pixels claim 4 GB": lambda: dicom(PLAIN, bytes(99), claimed=2**32 - 2),
    "DICOM with a header field of 4 GB": lambda: dicom(
        PLAIN, bytes(256), more=element(0x0009, 0x1001, "UN", b"x", 2**32 - 2)
    ),
    "DICOM with nested sequences": lambda: dicom(PLAIN, bytes(256), more=sequences(20_000)),
    "DICOM with a JPEG larger than stated": lambda: dicom(JPEG, frame_of_jpeg(65_500, 65_500)),
    "DICOM with a JPEG 2000 larger than stated": lambda: dicom(
        JPEG_2000, frame_of_jpeg_2000(60_000, 60_000)
    ),
    "DICOM with a JPEG-LS larger than stated": lambda: dicom(
        JPEG_LS,
        b"\xff\xd8\xff\xf7\0\x0b\x08\xff\xdc\xff\xdc\1\1\x11\0\xff\xda\0\x08\1\1\0\0\0\0"
        + bytes(99),
    ),
    "DICOM in RLE that expands to 2 GB": lambda: dicom(RLE, frame_of_rle(2**31)),
}
for title, build in DICOMS.items():
    register(title, partial(made_in_folder, "x.dcm", build))
register(
    "DICOM of a terabyte",
    lambda folder: hole(folder, "x.dcm", dicom(PLAIN, bytes(256), claimed=2**32 - 2)),
)


# --- archives -------------------------------------------------------------------------------------


def zipped(path: Path, files: dict[str, bytes | int], how: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a zip. files: name -> content, or the number of zeros to write."""
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in files.items():
            if isinstance(content, bytes):
                archive.writestr(name, content)
                continue
            with archive.open(name, "w", force_zip64=True) as file:
                for start in range(0, content, MEGABYTE):
                    file.write(bytes(min(MEGABYTE, content - start)))
    return path


def two_classes(folder: Path) -> dict[str, bytes | int]:
    return {"a/0.png": picture(), "b/0.png": picture()}


@bomb
def a_zip_in_a_zip_in_a_zip(folder: Path) -> Read:
    inner = zipped(
        folder / "inner.zip", {"a/0.png": 300 * MEGABYTE, "b/0.png": picture()}
    ).read_bytes()
    middle = zipped(folder / "middle.zip", {"inner.zip": inner}).read_bytes()
    outer = zipped(folder / "outer.zip", {"middle.zip": middle})
    return lambda: read(outer)


@bomb
def a_zip_of_300_megabytes(folder: Path) -> Read:
    path = zipped(folder / "set.zip", {**two_classes(folder), "b/1.png": 300 * MEGABYTE})
    return lambda: look(path)


@bomb
def a_zip_of_many_large_files(folder: Path) -> Read:
    path = zipped(folder / "set.zip", {f"a/{i}.png": 16 * MEGABYTE for i in range(20)})
    return lambda: read(path)


@bomb
def a_zip_in_bzip2(folder: Path) -> Read:
    path = zipped(
        folder / "set.zip", {**two_classes(folder), "b/1.png": 300 * MEGABYTE}, zipfile.ZIP_BZIP2
    )
    return lambda: read(path)


@bomb
def a_zip_in_lzma(folder: Path) -> Read:
    path = zipped(
        folder / "set.zip", {**two_classes(folder), "b/1.png": 300 * MEGABYTE}, zipfile.ZIP_LZMA
    )
    return lambda: read(path)


@bomb
def a_zip_that_lists_less_than_it_holds(folder: Path) -> Read:
    content = zipped(
        folder / "set.zip", {**two_classes(folder), "b/1.png": 300 * MEGABYTE}
    ).read_bytes()
    size, listed = (struct.pack("<I", number) for number in (300 * MEGABYTE, 100))
    (folder / "set.zip").write_bytes(content.replace(size, listed))
    return lambda: read(folder / "set.zip")


@bomb
def a_zip_of_a_file_listed_many_times(folder: Path) -> Read:
    """Write a zip with 1,000 entries that all have the same body of a megabyte."""
    content = zipped(folder / "one.zip", {"a/000.png": MEGABYTE}).read_bytes()
    start = content.index(b"PK\1\2")
    end = content.index(b"PK\5\6")
    entries = b"".join(content[start:end].replace(b"000", b"%03d" % i) for i in range(1000))
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1000, 1000, len(entries), start, 0)
    (folder / "set.zip").write_bytes(content[:start] + entries + tail)
    return lambda: read(folder / "set.zip")


@bomb
def a_zip_of_10_000_empty_files(folder: Path) -> Read:
    path = zipped(folder / "set.zip", {f"a/{i}.png": b"" for i in range(10_000)})
    return lambda: read(path)


@bomb
def zips_20_deep(folder: Path) -> Read:
    path = zipped(folder / "0.zip", two_classes(folder))
    for i in range(1, 20):
        path = zipped(folder / f"{i}.zip", {path.name: path.read_bytes()})
    return lambda: read(path)


@bomb
def folders_400_deep_in_a_zip(folder: Path) -> Read:
    path = zipped(folder / "set.zip", {**two_classes(folder), "a/" * 400 + "1.png": picture()})
    return lambda: read(path)


@bomb
def a_zip_with_a_picture_of_900_megapixels(folder: Path) -> Read:
    path = zipped(
        folder / "set.zip",
        {**two_classes(folder), "b/1.png": png(30_000, 30_000, 8, 0, wide(30_000))},
    )
    return lambda: read(path)


def npz(
    path: Path, shape: tuple[int, ...], size: int, kind: str = "|u1", **arrays: np.ndarray
) -> Path:
    """Write an .npz with images that claim `shape` but have `size` bytes of zeros."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    about = {"labels": np.array([0, 1]), "classes": np.array(["a", "b"]), **arrays}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in about.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
        with archive.open("images.npy", "w", force_zip64=True) as file:
            file.write(header.getvalue())
            for _ in range(size // MEGABYTE):
                file.write(bytes(MEGABYTE))
    return path


def made_npz(form: tuple[tuple[int, ...], int, str], folder: Path) -> Read:
    path = npz(folder / "set.npz", *form)
    return lambda: read(path, "npz")


NPZ: dict[str, tuple[tuple[int, ...], int, str]] = {
    "npz of half a gigabyte": ((2, 2**14, 2**14), 2**29, "|u1"),
    "npz that claims 2⁶⁰ values": ((2, 2**29, 2**30), MEGABYTE, "|u1"),
    "npz with a side of 10⁵": ((2, 8, 100_000), 2 * MEGABYTE, "|u1"),
    "npz of texts of 10⁹ characters": ((2,), MEGABYTE, f"<U{10**9}"),
    "npz of 10¹² images without pixels": ((10**12, 0, 0), 0, "|u1"),
}
for title, form in NPZ.items():
    register(title, partial(made_npz, form))


@bomb
def npz_of_10_million_images_without_pixels(folder: Path) -> Read:
    path = npz(folder / "set.npz", (10**7, 0, 0), 0, labels=np.zeros(10**7, np.uint8))
    return lambda: look(path)


@bomb
def zip_with_an_npz_of_half_a_gigabyte(folder: Path) -> Read:
    inner = npz(folder / "set.npz", (2, 2**14, 2**14), 2**29).read_bytes()
    path = zipped(folder / "set.zip", {"set.npz": inner})
    return lambda: read(path, "npz")


def idx(folder: Path, images: bytes, suffix: str = ".gz") -> Read:
    """Write MNIST's four files, three of them valid.

    images: bytes of the file with the training images, compressed if `suffix` is ".gz".
    """
    small = b"\0\0\x08\x03" + struct.pack(">3i", 2, 28, 28) + bytes(2 * 28 * 28)
    labels = b"\0\0\x08\x01" + struct.pack(">i", 2) + b"\0\1"
    for name, content in (
        ("t10k-images-idx3", small),
        ("t10k-labels-idx1", labels),
        ("train-labels-idx1", labels),
    ):
        (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))
    (folder / f"train-images-idx3-ubyte{suffix}").write_bytes(images)
    return lambda: read(folder, "mnist")


def gzipped(header: bytes, size: int) -> bytes:
    """Compress a header and `size` zeros, as two gzip members."""
    checksum = struct.pack("<II", 0, size % 2**32)
    return (
        gzip.compress(header)
        + b"\x1f\x8b\x08"
        + bytes(6)
        + b"\xff"
        + zeros(size, wrapped=False)
        + checksum
    )


IDX = b"\0\0\x08\x03"
register(
    "idx of 2 GB",
    lambda folder: idx(folder, gzipped(IDX + struct.pack(">3i", 2**21, 32, 32), 2**31)),
)
register(
    "idx that contains more than it states",
    lambda folder: idx(folder, gzipped(IDX + struct.pack(">3i", 2, 28, 28), 2**31)),
)
register(
    "idx that claims 4 GB", lambda folder: idx(folder, IDX + struct.pack(">3i", 2**22, 32, 32), "")
)
register("idx that claims 2⁹³", lambda folder: idx(folder, IDX + b"\x7f\xff\xff\xff" * 3, ""))
register("idx of 255 axes", lambda folder: idx(folder, b"\0\0\x08\xff" + b"\0\0\1\0" * 255, ""))


# --- Parquet --------------------------------------------------------------------------------------


def parquet(path: Path, rows: int, value: bytes) -> Path:
    """Write `rows` rows that all have the same picture, `value`, which is stored once."""
    import pyarrow
    from pyarrow import parquet

    pictures = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(rows, np.int32)), pyarrow.array([value], pyarrow.binary())
    )
    table = pyarrow.table({"image": pictures, "label": pyarrow.array(np.arange(rows) % 2)})
    parquet.write_table(table, path, compression="zstd", store_schema=False, write_statistics=False)
    return path


@bomb
def parquet_with_a_picture_of_270_megabytes(folder: Path) -> Read:
    path = parquet(folder / "set.parquet", 1, bytes(270 * MEGABYTE))
    return lambda: read(path, label_column="label", classes=("0", "1"))


@bomb
def parquet_with_a_picture_of_64_megabytes_10_000_times(folder: Path) -> Read:
    path = parquet(folder / "set.parquet", 10_000, bytes(64 * MEGABYTE))
    return lambda: read(path, label_column="label", classes=("0", "1"))


@bomb
def parquet_with_a_page_that_claims_2_gb(folder: Path) -> Read:
    path = parquet(folder / "set.parquet", 4, bytes(3 * MEGABYTE))
    content = path.read_bytes()
    # Size of the page in bytes; the page's header states it as a zigzag varint
    size = 3 * MEGABYTE + 4
    path.write_bytes(content.replace(varint(2 * size), varint(2 * (2**27 - 1)), 1))
    return lambda: read(path, label_column="label", classes=("0", "1"))


def varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


@bomb
def parquet_of_10_8_rows(folder: Path) -> Read:
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetWriter(
        folder / "set.parquet", schema=pyarrow.schema([("image", pyarrow.binary())])
    ) as writer:
        part = pyarrow.table({"image": pyarrow.nulls(10**6, pyarrow.binary())})
        for _ in range(100):
            writer.write_table(part)
    return lambda: read(folder / "set.parquet", label_column="label", classes=("0", "1"))


@bomb
def parquet_of_empty_pictures(folder: Path) -> Read:
    path = parquet(folder / "set.parquet", 10**6, b"")
    return lambda: read(path, label_column="label", classes=("0", "1"))


def pictures_with(folder: Path, name: str, content: bytes) -> Read:
    """Write four pictures, and the file `name` as the table of their labels."""
    for i in range(4):
        (folder / f"{i}.png").write_bytes(picture())
    (folder / name).write_bytes(content)
    return lambda: read(folder, label_column="label", classes=("0", "1"))


def made_table(name: str, make: Callable[[], bytes], folder: Path) -> Read:
    return pictures_with(folder, name, make())


def table_of_texts(folder: Path, rows: int, size: int) -> Read:
    """Write metadata.parquet with a text of `size` characters in each cell."""
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(rows, np.int32)), pyarrow.array(["x" * size], pyarrow.string())
    )
    file = io.BytesIO()
    parquet.write_table(
        pyarrow.table({"file_name": texts, "label": texts}),
        file,
        compression="zstd",
        store_schema=False,
    )
    return pictures_with(folder, "metadata.parquet", file.getvalue())


register(
    "a table in Parquet of long texts", lambda folder: table_of_texts(folder, 1000, 8 * MEGABYTE)
)
register("a table in Parquet of 10⁷ rows", lambda folder: table_of_texts(folder, 10**7, 4))


# --- tar ------------------------------------------------------------------------------------------


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.type = kind
    return entry.tobuf(tarfile.GNU_FORMAT)


def shard(folder: Path, content: bytes, size: int = 0) -> Read:
    path = folder / "set.tar"
    path.write_bytes(content + bytes(1024))
    if size:
        with path.open("r+b") as file:
            file.truncate(size)
    return lambda: read(path, "webdataset", classes=("0", "1"))


def sample(name: str, label: bytes, picture: bytes, kind: str = "cls") -> bytes:
    """Build the tar entries of a picture and its label."""
    parts = []
    for ending, content in ((kind, label), ("png", picture)):
        parts += [tar_header(f"{name}.{ending}", len(content)), content, bytes(-len(content) % 512)]
    return b"".join(parts)


register(
    "a tar whose picture is a terabyte",
    lambda folder: shard(
        folder,
        sample("a", b"0", picture())
        + tar_header("b.cls", 1)
        + b"1"
        + bytes(511)
        + tar_header("b.png", 2**40),
        2**40 + 2**20,
    ),
)
register(
    "a tar whose comment claims 8 GB",
    lambda folder: shard(folder, tar_header("x", 2**33 - 1, tarfile.XHDTYPE)),
)
register(
    "a tar with a comment of 8 GB",
    lambda folder: shard(folder, tar_header("x", 2**33, tarfile.XHDTYPE), 2**34),
)
register(
    "a tar of long-name headers only",
    lambda folder: shard(folder, tar_header("x", 0, tarfile.GNUTYPE_LONGNAME) * 20_000),
)
register(
    "a tar of 10,000 empty files",
    lambda folder: shard(folder, b"".join(tar_header(f"{i}.png", 0) for i in range(10_000))),
)
register(
    "a tar whose label is long",
    lambda folder: shard(
        folder, sample("a", b"0", picture()) + sample("b", bytes(8 * MEGABYTE), picture())
    ),
)
register(
    "a tar with nested JSON",
    lambda folder: shard(folder, sample("a", b"[" * 900_000, picture(), "json")),
)
register(
    "a tar with a large picture",
    lambda folder: shard(
        folder,
        sample("a", b"0", png(30_000, 30_000, 8, 0, wide(30_000))) + sample("b", b"1", picture()),
    ),
)
register(
    "a compressed tar of a gigabyte",
    lambda folder: shard(folder, gzipped(sample("a", b"0", picture()), 2**30)),
)


# --- tables and documents -------------------------------------------------------------------------

TABLES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a CSV of one line": ("metadata.csv", lambda: b"," * (100 * MEGABYTE)),
    "a CSV with a long line": (
        "metadata.csv",
        lambda: b"file_name,label\n" + b"0.png," * (20 * MEGABYTE),
    ),
    "a CSV of 10⁸ lines": ("metadata.csv", lambda: b"file_name,label\n" + b",\n" * 10**8),
    "a CSV with a quoted cell over many lines": (
        "metadata.csv",
        lambda: b'file_name,label\n"' + b'x\n","' * 1_900_000,
    ),
    "a CSV with wide rows": ("metadata.csv", lambda: (b"a," * 500_000 + b"file_name,label\n") * 25),
    "JSON lines with a long line": ("metadata.jsonl", lambda: b"[" + b"0," * (40 * MEGABYTE)),
    "JSON lines of 10⁸ lines": ("metadata.jsonl", lambda: b"{}\n" * 80_000_000),
    "nested JSON lines": ("metadata.jsonl", lambda: b"[" * 900_000 + b"\n"),
    "JSON lines of many lists": (
        "metadata.jsonl",
        lambda: (b'{"a":[' + b"[]," * 300_000 + b"[]]}\n") * 40,
    ),
}
for title, (file_name, make) in TABLES.items():
    register(title, partial(made_table, file_name, make))


# --- releases and networks ------------------------------------------------------------------------


def npy(shape: tuple[int, ...], kind: str = "|u1", content: bytes = b"") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + content


def plain_release(folder: Path, **changes: Any) -> Read:
    """Write a release of two pictures, with correct hashes.

    changes: "files" replaces files; "card" and "privacy" replace keys of card.json and
    privacy.json; "picture" replaces the picture that the recipient prepares.
    """
    from sfumato.storage.digest import digest_of_file

    card = {
        "shape": [1, 8, 8],
        "classes": ["a", "b"],
        "kinds": {"plain": 2},
        "epsilon": 1.0,
        "delta": 1e-5,
    }
    card |= {
        "prepared": {"fit": "crop", "range": None},
        "units": [],
        "adjacency": "add-or-remove-one",
    }
    card |= changes.get("card", {})
    files = {
        "images.npy": npy((2, 8, 8, 1), content=bytes(128)),
        "labels.npy": npy((2,), "<i8", bytes(16)),
        "kinds.npy": npy((2,), "<U5", np.array(["plain"] * 2).tobytes()),
        "card.json": json.dumps(card).encode(),
        **changes.get("files", {}),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "picture.png").write_bytes(changes.get("picture") or picture())
    about = {"schema": 1, "stage": "synthesize", "enabled": True, "local": False, "records": {}}
    about["files"] = {name: digest_of_file(folder / name) for name in files}
    (folder / "privacy.json").write_text(json.dumps(about | changes.get("privacy", {})))
    return lambda: receive(folder)


RELEASES: dict[str, dict[str, Any]] = {
    "a release whose card claims 65,535 × 65,535": {"card": {"shape": [3, 65_535, 65_535]}},
    "a release whose card has sides of 10¹⁸": {"card": {"shape": [1, 10**18, 10**18]}},
    "a release whose images claim 2⁶⁰ values": {
        "files": {"images.npy": npy((2**20, 2**20, 2**20, 1))}
    },
    "a release without pixels": {
        "files": {"images.npy": npy((2, 0, 8, 1)), "labels.npy": npy((2,), "<i8", bytes(16))},
        "card": {"shape": [1, 0, 8]},
    },
    "a release with floating-point images": {
        "files": {"images.npy": npy((2, 8, 8, 1), "<f8", bytes(1024))}
    },
    "a release with a label beyond the last class": {
        "files": {"labels.npy": npy((2,), "<i8", np.array([0, 2**62]).tobytes())}
    },
    "a release with more labels than images": {
        "files": {"labels.npy": npy((10**6,), "<i8", bytes(8 * 10**6))}
    },
    "a release whose kinds claim 10⁹ characters": {
        "files": {"kinds.npy": npy((2,), f"<U{10**9}", bytes(99))}
    },
    "a release whose array is a pickle": {"files": {"labels.npy": npy((2,), "|O", bytes(99))}},
    "a release whose array has a long header": {
        "files": {"labels.npy": b"\x93NUMPY\2\0" + struct.pack("<I", 2**31) + b" " * MEGABYTE}
    },
    "a release whose card has 3 million values": {"card": {"more": [0] * 3_000_000}},
    "a release that lists files outside of its folder": {
        "privacy": {"files": {"/proc/kcore": "", "../../etc/passwd": ""}}
    },
}
for title, changes in RELEASES.items():
    register(title, partial(plain_release, **changes))
register(
    "a picture of 20,000 × 20,000 that a recipient prepares for a release",
    lambda folder: plain_release(folder, picture=png(20_000, 20_000, 8, 0, wide(20_000))),
)


@bomb
def a_release_that_lists_3_million_files(folder: Path) -> Read:
    files = dict.fromkeys(map(str, range(3_000_000)), "")
    return plain_release(folder, privacy={"files": files})


@bomb
def a_release_whose_card_is_a_terabyte(folder: Path) -> Read:
    done = plain_release(folder)
    with (folder / "privacy.json").open("r+b") as file:
        file.truncate(2**40)
    return done


def weights(folder: Path, content: bytes) -> Read:
    from torch import nn

    from sfumato.storage.weights import load_network

    (folder / "weights.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return lambda: load_network(folder, lambda: nn.Linear(2, 2), "pretrain")


def listed_tensors() -> bytes:
    """Build a safetensors header that lists a million empty tensors."""
    tensors = (
        f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000)
    )
    header = ("{" + ",".join(tensors) + "}").encode()
    return struct.pack("<Q", len(header)) + header


register(
    "weights that claim 2⁶⁰ bytes", lambda folder: weights(folder, struct.pack("<Q", 2**60) + b"{}")
)
register("weights of a million tensors", lambda folder: weights(folder, listed_tensors()))
