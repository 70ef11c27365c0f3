"""Agent of a machine: carries out orders, runs attempts, measures usage, reports.

Usually a machine is one node, and its agent speaks over a link that may break. On the control plane's own machine
a config may declare several nodes (`host: local`): they share one agent and its link in memory, and each has a memory
server of its own. Simulated ones have measurements of their own, too; the others share those of the machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distributed_grid import __version__, wire
from distributed_grid.adapters.clock import FILE as AGE_FILE
from distributed_grid.adapters.clock import AgeClock
from distributed_grid.agent.execution.attempt import AttemptExit, AttemptLaunch, AttemptSpec
from distributed_grid.agent.execution.disk_guard import DiskGuard
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.launch import node_environment
from distributed_grid.agent.execution.shim import MACHINE_ENDS
from distributed_grid.agent.files.attempt_files import AttemptFileReader, remove_expired
from distributed_grid.agent.files.job_dir import CHECKPOINT_DIR, STDOUT, has_checkpoint
from distributed_grid.agent.files.job_signals import CheckpointMarks
from distributed_grid.agent.lent_memory import LentMemory, LocalMemory
from distributed_grid.agent.machine_end import (
    CONTROL_PLANE,
    METADATA,
    POLL_SECONDS,
    MachineEnd,
    MetadataFailed,
    NoticeSource,
)
from distributed_grid.agent.orders import OrderExecutor
from distributed_grid.agent.outbox import Outbox
from distributed_grid.agent.owner.borrowed_work import WATCH_MS, HostedWork, OutgrownLeases
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.usage_meter import RayLoan, UsageMeter
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.resources import Capacity
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.supervision import start_logged, start_restarted

if TYPE_CHECKING:
    from distributed_grid.agent.offloading.move_orders import SourceMoves
    from distributed_grid.agent.offloading.process_inventory import ProcessQueries, Surroundings
    from distributed_grid.trees.manifest import Manifest

PYTHON = ".".join(map(str, sys.version_info[:3]))
SWEEP_SECONDS, SAVE_AGE_SECONDS = 3600.0, 300.0
OBSERVE_SECONDS = 1.5
WARM_UP_SECONDS = 0.25
"""Time to measure the use before the first heartbeat, and from that to the second."""
SIGNAL_LAG_MS = 500
"""Between the SIGTERM of a batch system to the first process of the machine and to the last one."""
SILENT_POLLS = 3
"""Reads without a notice after which an earlier one counts as withdrawn."""
SendToControl = Callable[[wire.FromAgent], None]
log = logging.getLogger(__name__)


class WorkDirs(Protocol):
    """Fetches the directories that a job begins with."""

    @property
    def is_local(self) -> bool:
        """True on the control plane's machine: then a caller's own directory and environment are here."""

    async def lay_out(self, digest: str, target: Path) -> None:
        """Lay out the tree of this digest in a directory; repeated, it changes nothing."""

    async def read_tree(self, digest: str) -> Manifest:
        """List of files of this digest."""

    def received(self, piece: wire.FetchedChunk) -> None:
        """Bytes that were requested."""

    def unlinked(self) -> None:
        """The link is gone, and with it all pending answers."""


class Agent:
    """Serves the nodes of one machine; `send` is where its orders come in, `control` where its reports go."""

    def __init__(
        self,
        nodes: tuple[str, ...],
        jobs: Path,
        meter: UsageMeter,
        control: wire.ControlSide,
        *,
        capacity: Callable[[], Capacity] | None = None,
        workdirs: Callable[[SendToControl], WorkDirs] | None = None,
        memory: Callable[[AttemptHost, SendToControl], LentMemory | LocalMemory] | None = None,
        grid_locks: Sequence[str | Path] = (),
        epoch: int = 0,
        on_epoch: Callable[[int], None] = lambda epoch: None,
        on_address: Callable[[wire.ControlPlaneAddress], None] = lambda address: None,
        notices: NoticeSource | None = None,
        typed_on: str = "",
        ages: AgeClock | None = None,
    ) -> None:
        """`notices`: source of the cloud's notices that it takes this machine away. `typed_on`: the node whose
        processes are those of this machine, if it has several. `ages`: clock of deletions here, made if None."""
        self.nodes = nodes
        self._jobs = jobs
        self._ages = ages or AgeClock(jobs.parent / AGE_FILE)
        self.host = AttemptHost(jobs, report=self._report, count_cpu_time=meter.ended, grid_locks=grid_locks)
        self._meter = meter
        meter.set_jobs(jobs, self.host.shim_pids, self.host.exempt)
        self._control = control
        self._capacity = capacity
        self._to_reassess: set[str] = set()
        self._workdirs = workdirs(self._send_to_control) if workdirs is not None else None
        self._epoch = epoch
        self._on_epoch = on_epoch
        self._on_address = on_address
        self._tasks: list[asyncio.Task[None]] = []
        self._marks = CheckpointMarks(self.host.root)
        self._gpu_observer = BlockingObserver("the measurement of GPUs", 2)  # the second finds out that the first hangs
        self._mark_observer = BlockingObserver("the reading of checkpoint marks", 1)
        self._disk_observer = BlockingObserver("the measurement of the disk", 1)
        self._beat_seconds = wire.HEARTBEAT_MS / 1000
        self._reading = AttemptFileReader(
            jobs,
            self._send_to_control,
            lambda move_id: self._moves.directory(move_id) if self._moves is not None else None,
            self._workdirs.read_tree if self._workdirs is not None else None,
        )
        self._memory = memory(self.host, self._send_to_control) if memory is not None else None
        self._outbox = Outbox(
            self._send_to_control, lambda ms, call: asyncio.get_running_loop().call_later(ms / 1000, call)
        )
        work = HostedWork(self.host, meter, self._marks.observed_age_ms)
        self.guard = OwnerGuard(work, boot_ms, report_pause=self._outbox.paused, on_change=self._send_heartbeats)
        self._outgrown = OutgrownLeases(self.host, meter)
        self._attempts = HostedAttempts(self.host, self._workdirs, self._memory)
        meter.begin()
        self._measured_from = time.monotonic()
        self.machine_end = MachineEnd(HostedCommands(self.host, self.guard), boot_ms, self._send_heartbeats)
        self._orders = OrderExecutor(
            self._attempts,
            self.guard,
            self._outbox,
            AsyncioTasks(),
            boot_ms,
            shutdown_reason=lambda: self.machine_end.shutdown_reason,
        )
        self._queue: asyncio.Queue[wire.ToAgent] = asyncio.Queue()
        self._notices = notices
        self._typed_on = typed_on or (nodes[0] if len(nodes) == 1 else "")
        self._processes: ProcessQueries | None = None  # made when first asked
        self._moves: SourceMoves | None = None  # made with the first one

    @property
    def is_done(self) -> bool:
        """True when nothing runs here, nothing is to be fetched from here, and all reports are acknowledged."""
        return not self.host.running() and self._outbox.is_empty and not any(self._jobs.glob("*/" + STDOUT))

    async def start(self) -> None:
        """Find the attempts that outlived the last agent, report them, then begin to measure and to take orders."""
        await self.host.start()
        if self._moves_dir.is_dir():
            await self._source_moves().start()
        await self._observe_attempts()
        if self._attempts.is_remote:  # its first heartbeat has the owner's use
            await asyncio.sleep(max(self._measured_from + WARM_UP_SECONDS - time.monotonic(), 0))
        for node in self.nodes:
            for message in self.greeting(node):
                self._send_to_control(message)
        self._send_heartbeats()
        if self._memory is not None:
            await self._memory.start()
            self._memory.report_served()
        loops: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "carrying out orders": self._process_orders,
            "the heartbeat": self._beat,
            "removal of old files": self._sweep,
            "the watch for the owner": lambda: self.guard.watch(AsyncioTasks().sleep),
            "the watch of the disk": lambda: DiskGuard(self.host, self.guard).watch(AsyncioTasks().sleep),
            "the watch for memory": self._watch_memory,
            "the end of this machine": lambda: self.machine_end.watch(AsyncioTasks().sleep),
        }
        if (notices := self._notices) is not None:
            loops["the reading of notices"] = lambda: self._read_notices(notices)
        self._tasks = [start_restarted(loop, name) for name, loop in loops.items()]

    async def stop(self) -> None:
        """Stop measuring and taking orders; attempts keep running. Safe twice."""
        tasks = [*self._tasks, *self._orders.under_way()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        self._outbox.stop()
        self._reading.close()
        if self._processes is not None:
            self._processes.close()
        if self._moves is not None:
            await self._moves.stop()
        self.guard.release()
        if self._memory is not None:
            await self._memory.stop()
        await self.host.stop()

    def greeting(self, node: str) -> list[wire.AgentHello | wire.AttemptsPage]:
        """The greeting for a new link: all that runs or is being prepared, and every end that is not acknowledged."""
        capacity = wire.ReportedCapacity.of(self._capacity()) if self._capacity is not None else None
        hello = wire.AgentHello(
            protocol=wire.PROTOCOL,
            version=__version__,
            node=node,
            attempts=self._orders.listed(),
            capacity=capacity,
            epoch=self._epoch,
            boot=boot_id(),
            machine=self.host.machine,
            python=PYTHON,
            moves=self._moves.listed(node) if self._moves is not None else (),
        )
        return wire.greeting(hello)

    def welcomed(self, welcome: wire.Welcome) -> None:
        """Report everything again after a new link: reports on the last one may be lost."""
        if welcome.epoch > self._epoch:
            self._epoch = welcome.epoch
            self._on_epoch(welcome.epoch)
        self._beat_seconds = max(welcome.heartbeat_ms, 100) / 1000
        self._apply_settings(welcome)
        if self._memory is not None:
            self._memory.report_served()
        self._outbox.resend()
        self._marks.report_again()
        self._send_heartbeats()

    def _apply_settings(self, welcome: wire.Welcome) -> None:
        self._attempts.max_output_bytes = welcome.max_output_bytes
        self._attempts.max_files_bytes = welcome.max_files_bytes
        self.guard.rules = welcome.owner
        if self._memory is not None:
            self._memory.set_owner_rules(welcome.owner)

    def unlinked(self) -> None:
        """The link is gone: all readers end, and nothing more comes on it."""
        self._reading.close()
        if self._workdirs is not None:
            self._workdirs.unlinked()
        if self._memory is not None:
            self._memory.link_lost()

    def send(self, message: wire.ToAgent) -> None:
        if isinstance(message, wire.FetchedChunk):
            if self._workdirs is not None:
                self._workdirs.received(message)
        elif isinstance(message, wire.AcknowledgeMarks):
            self._marks.confirm(message.beat)
        elif isinstance(message, wire.HeartbeatReply):
            loan = RayLoan(message.ray_cpu_milli, message.ray_memory_bytes, message.ray_gpu_milli)
            self._meter.set_ray_loan(message.node, loan)
            if message.report_capacity:
                self._to_reassess.add(message.node)
            if message.hold_ms:
                self._orders.renew_hold(message.beat + message.hold_ms)
            self._orders.heartbeat_answered(message.node, message.beat)
            self.machine_end.announce(CONTROL_PLANE, message.end)
            if message.clock_confirmed:
                self._ages.confirm()
        elif isinstance(message, wire.MemoryOrder | wire.MemoryReply):
            if self._memory is not None:
                self._memory.receive(message)
        elif isinstance(message, wire.AcknowledgeReport):
            self._orders.acknowledged(message.seq)
        elif isinstance(message, wire.ControlPlaneAddress):
            self._on_address(message)
        elif isinstance(message, wire.Welcome):  # without a link, or later on: the rules of the owner may have changed
            self._apply_settings(message)
        else:
            self._queue.put_nowait(message)

    def close(self, reason: str) -> None:
        """The in-memory link cannot break: repeat unacknowledged reports."""
        self._outbox.resend()
        if self._memory is not None:
            self._memory.report_served()

    # ------------------------------------------------------------------ reports

    def _send_to_control(self, message: wire.FromAgent) -> None:
        self._control.received(message, self)

    def _report(self, report: AttemptLaunch | AttemptExit) -> None:
        if isinstance(report, AttemptLaunch):
            self._outbox.started(report.attempt_id, report.fence, report.pid, tuple(report.cores), report.pid_start)
            return
        self._orders.ended(report.attempt_id)
        is_early = report.outcome.detail == MACHINE_ENDS and not self.machine_end.shutdown_reason
        self._outbox.ended(
            report.attempt_id,
            report.fence,
            report.outcome,
            self._marks.age_ms(report.attempt_id),
            has_checkpoint=has_checkpoint(self.host.root, report.attempt_id),
            # The SIGTERM of this machine may reach a shim before this process. The control plane has to hear first that
            # the machine ends, else it places the job here once more.
            delay_ms=SIGNAL_LAG_MS if is_early else 0,
        )

    async def _process_orders(self) -> None:
        """Carry out orders, each in its turn."""
        while True:
            order = await self._queue.get()
            if isinstance(
                order, wire.StartAttemptOrder | wire.StopAttemptOrder | wire.PauseAttemptOrder | wire.ResizeAttemptOrder
            ):
                await self._orders.carry_out(order)
            elif isinstance(order, wire.ReadFile | wire.ReadCredit | wire.CloseStream | wire.ListFiles):
                try:
                    self._reading.received(order)
                except Exception as failure:  # the outermost loop: the next order may well succeed
                    log.warning("order %s failed", type(order).__name__, exc_info=failure)
            elif isinstance(order, wire.ListProcesses | wire.CheckFiles):
                if self._processes is None:
                    # Only offloading needs it.
                    from distributed_grid.agent.offloading.process_inventory import ProcessQueries

                    self._processes = ProcessQueries(self._typed_on, self._surroundings, self._send_to_control)
                self._processes.received(order)
            elif isinstance(order, wire.MoveOrder):
                self._source_moves().carry_out(order)

    @property
    def _moves_dir(self) -> Path:
        return self._jobs.parent / "moves"

    def _source_moves(self) -> SourceMoves:
        if self._moves is None:
            from distributed_grid.agent.offloading.move_orders import SourceMoves  # only offloading needs it

            self._moves = SourceMoves(self._moves_dir, self._outbox, self._workdirs, self._surroundings)
        return self._moves

    def _surroundings(self) -> Surroundings:
        from distributed_grid.agent.offloading.process_inventory import Surroundings

        shims = {tree.shim.pid: tree.attempt_id for tree in self.host.running_trees()}
        return Surroundings((os.getpid(),), shims, dict(self._meter.gpu_memory_by_pid))

    # ------------------------------------------------------------------ time

    async def _beat(self) -> None:
        seconds = WARM_UP_SECONDS  # the first heartbeat of this machine's own agent may know no rates yet
        while True:
            await asyncio.sleep(seconds)
            seconds = self._beat_seconds
            await self._observe_attempts()
            self._ages.look()
            self._send_heartbeats()

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(WATCH_MS / 1000)
            await self._outgrown.relieve_memory()

    async def _observe_attempts(self) -> None:
        """Observe GPUs and checkpoint marks; the heartbeat does not wait for a driver or a file system that hangs."""
        running = self.host.running_trees()
        own_pids = {proc.pid for tree in running if tree.spec.gpu_indexes for proc in tree.processes()}
        attempts = [(tree.attempt_id, tree.fence, tree.spec.node) for tree in running]
        await self._gpu_observer.run(lambda: self._meter.sample_gpus(own_pids))
        await self._mark_observer.run(lambda: self._marks.observe(attempts))
        await self._disk_observer.run(self._meter.sample_disk)

    async def _sweep(self) -> None:
        """Remove old files every hour, by an age that no wall clock changes, and not while a jump is pending."""
        swept: float | None = None
        while True:
            is_due = swept is None or time.monotonic() - swept >= SWEEP_SECONDS
            if is_due and self._ages.may_delete():
                swept = time.monotonic()
                await asyncio.to_thread(remove_expired, self._jobs, age_ms=self._ages.state.age_ms)
            await asyncio.to_thread(self._ages.save)
            await asyncio.sleep(SAVE_AGE_SECONDS)

    async def _read_notices(self, source: NoticeSource) -> None:
        """Read every few seconds whether the cloud takes this machine away. A failed read changes nothing."""
        silent, problem = 0, ""
        while True:
            try:
                announced = await asyncio.to_thread(source.read)
            except MetadataFailed as failure:
                if not problem:  # once, until it is read again
                    log.warning("the notices of the cloud cannot be read: %s", failure)
                problem = str(failure)
            else:
                problem, silent = "", 0 if announced is not None else silent + 1
                if announced is not None or silent >= SILENT_POLLS:
                    self.machine_end.announce(METADATA, announced)
            await asyncio.sleep(POLL_SECONDS)

    def _send_heartbeats(self) -> None:
        running = self.host.usage()
        usages, outgrown = self._meter.usages(self.nodes, running), self._outgrown.reports(running)
        for node, usage in usages.items():
            beat = boot_ms()
            marks = self._marks.take_unreported(node, beat)
            capacity, clock_jump, ages = None, None, self._ages.state
            if node in self._to_reassess and self._capacity is not None:
                self._to_reassess.discard(node)
                capacity = wire.ReportedCapacity.of(self._capacity())
            if ages.jump is not None:
                clock_jump = wire.PendingClockJump(
                    max(-wire.MAX_JUMP_MS, min(ages.jump.by_ms, wire.MAX_JUMP_MS)), ages.waits_ms
                )
            heartbeat = wire.Heartbeat(
                node=node,
                usage=usage,
                beat=beat,
                generation=self.guard.generation,
                yields=self.guard.yields,
                marks=marks,
                capacity=capacity,
                end=self.machine_end.reported(),
                clock_jump=clock_jump,
                starting=self._orders.starting(node, beat),
                outgrown=tuple(held for held in outgrown if running[held.lease_id].node == node)[: wire.MAX_OUTGROWN],
            )
            self._send_to_control(heartbeat)


class BlockingObserver:
    """Makes blocking observations in threads. `run` waits `OBSERVE_SECONDS` for one; while `max_running` of them hang,
    no other begins, and the last observation stays."""

    def __init__(self, name: str, max_running: int) -> None:
        self._name = name
        self._max_running = max_running
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, observe: Callable[[], None]) -> None:
        self._running = {task for task in self._running if not task.done()}
        if len(self._running) >= self._max_running:
            return
        task = start_logged(asyncio.to_thread(observe), self._name)
        self._running.add(task)
        await asyncio.wait((task,), timeout=OBSERVE_SECONDS)
        if not task.done() and len(self._running) == 1:
            log.warning("%s takes longer than %g s: heartbeats do not wait for it", self._name, OBSERVE_SECONDS)


class HostedAttempts:
    """The attempts of the host, as the orders see them: with their files, and with the memory that is lent here."""

    def __init__(self, host: AttemptHost, workdirs: WorkDirs | None, memory: LentMemory | LocalMemory | None) -> None:
        self._host = host
        self._workdirs = workdirs
        self._memory = memory
        self.max_output_bytes = self.max_files_bytes = 0
        self.running = host.running
        self.unstarted = host.unstarted
        self.knows = host.knows
        self.is_under_way = host.is_active
        self.forget = host.forget

    @property
    def is_held(self) -> bool:
        return self._host.is_held

    def hold(self, until_boot_ms: int) -> None:
        self._host.extend_hold(until_boot_ms)
        if self._memory is not None:
            self._memory.extend_hold(until_boot_ms)

    @property
    def is_remote(self) -> bool:
        """True if the control plane is on another machine: then nothing here is the caller's."""
        return self._workdirs is not None and not self._workdirs.is_local

    def needs_files(self, order: wire.StartAttemptOrder) -> bool:
        needed = self._workdir(order) or order.checkpoint
        return self._workdirs is not None and bool(needed) and not self._host.knows(order.lease_id)

    async def fetch_files(self, order: wire.StartAttemptOrder) -> None:
        assert self._workdirs is not None
        work = self._host.work_dir(order.lease_id)
        if workdir := self._workdir(order):
            await self._workdirs.lay_out(workdir, work)
        if order.checkpoint:
            await self._workdirs.lay_out(order.checkpoint, work.parent / CHECKPOINT_DIR)

    def _workdir(self, order: wire.StartAttemptOrder) -> str:
        """Tree that its working directory begins with; empty if it runs in the caller's own directory."""
        return order.command.workdir if self.is_remote or not order.command.cwd else ""

    async def launch(self, order: wire.StartAttemptOrder, start_by_boot_ms: int) -> None:
        command, claim = order.command, order.claim
        env, is_remote = dict(command.env), self.is_remote
        if is_remote:
            env = node_environment(env, command.given)
            if self._memory is not None and self._memory.proxy is not None:  # a Python that has the memory pool
                env |= {"GRID_MEMORY_SOCKET": str(self._memory.proxy.path), "GRID_PYTHON": sys.executable}
        await self._host.launch(
            AttemptSpec(
                attempt_id=order.lease_id,
                job_id=order.job_id,
                node=order.node,
                fence=order.fence,
                argv=command.argv,
                env=env,
                cwd=None if is_remote else command.cwd or None,
                cpu_milli=claim.cpu_milli,
                memory_bytes=claim.memory_bytes,
                most_memory_bytes=order.most_memory_bytes,
                gpu_indexes=tuple(share.index for share in claim.gpus),
                timeout_ms=command.timeout_ms,
                grace_ms=command.grace_ms,
                merge=command.merge,
                hold_ms=order.hold_ms,
                max_output_bytes=self.max_output_bytes,
                max_files_bytes=self.max_files_bytes,
                start_by_boot_ms=start_by_boot_ms,
                may_run_again=order.may_run_again,
            )
        )

    async def stop(self, order: wire.StopAttemptOrder) -> None:
        await self._host.stop_attempt(order.lease_id, ending=order.ending, detail=order.detail, grace_ms=order.grace_ms)

    def resize(self, order: wire.ResizeAttemptOrder) -> None:
        self._host.resize(order.lease_id, order.memory_bytes, order.most_memory_bytes)


class HostedCommands:
    """Attempts of the host for `MachineEnd`: it notifies and stops them."""

    def __init__(self, host: AttemptHost, guard: OwnerGuard) -> None:
        self._host = host
        self._guard = guard
        self.running = host.running_trees
        self.withdraw_notice = guard.withdraw_notice

    def give_notice(self, attempt_id: str, reason: str, in_ms: int) -> None:
        self._guard.displace(attempt_id, reason, in_ms)

    async def stop(self, attempt_id: str, reason: str, grace_ms: int) -> None:
        await self._host.stop_attempt(attempt_id, ending=Ending.RECLAIMED, detail=reason, grace_ms=grace_ms)


class AsyncioTasks:
    """Tasks of the running event loop."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return start_logged(work, "work beside orders")

    def cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()

    async def join(self, task: asyncio.Task[None]) -> None:
        await asyncio.gather(task, return_exceptions=True)

    async def sleep(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)
