"""Read the statements of origin in released files, without the code that writes them."""

import io
import json
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from small_release import write_release

import sfumato
from sfumato.release.exports import PARQUET, PNG, SOURCE_TYPE, mark_of, save_parquet
from sfumato.release.pattern import FOUND, add_pattern, pattern_key, pattern_score

GENERATED = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
NAMES = {
    "ext": "http://iptc.org/std/Iptc4xmpExt/2008-02-29/",
    "dc": "http://purl.org/dc/elements/1.1/",
}


def said(content: bytes) -> tuple[str | None, str]:
    """Return the source type and description of a PNG, from the XMP packet that Pillow finds."""
    with Image.open(io.BytesIO(content)) as opened:
        tree = ElementTree.fromstring(opened.info["xmp"])
    words = "".join(tree.find(".//dc:description", NAMES).itertext())
    return tree.findtext(".//ext:DigitalSourceType", None, NAMES), words


def pngs(path: Path) -> list[Path]:
    return [path / "grid.png", *sorted((path / PNG).rglob("*.png"))]


def test_every_picture_of_a_release_is_marked_as_generated(digits, tmp_path):
    path = write_release(tmp_path / "release", digits, export=["png"])
    assert len(pngs(path)) == 41
    for file in pngs(path):
        kind, words = said(file.read_bytes())
        assert kind == GENERATED and words.startswith("AI-generated image")
    with Image.open(path / PNG / str(digits.labels[7]) / "000007.png") as opened:
        assert np.array_equal(np.asarray(opened), digits.images[7, ..., 0])


def test_public_images_are_called_that_and_never_generated(digits, tmp_path):
    path = write_release(tmp_path / "release", digits, sources=["select"], export=["png"])
    assert json.loads((path / "card.json").read_text())["digital_source_type"] is None
    for file in pngs(path):
        kind, words = said(file.read_bytes())
        assert kind is None and "public image, privately selected and labelled" in words.lower()
    kind, words = said(
        pngs(write_release(tmp_path / "both", digits, sources=["select", "finetune"]))[
            0
        ].read_bytes()
    )
    assert kind.endswith("/compositeWithTrainedAlgorithmicMedia") and "public images" in words


@pytest.mark.parametrize("sources", [("finetune",), ("select",)])
def test_tables_and_their_pictures_are_marked_too(digits, tmp_path, sources):
    mark = mark_of(sources)
    five = digits.take(np.arange(5))
    save_parquet(tmp_path, five, np.full(5, "plain"), mark)
    table = pyarrow.parquet.read_table(tmp_path / PARQUET)
    metadata = table.schema.metadata
    assert metadata[SOURCE_TYPE.encode()].decode() == (mark.source_type or "not generated")
    assert b"huggingface" in metadata and metadata[b"description"].decode() == mark.description
    for row in table["image"].to_pylist():
        assert said(row["bytes"]) == (mark.source_type, mark.description)


# --- files other than pictures, and the pattern in the pixels -------------------------------------

# Digest of images.npy from before these marks existed
IMAGES_SHA256 = "09b1ae0a110ef348106e8b65319b22bac9f44cf70bceec715b1e9806097ba812"


def packet_in(content: bytes) -> str:
    """Return the XMP packet that a scanner finds in any file, by the packet's own marks."""
    start = content.index(b"<?xpacket begin")
    return content[start : content.index(b'<?xpacket end="r"?>', start)].decode()


@pytest.mark.parametrize("mark", ["files", "pixels"])
def test_marked_arrays_and_archives_read_as_before(digits, tmp_path, mark):
    path = write_release(tmp_path / "release", digits, export=["npz", "webdataset"], mark=mark)
    for name in ("images.npy", "images.npz", "webdataset/train-00000.tar"):
        assert GENERATED in packet_in((path / name).read_bytes()), name
    images = np.load(path / "images.npy", allow_pickle=False)
    assert np.array_equal(np.load(path / "images.npy", mmap_mode="r"), images)
    assert np.array_equal(sfumato.load_release(path).images, images)
    with np.load(path / "images.npz") as archive:
        assert np.array_equal(archive["images"], images)
    with tarfile.open(path / "webdataset/train-00000.tar") as archive:
        assert len(archive.getmembers()) == 80 and "AI-generated" in archive.pax_headers["comment"]


def test_a_release_without_these_marks_keeps_its_bytes(digits, tmp_path):
    path = write_release(tmp_path / "release", digits, export=["npz", "webdataset"])
    assert sha256((path / "images.npy").read_bytes()).hexdigest() == IMAGES_SHA256
    with zipfile.ZipFile(path / "images.npz") as archive:
        assert archive.comment == b""
    with tarfile.open(path / "webdataset/train-00000.tar") as archive:
        assert archive.pax_headers == {}
    assert "pattern" not in json.loads((path / "card.json").read_text())


def larger(digits, side: int, count: int = 200) -> np.ndarray:
    """Return digits of this many pixels per side, with grey levels of all kinds."""
    pictures = [
        Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
        for image in digits.images[..., 0]
    ]
    return np.stack([np.asarray(picture) for picture in pictures[:count]])[..., None]


def after_jpeg(images: np.ndarray) -> np.ndarray:
    found = []
    for image in images:
        content = io.BytesIO()
        Image.fromarray(image.squeeze()).save(content, format="JPEG", quality=90)
        found.append(np.asarray(Image.open(content)).reshape(image.shape))
    return np.stack(found)


@pytest.mark.parametrize(("side", "size"), [(28, 10), (64, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_pattern_survives_jpeg_in_99_of_100(digits, side, size, channels):
    """Each of 100 keys matches an unmarked set by chance with probability at most 1/24 900. So one
    of the four cases fails in at most one of 60 runs.
    """
    images = np.tile(larger(digits, side), channels)
    images[..., 1:] //= 2
    key = pattern_key("clinic", 0)
    marked = add_pattern(images, key)
    assert np.abs(marked.astype(int) - images).max() == 1
    received = after_jpeg(marked)
    plain = after_jpeg(images)
    sets = [np.random.default_rng(i).permutation(len(images))[:size] for i in range(100)]
    assert sum(pattern_score(received[rows], key) >= FOUND for rows in sets) >= 99
    assert not any(
        pattern_score(plain[rows], pattern_key("other", i)) >= FOUND for i, rows in enumerate(sets)
    )


def test_the_key_depends_on_no_image(digits, tmp_path):
    kinds = np.array(["plain"] * 20 + ["public"] * 20)
    sources = ["finetune"] * 20 + ["select"] * 20
    path = write_release(tmp_path / "a", digits, sources, kinds=kinds, mark="pixels")
    release = sfumato.load_release(path)
    assert np.array_equal(release.images[20:], digits.images[20:40])
    assert np.array_equal(
        release.images[:20], add_pattern(digits.images[:20], release.card["pattern"])
    )
    assert (release.images[:20] != digits.images[:20]).any()
    other = write_release(tmp_path / "b", digits.take(np.arange(100, 200)), mark="pixels")
    assert json.loads((other / "card.json").read_text())["pattern"] == release.card["pattern"]
