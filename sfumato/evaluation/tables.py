"""Tables with the numbers of an evaluation, for the terminal and the owner's report.

All tables are local.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from sfumato.errors import UNREADABLE, DataError, SfumatoError, explained
from sfumato.evaluation.downstream import FEWEST_OF_A_GROUP, SPECIFICITY
from sfumato.evaluation.identity import measured_another
from sfumato.evaluation.verdict import HANDED_OUT, classifier_rows
from sfumato.release.card import WORDS
from sfumato.release.report import Local, Picture, Table, picture
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.documents import read_json

INTERVAL = "95 % interval"


def tables_of(metrics: Mapping) -> Iterator[Table]:
    """Yield tables of the content of metrics.json, for the terminal and the report."""
    by_set = {
        name: classifier_rows(values)
        for name, values in metrics.items()
        if isinstance(values, dict)
    }
    sets = {name: rows for name, rows in by_set.items() if rows}
    if not sets:  # the hold-out was unusable
        return
    measure = metrics.get("measure", "accuracy")  # "AUROC" if images have several labels
    yield from accuracy_tables(metrics, sets, measure)
    results = {
        f"{name}: {model}": row for name, rows in sets.items() for model, row in rows.items()
    }
    results |= {name: metrics[name] for name in HANDED_OUT if name in metrics}
    # Metrics of older versions have no "per_class"
    rows = ([name, *reliability(row)] for name, row in results.items() if row.get("per_class"))
    heads = ["classifier", *reliability_heads(measure)]
    note = (
        "The interval is found by resampling the hold-out, person by person if persons are known. "
        "“Below the mean” is how far the worst class lies below the mean over the classes."
    )
    yield table_of("How reliable these numbers are, % (local)", heads, rows, note)
    yield from detailed_tables(results, measure)
    yield from fidelity_tables(metrics)
    if "public_student" in metrics:
        yield public_student_table(metrics["public_student"], measure)
    verdict = metrics["verdict"]
    balanced = verdict["balanced_accuracy"]
    if not balanced:  # not judged
        return
    rows = (
        [name, per_cent(share), per_cent(balanced[name])]
        for name, share in verdict["accuracy"].items()
    )
    heads = ["classifier, or its training set", measure, "mean over classes"]
    yield table_of("The best classifiers, compared with guessing, % (local)", heads, rows)


def reliability_heads(measure: str) -> list[str]:
    return [INTERVAL, "worst class", f"its {measure}", "below the mean", "calibration error"]


def accuracy_tables(metrics: Mapping, sets: Mapping[str, dict], measure: str) -> Iterator[Table]:
    """Yield tables of accuracies on the real hold-out: for all sets, for each class of the release,
    and on distorted images.

    sets: result of `classifier_rows`, by the set on which the classifiers were trained.
    """
    names = list(next(iter(sets.values())))
    note = " ".join(
        f"The {name}, a released classifier, reaches {per_cent(metrics[name]['accuracy'])} %."
        for name in HANDED_OUT
        if name in metrics
    )
    rows = ([name, *(percent(values[c]) for c in names)] for name, values in sets.items())
    title = f"{measure[0].upper()}{measure[1:]} on the real hold-out, % (local)"
    yield table_of(title, ["trained on", *names], rows, note)
    by_class = zip(*(sets["release"][name]["per_class"] for name in names), strict=True)
    rows = ([of_class[0]["class"], *map(percent, of_class)] for of_class in by_class)
    yield table_of("The release, class by class, % (local)", ["class", *names], rows)
    shifted = {name: values[names[-1]]["shifted"] for name, values in sets.items()}
    shifted |= {name: metrics[name]["shifted"] for name in HANDED_OUT if name in metrics}
    if shifted["release"]:
        rows = ([name, *map(per_cent, shares.values())] for name, shares in shifted.items())
        title = f"Accuracy of {names[-1]} on distorted hold-out images, % (local)"
        yield table_of(title, ["trained on", *shifted["release"]], rows)


def fidelity_tables(metrics: Mapping) -> Iterator[Table]:
    """Yield a table of the fidelity metrics of each set, such as distances to real images.

    If no fidelity was measured, yield nothing.
    """
    measured = {
        name: values["fidelity"]
        for name, values in metrics.items()
        if isinstance(values, dict) and "fidelity" in values
    }
    if not measured:
        return
    frame = pd.DataFrame(measured)
    first = frame.iloc[:, 0]
    keys = [
        key
        for key in map(str, first.index)
        if isinstance(first[key], float) and not key.endswith("_std")
    ]
    spreads = frame.reindex([f"{key}_std" for key in keys])
    rows = (
        [key.replace("_", " "), *map(number, frame.loc[key], spreads.loc[f"{key}_std"])]
        for key in keys
    )
    if keys:  # `keys` is empty if only the test for copies was requested
        title = (
            f"Fidelity to real images ({first['reference']}), "
            f"feature space {first['space']} (local)"
        )
        yield table_of(title, ["metric", *frame.columns], rows)


def public_student_table(student: Mapping, measure: str) -> Table:
    title = f"Second student: a linear classifier on features of {student['network']}, % (local)"
    heads = ["trained on", measure, *reliability_heads(measure)]
    rows = ([name, percent(row), *reliability(row)] for name, row in student["trained_on"].items())
    note = "The features do not depend on the release. Compare these rows only with each other."
    return table_of(title, heads, rows, note)


def detailed_tables(results: Mapping[str, Mapping], measure: str) -> Iterator[Table]:
    """Yield a table of AUROC and sensitivities, and a table of the accuracy for each value of the
    column that `data.compare_by` names.

    A table is left out if its numbers were not measured. results: result of `aggregate`, by
    classifier.
    """
    quoted = {name: row["two_classes"] for name, row in results.items() if "two_classes" in row}
    if quoted:
        cells = {
            name: [(per_cent(entry["mean"]), interval(entry)) for entry in entries]
            for name, entries in quoted.items()
        }
        heads = [
            head for entry in next(iter(quoted.values())) for head in (entry["what"], INTERVAL)
        ]
        title = f"AUROC, and sensitivity at {per_cent(SPECIFICITY)} % specificity, % (local)"
        yield table_of(
            title, ["classifier", *heads], ([name, *chain(*each)] for name, each in cells.items())
        )
    columns = {name: row["by_column"] for name, row in results.items() if "by_column" in row}
    if columns:
        rows = (
            [
                name,
                group["group"],
                str(group["images"]),
                per_cent(group["mean"]),
                interval(group),
                per_cent(column["gap"]),
            ]
            for name, column in columns.items()
            for group in column["groups"]
        )
        note = (
            f"Groups of fewer than {FEWEST_OF_A_GROUP} images are merged into “others”. This group "
            f"is shown only if it has at least {FEWEST_OF_A_GROUP} images."
        )
        title = "Group by group, % (local)"
        yield table_of(
            title,
            ["classifier", "group", "images", measure, INTERVAL, "best minus worst"],
            rows,
            note,
        )


def table_of(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], note: str = ""
) -> Table:
    return Table(title, tuple(columns), tuple(map(tuple, rows)), note)


def read_local(metrics: Path, evaluation: Path, artifacts: Path) -> Local:
    """Read the local content of the owner's report.

    The content consists of the results of `stage evaluate`, and of pictures that earlier stages
    wrote into their artifacts. Missing files, results of another release, and pictures of
    incomplete artifacts are left out.
    Raises DataError if the results cannot be read.
    """
    numbers = Local()
    another = False
    causes = (*UNREADABLE, LookupError, RuntimeError)
    with explained(
        DataError,
        lambda error: f"{metrics} cannot be read ({error!r}). Run `stage evaluate` again",
        causes=causes,
    ):
        if metrics.is_file():
            content = read_json(metrics)
            another = measured_another(content, artifacts / "synthesize")
            warnings = tuple(map(str, content.get("warnings", ())))
            numbers = Local(content["verdict"]["sentence"], tuple(tables_of(content)), warnings)
    plots = tuple(
        picture(path, path.stem, "computed from real images")
        for path in sorted(evaluation.glob("*.png"))
    )
    if another:
        numbers = Local()
        plots = ()
    pictures: list[Picture] = []
    for stage, caption in WORDS["pictures"].items():
        try:
            files = sorted((artifacts / stage).glob("*.png"))
            if files:
                read_artifact(artifacts / stage, stage)
        except SfumatoError:  # the artifact is incomplete, so its pictures may be wrong
            continue
        pictures += [picture(path, f"{stage}, {path.stem}", caption) for path in files]
    return numbers._replace(plots=plots, pictures=tuple(pictures))


def number(value: float | None, spread: float | None = None) -> str:
    if pd.isna(value):
        return "–"
    if pd.isna(spread):
        return f"{value:.4g}"
    return f"{value:.4g} ± {spread:.4g}"


def reliability(row: Mapping) -> Iterator[str]:
    """Yield the cells for `reliability_heads`, in per cent, or "–" for a missing number.

    If images have several labels, AUROC replaces accuracy.
    """
    means = {entry["class"]: entry["mean"] for entry in row["per_class"]}
    worst = min(means, key=lambda name: means[name])
    yield interval(row)
    yield worst
    yield per_cent(means[worst])
    yield per_cent(np.mean([*means.values()]) - means[worst])
    yield per_cent(row["calibration"]) if "calibration" in row else "–"


def interval(row: Mapping) -> str:
    return " to ".join(map(per_cent, row.get("interval", ()))) or "–"


def per_cent(share: float) -> str:
    return f"{100 * share:.1f}"


def percent(row: Mapping) -> str:
    """Format the mean ± the standard deviation, in per cent. For one seed, format only the mean."""
    if pd.isna(row["mean"]):
        return "–"
    if not pd.isna(row["std"]):
        return f"{per_cent(row['mean'])} ± {per_cent(row['std'])}"
    return per_cent(row["mean"])
