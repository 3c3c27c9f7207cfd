"""Check how large the pixels of DICOM and JPEG 2000 files become when they are decompressed.

The checks read the compressed data itself, because the size in the file's own header may be wrong.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

from sfumato.errors import DataError
from sfumato.storage.limits import LARGEST_PICTURE, check_picture

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

JPEG_2000 = b"\xff\x4f\xff\x51"  # the markers SOC (start of codestream) and SIZ (image size)
# These markers are in the range of JPEG's frame markers, but do not begin a frame
NO_FRAME = (0xC4, 0xC8, 0xCC)
JPEG_LS_FRAME = 0xF7


def check_codestream(frame: bytes, name: str) -> None:
    """Raise DataError if a JPEG, JPEG-LS or JPEG 2000 stream exceeds the limits of a picture."""
    if (start := frame[:256].find(JPEG_2000)) >= 0:
        right, bottom, left, top = struct.unpack_from(">4I", frame, start + 8)
        (channels,) = struct.unpack_from(">H", frame, start + 40)
        check_picture(name, bottom - top, right - left, channels, itemsize=2)
    elif frame[:2] == b"\xff\xd8":
        offset = 2
        while offset + 10 <= len(frame) and frame[offset] == 0xFF:
            marker, length, bits, height, width, channels = struct.unpack_from(
                ">BHBHHB", frame, offset + 1
            )
            if (0xC0 <= marker <= 0xCF and marker not in NO_FRAME) or marker == JPEG_LS_FRAME:
                check_picture(name, height, width, channels, -(-bits // 8))
                return
            offset += 2 + length


def codestream_of(content: bytes) -> bytes:
    """Return the JPEG 2000 codestream of a file.

    The file is either a bare codestream, or a JP2 file, which has the codestream in a box. Raises
    ValueError or struct.error if the file has no codestream.
    """
    offset = 0
    while not content.startswith(JPEG_2000, offset):
        length, kind = struct.unpack_from(">I4s", content, offset)
        header = 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", content, offset + header)
            header = 16
        if kind == b"jp2c":
            return content[offset + header :]
        if length < header:
            raise ValueError("it has no codestream")
        offset += length
    return content[offset:]


def depth_of(stream: bytes) -> int:
    """Return the largest number of bits per value among the channels of a JPEG 2000 stream.

    The sign of a signed channel counts as one more bit.
    """
    (channels,) = struct.unpack_from(">H", stream, 40)
    return max((bits & 127) + 1 + (bits >> 7) for bits in stream[42 : 42 + 3 * channels : 3])


def check_run_lengths(frame: bytes, size: int, name: str) -> None:
    """Raise DataError if a segment of an RLE frame expands to far more than `size` bytes.

    size: number of bytes in one plane of the decoded frame.
    """
    count, *starts = struct.unpack_from("<16L", frame)
    ends = [*starts[1:count], len(frame)]
    for start, end in zip(starts[:count], ends, strict=True):
        expanded = 0
        while start < min(end, len(frame)):
            run = frame[start]
            if run > 128:  # a repeated byte
                expanded += 257 - run
                start += 2
            else:  # literal bytes; the header byte 128 has no effect
                expanded += (run + 1) % 129
                start += 1 + (run + 1) % 129
            if expanded > 2 * size + LARGEST_PICTURE // 2**10:
                raise DataError(
                    f"{name} has RLE-compressed pixels that expand to far more bytes than its "
                    "header states: replace it with an intact file, or remove it."
                )


def check_deflated(file: BinaryIO, name: str) -> None:
    """Raise DataError if a deflated DICOM file inflates to more than LARGEST_PICTURE bytes.

    Afterwards, `file` is positioned at its start again.
    """
    from pydicom.filereader import read_dataset, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    read_preamble(file, force=True)
    file_meta = read_dataset(file, False, True, stop_when=lambda tag, kind, length: tag >> 16 != 2)
    if file_meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        size = 0
        content = file.read(2**16)
        while content and not inflater.eof:
            size += len(inflater.decompress(content, 2**20))
            if size > LARGEST_PICTURE:
                raise DataError(
                    f"{name} inflates to more than {LARGEST_PICTURE:,} bytes: reduce its size, "
                    "or remove it."
                )
            content = inflater.unconsumed_tail or file.read(2**16)
    file.seek(0)


def check_compressed(data: Dataset, syntax: str, size: int, name: str) -> None:
    """Raise DataError if the first compressed frame would exceed the limits when it is decoded.

    size: number of bytes in one plane of the decoded frame.
    """
    from pydicom.encaps import get_frame
    from pydicom.uid import RLELossless

    frame = get_frame(data.PixelData, 0, number_of_frames=1)
    if syntax == RLELossless:
        check_run_lengths(frame, size, name)
    else:
        check_codestream(frame, name)
