"""Sets prepared shard by shard have the same bytes as sets read at once, in any number of processes
and after kills.
"""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
from joined_processes import run_joined
from PIL import Image
from pyarrow import parquet
from sources.writers import write_folder

from sfumato.data import decoding, prepare, shards
from sfumato.data.prepare import prepare_sensitive
from sfumato.errors import ConfigError, DataError
from sfumato.planning.forget import private_files
from sfumato.runtime import distributed
from sfumato.settings.data import Data, Groups

CLASSES = ("cat", "dog")
NAMES = ("a-0", "b-1", "c-2", "d-3")


def png(number: int, side: int = 6) -> bytes:
    file = io.BytesIO()
    Image.fromarray(
        np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    ).save(file, "png")
    return file.getvalue()


def write_tar(file: Path, numbers, side: int = 6, broken=()) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for number in numbers:
            about = json.dumps({"patient": f"P{number % 7}"}).encode()
            picture = b"no picture" if number in broken else png(number, side)
            for suffix, content in {
                "png": picture,
                "cls": CLASSES[number % 2].encode(),
                "json": about,
            }.items():
                entry = tarfile.TarInfo(f"P{number % 7}_{number:03d}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def write_parquet(file: Path, numbers, side: int = 6, broken=()) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "image": {
                "bytes": b"no picture" if n in broken else png(n, side),
                "path": f"P{n % 7}_{900 - n}.png",
            },
            "label": CLASSES[n % 2],
            "patient": f"P{n % 7}",
        }
        for n in numbers
    ]
    picture = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    schema = pyarrow.schema(
        {"image": picture, "label": pyarrow.string(), "patient": pyarrow.string()}
    )
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), file)


WRITERS = {"tar": write_tar, "parquet": write_parquet}


def write_set(folder: Path, form: str, names=NAMES, **more) -> Data:
    for start, name in enumerate(names):
        WRITERS[form](folder / f"{name}.{form}", range(10 * start, 10 * start + 10), **more)
    for file in folder.iterdir():  # so that no file counts as just changed
        os.utime(file, (1e9, 1e9))
    return settings(folder, form)


def settings(folder: Path, form: str, **more) -> Data:
    own = (
        {"source": "webdataset"}
        if form == "tar"
        else {"source": "imagefolder", "label_column": "label"}
    )
    return Data(dataset_id="set", path=str(folder), classes=CLASSES, **own, **more)


@pytest.fixture
def settled(monkeypatch):
    """Treat files that were just written as old files.

    A test cannot make them look old, because the time of a status change cannot be set.
    """
    monkeypatch.setattr(shards, "FRESH", -1.0)
    monkeypatch.setattr(prepare, "FRESH", -1.0)


def prepared(data: Data, state: Path, workers: int | None = None) -> dict[str, bytes]:
    """Prepare with a fixed key. Returns the arrays of the set, as bytes."""
    (state / "keys").mkdir(parents=True, exist_ok=True)
    (state / "keys/set").write_bytes(bytes(range(32)))
    prepare_sensitive(data, state, state / "card.json", state / "raw", workers)
    return files_of(state)


def files_of(state: Path) -> dict[str, bytes]:
    home = state / "data/set"
    return {str(file.relative_to(home)): file.read_bytes() for file in home.rglob("*.npy")}


