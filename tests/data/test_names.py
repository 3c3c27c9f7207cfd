"""File names as real sets have them: the right person is proposed, or the owner is asked, and no
counter is treated as a person.
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

# Functions that return the name of a picture. Their arguments are the number of its person, the
# picture's number among the pictures of that person, its number in the set (all from 0), and its
# class
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
    # Public sets, and exports of clinics
    "MURA": lambda p, j, i, k: f"XR_WRIST_patient{p + 7:05}_study1_image{j + 1}.png",
    "NIH": lambda p, j, i, k: f"{13 * p + 1:08}_{j:03}.png",
    "CheXpert": lambda p, j, i, k: (
        f"CheXpert-v1.0-small_train_patient{p + 1:05}_study{1 + j // 2}_view{1 + j % 2}_frontal.jpg"
    ),
    "MIMIC": lambda p, j, i, k: (
        f"p10_p{10000032 + 977 * p}_s{50414267 + MRN[3 * p + j // 2]}_{UUIDS[20 + i]}.jpg"
    ),
    "PadChest": lambda p, j, i, k: f"{10**20 + MRN[p] * 999983}_{j}_{10**6 + i}.png",
    "MESSIDOR, twice": lambda p, j, i, k: f"IM{1 + p:04}_{('OD', 'OS')[j % 2]}_{j // 2}.tif",
    "OCT of Duke": lambda p, j, i, k: f"Farsiu_2013_AMD_Subject_{1001 + p}_{j}.png",
    "BraTS 2021": lambda p, j, i, k: (
        f"BraTS2021_{p + 2:05}_{('flair', 't1', 't1ce')[j % 3]}_{70 + j}.png"
    ),
    "OASIS": lambda p, j, i, k: f"OAS1_{p + 1:04}_MR1_mpr-{1 + j % 4}_{100 + j}.jpg",
    "ADNI": lambda p, j, i, k: f"{p % 7 + 2:03}_S_{MRN[p] % 9000 + 1000:04}_{j}.png",
    "IXI": lambda p, j, i, k: f"IXI{4 * p + 2:03}-{('Guys', 'HH')[p % 2]}-{MRN[p]}-T1_{j}.png",
    "months in front": lambda p, j, i, k: f"2020.0{1 + p % 9}.{MRN[p]}.{j}.png",
    "CAMUS": lambda p, j, i, k: (
        f"patient{p + 1:04}_{('2CH', '4CH')[j % 2]}_{('ED', 'ES')[j // 2 % 2]}_{j // 4}.png"
    ),
    "EchoNet": lambda p, j, i, k: f"0X{HEX[p][:16].upper()}_{j}.png",
    "fetal planes": lambda p, j, i, k: f"Patient{p + 1:05}_Plane{1 + j}_1_of_9.png",
    "slides": lambda p, j, i, k: f"tumor_{p + 1:03}_{200 + 224 * i}_{999 + 7 * i}.png",
    "barcodes of slides": lambda p, j, i, k: (
        f"TCGA-A2-{'ABCDEFGHIJKLMNOPQRST'[p]}{MRN[p] % 900 + 100}-01Z-00-DX1_{512 * j}.png"
    ),
    "mammograms of Vietnam": lambda p, j, i, k: f"{HEX[p]}_{HEX[20 + i]}.png",
    "leukaemia": lambda p, j, i, k: f"UID_{p + 1}_{j + 1}_{1 + j % 3}_all.bmp",
    "faces": lambda p, j, i, k: (
        f"{('Anna', 'Ben', 'Eva', 'Hugo')[p % 4]}_{SURNAMES[p]}_{j + 1:04}.jpg"
    ),
    "faces of films": lambda p, j, i, k: f"n{p + 1:06}_{j + 1:04}_{1 + j % 3:02}.jpg",
    "fingerprints": lambda p, j, i, k: (
        f"{p + 1}__{'MF'[p % 2]}_{SIDES[j % 2].title()}_{('index', 'ring', 'little')[j // 2]}"
        "_finger.BMP"
    ),
    "palms": lambda p, j, i, k: f"PolyU_{p + 1:03}_{'FS'[j % 2]}_{j // 2 + 1:02}.bmp",
    "irises": lambda p, j, i, k: f"S{1001 + p}{'LR'[j % 2]}{1 + j // 2:02}.jpg",
    "ears": lambda p, j, i, k: f"{p:03}_{('front', 'back', 'up', 'left')[j % 4]}_{j // 4}_ear.jpg",
    "gaits": lambda p, j, i, k: f"{p + 1:03}-{('nm', 'bg', 'cl')[j // 2]}-{1 + j % 2:02}-090.png",
    "endoscopies": lambda p, j, i, k: f"{HEX[p][:16]}_{MRN[i]}.jpg",
    "a step between frames": lambda p, j, i, k: f"video{p + 1:02}_{25 * j:06}.png",
    "cervix": lambda p, j, i, k: f"{153814312 + MRN[p]} ({j + 1}).bmp",
    "letters and a counter": lambda p, j, i, k: f"AA{chr(65 + p)}A{j}.jpg",
    "zeros of two devices": lambda p, j, i, k: f"P{(f'{p + 1:03}', p + 1)[j % 2]}_{j}.png",
    "glued": lambda p, j, i, k: f"MR{10**6 + 7 * MRN[p]:07}{j:03}.png",
    "glued, two digits": lambda p, j, i, k: f"{p + 10}{j}.png",
    "names with dots": lambda p, j, i, k: f"{'ABC'[p % 3]}.{SURNAMES[p]}.{j}.jpg",
    "other words": lambda p, j, i, k: f"paciente{p + 1:02}-toma{j + 1}.jpg",
    "no separators": lambda p, j, i, k: f"p{p + 1}i{j + 1}.png",
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
    "image before person": lambda p, j, i, k: f"{j + 1}_{p + 1}.jpg",
    "year of an examination": lambda p, j, i, k: f"S{15 + p % 5}-{MRN[p]}_A{1 + j % 3}_{j}.jpg",
    "a room on a day": lambda p, j, i, k: f"2021-03-{1 + p:02}_OR{1 + p % 4}_f{30 * j:06}.jpg",
    "hospital and participant": lambda p, j, i, k: (
        f"TCGA-{HEX[p % 9][:2]}-{HEX[p][4:8]}-01Z-00-DX1_{512 * j}.png"
    ),
    "age": lambda p, j, i, k: f"{20 + i % 60}_{p % 2}_{p % 5}_20170117{MRN[i]:07}.jpg",
    "age behind": lambda p, j, i, k: f"{i:04}_{'MF'[p % 2]}_{20 + i % 60}.png",
    "place in a picture": lambda p, j, i, k: f"{i:05}_{MRN[i] % 90}_{MRN[-i] % 90}.png",
    "biopsies": lambda p, j, i, k: f"{8863 + p}_idx5_x{50 * j + 1001}_y{50 * j + 451}.png",
    "signatures": lambda p, j, i, k: f"{('original', 'forgeries')[j % 2]}_{p + 1}_{j // 2 + 1}.png",
    "a letter behind a code": lambda p, j, i, k: (
        f"N{'aef'[p % 3]}l{p + 1:03}{' abcde'[j].strip()}.jpg"
    ),
    "cameras": lambda p, j, i, k: f"{3 * p + 2:04}_c{1 + j}s{1 + j // 3}_{MRN[i]:06}_00.jpg",
    "sides glued": lambda p, j, i, k: f"{'MF'[p % 2]}{p // 2 + 1:03}_{j}.jpg",
}


EYES = {
    "sides": lambda p, j, k: f"{p}_{SIDES[j].lower()}.jpg",
    "eyes": lambda p, j, k: f"RET{p + 1:03}{('OD', 'OS')[j]}.jpg",
    "letters": lambda p, j, k: f"Image_{p + 1:02}{'LR'[j]}.jpg",
    "with the class": lambda p, j, k: f"{k[0].upper()}-{p + 1}-{'LR'[j]}.jpg",
}


@pytest.mark.parametrize("scheme", EYES)
def test_eyes_in_different_classes_are_of_one_person(scheme):
    rows = [(p, j, KINDS[(p + j) % 2]) for p in range(20) for j in range(2)]
    names = [EYES[scheme](*row) for row in rows]
    kinds = [kind for *_, kind in rows]
    found = repeats_in(names, kinds, kinds, KINDS)
    assert found is not None and found.persons == 20


def brought(form, spread):
    """Name six pictures of each of 20 persons. Returns what is found in the names, the names, and
    the person of each name.

    spread: whether a person's pictures are in both classes, and not only in one.
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
    "lesions": [(f"ISIC_{24306 + 3 * j:07}.jpg", KINDS[j % 2]) for j in range(600)],
    "faces": [(f"{j + 1:06}.jpg", KINDS[j % 2]) for j in range(600)],
    "class and counter": [(f"{k} ({j + 1}).png", k) for k in KINDS for j in range(60)],
    "retinas": [
        (f"2005{1 + j % 12:02}{1 + j % 28:02}_{30000 + 7 * j}_0{1 + j % 4}00_PP.tif", KINDS[j % 2])
        for j in range(600)
    ],
    "crops": [
        (f"{k}{j:02}.tif", k) for k in ("agricultural", "airplane", "beach") for j in range(90)
    ],
    "flowers": [
        (f"{37 * MRN[j]}_{HEX[j][:10]}_n.jpg", ("rose", "tulip")[j % 2]) for j in range(200)
    ],
    "synsets": [
        (f"{k}_{MRN[j]}.JPEG", k)
        for k, first in (("n01440764", 0), ("n02085620", 100))
        for j in range(first, first + 100)
    ],
    "a validation set": [(f"ILSVRC2012_val_{j + 1:08}.JPEG", KINDS[j % 2]) for j in range(600)],
    "numbers of classes": [
        (f"{n + 1:03}_{j + 1:04}.jpg", str(n)) for n in range(3) for j in range(90)
    ],
    "sizes": [(f"{j}_224x224.png", KINDS[j % 2]) for j in range(600)],
    "an eye each": [(f"{j}_{SIDES[MRN[j] % 2]}.png", KINDS[j % 2]) for j in range(200)],
    "a counter in steps": [(f"{1000 * j:07}.png", k) for k in KINDS for j in range(60)],
    "UIDs": [(f"1.2.840.{MRN[j]}.{3 * MRN[j]}.png", KINDS[j % 2]) for j in range(200)],
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


