"""State machines of nodes, leases, jobs, workers and moves, as transition tables.

A pair (state, step) that is not in a table raises IllegalStep and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from distributed_grid.errors import IllegalStep


class NodeState(enum.StrEnum):
    JOINING = "joining"
    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"
    DRAINING = "draining"
    LEFT = "left"


class LeaseState(enum.StrEnum):
    ASKED = "asked"
    RESERVING = "reserving"
    ACTIVE = "active"
    RELEASING = "releasing"
    ENDED = "ended"


class LeaseEnd(enum.StrEnum):
    """Reason for the end of a lease."""

    RELEASED = "released"
    EXPIRED = "expired"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"
    LOST = "lost"
    FAILED = "failed"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class JobState(enum.StrEnum):
    QUEUED = "queued"
    ASSIGNED = "assigned"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


class WorkerState(enum.StrEnum):
    """States of a provider's machine: an intent before there is a machine, and gone only when that is proven."""

    WANTED = "wanted"
    ASKED = "asked"
    BOOTING = "booting"
    JOINED = "joined"
    DRAINING = "draining"
    TERMINATING = "terminating"
    GONE = "gone"


class MoveState(enum.StrEnum):
    """States of a move: proposed, target reserved, files shipped, source frozen, kill decided, source dead, job
    running, ended. The guard on the source has some of them, and finer ones, in its journal; its agent reports them."""

    PROPOSED = "proposed"
    RESERVED = "reserved"
    SHIPPED = "shipped"
    FROZEN = "frozen"
    DECIDED = "decided"
    DEAD = "dead"
    RUNNING = "running"
    ENDED = "ended"

    # Only at the source:
    OPENED = "opened"  # the original is found, and its files can be read
    FREEZING = "freezing"
    CHECKED = "checked"  # frozen, and compared with the request
    THAWED = "thawed"  # the original runs on; final
    GONE = "gone"  # the original ended by itself; final
    RETURNED = "returned"  # the files of the job are back
    FAILED = "failed"  # an order could not be carried out, and changed nothing


class Step(enum.StrEnum):
    """Steps of nodes, leases, jobs, workers and moves; the agent of a move's source is ordered to take some of them."""

    HEAR = "hear"
    DOUBT = "doubt"
    LOSE = "lose"
    DRAIN = "drain"
    LEAVE = "leave"
    JOIN = "join"
    GRANT = "grant"
    BIND = "bind"
    UNBIND = "unbind"
    RELEASE = "release"
    END = "end"
    WITHDRAW = "withdraw"
    ASSIGN = "assign"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    REQUEUE = "requeue"
    ASK = "ask"
    BOOT = "boot"
    TERMINATE = "terminate"
    RESERVE = "reserve"
    SHIP = "ship"
    FREEZE = "freeze"
    COMMIT = "commit"
    DIE = "die"
    OPEN = "open"
    THAW = "thaw"
    RETURN = "return"
    CLOSE = "close"


NODE_TRANSITIONS: dict[tuple[NodeState, Step], NodeState] = {
    (NodeState.JOINING, Step.HEAR): NodeState.ALIVE,
    (NodeState.JOINING, Step.LEAVE): NodeState.LEFT,
    (NodeState.ALIVE, Step.DOUBT): NodeState.SUSPECT,
    (NodeState.SUSPECT, Step.HEAR): NodeState.ALIVE,
    (NodeState.SUSPECT, Step.LOSE): NodeState.LOST,
    (NodeState.ALIVE, Step.DRAIN): NodeState.DRAINING,
    (NodeState.SUSPECT, Step.DRAIN): NodeState.DRAINING,
    (NodeState.DRAINING, Step.RESUME): NodeState.ALIVE,
    (NodeState.DRAINING, Step.LEAVE): NodeState.LEFT,
    (NodeState.LOST, Step.LEAVE): NodeState.LEFT,
    (NodeState.LOST, Step.JOIN): NodeState.JOINING,
    (NodeState.LEFT, Step.JOIN): NodeState.JOINING,
}

LEASE_TRANSITIONS: dict[tuple[LeaseState, Step], LeaseState] = {
    (LeaseState.ASKED, Step.GRANT): LeaseState.RESERVING,
    (LeaseState.ASKED, Step.WITHDRAW): LeaseState.ENDED,
    (LeaseState.RESERVING, Step.BIND): LeaseState.ACTIVE,
    (LeaseState.RESERVING, Step.RELEASE): LeaseState.RELEASING,
    (LeaseState.RESERVING, Step.WITHDRAW): LeaseState.ENDED,
    (LeaseState.ACTIVE, Step.UNBIND): LeaseState.RESERVING,
    (LeaseState.ACTIVE, Step.RELEASE): LeaseState.RELEASING,
    (LeaseState.RELEASING, Step.END): LeaseState.ENDED,
}

