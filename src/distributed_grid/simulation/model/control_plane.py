"""The simulated control plane: the real reactor on a real ledger, with a disk that takes its time and may be full.

Does what `control/grid.py` promises, in virtual time: a batch is decided, then
committed, and only then acted upon and answered. Whatever happens in between can be cut off by a crash.

Rule 1: nobody hears of, and nothing acts on, what is not durable.
Rule 2: a crash forgets everything but the store; the next one begins a new epoch from there.
Rule 3: what cannot be made durable has not happened: the stored state is loaded, and those who asked ask again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec.structs import replace

from distributed_grid.adapters.stores.memory import MemoryStore
from distributed_grid.control.batch import batch_of
from distributed_grid.domain.events import (
    ControlPlaneStarted,
    Event,
    JobSubmitted,
    LeaseAsked,
    NodeDeclared,
    PolicySet,
    PressureRead,
    TimePassed,
)
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import PressureReading, RebalanceRules
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.rows import VOLATILE, Row, decode_row
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.errors import GridError, IllegalStep, StoreFailed
from distributed_grid.reactor import Record, pending_for, step
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.simulation.model.agent_gateway import SimulatedGateway
from distributed_grid.simulation.model.event_queue import EventQueue, ScheduledEvent
from distributed_grid.simulation.model.network import Network

TICK_MS = 1_000
Then = Callable[[GridError | None], None]


class Observer(Protocol):
    """Who sees every step of the control plane."""

    def about_to(self, ledger: Ledger, event: Event, now: int) -> None: ...
    def stepped(self, stepped: StepResult) -> None: ...
    def refused(self, refusal: GridError) -> None: ...
    def committed(self, changes: list[Row]) -> None: ...
    def reloaded(self, ledger: Ledger, now: int, *, anew: bool) -> None: ...


class _Entry:
    """An event on its way, and what to do when it is durable, or refused."""

    __slots__ = ("event", "failure", "then")

    def __init__(self, event: Event, then: Then) -> None:
        self.event = event
        self.then = then
        self.failure: GridError | None = None


class ControlPlane:
    """One control plane after another, all on the same store."""

    def __init__(
        self,
        agenda: EventQueue,
        random: Random,
        network: Network,
        nodes: tuple[Node, ...],
        *,
        policy: SchedulingPolicy,
        rules: RebalanceRules | None,
        observer: Observer,
    ) -> None:
        self.agenda = agenda
        self.random = random
        self.network = network
        self.nodes = nodes
        self.policy = policy
        self.rules = rules
        self.observer = observer
        self.store = MemoryStore()
        self.ledger = Ledger()
        self.is_up = False
        self.starts = 0
        self.clock_ahead_ms = 0
        self.disk_is_full = False
        self.disk_slowness = 1
        self.desk = SimulatedGateway(self)
        self._inbox: list[_Entry] = []
        self._batch: tuple[list[_Entry], list[Row], list[Record]] | None = None
        self._over: set[str] = set()
        self._settling: ScheduledEvent | None = None
        self._seq = 0
        self._read_at = 0

    @property
    def now(self) -> int:
        """The grid's own time: it never goes back, and may jump ahead when the machine was restarted."""
        return self.agenda.now + self.clock_ahead_ms

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Load what was stored, begin a new epoch, and declare what the config names."""
        self.is_up = True
        self.starts += 1
        self._load(volatile=[], anew=True)
        self.handle(ControlPlaneStarted(self.ledger.counters.get("epoch", 0) + 1))
        self.handle(PolicySet(self.policy))
        for node in self.nodes:  # what another machine has, its agent said last time, or will
            old = self.ledger.nodes.get(node.name)
            has = node.capacity if not node.hold_ms else NOTHING if old is None else old.capacity
            self.handle(NodeDeclared(replace(node, capacity=has)))
        self._tick(self.starts)

    def crash(self, *, with_machine: bool = False) -> None:
        """Be gone at once; a batch that is being committed becomes durable as a whole or not at all."""
        self.is_up = False
        if self._batch is not None and self.random.random() < 0.5:
            self._make_durable()
        self._batch = None
        if self._settling is not None:
            self._settling.call_off()
        self._inbox.clear()
        self.desk = SimulatedGateway(self)
        self.network.drop_all(silently=with_machine)
        self._load(volatile=[], anew=True)

    def _load(self, volatile: list[Row], *, anew: bool) -> None:
        loaded = self.store.load()
        self._seq = loaded.last_event_seq
        self.ledger = Ledger(decode_row(row.kind, row.blob) for row in loaded.live if row.blob is not None)
        self.ledger.apply(volatile)
        self.observer.reloaded(self.ledger, self.now, anew=anew)

    def _tick(self, life: int) -> None:
        """Make time pass for the ledger: when something is due, and once a second."""
        if not self.is_up or life != self.starts:
            return
        self.handle(TimePassed())
        if self.rules is not None and self.agenda.now >= self._read_at + self.rules.interval_ms:
            self._read_at = self.agenda.now
            self.handle(PressureRead(self._readings(), self.rules))
        due = self.ledger.next_due_ms()
        wait = TICK_MS if due is None else min(max(due - self.now, 5), TICK_MS)
        self.agenda.after(wait, lambda: self._tick(life))

    def _readings(self) -> tuple[PressureReading, ...]:
        """How hard every node works: for its owner, by its last heartbeat, and for those it lends to."""
        found = []
        for name, node in self.ledger.nodes.items():
            seen = self.ledger.sightings.get(name)
            if seen is None or seen.usage is None:
                found.append(PressureReading(name))
                continue
            book, has = self.ledger.book(name), node.capacity
            cpu = min(seen.usage.cpu_busy_milli + 1000 * book.cpu_milli // max(has.cpu_milli, 1), 1000)
            memory = min(1000 * (seen.usage.memory_bytes + book.memory_bytes) // max(has.memory_bytes, 1), 1000)
            found.append(PressureReading(name, max(cpu, memory), memory, cpu))
        return tuple(found)

    # ------------------------------------------------------------------ batches

    def handle(self, event: Event, then: Then | None = None) -> None:
        """Take an event in; `then` hears when it is durable, or why it was refused. Nobody hears of a crash."""
        self._inbox.append(_Entry(event, then or _nobody_waits))
        if self._batch is None and (self._settling is None or self._settling.deed is None):
            self._settling = self.agenda.after(0, self._settle)

    def _settle(self) -> None:
        """One batch: decide all, then commit once."""
        entries, self._inbox = self._inbox, []
        changes: list[Row] = []
        records: list[Record] = []
        self._batch = (entries, changes, records)
        self._over.clear()
        for entry in entries:
            if self._is_over(entry.event):
                continue
            self.observer.about_to(self.ledger, entry.event, self.now)
            try:
                stepped = step(self.ledger, entry.event, self.now)
            except IllegalStep:
                raise  # a bug, not a refusal
            except GridError as refusal:
                entry.failure = refusal
                self.observer.refused(refusal)
                continue
            changes += stepped.changes
            records += stepped.records
            self._over |= {row.request.id for row in stepped.changes if isinstance(row, Lease | Job) and row.is_over}
            self.observer.stepped(stepped)
        if records or any(row.kind not in VOLATILE for row in changes):
            self._settling = self.agenda.after(self.random.randint(1, 4) * self.disk_slowness, self._commit)
        else:
            self._finish()

    def _is_over(self, event: Event) -> bool:
        """Whether this is a request that has had its outcome; asked again, it gets the recorded one."""
        if not isinstance(event, LeaseAsked | JobSubmitted) or event.request.id in self.ledger.by_request:
            return False
        if isinstance(event, LeaseAsked) and event.again:
            return False
        if event.request.id in self._over:
            return True  # in this very batch
        kind = Lease.kind if isinstance(event, LeaseAsked) else Job.kind
        return bool(self.store.ended(kind, request_id=event.request.id, limit=1))

    def _commit(self) -> None:
        assert self._batch is not None
        if not self.disk_is_full:
            self._make_durable()
            self._finish()
            return
        entries, _, _ = self._batch
        self._batch = None
        self._load([row for row in self.ledger.rows() if row.kind in VOLATILE], anew=False)
        for entry in entries:
            entry.then(entry.failure or StoreFailed("not done, nothing was changed: the disk is full"))
        self._go_on()

    def _make_durable(self) -> None:
        assert self._batch is not None
        _, changes, records = self._batch
        batch = batch_of(changes, records, self.now, self._seq)
        self.store.commit(batch)
        self._seq += len(batch.events)
        self.observer.committed(changes)

    def _finish(self) -> None:
        """What was decided is durable: act, then answer."""
        assert self._batch is not None
        entries, changes, _ = self._batch
        self._batch = None
        self.desk.perform(pending_for(self.ledger, changes))
        for entry in entries:
            entry.then(entry.failure)
        self._go_on()

    def _go_on(self) -> None:
        if self._inbox and self._batch is None and (self._settling is None or self._settling.deed is None):
            self._settling = self.agenda.after(0, self._settle)


def _nobody_waits(failure: GridError | None) -> None:
    """An event of the control plane's own."""
