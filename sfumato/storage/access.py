"""Record who acted: the log `<state>/access.jsonl`, which stays in the private state directory.

It has one JSON line per entry of a journal, and one JSON line per command that ended. An entry is
identified by its `head`, which is its hash in the journal. The journal itself contains no names, so
published files contain none either.
"""

import getpass
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from sfumato.storage.documents import escaped, parse_json

ACTOR = "SFUMATO_ACTOR"
LOG = "access.jsonl"


def account() -> str:
    """Return the name of the account that runs this process, or its number if it has no name."""
    if not hasattr(os, "getuid"):  # Windows
        return getpass.getuser()
    import pwd

    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid {os.getuid()}"


def log_access(state: Path, **fields: object) -> None:
    """Append a line with time, actor, account and `fields`. The line is on disk when this returns.

    The actor is $SFUMATO_ACTOR, which anyone may set, or the account if this variable is not set.
    """
    entry = {
        "time": int(time.time()),
        "actor": os.environ.get(ACTOR) or account(),
        "account": account(),
    }
    descriptor = os.open(state / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        # The line end is written first, so that a line cut off by a kill damages no later line
        file.write(b"\n" + json.dumps(entry | fields).encode())
        file.flush()
        os.fsync(descriptor)


def logged_actors(state: Path) -> dict[str, str]:
    """Map the head of each journal entry to the actor who caused the entry.

    Damaged lines are skipped. Control characters in names are escaped, because a terminal would
    obey them.
    """
    actors = {}
    with suppress(FileNotFoundError):
        for line in (state / LOG).read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError, KeyError, TypeError):
                entry = parse_json(line)
                actors[str(entry["head"])] = escaped(str(entry["actor"]))
    return actors
