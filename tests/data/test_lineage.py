import os

import numpy as np
import pytest
from small_record import small_record

from sfumato.data.images import IMAGES
from sfumato.data.lineage import digests, lineage, recognised, remember
from sfumato.errors import DataError
from sfumato.privacy.events import Mechanism
from sfumato.storage.artifacts import read_artifact, writing


def released(state, number, **files):
    """Remember a release with 8 images and these files. Returns the artifact.

    number: number of the release's only record.
    """
    record = small_record(number, Mechanism(noise_multiplier=5.0))
    out = state.parent / f"release{number}"
    with writing(out, "synthesize", records=[record]) as directory:
        np.save(
            directory / IMAGES,
            np.random.default_rng(number).integers(0, 256, (8, 4, 5, 1), dtype=np.uint8),
        )
        for name, content in files.items():
            (directory / name).write_bytes(content)
    artifact = read_artifact(out)
    remember(state, [artifact], state.parent / "public")
    return artifact


def records_of(found):
    return [one.records for one in found]


def test_what_is_remembered_of_a_release_is_held_to_its_form(tmp_path):
    (tmp_path / "state/released").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.png").write_bytes(b"x")
    for wrong in ("[]", "{", '{"records": [], "hashes": []}', '{"records": {}, "hashes": 5}'):
        (tmp_path / "state/released/a.json").write_text(wrong)
        with pytest.raises(DataError, match="without it earlier releases are not recognised"):
            lineage(tmp_path / "model", "model", True, tmp_path / "state")


def test_each_image_of_each_release_is_recognised_by_itself(tmp_path):
    state = tmp_path / "state"
    for artifact in [released(state, number) for number in (1, 2, 3)]:
        for digest in digests(np.load(artifact.path / IMAGES)):
            assert records_of(recognised(state, ["0" * 32, digest.hex()])) == [artifact.records]


@pytest.mark.parametrize(
    "copy", ["x.png", "X.PNG", "x.npz", "x.parquet", "x.safetensors", "deep/down/x.Png"]
)
def test_a_copied_file_of_a_release_is_recognised_in_any_folder(tmp_path, copy):
    content = os.urandom(64)
    place = tmp_path / "folder" / copy
    artifact = released(tmp_path / "state", 1, **{f"released{place.suffix.lower()}": content})
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    for path in (tmp_path / "folder", place):
        assert records_of(lineage(path, "public", True, tmp_path / "state")) == [artifact.records]


def test_a_link_to_a_file_of_a_release_brings_its_records(tmp_path):
    """The link leads into the release's folder, which contains the records. So this test needs no
    state directory, which would list hashes of released files.
    """
    artifact = released(tmp_path / "state", 1)
    (tmp_path / "mine.npy").symlink_to(artifact.path / IMAGES)
    assert records_of(lineage(tmp_path / "mine.npy", "public", True, None)) == [artifact.records]


def test_a_privacy_json_without_records_hides_no_release(tmp_path):
    content = os.urandom(64)
    artifact = released(tmp_path / "state", 1, **{"images.npz": content})
    with writing(tmp_path / "claimed", "public") as directory:
        (directory / "x.npz").write_bytes(content)
    assert artifact.records in records_of(
        lineage(tmp_path / "claimed", "public", True, tmp_path / "state")
    )
