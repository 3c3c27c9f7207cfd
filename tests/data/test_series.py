"""DICOM series: their order, their persons, frames as slices, and what is left out."""

from collections import Counter

import numpy as np
import pytest
from opened_files import opened_files
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.uid import RLELossless
from scans import phantom, write_dicom, write_pictures, write_series
from sources.writers import read_all
from surveys import survey
from test_volumes import take

from sfumato.data.labels_and_ids import Unclear
from sfumato.data.series import in_slices
from sfumato.data.sources import read_source
from sfumato.errors import DataError
from sfumato.planning.create import survey_lines
from sfumato.settings.data import Data, Groups, Volume
from sfumato.settings.options import ALL

SPAN = (0, 4080)


def settings(root, **more):
    named = {"dataset_id": "scans", "source": "imagefolder", "path": str(root), "range": SPAN}
    return Data(**{**named, "volume": Volume(), "groups": Groups(dicom=True), **more})


def write_clinic(root, people=6):
    """Write class folders with a folder per patient, which contains a folder per series. The first
    patient has two series.
    """
    for person in range(people):
        for number in range(2 if person == 0 else 1):
            place = root / ("zero", "one")[person % 2] / f"case{person}" / f"series{number}"
            write_series(
                place, phantom(person + 10 * number), f"P{person}", f"1.2.{person}.{number}"
            )
    return root


def test_a_series_is_ordered_by_position_without_localizers(tmp_path):
    source, images, _ = read_all(settings(write_clinic(tmp_path / "in")), tmp_path)
    assert np.array_equal(np.stack(images[:6])[..., 0], phantom(1))
    assert source.groups == [f"P{i}" for i in (1, 3, 5, 0, 0, 2, 4) for _ in range(6)]
    assert source.converted["localizers left out"] == 7


def test_image_numbers_give_the_order_without_positions(tmp_path):
    for number in range(3):
        write_dicom(tmp_path / f"{9 - number}.dcm", phantom(0)[number], "P", InstanceNumber=number)
    files = sorted(tmp_path.glob("*.dcm"))
    assert [number for number, _ in in_slices(files, Volume(), Counter())] == [2, 1, 0]


def test_series_of_persons_in_one_folder_are_kept_apart(tmp_path):
    """Some programs that remove persons' names give all series the same id."""
    for person in range(2):
        for number in range(4):
            file = tmp_path / f"{number}{person}.dcm"
            write_dicom(file, phantom(0)[number], f"P{person}", InstanceNumber=number)
    files = sorted(tmp_path.glob("*.dcm"))
    chosen = in_slices(files, Volume.model_validate({"from": 1, "to": 2}), Counter())
    assert [file.name for _, file in chosen] == ["10.dcm", "20.dcm", "11.dcm", "21.dcm"]


def test_a_series_and_the_same_pictures_give_the_same_set(tmp_path):
    root = write_clinic(tmp_path / "in", people=10)
    phantoms = [(person, person) for person in (1, 3, 5, 7, 9, 0)] + [(0, 10)]
    phantoms += [(person, person) for person in (2, 4, 6, 8)]
    table = {
        f"scan{chr(65 + place)}": (
            ("zero", "one")[person % 2],
            f"P{person}",
            phantom(number)[1:5:2],
        )
        for place, (person, number) in enumerate(phantoms)
    }
    pictures = write_pictures(tmp_path / "pictures", table)
    chosen = Volume.model_validate({"from": 1, "to": 4, "step": 2})
    _, stored = take(settings(root, volume=chosen), tmp_path / "of series")
    plain = {"range": None, "volume": None, "label_column": "label", "classes": ("one", "zero")}
    _, same = take(
        settings(pictures, groups=Groups(column="patient"), **plain), tmp_path / "of pictures"
    )
    assert stored == same and len(stored) == 6


def test_frames_are_slices_with_their_own_rescale(tmp_path):
    root = tmp_path / "in"
    frames = phantom(0).astype(np.uint16) * 16
    for person in range(4):
        file = write_dicom(
            root / ("a", "b")[person % 2] / f"{person}.dcm", frames, f"P{person}", f"1.{person}"
        )
        if person == 1:
            data = dcmread(file)
            data.PerFrameFunctionalGroupsSequence = Sequence(
                [rescaled(number) for number in range(6)]
            )
            data.save_as(file)
        if person == 2:
            data = dcmread(file)
            data.compress(RLELossless)
            data.save_as(file)
    source, images, _ = read_all(settings(root), tmp_path)
    assert source.groups == [f"P{i}" for i in (0, 2, 1, 3) for _ in range(6)]
    for person in (0, 1, 3):
        assert np.array_equal(np.stack(images[6 * person :][:6])[..., 0], phantom(0)), person
    shifted = (phantom(0) * 16.0 + 100 * np.arange(6)[:, None, None]) / 4080
    assert np.abs(np.stack(images[12:18])[..., 0] - np.rint(255 * shifted.clip(0, 1))).max() <= 1


