"""`dvc.lock` as DVC writes it, of the stages whose files are in the current folder."""

from pathlib import Path

import yaml

from sfumato.evaluation.comparison import directory_hash
from sfumato.privacy.check import md5_of
from sfumato.settings.stages import LOCK, dvc_stages


def locked(path: Path) -> dict:
    """The entry of a file or folder."""
    md5 = directory_hash(path) if path.is_dir() else md5_of(path.read_bytes())
    return {"path": str(path), "hash": "md5", "md5": md5}


def write_lock() -> None:
    """Of every stage whose outputs are here, by hand where tests run stages without DVC."""
    stages = {}
    for name, (commands, reads, writes) in dvc_stages().items():
        if writes and all(Path(path).exists() for path in writes):
            deps = [locked(Path(path)) for path in reads if Path(path).exists()]
            stages[name] = {"cmd": commands[0], "deps": deps, "outs": [locked(Path(path)) for path in writes]}
    LOCK.write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}, sort_keys=False))
