"""NIfTI volumes: which slices become images, how they are shown, to which person they belong, and
what is refused.
"""

import gzip
import struct
import tracemalloc

import nibabel
import numpy as np
import pytest
from pydantic import ValidationError
from scans import PEOPLE, phantom, write_bids, write_nifti, write_pictures
from sources.writers import read_all
from surveys import survey

from sfumato.data.cards import read_card
from sfumato.data.decoding import decode
from sfumato.data.labels_and_ids import Unclear
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.sources import read_source
from sfumato.data.sources.bids import anatomy_of
from sfumato.data.volumes import slices_of
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Groups, Volume
from sfumato.settings.options import ALL

AXIAL = Volume(axis="axial")
PICTURES = phantom(0)


def shown(file, span=(0, 255), **volume):
    return np.stack([decode(place, span)[..., 0] for place in slices_of(file, Volume(**volume))])


def settings(root, **more):
    named = {"dataset_id": "scans", "source": "imagefolder", "path": str(root), "range": (0, 255)}
    return Data(**{**named, "volume": AXIAL, "groups": Groups(volume=True), **more})


def write_classes(root, suffix=".nii.gz", people=4):
    for person in range(people):
        write_nifti(
            root / ("zero", "one")[person % 2] / f"scan{'abcdefgh'[person]}{suffix}",
            phantom(person),
        )
    return root


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".NII.GZ"])
@pytest.mark.parametrize("turned", ["RAS", "LPI", "SRP", "ILA", "PIR"])
def test_each_orientation_gives_the_same_upright_slices(turned, suffix, tmp_path):
    file = write_nifti(tmp_path / f"x{suffix.lower()}", PICTURES, turned)
    file = file.rename(tmp_path / f"x{suffix}")
    assert np.array_equal(shown(file), PICTURES)


def test_coronal_and_sagittal_slices_have_the_head_at_the_top(tmp_path):
    file = write_nifti(tmp_path / "x.nii", PICTURES, "LIP")
    # Axes: slices from top to bottom, rows from front to back, columns from left to right
    volume = PICTURES[::-1]
    assert np.array_equal(shown(file, axis="coronal"), volume.transpose(1, 0, 2)[::-1])
    assert np.array_equal(shown(file, axis="sagittal"), volume.transpose(2, 0, 1)[..., ::-1])


def test_from_to_and_step_choose_slices_and_none_is_refused(tmp_path):
    file = write_nifti(tmp_path / "x.nii.gz", PICTURES)
    chosen = Volume.model_validate({"from": 1, "to": 5, "step": 2})
    assert [place.number for place in slices_of(file, chosen)] == [1, 3, 5]
    with pytest.raises(DataError, match=r"none of the axial slices.*6\): lower data\.volume\.from"):
        slices_of(file, Volume.model_validate({"from": 6}))


def test_values_are_scaled_as_the_header_states(tmp_path):
    file = write_nifti(tmp_path / "x.nii", PICTURES, kind=np.int16, slope=2, inter=-100)
    assert np.array_equal(shown(file, (-100, 410)), PICTURES)
    negative = write_nifti(tmp_path / "y.nii", PICTURES, kind=np.int16, slope=-1, inter=0)
    positive = shown(write_nifti(tmp_path / "z.nii", PICTURES), None).astype(int)
    assert np.abs(shown(negative, None) - (255 - positive)).max() <= 1


def test_a_volume_is_shown_by_its_own_percentiles(tmp_path):
    """Neither other volumes nor a few extreme values change how a volume is shown."""
    values = np.random.default_rng(0).normal(100, 10, (6, 40, 40)).astype(np.float32)
    root = tmp_path / "in"
    write_nifti(root / "a/x.nii.gz", values, kind=np.float32)
    write_nifti(root / "b/y.nii.gz", 1000 * values, kind=np.float32)
    _, images, _ = read_all(settings(root, range=None), tmp_path)
    low, high = np.percentile(values, (1, 99))
    expected = np.rint(255 * ((values - low) / (high - low)).clip(0, 1))
    assert np.abs(np.stack(images[:6])[..., 0] - expected).max() <= 1
    write_nifti(root / "b/y.nii.gz", -values, kind=np.float32)
    assert np.array_equal(read_all(settings(root, range=None), tmp_path)[1][:6], images[:6])
    values[0, 0, 0] = 1e9
    write_nifti(root / "a/x.nii.gz", values, kind=np.float32)
    assert (
        np.abs(
            np.stack(read_all(settings(root, range=None), tmp_path)[1][1:6])[..., 0] - expected[1:]
        ).max()
        <= 1
    )


