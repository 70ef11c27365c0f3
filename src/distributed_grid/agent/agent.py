"""The agent of a machine: takes orders, runs attempts, measures, reports.

Usually a machine is one node. On the control plane's own machine a config may declare several nodes
(`host: local`): they share this agent, its attempts and its measurements, over an in-memory link.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from distributed_grid.adapters.probes.machine import MachineProbe
from distributed_grid.agent.attempts import AttemptHost
from distributed_grid.agent.reports import AttemptEnded, AttemptSpec, AttemptStarted
from distributed_grid.agent.sweeping import sweep
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.wire import Acknowledge, ControlSide, Ended, Heartbeat, Hello, Start, Started, Stop, ToAgent

HEARTBEAT_SECONDS = 2.0
SWEEP_SECONDS = 3600.0
log = logging.getLogger(__name__)

_ENDINGS = {"hold_expired": Ending.LOST}


class Agent:
    """Serves the nodes of one machine; `send` is where its orders come in, `control` where its reports go."""

    def __init__(
        self, nodes: tuple[str, ...], host: AttemptHost, probe: MachineProbe, control: ControlSide, *, jobs: Path
    ) -> None:
        self._nodes = nodes
        self._jobs = jobs
        self._host = host
        self._probe = probe
        self._control = control
        self._orders: asyncio.Queue[ToAgent] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended_cpu_ms = 0

    async def start(self) -> None:
        """Find the attempts that outlived the last agent, report them, then begin to measure and to obey."""
        await self._host.start()
        for node in self._nodes:
            self._control.received(Hello(node, self._host.running()), self)
        self._measure()
        self._tasks = [
            asyncio.create_task(self._obey()),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._sweep()),
        ]

    async def stop(self) -> None:
        """Stop measuring and obeying; what runs goes on. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._host.close()

    def send(self, message: ToAgent) -> None:
        self._orders.put_nowait(message)

    def report(self, report: AttemptStarted | AttemptEnded) -> None:
        """Pass on what the host says of an attempt."""
        if isinstance(report, AttemptStarted):
            message = Started(report.attempt_id, report.fence, report.pid, tuple(report.cores))
            self._control.received(message, self)
        else:
            self._ended_cpu_ms += report.cpu_ms
            self._control.received(Ended(report.attempt_id, report.fence, _outcome(report)), self)

    async def _obey(self) -> None:
        """Carry out orders, each in its turn; an order that fails is answered, never swallowed."""
        while True:
            order = await self._orders.get()
            try:
                await self._carry_out(order)
            except Exception as failure:  # the outermost loop: the next order may well succeed
                log.warning("order %s failed", type(order).__name__, exc_info=failure)
                if isinstance(order, Start):
                    outcome = Outcome(Ending.NEVER_STARTED, detail=f"{order.node}: {failure}")
                    self._control.received(Ended(order.lease_id, order.fence, outcome), self)

    async def _carry_out(self, order: ToAgent) -> None:
        if isinstance(order, Start):
            await self._host.launch(_spec(order))
        elif isinstance(order, Stop):
            await self._host.halt(order.lease_id, kind=order.ending, detail=order.detail, grace_ms=order.grace_ms)
        elif isinstance(order, Acknowledge):
            self._host.forget(order.lease_id)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._measure()

    async def _sweep(self) -> None:
        while True:
            await asyncio.to_thread(sweep, self._jobs, now=time.time())
            await asyncio.sleep(SWEEP_SECONDS)

    def _measure(self) -> None:
        own = self._host.usage().values()
        own_cpu_ms = self._ended_cpu_ms + sum(one.cpu_ms for one in own)
        sample = self._probe.sample(own_cpu_ms, sum(one.memory_bytes for one in own))
        usage = Usage(
            cpu_busy_milli=round(1000 * sample.cpu_ratio_total),
            cpu_outside_milli=round(1000 * sample.cpu_ratio_outside),
            memory_bytes=sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
        )
        for node in self._nodes:
            self._control.received(Heartbeat(node, usage), self)


def _spec(order: Start) -> AttemptSpec:
    command, claim = order.command, order.claim
    return AttemptSpec(
        attempt_id=order.lease_id,
        job_id=order.job_id,
        node=order.node,
        fence=order.fence,
        argv=command.argv,
        env=dict(command.env),
        cwd=command.cwd or None,
        cpu_milli=claim.cpu_milli,
        memory_bytes=claim.memory_bytes,
        gpu_indexes=tuple(share.index for share in claim.gpus),
        timeout_ms=command.timeout_ms,
        grace_ms=command.grace_ms,
        hold_ms=order.hold_ms,
    )


def _outcome(report: AttemptEnded) -> Outcome:
    return Outcome(
        _ENDINGS.get(report.kind) or Ending(report.kind),
        exit_code=report.exit_code,
        signal=report.signal,
        detail=report.detail,
        cpu_ms=report.cpu_ms,
        max_memory_bytes=report.max_memory_bytes,
        wall_ms=report.wall_ms,
    )
