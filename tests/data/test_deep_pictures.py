"""What clinics bring: 12 bits, DICOM with patients, MedMNIST's files, pictures that are not square."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

from sfumato.data.layout import ALL
from sfumato.data.sources import read_source
from sfumato.data.sources.deep import RangeMissing
from sfumato.data.sources.imagefolder import decode
from sfumato.data.survey import survey
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Groups

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # all levels of 12 bits


def dicom(file: Path, values: np.ndarray, patient: str = "", kind: str = "MONOCHROME2", **more) -> Path:
    """A DICOM file of 12 bits, as a scanner writes it."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = SecondaryCaptureImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    data = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    data.PatientID, data.PhotometricInterpretation, data.SamplesPerPixel = patient, kind, 1
    data.Rows, data.Columns = values.shape
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 12, 11, 0
    for name, value in more.items():
        setattr(data, name, value)
    data.PixelData = values.astype("<u2").tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file)
    return file


def read(**data):
    return read_source(Data(dataset_id="clinic", **data), Path("raw"))


@pytest.mark.parametrize("suffix", ["png", "tiff", "dcm"])
def test_a_ramp_of_12_bits_keeps_256_levels(tmp_path, suffix):
    file = tmp_path / f"ramp.{suffix}"
    dicom(file, RAMP) if suffix == "dcm" else Image.fromarray(RAMP).save(file)
    shown = decode(file, span=(0, 4095))
    assert shown.dtype == np.uint8 and shown.shape == (64, 64, 1) and len(np.unique(shown)) == 256
    assert shown[0, 0] == 0 and shown[-1, -1] == 255 and (np.diff(shown.flatten().astype(int)) >= 0).all()
    with pytest.raises(RangeMissing, match=r"range: \[0, 4095\].*take it from the kind of device"):
        decode(file)


def test_values_beyond_the_range_are_black_and_white_and_nan_is_refused(tmp_path):
    values = np.array([[-1000.0, 0.0], [400.0, 3000.0]], dtype=np.float32)
    Image.fromarray(values).save(tmp_path / "ct.tiff")
    assert decode(tmp_path / "ct.tiff", span=(0, 400)).flatten().tolist() == [0, 0, 255, 255]
    Image.fromarray(np.full((2, 2), np.nan, dtype=np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(DataError, match="not finite"):
        decode(tmp_path / "nan.tiff", span=(0, 400))
    with pytest.raises(ValidationError, match="not a range"):
        Data(dataset_id="clinic", range=(5, 5))


def test_dicom_is_rescaled_inverted_and_refused_by_frames_by_damage_and_without_pydicom(tmp_path, monkeypatch):
    hounsfield = dicom(tmp_path / "ct.dcm", RAMP, RescaleSlope=1, RescaleIntercept=-1024)
    assert decode(hounsfield, span=(-1024, 3071))[-1, -1] == 255 and decode(hounsfield, span=(0, 1))[0, 0] == 0
    inverted = dicom(tmp_path / "xray.dcm", RAMP, kind="MONOCHROME1")
    assert decode(inverted, span=(0, 4095))[0, 0] == 255
    with pytest.raises(DataError, match="2 frames"):
        decode(dicom(tmp_path / "film.dcm", np.concatenate([RAMP, RAMP]), NumberOfFrames=2, Rows=64), span=(0, 4095))
    broken = dicom(tmp_path / "broken.dcm", RAMP, patient="Smith")
    broken.write_bytes(broken.read_bytes()[:2000])
    with pytest.raises(DataError, match="repair or remove") as error:
        decode(broken, span=(0, 4095))
    assert "Smith" not in str(error.value)
    (tmp_path / "text.dcm").write_text("no picture")
    with pytest.raises(DataError, match="cannot be read as DICOM"):
        decode(tmp_path / "text.dcm", span=(0, 4095))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ConfigError, match=r"sfumato\[dicom\]"):
        decode(hounsfield, span=(-1024, 3071))


def test_patients_of_dicom_are_the_groups_and_init_finds_them_and_none_may_be_missing(tmp_path):
    for i in range(9):  # files without suffix, of five patients with one or two scans each
        dicom(tmp_path / ("ill" if i % 2 else "well") / f"IM{i:04d}", RAMP // (1 + i % 3), f"patient {i // 2}")
    ways = {"path": str(tmp_path), "source": "imagefolder", "range": (0, 4095), "size": 16}
    source = read(**ways, groups=Groups(dicom=True))
    assert source.classes == ("ill", "well") and len({*source.groups}) == 5 and len(source.groups) == 9
    images = [image for image, _ in source.train]
    assert {image.shape for image in images} == {(16, 16, 1)}
    found = survey(tmp_path, span=(0, 4095), classes=ALL)
    assert found.groups == Groups(dicom=True) and found.persons == 5
    with pytest.raises(RangeMissing):
        survey(tmp_path, classes=ALL)
    with pytest.raises(RangeMissing):
        list(read(**ways | {"range": None}).train)
    dicom(tmp_path / "ill" / "IM0001", RAMP, "")
    with pytest.raises(DataError, match="no id"):
        read(**ways, groups=Groups(dicom=True))


def test_other_proportions_are_cropped_or_padded(tmp_path):
    wide = np.zeros((10, 30), dtype=np.uint8)
    wide[:, 10:20] = 200
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(wide).save(tmp_path / name / "wide.png")
    ways = {"path": str(tmp_path), "source": "imagefolder"}
    (cropped, _), *_ = read(**ways, size=10).train
    (padded, _), *_ = read(**ways, size=30, fit="pad").train
    assert (cropped == 200).all() and (padded[:10] == 0).all() and (padded[10:20, 10:20] == 200).all()


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
    assert source.test is not None and len(list(source.test)) == 4 and source.classes == ("well", "ill")
    with pytest.raises(DataError, match=r"named classes: .*data\.classes"):
        read(**ways)
    for wrong, message in ((np.zeros((8, 14), np.uint8), r"8, 14\).*labels: several"), (np.full((8, 1), 2), r"0\.\.1")):
        np.savez(tmp_path / "mnist.npz", **arrays | {"train_labels": wrong})
        with pytest.raises(DataError, match=message):
            read(**ways, classes=("well", "ill"))
