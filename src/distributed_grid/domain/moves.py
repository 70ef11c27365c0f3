"""Moves: work that leaves a node for another one, from the proposal to the result; consents; automatic offloading.

The states are a transition table (`domain/states.py`). A process that the grid did not start goes through all of them;
a job skips what is not needed: its next attempt waits for the recorded end of the last one anyway. Before `decided`
every failure leaves the original as it was; after it every failure ends in the next attempt somewhere.

What automatic offloading remembers of a node between two looks is never stored: what lasts are moves, jobs and degraded
nodes.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.jobs import Command
from distributed_grid.domain.leases import Request
from distributed_grid.domain.processes import ProcessIdentity, ProcessLook, StandardStream
from distributed_grid.domain.rows import HistoryEntry, Row
from distributed_grid.domain.states import MoveState

MOVE_PREFIX = "move-"
"""How the ids of moves and of their reservations begin; agents know the files of a move by it."""
DEFAULT_FREEZE_MS = 10_000
MIN_FREEZE_MS, MAX_FREEZE_MS = 500, 60_000
MAX_CONSIDERED = 20
"""Jobs of a node of which it is remembered why they were moved or left."""


class Way(enum.StrEnum):
    """How work gets to another node, in the order of preference."""

    START_ELSEWHERE = "start_elsewhere"
    QUEUE_ELSEWHERE = "queue_elsewhere"
    CHECKPOINT_RESTART = "checkpoint_restart"
    RESTART = "restart"
    PROCESS_RESTART = "process_restart"


class MoveEnd(enum.StrEnum):
    """How a move ended. `failed` and `cancelled`: the original was left as it was. `not_needed`: it ended by itself."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    NOT_NEEDED = "not_needed"


class MovedProcess(Struct, frozen=True, omit_defaults=True):
    """The original of a move of a process: who it is, where it runs, where its output goes, and what was seen of it at
    the request."""

    identity: ProcessIdentity
    cwd: str
    streams: tuple[StandardStream, ...] = ()
    shape: str = ""
    look: ProcessLook | None = None


class Move(Row, frozen=True, omit_defaults=True, kw_only=True):
    """One move. `id` is also the id of the request that reserves room on the target (`lease_id` is its lease).

    For a job `job` is its uid from the beginning; for a process it is that of the job that takes its place, made in the
    step that records the death. `request` is what the reservation asks for, `command` what the new job runs. `machine`
    names the machine of the source, whose new boot id proves that the original is dead. `shipped` and `final` are
    manifests of the working directory: shipped ahead, and as it was when frozen. From `commit_asked_at_ms` on only the
    guard on the source knows whether the original is thawed or killed. `left_out` names files of the working directory
    that were not shipped, with the reason. `ending` is set when somebody wants the move to
    end, and why is in `problem`; the original is untouched or thawed when the state is `ended`. `automatic`: nobody
    asked for it but the grid. `result` is the end of the job that took a process's place, `ran_on` and `ran_as` the
    node and the lease of its last attempt, `results` the manifest of what it has written, once that is here. `returned`
    counts the files that came back to the source, `kept` names those that did not replace one that was changed there
    meanwhile, and `notes` say what else the user has to know about the return.
    """

    kind: ClassVar[str] = "move"

    id: str
    user: str
    source: str
    target: str
    way: Way
    request: Request
    requested_at_ms: int
    state: MoveState = MoveState.PROPOSED
    state_at_ms: int = 0
    reason: str = ""
    automatic: bool = False
    job: str = ""
    job_id: str = ""
    process: MovedProcess | None = None
    command: Command | None = None
    machine: str = ""
    lease_id: str = ""
    shipped: str = ""
    shipped_bytes: int = 0
    final: str = ""
    final_bytes: int = 0
    freeze_ms: int = DEFAULT_FREEZE_MS
    frozen_at_ms: int = 0
    frozen_for_ms: int = 0
    commit_asked_at_ms: int = 0
    ending: MoveEnd | None = None
    problem: str = ""
    result: str = ""
    ran_on: str = ""
    ran_as: str = ""
    results: str = ""
    returned: int = 0
    kept: tuple[str, ...] = ()
    is_returned: bool = False
    end: MoveEnd | None = None
    ended_at_ms: int = 0
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.state is MoveState.ENDED

    def ended(self) -> HistoryEntry:
        """Its resources are counted with its lease and its job."""
        return HistoryEntry(
            key=self.id,
            request_id=self.id,
            user=self.user,
            node=self.source,
            ended_at_ms=self.ended_at_ms,
            reason=str(self.end),
            target=self.target,
        )

    @property
    def is_decided(self) -> bool:
        """Whether the original will not go on: the work is the grid's to run."""
        return self.state in (MoveState.DECIDED, MoveState.DEAD, MoveState.RUNNING)


