"""Simulated agent: the order executor, outbox and owner guard that ship, on a simulated machine.

An agent that dies takes nothing along: the next one finds what runs, and what has ended, on the disk of its machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from errno import ENOSPC

from distributed_grid import __version__
from distributed_grid.agent.orders import AttemptOrder, OrderExecutor
from distributed_grid.agent.outbox import Outbox
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.yield_policy import Borrowed, OwnerState, UsageSample
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import StaleFence
from distributed_grid.replay.event_queue import EventQueue, Resume, ScheduledEvent, SimulatedTask, SimulatedTasks
from distributed_grid.wire import (
    HEARTBEAT_MS,
    PROTOCOL,
    AcknowledgeReport,
    AgentHello,
    AttemptsPage,
    CheckpointAge,
    FromAgent,
    Heartbeat,
    HeartbeatReply,
    HeldMemory,
    MemoryOrder,
    MemoryReclaimReport,
    MoveOrder,
    PauseAttemptOrder,
    ReportedCapacity,
    ResizeAttemptOrder,
    StartAttemptOrder,
    StopAttemptOrder,
    ToAgent,
    Welcome,
    greeting,
)
from tests.simulation.faults import MessageMutator
from tests.simulation.machine import Machine, Owner, SimulatedProcess
from tests.simulation.network import Dialer, SimulatedUplink
from tests.simulation.simulated_memory import SimulatedLending
from tests.simulation.simulated_moves import SimulatedMoves

FETCH_MS = 1_000
MARKS_EVERY_MS = 10_000
OBSERVE_MS = 1_000
"""Coarser than a real guard, which may observe its machine four times a second."""
MIN_PROCESS_BYTES = 256 * 1024**2
PID = 7
DISK_BYTES = 1 << 40
LIES = 0.3
"""How often an agent that lies does."""


class SimulatedAgent:
    """One agent process, from its start to its death; its durable state is on its machine's disk."""

    def __init__(self, machine: Machine, dialer: Dialer, orders: type[OrderExecutor[SimulatedTask]]) -> None:
        self.machine = machine
        self.queue = machine.queue
        self.random = machine.random
        self.name = machine.node.name
        self.alive = True
        self.is_stopped = False
        """Its process is stopped: it neither sends nor takes in anything, and its time stands still."""
        self._postponed: list[Callable[[], None]] = []
        self._uplink = SimulatedUplink(self, dialer)
        self._tasks = AgentTasks(self.queue, self.postpones)
        self._outbox = Outbox(self._uplink.send, self.queue.after)
        self._work = SimulatedWork(machine)
        self._guard = OwnerGuard(
            self._work,
            lambda: machine.boot_ms,
            report_pause=self._outbox.paused,
            on_change=self.send_heartbeat,
        )
        attempts = SimulatedAttempts(machine, self._tasks, self._uplink, self.report)
        self._orders = orders(attempts, self._guard, self._outbox, self._tasks, lambda: machine.boot_ms)
        self._lending = SimulatedLending(
            {name: one.memory for name, one in machine.neighbours.items()},
            self.name,
            self.queue,
            self.random,
            send=self._uplink.send,
            is_alive=lambda: self.alive,
            reaches=lambda name: machine.neighbours[name].is_on,
        )
        self._moves = SimulatedMoves(machine, self._outbox, lambda: self.alive)
        self._waiting: list[AttemptOrder] = []
        self._is_busy = False
        self._next_observation: ScheduledEvent | None = None
        self._marks_reported: dict[str, int] = {}

    def start(self) -> None:
        """Find what outlived the last agent, then dial the control plane."""
        self.machine.host = self
        for lease_id in list(self.machine.live):
            self._adopt(self.machine.records[lease_id])
        self._moves.start()
        self._uplink.dial()
        self.queue.after(HEARTBEAT_MS, self._beat)
        self.observe_owner_soon()

    def die(self, *, with_machine: bool = False) -> None:
        """Be gone at once; only a machine that goes along says nothing about it."""
        self.alive = False
        self.machine.host = None
        self._uplink.hang_up(silently=with_machine)
        self._outbox.stop()
        for task in self._orders.under_way():
            task.cancel()
        if not with_machine:
            self._work.release()
            self.machine.agent_died()

    def set_stopped(self, is_stopped: bool) -> None:
        """Stop its process, or let it go on with all that has waited."""
        self.is_stopped = is_stopped
        if not is_stopped:
            postponed, self._postponed = self._postponed, []
            for call in postponed:
                if self.alive:
                    call()

    def postpones(self, call: Callable[[], None]) -> bool:
        """Whether its process is stopped; then this is called when it goes on."""
        if self.is_stopped and self.alive:
            self._postponed.append(call)
        return self.is_stopped and self.alive

    def _adopt(self, run: SimulatedProcess) -> None:
        if run.outcome is None and not run.runs and not run.begun:
            self.machine.forget(run.lease_id)  # recorded, but nobody got to start it: the order comes again
            del self.machine.records[run.lease_id]
            return
        if run.has_ended_unseen:  # its shim lives, and is stopped
            return
        if run.outcome is None and not run.runs:
            self.machine.note_lost(run)
        self.report(run)

    # ------------------------------------------------------------------ the link

    def greeting(self) -> list[AgentHello | AttemptsPage]:
        machine = self.machine
        attempts, capacity = self._orders.listed(), ReportedCapacity.of(machine.node.capacity)
        return greeting(
            AgentHello(
                protocol=PROTOCOL,
                version=__version__,
                node=self.name,
                attempts=attempts,
                capacity=capacity,
                epoch=machine.epoch_on_disk,
                boot=machine.boot,
                machine=machine.directory,
                moves=self._moves.listed(),
            )
        )

    def said(self, message: FromAgent) -> FromAgent:
        """The false answer of a lying agent: often another one."""
        if not self.machine.lies or self.random.random() > LIES:
            return message
        others = (
            *self.machine.neighbours,
            "block1:1",
            *self.machine.records,
            *(f"job{self.random.randrange(20)}.1" for _ in "12"),
        )
        return MessageMutator(self.random, others).mutate(message)

    def received(self, message: ToAgent) -> None:
        """Take in what the control plane says."""
        if isinstance(message, Welcome):
            if not self.machine.disk_is_full:
                self.machine.epoch_on_disk = max(self.machine.epoch_on_disk, message.epoch)
            self._guard.rules = message.owner
            self._marks_reported.clear()
            self.machine.check_memory_hold()
            self._lending.report_served()
            self._outbox.resend()
            self.send_heartbeat()
        elif isinstance(message, HeartbeatReply):
            if message.hold_ms:
                self._orders.renew_hold(message.beat + message.hold_ms)
            self._orders.heartbeat_answered(self.name, message.beat)
        elif isinstance(message, AcknowledgeReport):
            self._orders.acknowledged(message.seq)
        elif isinstance(message, MemoryOrder):
            self.machine.check_memory_hold()
            self._lending.receive(message)
        elif isinstance(message, MoveOrder):
            self.queue.after(self.random.randint(0, 3) * self.machine.slowness, lambda: self._order_move(message))
        elif isinstance(message, StartAttemptOrder | StopAttemptOrder) and self.machine.ignores_starts:
            pass  # it is heard and does nothing
        elif isinstance(message, StartAttemptOrder | StopAttemptOrder | PauseAttemptOrder | ResizeAttemptOrder):
            self._waiting.append(message)
            self._obey_soon()

    def _order_move(self, order: MoveOrder) -> None:
        if self.alive:
            self._moves.carry_out(order)

    def _obey_soon(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self.queue.after(self.random.randint(0, 3) * self.machine.slowness, self._obey)

    def _obey(self) -> None:
        if self.alive and not self.postpones(self._obey):
            SimulatedTask(self._orders.carry_out(self._waiting.pop(0)), self._obeyed).start()

    def _obeyed(self) -> None:
        self._is_busy = False
        self._obey_soon()

    # ------------------------------------------------------------------ heartbeats

    def _beat(self) -> None:
        if self.alive and not self.postpones(self._beat):
            self.send_heartbeat()
            late = self.random.randint(0, 200 * (self.machine.slowness - 1))
            self.queue.after(HEARTBEAT_MS + late, self._beat)

    def send_heartbeat(self) -> None:
        """Say that this node lives, and what its owner uses."""
        if self._uplink.is_up:
            guard, beat, marks = self._guard, self.machine.boot_ms, tuple(self._marks())
            starting = self._orders.starting(self.name, beat)
            message = Heartbeat(
                node=self.name,
                usage=self._usage(),
                beat=beat,
                generation=guard.generation,
                yields=guard.yields,
                marks=marks,
                starting=starting,
                outgrown=tuple(self._outgrown()),
            )
            self._uplink.send(message)

    def _outgrown(self) -> Iterator[HeldMemory]:
        """The runs that hold more than their leases, which may grow."""
        for run in self.machine.running:
            if run.runs and run.stop is None and run.has_outgrown_lease:
                yield HeldMemory(run.lease_id, run.fence, run.held_bytes)

    def _marks(self) -> Iterator[CheckpointAge]:
        """The checkpoints to report, of each run at most once in a while."""
        now = self.queue.now
        for run in self.machine.running:
            age_ms = self.machine.mark_age_ms(run)
            if age_ms is not None and now - self._marks_reported.get(run.lease_id, 0) >= MARKS_EVERY_MS:
                self._marks_reported[run.lease_id] = now
                yield CheckpointAge(run.lease_id, run.fence, age_ms)

    def _usage(self) -> Usage:
        """The measurement: the owner's part, and borrowed work at the size of its leases."""
        cpu, memory = self._work.owner_cpu_milli, self._work.owner_memory_bytes
        busy = 1000 * cpu // max(self.machine.node.capacity.cpu_milli, 1)
        disk_bytes = DISK_BYTES if self.machine.disk_is_flooded else 0  # not measured
        return Usage(
            cpu_busy_milli=busy,
            cpu_outside_milli=busy,
            memory_bytes=memory,
            memory_outside_bytes=memory,
            disk_bytes=disk_bytes,
        )

    # ------------------------------------------------------------------ the owner

    def observe_owner_soon(self) -> None:
        """Observe the machine within a second, unless that is scheduled already."""
        self._observe_after(self.random.randint(50, OBSERVE_MS))

    def _observe_after(self, delay_ms: int) -> None:
        if self._next_observation is None or not self._next_observation.is_pending:
            self._next_observation = self.queue.after(delay_ms, self._observe_owner)

    def _observe_owner(self) -> None:
        if self.alive and not self.postpones(self._observe_owner):
            if self.machine.owner is Owner.MEMORY and self.machine.memory.in_memory:
                self._uplink.send(MemoryReclaimReport(self.name, self.machine.node.capacity.memory_bytes))
            SimulatedTask(self._guard.observe(), self._observed).start()

    def _observed(self) -> None:
        if self.machine.owner is not Owner.AWAY or self._guard.state != OwnerState():
            self._observe_after(OBSERVE_MS)

    # ------------------------------------------------------------------ attempts

    def run_began(self, run: SimulatedProcess) -> None:
        self.report(run)
        self.observe_owner_soon()

    def run_ended(self, run: SimulatedProcess) -> None:
        self.report(run)
        self.observe_owner_soon()

    def report(self, run: SimulatedProcess) -> None:
        """Report that an attempt runs, or how it ended."""
        if run.outcome is not None:
            self._orders.ended(run.lease_id)
            mark_age_ms = self.machine.mark_age_ms(run)
            left = mark_age_ms is not None or bool(run.order.checkpoint)
            self._outbox.ended(run.lease_id, run.fence, run.outcome, mark_age_ms, has_checkpoint=left)
        elif run.runs:
            self._outbox.started(run.lease_id, run.fence, PID)


class AgentTasks(SimulatedTasks):
    """The tasks of one agent: they stand still with its process."""

    def __init__(self, queue: EventQueue, postpones: Callable[[Callable[[], None]], bool]) -> None:
        super().__init__(queue)
        self._after = queue.after
        self._postpones = postpones

    def resume_after(self, ms: int, resume: Resume) -> None:
        def go_on() -> None:
            if not self._postpones(go_on):
                resume(None, None)

        self._after(ms, go_on)


class SimulatedAttempts:
    """The attempts of a simulated machine, as the order executor sees them."""

    def __init__(
        self,
        machine: Machine,
        tasks: SimulatedTasks,
        uplink: SimulatedUplink,
        report: Callable[[SimulatedProcess], None],
    ) -> None:
        self._machine = machine
        self._tasks = tasks
        self._uplink = uplink
        self._report = report

    @property
    def is_held(self) -> bool:
        return self._machine.held_until > self._machine.boot_ms

    def hold(self, until_boot_ms: int) -> None:
        self._machine.hold(until_boot_ms)

    def running(self) -> Collection[str]:
        return [run.lease_id for run in self._machine.running]

    def unstarted(self) -> Collection[str]:
        return [run.lease_id for run in self._machine.running if not run.runs and not run.has_ended_unseen]

    def knows(self, attempt_id: str) -> bool:
        return attempt_id in self._machine.records

    def is_under_way(self, attempt_id: str) -> bool:
        run = self._machine.records.get(attempt_id)
        return run is not None and run.runs and run.stop is None

    def needs_files(self, order: StartAttemptOrder) -> bool:
        return bool(order.command.workdir or order.checkpoint) and not self.knows(order.lease_id)

    async def fetch_files(self, order: StartAttemptOrder) -> None:
        """Missing files come over the link; without a link the fetch waits for one."""
        await self._tasks.sleep(self._machine.random.randint(50, 4_000) * self._machine.slowness)
        while not self._uplink.is_up or self._uplink.silent_ms > HEARTBEAT_MS + FETCH_MS:
            await self._tasks.sleep(FETCH_MS)
        self._need_room()

    def _need_room(self) -> None:
        if self._machine.disk_is_full or self._machine.disk_is_flooded:
            raise OSError(ENOSPC, "No space left on device")

    async def launch(self, order: StartAttemptOrder, start_by_boot_ms: int) -> None:
        run = self._machine.records.get(order.lease_id)
        if run is None:
            self._need_room()
            self._machine.launch(order, start_by_boot_ms)
            return
        if order.fence < run.fence:
            raise StaleFence(f"{order.lease_id}: fence {order.fence} is older than {run.fence}")
        run.fence = order.fence
        self._report(run)

    async def stop(self, order: StopAttemptOrder) -> None:
        run = self._machine.records[order.lease_id]
        if run.outcome is not None:
            self._report(run)
        else:
            self._machine.stop(run, Outcome(order.ending, detail=order.detail), order.grace_ms)

    def resize(self, order: ResizeAttemptOrder) -> None:
        run = self._machine.records.get(order.lease_id)
        if run is not None:
            run.leased_bytes = max(run.leased_bytes, order.memory_bytes)

    def forget(self, attempt_id: str) -> None:
        run = self._machine.records.get(attempt_id)
        if run is not None and run.outcome is not None:
            self._machine.forget(attempt_id)


class SimulatedWork:
    """The borrowed work of a simulated machine, as the owner guard measures it and acts on it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._allowed_milli: int | None = None
        self._notices: dict[str, int] = {}  # by attempt, the moment since boot

    @property
    def owner_cpu_milli(self) -> int:
        return self._machine.node.capacity.cpu_milli * 9 // 10 if self._machine.owner is Owner.CPU else 0

    @property
    def owner_memory_bytes(self) -> int:
        return self._machine.node.capacity.memory_bytes * 85 // 100 if self._machine.owner is Owner.MEMORY else 0

    def running(self) -> Collection[str]:
        return [run.lease_id for run in self._machine.running]

    def _runs(self) -> list[SimulatedProcess]:
        return [run for run in self._machine.running if run.runs]

    def sample(self) -> UsageSample | None:
        """Borrowed work uses the CPU it leased while it is neither paused nor throttled, and some memory."""
        runs = self._runs()
        if not runs:
            return None
        has = self._machine.node.capacity
        attempts = sorted(map(self._borrowed, runs), key=lambda one: one.at_stake, reverse=True)
        wants = sum(run.claim.cpu_milli for run in runs if not run.paused)
        allowed = has.cpu_milli if self._allowed_milli is None else self._allowed_milli
        used = sum(one.memory_bytes for one in attempts)
        return UsageSample(
            machine_milli=has.cpu_milli,
            outside_milli=self.owner_cpu_milli,
            own_milli=min(wants, allowed, has.cpu_milli - self.owner_cpu_milli),
            attempts=tuple(attempts),
            memory_bytes=has.memory_bytes,
            memory_available_bytes=max(has.memory_bytes - self.owner_memory_bytes - used, 0),
            memory_outside_bytes=self.owner_memory_bytes,
        )

    def _borrowed(self, run: SimulatedProcess) -> Borrowed:
        claim, marked_ago_ms = run.claim, self._machine.mark_age_ms(run)
        ran_ms = self._machine.wall_ms(run)
        return Borrowed(
            attempt_id=run.lease_id,
            node=self._machine.node.name,
            cpu_milli=claim.cpu_milli,
            memory_leased_bytes=run.leased_bytes,
            memory_bytes=max(run.held_bytes, MIN_PROCESS_BYTES),
            gpu_indexes=tuple(share.index for share in claim.gpus),
            at_stake=(claim.cpu_milli or 1000) * (ran_ms if marked_ago_ms is None else marked_ago_ms),
        )

    def throttle(self, cores: int | None, running_milli: int) -> None:
        self._allowed_milli = None if cores is None else cores * running_milli

    def pause(self, spared: frozenset[str]) -> list[tuple[str, int]]:
        fresh = [run for run in self._runs() if not run.paused and run.stop is None and run.lease_id not in spared]
        for run in fresh:
            self._machine.pause(run)
        return [(run.lease_id, run.fence) for run in fresh]

    def resume(self, attempt_id: str | None = None) -> None:
        for run in self._runs():
            if attempt_id in (None, run.lease_id):
                self._machine.resume(run)

    def release(self) -> None:
        self.resume()
        self._allowed_milli = None

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> int:
        now = self._machine.boot_ms
        self._notices[attempt_id] = until = min(self._notices.get(attempt_id, now + in_ms), now + in_ms)
        return max(until - now, 0)

    def withdraw_notice(self, attempt_id: str) -> None:
        self._notices.pop(attempt_id, None)

    async def evict(self, attempt_id: str, why: str, grace_ms: int) -> None:
        run = self._machine.records[attempt_id]
        if run.outcome is None:
            self._machine.resume(run)
            ending = Ending.OVER_LIMIT if run.has_outgrown_lease else Ending.RECLAIMED
            self._machine.stop(run, Outcome(ending, detail=why), grace_ms)
