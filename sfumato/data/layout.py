"""Find the labels and the ids of persons in a folder, a table, tar files or an archive.

Class names are never guessed: if there are two interpretations, the functions raise `Unclear`, and
the owner decides.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data import tables
from sfumato.data.decoding import format_at
from sfumato.data.deep import is_dicom
from sfumato.data.formats import TAR, AnotherFormat
from sfumato.data.images import GROUPS
from sfumato.data.series import dicom_header, holds_series
from sfumato.data.sources import tabled
from sfumato.data.sources.bids import PARTICIPANT, is_bids, participants_of, possible_labels
from sfumato.data.sources.npz import archive_layout
from sfumato.data.sources.packed import unpacked
from sfumato.data.sources.source import Form
from sfumato.data.sources.splits import folders_in, is_filing, split_of, visible
from sfumato.data.tables import meaning
from sfumato.data.volumes import is_volume
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import OUTER, Groups, Volume
from sfumato.settings.options import ALL, Classes
from sfumato.storage.files import files_in

FOLDERS: Form = {"name": "imagefolder"}  # the layout of class folders
# Fields of a `Request` that describe the labels, and the rule for finding persons' ids
Layout = tuple[Form, Groups | None]
# Names of columns that contain persons' ids, in the form that `meaning` returns
PERSONS = re.compile(
    r"(anon\w*|study|source|dicom)?"
    r"(patient(en)?|person|subject|participant|case|individual|donor|volunteer)s?"
    r"(ids?|uid|no|nr|num|number|code|key|name|identifier|pseudonym)?"
    r"|groups?(ids?)?|mrns?|pids?|(medicalrecord|hospital|nhs|mrn)(id|no|nr|number)|ssn"
)
# Patterns to search for in column names. A column whose cells repeat may contain ids of persons if
# its name matches OF_PERSONS. If its name matches OF_THINGS, it may contain ids of things that
# belong to one person, such as sessions or specimens.
OF_PERSONS = re.compile(
    r"patient|pa[cz]i?ente?|subj|person|particip|proband|donor|volunteer|individual|client|user"
    r"|signer|speaker|writer|worker|owner|animal|identity|(^|_)(pat|sub|uid|hn)(_|$)"
)
OF_THINGS = re.compile(
    r"(^|_)(ids?|n[or]|nbr|num|number|codes?|keys?|hash|barcode|identifier|accession)(_|$)"
    r"|nummer|uid|lesion|session|study|series|exam|specimen|sample|slide|visit|video|clip|case|fall"
)
# Names of columns that contain labels, in the form that `meaning` returns
LABELLED = re.compile(
    r"(label|class|classname|category|target|diagnosis|dx|disease|pathology|finding|findinglabel)s?"
)
# Matches ids (long, zero-padded, hexadecimal), dates, names of persons ("Smith, John", DICOM's
# Smith^John) and e-mails
PERSONAL = re.compile(r"\d{3}|(?<!\d)0\d|\d[a-z]+\d|\d([-_. ]\d+){2}|[\^,@]", re.IGNORECASE)
# Classes with few pictures may be persons. If there are more than MANY classes, "few" means fewer
# than FEW pictures per class. Otherwise it means fewer than LEAST.
MANY = 20
FEW = 50
LEAST = 10
# Cells that may stand for an uncertain or missing label, in lower case
UNCERTAIN = ("", "-1", "-1.0", "0.5", "u", "?", "nan", "na", "n/a", "none", "null", "unknown")
# A column that matches OF_THINGS is reported if it has at least this many different ids
FEWEST = 5
FIRST = 50  # number of files to check in a folder, to detect its format


class Unclear(ConfigError):
    """The error for a decision that only the owner can make."""

    undecided = True


def layout_of(
    path: Path,
    label: str | None,
    groups: Groups | None = None,
    classes: Classes | None = None,
    alone: bool = False,
) -> Layout:
    """Find the labels and the persons' ids of a source.

    label: column that the owner named; groups, classes: the owner's options;
    alone: whether each image without an id is the only image of its person.

    Returns the fields of a Request that describe the labels, and the rule for finding persons' ids.
    The rule is None if the source has no ids.

    Raises Unclear if only the owner can decide, and ConfigError if labels look like persons' ids.
    """
    path = unpacked(path)
    if is_bids(path):
        return bids_layout(path, label, groups, classes)
    check_column(label)
    named = classes_named(classes)
    if path.suffix.lower() == ".npz":
        form, arrays = archive_layout(path)
        return form | named, groups or (
            Groups(array=True) if "groups" in arrays else groups_in(arrays)
        )
    shards = files_in(path, "*.tar")
    if not shards:
        check_forms(path)
    train, _ = split_of(path)
    table = tables.table_path(path) or tables.table_in(train[0])
    if path.is_file() or (table is None and shards):
        return {"name": "webdataset", "label_column": label} | named, groups or groups_in(
            tabled.sample_keys(path)
        )
    if table is None:
        return folder_layout(path, groups, classes, alone)
    heads = tables.heads_of(table)[1]
    groups = groups or groups_in(heads) or groups_of_dicom(path, [path], alone)
    columns = [name for name in heads if groups is None or name != groups.column]
    folders = {
        folder.name for part in train for folder in folders_in(part) if not is_filing(folder.name)
    }
    several = None
    by_folders = label is None and len(folders) > 1 and table.name != tables.TABLES[0]
    if table.parent == path:
        several = several_in(table, columns, label, ask=not by_folders and not named)
    if several and not by_folders:
        return several | named, groups
    meant = [name for name in columns if LABELLED.fullmatch(meaning(name))]
    if label is None and len(folders) > 1:
        different = None
        if classes is None and (meant or several):
            different = min((count_different(path, name) for name in meant), default="all")
        if different:
            raise Unclear(
                "in {path}, both the table {table} and the folders could define the classes, and "
                "they differ for {different} images. To use the table, give {option.label_column} "
                "COLUMN or, if images have several labels, rename the table to labels.csv. To use "
                "the folders, give {option.classes} a,b,c or {option.classes} all",
                option="classes",
                path=path,
                table=table.name,
                different=different,
            )
        return folder_layout(path, groups, classes, alone)
    if not columns:
        raise ConfigError(
            f"{table} has only persons' ids and no labels: add a column of labels, or move the "
            "pictures into one folder per class"
        )
    if label is None and tabled.LABEL in meant:
        label = tabled.LABEL
    elif label is None and len(meant) == 1:
        label = meant[0]
    if label is None:
        raise Unclear(
            "{table} has the columns {heads}: set {option.label_column} to the column that "
            "contains the labels. The labels become class names, which are published",
            option="label_column",
            proposed=columns[0] if len(columns) == 1 else None,
            table=table,
            heads=", ".join(heads),
        )
    return FOLDERS | {"label_column": label} | named, groups


def bids_layout(
    path: Path, label: str | None, groups: Groups | None, classes: Classes | None
) -> Layout:
    """Return the layout of a BIDS folder, as `layout_of` does.

    Raises Unclear if the owner must choose the column with the labels.
    """
    persons = Groups(column=PARTICIPANT)
    if groups not in (None, persons):
        raise ConfigError(
            "{path} is laid out as BIDS, so each subject is a person: leave out {option.groups}, "
            "or set it to {persons}",
            option="groups",
            path=path,
            persons=PARTICIPANT,
        )
    heads = [name for name in tables.heads_in(participants_of(path)) if name != PARTICIPANT]
    likely = [label]
    if label is None:
        likely = [*possible_labels(path)]
    if not heads and label is None:
        raise ConfigError(
            f"{participants_of(path)} has no column besides {PARTICIPANT}: add a column of labels"
        )
    if len(likely) != 1:
        raise Unclear(
            "{table} has the columns {heads}: set {option.label_column} to the column that "
            "contains the labels. The labels become class names, which are published",
            option="label_column",
            table=participants_of(path),
            heads=", ".join(heads),
        )
    return FOLDERS | {"label_column": likely[0]} | classes_named(classes), persons


def classes_named(classes: Classes | None) -> Form:
    """Return the field `classes` of a Request; no field if the owner does not name the classes."""
    if classes is None or classes == ALL:
        return {}
    return {"classes": classes}


def volume_in(path: Path) -> Volume | None:
    """Return the slices to use if a file is a volume, or if the first DICOM files of one of the
    folders contain a series.

    Returns None for other files.
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


