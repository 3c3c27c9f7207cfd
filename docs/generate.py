"""Write the generated parts of docs/reference.md, and dvc.yaml.

The generated parts are between the marks `<!-- NAME -->` and `<!-- /NAME -->`.

These parts are made from the table of stages, the Typer app, the exit codes of `sfumato.errors`,
the fidelity metrics, the recipes and profiles in `pipelines/`, and the settings. The description of
a setting is the first of these that exists: the comment at the end of its line, the comment lines
directly above it, its description in the class from which it is inherited, or its entry in
EVERYWHERE. In a description, `one of TABLE (its/module)` is replaced by the names in that table.
The description of a section is the docstring of its class.

    python docs/generate.py            # write
    # exit 1 if a file differs from the code, or if a setting has no description
    python docs/generate.py --check
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sfumato import errors
from sfumato.planning.project_files import dvc_text
from sfumato.settings.fields import MACHINE
from sfumato.settings.noise_levels import NoiseLevels
from sfumato.settings.params import Params
from sfumato.settings.stage import ARTIFACTS, FREE
from sfumato.settings.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference.md"
SHARED = 4  # an option that at least this many commands have is described only once
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
HUGE = 10**9  # larger bounds only guard against overflow and are not shown
ONE = "A bug in Sfumato. Also: `stage mark check` found no mark, or `stage init` was not confirmed."
EVERYWHERE = {  # descriptions of settings that have no comment, used in every section
    "noise": "Noise: the multiplier of each release, the query's share of the budget, or `rest`"
}
# types that have their own paragraph in the reference: union type -> link to the paragraph
NAMED = {float | str: "[noise](#noise)", get_args(NoiseLevels)[0]: "[noise levels](#noise-levels)"}


# --- settings -------------------------------------------------------------------------------------


@functools.cache
def comments_of(kind: type) -> dict[str, str]:
    """Return the comment of each annotated field of a class, by the name of the field.

    A comment is at the end of one of the field's lines, or directly above the field.
    """
    source = Path(inspect.getsourcefile(kind) or "").read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    text = {line: token.string.lstrip("# ") for line, token in comments.items()}
    own_line = {
        line for line, token in comments.items() if not token.line[: token.start[1]].strip()
    }
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    found = {}
    for node in next(node for node in classes if node.name == kind.__name__).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            words = [
                text[line]
                for line in range(node.lineno, (node.end_lineno or 0) + 1)
                if line in text
            ]
            if not words:
                line = node.lineno - 1
                while line in own_line:
                    words.insert(0, text[line])
                    line -= 1
            found[node.target.id] = " ".join(words)
    return found


def description(kind: type[BaseModel], name: str) -> str:
    """Return the comment of a field, its own or inherited, or its entry in EVERYWHERE.

    Returns "" if there is neither.
    """
    parents = (
        parent
        for parent in kind.__mro__
        if issubclass(parent, BaseModel) and parent is not BaseModel
    )
    text = next(
        (text for parent in parents if (text := comments_of(parent).get(name))),
        EVERYWHERE.get(name, ""),
    )
    section = kind.__name__.lower()
    text = re.sub(
        r"one of ([A-Z_]+) \((sfumato/[\w/]+)\)",
        lambda named: one_of(named[1], named[2], section),
        text,
    )
    return re.sub(r"(?<!`)\bNone\b(?!`)", "`null`", text)


def one_of(table: str, module: str, section: str) -> str:
    """Return the names in the dictionary `table` of `module` that a section of settings accepts."""
    entries = getattr(import_module(module.replace("/", ".")), table).items()
    names = [name for name, entry in entries if section in getattr(entry, "sections", (section,))]
    return f"one of {', '.join(f'`{name}`' for name in names)}"


def type_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Return a type and its bounds in plain words."""
    if get_origin(annotation) is Annotated:
        inner, *rest = get_args(annotation)
        flat = [
            part
            for item in rest
            for part in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return type_of(inner, (*metadata, *flat))
    if annotation in NAMED:
        return NAMED[annotation]
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(
            "`null`" if part is NoneType else type_of(part, metadata) for part in inside
        )
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin is tuple:
        if inside[-1] is Ellipsis:
            return f"list of {type_of(inside[0])}"
        return f"list of {len(inside)}: {type_of(inside[0])}"
    if origin is dict:
        return f"mapping of {type_of(inside[0])} to {type_of(inside[1])}"
    if annotation is bool:
        return "`true`, `false`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys below"
    words = {int: "integer", float: "number", str: "text"}.get(annotation, "any")
    return " ".join([words, *bounds(metadata)]) if annotation in (int, float) else words


def bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    limits = {
        key: getattr(item, key)
        for item in metadata
        for key in BOUNDS
        if getattr(item, key, None) is not None
    }
    shown = [f"{BOUNDS[key]} {value:g}" for key, value in limits.items() if abs(value) < HUGE]
    if shown:
        yield " and ".join(shown)
    yield from (
        f"(a multiple of {item.multiple_of})" for item in metadata if hasattr(item, "multiple_of")
    )


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = (
        field.default.model_dump(mode="json")
        if isinstance(field.default, BaseModel)
        else field.default
    )
    if isinstance(value, tuple):
        value = [
            part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in value
        ]
    if isinstance(value, (dict, list)) and any(isinstance(part, (dict, list)) for part in value):
        return "one entry, as below"
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, width=HUGE, sort_keys=False
    )
    shown = text.strip().removesuffix("...").strip()
    return f"`{shown}`"


