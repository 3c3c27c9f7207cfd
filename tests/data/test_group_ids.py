"""Groups of images: their ids are found and never shown, a group is held out as a whole, and no
charge is forgotten.
"""

import json
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.data.groups import checked_ids, spelling
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import load_prepared, read_card
from sfumato.errors import BudgetError, ConfigError, DataError, SfumatoError
from sfumato.privacy.authorize import ChargeRequest, open_charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.policy import SpendingPolicy
from sfumato.settings.data import Data, Groups
from sfumato.storage.journal import Journal

ID = "Q7734"  # every person's id begins with this. No file and no message may contain it


class Clinic:
    """Pictures of 40 patients in two classes, 1 to 4 per patient, and a place to prepare them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "in"
        self.state = folder / "state"
        self.card = folder / "card.json"
        self.table = folder / "patients.csv"
        self.rows: list[tuple[str, str]] = []  # file, id
        random = np.random.default_rng(0)
        self.patient: dict[bytes, str] = {}  # patient of each picture
        for number in range(40):
            for i in range(1 + number % 4):
                name = f"{('left', 'right')[(number + i) % 2]}/{ID}-{number:02}_{i}.png"
                array = random.integers(0, 256, (4, 4), dtype=np.uint8)
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(self.root / name)
                self.rows.append((name, f"{ID}-{number:02}"))
                self.patient[array.tobytes()] = f"{ID}-{number:02}"

    def write(self, rows, heads="file,group") -> dict:
        self.table.write_text("\n".join([heads, *(",".join(row) for row in rows)]) + "\n")
        return {"csv": str(self.table)}

    def save(self, ids) -> dict:
        np.save(self.root / "groups.npy", np.array(ids))
        return {"array": True}

    def nest(self) -> None:
        """Move the pictures of each class into one folder per patient."""
        for name, patient in self.rows:
            place = self.root / Path(name).parent / patient
            place.mkdir(exist_ok=True)
            (self.root / name).rename(place / Path(name).name)

    def prepare(self, **changes) -> dict:
        settings = {
            "dataset_id": "clinic",
            "source": "imagefolder",
            "path": str(self.root),
        } | changes
        return prepare_sensitive(Data(**settings), self.state, self.card, self.root.parent / "raw")

    def parts(self) -> dict[str, dict[int, set[str]]]:
        """Return the patients of each group, separately for training images and hold-out."""
        found = {}
        for name in ("sensitive", "holdout"):
            image_set = load_prepared(self.state, read_card(self.card), name)
            groups = defaultdict(set)
            for image, group in zip(image_set.images, image_set.groups, strict=True):
                groups[int(group)].add(self.patient[image.tobytes()])
            found[name] = dict(groups)
        return found

    def spend(self, plan: str = "p", lifetime: float | str = "unlimited") -> None:
        card = read_card(self.card)
        words = {
            "plan": plan,
            "settings": plan,
            "released": "counts",
            "sensitivity": "1",
            "max_norm": 1.0,
        }
        work = ChargeRequest(
            stage="count", mechanism=Mechanism(noise_multiplier=2.0), unit=card.unit, **words
        )
        charge = open_charge(
            self.state, card, work, SpendingPolicy(delta=1e-5, lifetime_epsilon=lifetime)
        )
        charge._lock.close()


@pytest.fixture
def clinic(tmp_path) -> Clinic:
    return Clinic(tmp_path)


UNSEEN = "\u200b\u200d\u2060\ufeff\u00ad\u200e\u180e\u034f\ufe0f\u3164\u0007"
PATIENTS = {"pattern": r"^(\w+-\d+)_"}
WAYS = {
    "csv": lambda clinic: clinic.write(clinic.rows[::-1]),
    "pattern": lambda clinic: PATIENTS,
    "folder": lambda clinic: clinic.nest() or {"folder": True},
    "csv, commas in ids": lambda clinic: clinic.write(
        [(name, f'"Doe, {id_[-2:]}"') for name, id_ in clinic.rows]
    ),
    "csv, numbers": lambda clinic: clinic.write(
        [(name, str(1 + int(id_[-2:]))) for name, id_ in clinic.rows]
    ),
    "array": lambda clinic: clinic.save([id_ for _, id_ in sorted(clinic.rows)]),
    "array, numbers": lambda clinic: clinic.save(
        [1 + int(id_[-2:]) for _, id_ in sorted(clinic.rows)]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_images_of_a_patient_are_one_group_and_in_one_part(way, clinic):
    clinic.prepare(groups=WAYS[way](clinic))
    parts = clinic.parts()
    everyone = [patients for part in parts.values() for patients in part.values()]
    assert all(len(patients) == 1 for patients in everyone) and len(everyone) == 40
    assert len(set.union(*everyone)) == 40
    # The key, which is fixed, selects each of the 40 patients for the hold-out with probability 0.2
    assert 2 <= len(parts["holdout"]) <= 18


def test_a_picture_outside_of_folders_of_patients_has_no_id(clinic, tmp_path):
    clinic.nest()
    Image.new("L", (4, 4)).save(clinic.root / "left" / "stray.png")
    with pytest.raises(DataError, match="has no id: add one"):
        clinic.prepare(groups={"folder": True})
    part = clinic.root.rename(tmp_path / "part")
    clinic.root.mkdir()
    part.rename(clinic.root / "train")
    with pytest.raises(DataError, match="has no id: add one"):
        clinic.prepare(groups={"folder": True})
    (clinic.root / "train/left/stray.png").unlink()
    clinic.prepare(groups={"folder": True})
    assert sum(map(len, clinic.parts().values())) == 40


def test_a_patient_is_held_out_whatever_the_others_are(clinic):
    clinic.prepare(groups=PATIENTS)
    before = {patient for patients in clinic.parts()["holdout"].values() for patient in patients}
    for name, patient in clinic.rows:
        if int(patient[-2:]) % 2:
            (clinic.root / name).unlink()
    clinic.prepare(groups=PATIENTS)
    after = {patient for patients in clinic.parts()["holdout"].values() for patient in patients}
    assert after == {patient for patient in before if int(patient[-2:]) % 2 == 0}


def test_no_id_is_written_and_the_card_names_only_the_unit(clinic, capfd):
    clinic.prepare(groups=WAYS["csv"](clinic))
    clinic.spend()
    written = [path for path in clinic.state.rglob("*") if path.is_file()] + [clinic.card]
    assert len(written) > 8
    for path in written:
        content = path.read_bytes()
        assert ID.encode() not in content and ID.encode("utf-32-le") not in content, path
        assert (
            path == clinic.card or path.name.endswith("lock") or path.stat().st_mode & 0o077 == 0
        ), path
    card = json.loads(clinic.card.read_text())
    assert card.pop("unit") == "group"
    # The same facts as for a set without groups
    facts = {"dataset_id", "source", "shape", "range", "classes", "split", "version"}
    assert set(card) == facts and ID not in "".join(capfd.readouterr())


def test_an_image_without_an_id_can_be_confirmed_as_a_group(clinic):
    rows = [(name, "" if i in (3, 9) else patient) for i, (name, patient) in enumerate(clinic.rows)]
    shutil.copy(clinic.root / clinic.rows[3][0], clinic.root / "left/copy.png")
    groups = clinic.write([*rows, ("left/copy.png", "NA")])
    with pytest.raises(DataError, match=r"image \d+.*no id.*alone: true"):
        clinic.prepare(groups=groups)
    clinic.prepare(groups=groups | {"alone": True})
    found = [
        load_prepared(clinic.state, read_card(clinic.card), part)
        for part in ("sensitive", "holdout")
    ]
    assert sum(map(len, found)) == len(rows) + 1
    persons = {patient for _, patient in rows if patient} | {"one", "another"}
    assert sum(len({*part.groups}) for part in found) == len(persons)


# --- what is refused ------------------------------------------------------------------------------


def with_id(clinic, change) -> dict:
    """Write the table with another id for the sixth picture."""
    name, patient = clinic.rows[5]
    return clinic.write([*clinic.rows[:5], (name, change(patient)), *clinic.rows[6:]])


BAD = {
    "an image without an id": lambda c: with_id(c, lambda _: " "),
    "a placeholder for an id": lambda c: with_id(c, lambda _: "NaN"),
    "two spellings, a space": lambda c: with_id(c, " {}".format),
    "two spellings, capitals": lambda c: with_id(c, str.lower),
    "two spellings, zeros": lambda c: with_id(c, lambda _: f"{ID}-3"),
    "a table that misses a file": lambda c: c.write(c.rows[1:]),
    "a table that names an unknown file": lambda c: c.write(
        [*c.rows, (f"left/{ID}-99_0.png", f"{ID}-99")]
    ),
    "a table that names a file twice": lambda c: c.write([*c.rows, c.rows[0]]),
    "a table with a comma in an id": lambda c: with_id(c, lambda _: f"{ID}, jr"),
    "all in one group": lambda c: c.write([(name, f"{ID}-00") for name, _ in c.rows]),
    "a pattern that matches nothing": lambda c: {"pattern": "^(PATIENT.*)_"},
    "a pattern that misses some": lambda c: {"pattern": r"^(\w+-0\d)_"},
    "a folder that is not there": lambda c: {"folder": True},
    "an array of another length": lambda c: c.save(range(7)),
    "an id that may mean no one": lambda c: with_id(c, lambda _: "0"),
    "a table without its columns": lambda c: c.write(c.rows, heads="picture,patient"),
    "an empty table": lambda c: c.table.write_text("") * 0 or {"csv": str(c.table)},
    "no table": lambda c: {"csv": str(c.root / "nowhere.csv")},
    "a pipe": lambda c: os.mkfifo(c.table) or {"csv": str(c.table)},
    "a device": lambda c: {"csv": "/dev/zero"},
    "no text": lambda c: (
        c.table.write_bytes(b"file,group\n\xff\xfe\x00") * 0 or {"csv": str(c.table)}
    ),
    "an array of fractions": lambda c: c.save([1.0] * 100),
    "a pattern without parentheses": lambda c: {"pattern": r"^\w+-\d+_"},
    "a pattern that is none": lambda c: {"pattern": "("},
    "two ways": lambda c: {"pattern": "^(P)", "folder": True},
}


@pytest.fixture
def at_once() -> Iterator[None]:
    """Fail the test if it takes more than 10 seconds."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for more than 10 s"))
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", BAD)
def test_bad_groups_are_one_sentence(name, clinic, at_once):
    groups = BAD[name](clinic)
    with pytest.raises((SfumatoError, ValueError)) as caught:
        clinic.prepare(groups=groups)
    assert "groups" in str(caught.value)
    assert isinstance(caught.value, ValueError) or caught.value.exit_code in (2, 4)
    assert ("nowhere.csv does not exist" in str(caught.value)) == (
        name == "no table"
    ) and not clinic.card.exists()


