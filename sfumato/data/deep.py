"""Decode pictures with more than 8 bits per value: 16-bit and floating-point files, and DICOM.

A public range of values is mapped to 8 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from errno import EINVAL
from functools import lru_cache, partial, wraps
from io import SEEK_CUR, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from PIL import ImageOps
from PIL.ExifTags import Base as Tag
from PIL.ImageFile import ImageFile

from sfumato.data.codestreams import (
    check_codestream,
    check_compressed,
    check_deflated,
    codestream_of,
    depth_of,
)
from sfumato.errors import ConfigError, DataError, SfumatoError, explained, lacks_memory, reason_of
from sfumato.storage.files import reading
from sfumato.storage.limits import (
    LARGEST_PICTURE,
    BoundedReader,
    check_picture_file,
    room_for_picture,
)

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MIN_IS_WHITE = 0
SIGNED = 2  # value of the TIFF tag SampleFormat for signed integers
UNSPECIFIED = 0  # value of the TIFF tag ExtraSamples for a band without a stated meaning
TRANSPARENT = "is fully transparent: save it without transparency, or remove it"
STRIP = 2**20  # number of values to convert at a time; each takes 8 bytes
Span = tuple[float, float]
T = TypeVar("T")


def eight_bits(
    values: np.ndarray,
    span: Span | None,
    name: str,
    alpha: np.ndarray | None = None,
    inverted: bool = False,
    rescale: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Map values to uint8: black up to span[0], white from span[1], and linear in between.

    values: (H, W) or (H, W, C);
    alpha: (H, W, 1) in [0, 1], opacity of the pixels over a black background;
    inverted: whether to swap black and white;
    rescale: function to apply to the values first, some rows at a time.

    Returns (H, W, C); C is 1 for (H, W). Raises DataError for non-finite values. Also raises
    DataError if `span` is None, because a span must not be computed from the images.
    """
    if span is None:
        raise DataError(
            "{name} has {kind} values: set the values of black and white with data.range, for "
            "example data.range: [0, 4095] for 12 bits ({option.range}=0,4095 for a new project). "
            "These two values are public, so choose them for the type of device. Do not compute "
            "them from these images.",
            option="range",
            name=name,
            kind=values.dtype,
            undecided=True,
        )
    if alpha is not None and not alpha.any():
        raise DataError(f"{name} {TRANSPARENT}.")
    picture = np.empty(np.atleast_3d(values).shape, np.uint8)
    rows = 1 + STRIP // max(1, values[0].size)
    for strip in (slice(start, start + rows) for start in range(0, len(values), rows)):
        part = values[strip]
        if rescale is not None:
            part = rescale(part)
        if not np.isfinite(part).all():
            raise DataError(f"{name} has non-finite values: repair or remove it.")
        scaled = (np.atleast_3d(part).astype(np.float64) - span[0]) / (span[1] - span[0])
        levels = np.rint(255 * scaled.clip(0, 1))
        if inverted:
            levels = 255 - levels
        if alpha is not None:
            levels = np.rint(levels * alpha[strip])
        picture[strip] = levels
    return picture


@contextmanager
def readable(problem: str, fix: str = "repair or remove it") -> Iterator[None]:
    """Return a context that raises DataError in place of a decoder's exception for damaged bytes.

    problem: beginning of the message; fix: instruction at its end.

    An OSError without an error number comes from a decoder, so it counts as damage. An OSError with
    the number EINVAL does too, because damaged bytes can contain an invalid offset. Any other
    OSError is raised unchanged, because it comes from the system: the file is out of reach, or this
    account is not allowed to read it.
    """
    try:
        yield
    except SfumatoError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, EINVAL):
            raise
        if lacks_memory(error):
            raise MemoryError(problem) from error
        raise DataError(f"{problem} ({reason_of(error)}): {fix}.") from error


def installed(extra: str, name: str) -> AbstractContextManager[None]:
    """Return a context that raises ConfigError if an import fails.

    extra: name of the optional dependencies to install, as in `pip install 'sfumato[extra]'`;
    name: file that cannot be decoded without them.
    """
    fix = f"pip install 'sfumato[{extra}]'"
    return explained(
        ConfigError,
        lambda error: f"{name} cannot be read yet ({error}): {fix}",
        causes=(ImportError,),
    )


