"""Runs side by side: the cost of each, from its ledger, and the utility of its release, from its local evaluation.

The table is local. A run is a folder with `metrics.json` and `ledger.json`, or a row of `dvc exp show --json`. DVC
knows the ledger of every experiment and the hash of its release, but not the numbers from real images. Those are in the
state directory, where `stage evaluate` keeps a copy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sfumato.data.images import ImageSet
from sfumato.data.prepare import fingerprint
from sfumato.errors import DataError, explained
from sfumato.evaluation.classifiers import NETWORKS
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.plots import accuracies
from sfumato.privacy.check import check_ledger, folder_md5, md5_of
from sfumato.privacy.ledger import KEYS, read_ledger
from sfumato.privacy.resolved import StagePlan
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.documents import read_json
from sfumato.storage.files import csv_text, replace_private

EVALUATIONS = "evaluations"  # in the state directory
RELEASE, LEDGER = "artifacts/synthesize", "ledger.json"  # as DVC names them
COMPARED = {  # entries of an evaluation's identity, and their words in a mark
    "dataset": "data set",
    "data": "data",
    "holdout": "hold-out",
    "extractor": "extractor",
    "reference": "reference",
    "training": "schedule",
    "networks": "networks",
}
UNKNOWN, WORKSPACE = "unknown", "workspace"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    `epsilon`: recomputed from the records. `metrics`: the local numbers. `marks`: why it cannot be compared.
    """

    name: str
    recipe: str
    target: float
    epsilon: float
    delta: float
    identity: Mapping[str, str]
    metrics: Mapping
    problems: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @property
    def accuracy(self) -> dict[str, dict]:
        """{classifier: {"mean", "std", …}} of the release."""
        return accuracies(self.metrics["release"])


# --- where runs come from ---------------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """The run of a folder that holds `metrics.json` and `ledger.json`.

    Raises BudgetError where the ledger cannot be read, DataError where the metrics cannot.
    """
    return run_of(str(folder), read_ledger(folder / LEDGER), read_metrics(folder / "metrics.json"))


def read_metrics(path: Path) -> dict:
    missing = f"{path} does not exist: run `stage evaluate` there, or leave the folder out"
    again = "run `stage evaluate` again"
    with explained(DataError, lambda error: f"{path} cannot be read ({error}): {again}", missing=missing):
        content = read_json(path)
    if not isinstance(content, dict) or content.get("scope") != "local" or not isinstance(content.get("release"), dict):
        raise DataError(f"{path} holds no evaluation of a release: {again}")
    return content


def runs_of_experiments(shown: object, state: Path) -> tuple[list[Run], list[str]]:
    """The runs of what `dvc exp show --json` printed, and the experiments that were left out, each with its reason.

    state: the state directory, which holds the local numbers of each release.
    """
    runs, left_out, seen = [], [], set()
    for name, data in experiments(shown):
        ledger = data.get("metrics", {}).get(LEDGER, {}).get("data")
        release = data.get("deps", {}).get(RELEASE, {}).get("hash")
        if not isinstance(ledger, dict) or "digest" not in ledger or not release:
            left_out.append(f"{name}: it has no ledger or no release")
        elif release not in seen:  # the workspace repeats an experiment or a commit
            seen.add(release)
            kept = find_evaluation(state, release, ledger["digest"])
            if kept is None:
                left_out.append(f"{name}: no local numbers for its release; `stage evaluate` there writes them")
            else:
                runs.append(run_of(name, kept["ledger"], kept))  # DVC shows a ledger without its lists
    return runs, left_out


def experiments(shown: object) -> list[tuple[str, dict]]:
    """(name, data) of every row of `dvc exp show --json`: commits, the workspace, and the experiments of each."""
    found: list[tuple[str, dict]] = []
    waiting = list(shown) if isinstance(shown, list) else []
    while waiting:
        row = waiting.pop(0)
        if not isinstance(row, dict):
            continue
        if isinstance(row.get("data"), dict):
            revision = str(row.get("rev"))
            found.append((row.get("name") or (revision if revision == WORKSPACE else revision[:7]), row["data"]))
        for group in row.get("experiments") or ():
            waiting += group.get("revs") or ()
    return sorted(found, key=lambda item: item[0] == WORKSPACE)  # the workspace last: it repeats one of the others


def run_of(name: str, ledger: Mapping, metrics: Mapping) -> Run:
    spent, problems = check_ledger(ledger, delta=ledger["delta"])
    records = ledger["records"]
    keys = {} if problems else {"dataset": "dataset_id", "version": "data_version"}
    known = {name: ", ".join(sorted({str(record[key]) for record in records})) for name, key in keys.items()}
    identity = known | {key: str(value) for key, value in metrics.get("identity", {}).items()}
    if known and known["version"] not in ("", identity["version"]):
        problems = [*problems, "its ledger is of other data than its evaluation"]
    return Run(
        name=name,
        recipe=str(ledger["recipe"]),
        target=float(ledger["target"]),
        epsilon=spent,
        delta=float(ledger["delta"]),
        identity=identity,
        metrics=metrics,
        problems=tuple(problems),
    )


# --- the local numbers of a release, kept in the state directory ------------------------------------------------------


def directory_hash(directory: Path) -> str:
    """The hash that DVC gives a directory, read file by file."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return folder_md5({path.relative_to(directory).as_posix(): md5_of(path.read_bytes()) for path in files})


