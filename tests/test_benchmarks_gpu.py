"""The benchmark for GPUs runs anywhere at small sizes: its checks of correctness pass, and fail
for a wrong result.
"""

import json
import sys

import gpu
import pytest
from program import call


@pytest.fixture
def run(environment, tmp_path):
    """Return a function that runs the program, and returns its exit code and its results."""
    environment["SFUMATO_DEVICE"] = "cpu"

    def on_the_cpu() -> tuple[int, dict]:
        code = call(
            gpu.main,
            "gpu.py",
            "--device",
            "cpu",
            "--small",
            "--out",
            str(tmp_path),
            screen=sys.stdout,
        )
        return code, json.loads((tmp_path / "gpu.json").read_text())

    return on_the_cpu


def test_it_runs_without_a_gpu_and_writes_what_it_found(run, tmp_path, capsys):
    code, content = run()
    assert code == 0, capsys.readouterr().out
    assert all(check["passed"] for check in content["checks"])
    checked = " ".join(check["what"] for check in content["checks"])
    for what in (
        "float64 loop",
        "neither on its place nor on other images",
        "by at most the clipping norm",
        "resumes",
        "charged once",
    ):
        assert what in checked
    assert "busy" not in checked  # speed is not checked here
    assert {row["part"] for row in content["rows"]} >= {
        "gradients",
        "device",
        "step",
        "others",
        "killed",
    }
    table = (tmp_path / "gpu.md").read_text()
    assert all(row["what"] in table for row in content["rows"])


def test_a_sum_that_is_not_clipped_fails_its_check(monkeypatch, capsys):
    honest = gpu.clipped_gradient_sum
    monkeypatch.setattr(
        gpu, "clipped_gradient_sum", lambda *arguments, **options: 3 * honest(*arguments, **options)
    )
    found = gpu.Found(device="cpu", small=True)
    gpu.gradients(found)
    failed = [check["what"] for check in found.checks if not check["passed"]]
    assert failed == ["one image changes the sum by at most the clipping norm"]
    assert "FAILED" in gpu.markdown(found, "here") and "FAILED" in capsys.readouterr().out


def test_a_part_that_breaks_does_not_take_the_others_along(run, monkeypatch):
    def broken(found):
        raise RuntimeError("out of memory")

    def missing(found):
        raise ImportError("No module named 'elsewhere'")

    def fine(found):
        found.check("all is well", True, "yes")

    monkeypatch.setattr(gpu, "PARTS", {"broken": broken, "missing": missing, "fine": fine})
    code, content = run()
    assert code == 1 and [check["passed"] for check in content["checks"]] == [False, True]
    assert content["skipped"] == [{"what": "missing", "reason": "No module named 'elsewhere'"}]
