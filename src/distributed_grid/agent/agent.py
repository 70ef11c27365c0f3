"""The agent of a machine: takes orders, runs attempts, measures, reports.

Usually a machine is one node, and its agent speaks over a link that may break. On the control plane's own machine
a config may declare several nodes (`host: local`): they share one agent, its attempts and its measurements, over an
in-memory link.

Rule 1: a report is kept until it is acknowledged, and told again on every new link.
Rule 2: an order that is too old, in its fence, its hold or the offer it counts on, is refused and changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from distributed_grid import __version__
from distributed_grid.agent.attempts import AttemptHost
from distributed_grid.agent.environment import own_environment
from distributed_grid.agent.limits.alarm import boot_ms
from distributed_grid.agent.marking import Marks
from distributed_grid.agent.measuring import Meter
from distributed_grid.agent.memory import LentMemory
from distributed_grid.agent.owner import OwnerGuard
from distributed_grid.agent.ray_workers import Loan, together
from distributed_grid.agent.reading import Reading
from distributed_grid.agent.reports import AttemptEnded, AttemptSpec, AttemptStarted
from distributed_grid.agent.sweeping import sweep
from distributed_grid.agent.tree import boot_id, quickly_below
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.resources import Capacity
from distributed_grid.wire import (
    HEARTBEAT_MS,
    PROTOCOL,
    Acknowledge,
    ControlSide,
    Ended,
    Enough,
    Heard,
    Heartbeat,
    Hello,
    List,
    MemoryAnswered,
    MemoryAsked,
    MemoryOrder,
    MemoryReport,
    More,
    Paused,
    Piece,
    Read,
    Start,
    Started,
    Stop,
    ToAgent,
    Welcome,
)

SWEEP_SECONDS = 3600.0
LEAST_HOLD_MS = 200
MOST_REFUSED = 10_000
SHORT_SECONDS = 0.03
"""The start of an attempt that is over by then is told along with its end: two reports in one."""
log = logging.getLogger(__name__)

_ENDINGS = {"hold_expired": Ending.LOST}
Report = Started | Paused | Ended


class WorkDirs(Protocol):
    """Brings what a job is to find in its directory."""

    async def lay_out(self, digest: str, target: Path) -> None:
        """Lay out the tree of this digest in a directory; done again it changes nothing."""

    def received(self, piece: Piece) -> None:
        """Bytes that were asked for."""

    def unlinked(self) -> None:
        """The link is gone, and with it what was on its way."""


class Agent:
    """Serves the nodes of one machine; `send` is where its orders come in, `control` where its reports go."""

    def __init__(
        self,
        nodes: tuple[str, ...],
        host: AttemptHost,
        meter: Meter,
        control: ControlSide,
        *,
        jobs: Path,
        capacity: Callable[[], Capacity] | None = None,
        workdirs: WorkDirs | None = None,
        memory: Callable[[Callable[[MemoryReport | MemoryAsked], None]], LentMemory] | None = None,
        epoch: int = 0,
        on_epoch: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self.nodes = nodes
        self._jobs = jobs
        self._host = host
        self._meter = meter
        self._loans: deque[Loan] = deque(maxlen=len(nodes))  # the last answer for each of its nodes
        self._control = control
        self._capacity = capacity
        self._workdirs = workdirs
        self._epoch = epoch
        self._on_epoch = on_epoch
        self._orders: asyncio.Queue[ToAgent] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._preparing: dict[str, tuple[Start, asyncio.Task[None]]] = {}
        self._numbers = itertools.count(1)
        self._unacknowledged: dict[int, Report] = {}
        self._fences: dict[str, int] = {}
        self._refused: dict[str, None] = {}
        self._starting: dict[str, tuple[AttemptStarted, asyncio.TimerHandle]] = {}
        self._displaced: dict[str, asyncio.Task[None]] = {}
        self._marks = Marks(host.root)
        self._beat_seconds = HEARTBEAT_MS / 1000
        self._reading = Reading(jobs, lambda message: control.received(message, self))
        self._memory = memory(lambda report: control.received(report, self)) if memory is not None else None
        self.guard = OwnerGuard(host, meter, self.report_pause)
        self.guard.on_change = self._measure
        self.guard.marked_ago_ms = self._marks.ago_ms

    @property
    def is_remote(self) -> bool:
        """Whether the control plane is on another machine: then nothing here is the caller's."""
        return self._workdirs is not None

    async def start(self) -> None:
        """Find the attempts that outlived the last agent, report them, then begin to measure and to obey."""
        await self._host.start()
        await self._look_around()
        for node in self.nodes:
            self._control.received(self.hello(node), self)
        self._measure()
        if self._memory is not None:
            await self._memory.start()
            self._memory.tell_again()
        self._tasks = [
            asyncio.create_task(work) for work in (self._obey(), self._beat(), self._sweep(), self.guard.watch())
        ]

    async def stop(self) -> None:
        """Stop measuring and obeying; what runs goes on. Safe to call twice."""
        preparing = [task for _, task in self._preparing.values()]
        tasks = [*self._tasks, *preparing, *self._displaced.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        for _, later in self._starting.values():
            later.cancel()
        self.guard.let_go()
        if self._memory is not None:
            await self._memory.stop()
        await self._host.close()

    def hello(self, node: str) -> Hello:
        """The greeting for a new link: all that runs or is being prepared, and every end that is not acknowledged."""
        ended = (report.lease_id for report in self._unacknowledged.values() if isinstance(report, Ended))
        attempts = tuple(dict.fromkeys((*self._host.running(), *self._preparing, *ended)))
        capacity = self._capacity() if self._capacity is not None else None
        return Hello(PROTOCOL, __version__, node, attempts, capacity, self._epoch, boot_id())

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
        for report in list(self._unacknowledged.values()):
            self._control.received(report, self)
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
        if isinstance(message, Piece):
            if self._workdirs is not None:
                self._workdirs.received(message)
        elif isinstance(message, Heard):
            self._marks.heard(message.beat)
            self._loans.append(Loan(message.ray_cpu_milli, message.ray_memory_bytes, message.ray_gpu_milli))
            self._meter.ray.loan = together(self._loans)
            if message.hold_ms:
                self._renew(message.beat + message.hold_ms)
        elif isinstance(message, MemoryOrder | MemoryAnswered):
            if self._memory is not None:
                self._memory.order(message)
        elif isinstance(message, Acknowledge):
            self._acknowledged(message.seq)
        else:
            self._orders.put_nowait(message)

    # ------------------------------------------------------------------ reports

    def report(self, report: AttemptStarted | AttemptEnded) -> None:
        """Pass on what the host says of an attempt."""
        if isinstance(report, AttemptStarted):
            later = asyncio.get_running_loop().call_later(SHORT_SECONDS, self._tell_started, report)
            self._starting[report.attempt_id] = (report, later)
            return
        self._meter.ended(report.cpu_ms)
        pid = 0
        cores: tuple[int, ...] = ()
        if report.attempt_id in self._starting:
            started, later = self._starting.pop(report.attempt_id)
            later.cancel()
            pid, cores = started.pid, tuple(started.cores)
        displaced = self._displaced.pop(report.attempt_id, None)
        if displaced is not None and displaced is not asyncio.current_task():
            displaced.cancel()
        mark_age_ms = self._marks.age_ms(report.attempt_id)
        outcome = _outcome(report)
        self._tell(
            Ended(next(self._numbers), report.attempt_id, report.fence, outcome, pid, cores, mark_age_ms=mark_age_ms)
        )

    def _tell_started(self, report: AttemptStarted) -> None:
        self._starting.pop(report.attempt_id, None)
        self._tell(Started(next(self._numbers), report.attempt_id, report.fence, report.pid, tuple(report.cores)))

    def report_pause(self, attempt_id: str, fence: int, paused: bool, detail: str) -> None:
        """Pass on that an attempt stands still, or goes on."""
        self._tell(Paused(next(self._numbers), attempt_id, fence, paused, detail))

    def _tell(self, report: Report) -> None:
        self._unacknowledged[report.seq] = report
        self._control.received(report, self)

    def _acknowledged(self, seq: int) -> None:
        report = self._unacknowledged.pop(seq, None)
        if isinstance(report, Ended):
            self._fences.pop(report.lease_id, None)
            self._host.forget(report.lease_id)

    def _refuse(self, order: Start, ending: Ending, detail: str) -> None:
        """Answer an order that is not carried out; that is final."""
        self._refused[order.lease_id] = None
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._tell(Ended(next(self._numbers), order.lease_id, order.fence, Outcome(ending, detail=detail)))

    # ------------------------------------------------------------------ orders

    async def _obey(self) -> None:
        """Carry out orders, each in its turn; an order that fails is answered, never swallowed."""
        while True:
            order = await self._orders.get()
            try:
                await self._carry_out(order)
            except Exception as failure:  # the outermost loop: the next order may well succeed
                log.warning("order %s failed", type(order).__name__, exc_info=failure)
                if isinstance(order, Start):
                    self._refuse(order, Ending.NEVER_STARTED, f"{order.node}: {failure}")

    async def _carry_out(self, order: ToAgent) -> None:
        if isinstance(order, Start):
            await self._start(order)
        elif isinstance(order, Stop):
            await self._stop(order)
        elif isinstance(order, Read | More | Enough | List):
            self._reading.received(order)

    async def _start(self, order: Start) -> None:
        if order.lease_id in self._preparing or order.lease_id in self._refused:
            return  # what was refused stays so: the refusal and this order have crossed
        if self._is_stale(order.lease_id, order.fence):
            log.warning("a start of %s with an old fence was refused", order.lease_id)
            return
        if order.lease_id not in self._host.running():
            if order.hold_ms and not self._is_in_time(order):
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: the order came too late")
                return
            if order.generation < self.guard.generation:
                self._refuse(order, Ending.RECLAIMED, f"{order.node} had withdrawn its offer: its owner needs it")
                return
        self._fences[order.lease_id] = order.fence
        if self._workdirs is not None and order.command.workdir and not self._host.knows(order.lease_id):
            preparing = asyncio.create_task(self._prepare(order, self._workdirs))
            self._preparing[order.lease_id] = (order, preparing)
            preparing.add_done_callback(lambda _: self._preparing.pop(order.lease_id, None))
            return
        await self._host.launch(self._spec(order))

    def _is_stale(self, lease_id: str, fence: int) -> bool:
        return fence < self._fences.get(lease_id, 0)

    def _is_in_time(self, order: Start) -> bool:
        """Whether the order's hold, counted from the heartbeat it names, has not run out; what it says holds."""
        now = boot_ms()
        if order.beat > now or order.beat + order.hold_ms < now + LEAST_HOLD_MS:
            return False
        self._renew(order.beat + order.hold_ms)
        return True

    def _renew(self, until_boot_ms: int) -> None:
        """Let everything go on until then. What was being prepared when the last hold ran out is given up: the control
        plane has done so, too, or will when it hears of it."""
        if not self._host.is_held:
            for order, preparing in tuple(self._preparing.values()):
                preparing.cancel()
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: its hold ran out before its files were there")
        self._host.hold(until_boot_ms)
        if self._memory is not None:
            self._memory.hold(until_boot_ms)

    async def _prepare(self, order: Start, workdirs: WorkDirs) -> None:
        """Bring the working directory, then run; other orders go on meanwhile."""
        try:
            await workdirs.lay_out(order.command.workdir, self._host.work_dir(order.lease_id))
            if order.hold_ms and not self._host.is_held:
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: its hold ran out before its files were there")
                return
            await self._host.launch(self._spec(order))
        except asyncio.CancelledError:
            raise
        except Exception as failure:  # the outermost place of this task: it is answered, never swallowed
            log.warning("%s could not be prepared", order.lease_id, exc_info=failure)
            self._refuse(order, Ending.NEVER_STARTED, f"{order.node}: its working directory: {failure}")

    async def _stop(self, order: Stop) -> None:
        if self._is_stale(order.lease_id, order.fence):
            log.warning("a stop of %s with an old fence was refused", order.lease_id)
            return
        _, preparing = self._preparing.get(order.lease_id, (None, None))
        if preparing is not None:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        if not self._host.knows(order.lease_id):
            outcome = Outcome(Ending.NEVER_STARTED, detail=f"{order.lease_id} is not known here")
            self._tell(Ended(next(self._numbers), order.lease_id, order.fence, outcome))
            return
        noticed = self._displaced.get(order.lease_id)
        if order.ending == Ending.PREEMPTED and self._host.is_under_way(order.lease_id):
            if noticed is None:
                in_ms = self.guard.displace(order.lease_id, order.detail)
                self._displaced[order.lease_id] = asyncio.create_task(self._stop_after(in_ms, order))
            return
        if noticed is not None:
            noticed.cancel()
        await self._halt(order)

    async def _stop_after(self, notice_ms: int, order: Stop) -> None:
        """Stop what was displaced when its notice is over; other orders go on meanwhile."""
        await asyncio.sleep(notice_ms / 1000)
        try:
            await self._halt(order)
        except OSError as failure:  # a full disk: the order comes again with the next link
            log.warning("%s could not be stopped", order.lease_id, exc_info=failure)
            self._displaced.pop(order.lease_id, None)

    async def _halt(self, order: Stop) -> None:
        await self._host.halt(order.lease_id, kind=order.ending, detail=order.detail, grace_ms=order.grace_ms)

    def _spec(self, order: Start) -> AttemptSpec:
        command, claim = order.command, order.claim
        env = dict(command.env)
        return AttemptSpec(
            attempt_id=order.lease_id,
            job_id=order.job_id,
            node=order.node,
            fence=order.fence,
            argv=command.argv,
            env=self._own_environment(env, command.given) if self.is_remote else env,
            cwd=None if self.is_remote else command.cwd or None,
            cpu_milli=claim.cpu_milli,
            memory_bytes=claim.memory_bytes,
            gpu_indexes=tuple(share.index for share in claim.gpus),
            timeout_ms=command.timeout_ms,
            grace_ms=command.grace_ms,
            hold_ms=order.hold_ms,
        )

    def _own_environment(self, env: dict[str, str], given: tuple[str, ...]) -> dict[str, str]:
        """What a job finds here; a Python that knows the memory pool, and where to ask about it, among it."""
        made = own_environment(env, given)
        desk = self._memory.desk if self._memory is not None else None
        return made if desk is None else {**made, "GRID_MEMORY_DESK": str(desk.path), "GRID_PYTHON": sys.executable}

    # ------------------------------------------------------------------ time

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            await self._look_around()
            self._measure()

    async def _look_around(self) -> None:
        """See what drivers and file systems may take their time to say, aside."""
        running = self._host.borrowed()
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
        usage = self._meter.usage(self._host.usage())
        for node in self.nodes:
            beat = boot_ms()
            marks = self._marks.to_tell(node, beat)
            heartbeat = Heartbeat(node, usage, beat, self.guard.generation, self.guard.yields, marks)
            self._control.received(heartbeat, self)


def _outcome(report: AttemptEnded) -> Outcome:
    fields: dict[str, Any] = {
        "exit_code": report.exit_code,
        "signal": report.signal,
        "detail": report.detail,
        "cpu_ms": report.cpu_ms,
        "max_memory_bytes": report.max_memory_bytes,
        "wall_ms": report.wall_ms,
    }
    return Outcome(_ENDINGS.get(report.kind) or Ending(report.kind), **fields)
