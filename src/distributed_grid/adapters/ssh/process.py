"""The control plane's handle on its SSH child: started on demand, kept running, each new one sent the desired state.

SSH runs in a process of its own because its cryptography would delay the event loop that owns the ledger. The messages
between the two are here, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from distributed_grid.adapters.child_process import (
    ChildCommand,
    ChildProcess,
    Environ,
    FilePath,
    Name,
    Number,
    Report,
    Say,
    StepDone,
    encode_command,
)
from distributed_grid.adapters.node.node_messages import (
    AgentLinkChanged,
    DropAgentLink,
    LinkStates,
    NodeTarget,
    RunFinished,
)
from distributed_grid.errors import Refused

MAX_PORTS = 256
Port = Annotated[int, Meta(ge=0, lt=2**16)]
Arguments = Annotated[dict[Name, Any], Meta(max_length=64)]
"""Of an operation of the node script; how large they are together is bounded by the frame."""


class Hop(Struct, frozen=True):
    """One SSH server. Empty fields (or port 0) were not given: SSH's own configuration may have them."""

    host: Name
    port: Port = 0
    user: Name = ""
    key: FilePath = ""
    known_hosts: FilePath = ""
    accept_new: bool = False


def parse_jump(text: str, last: Hop) -> Hop:
    """The hop that `user@host:port` means; its key and its known hosts are those of the server behind it."""
    user, _, place = text.strip().rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):  # a bare IPv6 address
        host, port = place, "0"
    return replace(last, host=host.strip("[]"), port=int(port), user=user)


class SshTarget(NodeTarget, frozen=True, kw_only=True):
    """A node by its SSH server, the hops before that, and the interpreter to use there."""

    hop: Hop
    via: Annotated[tuple[Hop, ...], Meta(max_length=64)] = ()
    python: FilePath = ""


class Settings(ChildCommand, frozen=True):
    """Of the user who typed a command: the agent with the keys, how packages are fetched. Kept in memory only."""

    auth_sock: FilePath = ""
    environ: Environ = field(default_factory=dict)
    wheels: FilePath = ""


class KeepAgentLink(ChildCommand, frozen=True):
    """Keep a link to this node until it is dropped; keeping twice changes nothing."""

    target: SshTarget


class RunOnNode(ChildCommand, frozen=True):
    """One operation on one node: `install`, `inspect`, `stop`, `purge`, or with arguments as `data` `list-results`,
    `read-output` or one of Ray's."""

    number: Number
    operation: Name
    target: SshTarget
    data: Arguments = field(default_factory=dict)


class PortForward(Struct, frozen=True):
    """From an address of this machine, or the next free port there, to one that a node can reach."""

    host: Name
    port: Port
    to_host: Name
    to_port: Port


class ForwardPorts(ChildCommand, frozen=True):
    """Forward these ports of this machine to those of a node, in place of earlier ones."""

    target: SshTarget
    ports: Annotated[dict[Name, PortForward], Meta(max_length=MAX_PORTS)] = field(default_factory=dict)


class RunRayDriver(ChildCommand, frozen=True):
    """Run a Ray driver on a node for each connection to a socket of this machine; stop that without `data`.

    `data` has the interpreter of the driver and its environment.
    """

    target: SshTarget
    socket: FilePath
    data: Arguments = field(default_factory=dict)


class PortsForwarded(Report, frozen=True):
    """Ports of this machine that lead to those of a node, by name; none while the connection is down."""

    node: Name
    ports: Annotated[dict[Name, Port], Meta(max_length=MAX_PORTS)] = field(default_factory=dict)


SshCommand = Settings | KeepAgentLink | DropAgentLink | RunOnNode | ForwardPorts | RunRayDriver
SshReport = AgentLinkChanged | StepDone | RunFinished | PortsForwarded
COMMANDS: msgspec.msgpack.Decoder[SshCommand] = msgspec.msgpack.Decoder(SshCommand)
REPORTS: msgspec.msgpack.Decoder[SshReport] = msgspec.msgpack.Decoder(SshReport)


