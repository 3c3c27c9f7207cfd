"""Read one array of a `.npy` file of unknown origin, memory-mapped."""

from pathlib import Path
from tokenize import TokenError

import numpy as np


def read_array(path: Path) -> np.ndarray:
    """Return the array of a `.npy` file, read-only.

    Raises OSError if it cannot be opened, and ValueError if it is not an array.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    # NumPy parses the header as Python. A hostile header exhausts the parser's stack or memory.
    except (EOFError, MemoryError, RecursionError, SyntaxError, TokenError) as error:
        raise ValueError(f"its header is not an array's ({type(error).__name__})") from None
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive: expected a single .npy array")
    return array