ALIKE = [
    *(("P7", "p7"), ("7", "007"), ("7", "7.0"), ("P-07", "P-7"), ("a b", "ab"), ("ﬁ", "fi")),
    *(
        ("P-1", "P\u20111"),
        ("P-1", "P\u22121"),
        ("P-1", "P–1"),
        ("P1", "\u04201"),
        ("HA3", "\u0397\u04103"),
    ),
    *(("P1", f"P{c}1") for c in UNSEEN),
    *(
        ("José1", "Jose1"),
        ("1\u03012", "12"),
        ("é1", "e\u03011"),
        ("P1", "P.1"),
        ("P1", "P-1"),
        ("O1", "01"),
        ("l1", "I1"),
        ("ø1", "o1"),
    ),
    *(("P12", "P\u0661\u0662"), ("7", "\u096d"), ("7", "７")),
    *(("Müller", "Mueller"), ("Groß", "Gross"), ("Håkon", "Haakon"), ("Søren", "Soeren")),
]


@pytest.mark.parametrize("pair", ALIKE)
def test_spellings_of_one_id_are_found(pair):
    assert spelling(pair[0]) == spelling(pair[1])
    with pytest.raises(DataError, match="use one spelling"):
        checked_ids([*pair, "other"], Groups(array=True))


@pytest.mark.parametrize(
    "pair",
    [
        ("7", "70"),
        ("P1", "Q1"),
        ("1-2", "12"),
        ("a0", "a"),
        ("100", "1"),
        ("1.5", "15"),
        ("-5", "5"),
    ],
)
def test_ids_that_differ_are_different(pair):
    assert spelling(pair[0]) != spelling(pair[1])


