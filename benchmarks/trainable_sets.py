"""Compare sets of weights to train by DP-SGD, at equal budgets (DP-SAPF §5).

The table shows accuracy, Fréchet distance, time and memory. For each budget and seed, the recipe
`sapf-pixel` runs once up to its saliency release; then each set of weights is fine-tuned, starting
from this state. The budget of every set includes the saliency release, even if the set does not use
it, so that all have the same noise. Rows are appended to a CSV file; sets that are already in the
file are skipped.

    OMP_NUM_THREADS=1 python benchmarks/trainable_sets.py --epsilons 1,3,10 --seeds 0,1,2
    python benchmarks/trainable_sets.py --show
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from recipe_table import ROOT, append, done, prepare_folder, spread, stage

RESULTS = ROOT / "benchmarks" / "results" / "trainable-sets.csv"
# Sets of few weights need a higher learning rate (found with --scan)
LORA = {"learning_rate": 3e-2}
SETS: dict[str, dict] = {
    "none": {},
    "all": {"trainable": "all", "learning_rate": 1e-2},
    "attention": {"trainable": "attention", "learning_rate": 3e-2},
    "attention-lora": LORA | {"trainable": "attention-lora"},
    "salient-lora 10 %": LORA | {"trainable": "salient-lora", "ratio": 0.1},
    "salient-lora 30 %": LORA | {"trainable": "salient-lora", "ratio": 0.3},
    "salient-lora 50 %": LORA | {"trainable": "salient-lora", "ratio": 0.5},
}
SCAN = {
    f"{name} {rate:g}": {"trainable": name, "learning_rate": rate}
    for name, rates in {
        "all": (1e-3, 3e-3, 1e-2, 3e-2),
        "attention": (1e-3, 1e-2, 3e-2, 1e-1),
        "attention-lora": (1e-3, 1e-2, 3e-2, 1e-1),
    }.items()
    for rate in rates
}
STAGES = (
    "count",
    "central",
    "frequency",
    "auxiliary",
    "classifier",
    "histogram",
    "select",
    "pretrain",
    "saliency",
)
FINETUNE = {"steps": 40, "draws": 1}
KEYS = ("epsilon", "seed", "set")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilons", default="1,3,10")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--scan",
        action="store_true",
        help="compare learning rates for three of the sets, instead of comparing all sets",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--show", action="store_true", help="only print the table of the results so far"
    )
    arguments = parser.parse_args()
    if arguments.show:
        return show(arguments.results)
    sets = SCAN if arguments.scan else SETS
    results = arguments.results.resolve()
    work = Path(tempfile.mkdtemp(prefix="sets-"))
    for seed in map(int, arguments.seeds.split(",")):
        for epsilon in map(float, arguments.epsilons.split(",")):
            left = {
                name: own
                for name, own in sets.items()
                if not done(results, {"epsilon": epsilon, "seed": seed, "set": name})
            }
            if left:
                compare(epsilon, seed, left, work, results)
    shutil.rmtree(work)


def compare(epsilon: float, seed: int, sets: dict[str, dict], work: Path, results: Path) -> None:
    """Run the pipeline once up to the saliency release, and then fine-tune each set of weights."""
    params = {
        "recipe": "sapf-pixel",
        "profile": "digits",
        "seed": seed,
        "privacy": {"epsilon": epsilon},
        "finetune": FINETUNE,
        "synthesize": {"count": 2000},
        "evaluate": {"bound": False, "classifiers": ["cnn"], "fidelity": ["frechet"]},
    }
    folder = work / f"{epsilon:g}-{seed}"
    prepare_folder(folder, work / "shared", params)
    for command in (["prepare", "public"], ["plan"], *([name] for name in STAGES)):
        stage(*command)
    kept = {name: Path(f"artifacts/plan/{name}.yaml").read_text() for name in STAGES}
    for name, own in sets.items():
        changed = params | {"finetune": FINETUNE | own}
        if name == "none":
            changed |= {"synthesize": {"count": 2000, "sources": {"pretrain": 1}}}
        Path("params.yaml").write_text(yaml.safe_dump(changed))
        stage("plan")
        assert kept == {
            upstream: Path(f"artifacts/plan/{upstream}.yaml").read_text() for upstream in STAGES
        }, "the plans of earlier stages must not depend on the trained weights"
        reset_peak()
        seconds = stage("finetune") if name != "none" else 0.0
        memory = peak()
        stage("synthesize")
        stage("evaluate")
        found = json.loads(Path("metrics.json").read_text())["release"]
        trained: dict[str, Any] = (
            json.loads(Path("artifacts/finetune/trainable.json").read_text())
            if name != "none"
            else {"parameters": 0, "trained": []}
        )
        row = {
            "epsilon": epsilon,
            "seed": seed,
            "set": name,
            "cnn": round(100 * found["cnn"]["mean"], 2),
        }
        row |= {
            "frechet": round(found["fidelity"]["frechet"], 3),
            "parameters": trained["parameters"],
            "seconds": round(seconds, 1),
            "peak_mib": round(memory),
        }
        picked = (
            sorted({part.removesuffix(".A").removesuffix(".B") for part in trained["trained"]})
            if "lora" in name
            else []
        )
        append(results, row | {"picked": " ".join(picked)})
        print(row, flush=True)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, on Linux


def peak() -> float:
    """Return the peak resident memory since the last `reset_peak`, in MiB."""
    return next(
        int(line.split()[1]) / 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def show(results: Path) -> None:
    """Print mean ± standard deviation over the seeds, as Markdown tables."""
    table = pd.read_csv(results, keep_default_na=False)
    epsilons = sorted(table["epsilon"].unique())
    heads = [f"{what}, ε = {epsilon:g}" for epsilon in epsilons for what in ("CNN %", "Fréchet")]
    print(
        f"| set | parameters | {' | '.join(heads)} | seconds | peak MiB "
        f"|\n|---|---|{'---|' * (len(heads) + 2)}"
    )
    for name in dict.fromkeys(table["set"]):
        rows = table[table["set"] == name]
        cells = [
            spread(rows[rows["epsilon"] == epsilon][column])
            for epsilon in epsilons
            for column in ("cnn", "frechet")
        ]
        print(
            f"| {name} | {rows['parameters'].max()} | {' | '.join(cells)} "
            f"| {rows['seconds'].median():.0f} | {rows['peak_mib'].median():.0f} |"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