def decode_deep(
    picture: ImageFile, file: BinaryIO, span: Span | None, name: str
) -> np.ndarray | None:
    """Decode a picture with more than 8 bits, or with signed values, into (H, W, C) uint8.

    The values are converted by `eight_bits`. Returns None for any other picture.

    picture: the picture as Pillow opened it. If Pillow would keep only 8 bits per value, another
    library decodes `file` instead.
    """
    if picture.format == "JPEG2000":
        return decode_jpeg_2000(picture, file, span, name)
    tags = getattr(picture, "tag_v2", {})
    # Maximum value that the header of a PPM states. Pillow scales the pixels to a maximum of 255 or
    # 65535, which is undone below. Other formats get 255, which means 8 bits
    white = 255
    if picture.format == "PPM" and picture.tile[0].codec_name.startswith("ppm"):
        args = picture.tile[0].args
        assert isinstance(args, tuple)
        white = args[1]
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        ImageOps.exif_transpose(picture, in_place=True)
        values = np.asarray(picture)
        if (
            picture.format == "TIFF"
            and picture.mode == "I"
            and tags.get(Tag.SampleFormat, (1,)) == (1,)
        ):
            values = values.view(np.uint32)  # in mode I, Pillow reads unsigned values as signed
        if picture.mode == "I" and white > 255:
            values = np.rint(values * (white / 65535))
        return eight_bits(
            values, span, name, inverted=tags.get(Tag.PhotometricInterpretation) == MIN_IS_WHITE
        )
    # In a PNG with 16 bits per value, the arguments of a tile end in 16B. A WebP has an empty list
    # `tile`, so `deep_png` is False, which is correct: a WebP has at most 8 bits per value
    deep_png = any(str(tile.args).endswith("16B") for tile in picture.tile)
    bits = max(tags.get(Tag.BitsPerSample, (white.bit_length(), 16 * deep_png)))
    if picture.format == "TIFF":
        check_bands(tags.get(Tag.ExtraSamples, ()), name)
    # In the remaining modes, Pillow reads signed values as unsigned
    signed = SIGNED in tags.get(Tag.SampleFormat, ())
    if bits <= 8 and not signed:
        return None
    if picture.format == "TIFF":
        return decode_tiff(file, span, name)
    if picture.format != "PNG":
        raise DataError(f"{name} has {bits} bits per value: save it as a PNG or TIFF.")
    if picture.getexif().get(Tag.Orientation, 1) != 1:
        raise DataError(
            f"{name} has {bits} bits per value, and its EXIF orientation rotates or mirrors it: "
            "rotate or mirror the pixels instead, and remove the orientation."
        )
    with installed("depth", name):
        from imagecodecs import png_decode

    file.seek(0)
    return with_alpha(png_decode(file.read()), 65535, span, name)


def check_bands(extra: Sequence[int], name: str) -> None:
    """Raise DataError if a TIFF has bands other than colours and alpha.

    extra: value of the tag ExtraSamples.
    """
    if UNSPECIFIED in extra:
        raise DataError(
            f"{name} has {len(extra)} band(s) in addition to its colours, and at least one of them "
            "is not marked as alpha: save it in grey or RGB, or mark the additional bands as alpha."
        )


def decode_jpeg_2000(
    picture: ImageFile, file: BinaryIO, span: Span | None, name: str
) -> np.ndarray | None:
    """Decode a grey JPEG 2000 with more than 8 bits into (H, W, 1) uint8.

    Returns None for 8 bits or fewer. Raises DataError for more than 8 bits in colour.
    """
    file.seek(0)
    content = file.read()
    stream = codestream_of(content)
    check_codestream(stream, name)
    bits = depth_of(stream)
    if bits > 8 and len(picture.getbands()) > 1:
        raise DataError(
            f"{name} is a JPEG 2000 in colour with {bits} bits per value: save it as a PNG or TIFF."
        )
    if bits < 9:
        return None
    with installed("depth", name):
        from imagecodecs import jpeg2k_decode

    return eight_bits(jpeg2k_decode(content), span, name)


