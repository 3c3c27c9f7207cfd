"""A disk or mount that fails for a while, or a limit of open files, never makes a picture, table or
person disappear.
"""

import errno
import itertools
import json
import os
import resource
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from failing_reads import ERRNOS, failing_opens, failing_reads
from opened_files import opened_files
from surveys import layout_of
from test_deep_pictures import RAMP, dicom
from test_skip import BROKEN, data, folder

from sfumato.data.decoding import decode, decoded
from sfumato.data.deep import readable
from sfumato.data.prepare import prepare_public, prepare_sensitive, statuses
from sfumato.data.sources import read_source
from sfumato.data.sources.source import Request
from sfumato.data.store import load_prepared, read_card
from sfumato.errors import DataError, explained
from sfumato.settings.data import Data, Groups, Public
from sfumato.settings.options import ALL
from sfumato.storage.documents import read_json


@dataclass(frozen=True)
class Case:
    """A sensitive source of 40 pictures, in which one path cannot be opened for a while.

    images: number of intact pictures.
    """

    settings: Data
    fails: str  # part of the path that cannot be opened
    after: int = 0  # number of times that the path can be opened before this fails
    images: int = 37


def class_folders(root: Path) -> Case:
    return Case(data(folder(root / "in"), skip="10%"), "cat/03_P3.png", after=1)


def one_folder(root: Path) -> Case:
    return Case(data(folder(root / "in"), skip="10%"), f"{root}/in/cat")


def with_table(root: Path) -> Case:
    place = folder(root / "in")
    rows = [
        f"{file.parent.name}/{file.name},{file.parent.name}"
        for file in sorted(place.glob("*/*.png"))
    ]
    (place / "labels_of_all.csv").write_text("\n".join(["file_name,label", *rows]))
    return Case(
        data(place, skip="10%", label_column="label", classes=("cat", "dog")),
        "dog/04_P0.png",
        after=1,
    )


def the_table(root: Path) -> Case:
    return Case(with_table(root).settings, "labels_of_all.csv")


def strays(root: Path) -> Case:
    """Choose a file that cannot be opened, and that does not have the name of a picture."""
    place = folder(root / "in")
    (place / "cat/notes").write_text("no picture")
    return Case(data(place, skip="20%", groups=Groups(pattern=r"_(P\d)")), "cat/notes")


def tar(root: Path) -> Case:
    place = folder(root / "in")
    with tarfile.open(root / "set.tar", "w") as archive:
        for number, file in enumerate(sorted(place.glob("*/*.png"))):
            (root / "label").write_text(file.parent.name)
            archive.add(file, f"{number:02}.png")
            archive.add(root / "label", f"{number:02}.cls")
    settings = Data(
        dataset_id="pets",
        source="webdataset",
        path=str(root / "set.tar"),
        classes=("cat", "dog"),
        skip="10%",
    )
    return Case(settings, "set.tar", after=20)


def the_tar(root: Path) -> Case:
    return Case(tar(root).settings, "set.tar")


def zipped(root: Path) -> Case:
    place = folder(root / "in")
    with zipfile.ZipFile(root / "set.zip", "w") as archive:
        for file in sorted(place.glob("*/*.png")):
            archive.write(file, file.relative_to(root))
    return Case(data(root / "set.zip", skip="10%"), "set.zip")


def out_of_a_zip(root: Path) -> Case:
    """Choose a picture that cannot be opened after it was unpacked into the state directory."""
    return Case(zipped(root).settings, "in/cat/03_P3.png", after=2)


def parquet(root: Path) -> Case:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    files = sorted(folder(root / "in").glob("*/*.png"))
    cells = [{"bytes": file.read_bytes(), "path": None} for file in files]
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns = {"image": pyarrow.array(cells, image), "label": [file.parent.name for file in files]}
    write_table(pyarrow.table(columns), root / "set.parquet")
    return Case(
        data(root / "set.parquet", skip="10%", label_column="label", classes=("cat", "dog")),
        "set.parquet",
    )


