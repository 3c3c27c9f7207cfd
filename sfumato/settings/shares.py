"""Parse shares such as 1%.

This module imports nothing. Commands import it to define their options, and this must be fast.
"""


def parse_share(value: object) -> float:
    """Parse a share. It is a number, or has a percent sign: "1%" is 0.01.

    Raises ValueError for any other text.
    """
    text = str(value)
    if text.endswith("%"):
        return float(text[:-1]) / 100
    return float(text)
