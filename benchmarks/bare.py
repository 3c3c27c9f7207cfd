"""Set up imports on a bare machine: the project, and packages that `gpu_carry.sh` fetched.

Import it first.
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
if importlib.util.find_spec("pydantic") is None:  # otherwise the machine's own packages stay
    folders.insert(0, str(CARRIED / "site"))
sys.path[:0] = folders
# paths of child processes
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
)
