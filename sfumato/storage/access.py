"""Record who acted: the log `<state>/access.jsonl`, which stays in the private state directory.

It has one JSON line for each entry of a journal, identified by the entry's `head`, and one for each
command that ended. The journal itself names no one, so neither does anything published.
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
    """Return the name of the account that runs this process; its number if it has no name."""
    if not hasattr(os, "getuid"):  # Windows
        return getpass.getuser()
    import pwd

    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid {os.getuid()}"


def log_access(state: Path, **fields: object) -> None:
    """Append a line: time, actor, account and `fields`. The line is on disk when this returns.

    The actor is $SFUMATO_ACTOR, which anyone may set, or else the account that the system names.
    """
    who = {
        "time": int(time.time()),
        "actor": os.environ.get(ACTOR) or account(),
        "account": account(),
    }
    descriptor = os.open(state / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        # the line end comes first, so that a killed write damages no other line
        file.write(b"\n" + json.dumps(who | fields).encode())
        file.flush()
        os.fsync(descriptor)


def logged_actors(state: Path) -> dict[str, str]:
    """Return who caused each entry of the journals, by the entry's head; damaged lines are skipped.

    Control characters in names, which a terminal would obey, are escaped.
    """
    found = {}
    with suppress(FileNotFoundError):
        for line in (state / LOG).read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError, KeyError, TypeError):
                entry = parse_json(line)
                found[str(entry["head"])] = escaped(str(entry["actor"]))
    return found
