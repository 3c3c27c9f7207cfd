"""Find a part of file names that repeats and may identify a person.

Each name is split into columns: its words and numbers or, if letters and digits are mixed, the
chunks between separators. Columns are taken from the left, until they make the names in a folder
unique. The last column taken is treated as a counter of images. A person's id is usually in a
column before the counter, and repeats there. Other columns are considered only if their values have
the form of ids, or if no column before the counter repeats. Among the columns considered, the
proposal is a column that follows a word such as patient. If there is none, it is usually the
leftmost column.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile, zip_longest
from pathlib import PurePath

import numpy as np

from sfumato.data.sources.splits import is_filing

FEWEST = 5  # minimum number of groups to propose a pattern
LARGE = 30  # mean number of images per group above which FEWEST is doubled
# Words other than names of persons: a pattern, which is published, may contain them
SIDE_WORDS = (
    "left|right|l|r|lt|rt|od|os|ou|links|rechts|gauche|droite?|izquierd[ao]|derech[ao]"
    "|cc|mlo?|lmo?|x?ccl|pa|ap|lat|lateral|frontal|oblique|anterior|posterior"
    "|axial|sagittal|coronal|ax|sag|cor|flair|t[12](ce|c|w|gd)?|adc|dwi|pd"
    "|pre|post|before|after|baseline|followup|front|back|top|bottom|up|down"
)
COPY_WORDS = (
    "aug[a-z]*|copy|kopie|copie|copia|[hv]?flip(ped)?|rot(ated?|ation)?|crop(ped)?|orig(inal)?"
)
FILE_WORDS = (
    "train(ing)?|test(ing)?|val(id(ation)?)?|dev|image|img|pic|picture|photo|foto|scan|file|mask"
    "|dsc[nf]?|dicom|dcm|frame|slice|screenshot|capture|untitled|unnamed|sample|bild|pxl"
    "|data|dataset|cell|patch|tile|crop|slide|wa"
)
SERIES_WORDS = "batch|fold|split|part"  # a number after one of these words identifies no person
PERSON = re.compile(
    r"(patient(en)?|person|subject|participant|case|individual|donor|volunteer|proband|client"
    r"|pat|pt|subj?|mrn|pid)s?(id|no|nr)?",
    re.IGNORECASE,
)
DATE = r"(?:19\d|20[0-4])\d[-_.]?(?:0[1-9]|1[0-2])[-_.]?(?:[0-2]\d|3[01])"
TIME = r"[0-2]\d[-_.:h]?[0-5]\d[-_.:m]?[0-5]\d(?:\d{3})?"
DATED = re.compile(
    rf"(?<!\d)(?:{DATE}(?:\D{{0,4}}{TIME})?|[0-3]\d[-_.][0-3]\d[-_.](?:19|20)\d\d"
    r"|20[0-4]\d[-.](?:0[1-9]|1[0-2]))(?!\d)"
)
LETTER = r"[^\W\d_]"
WORD = f"{LETTER}+"
ONE_NUMBER = r"\D*\d+"  # a number and the text before it
SUFFIX = re.compile(r"\.[A-Za-z]\w{0,4}$")

Ids = Sequence[str | None]


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The reason why several images may show one person. Private.

    why: the reason, as a sentence; groups: proposed value of `--groups`, or None if uncertain;
    examples: names of files, each with the id that the proposal finds in it;
    persons: number of persons that the proposal finds.
    """

    why: str
    groups: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    persons: int = 0


