"""Content digests: canonical JSON, files, and the code that a stage runs."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from pathlib import Path

from sfumato.errors import DataError

# Not followed: their whole effect is in the resolved configuration that a stage reads, in how files are named, found
# and shown, in speed, or in whether a charge may be opened and what it costs.
NOT_PART_OF_A_RESULT = {
    "sfumato",
    "sfumato.storage.artifacts",
    "sfumato.runtime.compute",
    "sfumato.settings.params",
    "sfumato.storage.digest",
    "sfumato.storage.documents",
    "sfumato.privacy.checkpoint",
    "sfumato.dpsgd.microbatch",
    "sfumato.errors",
    "sfumato.storage.files",
    "sfumato.storage.journal",
    "sfumato.storage.png",
    "sfumato.settings.stages",
    "sfumato.privacy.accountant",
    "sfumato.privacy.odometer",
    "sfumato.privacy.authorize",
    "sfumato.privacy.resolved",
    "stages",
    "stages.runner",
}
LARGEST_FILE = 2**36  # bytes: far above all weights and images that a stage writes or reads
SHOWN = {"say", "report", "echo", "progress"}  # functions that tell the user something


def canonical(data: object) -> bytes:
    """The one JSON form of `data`: sorted keys, no spaces. Raises ValueError for NaN or infinity."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(data: object) -> str:
    return hashlib.sha256(canonical(data)).hexdigest()


def digest_of_file(path: Path) -> str:
    """The sha256 of a file, read in pieces.

    Raises DataError where it is larger than LARGEST_FILE: a hole of a terabyte costs nothing to make, hours to read.
    """
    with path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_FILE:
            raise DataError(
                f"{path} has {size / 2**30:.0f} GiB, and no file that is checked may have more than "
                f"{LARGEST_FILE // 2**30}: it is damaged, or not what it should be"
            )
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_digest(root: Path, *modules: str, without: str | None = None) -> str:
    """Digest of modules and of all the project's modules that they import, on the syntax tree without what is said.

    A comment, a docstring, a blank line, the text of an error or of a progress line changes nothing; a changed formula
    does. Names are dotted, below `root`.
    without: a package that is not followed.
    """
    return digest_of(import_closure(root, *modules, without=without))


def import_closure(root: Path, *modules: str, without: str | None = None) -> dict[str, str]:
    """Syntax trees of the modules that modules reach, themselves included. Raises ValueError where one is not there.

    NOT_PART_OF_A_RESULT, `without` and imports for type checking alone are not followed.
    """
    for name in modules:
        if _module_file(name, root) is None:
            raise ValueError(f"there is no module {name} below {root}")
    trees: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in trees or name in NOT_PART_OF_A_RESULT or (without and f"{name}.".startswith(f"{without}.")):
            continue
        path = _module_file(name, root)
        if path is not None:
            imports, trees[name] = _read(path.read_text(encoding="utf-8"))
            waiting += imports
    return trees


@functools.cache
def _read(code: str) -> tuple[list[str], str]:
    """The project's modules that `code` imports, and its syntax tree."""
    tree = ast.parse(code)
    return _imports(tree), ast.dump(_without_words(tree))


def _module_file(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imports(tree: ast.AST) -> list[str]:
    """Every module that the tree imports when it runs, anywhere in it: `from a import b` may mean the module a.b."""
    found: list[str] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        waiting += ast.iter_child_nodes(node)
    return [name for name in found if name.split(".")[0] in ("sfumato", "stages")]


def _without_words(tree: ast.AST) -> ast.AST:
    """The tree without docstrings, without what errors say, and without the text that SHOWN functions are given."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        elif isinstance(node, ast.Call) and {_name(node.func), *map(_name, node.args)} & SHOWN:
            node.args = [arg for arg in node.args if not _is_text(arg)]
    return tree


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
