"""Jobs and attempts: a command and its runs. Each attempt has its own lease and fence and ends once."""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from distributed_grid.domain.deliveries import FetchOrder
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.domain.rows import HistoryEntry, Row
from distributed_grid.domain.states import JobState
from distributed_grid.masking.command_line import mask_secrets


class Ending(enum.StrEnum):
    """Kind of end of an attempt; that of the last one is that of its job."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"
    MOVED = "moved"
    OVER_LIMIT = "over_limit"
    TIMED_OUT = "timed_out"
    EXPIRED = "expired"
    LOST = "lost"
    NEVER_STARTED = "never_started"
    WAITED_TOO_LONG = "waited_too_long"


MAX_DETAIL_CHARS = 8_000
MAX_RUN_MS = 2**53
MAX_STATUS = 2**31 - 1
Status = Annotated[int, Meta(ge=-MAX_STATUS, le=MAX_STATUS)]
RunTime = Annotated[int, Meta(ge=0, le=MAX_RUN_MS)]


class Outcome(Struct, frozen=True, omit_defaults=True, gc=False):
    """Exact end of an attempt. A value beyond its bounds is cut, so that every outcome can be stored and sent."""

    ending: Ending
    exit_code: Status | None = None
    signal: Status | None = None
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    cpu_ms: RunTime = 0
    max_memory_bytes: Annotated[int, Meta(ge=0, le=MAX_AMOUNT)] = 0
    wall_ms: RunTime = 0
    node_fault: bool = False
    """It never started because of its node (too slow, or its disk is full), and can start elsewhere."""
    is_disk_overrun: bool = False  # its limit was one of the disk of its node: more memory does not help

    def __post_init__(self) -> None:
        if len(self.detail) > MAX_DETAIL_CHARS:
            force_setattr(self, "detail", self.detail[: MAX_DETAIL_CHARS - 1] + "…")
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                force_setattr(self, name, min(max(value, least), most))

    @property
    def succeeded(self) -> bool:
        return self.ending is Ending.EXITED and self.exit_code == 0

    @property
    def may_be_retried(self) -> bool:
        """Whether `--retries` runs the job again after this."""
        return not self.succeeded and self.ending in _RETRIED

    @property
    def is_failed_start(self) -> bool:
        """Whether it never started, and its node is to blame."""
        return self.ending is Ending.NEVER_STARTED and self.node_fault


_BOUNDS = (
    ("exit_code", -MAX_STATUS, MAX_STATUS),
    ("signal", -MAX_STATUS, MAX_STATUS),
    ("cpu_ms", 0, MAX_RUN_MS),
    ("max_memory_bytes", 0, MAX_AMOUNT),
    ("wall_ms", 0, MAX_RUN_MS),
)
_RETRIED = frozenset({Ending.EXITED, Ending.SIGNALLED, Ending.LOST, Ending.TIMED_OUT})


class Command(Struct, frozen=True, omit_defaults=True, gc=False):
    """What to run and how. An empty `cwd` is the job's own private directory.

    On another machine than the caller's a job always has its private directory; `workdir` names what is laid out
    in it first (the digest of a manifest; empty: nothing). Of the environment, what belongs to the caller's machine
    (PATH, HOME, ...) stays behind there, except for the names the user gave explicitly. `payload` is what a pull worker
    gets, as JSON; without an `argv` only a pull worker can run it.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    timeout_ms: int = 0
    grace_ms: int = 5_000
    workdir: str = ""
    given: tuple[str, ...] = ()
    payload: str = ""
    merge: bool = False  # stderr is written into stdout

    def __repr__(self) -> str:
        names = [name for name, _ in self.env]  # the values may be secrets
        argv, _ = mask_secrets(self.argv)
        return f"Command({argv!r}, env={names!r}, cwd={self.cwd!r}, workdir={self.workdir!r})"


MAX_RERUNS = 3
"""Reruns of a job with a larger limit that the grid gave it."""