@pytest.mark.parametrize("others", ["IM-{:04}-0001.jpeg", "NORMAL2-IM-{:04}-0001.jpeg"])
def test_few_persons_in_one_of_two_archives_are_seen(others):
    """The names are like the names in a small sample of the chest X-rays. Five persons have two
    pictures each.
    """
    chance = random.Random(0)
    persons = chance.sample(range(1, 2000), 100)
    images = chance.sample(range(3000), 105)
    ill = [
        f"person{person}_virus_{image}.jpeg"
        for person, image in zip([*persons, *persons[:5]], images, strict=True)
    ]
    well = [others.format(n) for n in chance.sample(range(100, 1500), 120)]
    kinds = [KINDS[0]] * len(ill) + [KINDS[1]] * len(well)
    assert repeats_in([*ill, *well], kinds, kinds, KINDS)
    assert repeats_in([*ill[:100], *well], kinds[5:], kinds[5:], KINDS) is None


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
    """Ten pictures taken five seconds apart are evidence, and so are ten with consecutive numbers
    from one device.
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


def test_an_unreadable_photograph_raises_an_error(tmp_path):
    """If such a photograph was skipped, an unreliable network could hide that pictures were taken
    in a row.
    """
    with pytest.raises(OSError):
        taken_in_a_row([tmp_path / "gone.jpg"])
