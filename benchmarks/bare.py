"""Set the import path on a machine without this project's packages.

Then the project can be imported, and so can the packages that `gpu_carry.sh` fetched. Import this
module first.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / ".gpu"

folders = [str(ROOT), str(ROOT / "benchmarks")]
if importlib.util.find_spec("pydantic") is None:  # otherwise, use the machine's own packages
    folders.insert(0, str(CARRIED / "site"))
sys.path[:0] = folders
# child processes import from the same folders
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
)
