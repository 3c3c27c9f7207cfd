"""Find the labels and the ids of persons in a folder, a table, tar files or an archive.

Class names are never guessed: if there are two interpretations, the functions raise `Unclear`, and
the owner decides.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data import tables
from sfumato.data.decoding import format_at
from sfumato.data.deep import is_dicom
from sfumato.data.formats import TAR, AnotherFormat
from sfumato.data.images import GROUPS
from sfumato.data.labels_and_ids import (
    FOLDERS,
    Unclear,
    check_agreement,
    check_certain,
    check_names,
    columns_in,
    columns_of,
    groups_in,
    is_label,
    is_person,
    main_table,
    several_in,
    tables_read,
    unclear_label,
)
from sfumato.data.repeated_ids import OF_PERSONS, coarser_ids, likeness, snake_case
from sfumato.data.series import dicom_header, holds_series
from sfumato.data.sources import tabled
from sfumato.data.sources.bids import PARTICIPANT, is_bids, participants_of, possible_labels
from sfumato.data.sources.npz import archive_layout
from sfumato.data.sources.packed import unpacked
from sfumato.data.sources.source import Form
from sfumato.data.sources.splits import folders_in, is_filing, split_of, visible
from sfumato.data.volumes import is_volume
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import OUTER, Groups, Volume
from sfumato.settings.fields import composed
from sfumato.settings.options import ALL, InitOptions
from sfumato.storage.files import files_in

# Fields of a `Request` that describe the labels, and the rule for finding persons' ids
Layout = tuple[Form, Groups | None]
FIRST = 50  # number of files to check in a folder, to detect its format


def layout_of(options: InitOptions) -> Layout:
    """Find the labels and the persons' ids of the images.

    Returns the fields of a Request that describe the labels, and the rule for finding persons' ids.
    The rule is None if the source has no ids.

    Raises Unclear if only the owner can decide, and ConfigError if labels look like persons' ids.
    """
    path = unpacked(options.images)
    if is_bids(path):
        return bids_layout(path, options)
    label = options.label_column
    if label is not None and is_person(label):
        raise ConfigError(
            "{option.label_column}={label} looks like a column of persons' ids, which would be "
            "published as class names: choose the column with the labels. If {label} contains the "
            "labels, rename this column",
            option="label_column",
            label=label,
        )
    groups = options.groups
    if path.suffix.lower() == ".npz":
        form, arrays = archive_layout(path)
        if groups is None and "groups" in arrays:
            groups = Groups(array=True)
        return form | classes_named(options), groups or groups_in(columns_of(path))
    shards = files_in(path, "*.tar")
    if not shards:
        check_forms(path)
    table = main_table(path)
    if path.is_file() or (table is None and shards):
        form = {"name": "webdataset", "label_column": label}
        return form | classes_named(options), groups or groups_in(columns_of(path))
    if table is None and label is not None:
        tabled.table_cells(path, [label])  # raises DataError: no table can be read
    if table is None:
        return folder_layout(path, options)
    return table_layout(path, table, options)


def bids_layout(path: Path, options: InitOptions) -> Layout:
    """Return the layout of a BIDS folder.

    Raises Unclear if the owner must choose the column with the labels, or if two subjects may be
    one person. Raises ConfigError if `options.groups` is another rule, or if the table has no
    labels.
    """
    persons = Groups(column=PARTICIPANT)
    if options.groups not in (None, persons):
        raise ConfigError(
            "{path} is laid out as BIDS, so each subject is a person: leave out {option.groups}, "
            "or set it to {persons}",
            option="groups",
            path=path,
            persons=PARTICIPANT,
        )
    table = participants_of(path)
    coarser = coarser_ids(columns_in(table), PARTICIPANT)
    if coarser and options.groups is None:
        raise Unclear(
            "{table}: one id in the column {column} belongs to several subjects, so two subjects "
            "may be the same person. Give each person one folder sub-*, with one folder ses-* per "
            "session. If each subject is a different person, give {option.groups} {persons}",
            option="groups",
            table=table,
            column=coarser[0],
            persons=PARTICIPANT,
        )
    label = options.label_column
    if label is None:
        heads = [name for name in tables.heads_in(table) if name != PARTICIPANT]
        if not heads:
            raise ConfigError(
                f"{table} has no column besides {PARTICIPANT}: add a column of labels"
            )
        candidates = possible_labels(path)
        if len(candidates) != 1:
            raise unclear_label(table, heads)
        label = candidates[0]
    return FOLDERS | {"label_column": label} | classes_named(options), persons


def table_layout(path: Path, table: Path, options: InitOptions) -> Layout:
    """Return the layout of pictures with a table.

    Raises Unclear if the folders could define the classes too, or if the owner must choose the
    column with the labels. Raises ConfigError if the table contains no labels.
    """
    label = options.label_column
    file_column, heads = tables.heads_of(table)
    all_cells = columns_in(table)
    groups = options.groups or groups_in({name: all_cells[name] for name in heads})
    groups = groups or groups_of_dicom(path, [path], options.alone)
    columns = [name for name in heads if groups is None or name != groups.column]
    class_fields = classes_named(options)

    # Decide between the table and the folders
    listed_paths = {tables.plain_path(str(table.parent / cell)) for cell in all_cells[file_column]}
    folders = {
        folder.name
        for part in split_of(path)[0]
        for folder in folders_in(part)
        if tables.plain_path(str(folder)) not in listed_paths
    }
    by_folders = label is None and sum(not is_filing(name) for name in folders) > 1
    preferred = not by_folders or table.name == tables.TABLES[0]
    cells = {}
    if table.parent == path:
        cells = {name: all_cells[name] for name in columns if all_cells[name]}
    if preferred and label is None and not class_fields:
        check_certain(table, cells)
    several = several_in(cells, label)
    if several and preferred:
        return several | class_fields, groups
    label_columns = [*filter(is_label, columns)]
    if by_folders:
        if options.classes is None and (label_columns or several):
            check_agreement(path, table, label_columns)
        try:
            return folder_layout(path, replace(options, groups=groups))
        except Unclear as unclear:  # folders that may be persons: the table may contain the labels
            if unclear.option == "classes" and columns:
                check_agreement(path, table, label_columns)
            raise

    # Choose the column with the labels
    if not columns:
        raise ConfigError(
            f"{table} has only persons' ids and no labels: add a column of labels, or move the "
            "pictures into one folder per class"
        )
    if label is None and tabled.LABEL in label_columns:
        label = tabled.LABEL
    elif label is None and len(label_columns) == 1:
        label = label_columns[0]
    if label is None or composed(label) not in heads:
        raise unclear_label(table, heads, columns[0] if len(columns) == 1 else None)
    return FOLDERS | {"label_column": label} | class_fields, groups


def classes_named(options: InitOptions) -> Form:
    """Return the field `classes` of a Request; no field if the owner does not name the classes."""
    if options.classes is None or options.classes == ALL:
        return {}
    return {"classes": options.classes}


def groups_of_dicom(path: Path, folders: Iterable[Path], alone: bool) -> Groups | None:
    """Return the rule that each PatientID is a person, or None if no picture is a DICOM file.

    folders: folders with the pictures; alone: see `InitOptions`.

    Raises Unclear if only some pictures are DICOM files, because the others have no PatientID. With
    `alone`, the others are accepted.
    """
    files = chain.from_iterable(map(tabled.files_below, folders))
    are_dicom = {is_dicom(file) for file in files if tabled.is_picture(file)}
    if len(are_dicom) > 1 and not alone:
        raise Unclear(
            "only some pictures in {path} are DICOM files, so the others have no PatientID: state "
            "with {option.groups} how to find the person of each image. If each of the others is "
            "the only image of its person, give {option.alone}",
            option="groups",
            path=path,
        )
    if True in are_dicom:
        return Groups(dicom=True)
    return None


def folder_layout(path: Path, options: InitOptions) -> Layout:
    """Return the layout of folders: classes only, or classes and persons in two levels."""
    groups = options.groups
    classes = options.classes
    train, test = split_of(path)
    outer = [folder for part in train + test for folder in folders_in(part)]
    inner = [entry for folder in outer for entry in visible(folder)]
    nested = bool(inner) and all(entry.is_dir() and not entry.is_symlink() for entry in inner)
    check_files_beside(path, train, outer, nested, decided=bool(groups or classes))
    if groups is None and (path / GROUPS).exists():
        groups = Groups(array=True)
    elif groups is None and (groups := groups_of_dicom(path, outer, options.alone)):
        check_classes_of_dicom(path, outer, decided=classes is not None)
    elif groups is None and nested:
        raise unclear_order(path, outer, inner)
    if groups is None or groups.folder != OUTER:
        names, held_out = (
            {composed(folder.name) for part in parts for folder in folders_in(part)}
            for parts in (train, test)
        )
        # The names are checked first, because later messages contain them. A message must not
        # contain the name of a person
        if classes is None:
            check_names(sorted(names | held_out))
        if classes is None and len(held_out - names) > len(held_out) / 2:
            raise Unclear(
                "in {path}, most folders with test images have other names than the folders with "
                "training images. Folders may therefore stand for persons, not classes: name the "
                "classes with {option.classes} a,b,c, or state with {option.groups} how to find "
                "the persons",
                option="classes",
                path=path,
            )
        return FOLDERS, groups
    if classes is None or classes == ALL:
        classes = tuple(sorted({composed(entry.name) for entry in inner}))
    return FOLDERS | {"classes": classes}, groups


def check_classes_of_dicom(path: Path, outer: Sequence[Path], decided: bool) -> None:
    """Raise Unclear if each folder has DICOM files of only one patient, and no two folders have the
    same patient.

    Such folders may be named after patients. decided: whether the owner named the classes; if so,
    nothing is raised.
    """
    headers = [map(dicom_header, first_files(folder)) for folder in outer]
    patients_by_folder = [
        {header.patient for header in folder_headers if header is not None}
        for folder_headers in headers
    ]
    single_patients = [ids for ids in patients_by_folder if len(ids) == 1]
    if (
        not decided
        and len(single_patients) == len(outer)
        and len(set.union(*single_patients)) == len(outer) > 1
    ):
        raise Unclear(
            "each folder in {path} contains DICOM files of only one patient, so each folder may "
            "belong to a person. Name the classes with {option.classes} a,b,c, or list the "
            "folders in metadata.csv, with the columns file_name and label",
            option="classes",
            path=path,
        )


def check_files_beside(
    path: Path, train: Sequence[Path], outer: Sequence[Path], nested: bool, decided: bool
) -> None:
    """Raise Unclear or ConfigError if a file may contain labels but is not read.

    outer: folders that may be classes; nested: whether they contain only folders; decided: whether
    the owner has named the classes or stated how to find the persons. If so, Unclear is not raised.
    """
    no_classes = len({folder.name for folder in outer}) < 2 and not nested
    files = dict.fromkeys(
        entry for folder in (path, *train) for entry in visible(folder) if entry.is_file()
    )
    picture_tables = [
        file
        for file in files
        if file.suffix.lower() in tables.TABLE_SUFFIXES and tables.names_pictures(file)
    ]
    reasons = [
        reason for file in files if no_classes and (reason := why_unread(file, no_classes=True))
    ]
    if len(picture_tables) > 1 and (no_classes or nested):
        names = " and ".join(file.name for file in picture_tables[:3])
        reasons.append(
            f"{path} contains {names}, but only one table is read: join the tables in one "
            "metadata.csv, or move all tables except one to another folder"
        )
    if reasons and no_classes:
        raise ConfigError(reasons[0])
    if reasons and not decided:
        raise Unclear(
            "{why}. To use the folders as classes instead, give {option.classes} a,b,c or "
            "{option.classes} all",
            option="classes",
            why=reasons[0],
        )


def check_persons_beside(path: Path) -> None:
    """Raise Unclear if a file that is not read may contain persons' ids."""
    path = unpacked(path)
    if not path.is_dir():
        return
    used_tables = tables_read(path)
    for file in tabled.files_below(path):
        if file not in used_tables and (reason := why_unread(file, no_classes=False)):
            raise Unclear(
                "{why}. If the file contains persons' ids, write a CSV file with the columns file "
                "(such as class/picture.png) and group (the id), and give {option.groups} "
                "FILE.csv. If no person has two images, give {option.one_image_each}",
                option="groups",
                why=reason,
            )


