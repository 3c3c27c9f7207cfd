"""What a released file says of its origin, read back by others than the code that wrote it."""

import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from small_release import write_release

from sfumato.data.images import ImageSet
from sfumato.release.exports import PARQUET, PNG, SOURCE_TYPE, mark_of, save_parquet, save_png_folders

GENERATED = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
NAMES = {"ext": "http://iptc.org/std/Iptc4xmpExt/2008-02-29/", "dc": "http://purl.org/dc/elements/1.1/"}

PLAIN = np.full(30, "plain")  # the kinds of as many images


def packet_of(content: bytes) -> str:
    """The XMP packet of a PNG by the PNG and XMP specifications alone; every chunk's checksum must hold."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, found = 8, []
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kind, body = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        assert struct.unpack(">I", content[place + 8 + length :][:4])[0] == zlib.crc32(kind + body)
        if kind == b"iTXt" and body.startswith(b"XML:com.adobe.xmp\0"):
            flag, method, rest = body[18], body[19], body[20:]
            language, translated, text = rest.split(b"\0", 2)
            assert (flag, method, language, translated) == (0, 0, b"", b"")  # as the XMP specification wants it
            found.append(text.decode())
        place += 12 + length
    return found[0] if found else ""


def said(content: bytes) -> tuple[str | None, str]:
    tree = ElementTree.fromstring(packet_of(content).encode())
    return tree.findtext(".//ext:DigitalSourceType", None, NAMES), "".join(
        tree.find(".//dc:description", NAMES).itertext()
    )


def pngs(path: Path) -> list[Path]:
    return [path / "grid.png", *sorted((path / PNG).rglob("*.png"))]


def test_every_picture_of_a_generated_release_says_that_it_is_generated(digits, tmp_path):
    path = write_release(tmp_path / "release", digits, export=["png"])
    assert len(pngs(path)) == 41
    for file in pngs(path):
        kind, words = said(file.read_bytes())
        assert kind == GENERATED and words.startswith("AI-generated image")


def test_public_images_are_called_that_and_never_generated(digits, tmp_path):
    for file in pngs(write_release(tmp_path / "release", digits, sources=["select"], export=["png"])):
        kind, words = said(file.read_bytes())
        assert kind is None and "public image, privately selected and labelled" in words.lower()
    kind, words = said(pngs(write_release(tmp_path / "both", digits, sources=["select", "finetune"]))[0].read_bytes())
    assert kind.endswith("/compositeWithTrainedAlgorithmicMedia") and "public images" in words


def test_the_pixels_stay_as_they_are(digits, tmp_path):
    from PIL import Image

    path = write_release(tmp_path / "release", digits, export=["png"])
    with Image.open(path / PNG / str(digits.labels[7]) / "000007.png") as opened:
        assert np.array_equal(np.asarray(opened), digits.images[7, ..., 0]) and GENERATED in str(opened.info["xmp"])


@pytest.mark.parametrize("sources", [("finetune",), ("select",)])
def test_a_table_says_it_too_and_so_does_each_picture_in_it(digits, tmp_path, sources):
    parquet = pytest.importorskip("pyarrow.parquet")
    mark = mark_of(sources)
    save_parquet(tmp_path, ImageSet(digits.images[:5], digits.labels[:5], digits.classes), PLAIN[:5], mark)
    table = parquet.read_table(tmp_path / PARQUET)
    metadata = table.schema.metadata
    assert metadata[SOURCE_TYPE.encode()].decode() == (mark.source_type or "not generated")
    assert b"huggingface" in metadata and metadata[b"description"].decode() == mark.description
    for row in table["image"].to_pylist():
        assert said(row["bytes"]) == (mark.source_type, mark.description)


def test_torchvision_loads_marked_folders(digits, tmp_path):
    from torchvision.datasets import ImageFolder

    images = ImageSet(digits.images[:30], digits.labels[:30], digits.classes)
    save_png_folders(tmp_path, images, PLAIN, mark_of(["finetune"]))
    found = ImageFolder(str(tmp_path))
    assert sorted(label for _, label in found.samples) == sorted(digits.labels[:30].tolist())
