"""Read tables of images: CSV, JSON lines or Parquet.

Messages contain the number of a row, but not the content of its cells.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.data.deep import is_dicom
from sfumato.data.formats import AnotherFormat, link_format
from sfumato.errors import UNREADABLE, ConfigError, DataError, explained
from sfumato.settings.fields import composed
from sfumato.storage.files import files_in, reading
from sfumato.storage.limits import LARGEST_PICTURE, LARGEST_TEXT, LONGEST_ROW, MOST_CELLS, MOST_ROWS
from sfumato.storage.plain_json import parse_json, read_bytes

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

# Names of the tables that Hugging Face's `imagefolder` reads
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Names of tables with several labels per picture. Such a table has one column of 0 and 1 per label,
# or one column of lists
TABLES = ("labels.csv", *METADATA)
TABLE_SUFFIXES = (".csv", ".tsv")  # suffixes of tables that may have any name
BETWEEN = "|"  # separator of labels in a cell
FILE = "file_name"  # column with the picture's path, relative to the table's folder
# Names of columns that contain pictures' names, in the form that `meaning` returns
NAMING = re.compile(
    r"(file|image|img|picture|photo|scan|bild|datei)s?((file)?(name|path)|id|index|no)?|"
    r"(relative)?path|idcode"
)

Rows = Iterator[tuple[int, list]]  # for each row: its number (for messages) and its cells


def table_in(folder: Path) -> Path | None:
    """Find the table of a folder: the file with a name in METADATA or, if there is none, the only
    CSV file with a column of pictures' names. If no CSV file has such a column, TSV files are
    searched in the same way.

    Returns None if there is no such file, or if there are several with the same suffix. Raises
    DataError if the folder contains several files with names in METADATA.
    """
    tables = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(tables) > 1:
        raise DataError(
            f"{folder} contains {' and '.join(file.name for file in tables)}: keep only one of "
            "these tables."
        )
    for suffix in TABLE_SUFFIXES:
        tables = tables or [*filter(names_pictures, files_in(folder, f"[!.]*{suffix}"))]
    if len(tables) != 1:
        return None
    return tables[0]


def table_path(root: Path) -> Path | None:
    if (root / TABLES[0]).is_file():
        return root / TABLES[0]
    return table_in(root)


def names_pictures(table: Path) -> bool:
    try:
        return bool(heads_of(table))
    except DataError as error:
        if isinstance(error.__cause__, PermissionError):  # an unreadable file may be a table
            raise error.__cause__ from None
        return False


def meaning(name: str) -> str:
    """Normalize the name of a column, so that "Patient ID", patient-id and PatientID are equal.

    Accents are removed too.
    """
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKD", name)).casefold()


def heads_of(table: Path) -> tuple[str, list[str]]:
    """Return the name of the column with the pictures' names, and the names of the other columns.

    The pictures' names are in the column FILE. If there is no such column, they are in the only
    column with a title such as image, image_id or path. Raises the errors of `cells_of`, and
    DataError if no column or several columns could contain the names.
    """
    heads = heads_in(table)  # private: the first line may be a person's row
    candidates = [head for head in heads if head == FILE] or [
        head for head in heads if NAMING.fullmatch(meaning(head))
    ]
    if not candidates:
        raise DataError(
            f"{table} has no column {FILE} with the names of the pictures: add it, or write the "
            "names of the columns in the first line"
        )
    if len(candidates) > 1:
        raise DataError(
            f"{table} has several columns that may contain the names of the pictures: rename the "
            f"column that contains them to {FILE}"
        )
    return candidates[0], [name for name in heads if name != candidates[0]]


def read_table(table: Path, columns: Sequence[str]) -> Rows:
    """Yield each row's number and its cells in `columns` as text; an empty cell is "".

    Raises DataError if the table does not have each of these columns exactly once, or if a row has
    too few or too many cells, or cells that are neither text nor whole numbers.
    """
    heads, rows = cells_of(table)
    columns = [*map(composed, columns)]
    for name in columns:
        if name not in heads and not {*columns}.isdisjoint(heads):
            # The message may contain the first line. This line names another of `columns`, so it is
            # not the row of a person
            raise DataError(
                f"{table} has no column {name}, but has the columns {', '.join(heads)}: use one of "
                "these, or add the column"
            )
        if name not in heads:
            raise DataError(
                f"{table} has no column {name}: add it, or write the names of the columns in the "
                "first line"
            )
        if heads.count(name) > 1:
            raise DataError(
                f"{table} has {heads.count(name)} columns named {name}: give each column its own "
                "name"
            )
    for number, row in rows:
        if len(row) != len(heads):
            raise DataError(
                f"{table}, row {number}, has {len(row)} cell(s), but the table has {len(heads)} "
                "column(s): put cells that contain commas in quotation marks"
            )
        texts = [cell_text(row[heads.index(name)]) for name in columns]
        if None in texts:
            raise DataError(
                f"{table}, row {number}, has a cell that is neither text nor a whole number: "
                "correct this cell"
            )
        yield number, texts


def rows_by_file(
    table: Path,
    columns: Sequence[str],
    files: Sequence[Path],
    root: Path,
    other_files: Iterable[Path] = (),
) -> dict[Path, list[str]]:
    """Map each file that a row names to the cells of that row, in the order of the rows.

    columns: names of columns. The first contains paths below `root`, or unique file names with or
    without their suffix. The cells of the other columns are returned;
    files: files that must each have a row;
    other_files: files that need no row. A row can name such a file only by its path.

    Raises the errors of `read_table`. Raises DataError if one of `files` has no row, and if a row
    names an unknown file, several files, a file for the second time, or a link that leads out of
    `root` or to no file.
    """
    name_counts = Counter(name for file in files for name in names_of(file))
    files_by_name = {
        plain_path(name): file
        for file in files
        for name in names_of(file)
        if name_counts[name] == 1
    }
    files_by_name |= {
        plain_path(str(file.relative_to(root))): file for file in (*files, *other_files)
    }
    by_folder = files_by_folder(files, root)
    rows: dict[Path, list[str]] = {}
    for number, (name, *cells) in read_table(table, columns):
        folder_files = by_folder.get(plain_path(name).rstrip("/"), [])
        if folder_files and all(map(is_dicom, folder_files)):
            if not rows.keys().isdisjoint(folder_files):
                raise DataError(
                    f"{table}, row {number}, names a file a second time: keep one row per file"
                )
            rows |= dict.fromkeys(folder_files, cells)
            continue
        if (file := files_by_name.get(plain_path(name))) is None:
            raise DataError(
                f"{table}, row {number}, names a file that is not below {root}, or a name that "
                "several files have: remove the row, or write the file's path relative to this "
                "folder, such as class/picture.png"
            )
        if file in rows:
            raise DataError(
                f"{table}, row {number}, names a file a second time: keep one row per file"
            )
        if not file.is_file() and (form := link_format(file)):
            raise AnotherFormat(str(file), form)
        if not file.is_file():
            raise DataError(
                f"{table}, row {number}, names a pipe, a device or a broken link: copy the picture "
                f"itself into {root}"
            )
        if not file.resolve().is_relative_to(root.resolve()):
            raise DataError(
                f"{table}, row {number}, names a link to a file outside {root}: copy the picture "
                "itself into this folder"
            )
        rows[file] = cells
    if missing := next((path for path in files if path not in rows), None):
        raise DataError(f"{table} has no row for {missing}: add a row for each file")
    return rows


def files_by_folder(files: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Map the relative path of each folder in `root` to all files below it.

    A row may name a folder of DICOM files instead of a file.
    """
    by_parent: dict[Path, list[Path]] = {}
    for file in files:
        by_parent.setdefault(file.parent, []).append(file)
    by_folder: dict[str, list[Path]] = {}
    for parent, members in by_parent.items():
        relative = parent.relative_to(root)
        for folder in (relative, *relative.parents):
            by_folder.setdefault(plain_path(str(folder)), []).extend(members)
    return by_folder


