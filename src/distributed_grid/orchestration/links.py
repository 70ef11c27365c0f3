"""The control plane's end of every agent: their reports become events, effects become their orders."""

from __future__ import annotations

import asyncio
import logging

from distributed_grid.domain.effects import Effect, StartAttempt
from distributed_grid.domain.events import AttemptEnded, AttemptsListed, AttemptStarted, Event, NodeHeard
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import GridError
from distributed_grid.orchestration.runtime import Grid
from distributed_grid.reactor import pending
from distributed_grid.wire import (
    Acknowledge,
    AgentSide,
    Ended,
    FromAgent,
    Heartbeat,
    Hello,
    Start,
    Started,
    Stop,
    ToAgent,
)

RETRY_SECONDS = 0.5
log = logging.getLogger(__name__)


class Links:
    """Who is connected, and what goes back and forth. An effect for a node that is not connected waits:
    it is derived anew from the ledger when the agent says hello."""

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._agents: dict[str, AgentSide] = {}
        self._inbox: asyncio.Queue[tuple[FromAgent, AgentSide]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, grid: Grid) -> None:
        self._grid = grid
        self._task = asyncio.create_task(self._take_in())

    async def stop(self) -> None:
        """Stop taking reports in; the agents keep what was not acknowledged. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def received(self, message: FromAgent, via: AgentSide) -> None:
        if isinstance(message, Hello):
            self._agents[message.node] = via
        self._inbox.put_nowait((message, via))

    async def settled(self) -> None:
        """Return when everything received so far has been taken in."""
        await self._inbox.join()

    def perform(self, effects: list[Effect]) -> None:
        """Send the orders that make the effects happen."""
        for effect in effects:
            agent = self._agents.get(effect.node)
            if agent is not None:
                agent.send(_order(effect))

    async def _take_in(self) -> None:
        """Every report in its order; one that could not be made durable is tried again, not dropped."""
        while True:
            messages = [await self._inbox.get()]
            while not self._inbox.empty():
                messages.append(self._inbox.get_nowait())
            await asyncio.gather(*(self._report(message, via) for message, via in messages))
            for _ in messages:
                self._inbox.task_done()

    async def _report(self, message: FromAgent, via: AgentSide) -> None:
        assert self._grid is not None
        while True:
            try:
                await self._grid.handle(_event(message))
                break
            except GridError as failure:
                if not failure.retryable:
                    log.error("a report was refused: %s", failure)
                    return
                if isinstance(message, Heartbeat):
                    return
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # the outermost loop: one report that cannot be taken in must not stop the others
                log.exception("a report could not be taken in; the agent keeps it")
                return
        if isinstance(message, Ended):
            via.send(Acknowledge(message.lease_id))
        elif isinstance(message, Hello):
            await self._catch_up(message.node)

    async def _catch_up(self, node: str) -> None:
        """Order again what the ledger calls for on a node that has just (re)appeared."""
        assert self._grid is not None

        def missing(ledger: Ledger, now: int) -> list[Effect]:
            return [effect for effect in pending(ledger) if effect.node == node]

        self.perform(await self._grid.read(missing))


def _event(message: FromAgent) -> Event:
    if isinstance(message, Heartbeat):
        return NodeHeard(message.node, message.usage)
    if isinstance(message, Hello):
        return AttemptsListed(message.node, message.attempts)
    uid, _, number = message.lease_id.rpartition(".")
    if isinstance(message, Started):
        return AttemptStarted(uid, int(number), message.fence, message.pid, message.cores)
    return AttemptEnded(uid, int(number), message.fence, message.outcome)


def _order(effect: Effect) -> ToAgent:
    attempt = effect.job.attempt
    assert attempt is not None
    if isinstance(effect, StartAttempt):
        claim = effect.lease.claim
        assert claim is not None
        return Start(effect.node, attempt.lease_id, attempt.fence, effect.job.id, effect.job.command, claim, hold_ms=0)
    stop = effect.job.stop
    assert stop is not None
    ending = stop.ending if stop.ending is Ending.PREEMPTED else Ending.CANCELLED
    return Stop(attempt.lease_id, attempt.fence, str(ending), stop.detail, effect.job.command.grace_ms)
