"""The numbers of an evaluation as tables: CSV files and the screen. All of it is local."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO

from rich.table import Table

from sfumato.evaluation.plots import accuracies


def accuracy_table(found: dict) -> str:
    lines = ["model,trained_on,accuracy,std"]
    for name, values in scored(found).items():
        lines += [f"{name}: {model},{name},{row['mean']:.4f},{row['std']:.4f}" for model, row in values.items()]
    return "\n".join(lines) + "\n"


def class_table(found: dict) -> str:
    table = StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("trained_on", "classifier", "class", "accuracy", "std"))
    for name, values in scored(found).items():
        for model, row in values.items():
            writer.writerows(
                (name, model, one["class"], f"{one['mean']:.4f}", f"{one['std']:.4f}") for one in row["per_class"]
            )
    return table.getvalue()


def scored(found: dict) -> dict[str, dict]:
    """The accuracies of every set of images, by the set's name."""
    return {
        name: accuracies(values) for name, values in found.items() if isinstance(values, dict) and accuracies(values)
    }


def screen_tables(found: dict) -> Iterator[Table]:
    """What the terminal shows: accuracy by training set and by class, fidelity, complexity."""
    sets = {name: found[name] for name in scored(found)}
    classifiers = list(next(iter(scored(found).values())))
    table = Table("trained on", *classifiers, title="Accuracy on the real hold-out, % (local)")
    for name, values in sets.items():
        table.add_row(name, *(percent(values[c]) for c in classifiers))
    yield table
    release = scored(found)["release"]
    table = Table("class", *classifiers, title="The release, class by class, % (local)")
    for rows in zip(*(release[name]["per_class"] for name in classifiers), strict=True):
        table.add_row(rows[0]["class"], *(percent(row) for row in rows))
    yield table
    compared = {name: values["fidelity"] for name, values in sets.items() if "fidelity" in values}
    if compared:
        first = next(iter(compared.values()))
        shown = [key for key, value in first.items() if isinstance(value, float) and not key.endswith("_std")]
        title = f"Fidelity to the real {first['reference']} images in {first['space']} (local)"
        table = Table("metric", *compared, title=title)
        for key in shown:
            numbers = (f"{values[key]:.4g}" if key in values else "–" for values in compared.values())
            table.add_row(key.replace("_", " "), *numbers)
        yield table
    if "complexity" in found:
        table = Table("images", "entropy", "texture complexity", title="Complexity, nats (local)")
        for name, row in found["complexity"].items():
            table.add_row(name, f"{row['entropy']:.3f}", f"{row['texture_complexity']:.3f}")
        yield table


def percent(row: dict) -> str:
    return f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}"