def at_once(data: Data, state: Path) -> dict[str, bytes]:
    """Prepare as if there were no shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "shards_in", lambda data: [])
        return prepared(data, state)


GROUPS = {"column": {"column": "patient"}, "pattern": {"pattern": "^(P\\d)_"}, "images": None}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("groups", GROUPS)
def test_shards_give_the_bytes_of_a_reading_at_once(tmp_path, form, groups):
    write_set(tmp_path / "in", form)
    data = settings(tmp_path / "in", form, groups=GROUPS[groups])
    whole = at_once(data, tmp_path / "whole")
    assert prepared(data, tmp_path / "shards") == whole and len(whole) >= 4
    assert not (tmp_path / "shards/data/.set.shards").exists()


@pytest.mark.parametrize("form", WRITERS)
def test_shards_of_a_hold_out_keep_their_place(tmp_path, form):
    write_set(tmp_path / "in", form, names=("test-0", "train-0", "train-1", "x_test_1"))
    data = settings(tmp_path / "in", form)
    assert prepared(data, tmp_path / "shards") == at_once(data, tmp_path / "whole")


@pytest.mark.parametrize("form", WRITERS)
def test_broken_pictures_count_over_all_shards(tmp_path, form):
    """Three of ten pictures are broken in one shard. This exceeds the limit for that shard, but not
    for all shards together.
    """
    write_set(tmp_path / "in", form, broken=(11, 13, 15))
    data = settings(tmp_path / "in", form, skip=0.1, groups={"column": "patient"})
    whole = at_once(data, tmp_path / "whole")
    assert prepared(data, tmp_path / "shards") == whole
    listed = (tmp_path / "shards/data/set/left_out.txt").read_text()
    assert listed.count("\n") == 2 and listed.count("b-1") == 3
    with pytest.raises(DataError, match=r"more pictures are broken than data\.skip=0\.05 allows"):
        prepared(data.model_copy(update={"skip": 0.05}), tmp_path / "fewer")


def test_each_worker_is_a_process_that_decodes_in_one_thread(tmp_path, monkeypatch):
    data = write_set(tmp_path / "in", "tar")
    whole = prepared(data, tmp_path / "none")
    monkeypatch.setattr(decoding, "decode", None)  # in this process
    assert prepared(data, tmp_path / "one", 1) == whole
    with ProcessPoolExecutor(1, get_context("spawn"), shards.begin_worker, ({},)) as pool:
        threads = pool.submit(eval, "__import__('sfumato.data.decoding').data.decoding.DECODERS")
        assert threads.result() == 1


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, workers):
    data = write_set(tmp_path / "in", "tar")
    assert prepared(data, tmp_path / "many", workers) == prepared(data, tmp_path / "one")


def joined(data: Data, state: Path) -> None:
    """Prepare the set as one of the processes that `torchrun` starts."""
    distributed.join()
    if not distributed.is_main():
        shards.help_first(data)
        return distributed.leave_group()
    try:
        prepared(data, state)
    finally:
        distributed.broadcast_object(None)
        distributed.leave_group()


def test_processes_of_torchrun_share_the_shards(tmp_path):
    data = write_set(tmp_path / "in", "tar")
    run_joined(2, joined, data, tmp_path / "joined")
    assert files_of(tmp_path / "joined") == prepared(data, tmp_path / "one")


def test_a_killed_preparation_continues_with_the_next_shard(tmp_path, settled):
    data = write_set(tmp_path / "in", "tar")
    state = tmp_path / "state"
    (state / "keys").mkdir(parents=True)
    (state / "keys/set").write_bytes(bytes(range(32)))
    (tmp_path / "params.yaml").write_text(
        yaml.safe_dump({"data": json.loads(data.model_dump_json())})
    )
    dying = (
        "import os, signal\n"
        "from sfumato.data import shards, prepare\n"
        "shards.FRESH = prepare.FRESH = -1.0\n"
        "read, seen = shards.read_source, []\n"
        "def third(*given):\n"
        "    seen.append(given)\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if len(seen) == 3 else read(*given)\n"
        "shards.read_source = third\n"
        "from stages.cli import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", dying, "prepare", "sensitive", "--card", "card.json"]
    environment = os.environ | {"SFUMATO_STATE": str(state)}
    assert (
        subprocess.run(words, cwd=tmp_path, env=environment, check=False).returncode
        == -signal.SIGKILL
    )
    kept = {file: file.stat().st_ino for file in (state / "data/.set.shards").glob("[!.]*")}
    assert len(kept) == 2 and all(stat.S_IMODE(place.stat().st_mode) == 0o700 for place in kept)
    assert all(
        stat.S_IMODE(file.stat().st_mode) == 0o600 for place in kept for file in place.iterdir()
    )
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            shards, "read_source", lambda *given: read.append(given) or prepare.read_source(*given)
        )
        resumed = prepared(data, state)
    assert len(read) == 2 and resumed == prepared(data, tmp_path / "other")
    assert not (state / "data/.set.shards").exists()


def test_a_changed_shard_is_converted_again(tmp_path, settled):
    data = write_set(tmp_path / "in", "tar")
    write_tar(tmp_path / "in/e-4.tar", range(2), side=5)
    with pytest.raises(
        DataError,
        match=r"e-4\.tar has pictures of 5×5 colour, but .*a-0\.tar has pictures of 6×6 colour",
    ):
        prepared(data, tmp_path / "state")
    folder = tmp_path / "state/data/.set.shards"
    before = {place.name for place in folder.iterdir()}
    assert len(before) == 5 and folder in private_files(tmp_path / "state", "set")["private copy"]
    write_tar(tmp_path / "in/e-4.tar", range(2), side=7)
    with pytest.raises(DataError, match="7×7"):
        prepared(data, tmp_path / "state")
    assert len(before & {place.name for place in folder.iterdir()}) == 4


def test_a_damaged_shard_is_named_and_the_others_are_kept(tmp_path, settled):
    data = write_set(tmp_path / "in", "tar")
    whole = (tmp_path / "in/b-1.tar").read_bytes()
    (tmp_path / "in/b-1.tar").write_bytes(whole[:3000])
    with pytest.raises(
        DataError, match=r"b-1\.tar cannot be read as a plain tar file: write it"
    ) as error:
        prepared(data, tmp_path / "state")
    assert (
        "a-0" not in str(error.value)
        and len([*(tmp_path / "state/data/.set.shards").iterdir()]) == 3
    )
    (tmp_path / "in/b-1.tar").write_bytes(whole)
    assert prepared(data, tmp_path / "state") == at_once(data, tmp_path / "whole")


def test_a_shard_given_twice_is_refused(tmp_path):
    data = write_set(tmp_path / "in", "tar")
    (tmp_path / "in/e-4.tar").write_bytes((tmp_path / "in/b-1.tar").read_bytes())
    with pytest.raises(
        DataError,
        match=r"e-4\.tar has the same content as .*b-1\.tar, so .* count twice: remove one",
    ):
        prepared(data, tmp_path / "state")


@pytest.mark.parametrize("form", WRITERS)
def test_shards_without_samples_add_nothing(tmp_path, form):
    data = write_set(tmp_path / "in", form)
    for name in ("bb", "z"):
        WRITERS[form](tmp_path / f"in/{name}.{form}", ())
    whole = prepared(data, tmp_path / "with")
    for name in ("bb", "z"):
        (tmp_path / f"in/{name}.{form}").unlink()
    assert prepared(data, tmp_path / "without") == whole


def test_a_person_in_both_parts_is_refused(tmp_path):
    write_set(tmp_path / "in", "tar", names=("test-0", "train-0", "train-1"))
    data = settings(tmp_path / "in", "tar", groups={"column": "patient"})
    with pytest.raises(DataError, match=r"7 person\(s\) have pictures in both train and test"):
        prepared(data, tmp_path / "state")


def test_a_faulty_setting_is_one_error_of_its_kind(tmp_path):
    data = write_set(tmp_path / "in", "tar").model_copy(update={"classes": None})
    with pytest.raises(ConfigError, match=r"data\.classes is missing"):
        prepared(data, tmp_path / "state")


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("groups", ["pattern", "images"])
def test_a_large_folder_is_listed_in_blocks(tmp_path, monkeypatch, split, groups, settled):
    """The prepared bytes are the same as without blocks, and no block exceeds its size limit."""
    parts = [tmp_path / "in/train", tmp_path / "in/test"] if split else [tmp_path / "in"]
    for number, part in enumerate(parts):
        write_folder(part, per_class=7)
        for file in part.rglob("*.png"):
            file.rename(file.with_name(f"P{number}{int(file.stem) // 2}_{file.name}"))
    data = Data(
        dataset_id="set", source="imagefolder", path=str(tmp_path / "in"), holdout_fraction=0.5
    )
    if groups == "pattern":
        data = data.model_copy(update={"groups": Groups(pattern="^(P\\d+)_")})
    whole = prepared(data, tmp_path / "whole")
    monkeypatch.setattr(shards, "BLOCK_SIZE", 3)
    sizes = []
    write = shards.write_shard
    monkeypatch.setattr(
        shards,
        "write_shard",
        lambda source, *more: sizes.append(source.size) or write(source, *more),
    )
    assert prepared(data, tmp_path / "blocks") == whole
    assert sizes == [3, 3, 1] * 2 * len(parts)