NAMES_ALIKE = [
    *(
        ("Smith John", "John Smith"),
        ("Smith^John", "John, Smith"),
        ("Li-Na", "na li"),
        ("Smith J", "Smith"),
    ),
    *(("P12/1", "P12"), ("P12", "P12-1"), ("P12 (2)", "P12"), ("P12.b", "p12")),
]


@pytest.mark.parametrize("pair", NAMES_ALIKE)
@pytest.mark.parametrize("alone", [True, False])
def test_ids_that_may_be_of_one_person_are_asked_about(pair, alone):
    for ids in (pair, pair[::-1]):
        with pytest.raises(
            DataError, match=r"image [23] .* Otherwise make the ids clearly different"
        ):
            checked_ids(["other", *ids], Groups(array=True, alone=alone))


@pytest.mark.parametrize(
    "ids",
    [
        ("1-1", "1-2", "2-1"),
        ("12.34.1", "12.35.1"),
        ("A1", "AA1"),
        ("P1", "P1234"),
        ("患者1", "患者2"),
        ("Smith John", "Smith Jane"),
    ],
)
def test_ids_with_parts_in_common_are_different(ids):
    assert checked_ids(ids, Groups(array=True)) == [*ids]


@pytest.mark.parametrize(
    "name",
    [
        "unknown",
        "Unknown ",
        "nan",
        "N/A",
        "\u200b",
        "\u2013",
        "missing",
        "NULL",
        "<NA>",
        "Unbekannt",
        "неизвестно",
    ],
)
def test_placeholders_are_no_ids(name):
    with pytest.raises(DataError, match="image 2 .* no id"):
        checked_ids(["P1", name, "P2"], Groups(array=True))
    assert checked_ids(["P1", name, "P2"], Groups(array=True, alone=True)) == ["P1", None, "P2"]


