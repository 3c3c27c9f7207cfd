"""Read pictures as clinics have them: 12 bits, DICOM with patients, MedMNIST's files,
rectangles.
"""

import re
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom.uid
import pytest
from PIL import Image
from pydantic import ValidationError
from pydicom import dcmread
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels import get_decoder
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage
from surveys import survey

from sfumato.data.decoding import decode
from sfumato.data.sources import read_source
from sfumato.data.volumes import Slice
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Groups
from sfumato.settings.options import ALL

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # all levels of 12 bits


def dicom(
    file: Path, values: np.ndarray, patient: str = "", kind: str = "MONOCHROME2", **more
) -> Path:
    """Write a DICOM file of 12 bits, as a scanner does."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    data = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    data.PatientID = patient
    data.PhotometricInterpretation = kind
    data.SamplesPerPixel = 1
    data.Rows, data.Columns = values.shape
    data.BitsAllocated = 16
    data.BitsStored = 12
    data.HighBit = 11
    data.PixelRepresentation = 0
    for name, value in more.items():
        setattr(data, name, value)
    if values.dtype.kind != "f":
        data.PixelData = values.astype("<u2").tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file)
    return file


def compressed(file: Path, syntax: pydicom.uid.UID) -> Path:
    """Write the ramp of 12 bits with a compressed transfer syntax."""
    data = dcmread(dicom(file, RAMP))
    encoders = {
        pydicom.uid.JPEGLSLossless: imagecodecs.jpegls_encode,
        pydicom.uid.JPEG2000Lossless: lambda values: imagecodecs.jpeg2k_encode(
            values, codecformat="j2k", level=0
        ),
        pydicom.uid.JPEGLosslessSV1: lambda values: imagecodecs.ljpeg_encode(
            values, bitspersample=16
        ),
    }
    if syntax in encoders:
        data.PixelData = encapsulate([encoders[syntax](RAMP)])
        data.file_meta.TransferSyntaxUID = syntax
    else:
        data.compress(syntax)
    data.save_as(file)
    return file


def read(**data):
    return read_source(Data(dataset_id="clinic", **data), Path("raw"))


def test_frames_with_halved_colour_resolution_are_read(tmp_path):
    levels = (10, 100, 200)
    more = {"SamplesPerPixel": 3, "PlanarConfiguration": 0, "NumberOfFrames": len(levels)}
    more |= {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}
    file = dicom(tmp_path / "loop.dcm", RAMP, kind="YBR_FULL_422", **more)
    data = dcmread(file)
    data.PixelData = b"".join(bytes([level, level, 128, 128]) * (64 * 32) for level in levels)
    data.save_as(file)
    frames = [decode(Slice(file, number)) for number in range(len(levels))]
    assert [np.unique(frame).tolist() for frame in frames] == [[level] for level in levels]
    data.PixelData = bytes(len(levels) * 64 * 64 * 3)
    data.save_as(file)
    with pytest.raises(DataError, match="the header must state RGB or YBR_FULL"):
        decode(Slice(file, 1))


@pytest.mark.parametrize("suffix", ["png", "tiff", "dcm"])
def test_a_ramp_of_12_bits_keeps_256_levels(tmp_path, suffix):
    file = tmp_path / f"ramp.{suffix}"
    dicom(file, RAMP) if suffix == "dcm" else Image.fromarray(RAMP).save(file)
    shown = decode(file, span=(0, 4095))
    assert shown.dtype == np.uint8 and shown.shape == (64, 64, 1) and len(np.unique(shown)) == 256
    assert (
        shown[0, 0] == 0
        and shown[-1, -1] == 255
        and (np.diff(shown.flatten().astype(int)) >= 0).all()
    )
    with pytest.raises(DataError, match=r"range: \[0, 4095\].*choose them for the type of device"):
        decode(file)


def test_values_out_of_range_are_clipped_and_nan_is_refused(tmp_path):
    values = np.array([[-1000.0, 0.0], [400.0, 3000.0]], dtype=np.float32)
    Image.fromarray(values).save(tmp_path / "ct.tiff")
    assert decode(tmp_path / "ct.tiff", span=(0, 400)).flatten().tolist() == [0, 0, 255, 255]
    Image.fromarray(np.full((2, 2), np.nan, dtype=np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(DataError, match="non-finite"):
        decode(tmp_path / "nan.tiff", span=(0, 400))
    with pytest.raises(ValidationError, match="not a range"):
        Data(dataset_id="clinic", range=(5, 5))


def test_dicom_is_rescaled_inverted_or_refused(tmp_path, uninstall):
    hounsfield = dicom(tmp_path / "ct.dcm", RAMP, RescaleSlope=1, RescaleIntercept=-1024)
    assert (
        decode(hounsfield, span=(-1024, 3071))[-1, -1] == 255
        and decode(hounsfield, span=(0, 1))[0, 0] == 0
    )
    inverted = dicom(tmp_path / "xray.dcm", RAMP, kind="MONOCHROME1")
    assert decode(inverted, span=(0, 4095))[0, 0] == 255
    with pytest.raises(DataError, match="2 frames"):
        decode(
            dicom(tmp_path / "film.dcm", np.concatenate([RAMP, RAMP]), NumberOfFrames=2, Rows=64),
            span=(0, 4095),
        )
    broken = dicom(tmp_path / "broken.dcm", RAMP, patient="Smith")
    broken.write_bytes(broken.read_bytes()[:2000])
    with pytest.raises(DataError, match="repair or remove") as error:
        decode(broken, span=(0, 4095))
    assert "Smith" not in str(error.value)
    (tmp_path / "text.dcm").write_text("no picture")
    with pytest.raises(DataError, match="cannot be read as DICOM"):
        decode(tmp_path / "text.dcm", span=(0, 4095))
    uninstall("pydicom")
    with pytest.raises(ConfigError, match=r"sfumato\[dicom\]"):
        decode(hounsfield, span=(-1024, 3071))


@pytest.mark.parametrize("name", ["1.2.840.113619.2", "scan.IMA", "image.0001", "scan", "scan.png"])
def test_dicom_is_known_by_its_bytes(name, tmp_path):
    assert len(np.unique(decode(dicom(tmp_path / name, RAMP), span=(0, 4095)))) == 256


def test_padding_is_black_in_either_photometry_and_by_a_range(tmp_path):
    # The first 8 columns have the padding value, 4095, which is the highest value of 12 bits. All
    # values in other columns are below half of it
    corner = np.where(np.arange(64) < 8, 4095, RAMP // 2)
    for kind in ("MONOCHROME1", "MONOCHROME2"):
        shown = decode(
            dicom(tmp_path / kind, corner, kind=kind, PixelPaddingValue=4095), span=(0, 4095)
        )
        plain = decode(dicom(tmp_path / "plain", corner, kind=kind), span=(0, 4095))
        assert (
            not shown[:, :8].any()
            and np.array_equal(shown[:, 8:], plain[:, 8:])
            and plain[:, 8:].any()
        )
    ranged = dicom(
        tmp_path / "range", RAMP, kind="MONOCHROME1", PixelPaddingValue=0, PixelPaddingRangeLimit=99
    )
    assert (
        not decode(ranged, span=(0, 4095)).flatten()[:100].any()
        and decode(ranged, span=(0, 4095)).flatten()[100]
    )
    signed = np.where(np.arange(64) < 8, -2000, RAMP).astype(np.int16)
    file = dicom(
        tmp_path / "signed",
        signed,
        kind="MONOCHROME1",
        PixelRepresentation=1,
        BitsStored=16,
        HighBit=15,
    )
    data = dcmread(file)
    data.add_new("PixelPaddingValue", "US", 63536)  # -2000, unsigned as some devices write it
    data.save_as(file)
    assert not decode(file, span=(0, 4095))[:, :8].any()


@pytest.mark.parametrize(
    "element, kind", [("FloatPixelData", "<f4"), ("DoubleFloatPixelData", "<f8")]
)
def test_pixels_of_floating_point_are_shown(element, kind, tmp_path):
    more = {
        element: (RAMP / 4095).astype(kind).tobytes(),
        "BitsAllocated": 32 if kind == "<f4" else 64,
    }
    file = dicom(tmp_path / "map.dcm", RAMP.astype(np.float32), **more)
    data = dcmread(file)
    for name in ("BitsStored", "HighBit", "PixelRepresentation"):  # such files lack these tags
        delattr(data, name)
    data.save_as(file)
    assert np.array_equal(decode(file, span=(0, 1))[..., 0], np.rint(255 * (RAMP / 4095)))


def test_a_table_of_the_modality_is_followed(tmp_path):
    file = dicom(tmp_path / "table.dcm", RAMP)
    data = dcmread(file)
    table = Dataset()
    table.LUTDescriptor, table.ModalityLUTType, table.LUTData = (
        [4096, 0, 16],
        "US",
        [*range(4095, -1, -1)],
    )
    table["LUTDescriptor"].VR = "US"
    table["LUTData"].VR = "US"
    data.ModalityLUTSequence = [table]
    data.save_as(file)
    assert np.array_equal(
        decode(file, span=(0, 4095))[..., 0], np.rint(255 * (RAMP[::-1, ::-1] / 4095))
    )


@pytest.mark.parametrize(
    "syntax", ["JPEGLSLossless", "JPEG2000Lossless", "RLELossless", "JPEGLosslessSV1"]
)
def test_compressed_pixels_need_a_decoder_for_their_syntax(syntax, tmp_path, monkeypatch):
    file = compressed(tmp_path / "scan", getattr(pydicom.uid, syntax))
    uid = getattr(pydicom.uid, syntax)
    shown = decode(file, span=(0, 4095))
    assert len(np.unique(shown)) > 200 and shown.shape == (64, 64, 1)
    monkeypatch.setattr(get_decoder(uid), "_available", {})
    with pytest.raises(
        ConfigError, match=re.escape(f"{uid.name} ({uid})") + r".*sfumato\[dicom\]"
    ) as error:
        decode(file, span=(0, 4095))
    assert "remove" not in str(error.value)
    data = dcmread(file)
    data.PixelData = data.PixelData[:40]
    data.save_as(file)
    monkeypatch.undo()
    with pytest.raises(DataError, match="write it uncompressed.*" + re.escape(str(uid))):
        decode(file, span=(0, 4095))


def test_patients_of_dicom_are_groups_and_none_may_be_missing(tmp_path):
    for i in range(9):  # files without suffix, of five patients with one or two scans each
        dicom(
            tmp_path / ("ill" if i % 2 else "well") / f"IM{i:04d}",
            RAMP // (1 + i % 3),
            f"patient {i // 2}",
        )
    ways = {"path": str(tmp_path), "source": "imagefolder", "range": (0, 4095), "size": 16}
    source = read(**ways, groups=Groups(dicom=True))
    assert (
        source.classes == ("ill", "well") and len({*source.groups}) == 5 and len(source.groups) == 9
    )
    images = [image for image, _ in source.train]
    assert {image.shape for image in images} == {(16, 16, 1)}
    found = survey(tmp_path, range=(0, 4095), classes=ALL)
    assert found.groups == Groups(dicom=True) and found.persons == 5
    with pytest.raises(DataError, match="set the values of black and white"):
        survey(tmp_path, classes=ALL)
    with pytest.raises(DataError, match="set the values of black and white"):
        list(read(**ways | {"range": None}).train)
    dicom(tmp_path / "ill" / "IM0001", RAMP, "")
    with pytest.raises(DataError, match="no id"):
        read(**ways, groups=Groups(dicom=True))


def test_one_stray_file_among_dicom_is_named_and_may_be_left_out(tmp_path):
    for i in range(9):
        dicom(
            tmp_path / "in" / ("ill" if i % 2 else "well") / f"1.2.{i}",
            RAMP // (1 + i),
            f"patient {i // 2}",
        )
    dicom(tmp_path / "in/DICOMDIR", RAMP)  # the index that devices write beside the pictures
    ways = {"range": (0, 4095), "classes": ALL}
    assert survey(tmp_path / "in", **ways).groups == Groups(dicom=True)
    (tmp_path / "in/ill/list.csv").write_text("no picture")
    with pytest.raises(DataError, match=r"list\.csv cannot be read as DICOM"):
        survey(tmp_path / "in", **ways)
    cut = tmp_path / "in/well/1.2.10"
    cut.write_bytes(dicom(cut, RAMP, "somebody").read_bytes()[:1000])
    found = survey(tmp_path / "in", skip=0.2, **ways)
    assert found.persons == 5 and found.images == 9
    dicom(tmp_path / "in/1.2.11", RAMP)
    with pytest.raises(DataError, match=r"1\.2\.11 is not in a class folder"):
        survey(tmp_path / "in", **ways)


def test_other_proportions_are_cropped_or_padded(tmp_path):
    wide = np.zeros((10, 30), dtype=np.uint8)
    wide[:, 10:20] = 200
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(wide).save(tmp_path / name / "wide.png")
    ways = {"path": str(tmp_path), "source": "imagefolder"}
    (cropped, _), *_ = read(**ways, size=10).train
    (padded, _), *_ = read(**ways, size=30, fit="pad").train
    assert (
        (cropped == 200).all() and (padded[:10] == 0).all() and (padded[10:20, 10:20] == 200).all()
    )


@pytest.mark.parametrize("column", [False, True])
def test_a_file_of_medmnist_brings_its_hold_out(tmp_path, column):
    arrays = {}
    for part, count in (("train", 8), ("val", 3), ("test", 4)):
        labels = np.arange(count) % 2
        arrays[f"{part}_images"] = np.full((count, 5, 5), 7, dtype=np.uint8)
        arrays[f"{part}_labels"] = labels[:, None] if column else labels
    np.savez(tmp_path / "mnist.npz", **arrays)
    ways = {"path": str(tmp_path / "mnist.npz"), "source": "npz"}
    source = read(**ways, classes=("well", "ill"))
    assert [label for _, label in source.train] == [i % 2 for i in range(8)] + [0, 1, 0]
    assert (
        source.test is not None
        and len(list(source.test)) == 4
        and source.classes == ("well", "ill")
    )
    with pytest.raises(DataError, match=r"class names, .*data\.classes"):
        read(**ways)
    for wrong, message in (
        (np.zeros((8, 14), np.uint8), r"8, 14\).*labels: several"),
        (np.full((8, 1), 2), r"0\.\.1"),
    ):
        np.savez(tmp_path / "mnist.npz", **arrays | {"train_labels": wrong})
        with pytest.raises(DataError, match=message):
            read(**ways, classes=("well", "ill"))