def why_unread(file: Path, no_classes: bool) -> str | None:
    """Explain why a file beside the pictures is not read, and what to do about it.

    Returns None if the file needs no action. no_classes: true if the set has no class folders. The
    file may then contain the labels. Otherwise, only persons' ids matter.
    """
    suffix = file.suffix.lower()
    heads = list[str]()
    try:
        if no_classes and suffix in tables.TABLE_SUFFIXES:
            tables.heads_of(file)
        elif not no_classes and suffix in (*tables.TABLE_SUFFIXES, ".jsonl", ".parquet"):
            heads = tables.cells_of(file)[0]
    except (ConfigError, DataError) as error:
        return str(error)
    for name in heads:
        if is_person(name) or OF_PERSONS.search(snake_case(name)):
            return f"{file} is not read, but its column {name} may contain persons' ids"
    listing = suffix in (".txt", ".json", ".xml") and file.stem.casefold() not in (
        "readme",
        "license",
    )
    if suffix in (".xls", ".xlsx", ".ods") or (no_classes and listing):
        return (
            f"{file} is not read: save it as metadata.csv in UTF-8, with a column file_name and a "
            "column of labels"
        )
    if no_classes and suffix in (".zip", ".7z", ".rar", ".gz", ".tgz"):
        return f"{file} is an archive beside other files, and is not read: unpack it in this folder"
    return None


