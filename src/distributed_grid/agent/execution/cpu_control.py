"""Core affinity and throttling of running attempts.

Throttling is marked on disk before anything is confined or stopped, so that the next agent after a crash undoes it.
An attempt that is being stopped is never paused: the time to clean up belongs to the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from distributed_grid.agent.execution.attempt import AttemptSpec, RunningAttempt
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.core_allocation import CoreClaim, allocate_cores, allowed_cores
from distributed_grid.posix.private_files import open_regular, remove_file
from distributed_grid.supervision import start_restarted

if TYPE_CHECKING:
    from distributed_grid.agent.execution.host import AttemptHost

PERIOD_MS = 100
FULL_SPEED_MILLI = 1000
log = logging.getLogger(__name__)


class CoreAffinity:
    """Pins each of `running` to its cores; `real_cores` is all there are, None: those of this process."""

    def __init__(self, root: str, running: Mapping[str, RunningAttempt], real_cores: Sequence[int] | None) -> None:
        self._root = root
        self._running = running
        self._real_cores = sorted(os.sched_getaffinity(0) if real_cores is None else real_cores)
        self._own_cores = sorted(os.sched_getaffinity(0))
        self._allowed: tuple[int, ...] | None = None

    @property
    def cores_by_use(self) -> tuple[int, ...]:
        """All cores for attempts, those with pinned attempts first."""
        pinned = {core for attempt in self._running.values() for core in attempt.cores}
        return tuple(sorted(self._real_cores, key=lambda core: core not in pinned))

    def rearrange(self) -> None:
        """Allocate and pin anew, those included that have to make room."""
        claims = {
            attempt.id: CoreClaim(attempt.spec.cpu_milli, attempt.cores)
            for attempt in self._running.values()
            if attempt.spec.cpu_milli
        }
        for attempt_id, cores in allocate_cores(claims, self._real_cores).items():
            attempt = self._running[attempt_id]
            if cores != attempt.cores:
                attempt.cores = cores
                if attempt.recorded:  # else they go into the record with the rest
                    try:
                        with JobDir(self._root, attempt.id) as job:
                            job.write(job_dir.CORES, attempt.cores)
                    except (
                        OSError
                    ) as error:  # a full disk: it is moved all the same, and only the next agent will wonder
                        log.warning("the cores of %s could not be recorded: %s", attempt.id, error.strerror)
                if attempt.shim is not None:
                    self.pin(attempt, attempt.shim.pid)

    def confine(self, cores: Sequence[int] | None) -> None:
        """Keep everything on these cores, or (None) on its own again. Leases and their cores stay what they are."""
        allowed = None if cores is None else tuple(sorted(cores))
        if allowed == self._allowed:
            return
        self._allowed = allowed
        for attempt in self._running.values():
            if attempt.shim is not None:
                self.pin(attempt, attempt.shim.pid)

    def on_started(self, attempt: RunningAttempt, on_cores: tuple[int, ...], shim_pid: int) -> None:
        """Its command runs on these cores: move it if its cores have changed since."""
        if attempt.cores != on_cores or self._allowed is not None:
            self.pin(attempt, shim_pid)

    def pin(self, attempt: RunningAttempt, shim_pid: int) -> None:
        """Move a tree to its own cores, as far as they are allowed now; the only place that does."""
        cores = allowed_cores(attempt.cores or self._own_cores, self._allowed)
        try:
            process_tree.pin_tree(shim_pid, cores, attempt.exempt)
        except OSError as error:  # a core that was taken from this machine: it stays where it is
            log.warning("%s could not be moved to cores %s: %s", attempt.id, cores, error.strerror)


class RunningTree(NamedTuple):
    """The process tree of an attempt whose command runs; `stopping` once it was asked to stop."""

    spec: AttemptSpec
    fence: int
    shim: process_tree.Proc
    stopping: bool
    launched_boot_ms: int
    exempt: process_tree.Exempt

    @property
    def attempt_id(self) -> str:
        return self.spec.attempt_id

    @property
    def grace_ms(self) -> int:
        return self.spec.grace_ms

    def processes(self) -> list[process_tree.Proc]:
        """Its processes; cheap, and sometimes one is missing."""
        return process_tree.listed_descendants(self.shim.pid, self.exempt)


class Throttler:
    """Throttles all attempts of a host: to fewer cores, to a part of the time, or to a pause."""

    def __init__(self, host: AttemptHost) -> None:
        self._host = host
        self._running_milli = FULL_SPEED_MILLI
        self._paused: set[str] = set()
        self._cycling: asyncio.Task[None] | None = None
        self._marked = False

    def throttle(self, cores: int | None, running_milli: int) -> None:
        """Use these cores only (None: those of each attempt), and each only for that part of the time."""
        self._mark(cores is not None or running_milli < FULL_SPEED_MILLI)
        affinity = self._host.affinity
        affinity.confine(None if cores is None else affinity.cores_by_use[: max(1, cores)])
        self._running_milli = running_milli
        if running_milli < FULL_SPEED_MILLI and self._cycling is None:
            self._cycling = start_restarted(self._cycle, "throttling for the owner")
        elif running_milli >= FULL_SPEED_MILLI and self._cycling is not None:
            self._cycling.cancel()
            self._cycling = None
            _signal(self._running(), signal.SIGCONT)

    def pause(self, spared: frozenset[str] = frozenset()) -> list[RunningTree]:
        """Pause everything but `spared`; returns the trees that ran until now. A second call pauses only new ones."""
        self._mark(True)
        fresh = [tree for tree in self._running() if tree.attempt_id not in spared]
        for tree in fresh:
            process_tree.stop_tree(tree.shim.pid, tree.exempt)
            self._paused.add(tree.attempt_id)
        return fresh

    def resume(self, attempt_id: str | None = None) -> None:
        """Resume one, or all, paused attempts within the limits of `throttle`."""
        resumed = self._paused & {attempt_id} if attempt_id is not None else self._paused
        self._paused = self._paused - resumed
        _signal([tree for tree in self._host.running_trees() if tree.attempt_id in resumed], signal.SIGCONT)

    def release(self) -> None:
        """Let everything run freely again. Safe twice."""
        self.resume()
        self.throttle(None, FULL_SPEED_MILLI)

    async def _cycle(self) -> None:
        """Run and stop in turns, the running part first in every period."""
        while True:
            on_ms = PERIOD_MS * self._running_milli // FULL_SPEED_MILLI
            _signal(self._running(), signal.SIGCONT)
            await asyncio.sleep(on_ms / 1000)
            _signal(self._running(), signal.SIGSTOP)
            await asyncio.sleep((PERIOD_MS - on_ms) / 1000)

    def _running(self) -> list[RunningTree]:
        """Trees that are neither being stopped nor paused."""
        trees = self._host.running_trees()
        return [tree for tree in trees if not tree.stopping and tree.attempt_id not in self._paused]

    def _mark(self, throttled: bool) -> None:
        if throttled == self._marked:
            return
        try:
            (mark_throttled if throttled else clear_throttled)(self._host.root)
        except OSError as error:  # a full disk; the owner comes first all the same
            log.warning("throttling could not be recorded: %s", error.strerror)
        self._marked = throttled


def _signal(trees: list[RunningTree], signum: int) -> None:
    for tree in trees:
        now = process_tree.read_process(tree.shim.pid)
        if now is not None and now.start == tree.shim.start:  # else another process has its pid by now
            process_tree.signal_all(tree.processes(), signum)


def mark_throttled(root: str) -> None:
    """Record that processes below the root may be stopped or confined."""
    os.close(open_regular(f"{root}/{job_dir.THROTTLED}", os.O_WRONLY | os.O_CREAT))


def clear_throttled(root: str) -> None:
    remove_file(f"{root}/{job_dir.THROTTLED}")


def is_marked_throttled(root: str) -> bool:
    """True if an earlier agent may have left processes stopped or confined."""
    return os.access(f"{root}/{job_dir.THROTTLED}", os.F_OK)
