"""Locks, and file systems that have none."""

import errno
import fcntl
import os
from contextlib import ExitStack
from threading import Thread

import pytest
from filelock import Timeout

from sfumato.errors import ConfigError
from sfumato.storage.journal import Journal
from sfumato.storage.locks import file_lock, holding


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("there", [False, True])
def test_a_file_system_without_locks_is_refused_at_once(tmp_path, monkeypatch, code, there):
    """An earlier version waited permanently if an earlier lock had left its file."""
    if there:
        Journal(tmp_path, "set").begin()

    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="set.lock cannot be locked .* SFUMATO_STATE"):
        Journal(tmp_path, "set").begin()
    assert not [*tmp_path.glob("*/set.jsonl")] or there


def test_a_lock_is_held_until_the_end_and_not_longer(tmp_path):
    def hold() -> None:
        with holding(file_lock(tmp_path / "lock", blocking=False)):
            pass

    with holding(file_lock(tmp_path / "lock")), pytest.raises(Timeout):
        hold()
    hold()


def test_a_lock_may_be_released_by_another_thread(tmp_path):
    """Work that a notebook began in one thread ends in another."""
    held = ExitStack()
    held.enter_context(holding(file_lock(tmp_path / "lock", thread_local=False)))
    ending = Thread(target=held.close)
    ending.start()
    ending.join()
    with holding(file_lock(tmp_path / "lock", blocking=False)):
        pass
