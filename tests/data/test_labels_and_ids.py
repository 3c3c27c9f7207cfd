"""Recognise columns and folders of persons and of labels by their names, and ask if they are
unclear.
"""

import re
from pathlib import Path

import pytest
from surveys import layout_of

from sfumato.data.labels_and_ids import LABELLED, PERSONS, Unclear, check_names
from sfumato.data.names import repeats_in
from sfumato.data.repeated_ids import likeness
from sfumato.data.sources.splits import is_filing, part_named
from sfumato.data.tables import meaning

OF_PERSONS = (
    "Patient ID, patient-id, PatientID, patients, MRN, mrn_no, PID, Subject, subject_id, "
    "Participant No, person"
)
OF_PERSONS += (
    ", Case ID, case, Anonymised Patient ID, StudyPatientID, PatientenID, group, group_id, "
    "Volunteer code"
)
OF_PERSONS += ", Anon Patient Id, subject_ID"
OF_OTHERS = (
    "patient age, sex, finding, file, study date, label, personality, pidgin, showcase, grouping, "
    "caseous"
)


@pytest.mark.parametrize("name", (OF_PERSONS + ", " + OF_OTHERS).split(", "))
def test_columns_of_persons_are_known_by_their_meaning(name):
    assert bool(PERSONS.fullmatch(meaning(name))) == (name in OF_PERSONS.split(", "))
    assert not (PERSONS.fullmatch(meaning(name)) and LABELLED.fullmatch(meaning(name)))


@pytest.mark.parametrize(
    "name", ["Train", "VALIDATION", "dev", "testing", "Images", "mask", "data"]
)
@pytest.mark.parametrize(
    "form", ["{}", "{}_001", "2_{}", "{}2017", "my10000_{}_part_1", "{} images"]
)
def test_folders_of_files_are_known_by_their_meaning(name, form):
    assert is_filing(form.format(name))


@pytest.mark.parametrize(
    "name", ["train", "TRAINING", "val", "valid", "Validation", "dev", "Val-Images", "train2017"]
)
def test_part_folders_match_in_any_case_beside_filing_words(name):
    assert part_named(Path(name)) == "train" and part_named(Path("positive " + name)) is None
    held_out = re.sub("train(ing)?|val(id)?(ation)?|dev", "test", name, flags=re.IGNORECASE)
    assert part_named(Path(held_out)) == part_named(Path("TESTING")) == "test"


@pytest.mark.parametrize(
    "name", ["Ground-truth labels", "stage 2", "grade 1", "10", "bus", "test positive", "no mask"]
)
def test_classes_are_not_taken_for_folders_of_files(name):
    assert not is_filing(name)


def test_names_of_diagnoses_and_grades_are_taken():
    for names in (
        ["normal", "pneumonia"],
        ["grade 1", "grade 2"],
        [*"0123456789"],
        ["COVID-19", "C50"],
    ):
        check_names(names, [50] * len(names))


def test_many_numbered_names_are_asked_about():
    with pytest.raises(Unclear, match="many, and they contain numbers"):
        check_names([f"{number}" for number in range(1, 41)], [500] * 40)


@pytest.mark.parametrize(("count", "each"), [(2, 9), (30, 49)])
def test_few_pictures_each_are_asked_about(count, each):
    names = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(count)]
    check_names(names, [each + 1] * count)
    with pytest.raises(Unclear, match="most classes have few pictures"):
        check_names(names, [each] * count)


def test_ids_look_more_like_ids_than_diagnoses():
    looks = [
        likeness(names)
        for names in (["MRN1004", "MRN1005"], ["Smith0", "Smith1"], ["benign", "malignant"])
    ]
    assert looks == [2, 1, 0]


def test_a_folder_with_classes_one_level_below_is_named(tmp_path):
    """Unpacking an archive often puts the class folders into one extra folder.

    The extra folder is only proposed as the path, because one class with a folder per person looks
    the same.
    """
    for kind in ("ill", "well"):
        (tmp_path / "scans" / kind).mkdir(parents=True)
        (tmp_path / "scans" / kind / "1.png").touch()
    way = f"scans stands for neither a class nor a person, give the path {tmp_path / 'scans'}"
    with pytest.raises(Unclear, match=way):
        layout_of(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("a3f9c2", "b1e07d"),
        ("P01", "P02"),
        ("AB 1.2.80", "CD 30.4.79"),
        ("Smith, John", "Ito, Aiko"),
        ("Smith^John", "Ito^Aiko"),
        ("Иванова, Анна", "Müller, Hans"),
        ("2026-01-31", "2026-02-01"),
    ],
)
def test_possible_person_names_are_asked_about_even_if_few(names):
    with pytest.raises(Unclear, match="look like ids, dates or names of persons"):
        check_names(names, (500, 500))


@pytest.mark.parametrize(
    "names",
    [
        ("Tony_Blair", "Colin_Powell", "George_W_Bush"),
        ("Anna Müller", "Jan-Erik Berg", "Anna Ito", "Li Na"),
    ],
)
def test_three_first_and_last_names_are_asked_about(names):
    with pytest.raises(Unclear, match="names of persons"):
        check_names(names, (500,) * len(names))


@pytest.mark.parametrize(
    "names",
    [
        ("Mild_Demented", "Moderate_Demented", "Non_Demented", "Very_Mild_Demented"),
        ("Basal_Cell_Carcinoma", "Squamous_Cell_Carcinoma", "Melanoma"),
        ("No Finding", "Pleural effusion", "Mass"),
    ],
)
def test_diagnoses_of_several_words_are_taken(names):
    check_names(names, (500,) * len(names))


def test_grades_and_ranges_are_no_ids():
    check_names(("grade 1", "stage 2b", "BI-RADS 4-5", "covid-19", "T1", "10"), (50,) * 6)


@pytest.mark.parametrize(
    "form",
    [
        "{id}_{date}_{i}.png",
        "{date}_{id}_{i}.png",
        "{compact}_{id}-{i}.jpg",
        "{compact}-{id}_left{i}.png",
    ],
)
def test_a_date_in_front_is_no_id(form):
    """If the year of the date counted as an id, one person's pictures would be in several groups,
    and many persons would be in one group.
    """
    names = [
        form.format(
            id=f"P{i % 12:02}",
            date=f"20{10 + i % 9}-05-{1 + i % 28:02}",
            compact=f"20{10 + i % 9}05{1 + i % 28:02}",
            i=i,
        )
        for i in range(60)
    ]
    pattern = repeats_in(names, [""] * 60, [i % 7 % 2 for i in range(60)], ("a", "b")).groups
    assert {re.search(pattern, name)[1] for name in names} == {f"P{i:02}" for i in range(12)}
