"""What the control plane and its Ray child say to each other: msgpack, each message after its length.

Rule 1: the child decides nothing: it is told where Ray is and what to do there, and reports.
Rule 2: when the control plane's end closes, the child is over. What it made in Ray stays.
Rule 3: the first order is `Connect`; until that is answered with `Connected` nothing else is done.

The words that the control plane and its Ray child both use.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from distributed_grid.adapters.node.messages import AgentLinkChanged, RunFinished, StepDone
from distributed_grid.adapters.ray.node_transport import AttachedNode

LARGEST = 64 * 1024 * 1024
_HEAD = struct.Struct(">I")
T = TypeVar("T")


class _Order(Struct, frozen=True, tag=True):
    """What the child is told."""


class Connect(_Order, frozen=True):
    """Be connected with this Ray cluster, for this grid; `environ` has what Ray needs to be let in."""

    address: str
    grid: str
    namespace: str = "grid"
    hold_seconds: float = 60.0
    environ: dict[str, str] = {}
    wheels: str = ""


class GroupSpec(Struct, frozen=True):
    """A group: its name, Ray's id of the node it belongs on, and what it takes there."""

    name: str
    node: str
    resources: dict[str, float]


class ReserveGroups(_Order, frozen=True):
    """Have these groups, each within so many seconds; each is answered by itself, under its name."""

    items: tuple[GroupSpec, ...]
    seconds: float


class FreeGroups(_Order, frozen=True):
    """Have none of these groups; each is answered by itself, under its name."""

    names: tuple[str, ...]


class ObserveGroups(_Order, frozen=True):
    """Say what is there; `full` with every group of ours."""

    number: int
    full: bool


class ExtendHold(_Order, frozen=True):
    """The grid is there: its groups hold for so long; `terms` are those that end in so many seconds."""

    seconds: float
    terms: dict[str, float] = {}


class Close(_Order, frozen=True):
    """Leave nothing of this grid in Ray: no group, no keeper, no hand."""

    number: int


class Environ(_Order, frozen=True):
    """How packages are fetched, of the user who typed a command; kept in memory only."""

    environ: dict[str, str]
    wheels: str


class KeepAttachedNode(_Order, frozen=True):
    """Keep an agent on this Ray node and its link; telling twice changes nothing."""

    target: AttachedNode


class DropAttachedNode(_Order, frozen=True):
    """Let go of the link to a node; its agent stays."""

    node: str


class RunOnAttachedNode(_Order, frozen=True):
    """One deed on one node."""

    number: int
    deed: str
    target: AttachedNode


class _Report(Struct, frozen=True, tag=True):
    """What the child says."""


class Connected(_Report, frozen=True):
    """Ray has let us in."""

    session: str
    ray: str
    python: str
    authenticated: bool


class RayRefused(_Report, frozen=True):
    """Ray has not let us in, or has broken off; `final`: trying again will not help by itself. The child ends."""

    why: str
    final: bool = False


class GroupsReserved(_Report, frozen=True):
    """A group is made, or why not."""

    name: str
    problem: str = ""


class GroupsFreed(_Report, frozen=True):
    """A group is gone, or why nobody knows."""

    name: str
    problem: str = ""


class GroupsObserved(_Report, frozen=True):
    """What is there."""

    number: int
    view: dict[str, Any]
    problem: str = ""


class Closed(_Report, frozen=True):
    """Nothing of this grid is left in Ray, or why something is."""

    number: int
    problem: str = ""


Order = (
    Connect
    | ReserveGroups
    | FreeGroups
    | ObserveGroups
    | ExtendHold
    | Close
    | Environ
    | KeepAttachedNode
    | DropAttachedNode
    | RunOnAttachedNode
)
Report = (
    Connected
    | RayRefused
    | GroupsReserved
    | GroupsFreed
    | GroupsObserved
    | Closed
    | AgentLinkChanged
    | StepDone
    | RunFinished
)
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()


def packed(message: Order | Report) -> bytes:
    """A message as it travels."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


async def next_order(reader: asyncio.StreamReader) -> Order | None:
    """The next thing the child is told; None when the line has ended."""
    body = await _next_body(reader)
    return None if body is None else _orders.decode(body)


async def next_report(reader: asyncio.StreamReader) -> Report | None:
    """The next thing the child says; None when the line has ended."""
    body = await _next_body(reader)
    return None if body is None else _reports.decode(body)


async def _next_body(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if size > LARGEST:
            raise ValueError(f"a message of {size} bytes makes no sense")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


AWAY = "away: "
"""What a problem begins with that is no refusal: nobody knows what became of it."""
