"""Write docs/api.md: what each public name takes, returns, raises and guarantees, by its signature
and its docstring.

The page is written by hand but for what stands between the marks `<!-- sfumato.NAME -->` and
`<!-- /sfumato.NAME -->`. The first of them may name the methods and properties of a class that are
shown, by default all. A docstring of this package is a summary, a blank line, and then sections in
Google's format: `Args:`, `Returns:`, `Yields:`, `Raises:`, `Guarantee:`, `Source:`. A short one has
sentences
instead: `name: what it is; name: …`, `Returns …`, `Raises …`. A field of a class is described
by its comment.

    python docs/generate.py            # writes this page too
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

MARKS = re.compile(r"(<!-- (sfumato[\w.]*)((?: \w+)*) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
NAMES = re.compile(r"(?:^|(?<=[.;] ))([a-z]\w*(?:, [a-z]\w*)*): ")
CLAUSES = ("Returns", "Yields", "Raises", "Guarantee", "Source")
CLAUSE = re.compile(rf"(?:^|(?<=[.] ))({'|'.join(CLAUSES)})\b:? ?")
SECTION = re.compile(rf"(Args|{'|'.join(CLAUSES)}):\n(.*)", re.DOTALL)
ENTRY = re.compile(r"^ {4}(?=\S)", re.MULTILINE)  # start of an entry of a section


class Docstring(NamedTuple):
    """The parts of a docstring. clauses: the sentences that start with one of CLAUSES, by that
    word.
    """

    prose: list[str]
    parameters: dict[str, str]
    clauses: dict[str, str]


def parsed(thing: Any) -> Docstring:
    """The docstring of a function, a class or a property, in parts."""
    prose: list[str] = []
    parameters: dict[str, str] = {}
    clauses: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", inspect.getdoc(thing) or ""):
        text = " ".join(paragraph.split())
        if section := SECTION.match(paragraph):
            title, body = section.groups()
            if title == "Args":
                parameters |= arguments_in(body)
            else:
                clauses[title] = " ".join(body.split())
            continue
        described, *stated = CLAUSE.split(text)
        clauses |= {
            word: clauses.get(word, "") + said
            for word, said in zip(stated[::2], stated[1::2], strict=True)
        }
        before, *rest = NAMES.split(described)
        if before.strip():
            prose.append(before.strip())
        for names, said in zip(rest[::2], rest[1::2], strict=True):
            parameters |= dict.fromkeys(names.split(", "), said.strip().rstrip(";"))
    return Docstring(prose, parameters, {word: said.strip() for word, said in clauses.items()})


def arguments_in(body: str) -> dict[str, str]:
    """Read the entries of an `Args:` section: each parameter's name and its meaning."""
    entries = [" ".join(entry.split()) for entry in ENTRY.split(body) if entry.strip()]
    parts = [entry.partition(": ") for entry in entries]
    return {name.lstrip("*"): meaning for name, _, meaning in parts}


def located(name: str) -> Any:
    """The object of a public name, such as `sfumato.errors.DataError`."""
    place, _, last = name.rpartition(".")
    return getattr(import_module(place), last)


def type_of(annotation: Any) -> str:
    """A type as the code has it, without the modules that names come from."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text)


def parameter_rows(
    function: Any, described: dict[str, str], comments: dict[str, str]
) -> Iterator[tuple[str, ...]]:
    """(name, type, default, meaning) of each parameter but `self`. comments: of the fields of a
    dataclass.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        shown = {parameter.VAR_KEYWORD: f"**{name}", parameter.VAR_POSITIONAL: f"*{name}"}.get(
            parameter.kind, name
        )
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        meaning = described.get(name) or comments.get(name, "")
        yield f"`{shown}`", f"`{type_of(parameter.annotation)}`", default, meaning.rstrip(".")


class Section:
    """What the page says of a name. table, comments_of: those of the other generator."""

    def __init__(
        self, name: str, thing: Any, table: Callable[..., str], comments_of: Callable[..., Any]
    ) -> None:
        self.name, self.thing, self.table = name, thing, table
        self.comments = comments_of(thing) if inspect.isclass(thing) else {}
        self.docstring = parsed(thing)

    @cached_property
    def rows(self) -> list[tuple[str, ...]]:
        """Of its parameters; none for a property, an error, and a class that only the package
        makes.
        """
        kind = self.thing if inspect.isclass(self.thing) else None
        if not callable(self.thing) or (kind and issubclass(kind, Exception)):
            return []
        rows = list(parameter_rows(self.thing, self.docstring.parameters, self.comments))
        by_hand = (
            kind is not None
            and inspect.isfunction(kind.__init__)
            and not hasattr(kind, "__match_args__")
        )
        return [] if by_hand and not all(row[3] for row in rows) else rows

    def lines(self) -> Iterator[str]:
        yield from self.docstring.prose
        if self.rows:
            yield self.table(("parameter", "type", "default", "meaning"), self.rows)
        stated = [f"- **{word}** {said}" for word, said in self.docstring.clauses.items()]
        if stated:
            yield "\n".join(stated)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that have a docstring, in the order of the
    code.
    """
    for name, member in vars(kind).items():
        called = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if (
            not name.startswith("_")
            and (inspect.isfunction(called) or isinstance(called, property))
            and called.__doc__
        ):
            yield name, called


def sections(
    page: str, table: Callable[..., str], comments_of: Callable[..., Any]
) -> Iterator[list[Section]]:
    """For each name that the page has marks of: its section, and of a class those of the members
    shown.
    """
    for _, name, shown, _ in MARKS.findall(page):
        thing = located(name)
        found = [Section(name, thing, table, comments_of)]
        if inspect.isclass(thing) and not issubclass(thing, tuple):
            for member, called in members(thing):
                if not shown or member in shown.split():
                    title = f"{member}()" if inspect.isfunction(called) else member
                    found.append(Section(title, called, table, comments_of))
        yield found


def generated(page: str, table: Callable[..., str], comments_of: Callable[..., Any]) -> str:
    """The page with the part of each name made new."""
    texts = []
    for whole, *inner in sections(page, table, comments_of):
        parts = list(whole.lines())
        for one in inner:
            parts += [f"**`.{one.name}`**", *one.lines()]
        texts.append("\n\n".join(parts))
    remaining = iter(texts)
    return MARKS.sub(lambda marks: f"{marks[1]}\n{next(remaining)}\n\n{marks[4]}", page)
