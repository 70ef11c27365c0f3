"""Simulated control plane: the batch settler, agent sessions and reactor that ship, on a disk that may be slow or full.

It drives `BatchSettler` in virtual time as `control/grid.py` does in real time. Between deciding and committing, a
crash can cut it off: it forgets everything but the store, and the next start begins a new epoch from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.agent_sessions import AgentInbox, AgentSessions, Greeting, NodeRegistry, SessionMessage
from distributed_grid.control.batch import BatchSettler, DecidedBatch, DecisionFailed, Entry, Question
from distributed_grid.control.memory_gateway import MemoryGateway
from distributed_grid.domain.events import (
    CheckpointShipped,
    ControlPlaneStarted,
    Event,
    HeartbeatReceived,
    NodeDeclared,
    PolicySet,
    PressureRead,
    TimePassed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.rebalancing import PressureReading, RebalanceRules
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.domain.rows import Row
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import GridError, IllegalStep, StoreFailed
from distributed_grid.ports import Batch
from distributed_grid.reactor import step
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import (
    AttemptEffect,
    Effect,
    MemoryEffect,
    MoveEffect,
    ShipCheckpoint,
    checkpoint_effects,
    pending,
)
from distributed_grid.replay.event_queue import EventQueue, Resume, ScheduledEvent, SimulatedTask, Suspension
from distributed_grid.wire import AgentHello, AgentSide, FromAgent, Heartbeat, MemoryReport, MoveOrder, OwnerRules
from tests.simulation.network import Network, SimulatedLink
from tests.simulation.simulated_moves import SimulatedReconciler, SourceFiles

TICK_MS = 1_000
STEP_MS = 20
"""After so much deciding and rendering a batch is closed, as in `control/grid.py`."""
READ_MS, THINK_MS = 50, 100
"""The cost of a read, and the pause before a reader asks again."""
RETRY_MS, MAX_RETRY_MS = 500, 2_000
MAX_SHIPPING_MS = 3_000
HANGING_MS = 200
"""How often a commit that hangs looks whether the disk goes on."""
T = TypeVar("T")
Then = Callable[[Entry], None]


class Observer(Protocol):
    """Who sees every step of the control plane."""

    def about_to(self, ledger: Ledger, event: Cause, now: int) -> None: ...
    def stepped(self, stepped: StepResult) -> None: ...
    def refused(self, refusal: GridError) -> None: ...
    def committed(self, changes: list[Row]) -> None: ...
    def decided(self, number: int, *, is_read: bool) -> None: ...
    def reloaded(self, ledger: Ledger, now: int, *, anew: bool) -> None: ...


class WaitingEntry(Entry):
    """An entry, and what to do when it is durable, or refused."""

    __slots__ = ("number", "then")

    def __init__(self, event: Cause | None, question: Question | None, then: Then, number: int) -> None:
        super().__init__(event, question)
        self.then = then
        self.number = number


class SimulatedControlPlane:
    """One control plane after another, all on the same store."""

    def __init__(
        self,
        queue: EventQueue,
        random: Random,
        network: Network,
        nodes: tuple[Node, ...],
        *,
        policy: SchedulingPolicy,
        rules: RebalanceRules | None,
        observer: Observer,
        files: SourceFiles,
    ) -> None:
        self.queue = queue
        self.random = random
        self.network = network
        self.nodes = nodes
        self.policy = policy
        self.rules = rules
        self.observer = observer
        self.store = InMemoryStore()
        self.settler = BatchSettler(self.store, self._observed_step)
        self.is_up = False
        self.starts = 0
        self.clock_ahead_ms = 0
        self.disk_is_full = False
        self.disk_hangs = False
        self.disk_slowness = 1
        self.busy_until = 0
        """While it decides and renders, its event loop takes nothing in."""
        self._readers = self._wanted_readers = 0
        self._entered = 0
        self._spent_ms = 0
        self.gateway = SimulatedGateway(self)
        self._files = files
        self._reconciler = SimulatedReconciler(self, files)
        self._inbox: list[WaitingEntry] = []
        self._batch: tuple[list[WaitingEntry], DecidedBatch, Batch | None] | None = None
        self._settling: ScheduledEvent | None = None
        self._read_at = 0
        self._shipping: set[tuple[str, int]] = set()

    @property
    def ledger(self) -> Ledger:
        return self.settler.ledger

    @property
    def now(self) -> int:
        """The grid's own time: it never goes back, and may jump ahead when the machine was restarted."""
        return self.queue.now + self.clock_ahead_ms

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Load what was stored, begin a new epoch, and declare what the config names."""
        self.is_up = True
        self.starts += 1
        self._load(anew=True)
        self._reconciler = SimulatedReconciler(self, self._files)
        self.handle(ControlPlaneStarted(self.ledger.counters.get("epoch", 0) + 1))
        self.handle(PolicySet(self.policy))
        for node in self.nodes:  # what another machine has, its agent said last time, or will
            old = self.ledger.nodes.get(node.name)
            has = node.capacity if not node.hold_ms else NOTHING if old is None else old.capacity
            self.handle(NodeDeclared(replace(node, capacity=has)))
        self._tick(self.starts)
        self._readers = 0
        self.set_readers(self._wanted_readers)

    def set_readers(self, count: int) -> None:
        """Have so many readers, each of which asks again as soon as it is answered."""
        self._wanted_readers = count
        while self.is_up and self._readers < count:
            self._readers += 1
            self._ask(self.starts)

    def _ask(self, life: int) -> None:
        if not self.is_up or life != self.starts:
            return
        if self._readers > self._wanted_readers:
            self._readers -= 1
            return
        self.read(self._render, lambda entry: self._ask_later(life))

    def _ask_later(self, life: int) -> None:
        self.queue.after(self.random.randint(1, THINK_MS), lambda: self._ask(life))

    def _render(self, ledger: Ledger, now: int) -> None:
        """An answer that takes long to render."""
        self._spent_ms += READ_MS

    def crash(self, *, with_machine: bool = False) -> None:
        """Be gone at once; a batch that is being committed becomes durable as a whole or not at all."""
        self.is_up = False
        is_commit_under_way = self._batch is not None and self._batch[2] is not None
        if is_commit_under_way and self.random.random() < 0.5:
            self._make_durable()
        self._batch = None
        if self._settling is not None:
            self._settling.cancel()
        self._inbox.clear()
        self._shipping.clear()
        self.gateway = SimulatedGateway(self)
        self.network.drop_all(silently=with_machine)
        self._load(anew=True)

    def _load(self, *, anew: bool) -> None:
        self.settler.load(self.store.load(), keep_volatile=not anew)
        self.observer.reloaded(self.ledger, self.now, anew=anew)

    def _tick(self, life: int) -> None:
        """Make time pass for the ledger: when something is due, and once a second."""
        if not self.is_up or life != self.starts:
            return
        self.handle(TimePassed(), lambda entry: self._tick_later(life, entry.failure))
        self._reconciler.poll()
        for shipment in checkpoint_effects(self.ledger):
            self._begin_shipping(shipment)
        if self.rules is not None and self.queue.now >= self._read_at + self.rules.interval_ms:
            self._read_at = self.queue.now
            self.handle(PressureRead(self._readings(), self.rules))

    def _tick_later(self, life: int, failure: Exception | None) -> None:
        due = self.ledger.next_due_ms()
        wait = TICK_MS if due is None or failure is not None else min(max(due - self.now, 5), TICK_MS)
        self.queue.after(wait, lambda: self._tick(life))

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, AttemptEffect):
            self.gateway.perform(effect)
        elif isinstance(effect, MemoryEffect):
            self.gateway.memory.perform(effect)
        elif isinstance(effect, MoveEffect):
            self._reconciler.perform(effect)
        elif isinstance(effect, ShipCheckpoint):
            self._begin_shipping(effect)

    def _begin_shipping(self, effect: ShipCheckpoint) -> None:
        """Begin to bring the checkpoint directory that a job waits for."""
        key = (effect.job.uid, effect.attempt.number)
        if key not in self._shipping:
            self._shipping.add(key)
            self.queue.after(self.random.randint(10, MAX_SHIPPING_MS), partial(self._ship, self.starts, effect))

    def _ship(self, life: int, effect: ShipCheckpoint) -> None:
        """One is here, or its node is not waited for; else it is tried again."""
        if not self.is_up or life != self.starts:
            return
        uid, attempt = effect.job.uid, effect.attempt
        self._shipping.discard((uid, attempt.number))
        job, node = self.ledger.jobs.get(uid), self.ledger.nodes.get(attempt.node)
        if self.gateway.is_connected(attempt.node):
            self.handle(
                CheckpointShipped(
                    uid=uid, number=attempt.number, manifest=f"left by {attempt.lease_id}", problem="", files=1, bytes=1
                )
            )
        elif job is not None and job.attempt is not None and (node is None or node.state is NodeState.LOST):
            self.handle(CheckpointShipped(uid=uid, number=attempt.number, problem=f"{attempt.node} is lost"))

    def _readings(self) -> tuple[PressureReading, ...]:
        """How hard every node works: for its owner, by its last heartbeat, and for those it lends to."""
        found = []
        for name, node in self.ledger.nodes.items():
            seen = self.ledger.observations.get(name)
            if seen is None or seen.usage is None:
                found.append(PressureReading(node=name))
                continue
            book, has = self.ledger.claims_on(name), node.capacity
            cpu = min(seen.usage.cpu_busy_milli + 1000 * book.cpu_milli // max(has.cpu_milli, 1), 1000)
            memory = min(1000 * (seen.usage.memory_bytes + book.memory_bytes) // max(has.memory_bytes, 1), 1000)
            found.append(PressureReading(node=name, score=max(cpu, memory), memory=memory, cpu=cpu))
        return tuple(found)

    # ------------------------------------------------------------------ batches

    def handle(self, event: Cause, then: Then | None = None) -> None:
        """Take an event in; `then` hears when it is durable, or why it was refused. Nobody hears of a crash."""
        self._enter(WaitingEntry(event, None, then or _discard_answer, self._next_number()))

    def observe(self, event: HeartbeatReceived) -> None:
        """Take a heartbeat in at once, also while a batch is being committed."""
        self.observer.about_to(self.ledger, event, self.now)
        self.observer.stepped(StepResult(self.settler.observe(event, self.now)))

    def read(self, question: Question, then: Then) -> None:
        """Ask about the ledger; the answer comes in its turn, with what it depends on durable."""
        self._enter(WaitingEntry(None, question, then, self._next_number()))

    def _next_number(self) -> int:
        self._entered += 1
        return self._entered

    def _enter(self, entry: WaitingEntry) -> None:
        self._inbox.append(entry)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._inbox and self._batch is None and (self._settling is None or not self._settling.is_pending):
            self._settling = self.queue.after(0, self._settle)

    def _settle(self) -> None:
        """One batch: decide until that takes long, then commit once."""
        entries, self._inbox = self._in_turn(self._inbox), []
        self._spent_ms = 0
        try:
            batch = self.settler.decide(entries, self.now, is_long=self._is_long)
        except DecisionFailed as failed:
            raise failed.cause from None  # a bug, or a broken invariant: the run ends here
        entries, self._inbox = entries[: batch.decided], entries[batch.decided :]
        for entry in entries:
            self.observer.decided(entry.number, is_read=entry.question is not None)
        self.busy_until = self.queue.now + self._spent_ms
        stored = self.settler.to_commit(batch)
        self._batch = (entries, batch, stored)
        if stored is not None:
            wait_ms = self._spent_ms + self.random.randint(1, 4) * self.disk_slowness
            self._settling = self.queue.after(wait_ms, self._commit)
        elif self._spent_ms:
            self._settling = self.queue.after(self._spent_ms, self._finish)
        else:
            self._finish()

    def _in_turn(self, entries: list[WaitingEntry]) -> list[WaitingEntry]:
        """The entries in the order in which they came."""
        return entries

    def _is_long(self) -> bool:
        return self._spent_ms >= STEP_MS

    def _observed_step(self, ledger: Ledger, event: Cause, now: int) -> StepResult:
        self.observer.about_to(ledger, event, now)
        try:
            stepped = step(ledger, event, now)
        except IllegalStep:
            raise
        except GridError as refusal:
            self.observer.refused(refusal)
            raise
        self.observer.stepped(stepped)
        return stepped

    def _commit(self) -> None:
        assert self._batch is not None
        if self.disk_hangs:
            self._settling = self.queue.after(HANGING_MS, self._commit)
            return
        if not self.disk_is_full:
            self._make_durable()
            self._finish()
            return
        entries, _, _ = self._batch
        self._batch = None
        self._load(anew=False)
        self._inbox = [entry for entry in entries if entry.question is not None] + self._inbox
        for entry in entries:
            if entry.question is None:
                entry.failure = entry.failure or StoreFailed("not done, nothing was changed: the disk is full")
                entry.then(entry)
        self._settle_soon()

    def _make_durable(self) -> None:
        assert self._batch is not None
        _, batch, stored = self._batch
        assert stored is not None
        self.store.commit(stored)
        self.settler.committed(stored)
        self.observer.committed(batch.changes)

    def _finish(self) -> None:
        """A durable decision: act, then answer."""
        assert self._batch is not None
        entries, batch, _ = self._batch
        self._batch = None
        for effect in pending(self.ledger, batch.now, batch.changes):
            self._perform(effect)
        for entry in entries:
            entry.then(entry)
        for event in batch.later:
            self.handle(event)
        self._settle_soon()


def _discard_answer(entry: Entry) -> None:
    """Nobody waits for an event of the control plane's own."""