def keep_evaluation(state: Path, metrics: Mapping) -> Path:
    """Write the numbers of a release under its hash, mode 0600 in a directory of mode 0700.

    `metrics` names the release in its "identity" and holds the whole "ledger".
    """
    path = state / EVALUATIONS / f"{metrics['identity']['release']}.json"
    replace_private(path, (json.dumps(metrics, indent=1) + "\n").encode())
    return path


def identity(
    plan: StagePlan[Evaluate],
    key: bytes,
    version: str,
    train: ImageSet,
    holdout: ImageSet,
    extractor: Extractor | None,
    release: Path,
) -> dict[str, str]:
    """What the numbers of an evaluation belong to: equal entries, comparable numbers.

    version: of the data card; key: of the dataset. Digests of real images are keyed: they say nothing without it.
    """
    settings = plan.settings
    deep = {name: network for name, network in NETWORKS[settings.schedule].items() if name in settings.classifiers}
    epochs = 50 if settings.schedule == "paper" and deep else settings.epochs
    amount = f"{settings.steps} steps" if settings.steps else f"{epochs} epochs"
    return {
        "dataset": plan.dataset_id,
        "version": version,
        "data": fingerprint(train, key),
        "holdout": fingerprint(holdout, key),
        "extractor": extractor.digest if extractor else "none",
        "reference": settings.reference,
        "training": f"{settings.schedule}, {amount}, {settings.choice} epoch",
        "networks": ", ".join(f"{name}: {network}" for name, network in deep.items()) or "none of the deep ones",
        "release": directory_hash(release),
    }


def find_evaluation(state: Path, release: str, ledger: str) -> dict | None:
    """The numbers kept for the release with that hash and the ledger with that digest, or None."""
    path = state / EVALUATIONS / f"{Path(release).name}.json"
    if not path.is_file():
        return None
    content = read_metrics(path)
    kept = content.get("ledger")
    return content if isinstance(kept, dict) and set(kept) == KEYS and kept["digest"] == ledger else None


# --- comparing --------------------------------------------------------------------------------------------------------


def marked(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs, each marked with what it does not share with most of them, and a warning for each kind of difference.

    Marks: "hold-out", "extractor", … where a run's differs from the commonest one (the first of equally common ones),
    "… unknown" where its evaluation does not say, "ledger" where the ledger does not hold.
    """
    usual = {key: most_common([run.identity.get(key, UNKNOWN) for run in runs]) for key in COMPARED}
    delta = most_common([run.delta for run in runs])
    found, warnings = [], []
    for run in runs:
        marks = [f"{word} unknown" for key, word in COMPARED.items() if run.identity.get(key, UNKNOWN) == UNKNOWN]
        marks += [word for key, word in COMPARED.items() if run.identity.get(key, UNKNOWN) not in (UNKNOWN, usual[key])]
        marks += ["delta"] if run.delta != delta else []
        marks += ["ledger"] if run.problems else []
        found.append(replace(run, marks=tuple(marks)))
        warnings += [f"{run.name}: its ledger does not hold: {problem}" for problem in run.problems]
    for mark in dict.fromkeys(mark for run in found for mark in run.marks if mark != "ledger"):
        names = [run.name for run in found if mark in run.marks]
        what = f"another {mark} than the others"
        if mark.endswith("unknown"):
            what = f"the {mark.removesuffix(' unknown')} of its evaluation is not known"
        named = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        warnings.append(f"{named}: {what}: do not compare its numbers with theirs")
    return found, warnings


def most_common(values: Sequence) -> object:
    """The commonest value that is known, the first of equally common ones."""
    known = [value for value in values if value != UNKNOWN] or list(values)
    return Counter(known).most_common(1)[0][0]


def classifiers_of(runs: Sequence[Run]) -> list[str]:
    """Every classifier that scored some run, in the order of first appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.accuracy))


def distance_of(run: Run) -> tuple[float | None, str | None]:
    """FID or Fréchet distance of the release, and the space of its features; None and None without it."""
    values = run.metrics["release"].get("fidelity", {})
    return next(
        ((float(values[key]), values.get("space")) for key in ("fid", "frechet") if key in values), (None, None)
    )


def comparison_rows(runs: Sequence[Run]) -> list[dict]:
    """One row per run, by recipe and then ε, for the table, the CSV file and the plot. Accuracies are in [0, 1]."""
    rows = []
    for run in sorted(runs, key=lambda run: (run.recipe, run.target, run.name)):
        row: dict = {"run": run.name, "recipe": run.recipe}
        row |= {"target": run.target, "epsilon": run.epsilon, "delta": run.delta}
        for name in classifiers_of(runs):
            scored = run.accuracy.get(name, {})
            row[name], row[f"{name}_std"] = scored.get("mean"), scored.get("std")
        row["distance"], row["space"] = distance_of(run)
        rows.append(row | {"differs": ", ".join(run.marks)})
    return rows


def comparison_csv(rows: Sequence[Mapping]) -> str:
    words = ("run", "recipe", "space", "differs")
    return csv_text(rows, {key: "" if key in words else ".6g" for key in rows[0]})
