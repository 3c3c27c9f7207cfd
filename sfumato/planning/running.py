"""Read DVC's lock, and find out which of the programs listed there still run."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sfumato.errors import UNREADABLE
from sfumato.storage.documents import read_json
from sfumato.storage.files import is_running

RUNNING = Path(".dvc/tmp/rwlock")
SERVER_SKEW = 60.0  # seconds by which a file server's clock may be slow


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A program in DVC's lock: its process number, its command, a path that it uses, and the time
    of the lock's last change.
    """

    process: int
    command: str
    path: Path
    written: float

    @property
    def runs(self) -> bool:
        """Return whether the program still runs, according to the operating system.

        After a reboot or in another container, the process number in the lock may belong to a
        different program. Such a program is recognised because it started after the lock was
        written, or because its command is different. Only the last words of the two commands are
        compared, because the lock contains DVC's own command without the interpreter.
        """
        import psutil

        if not is_running(self.process, self.written + SERVER_SKEW):
            return False
        with suppress(psutil.AccessDenied):
            process_words = " ".join(psutil.Process(self.process).cmdline()).split()
            words = self.command.split()
            return len(words) < 2 or process_words[-1:] == words[-1:]
        return True


def holders(folder: Path = Path()) -> list[Holder]:
    """List the programs in the lock that DVC keeps for a project.

    Raises one of UNREADABLE if the lock does not exist or cannot be read.
    """
    lock = folder / RUNNING
    written = lock.stat().st_mtime
    content = read_json(lock)
    entries = [
        (path, entry) for path, readers in content.get("read", {}).items() for entry in readers
    ]
    entries += content.get("write", {}).items()
    return [
        Holder(process=entry["pid"], command=entry["cmd"], path=Path(path), written=written)
        for path, entry in entries
    ]


def remove_unused_lock(folder: Path) -> None:
    """Remove DVC's lock if none of the programs that it lists still runs.

    DVC itself keeps the lock if a process number in it now belongs to another program.
    """
    lock = folder / RUNNING
    if lock.exists():
        # DVC changes this lock (the file rwlock) only under a second lock, rwlock.lock
        with suppress(*UNREADABLE, Timeout), FileLock(lock.with_suffix(".lock"), timeout=3):
            if not any(holder.runs for holder in holders(folder)):
                lock.unlink()