@dataclass(kw_only=True)
class Column:
    """One part of the file names.

    values: value of the part in each name, None if the name has no such part;
    pattern: regular expression that finds the value in a name.
    """

    values: Ids
    pattern: str
    kind: str  # words, number or mixed
    neutral: bool = False  # whether the values identify no person (dates, for example)
    personal: bool = False  # whether the part follows a word for a person
    # Whether it follows a word that is none of the words for files, copies or sides
    named: bool = False
    of_file: bool = False  # whether it follows a word for files, such as frame
    # For numbers, in case names contain different numbers of numbers: see `are_aligned`
    aligned: bool = True

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(value for value in self.values if value is not None)

    @cached_property
    def pairs(self) -> float:
        """Return the number of pairs of images that share a value."""
        return sum(count * (count - 1) / 2 for count in self.counts.values())

    @property
    def same_for_most(self) -> bool:
        """Return whether most names have the same value, and every other value occurs only once."""
        (_, top_count), *rest = self.counts.most_common()
        return 2 * top_count > len(self.values) and all(count == 1 for _, count in rest)

    @property
    def repeated(self) -> bool:
        """Return whether images share a value.

        Numbers with large gaps can share a value by chance. So if they do not follow a word for a
        person, return True only if more pairs share a value than chance explains.
        """
        if self.kind != "number" or self.dense or self.personal:
            return self.pairs > 0
        return self.pairs > self.by_chance(self.span) + 1

    @property
    def repeated_hex(self) -> bool:
        """Return whether more pairs share a value than chance explains, for hexadecimal ids.

        One digit of such ids may be fixed, so chance is computed for ids one digit shorter. Returns
        True if the column is not of the kind "mixed".
        """
        return self.kind != "mixed" or self.pairs > self.by_chance(
            16 ** (min(map(len, self.counts)) - 1)
        )

    def by_chance(self, values: float) -> float:
        """Return a limit for the number of pairs of images that share a value by chance.

        It is three times the expected number if each image draws one of `values` values at random.
        """
        return 3 * len(self.values) ** 2 / (2 * values)

    @cached_property
    def step(self) -> int:
        return math.gcd(*map(int, self.counts)) or 1

    @cached_property
    def span(self) -> int:
        numbers = [*map(int, self.counts)]
        return (max(numbers) - min(numbers)) // self.step + 1

    @property
    def dense(self) -> bool:
        return self.span <= 3 * len(self.counts)

    @property
    def restarts(self) -> bool:
        """Return whether the values may be a counter that restarts, and therefore repeats.

        Such a counter starts at 0, or at its own step, as in 1, 2, 3 or in 10, 20, 30.
        """
        return (
            self.kind == "number"
            and not self.personal
            and self.dense
            and min(map(int, self.counts)) <= self.step
        )

    @property
    def of_year(self) -> bool:
        return all(re.fullmatch(r"(19|20)\d\d", value) for value in self.counts)

    @property
    def sparse(self) -> bool:
        """Return whether the values have the form of ids, not of a counter."""
        return (
            self.personal
            or self.kind == "mixed"
            or (self.kind == "number" and self.span > 20 * len(self.counts))
        )

    @property
    def bare(self) -> bool:
        """Return whether the values are numbers of unknown meaning.

        No word beside them states the meaning, and they do not have the form of ids.
        """
        return self.kind == "number" and not (self.personal or self.named or self.sparse)

    @property
    def proposable(self) -> bool:
        total = self.counts.total()
        min_groups = FEWEST
        if total > LARGE * len(self.counts):
            min_groups *= 2
        return self.aligned and min_groups <= len(self.counts) and 0.9 * len(self.values) <= total

    @property
    def surname(self) -> bool:
        """Return whether the words look like names of persons, not like codes of sites or types."""
        if self.kind != "words":
            return False
        word_lists = [re.findall(WORD, value) for value in self.counts]
        common = {
            word
            for word, count in Counter(w for words in word_lists for w in {*words}).items()
            if count > len(word_lists) / 2
        }
        telling = [word for words in word_lists for word in words if word not in common]
        return (
            bool(telling)
            and np.median([*map(len, telling)]) > 3
            and sum(w[0].isupper() for w in telling) > len(telling) / 2
        )


def repeats_in(
    names: Sequence[str], folders: Sequence[str], labels: Sequence[Hashable], classes: Sequence[str]
) -> Repeats | None:
    """Find a part of file names that repeats and may identify a person.

    Returns None if nothing repeats. A pattern is proposed only if it finds at least FEWEST ids.
    Names from several archives often begin with a different word for each archive. If a part
    repeats only among the names of one archive, the result contains the reason, but no pattern.

    folders, labels: folder and label of each image, in the order of `names`.
    """
    repeats = repeats_in_archive(names, folders, labels, classes)
    if repeats is not None:
        return repeats
    archives: dict[str, list[tuple]] = {}
    for image in zip(names, folders, labels, strict=True):
        word = "".join(takewhile(str.isalpha, image[0]))
        archives.setdefault(word, []).append(image)
    if 1 < len(archives) <= FEWEST:
        for images in archives.values():
            own_names, own_folders, own_labels = zip(*images, strict=True)
            if part := repeats_in_archive(own_names, own_folders, own_labels, classes):
                return Repeats(why=part.why)
    return None


