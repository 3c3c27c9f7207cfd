"""Recognise columns of persons' ids by their names and by the form of their cells."""

import numpy as np
import pytest

from sfumato.data.labels_and_ids import Unclear, groups_in
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
    "patient_sex": ["F", "M"] * 300,
    "patient_age": random.integers(18, 58, 600),
    "PatientAge": [f"{age:03}Y" for age in random.integers(1, 58, 600)],
    "patient_country": random.choice(["CH", "Deutschland", "France", "Italia", "España"], 600),
}


@pytest.mark.parametrize("name", FACTS)
def test_ages_years_sizes_scores_and_dates_are_no_ids(name):
    assert rate_ids(name, [*map(str, FACTS[name])]) == 0


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