def inner_models(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models within a type, each with a text: "[]" for a model in a list, otherwise "".

    `rows_of` inserts this text after the name of the field, as in `field[].key`.
    """
    if annotation in NAMED:
        return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
    for part in get_args(annotation):
        for kind, _ in inner_models(part):
            yield kind, "[]" if get_origin(annotation) is tuple else ""


def rows_of(
    kind: type[BaseModel], prefix: str, seen: dict[type, str] | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, description) of every field of a model, and of the models within
    it. If a model occurs twice, its fields are yielded only the first time.

    seen: model that was yielded already -> its key.
    """
    seen = {} if seen is None else seen
    for name, field in kind.model_fields.items():
        if name in MACHINE:
            continue
        models = list(inner_models(field.annotation))
        default = "" if models and isinstance(field.default, BaseModel) else default_of(field)
        words = type_of(field.annotation, tuple(field.metadata))
        if models and models[0][0] in seen:
            words = words.replace("keys below", f"the keys of `{seen[models[0][0]]}`")
        yield f"{prefix}{field.alias or name}", words, default, description(kind, name)
        for model, between in models:
            if model not in seen:
                seen[model] = f"{prefix}{name}{between}"
                yield from rows_of(model, f"{prefix}{name}{between}.", seen)


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of params.yaml: name -> class."""
    kinds = {name: field.annotation for name, field in Params.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


def all_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield one row per setting, as `rows_of` does, beginning with the top level."""
    for name, field in Params.model_fields.items():
        if name not in sections():
            yield (
                name,
                type_of(field.annotation, tuple(field.metadata)),
                default_of(field),
                description(Params, name),
            )
    seen: dict[type, str] = {}
    for name, kind in sections().items():
        yield from rows_of(kind, f"{name}.", seen)


def parameters() -> str:
    """Return a table for the top level, for each section, and for the noise levels."""
    rows, parts = list(all_rows()), []
    top = [row for row in rows if "." not in row[0]]
    parts.append("### Top level\n\n" + settings_table(top))
    for name, kind in sections().items():
        own = [row for row in rows if row[0].startswith(f"{name}.")]
        parts.append(f"### `{name}`\n\n{docstring(kind)}\n\n{settings_table(own)}")
    laws = [(law, row) for law in get_args(get_args(NoiseLevels)[0]) for row in rows_of(law, "")]
    lines = [
        (f"`{law.model_fields['law'].default}`", row[0], *row[1:])
        for law, row in laws
        if row[0] != "law"
    ]
    parts.append(
        "### Noise levels\n\n" + table(("law", "key", "type", "default", "meaning"), lines)
    )
    return "\n\n".join(parts)


def machine() -> str:
    """Describe the environment variables that set fields of sections in place of params.yaml."""
    rows = {}
    for kind in sections().values():
        for key in MACHINE.keys() & kind.model_fields.keys():
            meaning = description(kind, key)
            rows.setdefault(key, (f"`{MACHINE[key]}`", default_of(kind.model_fields[key]), meaning))
    return table(("variable", "default", "meaning"), [rows[key] for key in MACHINE])


def docstring(kind: type) -> str:
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def settings_table(rows: list[tuple[str, str, str, str]]) -> str:
    return table(
        ("key", "type", "default", "meaning"), [(f"`{key}`", *rest) for key, *rest in rows]
    )


def table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(str(value)) for value in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Escape text for a cell of a table, so that "<stage>" outside of code is not read as HTML."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


# --- commands, recipes, exit codes ----------------------------------------------------------------


def commands_below(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands_below(below, *names, name)
    else:
        yield " ".join(names), command


@functools.cache
def known_commands() -> dict[str, Any]:
    from typer.main import get_command

    from stages.cli import app

    return dict(commands_below(get_command(app)))


def option_row(param: Any) -> tuple[str, str, str]:
    """Return (name, default, meaning) of an option."""
    default = (
        "" if param.default is None or getattr(param, "is_flag", False) else f"`{param.default}`"
    )
    return f"`{', '.join(param.opts)}`", default, param.help or ""


def shared_options() -> list[tuple[str, str, str]]:
    """Describe the options that at least SHARED commands have."""
    times = Counter(
        row
        for command in known_commands().values()
        for row in {
            option_row(param) for param in command.params if param.param_type_name == "option"
        }
    )
    return [row for row, number in times.items() if number >= SHARED]


def options() -> str:
    return table(("option", "default", "meaning"), sorted(shared_options()))


def commands() -> str:
    """Describe each command with its arguments, and with the options that are not shared.

    Stages of the plan that have only shared options are left out.
    """
    shared, lines = shared_options(), []
    for name, command in known_commands().items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        own = {option_row(param): None for param in command.params if param not in arguments}
        own = {row: None for row in own if row not in shared}
        if name in STAGES and not own:
            continue
        words = " ".join(["stage", name, *(param.name.upper() for param in arguments)])
        lines.append((f"**`{words}`**", "", " ".join((command.help or "").split())))
        lines += [(param.name.upper(), "", param.help or "") for param in arguments]
        lines += list(own)
    return table(("command, its own options", "default", "meaning"), lines)


def stages_table() -> str:
    """Describe the stages: what each reads and what it does."""
    lines = ["| stage | kind | reads | what it does |", "|---|---|---|---|"]
    for stage in STAGES.values():
        reads = [] if stage.kind is FREE else ["sensitive images"]
        reads += [
            "the public set" if name == "public" else f"`{ARTIFACTS}/{name}`"
            for name in stage.inputs
        ]
        reads += [f"`{path}`" for path in stage.beside]
        lines.append(f"| `{stage.name}` | {stage.kind} | {', '.join(reads)} | {stage.summary} |")
    return "\n".join(lines)


def metrics() -> str:
    from sfumato.evaluation.metrics.fidelity import METRICS

    return table(
        ("metric", "meaning"), [(f"`{name}`", metric.meaning) for name, metric in METRICS.items()]
    )


def exit_codes() -> str:
    kinds = sorted(errors.SfumatoError.__subclasses__(), key=lambda kind: kind.exit_code)
    known = [(kind.exit_code, docstring(kind)) for kind in kinds]
    return table(("code", "meaning"), [(0, "Done."), (1, ONE), *known, (130, "Interrupted.")])


def recipes() -> str:
    rows = [
        (f"`{path.stem}`", content["description"], of_run(content))
        for path, content in overlays("pipelines")
    ]
    return table(("recipe", "method", "stages"), rows)


def profiles() -> str:
    rows = [
        (f"`{path.stem}`", content["description"], content.get("privacy", {}).get("size_hint", ""))
        for path, content in overlays("pipelines/profiles")
    ]
    return table(("profile", "data and machine", "`privacy.size_hint`"), rows)


def overlays(folder: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted((ROOT / folder).glob("*.yaml"), key=lambda path: path.stem):
        yield path, {"description": ""} | yaml.safe_load(path.read_text(encoding="utf-8"))


def of_run(content: dict[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in content.get("run", ()))


PARTS = {
    "stages": stages_table,
    "metrics": metrics,
    "commands": commands,
    "options": options,
    "exit-codes": exit_codes,
    "recipes": recipes,
    "profiles": profiles,
    "machine": machine,
    "parameters": parameters,
}


def generated(page: str) -> str:
    """Return the page with each part of PARTS generated again.

    Raises ValueError unless the page has the marks of each part exactly once.
    """
    for name, make in PARTS.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page, times = marks.subn(
            lambda found, text=make(): f"{found[1]}\n{text}\n\n{found[2]}", page
        )
        if times != 1:
            raise ValueError(
                f"{REFERENCE}: the marks of the part {name} occur {times} times, expected once: "
                f"write `<!-- {name} -->` and `<!-- /{name} -->` once each"
            )
    return page


def fresh_pages() -> dict[Path, str]:
    """Return the reference with its generated parts, and dvc.yaml, both made from the code."""
    return {
        REFERENCE: generated(REFERENCE.read_text(encoding="utf-8")),
        ROOT / "dvc.yaml": dvc_text(clone=True),
    }


def main() -> int:
    """Write the pages or, with --check, compare them with the code. Returns the exit code."""
    pages = fresh_pages()
    if lacking := [row[0] for row in all_rows() if not row[3]]:
        print(f"settings without a description: {', '.join(lacking)}", file=sys.stderr)
    if "--check" not in sys.argv:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in pages.items() if text != path.read_text(encoding="utf-8")]
    for path in stale:
        print(f"{path} differs from the code: run python docs/generate.py", file=sys.stderr)
    return int(bool(stale or lacking))


if __name__ == "__main__":
    sys.exit(main())
