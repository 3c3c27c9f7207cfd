"""Recognise columns of persons' ids by their names and by the form of their cells."""

import unicodedata

import numpy as np
import pytest

from sfumato.data.labels_and_ids import Unclear, groups_in, is_person
from sfumato.data.repeated_ids import rate_ids, repeated_ids
from sfumato.settings.data import Groups

HASHES = [f"{7919 * number + 10**6:x}" for number in range(200)]


def repeated(values, each: int) -> list[str]:
    return [str(value) for value in values for _ in range(each)]


@pytest.mark.parametrize("name", ["eid", "RID", "PTID", "bsn", "Pseudonym", "dossier", "患者ID"])
@pytest.mark.parametrize(
    "ids",
    [
        range(1_000_003, 3_000_000, 79_190),
        range(70_001, 70_030),
        range(13, 5000, 211),
        [f"{number}.0" for number in range(70_001, 90_000, 999)],
        [*range(1_000_003, 3_000_000, 79_190), "missing"],
        [f"756.{number}.5678.97" for number in range(1234, 1264)],
        [f"943 476 {number}" for number in range(5919, 5949)],
        [f"{number}-12-1234" for number in range(100, 130)],
    ],
)
def test_numeric_ids_are_noticed_under_any_name(name, ids):
    assert rate_ids(name, [*repeated(ids, 4), "", "nan"]) == 2


random = np.random.default_rng(0)
FACTS = {
    "age": random.integers(18, 95, 600),
    "year": random.integers(1990, 2026, 600),
    "score": random.integers(0, 1000, 600),
    "probability": random.random(600).round(2),
    "width": random.choice([512, 600, 640, 768, 853, 1024, 1333, 2048, 2446, 4032], 600),
    "height": random.integers(300, 3000, 60),
    "acquired": [f"201{y}{m:02}17" for y in range(9) for m in range(1, 13) for _ in range(4)],
    "day": [f"{d:02}.0{m}.2019" for d in range(1, 29) for m in range(1, 9) for _ in range(3)],
    "time": [f"0{h}:{m:02}" for h in range(7, 10) for m in range(60) for _ in range(3)],
    "month": repeated([f"20{y:02}{m:02}" for y in range(20) for m in range(1, 13)], 3),
    "epoch": repeated(range(1_546_300_800_000, 1_577_836_800_000, 315_360_000), 5),
    "timestamp": random.choice(random.integers(1_546_300_800, 1_577_836_800, 150), 600),
    "StudyTime": random.choice([f"{h:02}{m:02}30.0" for h in range(24) for m in range(60)], 2000),
    "StudyDate": [f"2019{m:02}{d:02}" for m in range(1, 13) for d in range(1, 29)] * 2,
    "exam": [f"2019-{m:02}-{d:02}" for m in range(1, 13) for d in range(1, 29)] * 2,
    "platelets": random.integers(150, 450, 600) * 1000,
    "pixels": random.choice([512**2, 640**2, 1024**2, 640 * 480, 1024 * 768], 40),
    "box": [f"{x} {y} 90 90" for x in range(10, 16) for y in range(10, 16)] * 2,
    "site": repeated([f"site{number:02}" for number in range(1, 15)], 20),
    "ward": repeated([f"W{number}" for number in range(100, 112)], 20),
    "SeriesDescription": repeated([f"T1_{number:03}_a" for number in range(10)], 20),
    "patient_sex": ["F", "M"] * 300,
    "patient_age": random.integers(18, 58, 600),
    "PatientAge": [f"{age:03}Y" for age in random.integers(1, 58, 600)],
    "patient_country": random.choice(["CH", "Deutschland", "France", "Italia", "España"], 600),
}


@pytest.mark.parametrize("name", FACTS)
def test_ages_years_sizes_scores_and_dates_are_no_ids(name):
    assert rate_ids(name, [*map(str, FACTS[name])]) == 0


def test_names_are_read_without_accents():
    for name in ("patiënt", unicodedata.normalize("NFD", "patiënt")):
        assert is_person(name)
        assert rate_ids(f"{name}_ref", repeated(range(1000, 1100, 7), 3)) == 2


@pytest.mark.parametrize("each", [4, 12, 20])
def test_ids_with_many_images_each_are_noticed(each):
    for name in ("patient_hash", "pat_mrn", "pat", "subject_pseudo", "client_ref"):
        assert rate_ids(name, repeated(HASHES[: 600 // each], each)) == 2
    for name in ("hash_id", "h", "Accession"):
        assert rate_ids(name, repeated(HASHES[: 600 // each], each)) > 0
    assert rate_ids("signer", repeated("abcde", 100)) == 2


def test_the_column_named_after_persons_is_proposed_first():
    columns = {
        "label": repeated(HASHES[:30], 4),
        "nickname": repeated("abcdefghij", 12),
        "eid": repeated(range(10_001, 10_031), 4),
    }
    assert repeated_ids(columns, "label") == ("eid", True)
    assert repeated_ids({**columns, "eid": []}, "label") is None


COARSE = repeated([f"M{number}" for number in range(500, 520)], 6)


@pytest.mark.parametrize(
    ("chosen", "other"),
    [("case_id", "patient_mrn"), ("participant_id", "mrn_hash"), ("case", "pat")],
)
def test_a_column_with_coarser_ids_is_asked_about(chosen, other):
    columns = {chosen: repeated(range(60), 2), other: COARSE}
    with pytest.raises(Unclear, match=f"could be in {chosen} or {other}"):
        groups_in(columns)
    assert groups_in({**columns, other: repeated(HASHES[:120], 1)}) == Groups(column=chosen)
    assert groups_in({**columns, other: ["anonymous"] * 120}) == Groups(column=chosen)


def test_facts_about_persons_are_no_coarser_ids():
    facts = {name: [*map(str, cells)][:60] for name, cells in FACTS.items()}
    columns = {name: repeated(cells, 2) for name, cells in facts.items()}
    assert groups_in({"patient_id": repeated(range(60), 2), **columns}).column == "patient_id"


def test_annotators_of_many_persons_are_no_coarser_ids():
    persons = repeated(range(100), 2)
    columns = {"patient_id": persons, "user": ["anna", "ben", "carla", "dan", "eva"] * 40}
    assert groups_in(columns) == Groups(column="patient_id")
    for name, each in {"user": 10, "patient_hash": 40}.items():
        columns = {"case_id": repeated(range(200), 1), name: repeated(HASHES[: 200 // each], each)}
        with pytest.raises(Unclear):
            groups_in(columns)
