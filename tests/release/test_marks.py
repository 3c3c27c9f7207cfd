"""What a released file says of its origin, read back by others than the code that wrote it."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from small_release import write_release

from sfumato.release.exports import PARQUET, PNG, SOURCE_TYPE, mark_of, save_parquet

GENERATED = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
NAMES = {"ext": "http://iptc.org/std/Iptc4xmpExt/2008-02-29/", "dc": "http://purl.org/dc/elements/1.1/"}


def said(content: bytes) -> tuple[str | None, str]:
    """Type and description of a PNG, as Pillow finds its XMP packet."""
    with Image.open(io.BytesIO(content)) as opened:
        tree = ElementTree.fromstring(opened.info["xmp"])
    words = "".join(tree.find(".//dc:description", NAMES).itertext())
    return tree.findtext(".//ext:DigitalSourceType", None, NAMES), words


def pngs(path: Path) -> list[Path]:
    return [path / "grid.png", *sorted((path / PNG).rglob("*.png"))]


def test_every_picture_of_a_generated_release_says_so_and_keeps_its_pixels(digits, tmp_path):
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
    kind, words = said(pngs(write_release(tmp_path / "both", digits, sources=["select", "finetune"]))[0].read_bytes())
    assert kind.endswith("/compositeWithTrainedAlgorithmicMedia") and "public images" in words


@pytest.mark.parametrize("sources", [("finetune",), ("select",)])
def test_a_table_says_it_too_and_so_does_each_picture_in_it(digits, tmp_path, sources):
    mark, five = mark_of(sources), digits.take(np.arange(5))
    save_parquet(tmp_path, five, np.full(5, "plain"), mark)
    table = pyarrow.parquet.read_table(tmp_path / PARQUET)
    metadata = table.schema.metadata
    assert metadata[SOURCE_TYPE.encode()].decode() == (mark.source_type or "not generated")
    assert b"huggingface" in metadata and metadata[b"description"].decode() == mark.description
    for row in table["image"].to_pylist():
        assert said(row["bytes"]) == (mark.source_type, mark.description)
