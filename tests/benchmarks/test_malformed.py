"""Read many damaged files, each by its own reader.

The reader either accepts the content, or raises an expected error with a message.

`benchmarks/malformed.py` damages the files. When it runs as a script, it also runs the program's
commands on them.
"""

import gzip
import importlib.util
import json
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sfumato.data.sources import read_source
from sfumato.data.sources.idx import read_idx
from sfumato.data.store import read_card
from sfumato.errors import SfumatoError
from sfumato.privacy.check import check_ledger
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import build_ledger, read_budget, read_ledger
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.resolved import read_lineage, read_stage_plan
from sfumato.settings.data import Data
from sfumato.settings.recipes import load_params
from sfumato.storage.artifacts import read_artifact, writing
from sfumato.storage.records import Records
from sfumato.storage.weights import load_tensors, save_tensors

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("malformed", ROOT / "benchmarks/malformed.py")
malformed = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = malformed  # dataclasses look up their module here
SPEC.loader.exec_module(malformed)

CARD = {
    "dataset_id": "own",
    "source": "npz",
    "shape": [1, 8, 8],
    "classes": ["a", "b"],
    "split": "keyed",
}
BUDGET = {"recipe": "r", "accountant": "rdp", "delta": 1e-4, "size_hint": 100, "target": 10.0}
PLAN = {
    "stage": "count",
    "enabled": True,
    **{
        "dataset_id": "own",
        "shape": [1, 8, 8],
        "classes": ["a", "b"],
        "size_hint": 100,
        "settings": {},
    },
    "mechanism": vars(Mechanism(noise_multiplier=3.0)),
}


def tensors(path: Path) -> bytes:
    save_tensors({"weight": torch.eye(3)}, path)
    return path.read_bytes()


def listed(path: Path) -> bytes:
    with writing(path.parent, "count") as folder:
        (folder / "counts.json").write_text("{}")
    return (path.parent / "privacy.json").read_bytes()


def journal(path: Path) -> bytes:
    odometer = Odometer(path.parents[1], "own")
    odometer.begin()
    for i in range(3):
        odometer.append("local", purpose=f"{i}")
    return odometer.path.read_bytes()


def npz(path: Path) -> bytes:
    images = np.zeros((4, 8, 8), np.uint8)
    labels = np.array([0, 1, 0, 1])
    np.savez(path, images=images, labels=labels, classes=np.array(["a", "b"]))
    return path.read_bytes()


def take_all(path: Path) -> None:
    for _ in read_source(Data(source="npz", path=str(path), dataset_id="own"), path.parent).train:
        pass


# File name -> function that returns undamaged content for a path, and function that reads the file
READERS = {
    "params.yaml": (
        lambda path: b"recipe: dpdm\nseed: 3\nprivacy: {epsilon: 2}\n",
        lambda path: load_params(path, ROOT / "pipelines"),
    ),
    "card.json": (lambda path: json.dumps({**CARD, "version": "v"}).encode(), read_card),
    "ledger.json": (
        lambda path: json.dumps(build_ledger(BUDGET, Records(), [])).encode(),
        lambda path: check_ledger(read_ledger(path)),
    ),
    "budget.json": (lambda path: json.dumps(BUDGET).encode(), read_budget),
    "lineage.json": (
        lambda path: json.dumps({"count": {"plan": "p", "again": 0}}).encode(),
        lambda path: read_lineage(path.parent, "count"),
    ),
    "count.yaml": (
        lambda path: yaml.safe_dump(PLAN).encode(),
        lambda path: read_stage_plan(path, "count"),
    ),
    "count/privacy.json": (listed, lambda path: read_artifact(path.parent, "count")),
    "odometer/own.jsonl": (journal, lambda path: Odometer(path.parents[1], "own").entries()),
    "set.npz": (npz, take_all),
    "train-images.gz": (
        lambda path: gzip.compress(b"\0\0\x08\x03" + struct.pack(">3i", 2, 3, 3) + bytes(18)),
        read_idx,
    ),
    "weights.safetensors": (tensors, load_tensors),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(tmp_path, name):
    make, read = READERS[name]
    path = tmp_path / "here" / name
    path.parent.mkdir(parents=True)
    whole = make(path)
    path.write_bytes(whole)
    read(path)
    refused = 0
    own = (SfumatoError, ValueError) if name == "weights.safetensors" else (SfumatoError,)
    for number in range(60):
        chance = random.Random(number)
        path.write_bytes(chance.choice(malformed.DAMAGES)(whole, chance))
        try:
            read(path)
        except own as error:
            refused += 1
            assert str(error)
    assert refused > 20  # the other damaged files are still valid


BOMBS = (
    "PNG with transparency",
    "GIF of 20,000 frames",
    "TIFF in 16-bit colours whose strip expands to 1 GB",
    "DICOM, deflated, that inflates to 3 GB",
    "DICOM with a header field of 4 GB",
    "DICOM with nested sequences",
    "DICOM in RLE that expands to 2 GB",
    "a zip with a picture of 900 megapixels",
    "npz that claims 2⁶⁰ values",
    "idx that contains more than it states",
    "parquet of 10 8 rows",
    "a tar with a comment of 8 GB",
    "a CSV of 10⁸ lines",
    "a release whose card claims 65,535 × 65,535",
    "weights that claim 2⁶⁰ bytes",
)


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the memory of a process is read from /proc"
)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_an_error_of_ours_within_2_gb(tmp_path, name):
    assert malformed.explode(name, tmp_path) == []


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the memory of a process is read from /proc"
)
def test_what_a_bomb_must_not_do_is_found(tmp_path, monkeypatch):
    def in_vain(folder):
        def take():
            (folder.parent / "tmp/left").write_bytes(bytes(300 * 2**20))
            bytearray(3 * 2**30)

        return take

    monkeypatch.setitem(malformed.BOMBS, "in vain", in_vain)
    kind, behind, written, left = malformed.explode("in vain", tmp_path)
    assert "MemoryError: " in kind and "caused by a MemoryError" in behind
    assert "314,572,800 bytes written" in written and left == "left behind: tmp/left"


@pytest.mark.parametrize("kind", ["pipe", "folder", "hole", "link"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    class Kind(random.Random):
        def choice(self, found):
            return kind if kind in found else "/nowhere"

    for name in ("card.json", "budget.json", "count.yaml", "params.yaml", "ledger.json"):
        path = tmp_path / name
        path.write_bytes(READERS[name][0](path))
        malformed.replace_kind(path, Kind())
        with pytest.raises(SfumatoError):
            READERS[name][1](path)
