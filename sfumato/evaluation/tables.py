"""The numbers of an evaluation as tables: CSV files and the screen. All of it is local."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from sfumato.evaluation.plots import scored
from sfumato.storage.files import csv_text


def accuracy_table(found: dict) -> str:
    rows = (
        {"model": f"{name}: {model}", "trained_on": name, "accuracy": row["mean"], "std": row["std"]}
        for name, values in scored(found).items()
        for model, row in values.items()
    )
    return csv_text(rows, {"model": "", "trained_on": "", "accuracy": ".4f", "std": ".4f"})


def class_table(found: dict) -> str:
    rows = (
        {"trained_on": name, "classifier": model, "accuracy": one["mean"]} | one
        for name, values in scored(found).items()
        for model, row in values.items()
        for one in row["per_class"]
    )
    return csv_text(rows, {"trained_on": "", "classifier": "", "class": "", "accuracy": ".4f", "std": ".4f"})


def screen_tables(found: dict) -> Iterator[Table | str]:
    """What the terminal shows: accuracy by training set and by class, fidelity, complexity, the verdict."""
    sets = scored(found)
    classifiers = list(next(iter(sets.values())))
    table = Table("trained on", *classifiers, title="Accuracy on the real hold-out, % (local)")
    for name, values in sets.items():
        table.add_row(name, *(percent(values[c]) for c in classifiers))
    if "teacher" in found:
        share = f"{100 * found['teacher']['accuracy']:.1f}"
        table.caption = f"The teacher, a classifier that was released itself, has {share} %."
    yield table
    table = Table("class", *classifiers, title="The release, class by class, % (local)")
    for rows in zip(*(sets["release"][name]["per_class"] for name in classifiers), strict=True):
        table.add_row(rows[0]["class"], *(percent(row) for row in rows))
    yield table
    compared = {name: found[name]["fidelity"] for name in sets if "fidelity" in found[name]}
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
    verdict = found["verdict"]
    table = Table("what is used", "accuracy", "mean over classes", title="What a classifier can do, % (local)")
    for name, share in verdict["accuracy"].items():
        table.add_row(name, f"{100 * share:.1f}", f"{100 * verdict['balanced_accuracy'][name]:.1f}")
    yield table
    yield f"Verdict: {verdict['sentence']}"


def percent(row: dict) -> str:
    """Mean ± standard deviation in per cent; the mean alone of a single seed."""
    return f"{100 * row['mean']:.1f}" + (f" ± {100 * row['std']:.1f}" if row["std"] is not None else "")
