"""Simulated gateway: drives the agent sessions that ship in virtual time, over simulated links."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from distributed_grid.control.agent_sessions import AgentSessions, NodeRegistry, SessionMessage
from distributed_grid.control.batch import Entry
from distributed_grid.domain.effects import Effect
from distributed_grid.domain.events import Event
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import GridError
from distributed_grid.simulation.model.network import SimulatedLink
from distributed_grid.wire import FromAgent

if TYPE_CHECKING:
    from distributed_grid.simulation.model.control_plane import ControlPlane

RETRY_MS = 500
T = TypeVar("T")


class _Suspension:
    """A point where a coroutine waits: `begin` gets what has to be called with the entry that it waits for."""

    def __init__(self, begin: Callable[[Callable[[Entry | None], None]], None]) -> None:
        self.begin = begin

    def __await__(self) -> Generator[_Suspension, Entry | None, Any]:
        entry = yield self
        if entry is None:
            return None
        if entry.failure is not None:
            raise entry.failure
        return entry.answer


class SimulatedRegistry(NodeRegistry):
    """A node has what its agent says."""

    def described(self, node: Node, capacity: Capacity) -> Node:
        return replace(node, capacity=capacity)


class SimulatedGateway:
    """The sessions of one life of the control plane; with a crash, what is under way in them never goes on."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._sessions = AgentSessions(self, SimulatedRegistry(), {})

    def perform(self, effects: Iterable[Effect]) -> None:
        self._sessions.perform(effects)

    def received(self, message: FromAgent, via: SimulatedLink) -> None:
        """Take in what an agent says."""
        if isinstance(message, SessionMessage):
            self._drive(self._sessions.received(message, via))

    def gone(self, via: SimulatedLink) -> None:
        self._sessions.gone(via)

    def _drive(self, coroutine: Coroutine[_Suspension, Entry | None, None], answer: Entry | None = None) -> None:
        """Go on until the coroutine waits again; a refusal ends it, as it does in the daemon."""
        try:
            waits = coroutine.send(answer)
        except (StopIteration, GridError):
            return
        waits.begin(lambda entry: self._drive(coroutine, entry))

    # ------------------------------------------------------------------ the owner of the ledger, to the sessions

    @property
    def ledger(self) -> Ledger:
        return self._control.ledger

    async def handle(self, event: Event) -> Any:
        return await _Suspension(lambda resume: self._control.handle(event, resume))

    async def handle_all(self, events: Iterable[Event]) -> None:
        entries: list[Entry] = []

        def begin(resume: Callable[[Entry | None], None]) -> None:
            todo = list(events)

            def done(entry: Entry) -> None:
                entries.append(entry)
                if len(entries) == len(todo):
                    resume(next((one for one in entries if one.failure is not None), None))

            for event in todo:
                self._control.handle(event, done)

        await _Suspension(begin)

    async def handle_with_retry(self, event: Event) -> None:
        while True:
            try:
                await self.handle(event)
                return
            except GridError as failure:
                if not failure.retryable:
                    raise
            await _Suspension(self._after_a_while)

    async def read(self, question: Callable[[Ledger, int], T]) -> T:
        answer: T = await _Suspension(lambda resume: self._control.read(question, resume))
        return answer

    def _after_a_while(self, resume: Callable[[Entry | None], None]) -> None:
        def again() -> None:
            if self._control.gateway is self and self._control.is_up:
                resume(None)

        self._control.agenda.after(RETRY_MS, again)
