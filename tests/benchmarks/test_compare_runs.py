"""Comparison of runs: where runs are read from, the marks of incomparable runs, and the script."""

import csv
import json
import os
import stat
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pandas as pd
import program
import pytest
from compare_runs import (
    classifiers_of,
    comparison_table,
    experiments,
    find_evaluation,
    main,
    plot_comparison,
    read_run,
    rows_of_experiments,
    short_names,
    with_differences,
)
from csv_tables import csv_of
from small_record import small_record

from sfumato.errors import BudgetError, DataError
from sfumato.evaluation.identity import keep_evaluation
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.storage.digest import md5_of_folder
from sfumato.storage.records import Records
from stages.screen import show_local

IDENTITY = {
    "dataset": "digits",
    "version": "v1",
    "data": "f" * 64,
    "holdout": "h" * 64,
    "extractor": "e" * 64,
}
IDENTITY |= {"reference": "holdout", "training": "light, 12 epochs, last epoch"}


def ledger_of(recipe: str, target: float, sigma: float, key: str = "0") -> dict:
    own = {"id": key * 32, "data_version": IDENTITY["version"]}
    record = small_record(0, Mechanism(noise_multiplier=sigma), **own)
    budget = {
        "recipe": recipe,
        "accountant": "rdp",
        "delta": 1e-4,
        "size_hint": 1500,
        "target": target,
    }
    return build_ledger(budget, Records.of([record]), [])


def metrics_of(accuracy: float, release: str = "a.dir", **identity) -> dict:
    rows = (("lr", accuracy - 0.03), ("cnn", accuracy))
    scored = {name: {"mean": mean, "std": 0.004, "per_seed": [accuracy]} for name, mean in rows}
    values = scored | {
        "fidelity": {
            "space": "cnn-glyphs-128",
            "frechet": 10 * (1 - accuracy),
            "mind": 1 - accuracy,
        }
    }
    return {
        "scope": "local",
        "warnings": [],
        "release": values,
        "identity": IDENTITY | {"release": release} | identity,
    }


def write_run(folder: Path, recipe: str, target: float, accuracy: float, **identity) -> Path:
    folder.mkdir(parents=True)
    (folder / "ledger.json").write_text(ledger_text(ledger_of(recipe, target, 10 / target)))
    (folder / "metrics.json").write_text(json.dumps(metrics_of(accuracy, **identity)))
    return folder


def call(*words: str) -> tuple[int, str]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = 0
        try:
            main(words)
        except SystemExit as ended:
            code = 1
            print(ended.code)
    return code, " ".join(out.getvalue().split())


@pytest.fixture
def desk(here, environment):
    environment["COLUMNS"] = "200"
    return here


RECIPES = ("dpdm", "dp-merf", "dp-feta", "feta-pro", "rpgen", "full")


def test_six_recipes_become_one_table_and_one_plot(desk):
    folders = [
        str(write_run(desk / f"{name}-{target}", name, target, 0.7 + 0.03 * i + 0.002 * target))
        for i, name in enumerate(RECIPES)
        for target in (1, 10)
    ]
    code, text = call(*folders)
    assert code == 0 and "warning" not in text, text
    rows = list(csv.DictReader((desk / "evaluation/comparison.csv").open()))
    assert len(rows) == 12 and {row["recipe"] for row in rows} == set(RECIPES)
    assert not any(row["differs"] for row in rows)
    first = next(row for row in rows if row["recipe"] == "dpdm" and row["target"] == "1")
    assert float(first["cnn"]) == pytest.approx(0.702) and float(
        first["distance"]
    ) == pytest.approx(2.98)
    assert float(first["mind"]) == pytest.approx(0.298)
    # Recomputed from the record (σ = 10, δ = 1e-4), not read from the file
    assert 0.3 < float(first["epsilon"]) < 0.6
    assert (
        desk / "evaluation/comparison.png"
    ).stat().st_size > 10_000 and "local, not to be shared" in text
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (desk / "evaluation").iterdir()
    )


def test_runs_of_another_hold_out_are_marked_and_hollow(desk):
    folders = [
        write_run(desk / "a", "dpdm", 1, 0.7),
        write_run(desk / "b", "full", 1, 0.8),
        write_run(desk / "c", "full", 10, 0.9, holdout="x" * 64),
        write_run(
            desk / "d",
            "rpgen",
            10,
            0.9,
            extractor="y" * 64,
            training="paper, 50 epochs, last epoch",
        ),
    ]
    rows = [read_run(folder) for folder in folders]
    runs, warnings = with_differences(rows)
    marks = dict(zip(runs["run"].str[-1], runs["differs"], strict=True))
    assert marks == {"a": "", "b": "", "c": "hold-out", "d": "extractor, schedule"}
    assert [warning.partition(": ")[2] for warning in warnings] == [
        f"different or unknown {what}: do not compare them with other runs"
        for what in ("hold-out", "extractor", "schedule")
    ]
    plot_comparison(runs, "cnn", desk / "plot.svg")
    plot_comparison(with_differences(rows[:2])[0], "cnn", desk / "clean.svg")
    assert (
        "hollow" in (desk / "plot.svg").read_text()
        and "hollow" not in (desk / "clean.svg").read_text()
    )
    assert "local: not for release" in (desk / "plot.svg").read_text()
    code, text = call(*map(str, folders))
    assert (
        code == 0
        and "c: different or unknown hold-out" in text
        and "d: different or unknown extractor" in text
    )