class SimulatedRegistry(NodeRegistry):
    """A node has what its agent says; its owner wants a fifth of its memory free."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._nodes = {node.name: node for node in nodes}

    def described(self, node: Node, capacity: Capacity) -> Node:
        return replace(node, capacity=capacity)

    def owner_rules(self, name: str) -> OwnerRules:
        memory_bytes = self._nodes[name].capacity.memory_bytes
        return OwnerRules(
            cpu_busy_max_milli=300,
            memory_used_max_milli=800,
            memory_min_bytes=memory_bytes // 5,
            gpu_busy_max_milli=1000,
            gpu_memory_min_bytes=0,
            grace_ms=3_000,
        )


class SimulatedGateway:
    """The agent sessions of one life of the control plane; a crash ends everything under way in them."""

    def __init__(self, control: SimulatedControlPlane) -> None:
        self._control = control
        agents: dict[str, AgentSide] = {}
        self._agents = agents
        self.memory = MemoryGateway(self, agents)
        self._sessions = AgentSessions(self, SimulatedRegistry(control.nodes), agents, self.memory)
        self._late: list[tuple[FromAgent, SimulatedLink]] = []
        self._inboxes: dict[SimulatedLink, AgentInbox] = {}
        self._greeting: dict[SimulatedLink, SimulatedTask] = {}

    def perform(self, effect: AttemptEffect) -> None:
        self._sessions.perform(effect)

    def order_moves(self, orders: Iterable[MoveOrder]) -> None:
        self._sessions.order_moves(orders)

    def is_connected(self, node: str) -> bool:
        """Whether the agent of a node answers."""
        return node in self._agents

    def received(self, message: FromAgent, via: SimulatedLink) -> None:
        """Take in what an agent says, unless something else has the processor now."""
        now = self._control.queue.now
        if now < self._control.busy_until or self._late:
            if not self._late:
                self._control.queue.at(max(self._control.busy_until, now), self._take_late)
            self._late.append((message, via))
        else:
            self._take_in(message, via)

    def _take_late(self) -> None:
        late, self._late = self._late, []
        if self._control.gateway is self and self._control.is_up:
            for message, via in late:
                if not via.is_over:
                    self._take_in(message, via)

    def _take_in(self, message: FromAgent, via: SimulatedLink) -> None:
        """Answer at once what can be, the rest goes through its inbox."""
        if not isinstance(message, SessionMessage | MemoryReport):
            return
        if isinstance(message, AgentHello | Heartbeat):
            self._sessions.answer(message, via)
        is_idle = via not in self._inboxes
        inbox = self._inboxes.setdefault(via, AgentInbox())
        inbox.put(message)
        if is_idle:
            self._process_inbox(inbox, via)

    def gone(self, via: SimulatedLink) -> None:
        self._sessions.gone(via)
        self.memory.gone(via)
        greeting = self._greeting.pop(via, None)
        if greeting is not None:
            greeting.cancel()
            del self._inboxes[via]

    def _process_inbox(self, inbox: AgentInbox, via: SimulatedLink) -> None:
        """Handle what waits, together as far as it may be; then what has come meanwhile."""
        messages = inbox.take_waiting()
        if not messages:
            self._inboxes.pop(via, None)
            if inbox.has_overflowed:
                via.close("")
            return
        left = len(messages)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left and self._inboxes.get(via) is inbox:
                self._greeting.pop(via, None)
                self._process_inbox(inbox, via)

        for message in messages:
            assert isinstance(message, SessionMessage | MemoryReport)
            task = SimulatedTask(self._process(message, via), done)
            if isinstance(message, Greeting):
                self._greeting[via] = task
            task.start()

    async def _process(self, message: SessionMessage | MemoryReport, via: SimulatedLink) -> None:
        try:
            if isinstance(message, SessionMessage):
                await self._sessions.received(message, via)
            else:
                await self.memory.received(message, via)
        except GridError:
            pass  # refused: the daemon logs that

    # ------------------------------------------------------------------ the owner of the ledger, to the sessions

    @property
    def ledger(self) -> Ledger:
        return self._control.ledger

    def observe(self, event: HeartbeatReceived) -> None:
        self._control.observe(event)

    def now_ms(self) -> int:
        return self._control.now

    async def handle(self, event: Event) -> Any:
        return await Suspension(lambda resume: self._control.handle(event, _resuming(resume)))

    async def handle_all(self, events: Iterable[Event]) -> None:
        failures: list[Exception | None] = []

        def begin(resume: Resume) -> None:
            todo = list(events)

            def done(entry: Entry) -> None:
                failures.append(entry.failure)
                if len(failures) == len(todo):
                    resume(None, next(filter(None, failures), None))

            for event in todo:
                self._control.handle(event, done)

        await Suspension(begin)

    async def handle_with_retry(self, event: Event) -> None:
        pause_ms = RETRY_MS
        while True:
            try:
                await self.handle(event)
                return
            except GridError as failure:
                if not failure.retryable:
                    raise
            await Suspension(partial(self._retry_later, pause_ms))
            pause_ms = min(2 * pause_ms, MAX_RETRY_MS)

    async def read(self, question: Callable[[Ledger, int], T]) -> T:
        answer: T = await Suspension(lambda resume: self._control.read(question, _resuming(resume)))
        return answer

    def _retry_later(self, pause_ms: int, resume: Resume) -> None:
        def retry() -> None:
            if self._control.gateway is self and self._control.is_up:
                resume(None, None)

        self._control.queue.after(pause_ms, retry)


def _resuming(resume: Resume) -> Then:
    return lambda entry: resume(entry.answer, entry.failure)