def repeats_in_archive(
    names: Sequence[str], folders: Sequence[str], labels: Sequence[Hashable], classes: Sequence[str]
) -> Repeats | None:
    """Do the same as `repeats_in`, for names from one archive."""
    stems = [SUFFIX.sub("", name) for name in names]
    start = beginning(stems)
    prefixes = [re.match(start, stem)[0] for stem in stems]  # type: ignore[index]
    short_stems = [stem[len(skipped) :] for stem, skipped in zip(stems, prefixes, strict=True)]
    class_words = [word for name in classes for word in re.findall(WORD, name.lower())]
    columns = chunk_columns(short_stems) or [*word_and_number_columns(short_stems, class_words)]
    date_numbers = [{*re.findall(r"\d+", " ".join(DATED.findall(stem)))} for stem in stems]
    for column in columns:
        column.neutral |= column.same_for_most or is_of_class(column, labels)
        in_dates = sum(
            value in digits for value, digits in zip(column.values, date_numbers, strict=True)
        )
        column.neutral |= column.kind == "number" and in_dates > 0.9 * column.counts.total()
    days = [re.match(f"(?:{DATE})?", stem)[0] for stem in stems]  # type: ignore[index]
    series = [series_of(stem, class_words) for stem in short_stems]
    left_columns, right_columns = split_at_first_unique(
        columns, list(zip(folders, days, series, strict=True))
    )
    candidates = candidates_in(left_columns, right_columns, stems, labels)
    reason = "Parts of the file names repeat, as if one person had several images"
    if not candidates:
        numbers = [column for column in columns if column.kind == "number"]
        id_pattern = None
        if len(numbers) == 1:
            id_pattern = pattern_before_counter(numbers[0])
        if not id_pattern:
            return None
        return proposal_of(f"^{start}{id_pattern}", names, reason)
    proposable = [
        c
        for position, c in enumerate(candidates)
        if c.proposable
        # Not a counter that restarts for each value of an earlier column with few values
        and not (
            c.restarts
            and any(len(b.counts) < 2 * FEWEST and not b.proposable for b in candidates[:position])
        )
        # Not a number without a word, to the right of the counter: it may be an age or a
        # coordinate. Such numbers repeat too, but are not ids
        and not (c.bare and c in right_columns[1:])
    ]
    if not proposable:
        return Repeats(why=reason)
    steady = any(column.kind == "number" and not column.restarts for column in proposable)
    best = min(
        proposable, key=lambda c: (not c.personal, steady and c.kind == "words" and not c.surname)
    )
    if has_rival(best, [column for column in columns if column is not best]):
        return Repeats(why=reason)
    return proposal_of(f"^{start}{best.pattern}", names, reason)


def candidates_in(
    left_columns: Sequence[Column],
    right_columns: Sequence[Column],
    stems: Sequence[str],
    labels: Sequence[Hashable],
) -> list[Column]:
    """Return the columns that may contain ids of persons.

    left_columns: columns to the left of the counter;
    right_columns: the counter and the columns to its right (see `split_at_first_unique`).
    """
    candidates = [column for column in left_columns if not column.neutral and column.repeated]
    ids = [
        column
        for column in right_columns
        if not column.neutral and column.sparse and column.repeated
    ]
    if candidates:
        candidates += ids
    elif right_columns:
        counter, *rest = right_columns
        distinct = not counter.restarts or tells_apart(counter, stems, labels)
        if distinct and not counter.neutral and counter.repeated:
            candidates.append(counter)
        candidates += [
            c for c in rest if not c.neutral and c.proposable and c.repeated and c.repeated_hex
        ]
        candidates += [column for column in ids if column.personal and column not in candidates]
    return candidates


def has_rival(best: Column, other_columns: Sequence[Column]) -> bool:
    """Return whether another part of the names may be the person's id instead of `best`.

    If so, only the owner can decide. There are four cases:

    - `best` may be a year, a hospital or a frame number;
    - `best` may be an age: it is a number without a word, and another part looks like an id or a
      time of the image;
    - the names consist of two counters without words, such as 3_14;
    - another column looks like an id or a name and `best` does not, and a value of that column
      occurs with several values of `best`.
    """
    if best.personal:
        return False
    repeated = [column for column in other_columns if not column.neutral and column.repeated]
    frame = best.of_file and any(column.named for column in repeated)
    year = best.of_year and any(column.proposable and not column.restarts for column in repeated)
    grid = any(c.bare and c.restarts and 2 * len(c.counts) > len(best.counts) for c in repeated)
    # Whether another part of the names is a time or an id of the image. If so, `best` may be an age
    tagged = any(c.sparse and not c.repeated for c in other_columns)
    ids = [column for column in repeated if column.proposable and (column.sparse or column.surname)]
    short = best.kind == "mixed" and max(map(len, best.counts)) < 4  # such as codes of hospitals
    site = short or len(best.counts) < 2 * FEWEST
    site = site and any(len(c.counts) > len(best.counts) for c in ids)
    crossed = any(len({*zip(c.values, best.values, strict=True)}) > len({*c.values}) for c in ids)
    return (
        frame
        or year
        or site
        or (best.bare and ((best.restarts and grid) or tagged))
        or (crossed and not best.sparse)
    )