def consent_key(user: str, shape: str, cwd: str) -> str:
    """The key of a consent; a shape has no line breaks."""
    return f"{user}/{cwd}\n{shape}" if cwd else f"{user}/{shape}"


class MoveConsent(Row, frozen=True, omit_defaults=True, kw_only=True):
    """A user allows that processes of this command shape that run in this directory are restarted elsewhere, with these
    variables of theirs. One without a directory was given to an earlier version and covers nothing."""

    kind: ClassVar[str] = "move_consent"

    user: str
    shape: str
    given_at_ms: int
    variables: tuple[str, ...] = ()
    withdrawn: bool = False
    cwd: str = ""

    @property
    def key(self) -> str:
        return consent_key(self.user, self.shape, self.cwd)

    @property
    def is_over(self) -> bool:
        return self.withdrawn


class AutoOffloadState(Row, frozen=True, omit_defaults=True, kw_only=True):
    """Automatic offloading, as it was set by a person (None: as the config says), and how it fares.

    `failures` counts moves that failed one after the other; when there are too many it stops itself, and
    `stopped_why` says so until it is enabled or reset. `moved_at_ms` is the end of its last move.
    """

    kind: ClassVar[str] = "auto_offload_state"

    enabled: bool | None = None
    set_by: str = ""
    set_at_ms: int = 0
    failures: int = 0
    stopped_why: str = ""
    moved_at_ms: int = 0

    @property
    def key(self) -> str:
        return "auto"


class OffloadRules(Struct, frozen=True, kw_only=True):
    """`auto_offload` of the config: from which level (thousandths) on a node is relieved, how often that is looked at,
    and how long nothing moves after a move."""

    enabled: bool = False
    cpu_high: int = 800
    memory_high: int = 800
    gpu_high: int = 800
    interval_ms: int = 60_000
    cooldown_ms: int = 300_000


class Considered(Struct, frozen=True):
    """A job that was looked at, and why it was moved or left."""

    job: str
    reason: str


class OffloadWatch(Row, frozen=True, kw_only=True):
    """A node between two looks: since when each resource is above its threshold (or works so much harder than others:
    `spread`), since when its memory is below the low mark again, and what the last look decided, and why.

    `moved_at_ms` is when something last left it or came to it by itself. `tried` are the jobs that it was tried to
    move within the last hour, with the time.
    """

    kind: ClassVar[str] = "offload_watch"
    is_volatile: ClassVar[bool] = True

    node: str
    memory_since_ms: int | None = None
    cpu_since_ms: int | None = None
    gpu_since_ms: int | None = None
    spread_since_ms: int | None = None
    low_since_ms: int | None = None
    moved_at_ms: int = 0
    tried: tuple[tuple[str, int], ...] = ()
    looked_at_ms: int = 0
    reason: str = ""
    considered: tuple[Considered, ...] = ()

    @property
    def key(self) -> str:
        return self.node

    def since_ms(self, cause: str) -> int | None:
        """Since when a resource, or the distance to the least loaded node, has been too high."""
        causes = {"memory": self.memory_since_ms, "cpu": self.cpu_since_ms, "gpu": self.gpu_since_ms}
        return causes.get(cause, self.spread_since_ms)


class DegradedNode(Row, frozen=True):
    """A node that is short of memory while nothing there can go elsewhere: it gets no new work, its `low` jobs stand
    still, and blocks of the memory pool go to disk, until it is `restored`."""

    kind: ClassVar[str] = "degraded_node"

    node: str
    since_ms: int
    why: str
    restored: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.restored
