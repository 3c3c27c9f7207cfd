"""Read one array of a `.npy` file of unknown origin, memory-mapped."""

from pathlib import Path
from tokenize import TokenError

import numpy as np


def read_array(path: Path) -> np.ndarray:
    """Return the array of a `.npy` file, read-only.

    Raises OSError if the file cannot be opened, and ValueError if it does not contain an array.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    # NumPy parses the header as Python. A hostile header exhausts the parser's stack or memory.
    except (EOFError, MemoryError, RecursionError, SyntaxError, TokenError) as error:
        raise ValueError(f"it has no valid array header ({type(error).__name__})") from None
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive: expected a single .npy array")
    return array
