"""Compare runs by the cost in their ledgers and the local numbers of `stage evaluate`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from sfumato.data.images import ImageSet
from sfumato.data.prepare import fingerprint
from sfumato.errors import DataError, explained
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.verdict import accuracies
from sfumato.privacy.check import check_ledger, folder_md5, md5_of
from sfumato.privacy.ledger import KEYS, read_ledger
from sfumato.privacy.resolved import StagePlan
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.stage import LEDGER
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_private

EVALUATIONS = "evaluations"  # Folder in the state directory
IDENTITY_COLUMNS = {  # Columns of an evaluation's identity entries
    "dataset": "data set",
    "data": "data",
    "holdout": "hold-out",
    "extractor": "extractor",
    "reference": "reference",
    "training": "schedule",
}
DVC_COLUMNS = {  # Columns of `dvc exp show --json`
    "rev": "revision",
    "name": "name",
    "data|deps|artifacts/synthesize|hash": "release",
    "data|metrics|ledger.json|data|digest": "ledger",
}


def read_run(folder: Path) -> dict:
    """Read a folder's metrics.json and ledger.json as a row.

    Raises BudgetError for an invalid ledger, DataError for invalid metrics.
    """
    return row_of(str(folder), read_ledger(folder / LEDGER), read_metrics(folder / "metrics.json"))


def read_metrics(path: Path) -> dict:
    missing = f"{path} does not exist: run `stage evaluate` there, or leave the folder out"
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
    """Read rows from `dvc exp show --json`. Also list each experiment left out, with the reason."""
    rows: dict[tuple[str, str], dict | None] = {}
    left_out = []
    for name, release, ledger in experiments(shown)[["name", "release", "ledger"]].itertuples(
        index=False
    ):
        if pd.isna(release) or pd.isna(ledger):
            left_out.append(f"{name}: it has no ledger or no release")
        elif (release, ledger) not in rows:  # the workspace repeats an experiment or a commit
            kept = find_evaluation(state, release, ledger)
            if kept is None:
                left_out.append(
                    f"{name}: no local numbers for its release: run `stage evaluate` there to "
                    "write them"
                )
            # DVC shows a ledger without the lists in it.
            rows[release, ledger] = kept and row_of(name, kept["ledger"], kept)
    return [row for row in rows.values() if row], left_out


def experiments(shown: object) -> pd.DataFrame:
    """Return the DVC_COLUMNS of `dvc exp show --json`.

    The workspace comes last, because it repeats one of the others.
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
    """Build a run's row: recomputed cost, numbers, IDENTITY_COLUMNS, and ledger "problems"."""
    spent, problems = check_ledger(ledger, delta=ledger["delta"])
    identity = {key: str(value) for key, value in metrics.get("identity", {}).items()}
    versions = set() if problems else {record["data_version"] for record in ledger["records"]}
    if identity and versions - {"", identity.get("version")}:
        problems = [*problems, "its ledger and its evaluation are for different data"]
    row: dict = {"run": name, "recipe": str(ledger["recipe"]), "target": float(ledger["target"])}
    row |= {"epsilon": spent, "delta": float(ledger["delta"])}
    for classifier, scored in accuracies(metrics["release"]).items():
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


def directory_hash(directory: Path) -> str:
    """Compute the hash that DVC gives a directory, file by file."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return folder_md5(
        {path.relative_to(directory).as_posix(): md5_of(path.read_bytes()) for path in files}
    )


def keep_evaluation(state: Path, metrics: Mapping) -> Path:
    """Store a release's numbers privately under its hash, with "identity" and the full "ledger"."""
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
    """Identify the origin of an evaluation's numbers.

    Evaluations with equal entries can be compared.

    Digests of real images are keyed, so they reveal nothing.
    """
    settings = plan.settings
    amount = f"{settings.epochs} epochs"
    if settings.steps:
        amount = f"{settings.steps} steps"
    return {
        "dataset": plan.dataset_id,
        "version": version,
        "data": fingerprint(train, key),
        "holdout": fingerprint(holdout, key),
        "extractor": extractor.digest if extractor else "none",
        "reference": "holdout, plain images",
        "training": f"light, {amount}, last epoch",
        "release": directory_hash(release),
    }


def find_evaluation(state: Path, release: str, ledger: str) -> dict | None:
    """Find the stored numbers of a release's hash and a ledger's digest, or None."""
    path = state / EVALUATIONS / f"{Path(release).name}.json"
    if not path.is_file():
        return None
    content = read_metrics(path)
    kept = content.get("ledger")
    if isinstance(kept, dict) and {*kept, "apart"} == KEYS and kept["digest"] == ledger:
        return content
    return None


def compared(rows: Sequence[dict]) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs as a table, by recipe and then ε, and a warning for each kind of difference.

    Accuracies are in [0, 1], NaN for a classifier that did not score a run. "differs" lists, for
    each run, the entries that are missing or differ from the most common value (the first, if
    several are equally common), and "ledger" if the ledger is invalid.
    """
    runs = pd.DataFrame(rows)
    warnings = [
        f"{row['run']}: its ledger is not valid: {problem}"
        for row in rows
        for problem in row["problems"]
    ]
    marks = pd.DataFrame(index=runs.index)
    for word in (*IDENTITY_COLUMNS.values(), "delta"):
        counts = runs[word].value_counts(sort=False)  # recorded values only
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
