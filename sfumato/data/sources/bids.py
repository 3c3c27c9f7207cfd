"""Read folders that follow BIDS: `sub-*/[ses-*/]anat/` contains the volumes of a subject, and
`participants.tsv` has one row per subject.

A subject is a person.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sfumato.data.sources.splits import folders_in, visible
from sfumato.data.tables import heads_in, read_table
from sfumato.data.volumes import is_volume
from sfumato.errors import ConfigError, DataError

PARTICIPANTS = "participants.tsv"
DESCRIPTION = "dataset_description.json"
PARTICIPANT = "participant_id"
SUBJECT = "sub-"
ANATOMY = "anat"
# Suffixes of files that accompany a volume, such as the mask of a lesion
ACCOMPANY = {"mask", "dseg", "probseg", "defacemask", "label", "seg", "lesion"}
NO_LABEL = {"", "n/a"}


def is_bids(path: Path) -> bool:
    """Return whether a folder follows BIDS.

    It must contain folders of subjects and, beside them, `participants.tsv` or
    `dataset_description.json`.
    """
    subjects = any(folder.name.lower().startswith(SUBJECT) for folder in folders_in(path))
    return subjects and any((path / name).is_file() for name in (PARTICIPANTS, DESCRIPTION))


def folders_named(path: Path, prefix: str) -> list[Path]:
    """Return the folders in `path` with names that begin with `prefix`, such as "sub-".

    Raises DataError if a name has the prefix with capitals, as in "Sub-01", because this folder
    would be skipped otherwise.
    """
    folders = [folder for folder in folders_in(path) if folder.name.lower().startswith(prefix)]
    for folder in folders:
        if not folder.name.startswith(prefix):
            raise DataError(
                f"the name of a folder begins with {folder.name[: len(prefix)]} instead of "
                f"{prefix}: use small letters in the names of all such folders, and in "
                f"{PARTICIPANTS}"
            )
    return folders


def participants_of(root: Path) -> Path:
    """Return the table of participants.

    Raises ConfigError if the table is missing or has no column of participants' ids.
    """
    table = root / PARTICIPANTS
    if not table.is_file() or PARTICIPANT not in heads_in(table):
        raise ConfigError(
            f"{root} is laid out as BIDS, but has no {PARTICIPANTS} with the column {PARTICIPANT}: "
            "write this table, with a column of labels and one row per sub-* folder"
        )
    return table


def suffix_of(file: Path) -> str:
    """Return the BIDS suffix in the name of a volume, such as T1w in sub-01_ses-1_T1w.nii.gz."""
    return file.name.split(".")[0].rpartition("_")[2]


def anatomy_of(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (subject, volume) for each anatomical volume.

    Masks and other volumes that only accompany a volume are left out.
    """
    for subject in folders_named(root, SUBJECT):
        for parent in (subject, *folders_named(subject, "ses-")):
            for folder in folders_named(parent, ANATOMY):
                files = (file for file in visible(folder) if is_volume(file))
                yield from (
                    (subject.name, file)
                    for file in files
                    if folder.name == ANATOMY and suffix_of(file) not in ACCOMPANY
                )


def rows_of_volumes(
    root: Path, columns: Sequence[str], suffix: str | None
) -> dict[Path, list[str]]:
    """Map the path of each volume to the cells in the row of its subject.

    For the column PARTICIPANT, the cell is the name of the subject's folder.

    suffix: suffix of the volumes to use; None if all volumes have the same suffix.

    Raises ConfigError if `suffix` is None and volumes have several suffixes. Raises DataError if
    there is no volume with the suffix, or for a subject with no row or with several rows.
    """
    table = participants_of(root)
    rows = rows_of_participants(table, columns)
    volumes = [*anatomy_of(root)]
    suffixes = sorted({suffix_of(file) for _, file in volumes})
    if suffix is None and len(suffixes) > 1:
        raise ConfigError(
            "{root} has volumes of several kinds ({found}): choose one kind with "
            "data.volume.suffix ({option.volume} suffix={first})",
            option="volume",
            root=root,
            found=", ".join(suffixes),
            first=suffixes[0],
            undecided=True,
        )
    selected = [(subject, file) for subject, file in volumes if suffix in (None, suffix_of(file))]
    if not selected:
        kinds = ", ".join(suffixes) or "none"
        raise DataError(
            f"{root} has no volumes sub-*/anat/*_{suffix or 'T1w'}.nii.gz (or .nii): add them, or "
            f"correct data.volume.suffix. Suffixes found: {kinds}."
        )
    if missing := {subject for subject, _ in selected if subject not in rows}:
        raise DataError(
            f"{table} has no row for {len(missing)} of the sub-* folders: add one row per "
            "participant"
        )
    return {
        file: [rows[subject].get(column, subject) for column in columns]
        for subject, file in selected
    }


def rows_of_participants(table: Path, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Map the name of each subject's folder to the cells of its row, by column.

    Raises DataError if a subject has several rows.
    """
    rows: dict[str, dict[str, str]] = {}
    other_columns = [column for column in dict.fromkeys(columns) if column != PARTICIPANT]
    for number, (name, *cells) in read_table(table, [PARTICIPANT, *other_columns]):
        subject = SUBJECT + name.strip().removeprefix(SUBJECT)
        if subject in rows:
            raise DataError(
                f"{table}, row {number}, names a participant a second time: keep one row per "
                "participant"
            )
        texts = [re.sub("^n/a$", "", cell.strip()) for cell in cells]
        rows[subject] = dict(zip(other_columns, texts, strict=True))
    return rows


def possible_labels(root: Path) -> list[str]:
    """List the columns that may contain labels, because they have few different values.

    If some columns have names that suggest labels, such as diagnosis or group, only these columns
    are considered.
    """
    table = participants_of(root)
    heads = [head for head in heads_in(table) if head != PARTICIPANT]
    pattern = (
        r"(dx|diagnosis|diagnostic|disease|label|class|group|cohort|condition|status|target|"
        r"category|pathology)s?"
    )
    label_heads = [
        head for head in heads if re.search(rf"(^|[\W_]){pattern}([\W_]|$)", head.casefold())
    ]
    cells = {
        head: {cell for _, (cell,) in read_table(table, [head])} - NO_LABEL
        for head in label_heads or heads
    }
    rows = sum(1 for _ in read_table(table, [PARTICIPANT]))
    return [head for head, values in cells.items() if 1 < len(values) <= max(2, rows // 5)]
