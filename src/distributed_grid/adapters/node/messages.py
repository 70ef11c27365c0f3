"""What the control plane and its SSH child say to each other, one JSON message a line.

Rule 1: the child decides nothing: it is told which links to keep and which deeds to do, and reports.
Rule 2: when the control plane's end closes, the child is over. Agents stay.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

LARGEST_LINE = 4 * 1024 * 1024


class Hop(Struct, frozen=True):
    """One SSH server. What is empty (or port 0) was not given: SSH's own configuration may say it."""

    host: str
    port: int = 0
    user: str = ""
    key: str = ""
    known_hosts: str = ""
    accept_new: bool = False


def jump_of(text: str, last: Hop) -> Hop:
    """The hop that `user@host:port` means; its key and its known hosts are those of the server behind it."""
    user, _, place = text.strip().rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):  # a bare IPv6 address
        host, port = place, "0"
    return Hop(host.strip("[]"), int(port), user, last.key, last.known_hosts, last.accept_new)


class Target(Struct, frozen=True):
    """A node: where it is, through which hops, and where its agent's channel ends on our side."""

    name: str
    hop: Hop
    grid: str
    local_socket: str
    via: tuple[Hop, ...] = ()
    python: str = ""


class NodeFacts(Struct, frozen=True):
    """What was seen on a node."""

    python: str = ""
    machine: str = ""
    libc: str = ""
    libc_version: str = ""
    executable: str = ""
    version: str = ""
    running: str = ""


class _Order(Struct, frozen=True, tag=True):
    """What the child is told."""


class Settings(_Order, frozen=True):
    """Of the user who typed a command: the agent with the keys, how packages are fetched. Kept in memory only."""

    auth_sock: str = ""
    environ: dict[str, str] = {}
    wheels: str = ""


class KeepAgentLink(_Order, frozen=True):
    """Keep a link to this node until told otherwise; telling twice changes nothing."""

    target: Target


class DropAgentLink(_Order, frozen=True):
    """Let go of the link to a node; its agent stays. Dropping what is not kept is harmless."""

    node: str


class RunOnNode(_Order, frozen=True):
    """One deed on one node: `install`, `look`, `end`, `purge`, or one of Ray's with what it needs as `data`."""

    number: int
    deed: str
    target: Target
    data: dict[str, Any] = {}


class PortForward(Struct, frozen=True):
    """From an address of this machine, or the next free port there, to one that a node can reach."""

    host: str
    port: int
    to_host: str
    to_port: int


class Forward(_Order, frozen=True):
    """Pass connections to these addresses of this machine on to those of a node, until told another way."""

    target: Target
    ports: dict[str, PortForward] = {}


class RunRayDriver(_Order, frozen=True):
    """Have a program of ours on a node that speaks to Ray there, behind a socket of this machine; none is to end that.

    `data` says which interpreter runs it, and in which environment.
    """

    target: Target
    socket: str
    data: dict[str, Any] = {}


class _Report(Struct, frozen=True, tag=True):
    """What the child says."""


class AgentLinkChanged(_Report, frozen=True):
    """How a link is: `connecting`, `up` or `down`, and why. `final`: trying again will not help by itself."""

    node: str
    state: str
    detail: str = ""
    final: bool = False
    facts: NodeFacts | None = None


class StepDone(_Report, frozen=True):
    """A deed has come to this step."""

    number: int
    step: str


class RunFinished(_Report, frozen=True):
    """A deed is over; `problem` says why it failed, `words` what was done."""

    number: int
    problem: str = ""
    words: str = ""
    facts: NodeFacts | None = None
    data: dict[str, Any] = {}


class Forwarded(_Report, frozen=True):
    """Which ports of this machine lead to those of a node now, by their names; none while the way is down."""

    node: str
    ports: dict[str, int] = {}


Order = Settings | KeepAgentLink | DropAgentLink | RunOnNode | Forward | RunRayDriver
Report = AgentLinkChanged | StepDone | RunFinished | Forwarded
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def line_of(message: Order | Report) -> bytes:
    """A message as it travels."""
    return msgspec.json.encode(message) + b"\n"


def order_in(line: bytes) -> Order:
    """What the child is told by this line."""
    return _orders.decode(line)


def report_in(line: bytes) -> Report:
    """What the child says in this line."""
    return _reports.decode(line)
