"""Compare recipes: accuracy, Fréchet distance and time per stage, over budgets and seeds.

Each run has its own folder, noise and journal. All runs share the prepared images, their hold-out,
the public set, and the classifier trained on the public set. Stages run in this process, in the
order of the pipeline. A row is appended to a CSV file after each run, and runs that are already in
the file are skipped. So the script can be stopped and started again, and two instances with
different recipes can run at the same time.

    OMP_NUM_THREADS=1 python benchmarks/recipe_table.py --recipes dpdm,feta-pro,full
        --epsilons 1,3,10 --seeds 0,1,2
    python benchmarks/recipe_table.py --show
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pandas as pd
import yaml

from sfumato.evaluation.classifiers import CLASSIFIERS
from sfumato.settings import stages

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "recipes.csv"
BEFORE_PLAN = (["prepare", "public"], ["plan"])
STAGES = [name for name in stages.STAGES if name != "evaluate"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="digits")
    parser.add_argument("--recipes", default="dpdm,feta-pro,pdp-diffusion,privimage,rpgen,full")
    parser.add_argument("--epsilons", default="1,3,10")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting for every run, such as finetune.trainable=attention",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in, for compare_runs.py")
    parser.add_argument(
        "--show", action="store_true", help="only print the table of the results so far"
    )
    arguments = parser.parse_args()
    if arguments.show:
        return show(arguments.results)
    work = (arguments.keep or Path(tempfile.mkdtemp(prefix="recipes-"))).resolve()
    results = arguments.results.resolve()
    shared = work / f".shared-{arguments.profile}"  # hidden from `runs/*`
    for epsilon in map(float, arguments.epsilons.split(",")):
        for seed in map(int, arguments.seeds.split(",")):
            for recipe in arguments.recipes.split(","):
                key = {
                    "profile": arguments.profile,
                    "recipe": recipe,
                    "change": " ".join(arguments.set),
                    "epsilon": epsilon,
                    "seed": seed,
                }
                if not done(results, key):
                    row = run(key, arguments.set, work, shared)
                    append(results, row)
                    print(
                        ", ".join(
                            f"{name} {value}" for name, value in row.items() if name != "seconds"
                        ),
                        flush=True,
                    )
    if not arguments.keep:
        shutil.rmtree(work)


def run(key: dict, changes: list[str], work: Path, shared: Path) -> dict:
    """Run the pipeline once, in its own folder. Returns the row of the table."""
    change = f"-{digest_of_text(key['change'])[:8]}" if key["change"] else ""
    folder = work / f"{key['profile']}-{key['recipe']}-{key['epsilon']:g}-{key['seed']}{change}"
    params: dict = {
        "recipe": key["recipe"],
        "profile": key["profile"],
        "seed": key["seed"],
        "privacy": {"epsilon": key["epsilon"]},
        "evaluate": {"bound": False},
    }
    for change in changes:
        path, value = change.split("=", 1)
        *sections, last = path.split(".")
        section = params
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = yaml.safe_load(value)
    prepare_folder(folder, shared, params)
    times = {" ".join(command): stage(*command) for command in BEFORE_PLAN}
    for name in STAGES:
        kept = (
            shared
            / "classifier"
            / digest(Path("artifacts/plan/classifier.yaml"), Path("data/public/privacy.json"))
            if name == "classifier"
            else None
        )
        if kept is not None and kept.exists():  # trained once for each public set
            shutil.copytree(kept, "artifacts/classifier")
            continue
        times[name] = stage(name)
        if kept is not None:
            shutil.copytree("artifacts/classifier", kept)
    times["evaluate"] = stage("evaluate")
    stage("ledger", "write")
    found = json.loads(Path("metrics.json").read_text())
    metrics = found["release"]
    row = key | {
        name: round(100 * metrics[name]["mean"], 2) for name in CLASSIFIERS if name in metrics
    }
    if "teacher" in found:
        row["teacher"] = round(100 * found["teacher"]["accuracy"], 2)
    fidelity = found.get("plain", metrics).get("fidelity", {})
    if "frechet" in fidelity:
        row["frechet"] = round(fidelity["frechet"], 3)
    row |= {name: round(fidelity[name], 4) for name in ("mind", "mind_real") if name in fidelity}
    row |= reliability(metrics)
    if "disclosure" in found:
        row |= {
            "copies p": found["disclosure"].get("p", ""),
            "copies unseen": found["disclosure"].get("unseen", ""),
        }
    row["minutes"] = round(sum(times.values()) / 60, 2)
    return row | {
        "seconds": json.dumps(
            {name: round(value, 1) for name, value in times.items() if value > 0.5}
        )
    }


def reliability(metrics: dict) -> dict:
    """Return a classifier's accuracy interval, worst class and calibration error, in %.

    The classifier is the last one in CLASSIFIERS that was measured. The result is empty if images
    have several labels.
    """
    rows = [metrics[name] for name in CLASSIFIERS if "interval" in metrics.get(name, ())]
    if not rows:
        return {}
    worst = min(rows[-1]["per_class"], key=lambda one: one["mean"])
    low, high = rows[-1]["interval"]
    shares = {"low": low, "high": high, "worst": worst["mean"], "ece": rows[-1]["calibration"]}
    return {name: round(100 * share, 2) for name, share in shares.items()} | {
        "worst class": worst["class"]
    }


def prepare_folder(folder: Path, shared: Path, params: dict) -> None:
    """Create a folder with `params` and the shared images and hold-out; make it the current one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    os.symlink(ROOT / "pipelines", "pipelines")
    Path("params.yaml").write_text(yaml.safe_dump(params))
    os.environ["SFUMATO_STATE"] = str(folder / "state")
    if not shared.exists():
        stage("prepare", "sensitive")
        for part in ("data", "keys", "odometer"):
            shutil.copytree(folder / "state" / part, shared / part)
        shutil.copytree("data/sensitive", shared / "card")
    else:
        for part in ("data", "keys", "odometer"):
            shutil.copytree(shared / part, folder / "state" / part)
        shutil.copytree(shared / "card", "data/sensitive")