def rescaled(number):
    inner = Dataset()
    outer = Dataset()
    inner.RescaleSlope = 1
    inner.RescaleIntercept = 100 * number
    inner.RescaleType = "US"
    outer.PixelValueTransformationSequence = Sequence([inner])
    return outer


BROKEN = {
    "cut short": ({}, -500, "no readable pixels"),
    "of 10⁹ frames": ({"NumberOfFrames": 10**9}, None, "contains 1000000000 frames"),
    "of 60 000 frames": ({"NumberOfFrames": 60_000}, None, "contains 60000 frames"),
    "of huge frames": ({"Rows": 65535, "Columns": 65535}, None, "65535×65535 pixels"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_frames_are_refused(name, tmp_path):
    changes, cut, why = BROKEN[name]
    root = tmp_path / "in"
    for person in range(2):
        frames = phantom(0).astype(np.uint16)
        file = write_dicom(
            root / "ab"[person] / "x.dcm", frames, f"P{person}", f"1.{person}", **changes
        )
        file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=why):
        read_all(settings(root), tmp_path)


def test_slices_that_no_series_has_and_an_axis_are_refused(tmp_path):
    root = write_clinic(tmp_path / "in")
    with pytest.raises(DataError, match=r"number of images: 6.*lower data\.volume\.from"):
        read_source(settings(root, volume=Volume.model_validate({"from": 6})), tmp_path)
    with pytest.raises(DataError, match=r"in which they were acquired: remove data\.volume\.axis"):
        read_source(settings(root, volume=Volume(axis="coronal")), tmp_path)


def test_a_survey_finds_series_and_their_patients(tmp_path):
    seen = survey(write_clinic(tmp_path / "in"), range=SPAN, classes=ALL)
    assert seen.data["volume"] == {"from": 0, "step": 1} and seen.groups == Groups(dicom=True)
    assert (seen.images, seen.persons, seen.localizers, seen.classes) == (42, 6, 7, ("one", "zero"))


def write_single(root):
    """Write two images, of two series, for each of ten patients in two classes."""
    for number in range(20):
        file = root / "ab"[number % 2] / f"{number}.dcm"
        write_dicom(file, phantom(number)[0] * 16, f"P{number % 10}", f"1.{number}")
    return root


def write_png(root, count=30):
    for number in range(count):
        root.mkdir(parents=True, exist_ok=True)
        Image.new("L", (12, 16), number).save(root / f"{number:02}.png")


def test_single_images_are_no_series_but_state_their_patients(tmp_path):
    root = write_single(tmp_path / "in")
    for folder in (root / "a", root / "b"):
        for number in range(2):
            (folder / f"0{number}_INFO.txt").write_text("no picture")
    seen = survey(root, range=SPAN, classes=ALL, skip=0.2)
    assert "volume" not in seen.data and seen.persons == 10
    rows = [f"{file.relative_to(root)},{file.parent.name}" for file in root.rglob("*.dcm")]
    (root / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
    listed = survey(root, range=SPAN, label_column="label", classes=ALL)
    assert listed.persons == 10 and listed.groups == Groups(dicom=True)


@pytest.mark.parametrize("folder", ["another class", "a"])
def test_patients_are_found_beside_pictures_in_other_formats(folder, tmp_path):
    root = write_single(tmp_path / "in")
    write_png(root / folder)
    with pytest.raises(Unclear, match="DICOM files, so the others have no PatientID: state"):
        survey(root, range=SPAN, classes=ALL)
    assert survey(root, range=SPAN, classes=ALL, alone=True).persons == 10 + 30
    with pytest.raises(DataError, match="has no id: add one"):
        survey(root, range=SPAN, classes=ALL, groups=Groups(dicom=True))


def test_all_slices_of_a_series_without_an_id_are_one_person(tmp_path):
    """The slices may be in different class folders."""
    root = tmp_path / "in"
    for person in range(4):
        for number, picture in enumerate(phantom(person)):
            file = root / "ab"[number % 2] / f"{person}{number}.dcm"
            write_dicom(file, picture, "", f"1.{person}", InstanceNumber=number)
        write_dicom(root / "a" / f"frames{person}.dcm", phantom(person), "", "")
    write_png(root / "a", 2)
    groups = read_source(settings(root, groups=Groups(dicom=True, alone=True)), tmp_path).groups
    assert sorted(Counter(filter(None, groups)).values()) == [6] * 8 and groups.count(None) == 2
    assert {name for name in groups if name and name.endswith(".dcm")} == {
        f"a/frames{person}.dcm" for person in range(4)
    }


def test_files_of_a_series_without_an_id_are_one_person(tmp_path):
    for number in range(24):
        file = tmp_path / "in" / "ab"[number % 2] / f"{number}.dcm"
        write_dicom(file, phantom(0)[0], "", f"1.{number // 2}")
    for volume in (None, Volume()):
        chosen = settings(tmp_path / "in", volume=volume, groups=Groups(dicom=True, alone=True))
        groups = read_source(chosen, tmp_path).groups
        assert sorted(Counter(groups).values()) == [2] * 12, volume


def test_a_uid_that_all_files_have_is_not_a_person(tmp_path):
    for number in range(24):
        file = tmp_path / "in" / "ab"[number % 2] / f"{number}.dcm"
        write_dicom(file, phantom(0)[0], "", "1.2")
    chosen = {"groups": Groups(dicom=True, alone=True)}
    assert len({*read_source(settings(tmp_path / "in", **chosen), tmp_path).groups}) == 24
    source = read_source(settings(tmp_path / "in", volume=None, **chosen), tmp_path)
    assert source.groups == [None] * 24


def test_a_series_of_two_persons_is_refused(tmp_path):
    root = tmp_path / "in"
    for number in range(20):
        file = root / "ab"[number % 2] / f"{number}.dcm"
        write_dicom(file, phantom(0)[0], f"P{number}", f"1.{number // 4}")
    with pytest.raises(DataError, match="belong to one DICOM series, so they show one person"):
        survey(root, range=SPAN, classes=ALL)
    with pytest.raises(DataError, match="the same id, or correct the SeriesInstanceUID"):
        read_source(settings(root, volume=None, groups=Groups(pattern="^(.)0?")), tmp_path)


def test_a_survey_reads_the_header_of_a_file_once(tmp_path):
    root = write_clinic(tmp_path / "in")
    write_png(root / "zero", 10)
    with opened_files() as opened:
        survey(root, range=SPAN, classes=ALL, alone=True)
    counts = Counter(opened)
    assert max(counts[str(file)] for file in root.rglob("*.png")) <= 4
    assert max(counts[str(file)] for file in root.rglob("IM*")) <= 9


def test_a_series_is_found_after_any_number_of_pictures(tmp_path):
    write_png(tmp_path / "in/a", 60)
    write_series(tmp_path / "in/b", phantom(0), "P0", "1.0")
    assert survey(tmp_path / "in", range=SPAN, classes=ALL, alone=True).data["volume"]


def test_folders_of_one_patient_each_do_not_become_classes(tmp_path):
    for person in range(12):
        write_series(
            tmp_path / "in" / f"case-{'abcdefghijkl'[person]}",
            phantom(person),
            f"P{person}",
            f"1.{person}",
        )
    with pytest.raises(Unclear, match="DICOM files of only one patient, so each folder may"):
        survey(tmp_path / "in", range=SPAN)


def test_a_table_may_name_folders_of_series(tmp_path):
    root = tmp_path / "in"
    rows = ["file_name,label"]
    for person in range(12):
        write_series(root / f"p{person}/ct", phantom(person), f"P{person}", f"1.{person}")
        rows.append(f"p{person}{'/ct' * (person % 2)},{('zero', 'one')[person % 2]}")
    (root / "metadata.csv").write_text("\n".join(rows))
    seen = survey(root, range=SPAN, label_column="label")
    assert (seen.classes, seen.persons, seen.images) == (("one", "zero"), 12, 72)
    assert seen.groups == Groups(dicom=True)
    source = read_source(settings(root, label_column="label", classes=("one", "zero")), tmp_path)
    assert len({*zip(source.groups, source.labels, strict=True)}) == 12
    (root / "metadata.csv").write_text(
        "\n".join([*rows, f"p3/ct/{next(root.glob('p3/ct/*')).name},one"])
    )
    with pytest.raises(DataError, match="names a file a second time"):
        survey(root, range=SPAN, label_column="label")


def test_the_owner_is_warned_of_burned_in_text(tmp_path):
    root = write_clinic(tmp_path / "in")
    for file in [*root.rglob("IM0001")][:3]:
        data = dcmread(file)
        data.BurnedInAnnotation = "YES"
        data.save_as(file)
    seen = survey(root, range=SPAN, classes=ALL)
    assert seen.facts.burned_in == 3
    warning = "burned into the pixels (according to their headers): 3"
    assert any(warning in line for line in survey_lines(seen))


def test_a_table_that_names_all_folders_defines_the_classes(tmp_path):
    root = tmp_path / "in"
    for person in range(12):
        write_series(root / f"p{person}", phantom(person), f"P{person}", f"1.{person}")
    rows = [f"p{person}/,{('zero', 'one')[person % 2]}" for person in range(12)]
    (root / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
    seen = survey(root, range=SPAN)
    assert (seen.classes, seen.persons) == (("one", "zero"), 12)


def test_a_patient_id_of_several_cases_is_asked_about(tmp_path):
    root = tmp_path / "in"
    rows = []
    for number in range(24):
        file = root / f"{number}.dcm"
        write_dicom(file, phantom(0)[0], f"P{number // 4}", f"1.{number}")
        rows.append(f"{file.name},{('zero', 'one')[number % 2]},E{number // 2}")
    (root / "metadata.csv").write_text("\n".join(["file_name,label,case_id", *rows]))
    with pytest.raises(Unclear, match="one PatientID in the DICOM files belongs to several ids"):
        survey(root, range=SPAN)
    assert survey(root, range=SPAN, groups="case_id").persons == 12
