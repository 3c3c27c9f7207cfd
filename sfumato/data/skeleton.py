"""Write a skeleton of a folder: a copy of its structure without its content.

If `stage init` cannot read a folder, its owner can send the skeleton with a question. Words,
numbers and dates in paths and tables are replaced, with the exceptions that ABOUT lists. Pictures
are replaced by random pixels of the same size. The skeleton is not differentially private, so the
owner should look through it before sending it.
"""

import hashlib
import hmac
import io
import json
import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePosixPath
from random import Random, SystemRandom

import numpy as np
from PIL import Image
from PIL.ExifTags import IFD, Base

from sfumato.data.companions import COMPANION
from sfumato.data.dates import ANY_DATE, in_case_of, move_date, orders_in
from sfumato.data.decoding import format_at, pixel_form, read_whole, with_progress
from sfumato.data.groups import ID_WORDS
from sfumato.data.images import GROUPS
from sfumato.data.labels_and_ids import LABELLED
from sfumato.data.names import COPY_WORDS, FILE_WORDS, PERSON, SERIES_WORDS, SIDE_WORDS, TIME, WORD
from sfumato.data.sources.bids import DESCRIPTION, PARTICIPANT, PARTICIPANTS
from sfumato.data.sources.splits import PARTS
from sfumato.data.sources.tabled import files_below
from sfumato.data.tables import NAMING, TABLES
from sfumato.errors import ConfigError, DataError, reading_sensitive
from sfumato.storage.files import open_private, replacing
from sfumato.storage.limits import room_for_picture

TEXT_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl")
KNOWN_SUFFIXES = {*Image.registered_extensions(), *TEXT_TABLES}
KNOWN_SUFFIXES |= {".dcm", ".nii", ".gz", ".zip", ".tar"}
KNOWN_SUFFIXES |= {".npz", ".npy", ".parquet", ".xlsx", ".xml"}
# Words that have a meaning for this program. They are not replaced, because otherwise the program
# would interpret the copy differently from the original.
KEPT = re.compile(
    rf"{SIDE_WORDS}|{COPY_WORDS}|({FILE_WORDS}|{SERIES_WORDS})s?|{'|'.join(PARTS)}|{PERSON.pattern}"
    rf"|{COMPANION.pattern}|{LABELLED.pattern}|{NAMING.pattern}|relative|no|ids?|code|index"
    rf"|name|groups?|raw|p|t|ce"
    rf"|gd|w|true|false|{'|'.join(map(re.escape, ID_WORDS['unknown'].split()))}",
    re.IGNORECASE,
)
KEPT_FILES = {*TABLES, PARTICIPANTS, DESCRIPTION, GROUPS}  # file names that are not replaced
HEXADECIMAL = r"(?<![^\W_])(?=[a-f]*\d+[a-f]+\d|\d*[a-f]+\d+[a-f])[\da-f]{6,}(?![^\W_])"
ANY_SUFFIX = "|".join(re.escape(suffix) for suffix in sorted(KNOWN_SUFFIXES, reverse=True))
# A path of a file, such as 3/12/45.png, is not a date
PATH = rf"""\d\d?/\d+/[^\s,;"']{{0,255}}(?:{ANY_SUFFIX})"""
TOKEN = re.compile(
    rf"(?P<same>(?:{ANY_SUFFIX})(?![^\W_]))"
    rf"|(?P<date>(?!{PATH}){ANY_DATE}(?:\D{{0,4}}{TIME}|[ T]\d\d?:\d\d)?(?!\d))"
    rf"|(?P<hex>{HEXADECIMAL})|(?P<word>{WORD})|(?P<number>\d+)|(?P<mark>[\u0300-\u036f])",
    re.IGNORECASE,
)
YEARS = range(1900, 2050)
# Words for a person. In the copy, each is replaced by another of these words, one that the folder
# does not use. So a name such as `person23` in the copy does not occur in the folder.
NOUNS = ("person", "patient", "subject", "participant", "volunteer")
NOUN = re.compile(rf"({'|'.join(NOUNS)})(?=(s?(id|no|nr)?)$)", re.IGNORECASE)
# Words that are replaced although KEPT matches them: they may mean an annotation or a patient, but
# they may also be names of persons
FIRST_NAMES = {"ann", "pat"}
SPARSE = 20  # numbers with a larger mean distance between neighbours are ids, not a counter
TIMES = (Base.DateTime, Base.DateTimeOriginal, Base.DateTimeDigitized)
ABOUT = """\
This is a disguised copy of a folder, made by `stage doctor --skeleton`. Look through it before you
send it.

In names and tables, the letters of each word are replaced. Only the words listed below are
unchanged. A word has the same replacement everywhere. If two words begin alike, their replacements
begin alike too. Numbers that count from 1 without a gap are unchanged. Other numbers are replaced
by numbers with equally many digits. A replacement can equal the original, above all if the folder
contains almost all numbers with that many digits. A word for a person, such as patient, is replaced
by another such word that the folder does not contain, such as subject.

All dates are moved back by the same secret number of days, between one and ten years. A date has a
day, a month and a year. Its month may be a name in English or German. A year of two digits is
recognised in dates such as 27.8.96, 8/27/96, 27-08-96 and 27-Aug-96. If a date is written in any
other way, its words and numbers are replaced like other words and numbers. A year without a month
and a day is moved back by about the same time if the folder contains no other numbers of four
digits. Otherwise, it is replaced like other numbers.

Pictures have random pixels and the size of the original.
{kept}

Files that are neither readable pictures nor text tables were not copied. Number of these files:
{count}. The following list contains the new name, the size and the format of each of them:
"""