def test_values_that_are_not_finite_are_black(tmp_path):
    values = PICTURES.astype(np.float32)
    values[:, 0] = np.nan
    file = write_nifti(tmp_path / "x.nii", values, kind=np.float32)
    assert not shown(file)[:, 0].any() and np.array_equal(shown(file)[:, 1:], PICTURES[:, 1:])
    assert shown(file, None).max() == 255


def test_slices_of_a_volume_belong_to_one_person(tmp_path):
    root = write_classes(tmp_path / "in")
    files = ["one/scanb.nii.gz", "one/scand.nii.gz", "zero/scana.nii.gz", "zero/scanc.nii.gz"]
    assert read_source(settings(root), tmp_path).groups == [
        file for file in files for _ in range(6)
    ]
    pattern = settings(root, groups=Groups(pattern="scan([a-z])"))
    assert read_source(pattern, tmp_path).groups == [name for name in "bdac" for _ in range(6)]
    rows = [
        "file_name,label,who",
        "scana,zero,P",
        "scanb,one,Q",
        "scanc.nii.gz,zero,P",
        "one/scand.nii.gz,one,R",
    ]
    (root / "metadata.csv").write_text("\n".join(rows))
    table = settings(
        root, label_column="label", classes=("zero", "one"), groups=Groups(column="who")
    )
    assert read_source(table, tmp_path).groups == [name for name in "PQPR" for _ in range(6)]


def test_volumes_without_persons_are_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"data\.volume requires.*\{volume: true\}"):
        settings(tmp_path, groups=None)


def test_volumes_are_not_read_unless_the_settings_say_so(tmp_path):
    root = write_classes(tmp_path / "in")
    with pytest.raises(DataError, match=r"each of 4 files.* is NIfTI.*data\.volume"):
        read_all(Data(dataset_id="scans", source="imagefolder", path=str(root)), tmp_path)


def test_a_survey_proposes_axial_slices(tmp_path):
    seen = survey(write_classes(tmp_path / "in"), classes=ALL)
    assert seen.data["volume"] == {"axis": "axial", "from": 0, "step": 1} and seen.volumes
    assert (seen.images, seen.facts.side, seen.groups) == (24, 12, None)


def test_volumes_of_one_person_are_asked_about(tmp_path):
    root = tmp_path / "in"
    for person in range(12):
        for visit in (1, 2):
            write_nifti(
                root / ("zero", "one")[person % 2] / f"P{person:03}_v{visit}.nii.gz",
                phantom(person),
            )
    assert survey(root, classes=ALL).repeats.persons == 12
    masks = survey(write_masks(tmp_path / "masks"), classes=ALL)
    assert masks.companions.count == 4


def write_masks(root):
    write_classes(root)
    for file in [*root.glob("*/*")]:
        write_nifti(file.with_name(file.name.replace(".nii", "_mask.nii")), PICTURES)
    return root


# ---- what is refused


def header(shape=(4, 4, 4), datatype=2, bits=8, offset=352.0, magic=b"n+1\0") -> bytearray:
    block = bytearray(348)
    struct.pack_into("<i", block, 0, 348)
    struct.pack_into(f"<{1 + len(shape)}h", block, 40, len(shape), *shape)
    struct.pack_into("<2h", block, 70, datatype, bits)
    struct.pack_into("<8f", block, 76, *[1.0] * 8)
    struct.pack_into("<f", block, 108, offset)
    block[344:348] = magic
    return block


