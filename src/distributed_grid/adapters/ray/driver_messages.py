"""Messages between the control plane and its Ray child: `Connect` first, the rest once that is answered."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from distributed_grid.adapters.child_process import (
    ChildAnswer,
    ChildCommand,
    Environ,
    FilePath,
    Name,
    Number,
    Report,
    Seconds,
    StepDone,
    Text,
)
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, DropAgentLink, NodeTarget, RunFinished
from distributed_grid.domain.resources import MAX_AMOUNT

CLIENT_SCHEME = "ray://"
AUTO = "auto"
RAY_MISSING = "Ray is not installed here; type: make ray (or pip install 'distributed-grid[ray]')"

Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
MAX_NODES, MAX_GROUPS, MAX_IN_USE = 5_000, 15_000, 5_000
AWAY = "away: "
"""Prefix of a problem that is no refusal: the result is unknown."""


class Connect(ChildCommand, frozen=True):
    """Be connected with this Ray cluster, for this grid; `environ` has the credentials for it.

    With `await_raylet` one of its nodes is to run on the driver's machine, and is waited for.
    """

    address: Text
    grid: Name
    namespace: Name = "grid"
    hold_seconds: Seconds = 60.0
    environ: Environ = field(default_factory=dict)
    wheels: FilePath = ""
    await_raylet: bool = False


class GroupSpec(Struct, frozen=True):
    """A placement group: name, Ray's id of its node, resources there, and remaining time (0: no end)."""

    name: Name
    node: Name
    resources: Annotated[dict[Name, Annotated[float, Meta(ge=0, le=MAX_AMOUNT)]], Meta(max_length=256)]
    left_seconds: Seconds = 0.0


class ReserveGroups(ChildCommand, frozen=True):
    """Make these groups, each within this time; each is answered by itself, under its name."""

    items: Annotated[tuple[GroupSpec, ...], Meta(max_length=MAX_GROUPS)]
    seconds: Seconds


class FreeGroups(ChildCommand, frozen=True):
    """Remove these groups; each is answered by itself, under its name."""

    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_GROUPS)]


class ObserveGroups(ChildCommand, frozen=True):
    """Report the nodes of the cluster; `full` with every group of this grid."""

    number: Number
    full: bool


class ExtendGroupHold(ChildCommand, frozen=True):
    """The grid is there: extend the hold of its groups; `terms` are the groups with an end of their own."""

    number: Number
    seconds: Seconds
    terms: Annotated[dict[Name, Seconds], Meta(max_length=MAX_GROUPS)] = field(default_factory=dict)


class Close(ChildCommand, frozen=True):
    """Leave nothing of this grid in Ray: no placement group, no actor."""

    number: Number


class PackageSettings(ChildCommand, frozen=True):
    """How packages are fetched, of the user who typed a command; kept in memory only."""

    environ: Environ
    wheels: FilePath


class AttachedNode(NodeTarget, frozen=True, kw_only=True):
    """A node of a Ray cluster that has become one of the grid's."""

    ray_node: Name
    namespace: Name = "grid"


class KeepAttachedNode(ChildCommand, frozen=True):
    """Keep an agent on this Ray node and its link; keeping twice changes nothing."""

    target: AttachedNode


class RunOnAttachedNode(ChildCommand, frozen=True):
    """One operation on one node: `stop` or `purge` its agent, or `forget` a node that is gone; its actor goes, too."""

    number: Number
    operation: Name
    target: AttachedNode


class Connected(Report, frozen=True):
    session: Text
    ray: Name
    python: Name
    authenticated: bool


class RayRefused(Report, frozen=True):
    """Why there is no connection with Ray (any more); `final`: trying again will not help by itself. The child ends."""

    why: Text
    final: bool = False


class PlacementGroupReserved(Report, frozen=True):
    """A group is made, or why not."""

    name: Name
    problem: Text = ""


class PlacementGroupFreed(Report, frozen=True):
    """A group is gone; otherwise the reason why its state is unknown."""

    name: Name
    problem: Text = ""


class RayNode(Struct, frozen=True, kw_only=True):
    """A node of the cluster: Ray's names of it, its resources, and the part that others have not taken (CPU in
    thousandths, memory in bytes, GPUs in thousandths)."""

    id: Name
    name: Name
    address: Name
    hostname: Name
    head: bool
    has: tuple[Amount, Amount, Amount]
    room: tuple[Amount, Amount, Amount]


class RayView(Struct, frozen=True):
    """The cluster as the placement group actor sees it; `groups` are those that are named as ours are, each with the
    node it is on, where they were asked for. `in_use` are those that tasks use, or have used since the last view."""

    session: Name
    nodes: Annotated[tuple[RayNode, ...], Meta(max_length=MAX_NODES)] = ()
    groups: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_GROUPS)] | None = None
    in_use: Annotated[tuple[Name, ...], Meta(max_length=MAX_IN_USE)] = ()


class GroupsObserved(ChildAnswer, frozen=True):
    """The nodes of the cluster, and its groups."""

    view: RayView | None
    problem: Text = ""


class HoldExtended(ChildAnswer, frozen=True):
    """Answer to `ExtendGroupHold`, or the reason why there is none; `missing` are the terms without a group."""

    missing: Annotated[tuple[Name, ...], Meta(max_length=MAX_GROUPS)] = ()
    problem: Text = ""


class Closed(ChildAnswer, frozen=True):
    """Nothing of this grid is left in Ray, or why something is."""

    problem: Text = ""


RayCommand = (
    Connect
    | ReserveGroups
    | FreeGroups
    | ObserveGroups
    | ExtendGroupHold
    | Close
    | PackageSettings
    | KeepAttachedNode
    | DropAgentLink
    | RunOnAttachedNode
)
RayReport = (
    Connected
    | RayRefused
    | PlacementGroupReserved
    | PlacementGroupFreed
    | GroupsObserved
    | HoldExtended
    | Closed
    | AgentLinkChanged
    | StepDone
    | RunFinished
)
COMMANDS: msgspec.msgpack.Decoder[RayCommand] = msgspec.msgpack.Decoder(RayCommand)
REPORTS: msgspec.msgpack.Decoder[RayReport] = msgspec.msgpack.Decoder(RayReport)
