"""The directory of a move at its source, and its journal. Standard library only.

Below `moves/` in the directory of the agent, mode 0700 (files 0600):

    <move id>/
        journal       the history of the original. Its first line is its identity; each later one is a `GuardRecord`
        guard.lock    held by the guard; its standby waits for it
        guard.sock    where the guard takes orders
        failure       the failure that ended a guard, if any
        returned      the result of the last order to return files
        results/      files on their way back to the working directory

A line of the journal begins by ending the one before, so one that was cut short by a crash or a full disk counts as
absent and hides none that follows. The first line is written by the agent, before there is a guard; the others by the
holder of the lock only. The next guard acts upon every line that it reads: the disk matters only after the machine went
down, and then nothing of the tree is left.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, NamedTuple

from distributed_grid.agent.offloading.guard_core import GuardRecord, Member
from distributed_grid.domain.states import MoveState
from distributed_grid.posix.private_files import open_regular, read_all, write_all

JOURNAL, LOCK, SOCKET, FAILURE, RETURNED, RESULTS = (
    "journal",
    "guard.lock",
    "guard.sock",
    "failure",
    "returned",
    "results",
)
MAX_JOURNAL_BYTES = 4 << 20
MAX_WHY_CHARS = 500
_TEXTS = frozenset(("move_id", "node", "boot", "cwd"))


class OriginalProcess(NamedTuple):
    """The original of a move, for ever: its process, its node, and its working directory (device and inode)."""

    move_id: str
    node: str
    pid: int
    start: int
    boot: str
    cwd: str
    device: int
    inode: int


class MoveJournal:
    """The journal of one move, open for reading and appending."""

    def __init__(self, folder: int) -> None:
        """Open it in this open directory; `OSError` where there is none."""
        self._fd = open_regular(JOURNAL, os.O_RDWR | os.O_APPEND, folder)

    @staticmethod
    def create(folder: int, original: OriginalProcess) -> None:
        """Begin a journal; it is on the disk, whole, before it has its name. `FileExistsError` where there is one."""
        aside = f".{JOURNAL}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            write_all(fd, json.dumps(original._asdict()).encode() + b"\n")
            os.fsync(fd)
            os.link(aside, JOURNAL, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(fd)
            os.unlink(aside, dir_fd=folder)
        os.fsync(folder)

    def read(self) -> tuple[OriginalProcess, tuple[GuardRecord, ...]]:
        """The original, and its records; `ValueError` for a damaged journal."""
        return _parse(self._content())

    def append(self, record: GuardRecord, *, durable: bool) -> None:
        """Add a record. After an `OSError` it is not there: a part of it is taken back. A record that cannot be taken
        back, and so will be read by the next guard, counts as written."""
        size, line = os.fstat(self._fd).st_size, b"\n" + encode_record(record)
        try:
            write_all(self._fd, line)
            if durable:
                os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            if line not in self._content():
                raise

    def _content(self) -> bytes:
        os.lseek(self._fd, 0, os.SEEK_SET)
        return read_all(self._fd, MAX_JOURNAL_BYTES + 1)

    def close(self) -> None:
        os.close(self._fd)


def encode_record(record: GuardRecord) -> bytes:
    """A record as one line, for the journal or for the socket of the guard."""
    return json.dumps(record._replace(why=record.why[:MAX_WHY_CHARS])._asdict()).encode() + b"\n"


def decode_record(line: bytes) -> GuardRecord | None:
    """The record of a line; None for one that is none."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or not isinstance(fields["why"], str):
            return None
        times = {name: fields[name] for name in ("at_ms", "until_ms", "frozen_ms")}
        if any(type(number) is not int or number < 0 for number in times.values()):
            return None
        members, spared = _members(fields["members"]), _members(fields["spared"])
        return GuardRecord(step=MoveState(fields["step"]), members=members, spared=spared, why=fields["why"], **times)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_journal(folder: str | os.PathLike[str]) -> tuple[OriginalProcess, tuple[GuardRecord, ...]]:
    """The journal in the directory of a move. `OSError` where there is none, `ValueError` where it is damaged."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        journal = open_regular(JOURNAL, os.O_RDONLY, fd)
    finally:
        os.close(fd)
    try:
        return _parse(read_all(journal, MAX_JOURNAL_BYTES + 1))
    finally:
        os.close(journal)


def _parse(text: bytes) -> tuple[OriginalProcess, tuple[GuardRecord, ...]]:
    if len(text) > MAX_JOURNAL_BYTES:
        raise ValueError("the journal is too large")
    first, *lines = text.split(b"\n")
    fields: Any = json.loads(first)
    if not isinstance(fields, dict) or fields.keys() != set(OriginalProcess._fields):
        raise ValueError("the journal does not say whose it is")
    if any(type(fields[name]) is not (str if name in _TEXTS else int) for name in fields):
        raise ValueError("the journal does not say whose it is")
    records = tuple(record for line in lines if (record := decode_record(line)) is not None)
    return OriginalProcess(**fields), records


def _members(pairs: Any) -> tuple[Member, ...]:
    members = []
    for pid, start in pairs:
        if type(pid) is not int or type(start) is not int:
            raise ValueError("not a process")
        members.append((pid, start))
    return tuple(members)
