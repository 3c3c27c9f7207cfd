"""Grey pictures with more than 8 bits: 16-bit files, floating point, DICOM. A public range says what is shown."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.errors import ConfigError, DataError, explained

DICOM = (".dcm", ".dicom")
Span = tuple[float, float]


class RangeMissing(DataError):
    """Files with more than 8 bits, and nothing says which values are black and white."""

    option, proposed = "span", None  # of `survey`, that decides


def shown(values: np.ndarray, span: Span | None, name: str, what: str) -> np.ndarray:
    """(H, W) numbers -> (H, W, 1) uint8: span[0] and below are black, span[1] and above white, linear between.

    Raises RangeMissing without a span, which follows from no image; DataError for values that are not finite.
    """
    if span is None:
        raise RangeMissing(
            f"{name} has {what}: set the range of values to show, such as range: [0, 4095] for 12 bits (in `data`; "
            "`stage init --range 0,4095`). It is public, so take it from the kind of device, not from these images."
        )
    if not np.isfinite(values).all():
        raise DataError(f"{name} has values that are not finite: repair or remove it.")
    scaled = (values.astype(np.float64) - span[0]) / (span[1] - span[0])
    return np.rint(255 * scaled.clip(0, 1)).astype(np.uint8)[..., None]


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM, by its suffix or its first bytes."""
    if path.suffix.lower() in DICOM:
        return True
    if path.suffix:
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def readable(what: str) -> AbstractContextManager[None]:
    """Raise DataError for whatever a decoder raises for damaged bytes."""
    return explained(DataError, lambda error: f"{what} ({error}): repair or remove it.", causes=(Exception,))


def read_dicom(path: Path, **options: Any) -> Any:
    """A DICOM file as pydicom's dataset. Raises ConfigError without pydicom, DataError if it cannot be read."""
    try:
        from pydicom import dcmread
    except ImportError as error:
        raise ConfigError("DICOM files need pydicom: pip install 'sfumato[dicom]'") from error
    with readable(f"{path} cannot be read as DICOM"):
        return dcmread(path, **options)


def decode_dicom(path: Path, span: Span | None) -> np.ndarray:
    """The picture of a DICOM file, (H, W, 1) or (H, W, 3) uint8; no header field leaves it.

    Grey values are rescaled as the file says (Hounsfield units, of CT) and shown by `span`; MONOCHROME1 is inverted.
    """
    data = read_dicom(path)
    with readable(f"{path} has no readable pixels"):
        from pydicom.pixels import apply_rescale

        frames = int(data.get("NumberOfFrames", 1) or 1)
        kind, array = str(data.PhotometricInterpretation), data.pixel_array
        values = array if array.ndim == 3 else apply_rescale(array, data)
    if frames > 1:
        raise DataError(f"{path} holds {frames} frames: save the one to use as a file of its own.")
    if values.dtype == np.uint8 and values.shape[2:] == (3,):
        return np.ascontiguousarray(values)
    if values.ndim != 2 or not kind.startswith("MONOCHROME"):
        raise DataError(f"{path} is {values.dtype} {kind}, expected MONOCHROME, or colour of 8 bits: convert it.")
    grey = shown(values, span, str(path), f"{int(data.BitsStored)} bits of DICOM")
    return 255 - grey if kind == "MONOCHROME1" else grey


def patient_of(path: Path) -> str:
    """The PatientID of a DICOM file, "" if there is none. Private."""
    return str(read_dicom(path, stop_before_pixels=True, specific_tags=["PatientID"]).get("PatientID", "") or "")