def check_column(label: str | None) -> None:
    if label is not None and PERSONS.fullmatch(meaning(label)):
        raise ConfigError(
            "{option.label_column}={label} looks like a column of persons' ids, which would be "
            "published as class names: choose the column with the labels. If {label} contains the "
            "labels, rename this column",
            option="label_column",
            label=label,
        )


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


def cells_in(table: Path, column: str) -> list[str]:
    """Return the cells of a column as text, without leading or trailing spaces.

    Rows with too few or too many cells are left out. Returns [] if the file is not a table, or has
    no such column.
    """
    with suppress(DataError, ValueError):
        heads, rows = tables.cells_of(table)
        place = heads.index(column)
        cells = [row[place] for _, row in rows if len(row) == len(heads)]
        texts = [cell if (text := tables.cell_text(cell)) is None else text for cell in cells]
        return [str(text).strip() for text in texts]
    return []


def tables_read(path: Path) -> list[Path]:
    """Return the tables to read: the folder's table or, without one, the tables of its parts."""
    if table := tables.table_path(path):
        return [table]
    return [table for part in chain(*split_of(path)) if (table := tables.table_in(part))]


def count_different(path: Path, column: str) -> int:
    """Count the pictures outside a folder with the name of their label in the table."""
    count = 0
    for table in tables_read(path):
        names = map(tables.plain_path, cells_in(table, tables.heads_of(table)[0]))
        cells = map(tables.plain_path, cells_in(table, column))  # none if the column is missing
        labels = dict(zip(names, cells, strict=False))
        for file in tabled.pictures_below(table.parent):
            place = tables.plain_path(str(file.relative_to(table.parent)))
            known = [place, *map(tables.plain_path, tables.names_of(file))]
            label = next((labels[name] for name in known if name in labels), None)
            count += label not in place.split("/")[:-1]
    return count