@dataclass
class Disguise:
    """A callable that replaces the words, numbers, dates and hexadecimal ids in names and tables.

    Equal words get the same replacement, and so do equal numbers, dates and ids. The replacements
    depend on a secret key and other random numbers, which are not stored.

    texts: all texts in which words will be replaced; generator: source of the key and of the other
    random numbers; kept: words that were left unchanged.
    """

    texts: Iterable[str]
    generator: Random = field(default_factory=SystemRandom)
    kept: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.key = self.generator.randbytes(32)
        self.days = timedelta(days=self.generator.randrange(365, 3653))
        words = set()
        numbers = set()
        dates = set()
        for text in self.texts:
            for match in TOKEN.finditer(text):
                words.add(match["word"] or "")
                numbers.add(int(match["number"] or 0))
                dates.add(match["date"] or "")
        self.orders = orders_in(dates - {""})
        years = round(self.days / timedelta(days=365.25))
        self.numbers = replace_numbers(numbers - {0}, years, self.generator)
        nouns = {noun[1].lower() for noun in map(NOUN.match, words) if noun}
        unused = [noun for noun in NOUNS if noun not in nouns]
        self.nouns = dict(zip(sorted(nouns), unused, strict=False))

    def __call__(self, text: str) -> str:
        return TOKEN.sub(self.replace_token, text)

    def replace_token(self, match: re.Match[str]) -> str:
        token = match[0]
        if match["word"]:
            return self.replace_word(token)
        if match["number"]:
            number = int(token)
            return str(self.numbers.get(number, number)).zfill(len(token))
        if match["date"]:
            return move_date(token, self.days, self.orders)
        if match["hex"]:
            return self.digest(token.lower()).hex()[: len(token)]
        return match["same"] or ""

    def digest(self, text: str) -> bytes:
        return hmac.digest(self.key, text.encode(), hashlib.sha256)

    def replace_word(self, token: str) -> str:
        """Replace a word, unless it is kept.

        A word for a person, one of NOUNS, is replaced by another of NOUNS. In any other word, the
        letters are replaced.
        """
        if (noun := NOUN.match(token)) and (replacement := self.nouns.get(noun[1].lower())):
            return in_case_of(noun[1], replacement) + token[noun.end() :]
        if stays(token):
            self.kept.add(token.lower())
            return token
        replacement = self.replace_letters(token)
        while stays(replacement):
            if not token.isascii():
                # Without an added letter, the loop might only go round a cycle of kept words
                replacement += "x"
            replacement = self.replace_letters(replacement)
        return replacement

    def replace_letters(self, token: str) -> str:
        """Replace each letter by one that depends on it and on the earlier letters of the word.

        Words that begin alike are therefore replaced by words that begin alike. Upper and lower
        case do not change. The letters a to f are replaced among themselves, because they may be
        hexadecimal digits.
        """
        letters = []
        for position, letter in enumerate(token):
            alphabet = "abcdef" if letter.lower() in "abcdef" else "ghijklmnopqrstuvwxyz"
            order = np.frombuffer(self.digest(token[:position].lower()), np.uint8)[: len(alphabet)]
            index = alphabet.find(letter.lower())
            if index < 0:  # a letter of another alphabet
                index = self.digest(token[: position + 1].lower())[0] % len(alphabet)
            replacement = alphabet[np.argsort(order, kind="stable")[index]]
            letters.append(replacement.upper() if letter.isupper() else replacement)
        return "".join(letters)