ANONYMOUS = [
    "000",
    "-9",
    "99",
    "999",
    "ANON",
    "anonymized",
    "Anonymisiert",
    "REMOVED",
    "XXXX",
    "PATIENT",
    "TEST",
]


ANONYMOUS += [
    "N.N.",
    "n. n.",
    "John Doe",
    "DOE^JANE",
    "Mustermann, Max",
    "TBD",
    "Phantom 3",
    "фантом",
    "EMERGENCY12",
]
ANONYMOUS += [
    "Notfall",
    "urgencias",
    "Neugeborenes",
    "various",
    "テスト",
    "99999999",
    "88888888",
    "123456789",
]
ANONYMOUS += [
    "1900-01-01",
    "01.01.1900",
    "19000101",
    "01/01/1970",
    "1900-01-01T00:00:00",
    "1900-01-01 00:00",
    "9999-12-31",
]


@pytest.mark.parametrize("name", ["0", "00", "0.0", "-1", "\u22121", *ANONYMOUS])
@pytest.mark.parametrize("alone", [True, False])
def test_possible_placeholders_are_asked_about(name, alone):
    with pytest.raises(DataError, match="image 2 .* often means an unknown person"):
        checked_ids(["P1", name, "P2"], Groups(array=True, alone=alone))


def test_a_number_of_nines_among_numbers_is_an_id():
    assert checked_ids([*map(str, range(90, 110))], Groups(array=True))
    assert checked_ids([*map(str, range(888880, 888890))], Groups(array=True))