def nifti2(shape) -> bytes:
    block = bytearray(nibabel.Nifti2Header().binaryblock)
    struct.pack_into("<8q", block, 16, 3, *shape, 1, 1, 1, 1)
    return bytes(block)


REFUSED = {
    "of 10⁵ × 10⁵ × 10⁵": (nifti2([10**5] * 3), "100000×100000×100000 values"),
    "of 32 767³": (header([32767] * 3) + bytes(9000), "32767×32767×32767 values"),
    "of overflowing sides": (nifti2([2**62, 4, 4]), "expected sides of 1 to 65,535"),
    "of negative sides": (header((-4, 4, 4)) + bytes(100), "expected sides of 1"),
    "without values": (header((0, 4, 4)) + bytes(100), "expected sides of 1"),
    "cut short": (header((40, 40, 40)) + bytes(900), "its header states 64,000"),
    "with a header cut short": (header()[:200], "cannot be read as NIfTI"),
    "of text": (b"no volume at all" * 40, "cannot be read as NIfTI"),
    "empty": (b"", "cannot be read as NIfTI"),
    "in time": (header((4, 4, 4, 200)) + bytes(99999), r"contains 200 volumes \(4-D\)"),
    "in colour": (header(datatype=128, bits=24) + bytes(999), "RGB.*save it in grey"),
    "of complex numbers": (header(datatype=32, bits=64) + bytes(999), "save it in grey"),
    "of one value": (header() + bytes(999), "the same value everywhere"),
    "of a pair": (header(magic=b"ni1\0", offset=0) + bytes(999), "of a pair of files, .hdr"),
    "with values far away": (header(offset=3e9) + bytes(999), "bytes before its values"),
    "of an unknown kind": (header(datatype=999) + bytes(999), "cannot be read as NIfTI"),
    "damaged gzip": (
        gzip.compress(header((40, 40, 40)) + np.random.default_rng(0).bytes(64004))[:-900],
        "as NIfTI",
    ),
}


@pytest.fixture
def little_memory(tmp_path):
    """Fail the test if it takes 16 MB of memory, not counting imports."""
    read_all(settings(write_classes(tmp_path / "warm")), tmp_path)
    tracemalloc.start()
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24


@pytest.mark.parametrize("name", REFUSED)
def test_a_volume_is_refused_in_little_memory(name, tmp_path, little_memory):
    content, why = REFUSED[name]
    root = write_classes(tmp_path / "in")
    (root / "one/x.nii.gz").write_bytes(
        bytes(content) if name == "damaged gzip" else gzip.compress(bytes(content))
    )
    (root / "one/y.nii").write_bytes(bytes(content))
    with pytest.raises(DataError, match=why) as error:
        read_all(settings(root, range=None), tmp_path)
    assert len(str(error.value).splitlines()) <= 3, "one line per file"
    assert "x.nii.gz" in str(error.value) and "y.nii" in str(error.value)


def test_gzip_is_read_only_as_far_as_its_header_states(tmp_path, little_memory):
    """One file has 256 MB of zeros behind its values. Another has an extension before its values,
    with a stated size of 2 GB. Reading takes little memory for both.
    """
    root = write_classes(tmp_path / "in")
    values = phantom(1).tobytes()
    with gzip.open(root / "one/long.nii.gz", "wb", 1) as file:
        file.write(bytes(header((12, 16, 6))) + bytes(4) + values)
        for _ in range(256):
            file.write(bytes(2**20))
    with gzip.open(root / "one/extended.nii.gz", "wb") as file:
        file.write(
            bytes(header((12, 16, 6))) + b"\1\0\0\0" + struct.pack("<2i", 2**31 - 16, 4) + values
        )
    _, images, _ = read_all(settings(root), tmp_path)
    without_matrix = phantom(1)[:, ::-1, ::-1]  # its first axis runs to the left
    assert np.array_equal(np.stack(images[6:12])[..., 0], without_matrix) and len(images) == 36


