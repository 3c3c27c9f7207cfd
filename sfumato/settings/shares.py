"""Parse shares such as 1%.

Imports nothing, because commands import it when they define their options, which must be fast.
"""


def parse_share(value: object) -> float:
    """Parse a share, which may have a percent sign: "1%" is 0.01.

    Raises ValueError for other text.
    """
    text = str(value)
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)