class JobEstimate(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """Needs of a job by earlier runs of its command, when it was submitted."""

    memory_limits: tuple[int, ...] = ()
    """Of its first run and its reruns, each above the one before; none for stated needs, or if too little is known."""
    run_ms: int = 0  # expected run time; 0: unknown
    input_bytes: int = 0  # size of the files that its command names
    tier: str = ""  # source of the limits
    confidence_milli: int = 0
    samples: int = 0  # number of known runs
    reduced_from_bytes: int = 0
    """Learned size, if the job waited for it too long and got the free memory; 0: it did not."""


class Attempt(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """One run of a job under one lease."""

    number: int
    lease_id: str
    node: str
    fence: int
    assigned_at_ms: int
    started_at_ms: int = 0
    ended_at_ms: int = 0
    cores: tuple[int, ...] = ()
    pid: int = 0  # of its process
    outcome: Outcome | None = None
    boot: str = ""  # of the node: a run of an earlier boot was interrupted
    marked_at_ms: int = 0  # last checkpoint mark; 0: none
    machine: str = ""
    """Of the agent that got the order: it may have run there, and is not simply ordered from another one."""
    pid_start: int = 0  # of that process, in clock ticks since boot
    memory_limit_bytes: int = 0  # 0: none. Of a job that may outgrow its lease it is the size of the lease.
    growths: int = 0  # how often its lease grew
    growth_refused: str = ""  # why it could not when the job last held more


class StopOrder(Struct, frozen=True):
    """Reason to stop a running job, and its future afterwards."""

    ending: Ending
    detail: str
    asked_at_ms: int
    requeue: bool = False


class Job(Row, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """A command and its attempts."""

    kind: ClassVar[str] = "job"

    uid: str  # the grid's name for it
    id: str  # the user's name for it
    command: Command
    request: Request  # of the user
    submitted_at_ms: int
    state: JobState = JobState.QUEUED
    attempts: tuple[Attempt, ...] = ()
    retries_left: int = 0
    lease_id: str = ""
    stop: StopOrder | None = None
    outcome: Outcome | None = None
    ended_at_ms: int = 0
    result: str = ""  # report of an ended task, as JSON
    estimate: JobEstimate | None = None
    overruns: int = 0  # runs that exceeded a limit that the grid gave
    restartable: bool = False  # its user declares that it may start again from the beginning on another node
    checkpoint: str = ""  # manifest of its checkpoint directory, as `checkpoint_attempt` left it
    checkpoint_from: int = 0  # attempt whose checkpoint directory is brought first; 0: none
    moved_at_ms: int = 0  # last move
    checkpoint_attempt: int = 0
    checkpoint_files: int = 0
    checkpoint_bytes: int = 0
    checkpoint_problem: str = ""  # why the last directory could not be brought
    fetch: FetchOrder | None = None
    """Files to deliver when it has ended."""
    detached_at_ms: int = 0  # when the command that followed it left it running; 0: never
    detached_reason: str = ""

    @property
    def key(self) -> str:
        return self.uid

    @property
    def given_limit_bytes(self) -> int:
        """The memory limit that the grid gives its next run; 0 where it gives none."""
        limits = self.estimate.memory_limits if self.estimate is not None else ()
        return limits[self.overruns] if limits else 0

    @property
    def may_run_again(self) -> bool:
        """Whether its user allows another run after one that has started."""
        return self.restartable or self.retries_left > 0

    @property
    def may_outgrow(self) -> bool:
        """Whether the memory of its lease was learned and is no limit: the lease grows when the job holds more."""
        is_reduced = self.estimate is not None and self.estimate.reduced_from_bytes > 0
        return self.given_limit_bytes > 0 and (is_reduced or not self.may_run_again)

    @property
    def sized_request(self) -> Request:
        """The request of the user, with the memory limit that the grid gives."""
        limit = self.given_limit_bytes
        return replace(self.request, ask=replace(self.request.ask, memory_bytes=limit)) if limit else self.request

    @property
    def is_over(self) -> bool:
        return self.state is JobState.ENDED

    def ended(self) -> HistoryEntry:
        last, ask = self.attempts[-1] if self.attempts else None, self.request.ask
        return HistoryEntry(
            key=self.id,
            request_id=self.request.id,
            user=self.request.user,
            node=last.node if last is not None else "",
            ended_at_ms=self.ended_at_ms,
            reason=str(self.outcome.ending) if self.outcome is not None else "",
            started_at_ms=last.started_at_ms if last is not None else 0,
            cpu_milli=ask.cpu_milli,
            memory_bytes=ask.memory_bytes,
            gpu_milli=ask.gpu_milli,
            target=self.request.target,
        )

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that is assigned or runs; None if there is none."""
        if not self.attempts or self.attempts[-1].outcome is not None:
            return None
        return self.attempts[-1]