JOB_TRANSITIONS: dict[tuple[JobState, Step], JobState] = {
    (JobState.QUEUED, Step.ASSIGN): JobState.ASSIGNED,
    (JobState.QUEUED, Step.END): JobState.ENDED,
    (JobState.ASSIGNED, Step.START): JobState.RUNNING,
    (JobState.ASSIGNED, Step.STOP): JobState.STOPPING,
    (JobState.ASSIGNED, Step.REQUEUE): JobState.QUEUED,
    (JobState.ASSIGNED, Step.END): JobState.ENDED,
    (JobState.RUNNING, Step.PAUSE): JobState.PAUSED,
    (JobState.PAUSED, Step.RESUME): JobState.RUNNING,
    (JobState.RUNNING, Step.STOP): JobState.STOPPING,
    (JobState.PAUSED, Step.STOP): JobState.STOPPING,
    (JobState.RUNNING, Step.REQUEUE): JobState.QUEUED,
    (JobState.PAUSED, Step.REQUEUE): JobState.QUEUED,
    (JobState.RUNNING, Step.END): JobState.ENDED,
    (JobState.PAUSED, Step.END): JobState.ENDED,
    (JobState.STOPPING, Step.END): JobState.ENDED,
    (JobState.STOPPING, Step.REQUEUE): JobState.QUEUED,
}

WORKER_TRANSITIONS: dict[tuple[WorkerState, Step], WorkerState] = {
    (WorkerState.WANTED, Step.ASK): WorkerState.ASKED,
    (WorkerState.WANTED, Step.END): WorkerState.GONE,
    (WorkerState.ASKED, Step.BOOT): WorkerState.BOOTING,
    (WorkerState.ASKED, Step.JOIN): WorkerState.JOINED,
    (WorkerState.ASKED, Step.TERMINATE): WorkerState.TERMINATING,
    (WorkerState.ASKED, Step.END): WorkerState.GONE,
    (WorkerState.BOOTING, Step.JOIN): WorkerState.JOINED,
    (WorkerState.BOOTING, Step.TERMINATE): WorkerState.TERMINATING,
    (WorkerState.BOOTING, Step.END): WorkerState.GONE,
    (WorkerState.JOINED, Step.DRAIN): WorkerState.DRAINING,
    (WorkerState.JOINED, Step.TERMINATE): WorkerState.TERMINATING,
    (WorkerState.JOINED, Step.END): WorkerState.GONE,
    (WorkerState.DRAINING, Step.RESUME): WorkerState.JOINED,
    (WorkerState.DRAINING, Step.TERMINATE): WorkerState.TERMINATING,
    (WorkerState.DRAINING, Step.END): WorkerState.GONE,
    (WorkerState.TERMINATING, Step.END): WorkerState.GONE,
}

MOVE_TRANSITIONS: dict[tuple[MoveState, Step], MoveState] = {
    (MoveState.PROPOSED, Step.RESERVE): MoveState.RESERVED,
    (MoveState.RESERVED, Step.SHIP): MoveState.SHIPPED,
    (MoveState.SHIPPED, Step.FREEZE): MoveState.FROZEN,
    (MoveState.FROZEN, Step.COMMIT): MoveState.DECIDED,
    (MoveState.RESERVED, Step.COMMIT): MoveState.DECIDED,
    (MoveState.DECIDED, Step.DIE): MoveState.DEAD,
    (MoveState.DEAD, Step.START): MoveState.RUNNING,
    (MoveState.PROPOSED, Step.END): MoveState.ENDED,
    (MoveState.RESERVED, Step.END): MoveState.ENDED,
    (MoveState.SHIPPED, Step.END): MoveState.ENDED,
    (MoveState.FROZEN, Step.END): MoveState.ENDED,
    (MoveState.DECIDED, Step.END): MoveState.ENDED,
    (MoveState.DEAD, Step.END): MoveState.ENDED,
    (MoveState.RUNNING, Step.END): MoveState.ENDED,
}


TRANSITIONS: dict[type[enum.StrEnum], tuple[str, Mapping[tuple[Any, Step], Any]]] = {
    NodeState: ("node", NODE_TRANSITIONS),
    LeaseState: ("lease", LEASE_TRANSITIONS),
    JobState: ("job", JOB_TRANSITIONS),
    WorkerState: ("worker", WORKER_TRANSITIONS),
    MoveState: ("move", MOVE_TRANSITIONS),
}
"""By the type of the states: the noun, and its table."""
S = TypeVar("S", bound=enum.StrEnum)


def advance(state: S, step: Step) -> S:
    """The state after this step; IllegalStep where the table of the noun does not have it."""
    noun, table = TRANSITIONS[type(state)]
    try:
        after: S = table[state, step]
    except KeyError:
        raise IllegalStep(f"a {noun} that is {state} cannot {step}") from None
    return after
