"""Detached jobs whose end no command has shown yet: the jobs that `grid jobs wait` without names has to report.

A file in the state directory, one uid a line: `--detach` adds one, and the command that shows how a job ended removes
it. So a job that ends before the wait begins is not missed, and none is reported twice. Of too many the newest
`MAX_JOBS` are kept.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from distributed_grid.posix.private_files import read_all, write_all
from distributed_grid.state_dir import StateDir

MAX_JOBS = 20_000
MAX_FILE_BYTES = 1024 * 1024
_UID = re.compile("[0-9a-f]{32}")


class UnwaitedJobs:
    """The list of one state directory; every change is made under a lock."""

    def __init__(self, state_dir: StateDir) -> None:
        self._path = state_dir.unwaited_jobs

    def add(self, uid: str) -> None:
        with self._open(os.O_RDWR | os.O_CREAT) as file:
            if os.lseek(file, 0, os.SEEK_END) >= MAX_FILE_BYTES:
                os.lseek(file, 0, os.SEEK_SET)
                _write(file, _read(file)[-MAX_JOBS:])
            write_all(file, f"{uid}\n".encode())

    def read(self) -> list[str]:
        try:
            with self._open(os.O_RDONLY) as file:
                return _read(file)
        except FileNotFoundError:
            return []

    def remove(self, reported: Collection[str]) -> None:
        """Remove jobs whose end was shown; those that are not noted are no error."""
        try:
            with self._open(os.O_RDWR) as file:
                uids = _read(file)
                left = [uid for uid in uids if uid not in reported]
                if len(left) < len(uids):
                    _write(file, left)
        except FileNotFoundError:
            return

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        file = os.open(self._path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _read(file: int) -> list[str]:
    """The complete uids; a killed command may leave a part of one."""
    lines = read_all(file).decode("ascii", "replace").splitlines()
    return list(dict.fromkeys(line for line in lines if _UID.fullmatch(line)))


def _write(file: int, uids: list[str]) -> None:
    """Replace the content; a command killed in between leaves some uids too many, and none too few."""
    os.lseek(file, 0, os.SEEK_SET)
    write_all(file, "".join(f"{uid}\n" for uid in uids).encode())
    os.ftruncate(file, os.lseek(file, 0, os.SEEK_CUR))