class SshProcess(LinkStates):
    """Links to nodes, operations on them and tunnels to them, by SSH."""

    def __init__(self, wheels: Path) -> None:
        super().__init__()
        self._child: ChildProcess[SshReport] = ChildProcess(
            "distributed_grid.adapters.ssh.worker",
            COMMANDS,
            REPORTS,
            label="SSH",
            on_connect=self._send_desired_state,
            on_report=self._receive,
            on_exit=self._child_exited,
        )
        self._settings = Settings(wheels=str(wheels))
        self._kept: dict[str, SshTarget] = {}
        self._forwards: dict[str, ForwardPorts] = {}
        self._driver: RunRayDriver | None = None
        self.forwarded: dict[str, dict[str, int]] = {}

    async def stop(self) -> None:
        """End the child; links end, agents stay. Safe twice."""
        await self._child.stop()

    def configure(self, auth_sock: str, environ: dict[str, str]) -> None:
        """From now on use this SSH agent, and these variables to fetch packages with; both stay in memory. Raises
        Refused if they are beyond the bounds."""
        wheels = environ.get("GRID_WHEELS") or self._settings.wheels
        settings = Settings(auth_sock or self._settings.auth_sock, environ or self._settings.environ, wheels)
        encode_command(settings, COMMANDS)
        if settings != self._settings:
            self._settings = settings
            self._child.send(settings)

    def keep_link(self, target: SshTarget) -> None:
        """Keep a link to this node until it is dropped; one that is down is tried again at once."""
        try:
            encode_command(KeepAgentLink(target), COMMANDS)
        except Refused as refused:
            self.record(AgentLinkChanged(target.name, "down", str(refused), final=True))
            return
        self._kept[target.name] = target
        if target.name not in self.links or self.links[target.name].state == "down":
            self.links[target.name] = AgentLinkChanged(target.name, "connecting")
        self._child.start()
        self._child.send(KeepAgentLink(target))

    def drop_link(self, node: str) -> None:
        """Stop keeping a link; safe twice."""
        self._kept.pop(node, None)
        self.links.pop(node, None)
        self._child.send(DropAgentLink(node))

    def forward_ports(self, target: SshTarget, ports: dict[str, PortForward]) -> None:
        """Forward ports of this machine to those of a node; no ports end that."""
        command = ForwardPorts(target, ports)
        if ports:
            self._forwards[target.name] = command
            self._child.start()
        elif self._forwards.pop(target.name, None) is None:
            return
        self._child.send(command)

    def run_ray_driver(self, target: SshTarget, socket: str, data: dict[str, Any]) -> None:
        """Have a Ray driver on a node behind a socket of this machine; no data ends that."""
        command = RunRayDriver(target, socket, data)
        if data and command != self._driver:
            self._driver = command
            self._child.start()
        elif data or self._driver is None:
            return
        else:
            self._driver = None
        self._child.send(command)

    async def run(self, operation: str, target: SshTarget, say: Say) -> str:
        """Run an operation on a node; a summary in a few words. Raises Refused with the reason of a failure."""
        finished = await self._finish(operation, target, {}, say)
        if finished.facts is not None:
            self.facts[target.name] = finished.facts
        return finished.summary

    async def ask(
        self, operation: str, target: SshTarget, data: dict[str, Any], say: Say = lambda step: None
    ) -> dict[str, Any]:
        """Run an operation with arguments; the node's answer. Raises Refused as `run` does."""
        return (await self._finish(operation, target, data, say)).answer

    async def _finish(self, operation: str, target: SshTarget, data: dict[str, Any], say: Say) -> RunFinished:
        self._child.start()
        finished = await self._child.request(
            RunFinished, lambda number: RunOnNode(number, operation, target, data), on_step=say
        )
        if finished.problem:
            raise Refused(finished.problem)
        return finished

    def _send_desired_state(self) -> None:
        driver = () if self._driver is None else (self._driver,)
        links = map(KeepAgentLink, self._kept.values())
        self._child.mark_ready((self._settings, *links, *self._forwards.values(), *driver))

    def _receive(self, report: SshReport) -> None:
        match report:
            case AgentLinkChanged():
                if report.node in self._kept:
                    self.record(report)
            case PortsForwarded():
                self.forwarded[report.node] = report.ports

    def _child_exited(self, problem: str) -> None:
        self.forwarded.clear()
        for node in self._kept:
            self.links[node] = AgentLinkChanged(node, "down", "the SSH process ended; another one is started")
