"""Reading JSON and YAML files that anyone may have written, with bounds on size, depth and numbers.

Invalid input raises ValueError with a reason (OSError if the file is missing). The result is plain: finite numbers,
integers of 64 bits, text that can be encoded, no key twice. Callers check the structure with `validated`.
"""

import functools
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

DEEPEST = 50  # levels of nested lists and mappings
# control characters, line ends, marks that change the direction of text, unpaired surrogates
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Form = TypeVar("Form")
adapter: Any = functools.cache(TypeAdapter)


class Exact:
    """The base of the form of a file in which an unknown entry is refused."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}


def read_text(path: Path, largest: int = 256 * 2**20) -> str:
    """The text of a regular file of at most `largest` bytes of UTF-8. Pipes and devices are refused at once."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait; Windows has none
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(largest + 1) if about.st_size <= largest else b""
    if max(about.st_size, len(content)) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content.decode("utf-8")


def read_json(path: Path, *, infinite: bool = False) -> Any:
    """The content of a JSON file. infinite: accept NaN and infinities, as in files of other programs."""
    return parse_json(read_text(path), infinite=infinite)


def parse_json(text: str, *, infinite: bool = False) -> Any:
    """The content of a JSON text. An integer of more than 64 bits becomes a float, as in most readers of JSON."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)) and not infinite:
            raise ValueError(f"it contains {text[:24]}: NaN and infinity are not allowed")
        return value

    def integer(text: str) -> int | float:
        return int(text) if len(text) <= 20 and abs(int(text)) < 2**63 else number(text)

    try:
        content = json.loads(text, parse_int=integer, parse_float=number, parse_constant=number, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from error
    check_plain(content)
    return content


def once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    content: dict[Any, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} appears twice: remove one")
        content[key] = value
    return content


def check_plain(content: Any, level: int = 0) -> None:
    """Raise ValueError for nesting deeper than DEEPEST, integers above 64 bits, and text with unpaired surrogates."""
    if isinstance(content, str):
        content.encode()
    elif isinstance(content, int):
        if abs(content) >= 2**63:
            raise ValueError(f"the number {str(content)[:24]}… is too large")
    elif isinstance(content, (dict, list)):
        if level == DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        for inner in (*content, *content.values()) if isinstance(content, dict) else content:
            check_plain(inner, level + 1)


class PlainYaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML that refuses a key given twice, and numbers that would take long to convert."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if len(node.value) > 70:
            raise ValueError(f"the number {node.value[:24]}… is too large")
        # octal, 1_000, 1:30, 0b1: text or other numbers to YAML 1.2
        if re.fullmatch(r"[-+]?0[0-9b_].*|.*[_:].*", node.value):
            unsure = "is one number to some programs, and text or another to others"
            raise ValueError(f"{node.value} {unsure}: write 8, 1000 or 90, or in quotes '{node.value}'")
        return getattr(self, f"construct_yaml_{node.tag.rpartition(':')[2]}")(node)


class QuotingYaml(yaml.SafeDumper):
    """Writes YAML as `PlainYaml` reads it: text that looks like a number is quoted."""


for kind in ("int", "float"):
    PlainYaml.add_constructor(f"tag:yaml.org,2002:{kind}", PlainYaml.construct_number)
for form in (PlainYaml, QuotingYaml):
    exponent = re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$")  # a number to YAML 1.2 and DVC, not always to YAML 1.1
    form.add_implicit_resolver("tag:yaml.org,2002:float", exponent, [*"-+0123456789"])


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; None for an empty one."""
    return parse_yaml(read_text(path, 2**20))  # bytes: YAML is slow to read, and written by people


def parse_yaml(text: str) -> Any:
    """The content of a YAML text of one document; None for an empty one."""
    try:
        level = 0
        for event in yaml.parse(text, PlainYaml):  # before a tree is built
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("an alias (*name) may expand to any size: write out what it stands for")
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} deep")
        content = yaml.load(text, PlainYaml)
    except (yaml.YAMLError, TypeError, AttributeError, IndexError, KeyError, OverflowError) as error:
        # PyYAML's own, and those that its constructors raise for a wrong tag or a date that does not exist
        raise ValueError(str(error) or type(error).__name__) from error
    check_plain(content)
    return content


def validated(kind: type[Form], content: Any) -> Form:
    """`content` as `kind`, without coercion but list → tuple. Raises ValueError, which names the first wrong entry."""
    try:
        return adapter(kind).validate_json(json.dumps(content, allow_nan=False), strict=True)
    except TypeError as error:  # YAML has dates and sets
        raise ValueError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg']}, found {str(first['input'])[:60]!r}") from error


def dataset_name(name: str) -> str:
    """The id of a dataset, which names files. Raises ValueError for one that could name a file elsewhere."""
    # `keys/<id>.journal` lies beside the key `keys/<id>`
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.endswith(".journal"):
        rule = "1 to 64 letters, digits, dots, underscores or hyphens, a letter or digit first, not ending in .journal"
        raise ValueError(f"{name[:80]!r} is not a valid dataset id: give {rule}")
    return name


def class_name(name: str) -> str:
    """The name of a class, which is displayed and names files. Raises ValueError for one that cannot be displayed."""
    if not 0 < len(name) <= 255 or HIDDEN.search(name):
        raise ValueError(f"{name[:80]!r} is not a valid class name: use 1–255 printable characters")
    return name
