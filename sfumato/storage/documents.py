"""Reading JSON and YAML that anybody may have written: bounded in size, depth and numbers, so that none hangs a stage.

Whatever is wrong raises ValueError with a reason (OSError where there is no file), and nothing else does. What a reader
gets is plain: finite numbers, integers of 64 bits, text that can be encoded, each key once. Its shape is for the caller
to check, with `validated` where a type says it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:
    from pydantic import ConfigDict

LARGEST = 256 * 2**20  # bytes of a JSON file: the hashes of the released images of a large set are the largest
LARGEST_YAML = 2**20  # bytes: it is read slowly, and people write it
DEEPEST = 50  # lists and mappings within each other
LARGEST_INTEGER = 2**63 - 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a dataset: it also names files
# control characters, line ends, marks that turn the direction of what follows, halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LAST_SECOND = 253_402_300_799  # of the year 9999, the last that dates have

EXACT: ConfigDict = {"extra": "forbid"}  # as `__pydantic_config__` of a form: an unknown entry is refused
T = TypeVar("T")


def read_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a regular file of at most `largest` bytes of UTF-8. A pipe or a device is refused, not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer here
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no regular file")
        content = file.read(largest + 1) if about.st_size <= largest else b""
    if max(about.st_size, len(content)) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content.decode("utf-8")


# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json(path: Path, *, infinite: bool = False) -> Any:
    """What a JSON file holds. infinite: NaN and infinities are read too, as programs of others write them."""
    return parse_json(read_text(path), infinite=infinite)


def parse_json(text: str, *, infinite: bool = False) -> Any:
    """What a JSON text holds."""
    number = float if infinite else finite
    try:
        content = json.loads(text, parse_int=integer, parse_float=number, parse_constant=number, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from error
    if text.count("[") + text.count("{") > DEEPEST:  # else it cannot be too deep
        check_depth(content)
    if "\\u" in text:  # half a surrogate pair can be written so, and cannot be encoded
        json.dumps(content, ensure_ascii=False).encode()
    return content


def integer(text: str) -> int | float:
    """An integer of more than 64 bits becomes a float, as in most readers of JSON: no check takes it for whole."""
    if len(text) > 20 or abs(value := int(text)) > LARGEST_INTEGER:
        return finite(text)
    return value


def finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text[:24]}, which is no number")
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} stands twice: remove one")
        content[key] = value
    return content


def check_depth(content: Any) -> None:
    """Raise ValueError where lists and mappings lie more than DEEPEST within each other."""
    level = [content]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in inside(value)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def inside(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (found for found in inner if isinstance(found, (dict, list)))


# --- YAML -------------------------------------------------------------------------------------------------------------


class PlainYaml(yaml.SafeLoader):
    """YAML without aliases, in which a key stands once: of two, the second would win without a word."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise self.refused("an alias (*name) may stand for a file of any size: write out what it stands for")
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.refused(f"it is nested more than {DEEPEST} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} stands twice: remove one"
                    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> str:
        value = super().construct_scalar(node)
        value.encode()  # half a surrogate pair can be written as an escape
        return value

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > 70 or abs(value := super().construct_yaml_int(node)) > LARGEST_INTEGER:
            raise ValueError(f"it holds the number {node.value[:24]}…, larger than any that is meant")
        return value

    def refused(self, problem: str) -> yaml.YAMLError:
        return yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)


PlainYaml.add_constructor("tag:yaml.org,2002:int", PlainYaml.construct_yaml_int)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None for an empty one."""
    return parse_yaml(read_text(path, LARGEST_YAML))


def parse_yaml(text: str) -> Any:
    """What a YAML text of one document holds; None for an empty one."""
    try:
        return yaml.load(text, PlainYaml)
    except (yaml.YAMLError, TypeError, AttributeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        # PyYAML's own, and what its constructors let through for a wrong tag or a date that does not exist
        raise ValueError(str(error) or type(error).__name__) from error


# --- shape ------------------------------------------------------------------------------------------------------------


def validated(kind: type[T], content: Any) -> T:
    """What a file holds as `kind`: a dataclass, a model, any type that pydantic knows.

    Nothing is converted but lists to tuples: "1" and true are no numbers. Raises ValueError, which names the first
    entry that is missing, unknown or of another kind.
    """
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_json(json.dumps(content, allow_nan=False), strict=True)  # type: ignore
    except (TypeError, RecursionError) as error:  # YAML has dates and sets
        raise ValueError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg']}, found {str(first['input'])[:60]!r}") from error


@functools.cache
def adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def dataset_name(name: str) -> str:
    """The id of a dataset, which names files. Raises ValueError for one that leads elsewhere, or to another's files."""
    if not NAME.fullmatch(name) or name.endswith(".journal"):  # `keys/<id>.journal` lies beside the key `keys/<id>`
        raise ValueError(
            f"{name[:80]!r} is no dataset id: give 1 to 64 letters, digits, dots, underscores or hyphens, "
            "of which the first is a letter or a digit, and which do not end in .journal"
        )
    return name


def class_name(name: str) -> str:
    """The name of a class, which is shown and names files. Raises ValueError for one that cannot be, or deceives."""
    if not 0 < len(name) <= 255 or HIDDEN.search(name):
        raise ValueError(f"{name[:80]!r} is no name of a class: it is empty, long, or holds characters that none shows")
    return name


def second(value: int) -> int:
    """Seconds since 1970. Raises ValueError outside the years that dates have."""
    if not 0 <= value <= LAST_SECOND:
        raise ValueError(f"{value} seconds are outside the years 1970 to 9999")
    return value
