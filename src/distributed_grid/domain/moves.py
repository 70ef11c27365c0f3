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
"""Prefix of the ids of moves and of their reservations; agents know the files of a move by it."""
DEFAULT_FREEZE_MS = 10_000
MIN_FREEZE_MS, MAX_FREEZE_MS = 500, 60_000
MAX_CONSIDERED = 20
"""Jobs of a node whose reason to be moved or left is kept."""


class Way(enum.StrEnum):
    """Ways of work to another node, in the order of preference."""

    START_ELSEWHERE = "start_elsewhere"
    QUEUE_ELSEWHERE = "queue_elsewhere"
    CHECKPOINT_RESTART = "checkpoint_restart"
    RESTART = "restart"
    PROCESS_RESTART = "process_restart"


class MoveEnd(enum.StrEnum):
    """End of a move. `failed` and `cancelled`: the original was left as it was. `not_needed`: it ended by itself."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    NOT_NEEDED = "not_needed"


class MovedProcess(Struct, frozen=True, omit_defaults=True):
    """Original of a move of a process."""

    identity: ProcessIdentity
    cwd: str
    streams: tuple[StandardStream, ...] = ()
    shape: str = ""
    look: ProcessLook | None = None  # at it, at the time of the request


class Move(Row, frozen=True, omit_defaults=True, kw_only=True):
    """One move of a job or a process."""

    kind: ClassVar[str] = "move"

    id: str  # also of the request that reserves room on the target
    user: str
    source: str
    target: str
    way: Way
    request: Request  # of the reservation
    requested_at_ms: int
    state: MoveState = MoveState.PROPOSED
    state_at_ms: int = 0
    reason: str = ""
    automatic: bool = False  # nobody asked for it but the grid
    job: str = ""  # uid: of the job that moves, or of the one that replaces the process, made with its recorded death
    job_id: str = ""
    process: MovedProcess | None = None
    command: Command | None = None  # of the new job of a process
    machine: str = ""  # of the source: its new boot id proves that the original is dead
    lease_id: str = ""  # of the reservation
    shipped: str = ""  # manifest of the working directory, shipped ahead
    shipped_bytes: int = 0
    final: str = ""  # manifest of the working directory when the original was frozen
    final_bytes: int = 0
    freeze_ms: int = DEFAULT_FREEZE_MS
    frozen_at_ms: int = 0
    frozen_for_ms: int = 0
    commit_asked_at_ms: int = 0
    """From then on only the guard on the source knows whether the original is thawed or killed."""
    ending: MoveEnd | None = None
    """Requested end, with its reason in `problem`; the original is untouched or thawed when the state is `ended`."""
    problem: str = ""
    result: str = ""  # end of the job that replaced a process
    ran_on: str = ""  # node of the last attempt of that job
    ran_as: str = ""  # lease of that attempt
    results: str = ""  # manifest of the files that the job has written, once they are here
    returned: int = 0  # number of files that are back at the source
    kept: tuple[str, ...] = ()  # files that were changed at the source meanwhile, and were not replaced
    is_returned: bool = False
    end: MoveEnd | None = None
    ended_at_ms: int = 0
    notes: tuple[str, ...] = ()  # on the return, for the user
    left_out: tuple[str, ...] = ()  # files of the working directory that were not shipped, with the reason

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
        """Whether the kill of the original is decided: the work is the grid's to run."""
        return self.state in (MoveState.DECIDED, MoveState.DEAD, MoveState.RUNNING)


def consent_key(user: str, shape: str, cwd: str) -> str:
    """The key of a consent; a shape has no line breaks."""
    return f"{user}/{cwd}\n{shape}" if cwd else f"{user}/{shape}"


class MoveConsent(Row, frozen=True, omit_defaults=True, kw_only=True):
    """Consent of a user to restart processes of a command shape in a directory elsewhere."""

    kind: ClassVar[str] = "move_consent"

    user: str
    shape: str
    given_at_ms: int
    variables: tuple[str, ...] = ()  # variables of the process that its restart gets
    withdrawn: bool = False
    cwd: str = ""  # empty: given to an earlier version, and covers nothing

    @property
    def key(self) -> str:
        return consent_key(self.user, self.shape, self.cwd)

    @property
    def is_over(self) -> bool:
        return self.withdrawn


class AutoOffloadState(Row, frozen=True, omit_defaults=True, kw_only=True):
    """State of automatic offloading, as set by a person."""

    kind: ClassVar[str] = "auto_offload_state"

    enabled: bool | None = None  # None: as the config says
    set_by: str = ""
    set_at_ms: int = 0
    failures: int = 0  # moves that failed in a row
    stopped_why: str = ""  # why it stopped itself after too many failures; empty once it is enabled or reset
    moved_at_ms: int = 0  # end of its last move

    @property
    def key(self) -> str:
        return "auto"


class OffloadRules(Struct, frozen=True, kw_only=True):
    """`auto_offload` of the config."""

    enabled: bool = False
    cpu_high: int = 800  # level from which a node is relieved, in thousandths; so are the next two
    memory_high: int = 800
    gpu_high: int = 800
    interval_ms: int = 60_000  # between two evaluations
    cooldown_ms: int = 300_000  # after a move


class Considered(Struct, frozen=True):
    """A job that automatic offloading has considered, and the reason why it was moved or left."""

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