def names_of(file: Path) -> set[str]:
    """Return the names that a row may use for a file.

    These are the file's name with and without its suffix and, for x.nii.gz, also x.
    """
    return {file.name, file.stem, re.sub(r"(?i)\.nii(\.gz)?$", "", file.name)}


def plain_path(text: str) -> str:
    """Normalize a relative path for comparison, on any operating system."""
    return composed(text.strip().replace("\\", "/")).removeprefix("./")


def heads_in(table: Path) -> list[str]:
    """Read a whole table, and return its column names.

    Raises DataError if any part of the file is not a table.
    """
    heads, rows = cells_of(table)
    deque(rows, maxlen=0)
    return heads


def cells_of(table: Path) -> tuple[list[str], Rows]:
    """Return the column names of a table, and an iterator over its rows.

    Raises DataError if the file is not a table.
    """
    rows = checked_rows(table)
    return [*map(composed, next(rows)[1])], rows


def checked_rows(table: Path) -> Rows:
    """Yield the column names, then the rows.

    Raises DataError if the file is not a table, or if it has more than MOST_CELLS cells.
    """
    forms = {
        ".parquet": "as a Parquet table",
        ".csv": "as a regular file of UTF-8 text, with commas between the cells",
    }
    suffix = table.suffix.lower()
    form = forms.get(suffix, "as a regular file of UTF-8 text")
    readers = {".parquet": parquet_rows, ".jsonl": json_rows}
    cells = 0
    with explained(
        DataError,
        lambda error: f"{table} is not a table ({type(error).__name__}): save it {form}",
        missing=f"{table} is missing: correct the path, or write this table",
        causes=(*UNREADABLE, RuntimeError, csv.Error),  # pyarrow raises RuntimeError
    ):
        for number, row in readers.get(suffix, csv_rows)(table):
            cells += len(row)
            if cells > MOST_CELLS:
                raise too_many_cells(table)
            yield number, row


def too_many_cells(table: Path | str) -> DataError:
    return DataError(f"{table} has more than {MOST_CELLS:,} cells: remove columns or rows.")