def tells_apart(column: Column, stems: Sequence[str], labels: Sequence[Hashable]) -> bool:
    """Return whether numbers may be persons' ids, instead of a counter that restarts per class.

    They may be ids if four conditions are met: more than FEWEST pairs of names share a number;
    names with the same number always differ in their words, such as left and right; there are few
    different words; and each class has several of these words. With a counter that restarts, names
    with the same number would differ only in the word for the class.
    """
    words = [re.sub(r"\d+", "", stem) for stem in stems]
    of_class = Counter(label for _, label in {*zip(words, labels, strict=True)})
    distinct = len({*zip(column.values, words, strict=True)}) == len(words)
    return distinct and min(of_class.values()) > 1 and len({*words}) <= FEWEST < column.pairs


def pattern_before_counter(column: Column) -> str | None:
    """Return a pattern for ids with a counter directly after them, such as 1017 in 1017002.

    The counter has a fixed number of digits, and starts at 0 or 1 for each id. Returns None if the
    numbers of `column` do not have this form.
    """
    values = [value or "" for value in column.values]
    if len({*map(len, values)}) > 1:
        return None
    for width in range(min(4, len(values[0]) - 1), 0, -1):
        counters: dict[str, list[int]] = {}
        for value in values:
            counters.setdefault(value[:-width], []).append(int(value[-width:] or 0))
        runs = [sorted(run) for run in counters.values()]
        counter_runs = [
            run
            for run in runs
            if run[0] < 2 and run[-1] - run[0] + 1 == len(run) < 10**width - run[0]
        ]
        if FEWEST <= len(runs) <= len(values) / 2 and len(counter_runs) > 0.9 * len(runs):
            return rf"(\D*\d+)\d{{{width}}}(?!\d)"
    return None


def beginning(stems: Sequence[str]) -> str:
    """Build a pattern for dates, sides and views at the start of names.

    These identify no person, so they are skipped. The pattern is empty if most names start
    differently.
    """
    sides = rf"(?i:{SIDE_WORDS})[-_ ]+(?=\S)"
    words = [match[0].rstrip("-_ ").lower() for stem in stems if (match := re.match(sides, stem))]
    dates = 2 * sum(bool(re.match(rf"{DATE}[-_ ]+\S", stem)) for stem in stems) > len(stems)
    ways = []
    if dates:
        ways.append(DATE)
    if 2 * len(words) > len(stems):
        ways.append(f"(?i:{'|'.join(sorted({*words}))})")
    if not ways:
        return ""
    return rf"(?:(?:{'|'.join(ways)})[-_ ]+)?"


def repeated_folders(folders: Sequence[str], labels: Sequence[Hashable]) -> bool:
    """Return whether images are in folders that may belong to persons.

    There must be at least FEWEST such folders, and some of them must contain several images.
    Folders of classes and of parts of a set do not count.
    """
    names = [PurePath(folder).name for folder in folders]
    column = Column(values=names, pattern="", kind="words")
    candidates = [name for name in column.counts if not is_filing(name)]
    return len(candidates) >= FEWEST and column.repeated and not is_of_class(column, labels)


def proposal_of(pattern: str, names: Sequence[str], reason: str) -> Repeats:
    """Return `pattern` as a proposal, with the number of ids that it finds in `names`.

    The examples in the proposal are two names with different ids.
    """
    ids_by_name = {name: match[1] for name in names if (match := re.search(pattern, name))}
    examples: dict[str, str] = {}
    for name, person in ids_by_name.items():
        examples.setdefault(person, name)
    first_examples = tuple((name, person) for person, name in examples.items())[:2]
    return Repeats(why=reason, groups=pattern, examples=first_examples, persons=len(examples))


