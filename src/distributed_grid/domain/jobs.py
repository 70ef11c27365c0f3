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
    """How an attempt, and with the last one its job, ended."""

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
    """How a run ended: exactly, with the exit code or signal where there was one.

    Whoever makes one, it is within its bounds: what is stored can be read again, and what is reported is understood.
    `node_fault`: it never started because of its node (too slow to start it, no room on its disk), and can start
    elsewhere. `is_disk_overrun`: the limit it exceeded was one of its node's disk; more memory does not help.
    """

    ending: Ending
    exit_code: Status | None = None
    signal: Status | None = None
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)] = ""
    cpu_ms: RunTime = 0
    max_memory_bytes: Annotated[int, Meta(ge=0, le=MAX_AMOUNT)] = 0
    wall_ms: RunTime = 0
    node_fault: bool = False
    is_disk_overrun: bool = False

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

    def __repr__(self) -> str:
        names = [name for name, _ in self.env]  # the values may be secrets
        argv, _ = mask_secrets(self.argv)
        return f"Command({argv!r}, env={names!r}, cwd={self.cwd!r}, workdir={self.workdir!r})"


MAX_RERUNS = 3
"""How often a job is run again with a bigger limit that the grid gave it."""


class JobEstimate(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """What earlier runs of its command say of a job when it is submitted.

    `memory_limits` are the limits of its first run and of its reruns, each above the one before; there are none where
    the user has stated needs, or too little is known. `run_ms` is its expected run time (0: not known), `input_bytes`
    the size of the files that its command names. The rest says how the limits were found: `confidence_milli` is in
    thousandths, and `samples` how many runs were known. `reduced_from_bytes` is the size that was learned, where the
    job has waited for it too long and got what was free (0: it did not).
    """

    memory_limits: tuple[int, ...] = ()
    run_ms: int = 0
    input_bytes: int = 0
    tier: str = ""
    confidence_milli: int = 0
    samples: int = 0
    reduced_from_bytes: int = 0


class Attempt(Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """One run of a job under one lease; `boot` and `machine` are the node's at the time: what a restart of the machine
    interrupts, or what an agent of another machine or directory was ordered, may have run, and is not simply ordered
    again. `pid` and `pid_start` name its process. `marked_at_ms` is when it last marked a checkpoint; 0 is never.
    `memory_limit_bytes` is what it may hold; 0 is any. Of a job that may outgrow its lease it is the size of the lease:
    `growths` is how often that grew, and `growth_refused` why it could not when the job last held more."""

    number: int
    lease_id: str
    node: str
    fence: int
    assigned_at_ms: int
    started_at_ms: int = 0
    ended_at_ms: int = 0
    cores: tuple[int, ...] = ()
    pid: int = 0
    outcome: Outcome | None = None
    boot: str = ""
    marked_at_ms: int = 0
    machine: str = ""
    pid_start: int = 0
    memory_limit_bytes: int = 0
    growths: int = 0
    growth_refused: str = ""


class StopOrder(Struct, frozen=True):
    """Why a running job is being stopped, and what it becomes afterwards."""

    ending: Ending
    detail: str
    asked_at_ms: int
    requeue: bool = False


class Job(Row, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """A command and its attempts. `uid` is the grid's name for it, `id` the user's; `request` is what the user asked
    for, `overruns` how often it ran over a limit that the grid gave it. `result` is what a task that ended has
    reported, as JSON. `restartable`: its user has declared that it may be started again from the beginning on another
    node. `checkpoint` is the manifest of its checkpoint directory, as attempt `checkpoint_attempt` left it, with so
    many files and bytes; that of attempt `checkpoint_from` has to be brought first (0: nothing has to be), and
    `checkpoint_problem` is why the last one that had to could not be. `moved_at_ms` is when it was last moved.
    `detached_at_ms` is when the command that followed it left it running (0: none has), and `detached_reason` why."""

    kind: ClassVar[str] = "job"

    uid: str
    id: str
    command: Command
    request: Request
    submitted_at_ms: int
    state: JobState = JobState.QUEUED
    attempts: tuple[Attempt, ...] = ()
    retries_left: int = 0
    lease_id: str = ""
    stop: StopOrder | None = None
    outcome: Outcome | None = None
    ended_at_ms: int = 0
    result: str = ""
    estimate: JobEstimate | None = None
    overruns: int = 0
    restartable: bool = False
    checkpoint: str = ""
    checkpoint_from: int = 0
    moved_at_ms: int = 0
    checkpoint_attempt: int = 0
    checkpoint_files: int = 0
    checkpoint_bytes: int = 0
    checkpoint_problem: str = ""
    fetch: FetchOrder | None = None
    """Files to deliver when it has ended."""
    detached_at_ms: int = 0
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
        """What is asked for it: what the user did, with the limit that the grid gives it."""
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
        """The run that is assigned or going on, if one is."""
        if not self.attempts or self.attempts[-1].outcome is not None:
            return None
        return self.attempts[-1]