def npz(root: Path) -> Case:
    labels = np.arange(40) % 2
    images = np.arange(40 * 9, dtype=np.uint8).reshape(40, 3, 3)
    np.savez(root / "set.npz", images=images, labels=labels, classes=np.array(["a", "b"]))
    return Case(
        Data(dataset_id="pets", source="npz", path=str(root / "set.npz")), "set.npz", images=40
    )


def dicoms(root: Path) -> Case:
    for i in range(40):
        dicom(
            root / "in" / ("ill" if i % 2 else "well") / f"IM{i:04d}",
            RAMP // (1 + i),
            f"patient {i // 2}",
        )
    settings = data(root / "in", skip="10%", range=(0, 4095), groups=Groups(dicom=True))
    return Case(settings, "ill/IM0005", after=2, images=40)


def idx(root: Path) -> Case:
    for split, name, shape in itertools.product(
        ("train", "t10k"), ("images-idx3", "labels-idx1"), [(20, 28, 28)]
    ):
        array = (
            np.arange(20 * 28 * 28, dtype=np.uint8).reshape(shape)
            if "images" in name
            else np.arange(20) % 10
        )
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        (root / f"{split}-{name}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return Case(Data(dataset_id="pets", source="mnist", path=str(root)), "train-labels", images=40)


CASES = [
    class_folders,
    one_folder,
    with_table,
    the_table,
    strays,
    tar,
    the_tar,
    zipped,
    out_of_a_zip,
]
CASES += [parquet, npz, dicoms, idx]


def prepare(settings: Data, root: Path) -> int:
    """Prepare the set. Returns the number of its images."""
    state = Path(os.environ["SFUMATO_STATE"])
    prepare_sensitive(settings, state, root / "card.json", root)
    card = read_card(root / "card.json")
    return sum(len(load_prepared(state, card, part)) for part in ("sensitive", "holdout"))


def check_nothing_is_kept(root: Path) -> None:
    assert not (root / "card.json").exists()
    assert not [*Path(os.environ["SFUMATO_STATE"], "data").glob("pets/*")]


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("make", CASES)
def test_what_cannot_be_opened_for_a_while_is_not_left_out(tmp_path, settled, make, code):
    case = make(tmp_path)
    with failing_opens(case.fails, code, case.after) as refusal, pytest.raises(OSError) as error:
        prepare(case.settings, tmp_path)
    assert refusal.count > case.after
    assert error.value.errno == code and case.fails in str(error.value.filename)
    check_nothing_is_kept(tmp_path)
    assert prepare(case.settings, tmp_path) == case.images


@pytest.mark.parametrize(
    "make", [make for make in CASES if make not in (one_folder, tar, out_of_a_zip, parquet)]
)
@pytest.mark.parametrize("kind", [OSError, MemoryError])
def test_what_opens_and_cannot_be_read_is_not_left_out(tmp_path, settled, make, kind):
    case = make(tmp_path)
    with failing_reads(case.fails, kind), pytest.raises(kind) as error:
        prepare(case.settings, tmp_path)
    if kind is OSError:
        assert error.value.errno == errno.EIO and case.fails in str(error.value.filename)
    check_nothing_is_kept(tmp_path)
    assert prepare(case.settings, tmp_path) == case.images


def test_the_limit_of_open_files_never_makes_a_set_smaller(tmp_path, settled):
    """Try 64 limits, which the operating system enforces. Under each limit, either all pictures are
    prepared, or the error is EMFILE.
    """
    settings = class_folders(tmp_path).settings
    assert prepare(settings, tmp_path) == 37
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # all lower numbers are in use
    os.close(lowest)
    outcomes = []
    for spare in range(64):
        os.environ["SFUMATO_STATE"] = str(tmp_path / f"state{spare}")
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
            outcomes.append(prepare(settings, tmp_path))
        except OSError as error:
            outcomes.append(error.errno)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {*outcomes} == {errno.EMFILE, 37}
    assert outcomes == sorted(outcomes)


def test_a_file_that_vanished_is_not_left_out(tmp_path):
    files = sorted(folder(tmp_path, broken=()).glob("*/*.png"))
    files[3].unlink()
    with pytest.raises(FileNotFoundError):
        list(
            decoded(
                files, Request(section="data", name="imagefolder", path=str(tmp_path), skip=0.5)
            )
        )


def test_a_shard_cut_while_it_is_read_loses_no_picture(tmp_path):
    case = tar(tmp_path)
    whole = (tmp_path / "set.tar").read_bytes()
    source = read_source(case.settings, tmp_path)
    (tmp_path / "set.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match="became shorter"):
        list(source.train)


def test_no_memory_for_a_picture_names_it_and_is_no_damage(tmp_path, monkeypatch):
    file = next(folder(tmp_path, broken=()).glob("*/*.png"))
    # The second error is the one that Pillow raises if it gets no memory
    for lacking in (MemoryError(), OSError("out of memory error when reading image file")):
        monkeypatch.setattr(
            "PIL.PngImagePlugin.PngImageFile.load",
            lambda *_, lacking=lacking: (_ for _ in ()).throw(lacking),
        )
        with pytest.raises(MemoryError, match=file.name):
            decode(file)


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "name", ["labels.csv", "metadata.csv", "metadata.jsonl", "metadata.parquet", "findings.csv"]
)
def test_a_table_that_cannot_be_opened_is_not_taken_for_none(tmp_path, name, code):
    folder(tmp_path, broken=())
    (tmp_path / name).write_bytes(b"file_name,patient,dx\n")
    with failing_opens(name, code), pytest.raises(OSError) as error:
        layout_of(tmp_path, None, classes=ALL)
    assert error.value.errno == code


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_persons_do_not_vanish_with_a_read_that_fails(tmp_path, code):
    place = dicoms(tmp_path).settings.path
    with failing_opens("ill/IM", code), pytest.raises(OSError):
        layout_of(Path(place), None, classes=ALL)
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for name, content in (("1.png", b"-"), ("1.json", b'{"label": "cat", "patient_id": "7"}')):
            (tmp_path / "one").write_bytes(content)
            archive.add(tmp_path / "one", name)
    assert layout_of(tmp_path / "set.tar", None)[1] == Groups(column="patient_id")
    for after in (0, 1):
        with failing_opens("set.tar", errno.EIO, after), pytest.raises(OSError):
            layout_of(tmp_path / "set.tar", None)


def test_a_table_that_may_not_be_read_is_not_taken_for_none(tmp_path):
    case = with_table(tmp_path)
    with failing_opens("labels_of_all.csv", errno.EACCES), pytest.raises(PermissionError):
        layout_of(Path(case.settings.path), None, classes=ALL)


def test_what_was_left_out_is_tried_again_and_nothing_else(tmp_path, settled):
    settings = class_folders(tmp_path).settings
    home = Path(os.environ["SFUMATO_STATE"], "data/pets")
    assert prepare(settings, tmp_path) == 37
    with opened_files() as opened:
        assert prepare(settings, tmp_path) == 37
    assert {name for name in opened if name.endswith(".png")} == {
        str(tmp_path / "in" / name) for name in BROKEN
    }
    places = read_json(home / "left_out.json")
    (home / "left_out.json").write_text(json.dumps([*places, [str(tmp_path / "in/cat/01_P1.png")]]))
    with opened_files() as opened:
        assert prepare(settings, tmp_path) == 37
    assert str(tmp_path / "in/dog/01_P1.png") in opened, (
        "one of them is whole, so all are read again"
    )
    assert read_json(home / "left_out.json") == places


@pytest.mark.parametrize("make", [class_folders, tar, zipped, parquet])
def test_a_set_left_smaller_by_an_older_version_is_read_again(tmp_path, settled, make):
    case = make(tmp_path)
    home = Path(os.environ["SFUMATO_STATE"], "data/pets")
    for _ in range(2):
        assert prepare(case.settings, tmp_path) == 37
    (home / "left_out.json").unlink()
    version = read_card(home / "card.json").version
    with opened_files() as opened:
        assert prepare(case.settings, tmp_path) == 37
    assert any("cat" in name or "set." in name for name in opened)
    assert (
        len(read_json(home / "left_out.json")) == 3
        and read_card(home / "card.json").version == version
    )


def test_left_out_pictures_of_a_tar_file_are_found_in_it_again(tmp_path, settled):
    settings = tar(tmp_path).settings
    home = Path(os.environ["SFUMATO_STATE"], "data/pets")
    assert prepare(settings, tmp_path) == 37
    before = (home / "sensitive/images.npy").stat().st_ino
    assert prepare(settings, tmp_path) == 37
    assert (home / "sensitive/images.npy").stat().st_ino == before
    with failing_opens("set.tar", errno.ESTALE), pytest.raises(OSError):
        prepare(settings, tmp_path)
    assert (home / "sensitive/images.npy").stat().st_ino == before


def test_images_keep_their_version_when_the_card_cannot_be_read(tmp_path):
    settings = class_folders(tmp_path).settings
    prepare(settings, tmp_path)
    before = (tmp_path / "card.json").read_bytes()
    with failing_opens("data/pets/card.json"), pytest.raises(OSError):
        prepare(settings, tmp_path)
    assert (tmp_path / "card.json").read_bytes() == before
    prepare(settings, tmp_path)
    assert (tmp_path / "card.json").read_bytes() == before


def test_a_folder_that_cannot_be_listed_does_not_make_a_listing(tmp_path, settled):
    """`os.walk` would skip such a folder without an error, so its pictures would be missing."""
    folder(tmp_path / "in")
    with failing_opens(f"{tmp_path}/in/dog"), pytest.raises(OSError):
        [*statuses(tmp_path / "in")]
    with failing_opens(f"{tmp_path}/in/dog", errno.EACCES):
        assert len([*statuses(tmp_path / "in")]) == 23, "a folder such as lost+found is passed over"


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
def test_public_images_are_not_fewer_either(tmp_path, code):
    public = Public(
        source="imagefolder", path=str(folder(tmp_path / "in", broken=())), declared_public=True
    )
    for fails, after in (("cat/03_P3.png", 1), ("in/dog", 0)):
        with failing_opens(fails, code, after), pytest.raises(OSError) as error:
            prepare_public(public, (1, 6, 6), tmp_path / "public", tmp_path, 0)
        assert error.value.errno == code and not (tmp_path / "public").exists()


def test_pictures_repaired_meanwhile_are_reported(tmp_path, monkeypatch):
    """If all pictures can be read again when the error message is written, the message must not
    report that 0 files cannot be used.
    """
    folder(tmp_path)
    settings = data(tmp_path)
    source = read_source(settings, tmp_path)
    monkeypatch.setattr("sfumato.data.sources.imagefolder.problems_of", lambda *_: [])
    with pytest.raises(DataError, match="changed while they were read"):
        list(source.train)


@pytest.mark.parametrize(
    "error", [EOFError, ValueError, RuntimeError, StopIteration, AssertionError]
)
def test_a_reason_is_never_empty(error):
    """Python's own EOFError, which a cut zip raises, and Pillow's AssertionError have no text."""
    for block in (
        readable("x"),
        explained(DataError, lambda error: f"x ({error})", causes=(Exception,)),
    ):
        with pytest.raises(DataError) as raised, block:
            raise error
        words = "it ends too early" if error is EOFError else error.__name__
        assert f"({words})" in str(raised.value)


def test_a_zip_that_is_cut_within_a_picture_is_refused_in_words(tmp_path):
    file = Path(zipped(tmp_path).settings.path)
    content = bytearray(file.read_bytes())
    # Overwrite both sizes in the last picture's entry of the archive's list of files
    last = content.rindex(b"PK\x01\x02")
    content[last + 20 : last + 28] = 2 * len(content).to_bytes(4, "little")
    file.write_bytes(content)
    # Newer versions of Python notice at once that entries overlap
    with pytest.raises(DataError, match=r"set\.zip cannot be read \((it ends too|Overlapped)"):
        layout_of(file, None, classes=ALL)
