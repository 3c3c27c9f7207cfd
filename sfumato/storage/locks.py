"""Locks on files: the system releases them when their process ends, for any reason."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from sfumato.errors import ConfigError

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def file_lock(path: Path, *, blocking: bool = True, thread_local: bool = True) -> FileLock:
    """Create a lock to be acquired by `holding`.

    blocking: whether to wait if another process has the lock. If false, `holding` then raises
        Timeout;
    thread_local: whether only the thread that acquired the lock can release it.
    """
    # There is no fallback to a plain file, because such a lock would stay after its process has
    # ended
    return FileLock(path, blocking=blocking, thread_local=thread_local, fallback_to_soft=False)


@contextmanager
def holding(lock: FileLock) -> Iterator[None]:
    """Acquire a lock until the block ends.

    Raises ConfigError if the file system has no locks, because two processes could spend at once.
    """
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ConfigError(
            f"{lock.lock_file} cannot be locked ({error.strerror}): its file system has no locks, "
            "so two processes could spend at once. Set SFUMATO_STATE to a folder on a file "
            "system that supports locks"
        ) from error
    try:
        yield
    finally:
        lock.release()
