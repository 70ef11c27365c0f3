"""The control plane's handle on its SSH child: started on demand, kept running, each new one sent the desired state.

SSH runs in a process of its own because its cryptography would delay the event loop that owns the ledger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed_grid.adapters.child_process import ChildProcess, Say
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, DropAgentLink, LinkStates, RunFinished
from distributed_grid.adapters.ssh.worker_messages import (
    REPORTS,
    ForwardPorts,
    KeepAgentLink,
    PortForward,
    PortsForwarded,
    RunOnNode,
    RunRayDriver,
    Settings,
    SshReport,
    SshTarget,
)
from distributed_grid.errors import Refused


class SshProcess(LinkStates):
    """Links to nodes, operations on them and tunnels to them, by SSH."""

    def __init__(self, wheels: Path) -> None:
        super().__init__()
        self._child: ChildProcess[SshReport] = ChildProcess(
            "distributed_grid.adapters.ssh.worker",
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
        """End the child; links end, agents stay. Safe to call twice."""
        await self._child.stop()

    def configure(self, auth_sock: str, environ: dict[str, str]) -> None:
        """From now on use this SSH agent, and these variables to fetch packages with; both stay in memory."""
        wheels = environ.get("GRID_WHEELS") or self._settings.wheels
        settings = Settings(auth_sock or self._settings.auth_sock, environ or self._settings.environ, wheels)
        if settings != self._settings:
            self._settings = settings
            self._child.send(settings)

    def keep_link(self, target: SshTarget) -> None:
        """Keep a link to this node until it is dropped; one that is down is tried again at once."""
        self._kept[target.name] = target
        if target.name not in self.links or self.links[target.name].state == "down":
            self.links[target.name] = AgentLinkChanged(target.name, "connecting")
        self._child.start()
        self._child.send(KeepAgentLink(target))

    def drop_link(self, node: str) -> None:
        """Keep a link no longer; dropping what is not kept is harmless."""
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
        """Run an operation on a node; what was done, in a few words. Raises Refused with the reason it failed."""
        finished = await self._finish(operation, target, {}, say)
        if finished.facts is not None:
            self.facts[target.name] = finished.facts
        return finished.summary

    async def ask(
        self, operation: str, target: SshTarget, data: dict[str, Any], say: Say = lambda step: None
    ) -> dict[str, Any]:
        """Run an operation that has arguments; what the node answered. Raises Refused as `run` does."""
        return (await self._finish(operation, target, data, say)).data

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
        """Links are down until the next child makes them."""
        self.forwarded.clear()
        for node in self._kept:
            self.links[node] = AgentLinkChanged(node, "down", "the SSH process ended; another one is started")
