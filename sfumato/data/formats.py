"""Recognise unsupported formats by the first bytes of a file, and links to missing content.

Such files are intact. One message for all files of a format states how to make them usable.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sfumato.errors import DataError

HEAD = 512  # number of bytes that identify a format
PICTURES = "convert it to PNG or JPEG"
VOLUME = "save its slices as PNG, with the id of the person in each file name"
FRAMES = "choose frames and save them as PNG, with the id of the person in each file name"
ARRAYS = (
    "save each image as PNG, or all images in one .npz with the arrays images, labels and classes "
    "(np.savez)"
)
UNPACK = "unpack it, and give the path of the folder with its pictures"
GET = "run `datalad get .` or `git annex get .` in its repository, and then `git annex unlock .`"


@dataclass(frozen=True)
class Format:
    """A file format.

    name: completes "the file is …"; way: how to make the file usable.
    """

    name: str
    way: str


ANNEX = Format("a link of DataLad or git-annex", GET)
DVC_CACHE = Format(
    "a link into a cache of DVC",
    "run `dvc config cache.type copy` and `dvc checkout --relink` in its repository",
)
HEIC = Format("HEIC", f"{PICTURES}, for example with `heif-convert`")
AVIF = Format("AVIF, which the installed Pillow does not read", PICTURES)
CAMERA = Format("a raw photograph", PICTURES)
VIDEO = Format("a video", FRAMES)
NIFTI = Format(
    "NIfTI",
    "rename it, so that its name ends in .nii or .nii.gz, and set data.volume, for example to "
    "{axis: axial}, and data.groups. If it is a public volume, save its slices as PNG instead",
)
ZIP = Format("a zip", UNPACK)
NPZ = Format("an .npz", "give the path of a single .npz instead of a folder")
TAR = Format("a tar file", UNPACK)  # supported only if the given path is the tar file itself
COMPRESSED_TAR = Format(
    "a compressed tar file",
    "unpack it, or give the path of a single compressed tar file instead of a folder",
)
IDX = Format("an array in the idx format of MNIST", ARRAYS)
ARROW = Format(
    "a set that Hugging Face's `datasets` saved to disk",
    "write it as Parquet, one file per split, for example with "
    "datasets.load_from_disk(FOLDER)['train'].to_parquet('train.parquet'), and give the path of "
    "the folder with these files",
)
# Offset in the file, bytes at this offset, and the format that they identify
SIGNATURES: Sequence[tuple[int, bytes, Format]] = (
    (0, b"/annex/objects/", Format("a pointer of git-annex", GET)),
    (
        0,
        b"version https://git-lfs",
        Format("a pointer of Git LFS", "run `git lfs pull` in its repository"),
    ),
    (0, b"outs:\n- md5:", Format("a pointer of DVC", "run `dvc pull` in its repository")),
    (344, b"n+1\0", NIFTI),
    (344, b"ni1\0", NIFTI),
    (4, b"n+2\0\r\n\x1a\n", NIFTI),
    (4, b"ni2\0\r\n\x1a\n", NIFTI),
    (0, b"NRRD000", Format("NRRD", VOLUME)),
    (0, b"ObjectType = Image", Format("MetaImage", VOLUME)),
    (0, b"NDims =", Format("MetaImage", VOLUME)),
    (0, b"\x93NUMPY", Format("a NumPy array", ARRAYS)),
    (0, b"\x89HDF\r\n", Format("HDF5", ARRAYS)),
    (0, b"MATLAB 5.0 MAT-file", Format("an array of MATLAB", ARRAYS)),
    (0, b"CDF\x01", Format("netCDF or MINC", VOLUME)),
    (0, b"CDF\x02", Format("netCDF or MINC", VOLUME)),
    (0, b"SIMPLE  =", Format("FITS", f"{PICTURES}, or to floating-point TIFF")),
    (0, b"\x76\x2f\x31\x01", Format("OpenEXR", f"{PICTURES}, or to floating-point TIFF")),
    (0, b"%PDF-", Format("PDF", "extract its pictures, for example with `pdfimages -png`")),
    (0, b"%!PS", Format("PostScript", PICTURES)),
    (0, b"<svg", Format("SVG", PICTURES)),
    (0, b"\0\0\1\0", Format("an icon", PICTURES)),
    (0, b"8BPS", Format("a Photoshop document", PICTURES)),
    (0, b"\xff\x0a", Format("JPEG XL", f"{PICTURES}, for example with `djxl`")),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", Format("JPEG XL", f"{PICTURES}, for example with `djxl`")),
    (0, b"II\xbc", Format("JPEG XR", PICTURES)),
    (0, b"FUJIFILMCCD-RAW", CAMERA),
    (0, b"IIRO", CAMERA),
    (0, b"IIU\0", CAMERA),
    (8, b"AVI ", VIDEO),
    (0, b"\x1a\x45\xdf\xa3", VIDEO),
    (0, b"\0\0\x08\x01", IDX),
    (0, b"\0\0\x08\x03", IDX),
    (0, b"\xff\xff\xff\xff", ARROW),
    (0, b"PK\x03\x04", ZIP),
    (0, b"Rar!\x1a\x07", Format("a RAR archive", UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", Format("a 7z archive", UNPACK)),
    (257, b"ustar", TAR),
)
BRANDS = {  # formats of files that begin like MP4, by brand; any other brand is a video
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), HEIC),
    **dict.fromkeys((b"avif", b"avis"), AVIF),
    b"crx ": CAMERA,
}
DOCUMENT = b"[Content_Types].xml"  # first file in the zip of an Office document


class AnotherFormat(DataError):
    """The error for an intact file in an unsupported format.

    `data.skip` leaves out broken pictures, but not such a file.
    """

    def __init__(self, file: str, form: Format) -> None:
        super().__init__(f"{file} is {form.name}: {form.way}.")
        self.file = file
        self.form = form


def format_of(head: bytes) -> Format | None:
    """Return the unsupported format that the first HEAD bytes of a file identify, or None."""
    if head[:2] == b"\x1f\x8b":
        inner = format_of(inflated(head)) or Format("a gzip file", UNPACK)
        return {TAR: COMPRESSED_TAR}.get(inner, inner)
    if head[4:8] == b"ftyp":
        brands = [
            head[8:12],
            *(head[offset : offset + 4] for offset in range(16, min(head[3], HEAD), 4)),
        ]
        formats = [BRANDS[brand] for brand in brands if brand in BRANDS]
        if AVIF in formats:
            return AVIF
        return next(iter(formats), VIDEO)
    form = next(
        (form for offset, magic, form in SIGNATURES if head.startswith(magic, offset)), None
    )
    if form is ZIP and DOCUMENT in head:
        return None
    if form is ZIP and b".npy" in head:
        return NPZ
    return form


def inflated(head: bytes) -> bytes:
    """Return the first HEAD bytes of a gzip file's content, or no bytes if it is damaged."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD)
    except zlib.error:
        return b""


def link_format(entry: Path) -> Format | None:
    """Return the format of a link into a cache of git-annex or DVC.

    Returns None for any other link or file.
    """
    if not entry.is_symlink():
        return None
    target = entry.readlink().as_posix()
    formats = {"annex/objects/": ANNEX, "files/md5/": DVC_CACHE}
    return next((form for part, form in formats.items() if part in target), None)


def sentences(problems: Sequence[DataError]) -> list[str]:
    """Return the sentences of an error message about many files.

    Each unsupported format gets one sentence for all its files. Then each other problem gets its
    own sentence.
    """
    unsupported = [error for error in problems if isinstance(error, AnotherFormat)]
    lines = []
    for form, errors in groupby(
        sorted(unsupported, key=lambda error: error.form.name), lambda error: error.form
    ):
        first, *rest = errors
        if rest:
            lines.append(
                f"each of {1 + len(rest)} files, such as {first.file}, is {form.name}: {form.way}."
            )
        else:
            lines.append(str(first))
    return [*lines, *(str(error) for error in problems if not isinstance(error, AnotherFormat))]
