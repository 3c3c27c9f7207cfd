"""Compare runs in a table and a plot of accuracy by ε. Warn if the runs are not comparable.

The result is local, because accuracies are measured on real images. Runs are folders with
`metrics.json` and `ledger.json`, or the experiments that `dvc exp show` lists in the current
folder. ε is computed again from each ledger.

    python benchmarks/compare_runs.py runs/*
    python benchmarks/compare_runs.py --dvc
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from axes import LEGEND, log_ticks, on_a_grid
from csv_tables import csv_of
from matplotlib import colormaps

from sfumato.errors import ConfigError, DataError, SfumatoError, explained
from sfumato.evaluation.identity import EVALUATIONS
from sfumato.evaluation.plots import CAPTION, new_figure, save
from sfumato.evaluation.tables import number, percent, table_of
from sfumato.evaluation.verdict import classifier_rows
from sfumato.privacy.check import check_ledger
from sfumato.privacy.ledger import KEYS, read_ledger
from sfumato.release.report import Table
from sfumato.settings.stage import LEDGER
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_local
from sfumato.storage.in_use import use_until_the_end
from stages.screen import show_local
from stages.state import EVALUATION, check_local, state_dir

IDENTITY_COLUMNS = {  # Entry of an evaluation's identity -> column
    "dataset": "data set",
    "data": "data",
    "holdout": "hold-out",
    "extractor": "extractor",
    "reference": "reference",
    "training": "schedule",
}
DVC_COLUMNS = {  # Key in `dvc exp show --json` -> column
    "rev": "revision",
    "name": "name",
    "data|deps|artifacts/synthesize|hash": "release",
    "data|metrics|ledger.json|data|digest": "ledger",
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs")
    parser.add_argument(
        "--dvc", action="store_true", help="also compare the experiments of `dvc exp show`"
    )
    parser.add_argument("--classifier", help="classifier to plot; default: cnn, or else the first")
    parser.add_argument("--out", type=Path, default=EVALUATION, help="folder for table and plot")
    try:
        compare(**vars(parser.parse_args(words)))
    except SfumatoError as error:
        sys.exit(f"error: {error}")


def compare(runs: Sequence[Path], dvc: bool, classifier: str | None, out: Path) -> None:
    """Write comparison.csv and comparison.png, and show the table on a terminal."""
    if not runs and not dvc:
        raise ConfigError(
            "nothing to compare: name folders with metrics.json and ledger.json, or give --dvc"
        )
    check_local("--out", out / "comparison.csv")
    # From here until the program ends, `stage forget` fails, because it would delete numbers from
    # real images while this program reads and copies them
    use_until_the_end(state_dir())
    rows = [read_run(folder) for folder in runs]
    if dvc:
        rows += listed_experiments()
    if not rows:
        raise DataError(
            "found no run to compare: run `stage evaluate` in the project (`dvc repro` and `dvc "
            "exp run` do so), and try again"
        )
    table, warnings = with_differences(rows)
    names = classifiers_of(table)
    if not names:
        raise DataError(
            "none of these runs has an accuracy to compare: see the verdict in each metrics.json "
            "for the reason"
        )
    chosen = classifier or ("cnn" if "cnn" in names else names[0])
    if chosen not in names:
        raise ConfigError(
            f"--classifier {chosen}: none of these runs has an accuracy for this classifier. "
            f"Expected one of {', '.join(names)}"
        )
    write_local(out / "comparison.csv", csv_of(table, ".6g").encode())
    plot_comparison(table, chosen, out / "comparison.png")
    show_local([comparison_table(table, names)], out / "comparison.csv")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(
        f"{out / 'comparison.csv'}, {out / 'comparison.png'}: local, not to be shared",
        file=sys.stderr,
    )


def listed_experiments() -> list[dict]:
    """Return a row for each experiment that `dvc exp show` lists.

    The local numbers come from the state directory.
    """
    listing = "dvc exp show --json"
    # -P: no module in the current folder can replace DVC
    done = subprocess.run(
        [sys.executable, "-P", "-m", *listing.split()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[0].removeprefix(
            "ERROR: "
        )
        raise ConfigError(
            f"`{listing}` failed ({reason}): run this program in the repository of the experiments"
        )
    with explained(
        ConfigError,
        lambda error: (
            f"the output of `{listing}` is not JSON ({error}): try another version of dvc"
        ),
    ):
        shown = json.loads(done.stdout)
    rows, left_out = rows_of_experiments(shown, state_dir())
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return rows


def read_run(folder: Path) -> dict:
    """Read a folder's metrics.json and ledger.json as a row.

    Raises BudgetError for an invalid ledger, DataError for invalid metrics.
    """
    return row_of(str(folder), read_ledger(folder / LEDGER), read_metrics(folder / "metrics.json"))


def read_metrics(path: Path) -> dict:
    missing = f"{path} does not exist: run `stage evaluate` in that project, or omit the folder"
    again = "run `stage evaluate` again"
    with explained(
        DataError, lambda error: f"{path} cannot be read ({error}): {again}", missing=missing
    ):
        content = read_json(path)
    if (
        not isinstance(content, dict)
        or content.get("scope") != "local"
        or not isinstance(content.get("release"), dict)
    ):
        raise DataError(f"{path} contains no evaluation of a release: {again}")
    return content


def rows_of_experiments(shown: object, state: Path) -> tuple[list[dict], list[str]]:
    """Build rows from the output of `dvc exp show --json`, and list what was left out, and why."""
    rows: dict[tuple[str, str], dict | None] = {}
    left_out = []
    for name, release, ledger in experiments(shown)[["name", "release", "ledger"]].itertuples(
        index=False
    ):
        if pd.isna(release) or pd.isna(ledger):
            left_out.append(f"{name}: the experiment has no ledger or no release")
        elif (release, ledger) not in rows:  # DVC may list a release twice, once as the workspace
            kept = find_evaluation(state, release, ledger)
            if kept is None:
                left_out.append(
                    f"{name}: its release has no local numbers. To write them, run `stage "
                    "evaluate` in that experiment"
                )
            # DVC's output omits the lists in the ledger, so the stored ledger is used.
            rows[release, ledger] = kept and row_of(name, kept["ledger"], kept)
    return [row for row in rows.values() if row], left_out


def experiments(shown: object) -> pd.DataFrame:
    """Return the DVC_COLUMNS of all commits and experiments in `dvc exp show --json`.

    The workspace comes last: it repeats a commit or an experiment, and the caller keeps only the
    first of equal rows.
    """
    commits = [row for row in shown if isinstance(row, dict)] if isinstance(shown, list) else []
    groups = [group for row in commits for group in row.get("experiments") or ()]
    rows = [*commits, *(row for group in groups for row in group.get("revs") or ())]
    normal = pd.json_normalize([row for row in rows if isinstance(row.get("data"), dict)], sep="|")
    table = normal.reindex(columns=list(DVC_COLUMNS)).rename(columns=DVC_COLUMNS)
    revision = table["revision"].astype(str)
    workspace = revision == "workspace"
    table["name"] = table["name"].astype(object).fillna(revision.where(workspace, revision.str[:7]))
    return pd.concat([table[~workspace], table[workspace]])


def row_of(name: str, ledger: Mapping, metrics: Mapping) -> dict:
    """Build a run's row: recomputed ε, results, IDENTITY_COLUMNS, and the ledger's "problems"."""
    spent, problems = check_ledger(ledger, delta=ledger["delta"])
    identity = {key: str(value) for key, value in metrics.get("identity", {}).items()}
    versions = set() if problems else {record["data_version"] for record in ledger["records"]}
    if identity and versions - {"", identity.get("version")}:
        problems = [*problems, "ledger and evaluation are for different data"]
    row: dict = {"run": name, "recipe": str(ledger["recipe"]), "target": float(ledger["target"])}
    row |= {"epsilon": spent, "delta": float(ledger["delta"])}
    for classifier, scored in classifier_rows(metrics["release"]).items():
        row |= {classifier: scored["mean"], f"{classifier}_std": scored["std"]}
    fidelity = metrics.get("plain", metrics["release"]).get("fidelity", {})
    row["distance"] = fidelity.get("fid", fidelity.get("frechet"))
    row["mind"] = fidelity.get("mind")
    row["space"] = fidelity.get("space") if row["distance"] is not None else None
    return (
        row
        | {word: identity.get(key) for key, word in IDENTITY_COLUMNS.items()}
        | {"problems": problems}
    )


def find_evaluation(state: Path, release: str, ledger: str) -> dict | None:
    """Return the stored evaluation of a release, or None if there is none.

    release: hash of the release; ledger: digest of its ledger.
    """
    path = state / EVALUATIONS / f"{Path(release).name}.json"
    if not path.is_file():
        return None
    content = read_metrics(path)
    kept = content.get("ledger")
    if isinstance(kept, dict) and {*kept, "apart"} == KEYS and kept["digest"] == ledger:
        return content
    return None


def with_differences(rows: Sequence[dict]) -> tuple[pd.DataFrame, list[str]]:
    """Return a table of the runs, sorted by recipe and ε, and a warning per kind of difference.

    Accuracies are in [0, 1], or NaN if a run was not evaluated by the classifier. For each run, the
    column "differs" lists the reasons not to compare the run with others. A reason is the name of a
    column (one of IDENTITY_COLUMNS, or "delta") in which the run's value is missing or is not the
    most common value. Among equally common values, the first counts as the most common. If a column
    is empty for all runs, it is no reason. If the run's ledger is invalid, "ledger" is a reason,
    too.
    """
    runs = pd.DataFrame(rows)
    warnings = [
        f"{row['run']}: the ledger has a problem: {problem}"
        for row in rows
        for problem in row["problems"]
    ]
    marks = pd.DataFrame(index=runs.index)
    for word in (*IDENTITY_COLUMNS.values(), "delta"):
        counts = runs[word].value_counts(sort=False)  # missing values are not counted
        differs = runs[word] != counts.idxmax() if len(counts) else runs[word].notna()
        marks[word] = differs.map({True: word, False: ""})
        names = list(runs["run"][differs])
        if names:
            named = ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
            unlike = f"different or unknown {word}"
            warnings.append(f"{named}: {unlike}: do not compare them with other runs")
    marks["ledger"] = ["ledger" if row["problems"] else "" for row in rows]
    runs["differs"] = [", ".join(filter(None, row)) for row in marks.itertuples(index=False)]
    measured = [column for name in classifiers_of(runs) for column in (name, f"{name}_std")]
    columns = [
        "run",
        "recipe",
        "target",
        "epsilon",
        "delta",
        *measured,
        "distance",
        "mind",
        "space",
        "differs",
    ]
    return runs.sort_values(["recipe", "target", "run"])[columns], warnings


def classifiers_of(runs: pd.DataFrame) -> list[str]:
    return [name.removesuffix("_std") for name in runs.columns if name.endswith("_std")]


def comparison_table(runs: pd.DataFrame, classifiers: list[str]) -> Table:
    rows = []
    for name, row in zip(short_names(list(runs["run"])), runs.to_dict("records"), strict=True):
        accuracies = [percent({"mean": row[key], "std": row[f"{key}_std"]}) for key in classifiers]
        cost = f"{row['target']:g}", f"{row['epsilon']:.4g}"
        distances = number(row["distance"]), number(row["mind"])
        rows.append([name, row["recipe"], *cost, *accuracies, *distances, row["differs"]])
    columns = ["run", "recipe", "target", "ε", *classifiers, "distance", "MIND", "differs in"]
    title = "Runs (local). Accuracy on the real hold-out, or AUROC for several labels, %"
    return table_of(title, columns, rows)


def short_names(names: list[str]) -> list[str]:
    """Remove the common folder from the names."""
    if len(names) < 2 or len({Path(name).is_absolute() for name in names}) > 1:
        return names
    folder = Path(os.path.commonpath(names))
    return [str(Path(name).relative_to(folder)) if Path(name) != folder else name for name in names]


def plot_comparison(runs: pd.DataFrame, classifier: str, path: Path) -> None:
    """Plot one classifier's accuracy against ε, one line per recipe.

    A point is the mean of the runs with one target ε, ± their standard deviation. If there is only
    one run, the standard deviation is over the seeds of its classifier. Runs that are not
    comparable are hollow and not connected.
    """
    runs = runs.dropna(subset=[classifier])
    groups = runs.groupby("recipe", sort=False)
    figure = new_figure(7.5, 4.4)
    axes = figure.subplots()
    for i, (recipe, of_recipe) in enumerate(groups):
        style = {"marker": "osD^vP*X"[i % 8], "color": colormaps["tab20"](2 * i % 20 + i // 10 % 2)}
        odd = of_recipe[of_recipe["differs"] != ""]
        hollow = {"markerfacecolor": "white", "linestyle": "none", "markersize": 7}
        axes.errorbar(odd["epsilon"], 100 * odd[classifier], **style, **hollow)
        targets = of_recipe[of_recipe["differs"] == ""].groupby("target")
        over_seeds = targets[f"{classifier}_std"].first().astype(float)
        spreads = targets[classifier].std().fillna(over_seeds).fillna(0.0)
        line = {"capsize": 3, "linewidth": 1.3, "markersize": 6, "label": recipe}
        means = targets[classifier].mean()
        axes.errorbar(targets["epsilon"].mean(), 100 * means, yerr=100 * spreads, **line, **style)
    log_ticks(axes, {round(target, 6): f"{target:g}" for target in runs["target"]})
    axes.set(
        xlabel="ε, log scale", ylabel=f"accuracy (or AUROC) of {classifier} on the real hold-out, %"
    )
    on_a_grid(axes, "y")
    axes.set_title(f"Accuracy against privacy, by recipe ({CAPTION})", fontsize=10)
    title = "hollow: not comparable" if (runs["differs"] != "").any() else None
    figure.legend(loc="outside right upper", title=title, title_fontsize=8, **LEGEND)
    save(figure, path)


if __name__ == "__main__":
    main()
