"""Names of files as sets have them: the right person is proposed, or the owner is asked; counters
are no persons.
"""

import hashlib
import random
import re
import uuid
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import IFD, Base

from sfumato.data.names import repeated_folders, repeats_in
from sfumato.data.photographs import taken_in_a_row

KINDS = ("benign", "malignant")
HEX = [hashlib.md5(bytes([n, 7])).hexdigest() for n in range(256)]
UUIDS = [str(uuid.UUID(text)) for text in HEX]
MRN = random.Random(0).sample(range(10000, 99999), 200)
NAMES = (
    "Smith Jones Garcia Mueller Rossi Novak Silva Kim Ali Ito Berg Wolf Stein Adams Young King "
    "Wright Scott Hill Green"
)
SURNAMES = NAMES.split()
SITES = ["CS", "DU", "EZ", "FG", "HT"]
CODES = (
    "7XQ2 K93A 8PLM Q1Z7 55TX A8B2 M2N4 ZZ91 0KLP 3F7G J8H1 T6Y2 W3E5 R4T9 U1I8 O2P7 S5D3 F6G4 "
    "H7J1 L9K2"
)
SIDES = ("LEFT", "RIGHT")
VIEWS = ("CC", "MLO")

# name of a picture, by the number of its person and of the picture among theirs (from 0), of the
# set, and its class
RIGHT = {
    "slices of volumes": lambda p, j, i, k: f"BraTS20_Training_{p:03}_{50 + 3 * j}.png",
    "slices in two parts": lambda p, j, i, k: (
        f"BraTS20_{('Training', 'Validation')[p % 2]}_{p:03}_{50 + j}.png"
    ),
    "tumour atlas": lambda p, j, i, k: (
        f"TCGA_{SITES[p % 5]}_{4941 + 7 * p}_1996{1 + p % 9:02}09_{j + 10}.tif"
    ),
    "lung nodules": lambda p, j, i, k: f"LIDC-IDRI-{p + 1:04}_nodule{j % 3}_slice{j}.png",
    "nodules, bare": lambda p, j, i, k: f"{p + 1:04}_NI{j % 3:03}_slice{j:03}.png",
    "blood smears": lambda p, j, i, k: (
        f"C{33 + p}P{1 + p}thinF_IMG_20150619_1147{p:02}a_cell_{7 * j}.png"
    ),
    "histology": lambda p, j, i, k: (
        f"SOB_{k[0].upper()}_A-14-{20000 + 137 * p}AB-40-{j + 1:03}.png"
    ),
    "mammograms": lambda p, j, i, k: (
        f"{('Mass', 'Calc')[p % 2]}-Training_P_{p + 1:05}_{SIDES[j % 2]}_{VIEWS[j % 3 % 2]}"
        f"{'_' + str(j) if j > 1 else ''}.png"
    ),
    "chest X-rays": lambda p, j, i, k: (
        f"patient{p + 1:05}_study{1 + j // 2}_view{1 + j % 2}_frontal.jpg"
    ),
    "video frames": lambda p, j, i, k: f"video_{p:03}_frame_{10 * j:04}.png",
    "video clips": lambda p, j, i, k: f"v_ApplyEyeMakeup_g{p + 1:02}_c{1 + j // 3:02}_{j:04}.jpg",
    "hexadecimal, short": lambda p, j, i, k: f"{HEX[p][:6]}_{j}.png",
    "hexadecimal, long": lambda p, j, i, k: f"{HEX[p]}-{j}.png",
    "hexadecimal, behind a word": lambda p, j, i, k: f"anon_{HEX[p][:4]}_{j:03}.png",
    "UUID": lambda p, j, i, k: f"{UUIDS[p]}_{j}.png",
    "letters and digits": lambda p, j, i, k: f"{CODES.split()[p]}-{j}.png",
    "letter behind": lambda p, j, i, k: f"P{p + 1:03}{'abcdef'[j]}.png",
    "letter behind a number": lambda p, j, i, k: f"{p + 1}{'abcdef'[j]}.png",
    "number in parentheses": lambda p, j, i, k: f"P{p + 1:03}{f'({j + 1})' if j else ''}.png",
    "several dots": lambda p, j, i, k: f"12.{34 + p}.1_{j + 1}.png",
    "counter first": lambda p, j, i, k: f"{i + 1:03}_P{p + 1:03}.png",
    "person's counter first": lambda p, j, i, k: f"{j + 1:03}_P{p + 1:03}.png",
    "counter before a hexadecimal id": lambda p, j, i, k: f"{i + 1:03}_{HEX[p][:8]}.png",
    "counter before a name": lambda p, j, i, k: f"{i + 1:03}_{SURNAMES[p]}.png",
    "image before patient": lambda p, j, i, k: f"image{j + 1}_patient{p + 1}.png",
    "class of another folder's": lambda p, j, i, k: (
        f"{('CNV', 'DME')[KINDS.index(k)]}-{1016 + 137 * p}-{j + 1}.jpeg"
    ),
    "class in front": lambda p, j, i, k: f"{k.upper()}_{100 + p}_{j}.png",
    "class shortened": lambda p, j, i, k: f"{k[:3]}-{100 + p:04}-{j}.png",
    "BIDS": lambda p, j, i, k: f"sub-{p + 1:02}_ses-{1 + j // 3:02}_T1w_slice_{30 + j}.png",
    "sequence first": lambda p, j, i, k: (
        f"{('T1', 'T2', 'FLAIR')[j % 3]}_sub-{p + 1:02}_{j // 3}.png"
    ),
    "side first": lambda p, j, i, k: f"{SIDES[j % 2]}_{p + 1:02}_{j // 2}.png",
    "eyes": lambda p, j, i, k: f"{p}_{SIDES[j % 2].lower()}_{j // 2}.jpg",
    "eyes, glued": lambda p, j, i, k: f"RET{p + 1:03}{('OD', 'OS')[j % 2]}{j // 2 or ''}.jpg",
    "names": lambda p, j, i, k: f"{SURNAMES[p]}_{j + 1}.png",
    "names, glued": lambda p, j, i, k: f"{SURNAMES[p].lower()}{j + 1}.png",
    "first and last names": lambda p, j, i, k: (
        f"{SURNAMES[p % 7]}_{SURNAMES[-1 - p]}_{j + 1:04}.jpg"
    ),
    "names and sides": lambda p, j, i, k: f"{SURNAMES[p]}_{SIDES[j % 2].lower()}_{j // 2}.png",
    "initials": lambda p, j, i, k: f"{'ABCDEFGHIJ'[p % 10]}{'KM'[p // 10]}_{j + 1}.png",
    "initials and moods": lambda p, j, i, k: (
        f"{'ABCD'[p % 4]}{'KMNOQ'[p // 4]}.{('AN', 'HA')[j % 2]}{1 + j // 2}.{i}.tiff"
    ),
    "letters apart": lambda p, j, i, k: f"{chr(97 + p)}_{j + 1}.png",
    "letters": lambda p, j, i, k: f"{chr(97 + p)}{j + 1}.png",
    "copies": lambda p, j, i, k: (
        f"s{p:02}{('', '_aug1', '_hflip', '_rot90', '_crop', ' - Copy')[j]}.png"
    ),
    "dates in front": lambda p, j, i, k: f"20{10 + i % 9}-05-{1 + i % 28:02}_P{p:02}_{j}.png",
    "dates behind": lambda p, j, i, k: f"P{p:03}_20230{1 + j}{1 + i % 28:02}_12{j:02}{p:02}.png",
    "accession numbers": lambda p, j, i, k: f"{p + 1:02}_{MRN[3 * p + j // 2]}_{j}.png",
    "UIDs of DICOM": lambda p, j, i, k: f"1.2.840.113619.2.55.{MRN[p]}.{j + 1}.png",
    "other scripts": lambda p, j, i, k: f"患者{p + 1:03}_{j}.png",
}
ASKED = {
    "frame before video": lambda p, j, i, k: f"frame{10 * j:04}_video{p + 1:02}.png",
    "counter before a number": lambda p, j, i, k: f"{j + 1:03}_{MRN[p]}.png",
    "slice before a number": lambda p, j, i, k: f"{50 + j}_{MRN[p]}.png",
    "year first": lambda p, j, i, k: f"{2015 + (p + j) % 9}_{412 + p}_{j}.png",
    "few persons": lambda p, j, i, k: f"P{p % 4 + 1}_{i:02}.png",
    "few names": lambda p, j, i, k: f"{SURNAMES[p % 3].lower()} ({i}).png",
    "hands and tiles": lambda p, j, i, k: f"hand{p % 4 + 1}_{chr(97 + p)}_bot_{j}.jpeg",
    "numbers in some names only": lambda p, j, i, k: (
        f"{'A2-' if p % 4 else ''}IM-{115 + p:04}-{j + 1:04}.jpeg"
    ),
}


