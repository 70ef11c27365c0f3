"""What happened, in the past tense: the only way into the ledger."""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.jobs import Command, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node, Usage


class ControlPlaneStarted(Struct, frozen=True):
    """A new owner of the ledger took over: the epoch grows, nobody has been heard yet."""

    epoch: int


class NodeDeclared(Struct, frozen=True):
    """The config names this node, or its agent said what it has."""

    node: Node


class NodeForgotten(Struct, frozen=True):
    """The config does not name this node any more."""

    name: str


class NodeHeard(Struct, frozen=True):
    """A heartbeat with fresh measurements."""

    name: str
    usage: Usage


class LeaseAsked(Struct, frozen=True):
    """Somebody asks for resources to hold, without a command."""

    request: Request


class RequestRefused(Struct, frozen=True):
    """A request was refused before it could become one of the ledger's: only the audit trail changes."""

    request_id: str
    user: str
    reason: str


class LeaseReleased(Struct, frozen=True):
    """The holder gives a lease back; giving it back twice is harmless."""

    lease_id: str
    by: str
    detail: str = ""


class LeaseExtended(Struct, frozen=True):
    """The holder asks for this much more time."""

    lease_id: str
    by: str
    extra_ms: int


class JobSubmitted(Struct, frozen=True):
    """Somebody wants a command run under a lease."""

    id: str
    command: Command
    request: Request
    retries: int = 0


class JobCancelled(Struct, frozen=True):
    """The user does not want the job any more; cancelling twice is harmless."""

    uid: str
    by: str
    detail: str = ""


class AttemptStarted(Struct, frozen=True):
    """The agent runs the command."""

    uid: str
    number: int
    fence: int
    pid: int
    cores: tuple[int, ...] = ()


class AttemptEnded(Struct, frozen=True):
    """The agent proved the attempt over: its whole process tree is gone."""

    uid: str
    number: int
    fence: int
    outcome: Outcome


class AttemptsListed(Struct, frozen=True):
    """An agent came (back) and said which attempts it has a record of, by lease id."""

    node: str
    attempts: tuple[str, ...]


class QueueLooked(Struct, frozen=True):
    """Capacity may have come free: look at the waiting requests, in order.

    `tried` are shapes of requests that did not fit during this look.
    """

    tried: frozenset[object] = frozenset()


class TimePassed(Struct, frozen=True):
    """A moment with something due."""


Event = (
    ControlPlaneStarted
    | NodeDeclared
    | NodeForgotten
    | NodeHeard
    | LeaseAsked
    | RequestRefused
    | LeaseReleased
    | LeaseExtended
    | JobSubmitted
    | JobCancelled
    | AttemptStarted
    | AttemptEnded
    | AttemptsListed
    | QueueLooked
    | TimePassed
)
