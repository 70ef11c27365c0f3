"""Moves attempts to their cores: which these are, `cores.py` says.

Rule 1. A tree is moved in one place only: to its own cores, as far as they are allowed now.
Rule 2. Being confined changes neither a lease nor its cores: let go, everything is back on its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from distributed_grid.agent.execution.attempt import RunningAttempt
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.core_allocation import CoreClaim, arrange, within

log = logging.getLogger(__name__)


class CoreAffinity:
    """Who of `running` is pinned where; `real_cores` is all there are, None: those of this process."""

    def __init__(self, root: str, running: Mapping[str, RunningAttempt], real_cores: Sequence[int] | None) -> None:
        self._root = root
        self._running = running
        self._real_cores = sorted(os.sched_getaffinity(0) if real_cores is None else real_cores)
        self._own_cores = sorted(os.sched_getaffinity(0))
        self._allowed: tuple[int, ...] | None = None

    @property
    def in_use(self) -> tuple[int, ...]:
        """All cores there are for attempts, those first that some are pinned to."""
        pinned = {core for attempt in self._running.values() for core in attempt.cores}
        return tuple(sorted(self._real_cores, key=lambda core: core not in pinned))

    def rearrange(self) -> None:
        """Pin as `cores.arrange` says, those included that have to make room."""
        claims = {
            attempt.id: CoreClaim(attempt.spec.cpu_milli, attempt.cores)
            for attempt in self._running.values()
            if attempt.spec.cpu_milli
        }
        for attempt_id, cores in arrange(claims, self._real_cores).items():
            attempt = self._running[attempt_id]
            if cores != attempt.cores:
                attempt.cores = cores
                if attempt.recorded:  # else they go into the record with the rest
                    self._note_cores(attempt)
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

    def took_off(self, attempt: RunningAttempt, on_cores: tuple[int, ...], shim_pid: int) -> None:
        """Its command runs on these cores: move it if they are not, or not all, what it may use by now."""
        if attempt.cores != on_cores or self._allowed is not None:
            self.pin(attempt, shim_pid)

    def pin(self, attempt: RunningAttempt, shim_pid: int) -> None:
        """The one place that moves a tree: to its own cores, as far as they are allowed now."""
        process_tree.pin(shim_pid, within(attempt.cores or self._own_cores, self._allowed))

    def _note_cores(self, attempt: RunningAttempt) -> None:
        try:
            with JobDir(self._root, attempt.id) as job:
                job.write(job_dir.CORES, attempt.cores)
        except OSError as error:  # a full disk: it is moved all the same, and only the next agent will wonder
            log.warning("the cores of %s could not be noted: %s", attempt.id, error.strerror)
