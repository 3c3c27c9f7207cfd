"""Shares as a person writes them. Imports nothing, so that the options of a command may use it."""


def part_of(value: object) -> float:
    """Read a share that may be written with a percent sign: "1%" is 0.01. Raises ValueError for other text."""
    text = str(value)
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)
