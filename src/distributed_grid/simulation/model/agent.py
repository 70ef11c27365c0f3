"""A simulated agent: what `agent/agent.py` promises, without processes and sockets.

Rule 1: a report is kept until it is acknowledged, and told again on every new link.
Rule 2: an order that is too old, in its fence, its hold or the offer it counts on, is refused and changes nothing.
Rule 3: an agent that dies takes nothing along: the next one finds what runs, and what has ended, on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from distributed_grid import __version__
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.simulation.model.event_queue import ScheduledEvent
from distributed_grid.simulation.model.machine import Machine, Owner, SimulatedProcess
from distributed_grid.simulation.model.owner_guard import NOTICE_MS, SimulatedOwnerGuard
from distributed_grid.simulation.model.uplink import Exchange, SimulatedUplink
from distributed_grid.wire import (
    HEARTBEAT_MS,
    PROTOCOL,
    AcknowledgeReport,
    AgentHello,
    AttemptEndedReport,
    AttemptPausedReport,
    AttemptStartedReport,
    CheckpointAge,
    Heartbeat,
    HeartbeatReply,
    StartAttemptOrder,
    StopAttemptOrder,
    ToAgent,
    Welcome,
)

LEAST_HOLD_MS = 200
SHORT_MS = 30
FETCH_MS = 1_000
MARKS_EVERY_MS = 10_000
Report = AttemptStartedReport | AttemptPausedReport | AttemptEndedReport


class _Preparing(Struct):
    """An order whose working directory is being brought."""

    order: StartAttemptOrder
    done: ScheduledEvent


class SimulatedAgent:
    """One agent process, from its start to its death; what must last is on its machine's disk."""

    def __init__(self, machine: Machine, exchange: Exchange) -> None:
        self.machine = machine
        self.agenda = machine.agenda
        self.random = machine.random
        self.name = machine.node.name
        self.alive = True
        self.guard = SimulatedOwnerGuard(self)
        self._uplink = SimulatedUplink(self, exchange)
        self._seq = 0
        self._unacknowledged: dict[int, Report] = {}
        self._fences: dict[str, int] = {}
        self._refused: dict[str, None] = {}
        self._orders: list[StartAttemptOrder | StopAttemptOrder] = []
        self._busy = False
        self.preparing: dict[str, _Preparing] = {}
        self._noticed: dict[str, ScheduledEvent] = {}
        self._marks_told: dict[str, int] = {}

    def start(self) -> None:
        """Find what outlived the last agent, then look for the control plane."""
        self.machine.host = self
        for lease_id in list(self.machine.live):
            self._adopt(self.machine.records[lease_id])
        self._uplink.dial()
        self.agenda.after(HEARTBEAT_MS, self._beat)
        self.guard.look_soon()

    def die(self, *, with_machine: bool = False) -> None:
        """Be gone at once; only a machine that goes along says nothing about it."""
        self.alive = False
        self.machine.host = None
        self._uplink.hang_up(silently=with_machine)
        for planned in (*(preparing.done for preparing in self.preparing.values()), *self._noticed.values()):
            planned.call_off()
        if not with_machine:
            self.guard.let_go()
            self.machine.agent_died()

    def _adopt(self, run: SimulatedProcess) -> None:
        if run.outcome is None and not run.runs and not run.begun:
            self.machine.forget(run.lease_id)  # recorded, but nobody got to start it: the order comes again
            del self.machine.records[run.lease_id]
            return
        if run.outcome is None and not run.runs:
            self.machine.note_lost(run)
        if run.outcome is not None:
            self._tell_ended(run)
        else:
            self._tell_started(run)

    # ------------------------------------------------------------------ the link

    def hello(self) -> AgentHello:
        """The greeting: everything that runs or is being prepared, and every end that is not acknowledged."""
        ended = (report.lease_id for report in self._unacknowledged.values() if isinstance(report, AttemptEndedReport))
        running = (run.lease_id for run in self.machine.running)
        attempts = tuple(dict.fromkeys((*running, *self.preparing, *ended)))
        capacity = self.machine.node.capacity
        return AgentHello(
            PROTOCOL, __version__, self.name, attempts, capacity, self.machine.epoch_on_disk, self.machine.boot
        )

    def told(self, message: ToAgent) -> None:
        """Take in what the control plane says."""
        if isinstance(message, Welcome):
            self.machine.epoch_on_disk = max(self.machine.epoch_on_disk, message.epoch)
            self._marks_told.clear()
            for report in list(self._unacknowledged.values()):
                self._uplink.say(report)
            self.measure()
        elif isinstance(message, HeartbeatReply):
            if message.hold_ms:
                self.renew_hold(message.beat + message.hold_ms)
        elif isinstance(message, AcknowledgeReport):
            self._acknowledged(message.seq)
        elif isinstance(message, StartAttemptOrder | StopAttemptOrder):
            self._orders.append(message)
            self._obey_soon()

    def tell(self, report: Report) -> None:
        self._unacknowledged[report.seq] = report
        self._uplink.say(report)

    def number(self) -> int:
        self._seq += 1
        return self._seq

    def _acknowledged(self, seq: int) -> None:
        report = self._unacknowledged.pop(seq, None)
        if isinstance(report, AttemptEndedReport):
            self._fences.pop(report.lease_id, None)
            run = self.machine.records.get(report.lease_id)
            if run is not None and run.outcome is not None:
                self.machine.forget(report.lease_id)

    # ------------------------------------------------------------------ time

    def _beat(self) -> None:
        if self.alive:
            self.measure()
            late = self.random.randint(0, 200 * (self.machine.slowness - 1))
            self.agenda.after(HEARTBEAT_MS + late, self._beat)

    def measure(self) -> None:
        """Say that this node lives, and what its owner uses."""
        if self._uplink.is_up:
            guard, beat, marks = self.guard, self.machine.boot_ms, tuple(self._marks())
            self._uplink.say(Heartbeat(self.name, self.usage(), beat, guard.generation, guard.yields, marks))

    def _marks(self) -> Iterator[CheckpointAge]:
        """The checkpoints to tell of, of each run at most once in a while."""
        now = self.agenda.now
        for run in self.machine.running:
            age_ms = self.machine.mark_age_ms(run)
            if age_ms is not None and now - self._marks_told.get(run.lease_id, 0) >= MARKS_EVERY_MS:
                self._marks_told[run.lease_id] = now
                yield CheckpointAge(run.lease_id, run.fence, age_ms)

    def usage(self) -> Usage:
        """What would be measured: the owner's part; borrowed work is taken to use what it leased."""
        has = self.machine.node.capacity
        cpu = 900 if self.machine.owner is Owner.CPU else 0
        memory = has.memory_bytes * 85 // 100 if self.machine.owner is Owner.MEMORY else 0
        return Usage(cpu, cpu, memory, memory)

    def renew_hold(self, until_boot_ms: int) -> None:
        """Renew the hold. What was being prepared when the last one ran out is given up."""
        if self.hold_is_over:
            for preparing in self.preparing.values():
                preparing.done.call_off()
                self._refuse(preparing.order, "its hold ran out before its files were there")
            self.preparing.clear()
        self.machine.hold(until_boot_ms)

    @property
    def hold_is_over(self) -> bool:
        return self.machine.held_until <= self.machine.boot_ms

    # ------------------------------------------------------------------ orders

    def _obey_soon(self) -> None:
        if not self._busy:
            self._busy = True
            self.agenda.after(self.random.randint(0, 3) * self.machine.slowness, self._obey)

    def _obey(self) -> None:
        self._busy = False
        if not self.alive:
            return
        order = self._orders.pop(0)
        if isinstance(order, StartAttemptOrder):
            self._start(order)
        else:
            self.stop(order)
        if self._orders:
            self._obey_soon()

    def is_stale(self, lease_id: str, fence: int) -> bool:
        """Whether an order is older than one that was seen."""
        run = self.machine.records.get(lease_id)
        return fence < max(self._fences.get(lease_id, 0), run.fence if run is not None else 0)

    def is_in_time(self, order: StartAttemptOrder) -> bool:
        """Whether the order's hold, counted from the heartbeat it names, has not run out; what it says holds."""
        now = self.machine.boot_ms
        if order.beat > now or order.beat + order.hold_ms < now + LEAST_HOLD_MS:
            return False
        self.renew_hold(order.beat + order.hold_ms)
        return True

    def has_refused(self, lease_id: str) -> bool:
        """Whether this was refused before: that is final, though the control plane may not have heard of it yet."""
        return lease_id in self._refused

    def is_withdrawn(self, order: StartAttemptOrder) -> bool:
        """Whether the offer that the order counts on was taken back since."""
        return order.generation < self.guard.generation

    def _start(self, order: StartAttemptOrder) -> None:
        if order.lease_id in self.preparing or self.is_stale(order.lease_id, order.fence):
            return
        if self.has_refused(order.lease_id):
            return  # the order and the refusal have crossed
        run = self.machine.records.get(order.lease_id)
        if run is None or run.outcome is not None:
            if order.hold_ms and not self.is_in_time(order):
                self._refuse(order, "the order came too late")
                return
            if self.is_withdrawn(order):
                self._refuse(order, "had withdrawn its offer")
                return
        self._fences[order.lease_id] = order.fence
        if run is not None:
            self._tell_again(run, order.fence)
        elif order.command.workdir:
            delay = self.random.randint(50, 4_000) * self.machine.slowness
            done = self.agenda.after(delay, lambda: self.prepared(order))
            self.preparing[order.lease_id] = _Preparing(order, done)
        else:
            self.machine.launch(order)

    def prepared(self, order: StartAttemptOrder) -> None:
        """What is missing comes over the link, so without one it takes until there is one again."""
        if not self._uplink.is_up or self.agenda.now - self._uplink.told_at > HEARTBEAT_MS + FETCH_MS:
            self.preparing[order.lease_id].done = self.agenda.after(FETCH_MS, lambda: self.prepared(order))
            return
        del self.preparing[order.lease_id]
        if order.hold_ms and self.hold_is_over:
            self._refuse(order, "its hold ran out before its files were there")
        else:
            self.machine.launch(order)

    def _refuse(self, order: StartAttemptOrder, why: str) -> None:
        self._refused[order.lease_id] = None
        outcome = Outcome(Ending.RECLAIMED, detail=f"{self.name}: {why}")
        self.tell(AttemptEndedReport(self.number(), order.lease_id, order.fence, outcome))

    def _tell_again(self, run: SimulatedProcess, fence: int) -> None:
        run.fence = max(run.fence, fence)
        if run.outcome is not None:
            self._tell_ended(run)
        elif run.runs:
            self._tell_started(run)

    def stop(self, order: StopAttemptOrder) -> None:
        if self.is_stale(order.lease_id, order.fence):
            return
        preparing = self.preparing.pop(order.lease_id, None)
        run = self.machine.records.get(order.lease_id)
        if preparing is not None:
            preparing.done.call_off()
        if run is None:
            outcome = Outcome(Ending.NEVER_STARTED, detail="not known here")
            self.tell(AttemptEndedReport(self.number(), order.lease_id, order.fence, outcome))
        elif run.outcome is not None:
            self._tell_ended(run)
        elif order.ending == Ending.PREEMPTED and run.runs and run.stop is None:
            if order.lease_id not in self._noticed:
                self._noticed[order.lease_id] = self.agenda.after(NOTICE_MS, lambda: self._halt(run, order))
        else:
            self._halt(run, order)

    def _halt(self, run: SimulatedProcess, order: StopAttemptOrder) -> None:
        noticed = self._noticed.pop(order.lease_id, None)
        if noticed is not None:
            noticed.call_off()
        if run.outcome is None:
            self.machine.halt(run, order.ending, order.detail, order.grace_ms)

    # ------------------------------------------------------------------ attempts

    def run_began(self, run: SimulatedProcess) -> None:
        """The start of what is over a moment later is told along with its end."""
        self.agenda.after(SHORT_MS, lambda: self._tell_started(run) if self.alive and run.runs else None)
        self.guard.look_soon()

    def run_ended(self, run: SimulatedProcess) -> None:
        self._tell_ended(run)
        self.guard.look_soon()

    def tell_paused(self, run: SimulatedProcess, *, paused: bool) -> None:
        """A run stands still for the owner's sake, or goes on."""
        self.tell(
            AttemptPausedReport(self.number(), run.lease_id, run.fence, paused, "its owner is back" if paused else "")
        )

    def _tell_started(self, run: SimulatedProcess) -> None:
        self.tell(AttemptStartedReport(self.number(), run.lease_id, run.fence, 7, ()))

    def _tell_ended(self, run: SimulatedProcess) -> None:
        assert run.outcome is not None
        pid = 7 if run.began_at else 0
        age_ms = self.machine.mark_age_ms(run)
        self.tell(AttemptEndedReport(self.number(), run.lease_id, run.fence, run.outcome, pid, mark_age_ms=age_ms))
