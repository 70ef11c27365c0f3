"""Messages between the control plane and its SSH child."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from distributed_grid.adapters.child_process import ChildCommand, Report, StepDone
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, DropAgentLink, NodeTarget, RunFinished


class Hop(Struct, frozen=True):
    """One SSH server. What is empty (or port 0) was not given: SSH's own configuration may say it."""

    host: str
    port: int = 0
    user: str = ""
    key: str = ""
    known_hosts: str = ""
    accept_new: bool = False


def parse_jump(text: str, last: Hop) -> Hop:
    """The hop that `user@host:port` means; its key and its known hosts are those of the server behind it."""
    user, _, place = text.strip().rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):  # a bare IPv6 address
        host, port = place, "0"
    return Hop(host.strip("[]"), int(port), user, last.key, last.known_hosts, last.accept_new)


class SshTarget(NodeTarget, frozen=True, kw_only=True):
    """A node by its SSH server, the hops before that, and the interpreter to use there."""

    hop: Hop
    via: tuple[Hop, ...] = ()
    python: str = ""


class Settings(ChildCommand, frozen=True):
    """Of the user who typed a command: the agent with the keys, how packages are fetched. Kept in memory only."""

    auth_sock: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    wheels: str = ""


class KeepAgentLink(ChildCommand, frozen=True):
    """Keep a link to this node until it is dropped; keeping twice changes nothing."""

    target: SshTarget


class RunOnNode(ChildCommand, frozen=True):
    """One operation on one node: `install`, `inspect`, `stop`, `purge`, or one of Ray's with arguments as `data`."""

    number: int
    operation: str
    target: SshTarget
    data: dict[str, Any] = field(default_factory=dict)


class PortForward(Struct, frozen=True):
    """From an address of this machine, or the next free port there, to one that a node can reach."""

    host: str
    port: int
    to_host: str
    to_port: int


class ForwardPorts(ChildCommand, frozen=True):
    """Forward these ports of this machine to those of a node, instead of what was forwarded there before."""

    target: SshTarget
    ports: dict[str, PortForward] = field(default_factory=dict)


class RunRayDriver(ChildCommand, frozen=True):
    """Run a Ray driver on a node for each connection to a socket of this machine; without `data` no longer.

    `data` says which interpreter runs it, and in which environment.
    """

    target: SshTarget
    socket: str
    data: dict[str, Any] = field(default_factory=dict)


class PortsForwarded(Report, frozen=True):
    """Which ports of this machine lead to those of a node now, by their names; none while the connection is down."""

    node: str
    ports: dict[str, int] = field(default_factory=dict)


SshCommand = Settings | KeepAgentLink | DropAgentLink | RunOnNode | ForwardPorts | RunRayDriver
SshReport = AgentLinkChanged | StepDone | RunFinished | PortsForwarded
COMMANDS: msgspec.msgpack.Decoder[SshCommand] = msgspec.msgpack.Decoder(SshCommand)
REPORTS: msgspec.msgpack.Decoder[SshReport] = msgspec.msgpack.Decoder(SshReport)