def decode_tiff(file: BinaryIO, span: Span | None, name: str) -> np.ndarray:
    """Decode a TIFF into (H, W, C) uint8, as `decode_deep` does, but without Pillow.

    Pillow has no image mode for more than 8 bits per value in colour or with alpha, and none for
    some types of numbers, such as signed bytes.
    """
    with installed("depth", name):
        from tifffile import TiffFile

    # PhotometricInterpretation (0 and 1: grey, 2: colour) -> channel counts without and with alpha
    channels = {0: (1, 2), 1: (1, 2), 2: (3, 4)}
    file.seek(0)
    with TiffFile(BytesIO(file.read())) as tiff:
        page: Any = tiff.pages[0]
        check_bands(page.extrasamples, name)
        # Y: rows, X: columns, S: channels
        supported = len(tiff.pages) == 1 and page.axes in ("YX", "YXS", "SYX")
        supported = supported and page.tags.valueof("Orientation", 1) == 1
        if not supported or page.samplesperpixel not in channels.get(page.photometric, ()):
            content = f"{len(tiff.pages)} frame(s), {page.photometric.name}, of shape {page.shape}"
            raise DataError(
                f"{name} contains {content}: save one frame in grey or RGB, with or without alpha. "
                "Its tag Orientation must be 1 or absent."
            )
        with room_for_picture(
            name, page.imagelength, page.imagewidth, page.samplesperpixel, page.dtype.itemsize
        ):
            values = np.atleast_3d(page.asarray())
    if page.axes == "SYX":
        values = np.moveaxis(values, 0, -1)
    opaque = 1
    if values.dtype.kind in "iu":
        opaque = 2**page.bitspersample - 1
    # 2 means unassociated alpha: the colours have not been multiplied by it yet. Any other alpha is
    # dropped.
    if 2 not in page.extrasamples:
        values = values[..., : channels[page.photometric][0]]
    return with_alpha(values, opaque, span, name, page.photometric == MIN_IS_WHITE)


def with_alpha(
    values: np.ndarray, opaque: int, span: Span | None, name: str, inverted: bool = False
) -> np.ndarray:
    """Convert values by `eight_bits`.

    If the values have 2 or 4 channels, the last channel is alpha, from 0 to `opaque`.
    """
    if values.shape[2] % 2:
        return eight_bits(values, span, name, None, inverted)
    return eight_bits(values[..., :-1], span, name, values[..., -1:] / opaque, inverted)


