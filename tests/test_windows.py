"""On Windows, a ledger can be checked and a release loaded, without what only POSIX has."""

import os
import subprocess
import sys
from pathlib import Path

from small_release import write_release

ROOT = Path(__file__).resolve().parent.parent
# Modules and functions that Python on Windows lacks
WITHOUT = """\
import os, sys, platformdirs, runpy
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "grp", "pwd", "resource", "termios"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
for name in ("fork", "getloadavg", "getpgid", "getuid", "killpg", "sched_getaffinity", "setsid"):
    delattr(os, name)
"""


def run_without(code, folder):
    environment = os.environ | {"USERNAME": "reviewer", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_ledger_is_checked_without_posix():
    arguments = ["stage", "ledger", "check", "--ledger-only", "--epsilon", "10"]
    code = f"sys.argv = {arguments}\nfrom stages.cli import main\nmain()"
    done = run_without(code, ROOT / "docs" / "gallery" / "digits")
    assert done.returncode == 0 and "is valid" in done.stdout, done.stderr


def test_a_release_is_loaded_without_posix(tmp_path, digits):
    write_release(tmp_path / "release", digits)
    code = "import sfumato\nprint(sfumato.load_release('release').images.shape)"
    done = run_without(code, tmp_path)
    assert done.stdout == "(40, 8, 8, 1)\n", done.stderr
