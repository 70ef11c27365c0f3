"""What an attempt is asked to be, and what is told of it: the values at this package's door.

What is remembered about one attempt that has not ended.
"""

from __future__ import annotations

import signal
from typing import Any, Literal, get_args

import msgspec

from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.memory import TreeMeter

EndKind = Literal[
    "exited",
    "signalled",
    "cancelled",
    "preempted",
    "reclaimed",
    "over_limit",
    "timed_out",
    "hold_expired",
    "expired",
    "lost",
    "never_started",
]


class AttemptSpec(msgspec.Struct, frozen=True):
    """Everything needed to run one attempt."""

    attempt_id: str
    job_id: str
    node: str
    fence: int
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_indexes: tuple[int, ...] = ()
    timeout_ms: int = 0
    grace_ms: int = 10_000
    hold_ms: int = 0


class AttemptLaunch(msgspec.Struct, frozen=True, tag=True):
    """The command runs."""

    attempt_id: str
    fence: int
    pid: int
    cores: tuple[int, ...]
    at_boot_ms: int


class AttemptExit(msgspec.Struct, frozen=True, tag=True):
    """Nothing of it runs any more, and how that came."""

    attempt_id: str
    fence: int
    kind: EndKind
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    cpu_ms: int = 0
    max_memory_bytes: int = 0
    wall_ms: int = 0


class AttemptUsage(msgspec.Struct, frozen=True):
    """What an attempt's whole tree has used so far (CPU) and holds now (memory)."""

    cpu_ms: int
    memory_bytes: int


def record_of(kind: EndKind, detail: str) -> dict[str, Any]:
    """The record of an end that no shim has written."""
    return {"kind": kind, "detail": detail}


def ended_from(attempt_id: str, fence: int, record: dict[str, Any]) -> AttemptExit:
    """The report of a recorded end."""
    assert record["kind"] in get_args(EndKind)
    return AttemptExit(attempt_id=attempt_id, fence=fence, **record)


class RunningAttempt:
    """An attempt from its launch, or from when it was found on the disk, until its end is reported."""

    def __init__(self, spec: AttemptSpec, fence: int, launched_boot_ms: int) -> None:
        self.spec = spec
        self.fence = fence
        self.launched_boot_ms = launched_boot_ms
        self.recorded = False
        self.stopping = False
        self.cores: tuple[int, ...] = ()
        self.started: AttemptLaunch | None = None
        self.shim: process_tree.Proc | None = None
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
            process_tree.send(self.shim, signal.SIGUSR1)