def test_a_damaged_volume_counts_as_broken_and_may_be_skipped(tmp_path):
    root = write_classes(tmp_path / "in", people=8)
    file = root / "one/scanb.nii.gz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(
        DataError, match=r"scanb\.nii\.gz cannot be read as NIfTI.*repair or remove"
    ):
        read_all(settings(root), tmp_path)
    source, images, _ = read_all(settings(root, skip="20%"), tmp_path)
    assert len(images) == 42 and {*source.left_out} == {*range(6)}


def test_a_missing_package_is_named(tmp_path, uninstall):
    root = write_classes(tmp_path / "in")
    uninstall("nibabel")
    with pytest.raises(ConfigError, match=r"sfumato\[volumes\]"):
        survey(root, classes=ALL)


# ---- BIDS, and the same slices as pictures


def take(data, home, key=bytes(range(32))):
    """Prepare a set. Returns its card, and the bytes of every stored array by path."""
    (home / "keys").mkdir(parents=True, mode=0o700)
    (home / "keys/scans").write_bytes(key)
    prepare_sensitive(data, home, home / "card.json", home / "raw")
    card = read_card(home / "card.json")
    return card, {
        file.relative_to(home).as_posix(): file.read_bytes() for file in sorted(home.rglob("*.npy"))
    }


def bids(root, **more):
    column = {
        "label_column": "group",
        "classes": ("one", "zero"),
        "groups": Groups(column="participant_id"),
    }
    return settings(root, **{**column, **more})


@pytest.mark.parametrize("span", [(0, 255), (0, 1000)])
def test_bids_and_the_same_pictures_give_the_same_set(span, tmp_path):
    root = write_bids(tmp_path / "bids", kind=np.int16, slope=4, inter=0)
    table = {}
    for person, file in anatomy_of(root):
        number = int(person[-2:])
        pictures = phantom(number + PEOPLE * ("ses-2" in file.name))
        levels = np.rint(255 * (4.0 * pictures / span[1]).clip(0, 1)).astype(np.uint8)
        table[file.name.split(".")[0]] = (("zero", "one")[number % 2], person, levels)
    pictures = write_pictures(tmp_path / "pictures", table)
    plain = bids(
        pictures, volume=None, range=None, label_column="label", groups=Groups(column="patient")
    )
    card, stored = take(bids(root, range=span), tmp_path / "of volumes")
    other, same = take(plain, tmp_path / "of pictures")
    assert stored == same and len(stored) == 6
    assert (
        (card.unit, card.classes, card.shape)
        == (other.unit, other.classes, other.shape)
        == ("group", ("one", "zero"), (1, 16, 12))
    )


def test_a_volume_without_an_id_is_one_person(tmp_path):
    rows = ["file_name,label,patient"]
    for number in range(12):
        write_nifti(tmp_path / "in" / f"v{number}.nii.gz", phantom(number))
        rows.append(f"v{number}.nii.gz,{'ab'[number % 2]},{('', f'P{number // 4}x')[number < 8]}")
    (tmp_path / "in/metadata.csv").write_text("\n".join(rows))
    assert survey(tmp_path / "in", alone=True).persons == 2 + 4


@pytest.mark.parametrize("name", ["SUB-01", "sub-00/Ses-1", "sub-01/Anat"])
def test_folders_of_bids_in_capitals_are_refused(name, tmp_path):
    root = write_bids(tmp_path / "in", people=6)
    place = root / name
    (place.parent / place.name.lower()).rename(place)
    with pytest.raises(DataError, match="in the names of all such folders") as error:
        read_source(bids(root), tmp_path)
    assert "0" not in str(error.value), "ids are private"


def test_all_sessions_of_a_subject_are_one_person(tmp_path):
    root = write_bids(tmp_path / "in", people=6)
    groups = read_source(bids(root), tmp_path).groups
    assert {name: groups.count(name) for name in groups} == {
        f"sub-{i:02}": 6 * (1 + (i % 3 == 0)) for i in range(6)
    }


