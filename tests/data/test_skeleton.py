"""Skeletons of folders: `survey` finds the same numbers as in the folder.

A skeleton contains no word, pixel or date of the folder.
"""

import json
import random
import re
import zipfile
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import IFD, Base
from surveys import survey
from test_names import ASKED, KINDS, PLAIN, RIGHT

from sfumato.data.names import repeats_in
from sfumato.data.skeleton import NOUNS, Disguise, replace_numbers, write_skeleton
from sfumato.errors import ConfigError
from sfumato.settings.data import Groups


def understood(names, kinds):
    """Return whether a pattern is proposed, and the number of persons that it finds; None if
    nothing is found.
    """
    found = repeats_in(names, kinds, kinds, sorted({*kinds}))
    return found and (found.groups is not None, found.persons)


def named(form):
    """Return the names of six pictures of each of 20 persons, and their classes."""
    rows = []
    for person in range(20):
        for j in range(6):
            kind = KINDS[person // 10]
            rows.append((form(person, j, len(rows), kind), kind))
    return rows


# Schemes in which numbers count in steps, are coordinates, or join an id and a counter. Replaced
# numbers lose this relation, so the owner must describe the names in words.
ARITHMETIC = {
    "ADNI",
    "a counter in steps",
    "a room on a day",
    "a step between frames",
    "biopsies",
    "cameras",
    "glued",
    "glued, two digits",
}
SCHEMES = {name: named(form) for name, form in {**RIGHT, **ASKED}.items()} | PLAIN


@pytest.mark.parametrize("scheme", sorted({*SCHEMES} - ARITHMETIC))
def test_replaced_names_are_understood_like_the_originals(scheme):
    names, kinds = zip(*SCHEMES[scheme], strict=True)
    disguise = Disguise([*names, *kinds], random.Random(0))
    other = understood([*map(disguise, names)], [*map(disguise, kinds)])
    assert other == understood(names, kinds)


def test_two_names_are_never_replaced_by_one():
    names = [f"{a}{b}{i}" for a in "abglprtz" for b in ("", "ou", "up", "mask") for i in range(30)]
    assert len({*map(Disguise(names, random.Random(0)), names)}) == len(names)


@pytest.mark.parametrize(
    "form", ["person{}_{}", "Patient{}_{}", "{1}_SUBJECT{0}", "patientid{}_{}"]
)
def test_no_person_of_the_copy_has_a_name_of_the_original(form):
    """Nearly all numbers below 900 occur. If only the numbers were replaced, the copy would contain
    names of the original.
    """
    names = [form.format(person, view) for person in range(1, 900) if person % 7 for view in (1, 2)]
    copies = [*map(Disguise(names, random.Random(0)), names)]
    kinds = ["one"] * len(names)
    assert {*names}.isdisjoint(copies)
    assert understood(copies, kinds) == understood(names, kinds)
    assert copies[0][:1].isupper() == names[0][:1].isupper()


def test_a_letter_of_another_alphabet_is_replaced_with_each_key():
    """A letter is replaced again until the result is no kept word. For a single letter, this might
    never end: t and p, for example, are kept, and may be replaced by each other.
    """
    for seed in range(300):
        assert "左" not in Disguise(["左"], random.Random(seed))("左")


def test_words_for_a_person_stay_if_the_folder_uses_all_of_them():
    names = [f"{noun}{number}" for noun in NOUNS for number in (1, 2)]
    assert [*map(Disguise(names, random.Random(0)), names)] == names


def test_numbers_keep_their_form():
    ids = {17003, 23456, 99871, 42000}
    replaced = replace_numbers({1, 2, 3, 7, 500, 501, 504, 2019, 2020} | ids, 4, random.Random(0))
    assert [replaced[n] for n in (1, 2, 3, 2019, 2020)] == [1, 2, 3, 2015, 2016]
    assert replaced[504] - replaced[500] == 4 and replaced[500] < replaced[501] < replaced[504]
    assert {len(str(replaced[n])) for n in ids} == {5}
    assert max(map(replaced.get, ids)) - min(map(replaced.get, ids)) == 99871 - 17003


def test_the_least_and_largest_ids_are_replaced_too():
    """As a number, an id that begins with zeros has fewer digits than the other ids. The other ids
    may then look like the continuation of a count, as 100 continues 98 and 99. In such a
    continuation, the smallest and the largest number are normally kept, but ids must all be
    replaced.
    """
    ids = {972543, 1000768, 9972362, 10003377, 54321098, 99984401}
    replaced = replace_numbers(ids, 4, random.Random(0))
    assert ids.isdisjoint(replaced.values())


DATES = """
%d.%m.%Y|%d/%m/%Y|%m/%d/%Y|%d-%m-%Y|%d_%m_%Y|%d. %m. %Y|%d %m %Y|%d%m%Y|%d.%m.%y|%m/%d/%y|%d-%m-%y
%Y-%m-%d|%Y/%m/%d|%Y%m%d|%Y-%m-%dT10:11:12|%Y:%m:%d 10:11:12|%m/%d/%Y 9:05
%d %b %Y|%d%b%Y|%d-%b-%y|%b %d, %Y|%Y-%b-%d
"""


@pytest.mark.parametrize("form", DATES.strip().replace("\n", "|").split("|"))
def test_dates_of_birth_are_moved_by_the_same_number_of_days(form):
    generator = random.Random(0)
    days = [date(1930, 1, 1) + timedelta(days=generator.randrange(30000)) for _ in range(40)]

    def table(moved):
        return "\n".join(f"{i}.png,{day - moved:{form}}" for i, day in enumerate(days))

    original = table(timedelta(0))
    disguise = Disguise([original], generator)
    assert disguise.days >= timedelta(days=365)
    assert disguise(original) == table(disguise.days)


def test_years_of_birth_are_moved_by_about_as_long_as_dates():
    disguise = Disguise(["1956 1957 1962"], random.Random(0))
    years = round(disguise.days / timedelta(days=365.25))
    assert disguise("1956 1957 1962") == f"{1956 - years} {1957 - years} {1962 - years}"
    assert years >= 1


def test_a_year_is_not_moved_onto_a_number_that_stays():
    replaced = replace_numbers({*range(1, 2000), 2001}, 5, random.Random(0))
    assert replaced[2001] not in range(1, 2000)


@pytest.mark.parametrize("form", ["{}/{}/{}.png", "{}/{}/{}/1.png", "1.{}.{}.{}"])
def test_small_numbers_of_paths_and_ids_are_not_dates(form):
    names = [form.format(a, b, c) for a in range(1, 4) for b in range(1, 9) for c in range(1, 50)]
    assert [*map(Disguise(names, random.Random(0)), names)] == names


@pytest.fixture
def clinic(tmp_path):
    """Two classes of pictures of several modes, a table, and a file that is no picture."""
    folder = tmp_path / "Saint Mary"
    generator = np.random.default_rng(0)
    rows = ["file_name,patient_name,insurance"]
    for kind, mode, form in (("Adenoma", "RGB", "jpg"), ("Normal tissue", "L", "png")):
        (folder / kind).mkdir(parents=True)
        for place, person in enumerate(("Smith", "Garcia", "Müller", "Kim", "Okafor", "Rossi")):
            for view in (1, 2):
                pixels = generator.integers(256, size=(20 + place, 32, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).convert(mode)
                exif = Image.Exif()
                exif.get_ifd(IFD.Exif)[Base.DateTimeOriginal] = (
                    f"2024:03:0{place + 1} 12:00:0{view}"
                )
                exif.get_ifd(IFD.Exif)[Base.BodySerialNumber] = "0520775"
                name = f"{person}_19800{place + 1}01_{view}.{form}"
                picture.save(folder / kind / name, exif=exif)
                rows.append(f"{kind}/{name},{person} Ann,AOK-44{place}17")
    (folder / "persons.csv").write_text("\n".join(rows))
    (folder / "Adenoma" / ".Smith.png").write_bytes(b"hidden")
    (folder / "report of Garcia.pdf").write_bytes(b"%PDF-1.7 Garcia")
    return folder


def unpacked(folder, tmp_path):
    write_skeleton(folder, tmp_path / "skeleton.zip")
    with zipfile.ZipFile(tmp_path / "skeleton.zip") as archive:
        archive.extractall(tmp_path / "copy")
    return tmp_path / "copy"


def test_a_skeleton_is_surveyed_like_its_folder(clinic, tmp_path):
    copy = unpacked(clinic, tmp_path) / "skeleton"
    (clinic / "report of Garcia.pdf").unlink()
    first, second = (survey(path, groups=Groups(pattern=r"^([^\W\d]+)")) for path in (clinic, copy))
    assert (first.images, first.persons) == (second.images, second.persons)
    assert first.facts[:4] == second.facts[:4]
    assert sorted(first.counts) == sorted(second.counts) == [12, 12]
    assert [n for _, n in first.largest] == [n for _, n in second.largest]
    sizes = [
        sorted(Image.open(p).size for p in folder.rglob("*_*.*g")) for folder in (clinic, copy)
    ]
    assert sizes[0] == sizes[1]


def test_names_of_files_that_are_read_stay(clinic, tmp_path):
    (clinic / "persons.csv").rename(clinic / "metadata.csv")
    (clinic / "participants.tsv").write_text("participant_id\tsex\n")
    (clinic / "Adenoma/labels.csv").write_text("file_name\n")
    copy = unpacked(clinic, tmp_path)
    names = {file.name for file in copy.rglob("*.?sv")}
    assert names == {"metadata.csv", "participants.tsv", "labels.csv"}
    header = next(copy.rglob("participants.tsv")).read_text().split()
    assert header[0] == "participant_id" and header[1] != "sex"
    assert "participant_id, participants.tsv" in (copy / "README.txt").read_text()


@pytest.mark.parametrize("head", ["Dateiname", "ImageID", "Image No", "relative_path"])
def test_a_column_of_file_names_keeps_its_title(head, clinic, tmp_path):
    (clinic / "persons.csv").write_text(f"{head};Befund\na.png;b\n")
    copy = unpacked(clinic, tmp_path)
    tables = [file for file in copy.rglob("*.csv") if file.read_text().startswith(f"{head};")]
    assert len(tables) == 1


def test_a_skeleton_contains_no_word_pixel_or_date(clinic, tmp_path):
    copy = unpacked(clinic, tmp_path)
    files = [path for path in copy.rglob("*") if path.is_file()]
    text = " ".join(str(path.relative_to(copy)) for path in files)
    text += (copy / "README.txt").read_text() + next((copy / "skeleton").glob("*.csv")).read_text()
    secret = "Smith Garcia Müller Kim Okafor Rossi Ann AOK Adenoma Normal tissue insurance Mary"
    for word in [*secret.split(), "report of", "44017", *(f"19800{i}01" for i in range(1, 7))]:
        assert not re.search(rf"(?i)\b{word}\b|{word}_", text), word
    content = b"".join(path.read_bytes() for path in files)
    assert b"0520775" not in content and b"2024:03" not in content and b"%PDF" not in content
    pictures = [np.asarray(Image.open(p).convert("L")) for p in copy.rglob("*.*g")]
    assert len({picture.tobytes() for picture in pictures}) == 24
    for original in clinic.rglob("*.*g"):
        if not original.name.startswith("."):
            pixels = np.asarray(Image.open(original).convert("L"))
            assert all(
                abs(np.corrcoef(pixels.ravel(), other.ravel())[0, 1]) < 0.5
                for other in pictures
                if other.shape == pixels.shape
            )


@pytest.mark.parametrize("name", ["persons.json", "PERSONS.JSON"])
def test_escaped_letters_in_json_are_replaced_as_letters(name, tmp_path):
    (tmp_path / "clinic").mkdir()
    (tmp_path / "clinic" / name).write_text(json.dumps(["Müller"]))
    (table,) = (unpacked(tmp_path / "clinic", tmp_path) / "skeleton").iterdir()
    (word,) = json.loads(table.read_text("utf-8"))
    assert len(word) == len("Müller") and word.isalpha()


def test_times_of_photographs_keep_their_distance(clinic, tmp_path):
    copy = unpacked(clinic, tmp_path)
    times = [
        Image.open(path).getexif().get_ifd(IFD.Exif)[Base.DateTimeOriginal]
        for path in copy.rglob("*.jpg")
    ]
    assert {time[11:] for time in times} == {"12:00:01", "12:00:02"}
    assert len({time[:10] for time in times}) == 6


def test_an_archive_and_an_existing_file_are_refused(clinic, tmp_path):
    (tmp_path / "there.zip").write_bytes(b"")
    with pytest.raises(ConfigError, match="exists: remove it"):
        write_skeleton(clinic, tmp_path / "there.zip")
    with pytest.raises(ConfigError, match="not a folder: give the path"):
        write_skeleton(tmp_path / "there.zip", tmp_path / "new.zip")
    assert not Path(tmp_path / "new.zip").exists()
