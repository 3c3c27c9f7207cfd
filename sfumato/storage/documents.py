"""Read JSON and YAML files of unknown origin, with bounds on size, depth and numbers.

Invalid input raises ValueError with a reason (OSError if the file is missing). The result contains
only finite numbers, integers of 64 bits and text that can be encoded, and no duplicate keys.
Callers check the structure with `validated`. `plain_json` reads JSON, and needs no other package.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml

from sfumato.errors import UNREADABLE, passing_over
from sfumato.storage.plain_json import DEEPEST, check_plain, once, read_text
from sfumato.storage.plain_json import MergeConflict as MergeConflict
from sfumato.storage.plain_json import parse_json as parse_json
from sfumato.storage.plain_json import read_json as read_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# Control characters, line ends, marks that change the direction of text, unpaired surrogates.
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# First words of `dvc.yaml` in a project that `stage merge` made
MERGE_HEADER = "# Written by `stage merge`"


def escaped(text: str) -> str:
    """Escape control characters, which file names may contain and a terminal would obey."""
    return HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


def quoted(path: Path) -> str:
    """Quote a path for use in a command that a message names."""
    text = str(path)
    if text.startswith("-"):  # otherwise the command would read it as an option
        text = f"./{text}"
    return shlex.quote(text)


def missing_text(path: Path, default: str) -> str:
    """Return the error message for a missing file of a project.

    The message is `default`, except in a project that `stage merge` made.
    """
    for folder in path.parents:
        with passing_over(*UNREADABLE):
            if read_text(folder / "dvc.yaml").startswith(MERGE_HEADER):
                return (
                    f"{path} does not exist, because this folder was made by `stage merge`: the "
                    "queries ran in the owners' projects. `stage run` runs the other stages. To "
                    "change a setting, change it in all owners' projects, and merge again"
                )
    return default


Form = TypeVar("Form")


@functools.cache
def adapter(kind: type[Form]) -> TypeAdapter[Form]:
    from pydantic import TypeAdapter  # slow to import

    return TypeAdapter(kind)


class Exact:
    """Base class for classes that describe the form of a file. Unknown entries are refused."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


class PlainYaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML. It refuses duplicate keys, very long numbers, and ambiguous numbers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    def construct_number(self, node: yaml.ScalarNode) -> float:
        if len(node.value) > 70:
            raise ValueError(f"the number {node.value[:24]}… is too large")
        # YAML 1.1 reads 017, 1_000, 1:30 and 0b1 as numbers. YAML 1.2 reads them as text or
        # as other numbers
        if re.fullmatch(r"[-+]?0[0-9b_].*|.*[_:].*", node.value):
            unsure = "is a number in some programs, but text or another number in others"
            raise ValueError(
                f"{node.value} {unsure}: write plain decimal digits, or text in quotes "
                f"('{node.value}')"
            )
        return getattr(self, f"construct_yaml_{node.tag.rpartition(':')[2]}")(node)


class QuotingYaml(yaml.SafeDumper):
    """Write YAML that `PlainYaml` reads back unchanged: text that looks like a number is quoted."""


for kind in ("int", "float"):
    PlainYaml.add_constructor(f"tag:yaml.org,2002:{kind}", PlainYaml.construct_number)
for form in (PlainYaml, QuotingYaml):
    # A text such as 1e-5 is a number in YAML 1.2 and in DVC, but not always in YAML 1.1
    exponent = re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$")
    form.add_implicit_resolver("tag:yaml.org,2002:float", exponent, [*"-+0123456789"])


def read_yaml(path: Path) -> Any:
    """Read a YAML file; None for an empty one."""
    return parse_yaml(read_text(path, 2**20))  # limit in bytes, because YAML is slow to parse


def parse_yaml(text: str) -> Any:
    """Parse a YAML text of one document; None for an empty one."""
    try:
        level = 0
        for event in yaml.parse(text, PlainYaml):  # checked before a tree is built
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    "an alias (*name) is refused, because it may expand to any size: write out its "
                    "value"
                )
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if level > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        content = yaml.load(text, PlainYaml)
    except (
        yaml.YAMLError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        OverflowError,
    ) as error:
        # PyYAML raises YAMLError or, for a wrong tag or date, one of the other errors above
        raise ValueError(str(error) or type(error).__name__) from error
    check_plain(content)
    return content


def validated(kind: type[Form], content: object) -> Form:
    """Return `content` as `kind`, without coercion except from list to tuple.

    Raises ValueError, naming the first wrong entry.
    """
    from pydantic import ValidationError

    try:
        text = json.dumps(content, allow_nan=False)
        return adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]
    except TypeError as error:  # YAML has dates and sets
        raise ValueError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        entry = ".".join(map(str, first["loc"])) or "the whole content"
        raise ValueError(f"{entry}: {first['msg']}, found {str(first['input'])[:60]!r}") from error


def dataset_name(name: str) -> str:
    """Check that a dataset id can be used as the name of a file, and return the id.

    Raises ValueError if it cannot, for example because it contains a slash.
    """
    # `keys/<id>` is the key of a dataset, and `keys/<id>.journal` belongs to its journal, so an id
    # must not end in .journal
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.endswith(".journal"):
        rule = (
            "1 to 64 letters, digits, dots, underscores or hyphens. It must begin with a letter or "
            "digit, and not end in .journal"
        )
        raise ValueError(f"{name[:80]!r} is not a valid dataset id: use {rule}")
    return name


def class_name(name: str) -> str:
    """Check that a class name can be displayed, and return the name.

    Raises ValueError if it cannot.
    """
    if not 0 < len(name) <= 255 or HIDDEN.search(name):
        raise ValueError(f"{name[:80]!r} is not a valid class name: use 1–255 printable characters")
    return name