def stage(*arguments: str) -> float:
    """Run one command of the `stage` program in this process. Returns the seconds it took."""
    from stages.cli import app

    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        app(list(arguments), standalone_mode=False)
    return time.perf_counter() - start


def digest_of_text(text: str) -> str:
    from sfumato.storage.digest import digest_of

    return digest_of([text])


def digest(*paths: Path) -> str:
    from sfumato.storage.digest import digest_of, digest_of_file

    return digest_of([digest_of_file(path) for path in paths])


def done(results: Path, key: dict) -> bool:
    if not results.exists():
        return False
    with results.open(newline="") as file:
        return any(
            all(row[name] == str(value) for name, value in key.items())
            for row in csv.DictReader(file)
        )


def append(results: Path, row: dict) -> None:
    """Append a row. If the file exists, only the columns that it has are written."""
    new = not results.exists()
    columns = list(row)
    if not new:
        with results.open(newline="") as file:
            columns = next(csv.reader(file))
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow(row)


def show(results: Path) -> None:
    """Print mean ± standard deviation over the seeds, as a Markdown table."""
    table = pd.read_csv(results, keep_default_na=False)
    print(
        "| profile | recipe | change | ε | seeds | LR | MLP | CNN | student | Fréchet | minutes "
        "|\n|" + "---|" * 11
    )
    for names, group in table.groupby(["profile", "recipe", "change", "epsilon"], sort=True):
        cells = [f"{name:g}" if isinstance(name, float) else str(name) for name in names]
        values = (
            group[name] if name in group else pd.Series()
            for name in ("lr", "mlp", "cnn", "student", "frechet")
        )
        cells += [str(len(group)), *map(spread, values)]
        print(f"| {' | '.join(cells)} | {group['minutes'].mean():.1f} |")


def spread(values: pd.Series) -> str:
    """Format mean ± sample standard deviation. A single value has ± 0; no values give ""."""
    return (
        ""
        if values.empty
        else f"{values.mean():.1f} ± {values.std(ddof=1) if len(values) > 1 else 0:.1f}"
    )


if __name__ == "__main__":
    main()
