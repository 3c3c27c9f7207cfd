"""`docs/closed-room.sh` checks the folder that is carried in, and installs only from it."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "closed-room.sh"
METADATA = "Metadata-Version: 2.1\nName: sfumato\nVersion: 9.9\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def room(tmp_path) -> Path:
    """Create a folder as `pack` leaves it, with a tiny package."""
    wheel = tmp_path / "room" / "wheels" / "sfumato-9.9-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    about = "sfumato-9.9.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sfumato/__init__.py", "__version__ = '9.9'\n")
        archive.writestr(f"{about}/METADATA", METADATA)
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    shutil.copy(SCRIPT, tmp_path / "room")
    files = [tmp_path / "room" / SCRIPT.name, wheel]
    lines = [f"{sha256(file)}  ./{file.relative_to(tmp_path / 'room')}\n" for file in files]
    (tmp_path / "room" / "SHA256SUMS").write_text("".join(lines))
    return tmp_path / "room"


def install(room: Path) -> subprocess.CompletedProcess:
    words = ["sh", SCRIPT.name, "install", "../venv"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": sys.executable,
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }
    return subprocess.run(
        words, cwd=room, env=environment, capture_output=True, text=True, check=False
    )


def test_an_unchanged_folder_installs_without_an_index(room):
    done = install(room)
    assert (done.returncode, done.stdout) == (0, "installed: sfumato 9.9\n"), done.stderr


def change_a_byte(room: Path) -> None:
    wheel = room / "wheels" / "sfumato-9.9-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[-3] ^= 1
    wheel.write_bytes(content)


def add_a_wheel(room: Path) -> None:
    (room / "wheels" / "added-1-py3-none-any.whl").write_bytes(b"a program that nobody listed")


def link_a_wheel(room: Path) -> None:
    (room / "wheels" / "added-1-py3-none-any.whl").symlink_to(sys.executable)


def remove_a_wheel(room: Path) -> None:
    (room / "wheels" / "sfumato-9.9-py3-none-any.whl").unlink()


@pytest.mark.parametrize("change", [change_a_byte, add_a_wheel, link_a_wheel, remove_a_wheel])
def test_another_file_stops_before_anything_is_installed(room, change):
    change(room)
    done = install(room)
    assert done.returncode != 0 and "nothing was installed" in done.stdout
    assert re.search(r"^[<>] [0-9a-f]{64}  \./wheels/\S+\.whl$", done.stdout, re.MULTILINE)
    assert not (room.parent / "venv").exists()


def test_wheels_come_by_the_lock_and_its_hashes():
    text = SCRIPT.read_text()
    assert "pip wheel --quiet --require-hashes --requirement requirements.lock" in text
    assert "pip install --quiet --no-index --no-deps" in text