def word_and_number_columns(stems: Sequence[str], class_words: Sequence[str]) -> Iterator[Column]:
    """Yield a column of the words in the names, and a column for each run of digits.

    The columns are in the order in which they occur in the names.
    """
    words = word_column(stems, class_words)
    runs = [[*re.finditer(r"\d+", stem)] for stem in stems]
    leading = sum(bool(re.match(rf"[\W_]*{WORD}", stem)) for stem in stems) > len(stems) / 2
    if words and leading:
        yield words
    for position, row in enumerate(zip_longest(*runs)):
        yield number_column(position, row, [*map(len, runs)])
        if words and not leading and position == 0:
            yield words


def word_column(stems: Sequence[str], class_words: Sequence[str]) -> Column | None:
    """Return a column with the words that may be a person's name, from each file name.

    These are the first words in a name. Words for sides, copies, files, parts of a set or classes
    are skipped. Returns None if there are no such words.
    class_words: words of class names.
    """
    neutral = re.compile(
        rf"(?:{'|'.join([SIDE_WORDS, COPY_WORDS, FILE_WORDS, SERIES_WORDS, *class_words])})s?",
        re.IGNORECASE,
    )
    words = {word for stem in stems for word in re.findall(WORD, stem)}
    # True if persons or pictures are named a, b, c, ...
    lettered = sum(len(word) == 1 for word in words) >= FEWEST
    left_out = sorted(
        {w.lower() for w in words if neutral.fullmatch(w) and not (lettered and len(w) == 1)}
    )
    skipped = f"(?i:{'|'.join(left_out)})(?!{WORD})"
    lookahead = ""
    skip = r"[\W\d_]*"
    if left_out:
        lookahead = f"(?!{skipped})"
        skip = rf"[\W\d_]*(?:{skipped}[\W\d_]*)*"
    separator = (
        # within a person's name, a dot only follows an initial
        rf"[-_ ,^'\u0300-\u036f]|(?<=\b{LETTER})\."
    )
    pattern = rf"{skip}({lookahead}{WORD}(?:(?:{separator})+{lookahead}{WORD})*)(?=.*\.)"
    matches = [re.match(pattern, f"{stem}.") for stem in stems]
    if not any(matches):
        return None
    return Column(values=[match and match[1] for match in matches], pattern=pattern, kind="words")


def number_column(
    position: int, row: Sequence[re.Match[str] | None], lengths: Sequence[int]
) -> Column:
    """Return the column of the runs of digits at one place in the names.

    position: position of the run among all runs of digits in a name, from 0;
    row: match of this run in each name, None if the name has fewer runs;
    lengths: number of runs in each name.
    """
    values = [match and match[0] for match in row]
    heads = [(m.string[: m.start()], length) for m, length in zip(row, lengths, strict=True) if m]
    tails = {re.split(r"\d", head)[-1] for head, _ in heads}
    words_before = {re.split(r"[\W_]", tail.rstrip("-_. "))[-1] for tail in tails}
    glued_words = {re.split(r"[\W_]", tail)[-1] for tail in tails}
    padded = all(value is None or len(value) > 2 or value[0] == "0" for value in values)
    # Matches names such as 012_S_0034, which contain the numbers of a site and of a subject
    at_site = all(re.search(r"\d_S_$", head) for head, _ in heads)
    if len({*map(int, filter(None, values))}) < len({*values} - {None}):
        # Leading zeros are left out, because otherwise two ids could differ only in zeros
        pattern = rf"{times(ONE_NUMBER, position)}\D*0*(\d+)"
    elif at_site or (len({head for head, _ in heads}) == 1 and heads[0][0]):
        pattern = f"({times(ONE_NUMBER, position + 1)})"
    elif len(glued_words) == 1 and {*glued_words} != {""}:
        pattern = rf"{times(ONE_NUMBER, position)}\D*?({WORD}\d+)"
    else:
        pattern = rf"{times(ONE_NUMBER, position)}\D*(\d+)"
    return Column(
        values=values,
        pattern=pattern,
        kind="number",
        named=len(words_before) == 1
        and all(
            word
            and not re.fullmatch(f"{SIDE_WORDS}|{COPY_WORDS}|{FILE_WORDS}", word, re.IGNORECASE)
            for word in words_before
        ),
        of_file=all(
            word and re.fullmatch(FILE_WORDS, word, re.IGNORECASE) for word in words_before
        ),
        aligned=are_aligned(heads),
        neutral=all(re.fullmatch(SERIES_WORDS, word, re.IGNORECASE) for word in words_before),
        personal=at_site
        or all(PERSON.fullmatch(word) or (word == "P" and padded) for word in words_before),
    )


