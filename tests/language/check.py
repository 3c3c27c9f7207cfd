"""Look for kinds of sentence that the project avoids, in its code and pages: `make lint` runs it.

    python tests/language/check.py        exit code 1, and a line for each place, if there are any

The kinds are in `kinds.yaml`. It also lists permitted uses, and in how many lines each may occur.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECKED = (
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
    ".github",
    "docs",
    "paper",
    "pipelines",
    "sfumato",
    "stages",
)
GENERATED = ("docs/reference.md", "docs/gallery", "docs/notebooks")
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".html")
# Parts to skip because they are not prose: values in f-strings and templates, tags, code spans,
# targets of links
CODE_PARTS = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{[^{}]*\}|<[^>]*>|`[^`]*`|\]\([^)]*\)")
FSTRING = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # exists from Python 3.12 on


@dataclass(frozen=True)
class Text:
    """A piece of text in a file. sort: comments, docstrings, strings, pages, names or assembled."""

    place: str
    sort: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of sentence to avoid; see `kinds.yaml`."""

    name: str
    sorts: tuple[str, ...]
    pattern: re.Pattern[str]
    instead: str
    example: str
    allowed: dict[str, int]


def kinds() -> list[Kind]:
    """Read the kinds."""
    found = []
    for name, entry in yaml.safe_load(
        Path(__file__).with_name("kinds.yaml").read_text("utf-8")
    ).items():
        pattern = re.compile(entry.pop("pattern", ""))
        sorts = entry.pop("in")
        found.append(
            Kind(
                name=name,
                pattern=pattern,
                sorts=(sorts,) if isinstance(sorts, str) else (*sorts,),
                **entry,
            )
        )
    return found


def files(root: Path) -> list[Path]:
    """Return the files to check, without generated ones."""
    found: list[Path] = []
    for place in (root / name for name in CHECKED):
        found += [place] if place.is_file() else place.rglob("*")
    left_out = tuple(str(root / name) for name in GENERATED)
    return sorted(
        path for path in found if path.suffix in SUFFIXES and not str(path).startswith(left_out)
    )


def texts_of(path: Path, name: str) -> Iterator[Text]:
    """Yield the pieces of text in a file. name: its path in messages."""
    content = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from (
            Text(f"{name}:{i}", "pages", prose(line))
            for i, line in enumerate(content.splitlines(), 1)
        )
        return
    tree = ast.parse(content)
    docstrings = set()
    for node in ast.walk(tree):
        place = f"{name}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            text := ast.get_docstring(node)
        ):
            docstrings.add(node.body[0].lineno)
            yield Text(place, "docstrings", prose(text))
        if isinstance(node, ast.Raise):
            yield from (
                Text(place, "assembled", ast.unparse(part))
                for part in ast.walk(node)
                if is_assembled(part)
            )
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Text(place, "names", node.id)
        if isinstance(node, ast.arg | ast.FunctionDef):
            yield Text(place, "names", node.arg if isinstance(node, ast.arg) else node.name)
    # Number of the last line that contains only a comment. A comment on the next line may continue
    # its sentence.
    comment = -1
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        place = f"{name}:{token.start[0]}"
        if token.type == tokenize.COMMENT:
            text = prose(token.string.lstrip("# "))
            yield Text(place, "comments", f"… {text}" if comment == token.start[0] - 1 else text)
            comment = token.start[0] if token.line.lstrip().startswith("#") else -1
        elif token.type in (tokenize.STRING, FSTRING) and token.start[0] not in docstrings:
            text = prose(token.string.lstrip("rbfuRBFU").strip("\"'")).strip()
            if " " in text:  # otherwise it is a name
                yield Text(place, "strings", text)


def prose(text: str) -> str:
    """Remove code from a text. A pair of braces may contain other pairs, but only one level."""
    return CODE_PARTS.sub("", CODE_PARTS.sub("", text))


def is_assembled(node: ast.AST) -> bool:
    """Return whether an f-string puts several texts together and has no word of its own."""
    if not isinstance(node, ast.JoinedStr):
        return False
    own = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return (
        not re.search("[A-Za-z]", own)
        and sum(isinstance(part, ast.FormattedValue) for part in node.values) > 1
    )


def found_in(kind: Kind, texts: Sequence[Text]) -> list[Text]:
    """Return the lines with a sentence of this kind, without permitted ones."""
    used: Counter[str] = Counter()
    found = []
    for text in texts:
        for line in text.text.splitlines()[: 1 if kind.name == "relative docstring" else None]:
            if text.sort not in kind.sorts or not kind.pattern.search(line):
                continue
            fragment = next(
                (fragment for fragment in sorted(kind.allowed, key=len)[::-1] if fragment in line),
                None,
            )
            used[fragment or ""] += 1
            if fragment is None or used[fragment] > kind.allowed[fragment]:
                found.append(Text(text.place, text.sort, line.strip()))
    return found


def problems(root: Path) -> list[str]:
    """Return one line for each place of any kind below `root`."""
    texts = [text for path in files(root) for text in texts_of(path, str(path.relative_to(root)))]
    return [
        f"{text.place}: {kind.name}: {text.text[:120]!r}. Write: {kind.instead}"
        for kind in kinds()
        for text in found_in(kind, texts)
    ]


if __name__ == "__main__":
    found = problems(ROOT)
    print(*found, sep="\n")
    sys.exit(bool(found))