def once_per_file(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Cache the results of `read` by path, until the file changes.

    Without the cache, each file would be opened several times, which is slow on network storage.
    """

    @lru_cache(maxsize=2**17)
    def read_once(path: Path, *_: int) -> T:
        return read(path)

    @wraps(read)
    def cached(path: Path) -> T:
        status = path.stat()
        return read_once(
            path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    return cached


@once_per_file
def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM, by its bytes or by its suffix."""
    with suppress(ValueError), reading(path) as file:  # a pipe raises ValueError
        return file.read(132)[128:] == b"DICM" or path.suffix.lower() in (".dcm", ".dicom")
    return False


def read_dicom(path: Path, **options: Any) -> Dataset:
    """Read a DICOM file as pydicom's dataset.

    Raises ConfigError if pydicom is not installed, and DataError if the file cannot be read.
    """
    with installed("dicom", str(path)):
        from pydicom import dcmread

    problem = f"{path} cannot be read as DICOM"
    with readable(problem), reading(path), BoundedReader(path, LARGEST_PICTURE) as file:
        check_deflated(file, str(path))
        return dcmread(file, **options)


def decode_dicom(path: Path, span: Span | None, frame: int | None = None) -> np.ndarray:
    """Decode a DICOM file, or one of its frames, into (H, W, 1) or (H, W, 3) uint8.

    Grey values are rescaled as the file states (for CT, to Hounsfield units) and mapped to 8 bits
    by `span`. MONOCHROME1 is inverted, and padding is black. Raises ConfigError if no installed
    package can decompress the pixels.
    """
    header = read_dicom(path, stop_before_pixels=True)
    with readable(f"{path} has no readable pixels"):
        frames = int(header.get("NumberOfFrames", 1) or 1)
        rows, columns, channels = (
            int(header.get(key, 0) or 0) for key in ("Rows", "Columns", "SamplesPerPixel")
        )
        itemsize = -(-int(header.get("BitsAllocated", 0) or 0) // 8)
    if frame is not None:
        with room_for_picture(str(path), rows, columns, channels, itemsize):
            return decode_pixels(with_frame(path, header, frame), span, path)
    if frames > 1:
        fix = (
            "to use all frames, set data.volume, for example to {step: 1}. Otherwise choose one "
            "frame, and save it in a separate file"
        )
        raise DataError(f"{path} contains {frames} frames: {fix}.")
    check_picture_file(str(path), path.stat().st_size)
    with room_for_picture(str(path), rows, columns, channels, itemsize):
        return decode_pixels(read_dicom(path), span, path)


def with_frame(path: Path, header: Dataset, frame: int) -> Dataset:
    """Add the pixels and the rescaling of one frame to the header, and return the header.

    Other frames are not read.
    """
    from pydicom import dcmread
    from pydicom.datadict import keyword_for_tag
    from pydicom.encaps import encapsulate, get_frame
    from pydicom.pixels.utils import get_expected_length
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    with (
        readable(f"{path} has no readable pixels"),
        reading(path),
        BoundedReader(path, LARGEST_PICTURE) as file,
    ):
        syntax = header.file_meta.TransferSyntaxUID
        if syntax == DeflatedExplicitVRLittleEndian:
            raise DataError(f"{path} has deflated frames: save it without deflation.")
        if header.BitsAllocated % 8:
            raise DataError(
                f"{path} has {header.BitsAllocated} bits per value: save it with 8 or 16 bits."
            )
        dcmread(file, stop_before_pixels=True)  # stops at the tag of the pixels
        # Layout of the next bytes: the tag, and the length of the pixel data. In a syntax with
        # explicit VR, the VR (the type of the values) is between the two
        form = ("<HHL", "<HHLL")
        if not syntax.is_little_endian:
            form = (">HHL", ">HHLL")
        head = form[not syntax.is_implicit_VR]
        group, element, *_, length = struct.unpack(head, file.read(struct.calcsize(head)))
        frames = int(header.NumberOfFrames)
        if syntax.is_encapsulated:
            content = encapsulate([get_frame(file, frame, number_of_frames=frames)])
        else:
            expected_length = get_expected_length(header)
            if (
                header.PhotometricInterpretation == "YBR_FULL_422"
                and length >= expected_length * 3 // 2
            ):
                raise ValueError(
                    f"the pixels have {length} bytes, but with the stated YBR_FULL_422, they would "
                    f"have {expected_length}: the header must state RGB or YBR_FULL instead"
                )
            size = expected_length // frames
            file.seek(frame * size, SEEK_CUR)
            content = file.read(size)
        setattr(header, keyword_for_tag((group << 16) + element), content)
        header.NumberOfFrames = 1
        for groups, index in (
            ("SharedFunctionalGroupsSequence", 0),
            ("PerFrameFunctionalGroupsSequence", frame),
        ):
            if groups in header and "PixelValueTransformationSequence" in header[groups][index]:
                header.update(header[groups][index].PixelValueTransformationSequence[0])
    return header


def decode_pixels(data: Dataset, span: Span | None, path: Path) -> np.ndarray:
    """Decode the pixels of a DICOM dataset with one frame into (H, W, 1) or (H, W, 3) uint8."""
    from pydicom.pixels import apply_modality_lut, get_decoder
    from pydicom.uid import UncompressedTransferSyntaxes

    syntax = data.file_meta.get("TransferSyntaxUID", "")
    fix = "repair or remove it"
    if syntax not in ("", *UncompressedTransferSyntaxes):
        fix = (
            "write it uncompressed, for example with `gdcmconv --raw` (the file has the transfer "
            f"syntax {syntax})"
        )
    with readable(f"{path} has no readable pixels", fix):
        if syntax and not (decoder := get_decoder(syntax)).is_available:
            packages = "; ".join(decoder.missing_dependencies)
            raise ConfigError(
                f"{path} is compressed as {syntax.name} ({syntax}), and no installed package can "
                f"decompress it (suitable packages: {packages}): pip install 'sfumato[dicom]'"
            )
        if syntax not in ("", *UncompressedTransferSyntaxes):
            check_compressed(data, syntax, data.Rows * data.Columns, str(path))
        values = data.pixel_array
        kind = str(data.PhotometricInterpretation)
        name = f"{path} ({data.get('BitsStored', 8 * values.itemsize)} bits)"
        alpha = padding_alpha(data, values)
    if values.dtype == np.uint8 and values.shape[2:] == (3,):
        return np.ascontiguousarray(values)
    if values.shape[2:] != (3,) and (values.ndim != 2 or not kind.startswith("MONOCHROME")):
        raise DataError(
            f"{path} has {values.dtype} values with the photometric interpretation {kind}: convert "
            "it to MONOCHROME2 or RGB."
        )
    rescale = None
    if values.ndim == 2:
        rescale = partial(apply_modality_lut, ds=data)
    with readable(f"{path} has no readable pixels", fix):
        return eight_bits(values, span, name, alpha, kind == "MONOCHROME1", rescale)


def padding_alpha(data: Dataset, array: np.ndarray) -> np.ndarray | None:
    """Return alpha, (H, W, 1), which is 0 for padding and 1 elsewhere; None without padding.

    PixelPaddingValue and PixelPaddingRangeLimit state which values are padding.
    """
    padding = data.get("PixelPaddingValue")
    if padding is None or array.ndim > 2:
        return None
    # The header may state the bounds as unsigned numbers even if the pixels are signed
    bounds = np.array([padding, data.get("PixelPaddingRangeLimit", padding)]).astype(array.dtype)
    return ((array < bounds.min()) | (array > bounds.max()))[..., None]
