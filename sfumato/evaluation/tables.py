"""The numbers of an evaluation as tables: CSV files and the screen. All of it is local."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd
from rich.table import Table

from sfumato.evaluation.membership import Attack
from sfumato.evaluation.plots import scored
from sfumato.storage.files import FORMULA


def csv_of(table: pd.DataFrame, numbers: str = "%.4f") -> str:
    """CSV with a header; a missing value stays empty. numbers: format of floats.

    A text that a spreadsheet would take for a formula gets a ' before it, by which it is shown and not computed.
    """
    safe = table.map(lambda value: f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value)
    return safe.to_csv(index=False, float_format=numbers, lineterminator="\n")


def measure_of(found: Mapping) -> str:
    """What classifiers are scored by: "accuracy", or "AUROC" for several labels."""
    return str(found.get("measure", "accuracy"))


def accuracy_table(found: dict) -> pd.DataFrame:
    rows = [
        {"model": f"{name}: {model}", "trained_on": name, measure_of(found): row["mean"], "std": row["std"]}
        for name, values in scored(found).items()
        for model, row in values.items()
    ]
    return pd.DataFrame(rows)


def class_table(found: dict) -> pd.DataFrame:
    rows = [
        {"trained_on": name, "classifier": model, **one}
        for name, values in scored(found).items()
        for model, row in values.items()
        for one in row["per_class"]
    ]
    return pd.DataFrame(rows).rename(columns={"mean": measure_of(found)})


def screen_tables(found: dict, attacks: Sequence[Attack] = ()) -> Iterator[Table | str]:
    """What the terminal shows: accuracy by training set and by class, fidelity, membership, the verdict."""
    sets = scored(found)
    names = list(next(iter(sets.values())))
    rows = ([name, *(percent(values[c]) for c in names)] for name, values in sets.items())
    measure = measure_of(found)
    title = f"{measure[0].upper()}{measure[1:]} on the real hold-out, % (local)"
    table = table_of(title, ["trained on", *names], rows)
    if "teacher" in found:
        share = f"{100 * found['teacher']['accuracy']:.1f}"
        table.caption = f"The teacher, a classifier that was released itself, has {share} %."
    yield table
    by_class = zip(*(sets["release"][name]["per_class"] for name in names), strict=True)
    rows = ([own[0]["class"], *map(percent, own)] for own in by_class)
    yield table_of("The release, class by class, % (local)", ["class", *names], rows)
    moved = {name: list(rows.values())[-1]["shifted"] for name, rows in sets.items()}
    moved |= {"teacher": found["teacher"]["shifted"]} if "teacher" in found else {}
    rows = ([name, *(f"{100 * share:.1f}" for share in shares.values())] for name, shares in moved.items())
    title = f"Accuracy of {names[-1]} on shifted hold-out images, % (local)"
    if moved["release"]:
        yield table_of(title, ["trained on", *moved["release"]], rows)
    measured = {name: values for name, values in found.items() if isinstance(values, dict) and "fidelity" in values}
    compared = pd.DataFrame({name: values["fidelity"] for name, values in measured.items()})
    if len(compared.columns):
        first = compared.iloc[:, 0]
        title = f"Fidelity to the real {first['reference']} images in {first['space']} (local)"
        keys = [key for key in map(str, first.index) if isinstance(first[key], float) and not key.endswith("_std")]
        rows = ([key.replace("_", " "), *map(number, compared.loc[key])] for key in keys)
        yield table_of(title, ["metric", *compared.columns], rows)
    if attacks:
        rows = (
            [one.name, f"{one.auc:.3f}", f"{one.low:.3f} to {one.high:.3f}", f"{100 * one.hits:.1f} %", one.outcome]
            for one in attacks
        )
        columns = ["attack", "AUC", "interval, 95 %", "found at 1 % false", ""]
        yield table_of("Membership inference (local)", columns, rows)
    shares, balanced = (found["verdict"][key] for key in ("accuracy", "balanced_accuracy"))
    rows = ([name, f"{100 * share:.1f}", f"{100 * balanced[name]:.1f}"] for name, share in shares.items())
    yield table_of("What a classifier can do, % (local)", ["what is used", measure, "mean over classes"], rows)
    yield f"Verdict: {found['verdict']['sentence']}"


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def number(value: float | None) -> str:
    return "–" if pd.isna(value) else f"{value:.4g}"


def percent(row: Mapping) -> str:
    """Mean ± standard deviation in per cent; only the mean of a single seed."""
    if pd.isna(row["mean"]):
        return "–"
    return f"{100 * row['mean']:.1f}" + ("" if pd.isna(row["std"]) else f" ± {100 * row['std']:.1f}")
