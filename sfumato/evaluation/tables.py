"""The numbers of an evaluation as tables: CSV files, the screen and the owner's report. All of it is local."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from sfumato.errors import UNREADABLE, DataError, SfumatoError, explained
from sfumato.evaluation.downstream import FEWEST
from sfumato.evaluation.plots import scored
from sfumato.release.report import Local, Table, picture
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.documents import read_json
from sfumato.storage.files import csv_text

SEEN = {  # stages whose pictures the owner's report shows
    "auxiliary": "drawn by the generator",
    "refine": "drawn by the generator, fitted further",
    "adversarial": "drawn by the generator that a discriminator taught",
    "select": "public images that were chosen",
    "pretrain": "what the warm-up saw",
    "saliency": "noisy gradient norms",
}


def csv_of(table: pd.DataFrame, numbers: str = ".4f") -> str:
    """CSV with a header; a missing value stays empty. numbers: format of floats."""
    forms = {str(name): numbers if pd.api.types.is_float_dtype(kind) else "" for name, kind in table.dtypes.items()}
    cells = table.astype(object).where(table.notna(), None)
    return csv_text((dict(zip(forms, row, strict=True)) for row in cells.itertuples(index=False)), forms)


def measure_of(found: Mapping) -> str:
    """What classifiers are scored by: "accuracy", or "AUROC" for several labels."""
    return str(found.get("measure", "accuracy"))


def tables_of(found: Mapping) -> Iterator[Table]:
    """What terminal and page show of metrics.json: accuracy by training set and class, fidelity, verdict."""
    sets, measure = scored(found), measure_of(found)
    if not sets:  # the hold-out could not judge
        return
    names = list(next(iter(sets.values())))
    note = ""
    if "teacher" in found:
        share = f"{100 * found['teacher']['accuracy']:.1f}"
        note = f"The teacher, a classifier that was released itself, has {share} %."
    rows = ([name, *(percent(values[c]) for c in names)] for name, values in sets.items())
    title = f"{measure[0].upper()}{measure[1:]} on the real hold-out, % (local)"
    yield table_of(title, ["trained on", *names], rows, note)
    by_class = zip(*(sets["release"][name]["per_class"] for name in names), strict=True)
    rows = ([own[0]["class"], *map(percent, own)] for own in by_class)
    yield table_of("The release, class by class, % (local)", ["class", *names], rows)
    moved = {name: list(rows.values())[-1]["shifted"] for name, rows in sets.items()}
    moved |= {"teacher": found["teacher"]["shifted"]} if "teacher" in found else {}
    rows = ([name, *(f"{100 * share:.1f}" for share in shares.values())] for name, shares in moved.items())
    title = f"Accuracy of {names[-1]} on shifted hold-out images, % (local)"
    if moved["release"]:
        yield table_of(title, ["trained on", *moved["release"]], rows)
    judged = {f"{name}: {model}": row for name, rows in sets.items() for model, row in rows.items()}
    judged |= {"teacher": found["teacher"]} if "teacher" in found else {}
    rows = ([name, *reliability(row)] for name, row in judged.items() if row.get("per_class"))  # older ones lack it
    heads = "classifier", "95 % interval", "worst class", measure, "below the mean", "calibration error"
    note = "Interval: over the hold-out, of persons where it has persons. Mean: over the classes."
    yield table_of("How far these can be relied on, % (local)", heads, rows, note)
    columns = {name: row["by_column"] for name, row in judged.items() if "by_column" in row}
    rows = (
        [name, one["group"], str(one["images"]), f"{100 * one['mean']:.1f}", next(reliability(one)), f"{gap:.1f}"]
        for name, column in columns.items()
        for gap, one in ((100 * column["gap"], group) for group in column["groups"])
    )
    note = f"Groups of fewer than {FEWEST} images are merged into others, or withheld if these are too few as well."
    if columns:
        title = "Group by group, % (local)"
        yield table_of(title, ["classifier", "group", "images", measure, heads[1], "best to worst"], rows, note)
    measured = {name: values for name, values in found.items() if isinstance(values, dict) and "fidelity" in values}
    compared = pd.DataFrame({name: values["fidelity"] for name, values in measured.items()})
    if len(compared.columns):
        first = compared.iloc[:, 0]
        title = f"Fidelity to the real {first['reference']} images in {first['space']} (local)"
        keys = [key for key in map(str, first.index) if isinstance(first[key], float) and not key.endswith("_std")]
        spreads = compared.reindex([f"{key}_std" for key in keys])
        cells = (map(number, compared.loc[key], spreads.loc[f"{key}_std"]) for key in keys)
        rows = ([key.replace("_", " "), *own] for key, own in zip(keys, cells, strict=True))
        yield table_of(title, ["metric", *compared.columns], rows)
    if "public_student" in found:
        title = f"A second student, linear on the public network {found['public_student']['network']}, % (local)"
        note = "It knows public pictures. Compare these rows with each other, and with nothing above."
        rows = ([name, percent(row), *reliability(row)] for name, row in found["public_student"]["trained_on"].items())
        yield table_of(title, ["trained on", measure, *heads[1:3], f"its {measure}", *heads[4:]], rows, note)
    shares, balanced = (found["verdict"][key] for key in ("accuracy", "balanced_accuracy"))
    rows = ([name, f"{100 * share:.1f}", f"{100 * balanced[name]:.1f}"] for name, share in shares.items())
    yield table_of("What a classifier can do, % (local)", ["what is used", measure, "mean over classes"], rows)


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], note: str = "") -> Table:
    return Table(title, tuple(columns), tuple(map(tuple, rows)), note)


def read_local(metrics: Path, evaluation: Path, artifacts: Path) -> Local:
    """What the owner's report shows beyond the release: numbers and plots of `stage evaluate`, noisy pictures.

    It skips what does not exist. Raises DataError if a file exists and cannot be read.
    """
    again, causes = "run `stage evaluate` again", (*UNREADABLE, LookupError, RuntimeError)
    with explained(DataError, lambda error: f"{metrics} cannot be read ({error!r}): {again}", causes=causes):
        found = read_json(metrics) if metrics.is_file() else {}
        tables = tuple(tables_of(found)) if found else ()
        warnings, verdict = tuple(map(str, found.get("warnings", ()))), found["verdict"]["sentence"] if found else ""
    plots = tuple(picture(path, path.stem, "rests on real images") for path in sorted(evaluation.glob("*.png")))
    pictures = []
    for stage, what in SEEN.items():
        try:
            files = sorted((artifacts / stage).glob("*.png"))
            if files:
                read_artifact(artifacts / stage, stage)
        except SfumatoError:  # not whole, so do not trust its pictures
            continue
        pictures += [picture(path, f"{stage}: {path.stem}", what) for path in files]
    return Local(verdict, tables, warnings, plots, tuple(pictures))


def number(value: float | None, spread: float | None = None) -> str:
    return "–" if pd.isna(value) else f"{value:.4g}" + ("" if pd.isna(spread) else f" ± {spread:.4g}")


def reliability(row: Mapping) -> Iterator[str]:
    """Of a classifier, in per cent: interval, worst class, its mean, the gap to the mean of all, calibration error."""
    yield " to ".join(f"{100 * end:.1f}" for end in row.get("interval", ())) or "–"
    worst = min(row["per_class"], key=lambda one: one["mean"])
    yield worst["class"]
    yield f"{100 * worst['mean']:.1f}"
    yield f"{100 * (np.mean([one['mean'] for one in row['per_class']]) - worst['mean']):.1f}"
    yield f"{100 * row['calibration']:.1f}" if "calibration" in row else "–"


def percent(row: Mapping) -> str:
    """Mean ± standard deviation in per cent; only the mean of a single seed."""
    if pd.isna(row["mean"]):
        return "–"
    return f"{100 * row['mean']:.1f}" + ("" if pd.isna(row["std"]) else f" ± {100 * row['std']:.1f}")