def times(pattern: str, count: int) -> str:
    """Build a pattern that matches `count` repetitions of `pattern`."""
    if count < 2:
        return pattern * count
    return rf"(?:{pattern}){{{count}}}"


def chunk_columns(stems: Sequence[str]) -> list[Column]:
    """Return the parts of the names between separators as columns.

    Returns [] unless letters and digits are mixed in some part, as in hexadecimal ids.
    """
    chunks = [re.findall(r"[^\W_]+", stem) for stem in stems]
    rows = [*zip_longest(*chunks)]
    coded = re.compile(rf"{WORD}\d+[a-z]?")  # codes with a number, such as AACA1 and Nal001a
    are_codes = len(rows) == 1 and sum(map(bool, map(coded.fullmatch, rows[0]))) > 0.9 * len(stems)
    if are_codes or not any(mixes({*filter(None, values)}) for values in rows):
        return []
    columns = []
    for position, values in enumerate(rows):
        distinct_values = {*filter(None, values)}
        kind = "mixed"
        if all(map(str.isdecimal, distinct_values)):
            kind = "number"
        elif all(map(str.isalpha, distinct_values)):
            kind = "words"
        skip = times(r"[^\W_]+[\W_]+", position)
        columns.append(Column(values=values, pattern=rf"{skip}([^\W_]+)", kind=kind))
    return columns


def mixes(chunks: set[str]) -> bool:
    """Return whether letters and digits alternate in many different ways.

    They do in hexadecimal ids, but not in ids such as P001a or C33P1thin.
    """
    forms = {
        chunk: re.sub(r"\d+", "0", chunk)
        for chunk in chunks
        if re.search(rf"\d.*{WORD}|{WORD}.*\d", chunk)
    }
    form_counts = Counter(forms.values())
    rare_forms = [form for form in forms.values() if form_counts[form] < max(3, len(chunks) / 20)]
    return len({*rare_forms}) >= FEWEST and len(rare_forms) > len(chunks) / 5


def are_aligned(heads: Sequence[tuple[str, int]]) -> bool:
    """Return whether the same text precedes a number in names with more and with fewer numbers.

    Names are grouped by how many numbers they contain. Returns True if there is only one group.
    Otherwise, the text before the number is compared. In each group, at least one such text must
    also occur in another group. Case and the values of numbers in the text do not matter.

    heads: for each name, the text before the number, and how many numbers the name contains.
    """
    words: dict[int, set[str]] = {}
    for head, length in heads:
        words.setdefault(length, set()).add(re.sub(r"\d+", "0", head.lower()))
    parts = [*words.values()]
    return len(parts) < 2 or all(
        part & {*chain.from_iterable(other for other in parts if other is not part)}
        for part in parts
    )


def split_at_first_unique(
    columns: Sequence[Column], keys: Sequence[Hashable]
) -> tuple[list[Column], list[Column]]:
    """Split the columns at the first one that, with all columns before it, makes names unique.

    That column comes first in the second list. keys: one value per name, such as its folder; only
    names with the same value need to differ.
    """
    for position, column in enumerate(columns):
        numbers: dict[Hashable, int] = {}
        keys = [
            numbers.setdefault(pair, len(numbers)) for pair in zip(keys, column.values, strict=True)
        ]
        if len(numbers) == len(keys):
            return [*columns[:position]], [*columns[position:]]
    return [*columns], []


def is_of_class(column: Column, labels: Sequence[Hashable]) -> bool:
    """Return whether a column only encodes the class: each value occurs in a single class, and each
    class has a single value.
    """
    pairs = {
        (value, label)
        for value, label in zip(column.values, labels, strict=True)
        if value is not None
    }
    return len(pairs) == len(column.counts) == len({label for _, label in pairs})


def series_of(stem: str, class_words: Sequence[str]) -> str:
    """Return the words for files, parts of a set or classes, if they come before the first digit.

    Names that differ in these words may belong to different series, with a counter for each.
    """
    head = re.split(r"\d", stem, maxsplit=1)[0].lower()
    series_pattern = re.compile("|".join([FILE_WORDS, SERIES_WORDS, *class_words]))
    return " ".join(word for word in re.findall(WORD, head) if series_pattern.fullmatch(word))