def repeated_ids(path: Path, label: str | None) -> tuple[str, bool] | None:
    """Find a column in the table of `path` whose cells repeat and may be persons' ids.

    Returns the column's name, and whether to propose it as the column of persons' ids. A column is
    proposed if its name means persons, or if its cells look like ids or names of persons. Returns
    the first such column, otherwise the first column that may contain persons' ids, otherwise None.

    Dates, years and sizes repeat too. So cells without a letter or a leading 0 are ignored, unless
    the column's name means persons, or things such as sessions (OF_THINGS).
    """
    path = unpacked(path)
    telling = (
        r"(first|last|sur|full|given|family|nach|vor)?names?"
        r"|e?mails?(address)?|dob|(dateof)?birth(date|day)?|geburts(datum|tag)"
        r"|(tele|mobile)?phone(no|number)?|(home)?address"
    )
    other = None
    if table := tables.table_path(path) or tables.table_in(split_of(path)[0][0]):
        for name in tables.heads_of(table)[1]:
            named = re.fullmatch(telling, meaning(name))
            person = named or OF_PERSONS.search(snake_case(name))
            thing = OF_THINGS.search(snake_case(name))
            cells = [
                cell
                for cell in cells_in(table, name)
                if re.search("." if person or thing else r"[^\W\d_]|^0", cell)
            ]
            ids = {*cells}
            frequent = LEAST * len(ids) < len(
                cells
            )  # values with many pictures each may be hospitals or scanners
            if name == label or len(ids) == len(cells) or (frequent and not named):
                continue
            if person or likeness(ids) == 2 or like_people(sorted(ids)):
                return name, True
            if len(ids) >= (FEWEST if thing else LEAST):
                other = other or (name, False)
    return other


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", "_", name).lower()


def several_in(table: Path, columns: Sequence[str], label: str | None, ask: bool) -> Form | None:
    """Return the fields of a Request for a table with several labels per picture.

    Such a table has at least two columns of 0 and 1, or a column of lists such as "effusion|mass".
    Returns None for any other table. With a column of lists, the class names are the labels that
    occur. They depend on the images, so only the owner may publish them.

    label: the column of lists, if the owner named it; ask: whether to raise Unclear if columns of 0
    and 1 also have uncertain or empty cells.
    """
    cells = {name: found for name in columns if (found := cells_in(table, name))}
    flags = [
        name
        for name, own in cells.items()
        if {*tabled.VALUES} & {*own} and {*map(str.lower, own)} <= {*tabled.VALUES, *UNCERTAIN}
    ]
    binary = tuple(name for name in flags if {*cells[name]} <= {*tabled.VALUES})
    meant = {name for name in cells if LABELLED.fullmatch(meaning(name))} - (
        {*flags} - {tabled.LABEL}
    )
    if label is None and len(flags) > 1 and not meant and ask and len(binary) < len(flags):
        raise Unclear(
            "{table} has columns of 0 and 1 with uncertain or empty cells: {uncertain}. Write 0 or "
            "1 in each of these cells, or name only other columns of labels with {option.classes} "
            "a,b,c. If a single column contains all labels, name it with {option.label_column}",
            option="classes",
            table=table,
            uncertain=", ".join(name for name in flags if name not in binary),
        )
    if label is None and len(binary) > 1 and not meant:
        return FOLDERS | {"several": True, "classes": binary}
    listing = [
        name
        for name, own in cells.items()
        if label in (None, name) and any(tables.BETWEEN in cell for cell in own)
    ]
    if len(listing) != 1:
        return None
    names = tabled.classes_in(
        [part for cell in cells[listing[0]] for part in tabled.labels_listed(cell)]
    )
    return FOLDERS | {"several": True, "classes": names, "label_column": listing[0]}


