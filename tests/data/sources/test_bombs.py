"""Files that expand to far more than their own size. They are refused before they fill memory or
disk.
"""

import shutil
from types import SimpleNamespace

import bombs
import numpy as np
import pytest
from bombs import BOMBS, MEGABYTE, dicom, picture, zipped
from PIL import Image
from writers import read_all

from sfumato.data import codestreams
from sfumato.data.decoding import decode
from sfumato.data.sources import read_source
from sfumato.errors import DataError
from sfumato.settings.data import Data
from sfumato.storage import limits

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

REFUSED = {
    "PNG that claims 2³¹ × 2³¹": "x.png is too large",
    "PNG with a row of 10⁷ pixels": "1×10000000 pixels",
    "PNG in 16 bits": "288,000,000 bytes when decoded",
    "PNG in colour and 16 bits": "294,000,000 bytes when decoded",
    "PNG with a palette": "324,000,000 bytes when decoded",
    "TIFF of floating point": "324,000,000 bytes when decoded",
    "TIFF of 64-bit colours": "384,000,000 bytes when decoded",
    "TIFF of 5,000 pages": "several frames",
    "PNG of a terabyte": "1,099,511,627,776 bytes, expected at most",
    "DICOM of a terabyte": "1,099,511,627,776 bytes, expected at most",
    "DICOM, deflated, of 20,000 × 20,000": "inflates to more than",
    "DICOM that claims 65,535 × 65,535": "8,589,672,450 bytes when decoded",
    "DICOM of 10⁹ frames": "contains 1000000000 frames",
    "DICOM with a JPEG larger than stated": "65500×65500 pixels",
    "DICOM with a JPEG 2000 larger than stated": "60000×60000 pixels",
    "DICOM with a JPEG-LS larger than stated": "65500×65500 pixels",
    "a zip of a file listed many times": "expands to more than 268,435,456 bytes",
    "zips 20 deep": "is nested in 3 archives",
    "folders 400 deep in a zip": "folders are more than 50 levels deep",
    "npz with a side of 10⁵": "8×100000 pixels",
    "idx that claims 4 GB": "expected at most 536,870,912 values",
    "parquet of 10 8 rows": "expands to more than",
    "a tar whose picture is a terabyte": "b.png in .* has 1,099,511,627,776 bytes",
    "a tar whose comment claims 8 GB": "plain tar file",
    "a tar of long-name headers only": "plain tar file",
    "a CSV with a long line": "a row of more than 1,048,576 characters",
    "a CSV with a quoted cell over many lines": "a row of more than 1,048,576 characters",
    "a CSV with wide rows": "more than 10,000,000 cells",
    "JSON lines of many lists": "more than 10,000,000 cells",
    "weights of a million tensors": "its header claims 57,888,891 bytes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bomb_is_refused_by_its_header(tmp_path, here, name):
    (tmp_path / "set").mkdir()
    reader = BOMBS[name](tmp_path / "set")
    with pytest.raises(DataError, match=REFUSED[name]):
        reader()


def test_an_archive_and_those_in_it_share_one_allowance(tmp_path, here, monkeypatch):
    monkeypatch.setattr(limits, "LARGEST_PICTURE", 16 * MEGABYTE)
    inner = zipped(
        tmp_path / "inner.zip", {"a/0.png": 4 * MEGABYTE, "b/0.png": picture()}
    ).read_bytes()
    for name, bytes_within in (("small.zip", 4), ("large.zip", 14)):
        files = {"inner.zip": inner, "__MACOSX/x": bytes_within * MEGABYTE}
        path = zipped(tmp_path / name, files)
        wanted = "expands to more than" if name == "large.zip" else "cannot be read as an image"
        with pytest.raises(DataError, match=wanted):
            bombs.read(path)
    # Both pictures of the small archive stay until the program ends. The large archive leaves none
    assert sum(file.is_file() for file in (here / "state").rglob("0.png")) == 2


def test_an_archive_too_large_for_the_disk_is_refused(tmp_path, here, monkeypatch):
    path = zipped(tmp_path / "set.zip", {"a/0.png": 64 * MEGABYTE, "b/0.png": picture()})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300 * MEGABYTE))
    with pytest.raises(DataError, match="expands to more than 46,137,344 bytes.*the free space in"):
        bombs.read(path)
    assert not [file for file in (here / "state").rglob("*") if file.is_file()]


