"""Pilot jobs of Slurm: the batch script that runs `grid agent` on a compute node, and its private files.

For each worker there is a folder (0700) on the file system that the nodes share:

    lock           held by whoever submits or cancels, and by `sbatch` itself for as long as it runs
    join-token     (0600) until the pilot has opened it; a second pilot finds none, or one that is spent
    pilot-ID.log   what the pilot of this job has said

The token is neither in the script, which Slurm keeps and shows, nor in the environment or on a command line. The
agent's own directory is on the compute node, one for each job, and goes with it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from distributed_grid.errors import GridError, Unreachable
from distributed_grid.posix.private_files import open_regular, read_regular, try_lock, write_private

TOKEN_FILE, LOCK_FILE = "join-token", "lock"
CPU_VARIABLE, MEMORY_VARIABLE = "GRID_ALLOCATED_CPU_MILLI", "GRID_ALLOCATED_MEMORY_BYTES"
"""In the environment of the agent: the part of the node that is its own, where Slurm does not enforce that."""
NOTICE_SIGNAL = "USR1"
"""What Slurm sends before the time limit to the shell of the script alone, which sends the agent SIGTERM then. When a
job is cancelled, Slurm sends SIGTERM to all processes: then the agent has to end, not only to say so."""
NOTICE_VARIABLE = "GRID_NOTICE_SECONDS"
"""In the environment of the agent: for how long it goes on after SIGTERM has announced its end."""
LOCK_SECONDS, LOCK_PAUSE_SECONDS = 20.0, 0.05
MAX_MISSING = 100
"""How often in a row the folder of a worker may be missing before it is taken for one that cannot be made."""
LEFTOVER_SECONDS = 600.0
MAX_LOG_BYTES = 1 << 20
NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
"""What locking fails with on a file system that has none."""


class PilotFiles:
    """The folder of one worker below the provider's `directory`."""

    def __init__(self, directory: Path, worker_id: str, grid_id: str) -> None:
        self._directory = directory
        self.folder = directory / f"{worker_id}{_suffix(grid_id)}"
        self.token = self.folder / TOKEN_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Be the only one that submits or cancels jobs of this worker; the descriptor of the lock.

        A process that inherits the descriptor holds the lock, too: who comes next waits until it has ended.
        """
        descriptor = self._lock()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        deadline, missing = time.monotonic() + LOCK_SECONDS, 0
        while True:
            try:
                self._make()
                descriptor = open_regular(str(self.folder / LOCK_FILE), os.O_RDWR | os.O_CREAT)
            except FileNotFoundError as failure:
                missing += 1  # the folder was removed in between, or can never be made
                if missing < MAX_MISSING:
                    continue
                raise GridError(f"cannot use {self.folder}: {failure.strerror}") from failure
            except OSError as failure:
                raise GridError(f"cannot use {self.folder}: {failure.strerror}") from failure
            if _is_locked(descriptor) and os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.folder / LOCK_FILE} is locked: an sbatch of an earlier call still runs")
            time.sleep(LOCK_PAUSE_SECONDS)

    def _make(self) -> None:
        for folder in (self._directory, self.folder):
            folder.mkdir(mode=0o700, parents=folder is self._directory, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.getuid():
                raise GridError(f"{folder} belongs to another user")
            if found.st_mode & 0o077:
                folder.chmod(0o700)

    def write_token(self, token: str) -> None:
        """Have the token there for the next pilot that starts."""
        try:
            write_private(self.token, token.encode())
        except OSError as failure:
            raise GridError(f"cannot write {self.token}: {failure.strerror}") from failure

    def last_words(self, job: str) -> str:
        """The last line that the pilot of a job has written; empty where there is none."""
        with contextlib.suppress(OSError):
            text = read_regular(str(self.folder / f"pilot-{job}.log"), None, MAX_LOG_BYTES).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1][:300] if lines else ""
        return ""

    def remove_token(self) -> None:
        """Have no token there. A second time is harmless."""
        with contextlib.suppress(FileNotFoundError):
            self.token.unlink()

    def remove(self) -> None:
        """Have nothing there; only who holds the lock may do that. A second time is harmless."""
        if self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)


def _suffix(grid_id: str) -> str:
    """How the folders of a grid end, so that two grids may share a directory."""
    return f"-{hashlib.sha256(grid_id.encode()).hexdigest()[:8]}"


class Leftovers:
    """Folders of workers whose jobs Slurm has forgotten. One is removed some time after it was first seen, by a clock
    that nobody can set: a worker that is being submitted is not known to Slurm yet, either."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._seen: dict[str, float] = {}

    def remove(self, grid_id: str, known: Collection[str]) -> None:
        """Remove the folders of a grid, but not those of the `known` workers."""
        suffix, now = _suffix(grid_id), self._clock()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._directory):
                worker_id = entry.name.removesuffix(suffix)
                if worker_id == entry.name:
                    continue
                if worker_id in known:
                    self._seen.pop(entry.name, None)
                elif now - self._seen.setdefault(entry.name, now) > LEFTOVER_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    del self._seen[entry.name]


def _is_locked(descriptor: int) -> bool:
    """Whether the lock could be had; where the file system has no locks nobody waits for one."""
    try:
        return try_lock(descriptor)
    except OSError as failure:
        if failure.errno in NO_LOCKS:
            return True
        os.close(descriptor)
        raise


def pilot_script(
    files: PilotFiles,
    worker_id: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    scratch: str | None,
    notice_seconds: float,
) -> str:
    """A shell script that is the same whenever the identical order is made again; nothing secret is in it.

    Its shell stays: it passes the signal on by which Slurm announces the end of the time limit, and removes the agent's
    directory once the agent has ended. One that was left behind, because its job was killed, is removed by the next.
    """
    agent = shlex.join([*command, "agent", "--join-file", "-", "--name", worker_id])
    exports = {**environ, NOTICE_VARIABLE: f"{notice_seconds:g}"}
    token = shlex.quote(str(files.token))
    folder = shlex.quote(scratch) if scratch else '"${TMPDIR:-/tmp}"'
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(exports.items())),
            f"exec 3< {token} || exit 1",
            f"rm -f {token}",
            f"homes={folder}/distributed-grid-$(id -u)",
            'for old in "$homes"-*; do',
            '  [ ! -L "$old" ] && [ -O "$old" ] && [ -f "$old/agent/agent.lock" ] &&',
            '    flock -n "$old/agent/agent.lock" rm -rf "$old"',
            "done",
            'home=$(mktemp -d "$homes-XXXXXX") || exit 1',
            f"""trap 'kill -TERM "$agent" 2>/dev/null' {NOTICE_SIGNAL}""",
            """trap '(for i in 1 2; do sleep 3; kill -TERM "$agent"; done) 2>/dev/null &' TERM""",
            f'{agent} --dir "$home/agent" <&3 3<&- &',
            "agent=$!",
            "exec 3<&-",
            'wait "$agent"; code=$?',
            'while kill -0 "$agent" 2>/dev/null; do wait "$agent"; code=$?; done',
            'rm -rf "$home"',
            'exit "$code"',
            "",
        ]
    )
