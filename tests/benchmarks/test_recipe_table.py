"""Run the table of recipes in a clone, keep the runs, and compare them."""

import csv
import os
import shutil
import subprocess
import sys
from glob import glob

import compare_runs
import recipe_table

SMALL = (
    "auxiliary.steps=2",
    "auxiliary.images=40",
    "synthesize.count=40",
    "evaluate.steps=2",
    "evaluate.seeds=[0]",
    "evaluate.fidelity=[]",
    "evaluate.classifiers=[lr]",
)


def test_kept_runs_in_a_clone_can_be_compared(here, environment, monkeypatch):
    """Run the two commands of docs/tutorials/researchers.md."""
    subprocess.run(["git", "init", "-q"], check=True)
    shutil.copy(recipe_table.ROOT / ".gitignore", here)
    words = "--recipes dp-merf --epsilons 1,10 --seeds 0 --results sweep.csv --keep runs"
    changes = [f"--set={change}" for change in SMALL]
    monkeypatch.setattr(sys, "argv", ["recipe_table.py", *words.split(), *changes])
    recipe_table.main()
    os.chdir(here)
    environment["SFUMATO_STATE"] = str(here / ".sfumato")
    compare_runs.main(glob("runs/*"))
    with open("evaluation/comparison.csv") as file:
        assert [row["target"] for row in csv.DictReader(file)] == ["1", "10"]
