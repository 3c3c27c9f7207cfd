"""Format the benchmarks' tables as CSV."""

import pandas as pd

from sfumato.storage.files import csv_text


def csv_of(table: pd.DataFrame, numbers: str = ".4f") -> str:
    """Format a table as CSV with a header. Missing values are empty. numbers: format of floats."""
    forms = {
        str(name): numbers if pd.api.types.is_float_dtype(kind) else ""
        for name, kind in table.dtypes.items()
    }
    cells = table.astype(object).where(table.notna(), None)
    return csv_text(
        (dict(zip(forms, row, strict=True)) for row in cells.itertuples(index=False)), forms
    )