def stays(word: str) -> bool:
    return KEPT.fullmatch(word) is not None and word.lower() not in FIRST_NAMES


def replace_numbers(numbers: set[int], years: int, generator: Random) -> dict[int, int]:
    """Return a replacement for each number.

    The numbers 1, 2, 3 and so on stay the same, up to the first one that does not occur. If all
    other numbers of four digits are years, `years` is subtracted from them, unless a result would
    equal a number that stays the same. The remaining numbers are grouped by their number of digits.
    The replacements in a group have the same number of digits as the originals, and the same
    difference between the largest and the smallest. They have the order of the originals, unless
    the average distance between the originals is above SPARSE. In that case, the replacements are
    shuffled.
    """
    first_missing = 1
    while first_missing in numbers:
        first_missing += 1
    replacements = {number: number for number in numbers if number < first_missing}
    for digits in {len(str(number)) for number in numbers}:
        originals = sorted(n for n in numbers if len(str(n)) == digits and n not in replacements)
        earlier = [n - years for n in originals]
        if all(n in YEARS for n in originals) and replacements.keys().isdisjoint(earlier):
            replacements |= zip(originals, earlier, strict=True)
            continue
        span = originals[-1] - originals[0]
        ids = span > SPARSE * len(originals)
        first = 10 ** (digits - 1)
        start = generator.randrange(first, 10**digits - span)
        while start in YEARS or start + span in YEARS:  # these would be interpreted as years
            start = generator.randrange(first, 10**digits - span)
        if (
            not ids
            and any(len(str(n)) == digits - 1 for n in numbers)
            and originals[0] < 1.5 * first
        ):
            # These numbers continue a range of shorter ones, as 100 continues 99
            start = originals[0]
        values = {start, start + span}
        while len(values) < len(originals):
            values.add(start + generator.randrange(span))
        new_numbers = sorted(values)
        if ids:
            generator.shuffle(new_numbers)
        replacements |= zip(originals, new_numbers, strict=True)
    return replacements