@pytest.mark.filterwarnings("error")
def test_runs_of_one_seed_are_plotted(desk):
    row = read_run(write_run(desk / "a", "dpdm", 1, 0.7)) | {"cnn_std": None}
    runs, _ = with_differences([row, row | {"target": 10.0}])
    plot_comparison(runs, "cnn", desk / "plot.png")
    assert (desk / "plot.png").is_file()


def test_an_edited_ledger_or_unknown_evaluation_is_marked(desk):
    folders = [
        write_run(desk / name, "full", 1, 0.8) for name in ("old", "edited", "other", "good")
    ]
    old, edited, other, _ = folders
    (old / "metrics.json").write_text(json.dumps(metrics_of(0.8) | {"identity": {}}))
    content = json.loads((edited / "ledger.json").read_text())
    (edited / "ledger.json").write_text(json.dumps(content | {"target": 2.0}))
    (other / "metrics.json").write_text(json.dumps(metrics_of(0.8, version="another")))
    runs, warnings = with_differences([read_run(folder) for folder in folders])
    marks = [{*part.split(", ")} for part in runs["differs"].sort_index()]
    assert (
        {"data set", "hold-out", "data"} <= marks[0]
        and "ledger" in marks[1]
        and marks[2:] == [{"ledger"}, {""}]
    )
    for text in (f"{old}: different or unknown hold-out", "edited", "are for different data"):
        assert any(text in warning for warning in warnings)