def unclear_order(path: Path, outer: Sequence[Path], inner: Sequence[Path]) -> ConfigError:
    """Return the error for two levels of folders, which may be <class>/<person>/ or
    <person>/<class>/.

    The error suggests an order: the level with the names that look more like ids is the person's.
    Only the owner can confirm this order: in <name>/<date>/, the outer level is the person's, and
    in <year>/<name>/, the inner level is.
    """
    first = {folder.name for folder in outer}
    second = {folder.name for folder in inner}
    proposed = None
    table = tables.table_path(path)
    dates = re.compile(r"(?<!\d)((19|20)\d\d[-_. ]?\d\d[-_. ]?\d\d|\d{1,2}[-_. ]\d{1,2}[-_. ]\d\d)")
    if table is None and not any(is_filing(name) or dates.search(name) for name in first | second):
        forms = {1: "class/person", -1: "person/class"}
        proposed = forms.get(int(np.sign(likeness(second) - likeness(first))))
    text = (
        "{path} has two levels of folders, such as {one}/{other}. Use {option.groups} class/person "
        "or {option.groups} person/class, according to the order of the levels. Class names are "
        "published"
    )
    if len(first) > 1 and any(entry.is_dir() for entry in visible(inner[0])):
        return ConfigError(
            f"{path} has three levels of folders, and only two are supported: move pictures up to "
            "<class>/<person>/, or list them in metadata.csv with the columns file_name, label "
            "and patient"
        )
    if len(second) < 3:
        text += (
            ". If the folder {other} stands for neither a class nor a person, move its pictures up "
            "into {one}"
        )
    if table is not None:
        text += ". If labels are in {table.name}, name their column with {option.label_column}"
    if len(first) == 1:
        text += (
            ". If the folder {one} stands for neither a class nor a person, give the path {folder} "
            "instead"
        )
    names: dict[str, Any] = {"one": outer[0].name, "other": inner[0].name}
    return Unclear(
        text, option="groups", proposed=proposed, path=path, table=table, folder=outer[0], **names
    )


