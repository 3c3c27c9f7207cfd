"""Tables that name images: CSV, JSON lines or Parquet. Messages name a row by its number and quote no cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato.errors import UNREADABLE, ConfigError, DataError, PrivateError, explained
from sfumato.storage.documents import parse_json, read_text

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # as Hugging Face's `imagefolder` has them
BETWEEN = "|"  # labels in a cell that lists several
FILE = "file_name"  # the column that names the picture, by its path from the table's folder

Rows = list[tuple[int, list[str]]]  # each row's number in messages, and the cells that were asked for


def table_in(folder: Path) -> Path | None:
    """The metadata of a folder. Raises DataError for two of them."""
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} holds {' and '.join(file.name for file in found)}: keep one of them.")
    return found[0] if found else None


def read_table(table: Path, columns: Sequence[str], what: str) -> Rows:
    """The cells of some columns, "" for an empty one, row by row. what: the table, in messages.

    Raises DataError if it is not a table with these columns, each once; PrivateError for a row of another form.
    """
    parquet = table.suffix == ".parquet"
    form = (
        "a Parquet table" if parquet else "a regular file of UTF-8 text" + (" with commas" * (table.suffix == ".csv"))
    )
    with explained(
        DataError,
        lambda error: f"{what} is not a table ({type(error).__name__}): write {form}",
        missing=f"{what} is missing: mend the path, or write that table",
        causes=(*UNREADABLE, RuntimeError, csv.Error),  # RuntimeError: by pyarrow
    ):
        if parquet:
            heads, rows = parquet_rows(table, columns)
        else:
            text = read_text(table).removeprefix("\ufeff")
            heads, rows = json_rows(text, columns) if table.suffix == ".jsonl" else csv_rows(text)
    if any(heads.count(name) != 1 for name in columns):
        named = " and ".join(columns)
        raise DataError(f"{what} is not a table with the columns {named}, each once: name them in its first line")
    places, found = [heads.index(name) for name in columns], Rows()
    for number, row in rows:
        if len(row) != len(heads):
            cells = f"{len(row)} cells and {len(heads)} columns"
            raise PrivateError(f"{what}, row {number}, has {cells}: quote cells with commas")
        texts = [cell for place in places if (cell := cell_text(row[place])) is not None]
        if len(texts) < len(places):
            raise PrivateError(f"{what}, row {number}, holds neither text nor whole numbers where it should: mend it")
        found.append((number, texts))
    return found


def columns_of(table: Path) -> list[str]:
    """The names of the columns; of JSON lines, the keys of the first. Raises as reading does."""
    if table.suffix == ".parquet":
        return parquet_rows(table, ())[0]
    text = read_text(table).removeprefix("\ufeff")
    if table.suffix == ".csv":
        return csv_rows(text)[0]
    first: Any = next((parse_json(line) for line in text.split("\n") if line.strip()), {})
    return [*first] if isinstance(first, dict) else []


def csv_rows(text: str) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    heads = [name.strip() for name in rows[0]] if rows else []
    return heads, [(number, row) for number, row in enumerate(rows[1:], 2) if row]


def json_rows(text: str, columns: Sequence[str]) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                content = parse_json(line)
                rows.append((number, [content.get(name, "") for name in columns]))
            except (ValueError, AttributeError) as error:
                raise PrivateError(f"row {number} of a table is not a JSON object: mend it") from error
    return [*columns], rows


def parquet_rows(table: Path, columns: Sequence[str]) -> tuple[list[str], list[tuple[int, list[Any]]]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{table} needs pyarrow: pip install 'sfumato[parquet]'") from error
    heads = parquet.read_schema(table).names
    if not columns or not {*columns} <= {*heads}:
        return heads, []
    found = parquet.read_table(table, columns=list(dict.fromkeys(columns)))
    return found.column_names, [(i, [*row.values()]) for i, row in enumerate(found.to_pylist(), 1)]


def cell_text(value: Any) -> str | None:
    """A cell as text, "" for none, that of a list with BETWEEN; None for anything but text and whole numbers."""
    if isinstance(value, list):
        parts = [cell_text(part) for part in value]
        return None if None in parts else BETWEEN.join(part or "" for part in parts)
    if isinstance(value, bool):
        return None
    return "" if value is None else value if isinstance(value, str) else str(value) if isinstance(value, int) else None


def label_of(text: str, classes: Sequence[str]) -> int | None:
    """The place of a label among the classes: by its name; or by its number from 0, if the name of none is a number."""
    if text in classes:
        return classes.index(text)
    numbered = text.isdecimal() and len(text) < 10 and not any(name.isdecimal() for name in classes)
    return int(text) if numbered and int(text) < len(classes) else None


def classes_in(labels: Sequence[str]) -> tuple[str, ...]:
    """The labels that occur, in order. They depend on the images: only an owner may make them public."""
    found = {*labels}
    return tuple(sorted(found, key=int if all(text.isdecimal() for text in found) else None))
