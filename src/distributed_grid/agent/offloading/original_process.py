"""Original of a move as the agent finds it: its identity, whose it is, and the directory it runs in.

The directory is opened through /proc, so it is the one that the process has, whatever its name is by now. After the
process has ended it is opened by its name, and must be the same directory.
"""

from __future__ import annotations

import os

from distributed_grid.agent.limits.process_tree import read_process
from distributed_grid.agent.offloading.move_journal import OriginalProcess
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.errors import GridError, NotFound, Refused
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.trees.secret_files import never_shipped_unasked

_DELETED = " (deleted)"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OpenDirectory:
    """A directory that stays open for as long as somebody holds this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def is_running(pid: int, start: int, boot: str) -> bool:
    """Whether exactly this process runs, stopped or not."""
    if boot != boot_id():
        return False
    proc = read_process(pid)
    return proc is not None and proc.start == start and not proc.dead


def identify(move_id: str, node: str, identity: ProcessIdentity) -> tuple[OriginalProcess, OpenDirectory]:
    """The original of a move and its directory. `NotFound`: it is not there any more; `Refused`: it cannot be moved."""
    pid = identity.pid
    if not is_running(pid, identity.pid_start, identity.boot):
        raise NotFound(f"process {pid} is not there any more")
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            raise Refused(f"process {pid} belongs to another user")
        directory = OpenDirectory(os.open(f"/proc/{pid}/cwd", _FLAGS))
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except FileNotFoundError:
        raise NotFound(f"process {pid} is not there any more") from None
    except OSError as failure:
        raise Refused(f"the working directory of process {pid} cannot be opened: {failure.strerror}") from failure
    if not is_running(pid, identity.pid_start, identity.boot):  # what was opened may have been another process's
        raise NotFound(f"process {pid} is not there any more")
    found = os.fstat(directory.fd)
    if not found.st_nlink or cwd.endswith(_DELETED):
        raise Refused(f"the working directory of process {pid} was removed")
    shown = cwd.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if shown != cwd:
        raise Refused(f"the working directory of process {pid} has a name that is not UTF-8: {shown}")
    problem = never_shipped_unasked(cwd)
    if problem:
        raise Refused(f"the working directory {cwd} of process {pid} {problem}")
    original = OriginalProcess(move_id, node, pid, identity.pid_start, identity.boot, cwd, found.st_dev, found.st_ino)
    return original, directory


def open_working_directory(original: OriginalProcess) -> OpenDirectory:
    """The directory of an original that may have ended; `GridError` where another one, or none, is in its place."""
    places = [original.cwd]
    if is_running(original.pid, original.start, original.boot):
        places.append(f"/proc/{original.pid}/cwd")
    problem = f"{original.cwd} is another directory now"
    for place in places:
        try:
            directory = OpenDirectory(os.open(place, _FLAGS))
        except OSError as failure:
            problem = f"{original.cwd} cannot be opened: {failure.strerror}"
            continue
        found = os.fstat(directory.fd)
        if (found.st_dev, found.st_ino) == (original.device, original.inode):
            return directory
    raise GridError(problem)
