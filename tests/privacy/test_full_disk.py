"""On a disk that is really full, there is no release without its charge on disk, no half-written
file, and work resumes.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("full_disk.py")
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" "$3" "$1"'


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """Run the script on a file system of 4 MB that only its own process sees; return its output."""
    folder = tmp_path_factory.mktemp("disk")
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, "true"], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    words = [*alone, "sh", "-c", MOUNT, "sh", str(folder), sys.executable, str(SCRIPT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if "mount:" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_fails_only_without_room(seen):
    failed = [run["failed"] for run in seen["runs"]]
    assert failed[0] == "ENOSPC" and failed[-1] == "" and set(failed) == {"ENOSPC", ""}


def test_what_failed_released_nothing_and_left_nothing(seen):
    for run in seen["runs"]:
        assert run["released"] == (not run["failed"]), run
        assert not run["left"], run


def test_every_release_is_in_the_journal_which_stays_whole(seen):
    assert seen["whole"] and seen["releases"] == len(seen["runs"])
    # A charge that was written before the disk was full stays spent
    assert seen["charges"] >= seen["releases"]
