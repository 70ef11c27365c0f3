"""Original of a move at its source: its identity, its working directory, and the second look before it is ended.

The directory is opened through /proc, so it is the one that the process has, even if it was renamed. After the
process has ended it is opened by its name, and must be the same directory.

The second look takes the same inventory of the frozen process as at the request. Reading the facts of a frozen process
can wait for a file system that hangs, so the look has a time limit; facts that cannot be read in time count as changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from distributed_grid.agent.limits.process_tree import read_process
from distributed_grid.agent.offloading.move_journal import OriginalProcess
from distributed_grid.agent.offloading.process_inventory import ProcessInventory, Surroundings
from distributed_grid.domain.processes import ProcessIdentity, ProcessLook
from distributed_grid.errors import GridError, NotFound, Refused
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.scheduling.offloading.processes import changes_text, process_changes
from distributed_grid.trees.secret_files import never_shipped_unasked

LOOK_SECONDS = 5.0
_DELETED = " (deleted)"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
log = logging.getLogger(__name__)


class OpenDirectory:
    """A directory that stays open for as long as somebody holds this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def is_running(pid: int, start: int, boot: str) -> bool:
    """True if exactly this process runs, stopped or not."""
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
    if not is_running(pid, identity.pid_start, identity.boot):  # the directory may be another process's
        raise NotFound(f"process {pid} is not there any more")
    status = os.fstat(directory.fd)
    if not status.st_nlink or cwd.endswith(_DELETED):
        raise Refused(f"the working directory of process {pid} was removed")
    shown = cwd.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if shown != cwd:
        raise Refused(f"the working directory of process {pid} has a name that is not UTF-8: {shown}")
    problem = never_shipped_unasked(cwd)
    if problem:
        raise Refused(f"the working directory {cwd} of process {pid} {problem}")
    original = OriginalProcess(
        move_id=move_id,
        node=node,
        pid=pid,
        start=identity.pid_start,
        boot=identity.boot,
        cwd=cwd,
        device=status.st_dev,
        inode=status.st_ino,
    )
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
        status = os.fstat(directory.fd)
        if (status.st_dev, status.st_ino) == (original.device, original.inode):
            return directory
    raise GridError(problem)


async def look_again(original: OriginalProcess, first: ProcessLook, surroundings: Callable[[], Surroundings]) -> str:
    """The reason why the original may not be ended; empty if it is as it was at the request."""
    try:
        around, inventory = surroundings(), ProcessInventory()
        async with asyncio.timeout(LOOK_SECONDS):
            rows = await asyncio.to_thread(inventory.scan, around, pid=original.pid, measures_memory=False)
        if not rows or (rows[0].pid_start, rows[0].boot) != (original.start, original.boot):
            return "it could not be looked at a second time: it has ended"
        return changes_text(process_changes(first, rows[0]))
    except TimeoutError:
        return f"it could not be looked at a second time within {LOOK_SECONDS:.0f} s"
    except (GridError, OSError, ValueError) as failure:
        log.warning("no second look at process %d", original.pid, exc_info=failure)
        return f"it could not be looked at a second time: {failure}"