def groups_in(names: Iterable[str]) -> Groups | None:
    """Find the column, key or array with persons' ids by its name.

    Raises Unclear if there are several.
    """
    found = [name for name in names if PERSONS.fullmatch(meaning(name))]
    if len(found) > 1:
        raise Unclear(
            "persons' ids could be in {found}: choose one of them with {option.groups}",
            option="groups",
            found=" or ".join(found),
        )
    if not found:
        return None
    return Groups(column=found[0])


def groups_of_dicom(path: Path, folders: Iterable[Path], alone: bool) -> Groups | None:
    """Return the rule that each PatientID is a person, or None if no picture is a DICOM file.

    folders: folders with the pictures; alone: see `layout_of`.

    Raises Unclear if some pictures are not DICOM files, and so have no PatientID, unless `alone`.
    """
    files = chain.from_iterable(map(tabled.files_below, folders))
    found = {is_dicom(file) for file in files if tabled.is_picture(file)}
    if len(found) > 1 and not alone:
        raise Unclear(
            "only some pictures in {path} are DICOM files, so the others have no PatientID: state "
            "with {option.groups} how to find the person of each image. If each of the others is "
            "the only image of its person, give {option.alone}",
            option="groups",
            path=path,
        )
    if True in found:
        return Groups(dicom=True)
    return None


def folder_layout(
    path: Path, groups: Groups | None, classes: Classes | None, alone: bool
) -> Layout:
    """Return the layout of folders: classes only, or classes and persons in two levels."""
    train, test = split_of(path)
    outer = [folder for part in train + test for folder in folders_in(part)]
    inner = [entry for folder in outer for entry in visible(folder)]
    nested = bool(inner) and all(entry.is_dir() and not entry.is_symlink() for entry in inner)
    check_beside(path, train, outer, nested, decided=bool(groups or classes))
    if groups is None and (path / GROUPS).exists():
        groups = Groups(array=True)
    elif groups is None and (groups := groups_of_dicom(path, outer, alone)):
        check_classes_of_dicom(path, outer, decided=classes is not None)
    elif groups is None and nested:
        raise unclear_order(path, outer, inner)
    if groups is None or groups.folder != OUTER:
        names, held_out = (
            {folder.name for part in parts for folder in folders_in(part)}
            for parts in (train, test)
        )
        # Checked first: later messages contain these names, so none of them may be a person's
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
        classes = tuple(sorted({entry.name for entry in inner}))
    return FOLDERS | {"classes": classes}, groups


def check_classes_of_dicom(path: Path, outer: Sequence[Path], decided: bool) -> None:
    """Raise Unclear if each folder has DICOM files of only one patient, and no two folders have the
    same patient.

    Such folders may be named after patients. decided: whether the owner named the classes.
    """
    headers = [map(dicom_header, first_files(folder)) for folder in outer]
    of_folder = [{header.patient for header in found if header is not None} for found in headers]
    alone = [ids for ids in of_folder if len(ids) == 1]
    if not decided and len(alone) == len(outer) and len(set.union(*alone)) == len(outer) > 1:
        raise Unclear(
            "each folder in {path} contains DICOM files of only one patient, so each folder may "
            "belong to a person. Name the classes with {option.classes} a,b,c, or list the "
            "folders in metadata.csv, with the columns file_name and label",
            option="classes",
            path=path,
        )


def check_beside(
    path: Path, train: Sequence[Path], outer: Sequence[Path], nested: bool, decided: bool
) -> None:
    """Raise Unclear or ConfigError if a file may contain labels but is not read.

    outer: folders that may be classes; nested: whether they contain only folders; decided: whether
    the owner has named the classes or stated how to find the persons.
    """
    no_classes = len({folder.name for folder in outer}) < 2 and not nested
    beside = dict.fromkeys(
        entry for folder in (path, *train) for entry in visible(folder) if entry.is_file()
    )
    readable = [
        file
        for file in beside
        if file.suffix.lower() in tables.TABLE_SUFFIXES and tables.names_pictures(file)
    ]
    unread = [why for file in beside if no_classes and (why := why_unread(file, no_classes=True))]
    if len(readable) > 1 and (no_classes or nested):
        names = " and ".join(file.name for file in readable[:3])
        unread.append(
            f"{path} contains {names}, but only one table is read: join the tables in one "
            "metadata.csv, or move all tables except one to another folder"
        )
    if unread and no_classes:
        raise ConfigError(unread[0])
    if unread and not decided:
        raise Unclear(
            "{why}. To use the folders as classes instead, give {option.classes} a,b,c or "
            "{option.classes} all",
            option="classes",
            why=unread[0],
        )


