"""Fail if the tests take too small a share of a package's branches (`make coverage`).

`make test` measures the branches with SlipCover ([tool.slipcover] in pyproject.toml), but not in
processes that tests start. If a package is below its floor, test the branches that are printed.
Never lower a floor.
"""

import json
import sys
from pathlib import Path

# Package -> smallest allowed percentage of branches taken
FLOORS = {"sfumato/dpsgd": 95, "sfumato/privacy": 95, "sfumato/queries": 95}
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    measured = json.loads((ROOT / "build" / "coverage.json").read_text(encoding="utf-8"))
    low = False
    for package, floor in FLOORS.items():
        files = {
            name: file for name, file in measured["files"].items() if name.startswith(f"{package}/")
        }
        run = sum(len(file["executed_branches"]) for file in files.values())
        missed = sum(len(file["missing_branches"]) for file in files.values())
        percentage = 100 * run / (run + missed)
        print(f"{package}: {percentage:.1f} % of {run + missed} branches taken, floor {floor} %")
        if percentage < floor:
            low = True
            for name, file in files.items():
                for line, target in file["missing_branches"]:
                    print(f"  {name}: no test takes the branch {line} -> {target or 'exit'}")
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
