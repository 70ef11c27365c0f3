"""The simulated control plane's end of every agent: as `control/agents.py`, whose orders and events it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed_grid import __version__
from distributed_grid.control.agents import UNWANTED_GRACE_MS, compared, event_of, hold_of, order_of
from distributed_grid.domain.effects import Effect
from distributed_grid.domain.events import AttemptsListed, Event, HeartbeatReceived, NodeDeclared
from distributed_grid.domain.jobs import Ending
from distributed_grid.errors import GridError
from distributed_grid.simulation.model.network import SimulatedLink
from distributed_grid.wire import (
    HEARTBEAT_MS,
    PROTOCOL,
    Acknowledge,
    Ended,
    FromAgent,
    Heard,
    Heartbeat,
    Hello,
    Paused,
    Started,
    StopAttemptOrder,
    Welcome,
)

if TYPE_CHECKING:
    from distributed_grid.simulation.model.control_plane import ControlPlane

RETRY_MS = 500


class SimulatedGateway:
    """Who is connected to one life of the control plane. An effect for a node that is not connected waits: it is
    derived anew from the ledger when the agent says hello."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._agents: dict[str, SimulatedLink] = {}
        self._greeted: dict[SimulatedLink, Hello] = {}

    def perform(self, effects: list[Effect]) -> None:
        """Send the orders that make the effects happen."""
        for effect in effects:
            agent = self._agents.get(effect.node)
            if agent is not None:
                agent.send(order_of(self._control.ledger, effect))

    def received(self, message: FromAgent, via: SimulatedLink) -> None:
        """Take in what an agent says."""
        if isinstance(message, Hello):
            self._welcome(message, via)
        elif isinstance(message, Heartbeat):
            self._hear(message, via)
        elif isinstance(message, Started | Paused | Ended):
            seq = message.seq
            self._handle_with_retry(event_of(message, via.nodes), lambda: via.send(Acknowledge(seq)))

    def gone(self, via: SimulatedLink) -> None:
        """An agent's connection has ended; its node is doubted when it stays silent."""
        if self._agents.get(via.node) is via:
            del self._agents[via.node]
        self._greeted.pop(via, None)

    def _handle_with_retry(self, event: Event, then: Callable[[], None]) -> None:
        """Have it in the ledger, however long the disk is full; a gateway that was replaced does not retry."""
        control = self._control

        def answered(failure: GridError | None) -> None:
            if failure is None:
                then()
            elif failure.retryable:
                control.agenda.after(RETRY_MS, again)

        def again() -> None:
            if control.desk is self and control.is_up:
                control.handle(event, answered)

        control.handle(event, answered)

    def _welcome(self, hello: Hello, via: SimulatedLink) -> None:
        """Take an agent in: what it has, what it runs. Orders follow with its first heartbeat: they count from it."""
        control = self._control
        node = next(named for named in control.nodes if named.name == hello.node)
        epoch = control.ledger.counters.get("epoch", 0)

        def declared() -> None:
            self._greeted[via] = hello
            via.send(Welcome(PROTOCOL, __version__, epoch, node.hold_ms, HEARTBEAT_MS))
            self._handle_with_retry(AttemptsListed(hello.node, hello.attempts, hello.boot), lambda: None)

        self._handle_with_retry(NodeDeclared(node), declared)

    def _hear(self, message: Heartbeat, via: SimulatedLink) -> None:
        """Take a heartbeat in; answering it is what renews the node's holds."""
        hello = self._greeted.get(via)
        if hello is None and self._agents.get(message.node) is not via:
            return

        def heard(failure: GridError | None) -> None:
            if failure is not None:
                return  # not durable, not renewed: the next one comes soon
            for mark in message.marks:
                self._control.handle(event_of(mark, via.nodes))
            via.send(Heard(message.beat, hold_of(self._control.ledger, message.node)))
            if hello is not None and self._greeted.pop(via, None) is not None:
                self._agents[message.node] = via
                self._catch_up(hello, via)

        self._control.handle(
            HeartbeatReceived(message.node, message.usage, message.beat, message.generation, message.yields), heard
        )

    def _catch_up(self, hello: Hello, via: SimulatedLink) -> None:
        """Order again what the ledger calls for on a node that has just (re)appeared, and stop what it does not."""
        found = compared(self._control.ledger, hello)
        why = "nobody waits for it any more"
        for lease_id in found.unwanted:
            via.send(StopAttemptOrder(lease_id, found.fence, str(Ending.CANCELLED), why, UNWANTED_GRACE_MS))
        self.perform(found.missing)
