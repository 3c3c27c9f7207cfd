"""Find dates in a text, and move them without changing the form in which they are written.

The year of a date is its first or its last part, as in 1996-08-27, 27.8.96 or 08/27/1996. The month
may be a name in English or German, as in 27 Aug 1996.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import date, timedelta

from sfumato.data.names import TIME

MONTH_NAMES = """
january february march april may june july august september october november december
januar februar märz april mai juni juli august september oktober november dezember
jan feb mrz apr mai jun jul aug sept okt nov dez
"""
MONTHS = MONTH_NAMES.split()
YEAR = r"(?:19\d|20[0-4])\d"
MONTH = "0[1-9]|1[0-2]"
SHORT_MONTH = rf"{MONTH}|[1-9]"
NAMED_MONTH = "|".join([*MONTHS, *(name[:3] for name in MONTHS)])
CALENDAR_DAY = r"0[1-9]|[12]\d|3[01]"
SHORT_DAY = rf"{CALENDAR_DAY}|[1-9]"
# For each form of a date: a template for its three parts, and patterns for year, month and day
DATE_FORMS = (
    (r"({})([-_./]?)({})([-_./]?)({})", YEAR, MONTH, CALENDAR_DAY),
    (r"({})([-./:年月] ?| )({})([-./:年月] ?| )({})", YEAR, SHORT_MONTH, SHORT_DAY),
    (r"({})([-_./, ]{{0,2}})({})([-_./, ]{{0,2}})({})", YEAR, NAMED_MONTH, SHORT_DAY),
    (r"({})([-./, ]{{1,2}})({})([-./, ]{{1,2}})({})", r"\d\d", NAMED_MONTH, SHORT_DAY),
    # More than three numbers with one separator, as in 1.2.84.3, are not a date
    (r"(?<!\d\.)({})(\.)({})(\.)({})(?!\.\d)", r"\d\d", SHORT_MONTH, SHORT_DAY),
    (r"(?<!\d/)({})(/)({})(/)({})(?!/\d)", r"\d\d", SHORT_MONTH, SHORT_DAY),
    (r"(?<!\d-)({})(-)({})(-)({})(?!-\d)", r"\d\d", MONTH, CALENDAR_DAY),
)
PART_ORDERS = ("dmy", "mdy", "ymd")


def pattern_of(order: str) -> re.Pattern[str]:
    """Build a pattern for dates in all forms, with day, month and year in the given order."""
    forms = []
    for form, year, month, day in DATE_FORMS:
        parts = {"y": year, "m": month, "d": day}
        forms.append(form.format(*(parts[key] for key in order)))
    return re.compile(rf"(?:{'|'.join(forms)})(?=(?:{TIME})?(?!\d))", re.IGNORECASE)


DATE_PATTERNS = {order: pattern_of(order) for order in PART_ORDERS}
# The forms are tried only where a date can start, because trying them everywhere is slow
DATE_START = rf"(?<!\d)(?=\d\d?\D|{YEAR}|\d{{8}}|[a-zä]{{3,9}}[-_./, ]{{0,2}}\d)"
ANY_DATE = rf"{DATE_START}(?:{'|'.join(pattern.pattern for pattern in DATE_PATTERNS.values())})"


def date_parts(text: str, orders: Iterable[str]) -> tuple[str, list[str]]:
    """Split a text that starts with a date.

    Returns the first of `orders` in which the date can be read, and a list of six texts: the first
    part of the date, a separator, the second part, a separator, the third part, and the rest of the
    text.
    """
    order, match = next(
        (order, match) for order in orders if (match := DATE_PATTERNS[order].match(text))
    )
    parts = [part for part in match.groups() if part is not None]
    return order, [*parts, text[match.end() :]]


def orders_in(dates: Iterable[str]) -> Sequence[str]:
    """Return PART_ORDERS, but with "mdy" first if one of the dates cannot be read as "dmy"."""
    if any(date_parts(text, PART_ORDERS)[0] == "mdy" for text in dates):
        return ("mdy", "dmy", "ymd")
    return PART_ORDERS


def move_date(text: str, days: timedelta, orders: Iterable[str]) -> str:
    """Move the date at the start of a text back by `days`, in the form in which it is written.

    The text after the date, such as a time, stays the same. Days after the end of a month count
    into the next month: 30 February 1990 is read as 2 March.

    orders: possible orders of day, month and year; the first one that fits the date is used.
    """
    order, parts = date_parts(text, orders)
    old_parts = dict(zip(order, parts[::2], strict=True))
    month = month_index(old_parts["m"])
    first = date(int(f"20{old_parts['y']}"[-4:]), month % 12 + 1, 1)
    day = first + timedelta(days=int(old_parts["d"]) - 1) - days
    name = MONTHS[month - month % 12 + day.month - 1]
    if old_parts["m"].isdecimal():
        name = str(day.month).zfill(len(old_parts["m"]))
    elif len(old_parts["m"]) == 3:
        name = name[:3]
    new_parts = {
        "y": str(day.year)[-len(old_parts["y"]) :],
        "m": in_case_of(old_parts["m"], name),
        "d": str(day.day).zfill(len(old_parts["d"])),
    }
    parts[::2] = [new_parts[key] for key in order]
    return "".join(parts)


def month_index(text: str) -> int:
    """Return the index of a month in MONTHS, given its number or its name."""
    if text.isdecimal():
        return int(text) - 1
    return next(
        index
        for index, name in enumerate(MONTHS)
        if re.fullmatch(f"{name}|{name[:3]}", text, re.IGNORECASE)
    )


def in_case_of(word: str, text: str) -> str:
    """Write `text` in the case of `word`: all capitals, a first capital, or small letters."""
    if word.isupper():
        return text.upper()
    if word[0].isupper():
        return text.capitalize()
    return text
