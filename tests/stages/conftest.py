"""The program as a function, in a folder of its own."""

import shutil
import sys
from pathlib import Path

import pytest

from stages.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the recipes, its own state directory, and `stage` as a function: (exit code, output)."""
    shutil.copytree(ROOT / "pipelines", tmp_path / "pipelines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))

    def stage(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stage", *words])
        capture = pytest.MonkeyPatch()
        from io import StringIO

        out, error = StringIO(), StringIO()
        capture.setattr(sys, "stdout", out)
        capture.setattr(sys, "stderr", error)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            capture.undo()
        return code, out.getvalue() + error.getvalue()

    return stage
