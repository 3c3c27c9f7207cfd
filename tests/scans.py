"""Scans as hospitals have them, made from digits: NIfTI volumes, BIDS, DICOM series, and slices as
PNG.
"""

from functools import cache
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian
from sklearn.datasets import load_digits

SLICES = 6
PEOPLE = 24
read_digits = cache(load_digits)  # cached, because reading takes a tenth of a second


def phantom(person: int, slices: int = SLICES) -> np.ndarray:
    """Make a person's slices, (slices, 16, 12) uint8: upright digits of the person's class."""
    digits = read_digits()
    own = digits.images[digits.target == person % 2][person // 2 * slices :][:slices]
    pictures = np.zeros((slices, 16, 12), np.uint8)
    pictures[:, 4:12, 2:10] = own * 15
    pictures[:, 0, 0] = 250  # marks the front (or top) left corner
    return pictures


def write_nifti(
    file: Path, pictures: np.ndarray, turned: str = "RAS", spacing=(1, 1, 5), kind=np.uint8, **scale
) -> Path:
    """Write axial slices, the lowest first, as a volume.

    turned: directions in which the volume's axes are stored.
    """
    values = pictures.transpose(2, 1, 0)[:, ::-1]  # axes: right, front, up
    image = nibabel.Nifti1Image(values.astype(kind), np.diag([1, 1, 5, 1.0]))
    if scale:
        image.header.set_slope_inter(**scale)
    axes = nibabel.orientations.axcodes2ornt(tuple(turned))
    whole = nibabel.orientations.ornt_transform(
        nibabel.orientations.axcodes2ornt(tuple("RAS")), axes
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image.as_reoriented(whole), file)
    return file


def write_bids(
    root: Path, people: int = PEOPLE, head: str = "group", suffixes=("T1w",), **scale
) -> Path:
    """Write a BIDS dataset with one volume per person, session and suffix, and participants.tsv.

    Every third person has two sessions, the others have none.
    """
    rows = [f"participant_id\tage\tsex\t{head}"]
    for person in range(people):
        name = f"sub-{person:02}"
        sessions = ["ses-1/", "ses-2/"] if person % 3 == 0 else [""]
        for number, session in enumerate(sessions):
            for suffix in suffixes:
                words = "_".join([name, *filter(None, [session.strip("/")]), suffix])
                pictures = phantom(person + PEOPLE * number)
                write_nifti(root / name / session / "anat" / f"{words}.nii.gz", pictures, **scale)
        rows.append(
            f"{name}\t{20 + person}\t{'FM'[person // 2 % 2]}\t{('zero', 'one')[person % 2]}"
        )
    (root / "participants.tsv").write_text("\n".join(rows) + "\n")
    (root / "dataset_description.json").write_text('{"Name": "digits", "BIDSVersion": "1.8.0"}')
    (root / "README").write_text("Digits")
    return root


def write_pictures(root: Path, pictures: dict[str, tuple[str, str, np.ndarray]]) -> Path:
    """Write slices as PNG files, and a table of their labels and patients.

    pictures: name -> label, person and slices.
    """
    root.mkdir(parents=True)
    rows = ["file_name,label,patient"]
    for name, (label, person, slices) in pictures.items():
        for number, picture in enumerate(slices):
            Image.fromarray(picture).save(root / f"{name}-{number:03}.png")
            rows.append(f"{name}-{number:03}.png,{label},{person}")
    (root / "metadata.csv").write_text("\n".join(rows) + "\n")
    return root


def write_dicom(
    file: Path, values: np.ndarray, patient: str, series: str = "1.2.3", **more
) -> Path:
    """Write a DICOM file of one frame, (H, W), or of several, (N, H, W), in 12 bits."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    data = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    data.PatientID = patient
    data.SeriesInstanceUID = series
    data.PhotometricInterpretation = "MONOCHROME2"
    data.SamplesPerPixel = 1
    data.Rows, data.Columns = values.shape[-2:]
    if values.ndim == 3:
        data.NumberOfFrames = len(values)
    data.BitsAllocated = 16
    data.BitsStored = 12
    data.HighBit = 11
    data.PixelRepresentation = 0
    data.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    for name, value in more.items():
        setattr(data, name, value)
    data.PixelData = values.astype("<u2").tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file)
    return file


def write_series(folder: Path, pictures: np.ndarray, patient: str, series: str, **more) -> Path:
    """Write a DICOM file per slice, and a localizer.

    The order of the file names is not the order of the slices' positions.
    """
    names = np.random.default_rng(len(pictures)).permutation(len(pictures))
    for number, picture in enumerate(pictures):
        write_dicom(
            folder / f"IM{names[number]:04}",
            picture.astype(np.uint16) * 16,
            patient,
            series,
            ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
            ImagePositionPatient=[0, 0, 5.0 * number],
            InstanceNumber=int(names[number]),
            **more,
        )
    scout = np.full(pictures.shape[1:], 4095)
    write_dicom(
        folder / "SCOUT", scout, patient, series, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]
    )
    return folder