@pytest.mark.parametrize("head", ["group", "diagnosis", "DX", "dx_group", "Disease Status"])
def test_the_only_column_named_like_a_label_is_taken(head, tmp_path):
    root = write_bids(tmp_path / "in", head=head)
    seen = survey(root)
    assert (seen.data["label_column"], seen.classes, seen.groups, seen.persons) == (
        head,
        ("one", "zero"),
        Groups(column="participant_id"),
        PEOPLE,
    )


def test_another_column_is_asked_about(tmp_path):
    root = write_bids(tmp_path / "in", head="handed")  # another possible label, beside sex
    with pytest.raises(
        Unclear, match="age, sex, handed: set label_column to the column that contains the labels"
    ):
        survey(root)
    assert survey(root, label_column="handed").classes == ("one", "zero")
    table = root / "participants.tsv"
    table.write_text(
        "\n".join("\t".join(line.split("\t")[:3]) for line in table.read_text().splitlines())
    )
    assert survey(root).data["label_column"] == "sex"


def test_volumes_of_two_kinds_are_asked_about(tmp_path):
    root = write_bids(tmp_path / "in", suffixes=("T1w", "T2w"), people=6)
    write_nifti(root / "sub-01/anat/sub-01_desc-x_mask.nii.gz", PICTURES)
    write_nifti(root / "sub-01/func/sub-01_bold.nii.gz", PICTURES)
    with pytest.raises(ConfigError, match=r"\(T1w, T2w\).*data\.volume\.suffix") as error:
        survey(root, label_column="group")
    assert error.value.undecided and error.value.option == "volume"
    assert (
        survey(root, label_column="group", volume=Volume(axis="axial", suffix="T2w")).images
        == 6 * 8
    )


WRONG = {
    "a subject without a row": ("sub-03", "sub-93", "no row for 1 of the sub-"),
    "a subject with two rows": ("sub-03", "sub-04", "names a participant a second time"),
    "no label": ("23\tM\tone", "23\tM\tn/a", "no label"),
    "another table": (
        "participant_id",
        "who",
        "no participants.tsv with the column participant_id",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_participants_that_do_not_fit_are_refused(name, tmp_path):
    old, new, why = WRONG[name]
    root = write_bids(tmp_path / "in", people=6)
    table = root / "participants.tsv"
    assert old in table.read_text()
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises((DataError, ConfigError), match=why) as error:
        read_source(bids(root), tmp_path)
    assert "sub-0" not in str(error.value), "ids are private"


def test_no_setting_makes_another_unit_or_class_of_subjects(tmp_path):
    root = write_bids(tmp_path / "in", people=6)
    wrong = [
        {"label_column": None},
        {"groups": Groups(volume=True)},
        {"groups": Groups(column="sex")},
        {"volume": None},
    ]
    for change in wrong:
        with pytest.raises(
            ConfigError, match=r"so each subject is a person: set data\.label_column"
        ):
            read_source(bids(root).model_copy(update=change), tmp_path)
    with pytest.raises(ConfigError, match="so each subject is a person"):
        survey(root, groups=Groups(pattern="(ses-.)"))
    (root / "participants.tsv").unlink()
    with pytest.raises(ConfigError, match=r"no participants\.tsv with the column participant_id"):
        survey(root)


def test_the_hold_out_is_compared_by_a_column_of_participants(tmp_path):
    source = read_source(bids(write_bids(tmp_path / "in", people=6), compare_by="sex"), tmp_path)
    assert source.compared == [
        s for p, s in enumerate("FFMMFF") for _ in range(6 * (1 + (p % 3 == 0)))
    ]


def test_subjects_that_share_a_patient_id_are_asked_about(tmp_path):
    root = write_bids(tmp_path / "in", people=12)
    table = root / "participants.tsv"
    heads, *rows = table.read_text().splitlines()
    with_ids = [f"{row}\tM{number // 2 + 100}" for number, row in enumerate(rows)]
    table.write_text("\n".join([f"{heads}\tpatient_id", *with_ids]))
    with pytest.raises(Unclear, match="patient_id belongs to several subjects"):
        survey(root, label_column="group")
    chosen = survey(root, label_column="group", groups="participant_id")
    assert chosen.persons == 12
