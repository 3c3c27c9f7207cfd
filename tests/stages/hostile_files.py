"""Attacks by the sender of a file: replace it, edit it, and update the hashes."""

import json
import os
from pathlib import Path

import yaml

from sfumato.storage.digest import digest_of_file

DEEP = "[" * 100_000
WORDS = (None, [], {}, "x", -1, 0, 1e300, 10**30, True, [[1.0]])  # replacements for any entry


def sign(artifact: Path, **said) -> None:
    """Write the hashes of an artifact's files. said: entries of `privacy.json` to replace."""
    content = json.loads((artifact / "privacy.json").read_text()) | said
    if "files" not in said:
        found = (
            path
            for path in sorted(artifact.rglob("*"))
            if path.is_file() and path.name != "privacy.json"
        )
        content["files"] = {str(path.relative_to(artifact)): digest_of_file(path) for path in found}
    (artifact / "privacy.json").write_text(json.dumps(content))


def edit(path: Path, *keys: str, value: object = None, drop: bool = False) -> None:
    """Change or drop the entry under these keys in a JSON or YAML file."""
    read, dump = (
        (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    )
    content = part = read(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    if drop:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    path.write_text(dump(content))


def edit_records(artifact: Path, **changes) -> None:
    """Change all records of an artifact, and update its hashes. A change to None drops the key."""
    records = json.loads((artifact / "privacy.json").read_text())["records"]
    changed = {
        key: {k: v for k, v in (record | changes).items() if v is not None}
        for key, record in records.items()
    }
    sign(artifact, records=changed)


def replaced(path: Path, kind: str) -> None:
    """Replace a file by something else. kind: one of KINDS."""
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hole":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "deep":
        path.write_text(DEEP)
    elif kind == "binary":
        path.write_bytes(bytes(range(256)))
    else:
        assert kind == "gone"


SIGNED = ("link", "device", "pipe", "folder", "half", "empty", "deep", "binary", "gone")
KINDS = (*SIGNED, "hole")