def lines_of(table: Path, newline: str, separators: Sequence[bytes] = ()) -> Iterator[str]:
    """Yield the lines of a text file, with their line ends.

    separators: characters that separate cells. Raises DataError for too many lines or separators,
    or for a line that is too long.
    """
    content = read_bytes(table, LARGEST_TEXT)
    if sum(map(content.count, separators)) > MOST_CELLS:
        raise too_many_cells(table)
    if content.count(b"\n") > MOST_ROWS:
        raise DataError(f"{table} has more than {MOST_ROWS:,} rows: write one row per picture.")
    with io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline=newline) as text:
        while line := text.readline(LONGEST_ROW + 1):
            check_length(len(line), table)
            yield line


def check_length(characters: int, table: Path) -> None:
    if characters > LONGEST_ROW:
        raise DataError(
            f"{table} has a row of more than {LONGEST_ROW:,} characters: write one row per picture."
        )


def csv_rows(table: Path) -> Rows:
    """Yield the column names, then the non-empty rows."""
    length = 0  # length of a row, which may span several lines

    def lines() -> Iterator[str]:
        nonlocal length
        for line in chain([first], rest):
            length += len(line)
            check_length(length, table)
            yield line

    rest = lines_of(table, "")
    first = next(rest, "")
    if first.startswith("sep="):  # states the separator for Excel, which hides this line
        first = next(rest, "")
    # Some programs write semicolons, because their numbers contain commas
    delimiter = max(",;\t", key=first.count)
    for number, row in enumerate(csv.reader(lines(), delimiter=delimiter, strict=True), 1):
        length = 0
        if number == 1:
            yield 1, [name.strip() for name in row]
        elif row:
            yield number, row


def json_rows(table: Path) -> Rows:
    """Yield all keys that occur, then the values of each line, with "" for a missing key."""
    objects: dict[int, dict[str, object]] = {}
    for number, line in enumerate(lines_of(table, "\n", (b",", b"[", b"{")), 1):
        if line.strip():
            message = f"{table}, row {number}, is not a JSON object: write one object per row"
            with explained(DataError, message, causes=(ValueError, TypeError)):
                objects[number] = dict(parse_json(line))
    heads = [*dict.fromkeys(chain.from_iterable(objects.values()))]
    yield 0, heads
    for number, content in objects.items():
        yield number, [content.get(name, "") for name in heads]


def parquet_rows(table: Path) -> Rows:
    """Yield the column names, then the rows."""
    check_parquet()
    from pyarrow.parquet import ParquetFile

    with reading(table), ParquetFile(table, buffer_size=LONGEST_ROW) as file:
        heads = file.schema_arrow.names
        yield 0, heads
        for number, row in enumerate(records_of(file, heads, str(table)), 1):
            yield number, [*row.values()]


def records_of(
    file: ParquetFile, columns: Sequence[str], name: str, picture: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open Parquet file, after checking its metadata against the limits.

    Rows are read in batches of at most 1024 or, with pictures, one at a time.

    columns: columns of cells to read; picture: column of pictures to read too. Raises DataError if
    the table is too large.
    """
    metadata = file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(metadata.num_columns)]
    table = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    if metadata.num_rows > MOST_ROWS:
        raise DataError(f"{name} has more than {MOST_ROWS:,} rows: write one row per picture.")
    if sum(chunk.num_values for chunk in table) > MOST_CELLS:
        raise too_many_cells(name)
    batch_size = 1
    read = [*columns]
    if picture is not None:
        read.append(picture)
    else:  # a repeated cell is stored once, so the text may be far larger than the file
        largest = max((chunk.total_uncompressed_size for chunk in table), default=0)
        batch_size = max(1, min(1024, LARGEST_PICTURE // max(1, largest)))
    remaining = LARGEST_TEXT
    try:
        for batch in file.iter_batches(batch_size, columns=read):
            remaining -= sum(batch.column(column).nbytes for column in columns)
            if remaining < 0:
                raise DataError(
                    f"{name} has more than {LARGEST_TEXT:,} bytes in addition to its pictures: "
                    "remove columns."
                )
            yield from batch.to_pylist()
    except MemoryError:  # caused by the size that the header of a page states
        raise ValueError("one of its pages states a size that exceeds the memory") from None


def check_parquet() -> None:
    """Raise ConfigError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Parquet files cannot be read without pyarrow: pip install 'sfumato[parquet]', or use "
            "another format"
        ) from error


def cell_text(value: object) -> str | None:
    """Convert a cell to text in the composed form of Unicode.

    An empty cell becomes "", and the values of a list are joined by BETWEEN. Returns None if the
    cell contains anything but text and whole numbers.
    """
    if isinstance(value, list):
        parts = [text for part in value if (text := cell_text(part)) is not None]
        if len(parts) != len(value):
            return None
        return BETWEEN.join(parts)
    if isinstance(value, str | int) and not isinstance(value, bool):
        return composed(str(value))
    if value is None:
        return ""
    return None