def test_names_of_files_may_count_persons_from_zero():
    assert checked_ids(["0", "1", "2"], Groups(pattern="(a)"))
    for ids, groups in (("012", Groups(array=True)), ("0789", Groups(pattern="(a)"))):
        with pytest.raises(DataError, match="often means an unknown person"):
            checked_ids([*ids], groups)


def test_an_id_with_far_more_images_than_others_is_asked_about(clinic):
    """An id with so many images may stand for all unknown persons. A person with this id on some
    images, and with their own id on others, would then be in two groups.
    """
    crowd = [
        (name, f"{ID}-00" if i < 60 else patient) for i, (name, patient) in enumerate(clinic.rows)
    ]
    groups = clinic.write(crowd)
    with pytest.raises(
        DataError, match=r"assigns \d\d images to one id.* data\.groups\.largest: \d\d$"
    ) as asked:
        clinic.prepare(groups=groups)
    assert not clinic.card.exists()
    clinic.prepare(groups={**groups, "largest": int(str(asked.value).split()[-1])})
    assert clinic.card.exists()


def test_groups_go_with_images_of_the_owner_alone():
    with pytest.raises(
        ValueError, match="groups applies only to data.source imagefolder, npz, webdataset, not to"
    ):
        Data(source="digits", groups=Groups(folder=True))


# --- the odometer when the groups change ----------------------------------------------------------

TENS = {"pattern": r"^(\w+-\d)\d_"}  # each group has ten patients


@pytest.mark.parametrize(
    ("first", "then"), [(PATIENTS, TENS), (TENS, PATIENTS), (None, TENS), (TENS, None)]
)
def test_charged_images_change_groups_only_if_the_owner_agrees(first, then, clinic):
    # No hold-out: with four groups, it could be empty, which is refused
    first, then = ({"groups": given, "holdout_fraction": 0} for given in (first, then))
    clinic.prepare(**first)
    clinic.prepare(**then)  # nothing is spent: the owner may still correct the groups
    clinic.prepare(**first)
    clinic.spend()
    odometer = Odometer(clinic.state, "clinic")
    before = odometer.opened()
    card = clinic.card.read_text()
    with pytest.raises(ConfigError, match=r"data\.other_groups: true"):
        clinic.prepare(**then)
    assert clinic.card.read_text() == card and odometer.complete()
    clinic.prepare(**then, other_groups=True)
    # The odometer is not reset, but marked as incomplete
    assert odometer.opened() == before and not odometer.complete()
    with pytest.raises(BudgetError, match="their cost for one (image|person) is unknown"):
        # The ε of one image does not bound the cost for a person with forty images
        clinic.spend("then", lifetime=1000.0)
    clinic.spend("then")


def test_a_set_that_is_gone_or_was_resized_cannot_be_compared(clinic):
    clinic.prepare(groups=PATIENTS)
    clinic.spend()
    clinic.prepare(groups=PATIENTS)
    with pytest.raises(ConfigError, match="cannot be compared"):
        clinic.prepare(groups=PATIENTS, size=8)
    shutil.rmtree(clinic.state / "data" / "clinic")
    with pytest.raises(ConfigError, match="cannot be compared"):
        clinic.prepare(groups=PATIENTS)


def test_new_patients_and_renamed_groups_keep_the_lifetime(clinic):
    first = shutil.copytree(clinic.root, clinic.root.parent / "first")
    for name, _ in clinic.rows[60:]:
        (first / name).unlink()
    clinic.prepare(path=str(first), groups=clinic.write(clinic.rows[:60]))
    clinic.spend()
    clinic.prepare(groups=clinic.write(clinic.rows))
    renamed = clinic.write([(name, f"another-{patient}") for name, patient in clinic.rows])
    with pytest.raises(ConfigError, match="would now move between"):  # ids decide the hold-out
        clinic.prepare(groups=renamed)
    clinic.prepare(groups=renamed, version="2")
    assert (
        Odometer(clinic.state, "clinic").complete()
        and len(Journal(clinic.state, "clinic").entries()) == 2
    )
    clinic.spend("more", lifetime=1000.0)
    with pytest.raises(BudgetError, match="would be exceeded"):
        clinic.spend("most", lifetime=3.0)
