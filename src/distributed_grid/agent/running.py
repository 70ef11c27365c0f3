"""What is remembered about one attempt that has not ended."""

from __future__ import annotations

import signal

from distributed_grid.agent import tree
from distributed_grid.agent.limits.memory import TreeMeter
from distributed_grid.agent.reports import AttemptSpec, AttemptStarted


class RunningAttempt:
    """An attempt from its launch, or from when it was found on the disk, until its end is reported."""

    def __init__(self, spec: AttemptSpec, fence: int, launched_boot_ms: int) -> None:
        self.spec = spec
        self.fence = fence
        self.launched_boot_ms = launched_boot_ms
        self.recorded = False
        self.halting = False
        self.cores: tuple[int, ...] = ()
        self.started: AttemptStarted | None = None
        self.shim: tree.Proc | None = None
        self.watched: int | None = None  # the channel, or the pidfd of an adopted shim
        self.heard = b""
        self.sends = 0
        self.wake_wanted = False
        self.meter = TreeMeter()

    @property
    def id(self) -> str:
        return self.spec.attempt_id

    def wake(self) -> None:
        """Make the shim look into its directory; one that has not started its command is woken when it has."""
        self.wake_wanted = self.shim is None
        if self.shim is not None:
            tree.send(self.shim, signal.SIGUSR1)