def check_persons_beside(path: Path) -> None:
    """Raise Unclear if a file that is not read may contain persons' ids."""
    path = unpacked(path)
    if not path.is_dir():
        return
    read = tables_read(path)
    for file in tabled.files_below(path):
        if file not in read and (why := why_unread(file, no_classes=False)):
            raise Unclear(
                "{why}. If the file contains persons' ids, write a CSV file with the columns file "
                "(such as class/picture.png) and group (the id), and give {option.groups} "
                "FILE.csv. If no person has two images, give {option.one_image_each}",
                option="groups",
                why=why,
            )


def why_unread(file: Path, no_classes: bool) -> str | None:
    """Explain why a file beside the pictures is not read, and what to do about it.

    Returns None if the file needs no action. no_classes: whether there are no class folders, so
    that the file may contain the labels. Otherwise, only persons' ids matter.
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
        if PERSONS.fullmatch(meaning(name)) or OF_PERSONS.search(snake_case(name)):
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
    Only the owner can confirm it: in <name>/<date>/, the outer level is the person's, and in
    <year>/<name>/, the inner level is.
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


def likeness(names: Collection[str]) -> int:
    """Rate how much names look like ids: 2 if most match PERSONAL, 1 if all contain digits,
    otherwise 0.
    """
    if sum(bool(PERSONAL.search(name)) for name in names) > len(names) / 2:
        return 2
    return int(all(re.search(r"\d", name) for name in names))


def like_people(names: Sequence[str]) -> bool:
    """Return whether names look like names of persons.

    There must be at least three names. Either all of them are initials such as TB, or two
    conditions are met: all look like Tony_Blair or Smith-John, and fewer than half of their words
    occur in several names.
    """
    if len(names) > 2 and all(re.fullmatch("[A-Z][A-Z]", name) for name in names):
        return True
    words = [re.findall(r"[^\W\d_]+", name) for name in names]
    every = list(chain.from_iterable(words))
    named = all(len(own) > 1 and all(map(str.istitle, own)) for own in words)
    return (
        named and len(words) > 2 and 2 * sum(every.count(word) > 1 for word in every) < len(every)
    )


def check_names(names: Sequence[str], counts: Sequence[int] = ()) -> None:
    """Raise Unclear if the names of classes, which would be published, may be names of persons, ids
    or kinds of files.

    counts: number of pictures of each class, if known.
    """
    alike = {" ".join(unicodedata.normalize("NFKC", name).casefold().split()) for name in names}
    reasons = {
        "two of them differ only in case or spaces, so they may be one class": (
            len(alike) < len(names)
        ),
        "one of them may mean a missing label": bool(alike & {"nan", "n/a", "na", "null"}),
        "some of them look like names for parts of a set (such as train or part_1) or for kinds of "
        "files (such as masks)": any(map(is_filing, names)),
        "some of them look like ids, dates or names of persons": (
            any(map(PERSONAL.search, names)) or like_people(names)
        ),
        "there are many, and they contain numbers": len(names) > MANY and likeness(names) > 0,
        "most classes have few pictures, as if each class were one person": (
            np.median(counts or FEW) < (FEW if len(names) > MANY else LEAST)
        ),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        shown = [*names[:3], "…"] if len(names) > 3 else names
        raise Unclear(
            "the class names that were found would be published, but {why}. Name the classes with "
            "{option.classes} a,b,c, or use {option.classes} all to confirm that none of them "
            "identifies a person. Names found ({number} in total): {first}",
            option="classes",
            why=why[0],
            number=len(names),
            first=", ".join(shown),
        )


def check_found(form: Form, names: Sequence[str], counts: Sequence[int]) -> None:
    """Raise Unclear if `check_names` does, or if some class folders have no pictures.

    The names of such folders would be published too.

    form: fields of the Request; counts: number of pictures of each class.
    """
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    if form == FOLDERS and empty and any(counts):
        raise Unclear(
            "folders without pictures ({empty}) would be published as class names: remove them, or "
            "use {option.classes} all to keep them as classes",
            option="classes",
            empty=", ".join(empty[:5]),
        )
    check_names(names, counts)