def brought(form, spread):
    """Six pictures each of 20 persons, and whose they are. spread: a person's pictures are in all
    classes.
    """
    rows = []
    for p in range(20):
        for j in range(6):
            kind = KINDS[(p + j) % 2] if spread else KINDS[p // 10]
            rows.append((form(p, j, len(rows), kind), kind, p))
    names, kinds, persons = zip(*rows, strict=True)
    return repeats_in(names, kinds, kinds, KINDS), names, persons


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("scheme", RIGHT)
def test_the_person_of_a_naming_scheme_is_proposed(scheme, spread):
    found, names, persons = brought(RIGHT[scheme], spread)
    assert found is not None and found.groups is not None
    ids = [re.search(found.groups, name)[1] for name in names]
    assert len({*zip(ids, persons, strict=True)}) == len({*ids}) == found.persons == 20
    assert len(found.examples) == 2 and all(
        re.search(found.groups, name)[1] == one for name, one in found.examples
    )


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("scheme", ASKED)
def test_questions_for_the_owner_come_without_a_proposal(scheme, spread):
    found, *_ = brought(ASKED[scheme], spread)
    assert found is not None and found.groups is None


PLAIN = {
    "counters": [(f"img_{j:04}.png", k) for k in KINDS for j in range(60)],
    "numbers": [(f"{j}.png", k) for k in KINDS for j in range(60)],
    "one counter": [(f"img_{j:04}.png", KINDS[j % 2]) for j in range(120)],
    "a telephone": [
        (f"IMG_2023{1 + j % 12:02}{1 + j % 28:02}_1{j % 9}{j % 60:02}30.jpg", k)
        for k in KINDS
        for j in range(60)
    ],
    "a messenger": [
        (f"IMG-202301{1 + j // 10:02}-WA{j % 10:04}.jpg", k) for k in KINDS for j in range(60)
    ],
    "screenshots": [
        (f"Screenshot 2023-01-{1 + j % 28:02} at 1{j % 9}.{j % 60:02}.07.png", KINDS[j % 2])
        for j in range(60)
    ],
    "numbers of a larger set": [(f"{n}.png", str(n % 10)) for n in MRN],
    "a label behind": [(f"{j:05}_{j % 10}.png", str(j % 10)) for j in range(600)],
    "batches": [(f"data_batch_{1 + j % 5}_{j // 5:04}.png", str(j % 10)) for j in range(600)],
    "hashes": [
        (f"{hashlib.md5(str(j).encode()).hexdigest()}.png", KINDS[j % 2]) for j in range(3000)
    ],
    "UUIDs": [
        (f"{uuid.UUID(int=random.Random(j).getrandbits(128), version=4)}.png", KINDS[j % 2])
        for j in range(3000)
    ],
    "a person each": [(f"P{j + 1:03}.png", KINDS[j % 2]) for j in range(60)],
    "cats and dogs": [
        (f"{k}.{j}.jpg", k)
        for k in ("cat", "dog")
        for j in random.Random(k).sample(range(12500), 900)
    ],
    "codes of classes": [
        (f"Tr-{k[:2]}Tr_{j:04}.jpg", k) for k in ("glioma", "meningioma", "none") for j in range(60)
    ],
    "scan (1)": [(f"scan ({j}).png", k) for k in KINDS for j in range(1, 60)],
    "words of files": [
        (w + t.format(j), k)
        for k in KINDS
        for j in range(40)
        for w, t in (("scan", " ({}).png"), ("train", "{}.png"))
    ],
    "a side": [(f"left ({j}).png", k) for k in KINDS for j in range(1, 60)],
}


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_only_count_are_no_persons(name):
    names, kinds = zip(*PLAIN[name], strict=True)
    assert repeats_in(names, kinds, kinds, sorted({*kinds})) is None


@pytest.mark.parametrize(
    "form", ["scan ({i}).png", "train{i}.png", "left ({i}).png", "Smith ({i}).png"]
)
def test_words_are_no_persons_with_dozens_of_pictures(form):
    words = form.split("{")[0].rstrip("( ")
    names = [
        form.replace(words, word).format(i=i)
        for word in (words, "right", "other")
        for i in range(40)
    ]
    found = repeats_in(names, ["a"] * 120, ["a", "b"] * 60, ("a", "b"))
    assert found is None or found.groups is None or found.persons >= 40


def test_a_class_glued_to_names_in_one_part_is_no_part_of_the_id():
    rows = [
        (f"{glued}C{100 + p}P{61 + p}thinF_IMG_cell_{j}.png", part, p)
        for part, glued in (("train", ""), ("valid", "Parasitized"))
        for p in range(30)
        for j in range(6)
    ]
    names, parts, persons = zip(*rows, strict=True)
    found = repeats_in(names, parts, ["Parasitized"] * len(rows), ("Parasitized", "Uninfected"))
    ids = [re.search(found.groups, name)[1] for name in names]
    assert len({*ids}) == len({*zip(ids, persons, strict=True)}) == 30


@pytest.mark.parametrize(
    "form", ["{mrn}.png", "P{p:03}.png", "{hex}.png", "{name}.png", "CNV-{mrn}.png"]
)
def test_an_id_that_returns_in_another_class_is_proposed(form):
    rows = [
        (form.format(mrn=MRN[p], p=p, hex=HEX[p][:8], name=SURNAMES[p]), k)
        for k in KINDS
        for p in range(20)
    ]
    names, kinds = zip(*rows, strict=True)
    assert repeats_in([n.replace("CNV", k[:3]) for n, k in rows], kinds, kinds, KINDS).persons == 20
    assert repeats_in(names[:20], kinds[:20], kinds[:20], KINDS) is None


def test_folders_that_are_no_classes_are_asked_about():
    kinds = [KINDS[i % 2] for i in range(60)]
    assert repeated_folders([f"set/scans/P{i // 3}" for i in range(60)], kinds)
    assert not repeated_folders([f"set/images_{i // 3:03}" for i in range(60)], kinds)
    assert not repeated_folders([f"set/train/{kind}" for kind in kinds], kinds)


def photograph(
    file: Path, seconds: int, serial: str = "", tag: int = Base.DateTimeOriginal
) -> Path:
    exif = Image.Exif()
    exif.get_ifd(IFD.Exif)[tag] = (
        f"2026:01:31 {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    )
    if serial:
        exif.get_ifd(IFD.Exif)[Base.BodySerialNumber] = serial
    Image.new("L", (8, 8)).save(file, exif=exif)
    return file


@pytest.mark.parametrize(
    ("apart", "serials", "step", "row"),
    [(5, [""], 1, True), (600, [""], 1, False), (600, ["A1"], 1, True), (600, ["A1"], 7, False)],
)
def test_photographs_in_a_row_are_evidence_of_one_person(tmp_path, apart, serials, step, row):
    """Ten hand signs, five seconds apart, or ten pictures that one device numbered one after
    another.
    """
    files = [photograph(tmp_path / f"x{step * i:03}.jpg", apart * i, serials[0]) for i in range(10)]
    assert taken_in_a_row(files) == row


def test_times_in_names_are_evidence_and_damage_is_none(tmp_path):
    for i in range(10):
        (tmp_path / f"IMG_20260131_1200{5 * i:02}.jpg").write_bytes(b"no picture")
    assert taken_in_a_row(sorted(tmp_path.iterdir()))
    for day, file in enumerate(sorted(tmp_path.iterdir()), 10):
        file.rename(tmp_path / f"IMG_202601{day}_120000.jpg")
    assert not taken_in_a_row(sorted(tmp_path.iterdir()))


def test_an_unreadable_photograph_states_nothing(tmp_path):
    """A faltering network must not hide that pictures were taken in a row."""
    with pytest.raises(OSError):
        taken_in_a_row([tmp_path / "gone.jpg"])