def volume_in(path: Path) -> Volume | None:
    """Return the setting `data.volume` to propose for a file or folder.

    It selects all axial slices if a file is a volume, and all slices if the first DICOM files of
    one of the folders contain a series. Otherwise, returns None.
    """
    path = unpacked(path)
    pictures = [path]
    if path.is_dir():
        pictures = [*filter(tabled.is_picture, tabled.files_below(path))]
    if any(map(is_volume, pictures)):
        return Volume(axis="axial")
    by_folder = groupby(filter(is_dicom, pictures), key=lambda file: file.parent)
    if any(holds_series([*islice(files, FIRST)]) for _, files in by_folder):
        return Volume()
    return None


def first_files(path: Path) -> list[Path]:
    """Return the first files of a folder, to detect its format. If `path` is a file, return it."""
    if not path.is_dir():
        return [path]
    return [*islice(tabled.files_below(path), FIRST)]


def check_forms(path: Path) -> None:
    """Raise AnotherFormat if files are in an unsupported format, and no other file is a picture.

    path: a file or a folder. In a folder, the first files are checked.
    """
    files = first_files(path)
    forms = {
        file: form
        for file in files
        if not is_volume(file) and (form := format_at(file)) not in (None, TAR)
    }
    pictures = [file for file in files if file not in forms and tabled.is_picture(file)]
    if forms and not pictures:
        file, form = next(iter(forms.items()))
        raise AnotherFormat(str(file), form)
