"""Intact files in unsupported formats: reported once, with advice, and never skipped as broken."""

import gzip
import io
import tarfile

import numpy as np
import pytest
from PIL import Image
from surveys import survey
from writers import read_all, write_folder

from sfumato.data.sources import read_source
from sfumato.errors import DataError
from sfumato.settings.data import Data
from sfumato.settings.options import ALL


def heic() -> bytes:
    brands = b"heic\0\0\0\0mif1heic"
    return (8 + len(brands)).to_bytes(4, "big") + b"ftyp" + brands + bytes(40)


def nifti() -> bytes:
    return (348).to_bytes(4, "little").ljust(344, b"\0") + b"n+1\0" + bytes(100)


def npy(save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, np.zeros((4, 4)))
    return file.getvalue()


def tar_gz() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("cat/0.png"))
    return file.getvalue()


WHOLE = {  # file name: content, name of the format in the message, and advice
    "x.jpg": (heic(), "HEIC", "heif-convert"),
    "x.heic": (heic(), "HEIC", "convert it to PNG or JPEG"),
    "x.mp4": (b"\0\0\0\x18ftypisom\0\0\2\0isomiso2" + bytes(40), "a video", "choose frames"),
    "x.gz": (gzip.compress(nifti()), "NIfTI", "its name ends in .nii"),
    "x.hdr": (nifti(), "NIfTI", "its name ends in .nii"),
    "x.nrrd": (b"NRRD0004\ntype: short\n", "NRRD", "save its slices"),
    "x.mha": (b"ObjectType = Image\nNDims = 3\n", "MetaImage", "save its slices"),
    "x.npy": (npy(), "a NumPy array", "np.savez"),
    "x.npz": (npy(np.savez), "an .npz", "give the path of a single .npz instead"),
    "x.h5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5", "np.savez"),
    "x.pdf": (b"%PDF-1.7\n", "PDF", "pdfimages"),
    "x.png": (b"%!PS-Adobe-3.0\n", "PostScript", "convert"),
    "y.png": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "a pointer of Git LFS",
        "git lfs pull",
    ),
    "z.png": (b"/annex/objects/SHA256E-s1--0.png\n", "a pointer of git-annex", "datalad get"),
    "x.png.dvc": (b"outs:\n- md5: 0\n  path: x.png\n", "a pointer of DVC", "dvc pull"),
    "x.tar.gz": (tar_gz(), "a compressed tar file", "unpack it"),
    "x.jxl": (b"\xff\x0a" + bytes(40), "JPEG XL", "djxl"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_named_once_with_the_way_to_proceed(name, tmp_path):
    content, form, way = WHOLE[name]
    root = write_folder(tmp_path / "in")
    for place in ("cat/8", "cat/9", "dog/9"):
        (root / place).with_name(place[-1] + name).write_bytes(content)
    with pytest.raises(DataError) as error:
        survey(root, classes=ALL)
    text = str(error.value)
    assert text.startswith(f"each of 3 files, such as {root}/cat/8{name}, is {form}: ")
    assert way in text
    assert "\n" not in text and "repair" not in text


@pytest.mark.parametrize("name", WHOLE)
def test_no_share_of_broken_pictures_covers_a_whole_file(name, tmp_path):
    root = write_folder(tmp_path / "in", per_class=20)
    (root / "cat" / name).write_bytes(WHOLE[name][0])
    with pytest.raises(DataError, match=f"is {WHOLE[name][1]}: "):
        read_all(Data(source="imagefolder", path=str(root), skip="20%"), tmp_path)


@pytest.mark.parametrize("name", ["x.gz", "x.pdf", "x.npy", "x.h5", "x.heic"])
@pytest.mark.parametrize("place", ["", "loose/", "sub-01/ses-01/anat/", "cat/"])
def test_it_is_named_wherever_it_lies_if_there_are_no_pictures(name, place, tmp_path):
    content, form, way = WHOLE[name]
    file = tmp_path / "in" / place / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is {form}: .*{way}"):
        survey(tmp_path / "in" if place else file)


def test_links_that_were_not_fetched_are_named_once(tmp_path):
    root = write_folder(tmp_path / "in")
    for place in ("cat/8.png", "cat/9.png", "dog/9.png"):
        (root / place).symlink_to(f"../.git/annex/objects/Xx/9/SHA256E-s1--0/{place[-5:]}")
    with pytest.raises(
        DataError, match=r"^each of 3 files.* is a link of DataLad.*datalad get \."
    ) as error:
        read_source(Data(source="imagefolder", path=str(root), skip="50%"), tmp_path)
    assert "remove it" not in str(error.value)
    (root / "metadata.csv").write_text("file_name,label\n8.png,cat\n")
    with pytest.raises(DataError, match=r"8\.png is a link of DataLad"):
        read_source(
            Data(
                source="imagefolder", path=str(root), label_column="label", classes=("cat", "dog")
            ),
            tmp_path,
        )


def test_a_fetched_link_is_a_picture(tmp_path):
    root = write_folder(tmp_path / "in")
    kept = root / ".git/annex/objects/9.png"
    kept.parent.mkdir(parents=True)
    Image.new("RGB", (6, 6)).save(kept)
    (root / "cat/9.png").symlink_to("../.git/annex/objects/9.png")
    assert len(read_all(Data(source="imagefolder", path=str(root)), tmp_path)[1]) == 7


def test_a_broken_picture_is_still_broken(tmp_path):
    root = write_folder(tmp_path / "in", per_class=20)
    (root / "cat/9.png").write_bytes((root / "cat/9.png").read_bytes()[:60])
    with pytest.raises(DataError, match="repair or remove"):
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert len(read_all(Data(source="imagefolder", path=str(root), skip="5%"), tmp_path)[1]) == 39
