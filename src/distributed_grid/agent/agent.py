"""The agent of a machine: takes orders, runs attempts, measures, reports.

Usually a machine is one node, and its agent speaks over a link that may break. On the control plane's own machine
a config may declare several nodes (`host: local`): they share one agent, its attempts and its measurements, over an
in-memory link.

Rule 1: a report is kept until it is acknowledged, and told again on every new link (`outbox.py`).
Rule 2: an order that is too old, in its fence, its hold or the offer it counts on, is refused and changes nothing
(`orders.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from distributed_grid import __version__
from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files.checkpoints import CheckpointMarks
from distributed_grid.agent.files.reader import AttemptFileReader
from distributed_grid.agent.files.retention import sweep
from distributed_grid.agent.lent_memory import LentMemory
from distributed_grid.agent.limits.process_tree import quickly_below
from distributed_grid.agent.orders import OrderExecutor, WorkDirs
from distributed_grid.agent.outbox import Outbox
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.ray_usage import RayLoan, together
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.domain.resources import Capacity
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.wire import (
    HEARTBEAT_MS,
    PROTOCOL,
    AcknowledgeReport,
    AgentHello,
    AttemptEndedReport,
    ControlSide,
    FetchedChunk,
    FromAgent,
    Heartbeat,
    HeartbeatReply,
    MemoryOrder,
    MemoryReply,
    ToAgent,
    Welcome,
)

SWEEP_SECONDS = 3600.0
SendToControl = Callable[[FromAgent], None]


class Agent:
    """Serves the nodes of one machine; `send` is where its orders come in, `control` where its reports go."""

    def __init__(
        self,
        nodes: tuple[str, ...],
        jobs: Path,
        meter: UsageMeter,
        control: ControlSide,
        *,
        capacity: Callable[[], Capacity] | None = None,
        workdirs: Callable[[SendToControl], WorkDirs] | None = None,
        memory: Callable[[AttemptHost, SendToControl], LentMemory] | None = None,
        epoch: int = 0,
        on_epoch: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self.nodes = nodes
        self._jobs = jobs
        self.host = AttemptHost(jobs, report=self._report)
        self._meter = meter
        self._loans: deque[RayLoan] = deque(maxlen=len(nodes))  # the last answer for each of its nodes
        self._control = control
        self._capacity = capacity
        self._workdirs = workdirs(self._send_to_control) if workdirs is not None else None
        self._epoch = epoch
        self._on_epoch = on_epoch
        self._tasks: list[asyncio.Task[None]] = []
        self._marks = CheckpointMarks(self.host.root)
        self._beat_seconds = HEARTBEAT_MS / 1000
        self._reading = AttemptFileReader(jobs, self._send_to_control)
        self._memory = memory(self.host, self._send_to_control) if memory is not None else None
        self._outbox = Outbox(self._send_to_control)
        self.guard = OwnerGuard(self.host, meter, self._outbox.paused)
        self.guard.on_change = self._measure
        self.guard.marked_ago_ms = self._marks.ago_ms
        self._orders = OrderExecutor(
            self.host, self.guard, self._outbox, self._reading, workdirs=self._workdirs, memory=self._memory
        )

    async def start(self) -> None:
        """Find the attempts that outlived the last agent, report them, then begin to measure and to obey."""
        await self.host.start()
        await self._look_around()
        for node in self.nodes:
            self._send_to_control(self.hello(node))
        self._measure()
        if self._memory is not None:
            await self._memory.start()
            self._memory.tell_again()
        self._tasks = [
            asyncio.create_task(work) for work in (self._orders.obey(), self._beat(), self._sweep(), self.guard.watch())
        ]

    async def stop(self) -> None:
        """Stop measuring and obeying; what runs goes on. Safe to call twice."""
        tasks = [*self._tasks, *self._orders.under_way()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        self._outbox.stop()
        self.guard.let_go()
        if self._memory is not None:
            await self._memory.stop()
        await self.host.close()

    def hello(self, node: str) -> AgentHello:
        """The greeting for a new link: all that runs or is being prepared, and every end that is not acknowledged."""
        attempts = tuple(dict.fromkeys((*self.host.running(), *self._orders.preparing(), *self._outbox.ends())))
        capacity = self._capacity() if self._capacity is not None else None
        return AgentHello(PROTOCOL, __version__, node, attempts, capacity, self._epoch, boot_id())

    def welcomed(self, welcome: Welcome) -> None:
        """A new link is there: tell again what may have been lost with the last one."""
        if welcome.epoch > self._epoch:
            self._epoch = welcome.epoch
            self._on_epoch(welcome.epoch)
        self._beat_seconds = max(welcome.heartbeat_ms, 100) / 1000
        self.guard.rules = welcome.owner
        if self._memory is not None:
            self._memory.rules = welcome.owner
            self._memory.tell_again()
        self._outbox.tell_again()
        self._marks.tell_again()
        self._measure()

    def unlinked(self) -> None:
        """The link is gone: nobody reads on, and nothing more comes on it."""
        self._reading.forget()
        if self._workdirs is not None:
            self._workdirs.unlinked()
        if self._memory is not None:
            self._memory.unlinked()

    def send(self, message: ToAgent) -> None:
        if isinstance(message, FetchedChunk):
            if self._workdirs is not None:
                self._workdirs.received(message)
        elif isinstance(message, HeartbeatReply):
            self._marks.heard(message.beat)
            self._loans.append(RayLoan(message.ray_cpu_milli, message.ray_memory_bytes, message.ray_gpu_milli))
            self._meter.ray.loan = together(self._loans)
            if message.hold_ms:
                self._orders.renew(message.beat + message.hold_ms)
        elif isinstance(message, MemoryOrder | MemoryReply):
            if self._memory is not None:
                self._memory.order(message)
        elif isinstance(message, AcknowledgeReport):
            self._acknowledged(message.seq)
        else:
            self._orders.take(message)

    # ------------------------------------------------------------------ reports

    def _send_to_control(self, message: FromAgent) -> None:
        self._control.received(message, self)

    def _report(self, report: AttemptLaunch | AttemptExit) -> None:
        """Pass on what the host says of an attempt."""
        if isinstance(report, AttemptLaunch):
            self._outbox.started(report)
            return
        self._meter.ended(report.cpu_ms)
        self._orders.ended(report.attempt_id)
        self._outbox.ended(report, self._marks.age_ms(report.attempt_id))

    def _acknowledged(self, seq: int) -> None:
        report = self._outbox.acknowledged(seq)
        if isinstance(report, AttemptEndedReport):
            self._orders.forget(report.lease_id)
            self.host.forget(report.lease_id)

    # ------------------------------------------------------------------ time

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            await self._look_around()
            self._measure()

    async def _look_around(self) -> None:
        """See what drivers and file systems may take their time to say, aside."""
        running = self.host.borrowed()
        shims = [one.shim for one in running if one.spec.gpu_indexes]
        own_pids = {proc.pid for shim in shims for proc in quickly_below(shim.pid)}
        attempts = [(one.attempt_id, one.fence, one.spec.node) for one in running]
        await asyncio.to_thread(self._meter.look_at_gpus, own_pids)
        await asyncio.to_thread(self._marks.look, attempts)

    async def _sweep(self) -> None:
        while True:
            await asyncio.to_thread(sweep, self._jobs, now=time.time())
            await asyncio.sleep(SWEEP_SECONDS)

    def _measure(self) -> None:
        usage = self._meter.usage(self.host.usage())
        for node in self.nodes:
            beat = boot_ms()
            marks = self._marks.to_tell(node, beat)
            heartbeat = Heartbeat(node, usage, beat, self.guard.generation, self.guard.yields, marks)
            self._send_to_control(heartbeat)