def write_skeleton(folder: Path, path: Path) -> tuple[int, int, list[str]]:
    """Write the skeleton of a folder as a zip.

    Returns the number of pictures, the number of files that were not copied, and the words that
    were left unchanged. Raises ConfigError if `folder` is not a folder, or if `path` exists.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder: give the path of a folder. If it is an archive, unpack it "
            "first"
        )
    if path.exists():
        raise ConfigError(
            "{path} exists: remove it, or name another file with {option.out}",
            option="out",
            path=path,
        )
    reading_sensitive()
    files = [file for file in files_below(folder) if file.is_file()]
    names = {file: file.relative_to(folder).as_posix() for file in files}
    texts = {file: text for file in files if (text := table_text(file)) is not None}
    disguise = Disguise([*names.values(), *texts.values()])
    skipped_files = []
    pictures = 0
    with (
        replacing(path) as temporary,
        open_private(temporary) as output,
        zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for file in with_progress(files, len(files), "copying"):
            target = str(PurePosixPath("skeleton", disguise(names[file])))
            if file.name in KEPT_FILES:
                target = str(PurePosixPath(target).with_name(file.name))
                disguise.kept.add(file.name)
            content: bytes | str | None = picture_content(file, disguise)
            pictures += content is not None
            if file in texts:
                content = table_content(texts[file], file.suffix.lower(), disguise)
                if file.name == PARTICIPANTS:  # without this column, the copy would be refused
                    content = content.replace(disguise(PARTICIPANT), PARTICIPANT, 1)
                    disguise.kept.add(PARTICIPANT)
            if content is None:
                kind = format_at(file)
                format_name = "unknown format, or damaged"
                if kind:
                    format_name = kind.name
                skipped_files.append(f"{target}: {file.stat().st_size} bytes, {format_name}\n")
            else:
                archive.writestr(target, content)
        kept_words = sorted(disguise.kept)
        words = f"Unchanged words: {', '.join(kept_words) or 'none'}."
        readme = ABOUT.format(kept=words, count=len(skipped_files))
        archive.writestr("README.txt", readme + "".join(skipped_files))
    return pictures, len(skipped_files), kept_words


def table_text(file: Path) -> str | None:
    """Return the text of a table, or None for other files."""
    if file.suffix.lower() in TEXT_TABLES:
        with suppress(UnicodeDecodeError):
            return file.read_text("utf-8-sig")
    return None


def table_content(text: str, suffix: str, disguise: Disguise) -> str:
    """Replace the tokens of a table. In JSON, escape sequences are decoded first."""
    if suffix not in (".json", ".jsonl"):
        return disguise(text)
    lines = text.splitlines() if suffix == ".jsonl" else [text]
    with suppress(ValueError):
        lines = [json.dumps(json.loads(line), ensure_ascii=False) for line in lines if line]
    return disguise("\n".join(lines))


def picture_content(file: Path, disguise: Disguise) -> bytes | None:
    """Return a copy of a picture file with random pixels; None for a file that is not a picture.

    Format, size and mode are the same. Times and the device in its EXIF data are replaced.
    """
    try:
        with (
            Image.open(read_whole(file)) as picture,
            room_for_picture(str(file), picture.height, picture.width, *pixel_form(picture)),
        ):
            coloured = np.ptp(np.asarray(picture.convert("RGB")), axis=2).max() > 0
            exif = replace_exif(picture.getexif(), disguise)
            form = picture.format
            mode = picture.mode
            size = picture.size
    except (OSError, ValueError, SyntaxError, DataError, Image.DecompressionBombError):
        return None
    pixels = np.random.default_rng().integers(256, size=(8, 8, 3), dtype=np.uint8)
    copy = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
    if mode.startswith("I;16"):
        copy = Image.fromarray(np.asarray(copy.convert("L"), np.uint16) * 257)
    elif not coloured:
        copy = copy.convert("L").convert(mode)
    elif mode != "RGB":
        copy = copy.convert(mode)
    content = io.BytesIO()
    with suppress(OSError, KeyError, ValueError):
        copy.save(content, form, exif=exif)
        return content.getvalue()
    return None


def replace_exif(exif: Image.Exif, disguise: Disguise) -> Image.Exif:
    """Return new EXIF data with only the times and the device of a picture, both replaced."""
    copy = Image.Exif()
    for source, target in ((exif, copy), (exif.get_ifd(IFD.Exif), copy.get_ifd(IFD.Exif))):
        for tag in {*TIMES} & {*source}:
            target[tag] = disguise(str(source[tag]))
        if Base.BodySerialNumber in source:
            serial = str(source[Base.BodySerialNumber])
            target[Base.BodySerialNumber] = disguise.digest(serial).hex()
    return copy