def test_what_is_missing_or_broken_is_one_sentence(desk, monkeypatch):
    nothing = (
        "error: nothing to compare: name folders with metrics.json and ledger.json, or give --dvc"
    )
    assert call() == (1, nothing)
    folder = write_run(desk / "a", "full", 1, 0.8)
    (folder / "metrics.json").unlink()
    for place in (folder, desk):
        code, text = call(str(place))
        assert code == 1 and text.startswith("error: ") and "Traceback" not in text
    (folder / "metrics.json").write_text("[]")
    with pytest.raises(DataError, match="no evaluation of a release"):
        read_run(folder)
    with pytest.raises(BudgetError, match="does not exist"):
        read_run(desk)
    (folder / "metrics.json").write_text(json.dumps(metrics_of(0.8)))
    assert call(str(folder), "--classifier", "wrn")[0] == 1
    failed = subprocess.CompletedProcess(
        [], 253, "", "ERROR: you are not inside of a DVC repository\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    code, text = call("--dvc")
    assert code == 1 and "not inside of a DVC repository" in text


def without_lists(value):
    """Return a metrics file in the form that DVC shows."""
    if not isinstance(value, dict):
        return value
    return {key: without_lists(part) for key, part in value.items() if not isinstance(part, list)}


def shown(*rows: tuple[str | None, str, dict | None, str]) -> list[dict]:
    """Build the output of `dvc exp show --json`: first the workspace, then experiments of one
    commit.
    """

    def row(name: str | None, revision: str, ledger: dict | None, release: str) -> dict:
        metrics = {"ledger.json": {"data": without_lists(ledger)}} if ledger else {}
        deps = {"artifacts/synthesize": {"hash": release, "size": 1, "nfiles": 2}}
        data = {"rev": revision, "metrics": metrics, "deps": deps}
        return {"rev": revision, "name": name, "data": data, "experiments": None}

    workspace, *found = (row(*one) for one in rows)
    failed = {"rev": "d" * 40, "name": "broken", "error": {"msg": "x"}, "experiments": None}
    groups = [{"revs": found}, {"revs": [failed], "executor": None, "name": "broken"}]
    return [workspace, row("main", "c" * 40, None, "none.dir") | {"experiments": groups}]


def test_experiments_are_joined_with_kept_numbers(tmp_path):
    """If only a free stage changes, the records and the ledger stay the same.

    So `calm-sea`, `again` and `late` have the same ledger, and only their releases differ.
    """
    one, two, other = (
        ledger_of(name, 1, 10, key)
        for name, key in (("feta-pro", "1"), ("rpgen", "2"), ("full", "3"))
    )
    keep_evaluation(tmp_path, metrics_of(0.8, "one.dir") | {"ledger": one})
    keep_evaluation(tmp_path, metrics_of(0.9, "two.dir") | {"ledger": two})
    keep_evaluation(tmp_path, metrics_of(0.1, "three.dir") | {"ledger": one})
    keep_evaluation(tmp_path, metrics_of(0.7, "four.dir") | {"ledger": one})
    rows = shown(
        (None, "workspace", two, "two.dir"),
        ("calm-sea", "a" * 40, one, "one.dir"),
        ("red-fox", "b" * 40, two, "two.dir"),
        ("new", "e" * 40, other, "three.dir"),
        ("again", "f" * 40, one, "four.dir"),
        ("late", "9" * 40, one, "three.dir"),
    )
    assert list(experiments(rows)["name"]) == [
        "main",
        "calm-sea",
        "red-fox",
        "new",
        "again",
        "late",
        "workspace",
    ]
    runs, left_out = rows_of_experiments(rows, tmp_path)
    found = [("calm-sea", 0.8), ("red-fox", 0.9), ("again", 0.7), ("late", 0.1)]
    assert [(run["run"], run["cnn"]) for run in runs] == found
    assert not any(run["problems"] for run in runs) and 0.3 < runs[0]["epsilon"] < 0.6
    assert [line.split(":")[0] for line in left_out] == ["main", "new"]
    assert all(
        rows_of_experiments(odd, tmp_path) == ([], []) for odd in ("nonsense", [{"data": 3}, 4], [])
    )


def test_kept_numbers_are_private_and_found_by_release(tmp_path):
    ledger = ledger_of("full", 1, 10)
    path = keep_evaluation(tmp_path, metrics_of(0.8, "one.dir") | {"ledger": ledger})
    assert (
        stat.S_IMODE(path.stat().st_mode) == 0o600
        and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    )
    for release, digest in (("one.dir", ledger["digest"]), ("../../one.dir", ledger["digest"])):
        assert find_evaluation(tmp_path, release, digest)
    for release, digest in (("one.dir", "other"), ("none.dir", ledger["digest"])):
        assert find_evaluation(tmp_path, release, digest) is None


def test_a_table_keeps_gaps_and_disarms_formulas(tmp_path):
    write_run(tmp_path / "a", "full", 1, 0.8)
    b = write_run(tmp_path / "b", "dpdm", 1, 0.7)
    content = json.loads((b / "metrics.json").read_text())
    # Evaluations of earlier versions lack this number, and stay readable
    del content["release"]["fidelity"]["mind"]
    (b / "metrics.json").write_text(json.dumps(content))
    assert read_run(b)["mind"] is None and read_run(b)["distance"] is not None
    del content["release"]["cnn"], content["release"]["fidelity"]
    (b / "metrics.json").write_text(json.dumps(content))
    runs, _ = with_differences([read_run(tmp_path / "a"), read_run(b)])
    assert classifiers_of(runs) == ["lr", "cnn"] and list(runs["recipe"]) == ["dpdm", "full"]
    assert runs[["cnn", "distance"]].isna().iloc[0].all() and ",,," in csv_of(runs).splitlines()[1]
    assert (
        csv_of(pd.DataFrame([{"class": "=1+1", "share": -0.5}])) == "class,share\n'=1+1,-0.5000\n"
    )


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "dvc").exists(), reason="needs dvc beside the interpreter"
)
def test_a_folder_has_the_hash_that_dvc_gives_it(tmp_path):
    release = tmp_path / "artifacts" / "synthesize"
    for name in ("a.npy", "B.txt", "png/0/1.png", "png.json", "été.txt"):
        (release / name).parent.mkdir(parents=True, exist_ok=True)
        (release / name).write_text(name)
    dvc = str(Path(sys.executable).parent / "dvc")
    environment = os.environ | {
        "DVC_NO_ANALYTICS": "1",
        "DVC_GLOBAL_CONFIG_DIR": str(tmp_path / "g"),
    }
    for words in (["init", "--no-scm", "-q"], ["add", "-q", "artifacts/synthesize"]):
        subprocess.run(
            [dvc, *words],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            timeout=60,
        )
    assert f"md5: {md5_of_folder(release)}" in (tmp_path / "artifacts/synthesize.dvc").read_text()


def test_the_table_shows_folders_without_their_common_part(capsys, environment):
    environment["COLUMNS"] = "160"
    assert short_names(["/a/b/one", "/a/b/two/x"]) == ["one", "two/x"]
    assert short_names(["/a/one", "/a"]) == ["one", "/a"]
    assert short_names(["/a/b"]) == ["/a/b"] and short_names(["/a", "a"]) == ["/a", "a"]
    row = {
        "recipe": "full",
        "target": 1.0,
        "epsilon": 1.0,
        "distance": None,
        "mind": 0.0931,
        "differs": "",
    }
    table = comparison_table(
        pd.DataFrame([row | {"run": "/runs/steps=[40]"}, row | {"run": "/runs/[red]"}]), []
    )
    assert "AUROC" in table.title, "it replaces accuracy if images have several labels"
    show_local([table], Path("comparison.csv"))
    # Without a terminal, no numbers are printed
    assert "steps" not in (text := capsys.readouterr().out) and "comparison.csv: local" in text
    with redirect_stdout(program.Terminal()) as screen:
        show_local([table], Path("comparison.csv"))
    text = screen.getvalue()
    assert (
        "steps=[40]" in text
        and "[red]" in text
        and "/runs" not in text
        and "MIND" in text
        and "0.0931" in text
    )