def test_an_archive_that_fails_midway_leaves_nothing(tmp_path, here):
    path = zipped(tmp_path / "set.zip", {"a/0.png": picture(), "b/0.png": b"0123456789"})
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"0123456780"))
    content = bytearray(path.read_bytes())
    content[content.index(b"b/0.png") + 8] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        bombs.read(path)
    assert not [file for file in (here / "state").rglob("*") if file.is_file()]


def test_parquet_is_read_row_by_row(tmp_path, here):
    """5,000 rows repeat one value of 8 MB. Unpacking stops at the limit, and what was written is
    removed.
    """
    path = bombs.parquet(tmp_path / "set.parquet", 5000, bytes(8 * MEGABYTE))
    with pytest.raises(DataError, match="expands to more than"):
        bombs.read(path, label_column="label", classes=("0", "1"))
    assert not [file for file in (here / "state").rglob("*") if file.is_file()]


def test_many_pictures_in_one_row_group_are_read(tmp_path, here):
    rows = [
        {"image": {"bytes": picture(), "path": f"{i}.png"}, "label": i % 2} for i in range(1000)
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "set.parquet", row_group_size=20_000
    )
    assert parquet.read_metadata(tmp_path / "set.parquet").num_row_groups == 1
    path = str(tmp_path / "set.parquet")
    source = read_source(
        Data(source="imagefolder", path=path, label_column="label", classes=("0", "1")), tmp_path
    )
    assert source.size == 1000


def test_pictures_of_cameras_and_mammograms_are_read(tmp_path):
    photograph = (
        np.random.default_rng(0)
        .integers(0, 256, (300, 400, 3), dtype=np.uint8)
        .repeat(10, 0)
        .repeat(10, 1)
    )
    Image.fromarray(photograph).save(tmp_path / "photograph.jpg")  # 12 megapixels
    assert decode(tmp_path / "photograph.jpg").shape == (3000, 4000, 3)
    mammogram = np.arange(5000 * 4000, dtype=np.uint32).reshape(5000, 4000).astype(np.uint16)
    Image.fromarray(mammogram).save(tmp_path / "mammogram.png")
    shown = decode(tmp_path / "mammogram.png", span=(0, 65535))
    assert (shown[..., 0] == np.rint(mammogram / 257)).all()  # converted strip by strip
    (tmp_path / "mammogram.dcm").write_bytes(
        dicom(bombs.PLAIN, mammogram.tobytes(), 5000, 4000, 16)
    )
    assert (decode(tmp_path / "mammogram.dcm", span=(0, 65535)) == shown).all()


def test_deflated_dicom_is_inflated_up_to_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(codestreams, "LARGEST_PICTURE", MEGABYTE)
    (tmp_path / "x.dcm").write_bytes(dicom(bombs.DEFLATED, (4 * MEGABYTE).to_bytes(8, "big")))
    with pytest.raises(DataError, match="inflates to more than 1,048,576 bytes"):
        decode(tmp_path / "x.dcm", span=(0, 10))


def test_deflated_dicom_of_usual_size_is_read(tmp_path):
    for frame in (512, 64):
        content = dicom(bombs.DEFLATED, (2 * frame**2).to_bytes(8, "big"), frame, frame, 16)
        (tmp_path / "x.dcm").write_bytes(content)
        assert decode(tmp_path / "x.dcm", span=(0, 10)).shape == (frame, frame, 1)


def test_a_zip_within_a_zip_is_read(tmp_path, here):
    inner = zipped(
        tmp_path / "inner.zip", {"a/0.png": picture(), "b/0.png": picture()}
    ).read_bytes()
    path = zipped(tmp_path / "outer.zip", {"inner.zip": inner})
    _, images, labels = read_all(
        Data(source="imagefolder", path=str(path), dataset_id="own"), tmp_path
    )
    assert len(images) == 2 and labels == [0, 1]
