"""Shards by URL, read from a server of the S3 protocol (moto). Copies are private, and each refusal
is one sentence.
"""

import errno
import os
import shutil
import stat
from io import StringIO
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from program import call
from test_shards import files_of, prepared, write_set, write_tar

from sfumato.data import shards
from sfumato.data.sources import remote
from sfumato.data.sources.packed import unpacking
from sfumato.data.sources.remote import expand_braces, local_copy
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data
from sfumato.settings.recipes import load_params
from sfumato.settings.stage import RECIPES
from stages.cli import main

BUCKET = "scans"
URL = "s3://scans/{a-0,b-1,c-2,d-3}.tar"


@pytest.fixture(scope="module")
def server():
    started = ThreadedMotoServer(port=0)
    started.start()
    host, port = started.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield started
    started.stop()


@pytest.fixture(scope="module")
def local(server, tmp_path_factory) -> Data:
    """The settings of four shards in a folder, which are in the bucket too."""
    folder = tmp_path_factory.mktemp("tars")
    data = write_set(folder, "tar")
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for file in folder.iterdir():
        client.upload_file(str(file), BUCKET, file.name)
    return data


@pytest.fixture(scope="module")
def arrays(local, tmp_path_factory) -> dict[str, bytes]:
    """The arrays of the set that is prepared from the folder."""
    return prepared(local, tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def once(local, tmp_path_factory) -> Path:
    """Prepare a set by URL. Returns the state directory, which tests must not change."""
    state = tmp_path_factory.mktemp("once") / "state"
    prepared(by_url(local, URL), state)
    return state


@pytest.fixture
def state(once, tmp_path) -> Path:
    """Return a copy of the state directory, which a test may change."""
    return shutil.copytree(once, tmp_path / "state")


def by_url(data: Data, url: str) -> Data:
    return Data(**data.model_dump(exclude_defaults=True) | {"path": url})


@pytest.mark.parametrize(("workers", "url"), [(1, URL), (2, URL), (1, "s3://scans/*.tar")])
def test_shards_by_url_give_the_bytes_of_local_ones(local, arrays, tmp_path, workers, url):
    assert prepared(by_url(local, url), tmp_path / "url", workers) == arrays
    left = [
        path
        for path in (tmp_path / "url").rglob("*")
        if "unpacked" in path.name or path.suffix == ".tar"
    ]
    assert not left


def test_the_same_objects_are_not_prepared_again(local, state, monkeypatch):
    first = files_of(state)
    monkeypatch.setattr(shards, "convert", None)
    assert prepared(by_url(local, URL), state) == first


def test_a_changed_object_is_converted_again(local, state, tmp_path):
    first = files_of(state)
    write_tar(tmp_path / "b-1.tar", range(50, 60))
    client = boto3.client("s3")
    kept = client.get_object(Bucket=BUCKET, Key="b-1.tar")["Body"].read()
    client.upload_file(str(tmp_path / "b-1.tar"), BUCKET, "b-1.tar")
    try:
        assert prepared(by_url(local, URL), state) != first
    finally:
        client.put_object(Bucket=BUCKET, Key="b-1.tar", Body=kept)


def test_a_copy_is_private_and_removed(local, monkeypatch, tmp_path):
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    with unpacking(), local_copy("s3://scans/a-0.tar") as file:
        assert (
            stat.S_IMODE(file.stat().st_mode) == 0o600
            and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        )
        assert file.is_relative_to(tmp_path / "state")
    assert not file.parent.exists()


def test_a_fault_names_the_url_and_not_the_copy(local, tmp_path):
    boto3.client("s3").put_object(Bucket=BUCKET, Key="broken/e.tar", Body=b"no tar" * 1000)
    with pytest.raises(
        DataError, match=r"^s3://scans/broken/e\.tar cannot be read as a plain tar file: write it"
    ):
        prepared(by_url(local, "s3://scans/broken/e.tar"), tmp_path / "state")


def test_a_missing_shard_of_the_range_is_named(local, tmp_path):
    with pytest.raises(
        DataError, match=r"^s3://scans/e-4\.tar does not exist: correct data\.path, or upload"
    ):
        prepared(by_url(local, "s3://scans/{a-0,e-4}.tar"), tmp_path / "state")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://scans/{a-0,a-0}.tar", "names a file more than once: correct"),
        ("s3://scans/{9..8}.tar", "matches no file: correct"),
        ("s3://scans/nothing*.tar", "matches no file: correct"),
    ],
)
def test_a_range_that_names_a_shard_twice_or_none_is_refused(local, tmp_path, url, message):
    with pytest.raises(DataError, match=message):
        prepared(by_url(local, url), tmp_path / "state")


def test_a_server_that_does_not_answer_is_one_sentence(local, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(
        ConfigError, match=r"^s3://scans/a-0\.tar cannot be read \(EndpointConnectionError\): check"
    ):
        prepared(by_url(local, URL), tmp_path / "state")


def test_refused_credentials_are_one_sentence_without_them(local, tmp_path, monkeypatch):
    """A server that checks credentials may repeat them in its answer."""
    import s3fs

    def refused(self, path, **more):
        raise PermissionError("The key anyone with hidden-secret is not valid")

    monkeypatch.setattr(s3fs.S3FileSystem, "info", refused)
    with pytest.raises(
        ConfigError, match=r"cannot be accessed with these credentials \(PermissionError\): cor"
    ) as error:
        prepared(by_url(local, URL), tmp_path / "state")
    assert "hidden" not in str(error.value) and "anyone" not in str(error.value)


def test_a_full_disk_stays_a_full_disk(local, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as error:
        prepared(by_url(local, URL), tmp_path / "state")
    assert error.value.errno == errno.ENOSPC and not files_of(tmp_path / "state")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://key:hidden-secret@scans/a.tar", "with @ or ? may contain a password"),
        ("https://host/a.tar?X-Amz-Signature=hidden-secret", "with @ or ? may contain a password"),
        ("simplecache::s3://scans/a.tar", "with :: may leave copies of the files"),
    ],
)
def test_a_url_with_secrets_is_refused_and_not_printed(tmp_path, monkeypatch, url, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(
        f"data: {{dataset_id: x, source: webdataset, path: '{url}'}}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_params(tmp_path / "params.yaml", RECIPES)
    assert reason in str(error.value) and "hidden" not in str(error.value)


def test_init_with_a_url_names_the_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    screen = StringIO()
    assert (
        call(main, "stage", "init", "s3://scans/a.tar", "--epsilon", "3", "--yes", screen=screen)
        == 2
    )
    assert "copy a few of its files into a folder, name that" in " ".join(screen.getvalue().split())


def test_credentials_are_in_no_file_of_state_and_project(state):
    files = [file for file in state.rglob("*") if file.is_file()]
    assert files_of(state)
    for file in files:
        assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in file.read_bytes()


def test_ranges_keep_their_zeros():
    assert expand_braces("s3://b/{08..11}.tar") == [
        f"s3://b/{n}.tar" for n in ("08", "09", "10", "11")
    ]
    names = ("train-0", "train-1", "val-0", "val-1")
    assert expand_braces("s3://b/{train,val}-{0..1}.tar") == [
        f"s3://b/{name}.tar" for name in names
    ]
