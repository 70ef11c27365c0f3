"""Simulated moves: who asks for them when, the agents that carry them out at their source, and the reconciler of moves.

A scenario has processes that users have started by hand, and which work is asked to move when. What is asked for
depends on where a job is at that moment, so the request itself is made then. Orders go to agents; files are read over
the links, which takes a while or fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.agent.offloading.guard_core import FINAL_PHASES, STILL_PHASES, GuardRecord
from distributed_grid.agent.outbox import Outbox
from distributed_grid.control.agent_messages import move_order
from distributed_grid.control.batch import Entry
from distributed_grid.domain.events import Event, MoveFailed, MoveFilesSettled, MoveResultsBrought, MoveShipped
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MOVE_PREFIX, Move, MovedProcess, Way
from distributed_grid.domain.processes import ProcessLook
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import JobState, MoveState, NodeState, Step
from distributed_grid.errors import GridError
from distributed_grid.reactor.effects import BringResults, MoveEffect, OrderMoveStep, move_effects
from distributed_grid.wire import MoveOrder
from tests.simulation.guarded_process import FULL, SimulatedGuard, SimulatedJournal, SimulatedOriginal
from tests.simulation.machine import Machine, ScriptedJob

if TYPE_CHECKING:
    from tests.simulation.simulated_control_plane import SimulatedControlPlane

CLOSE_MS = 500
CHANGED = "it has changed since the request"
LOOK_MS = (20, 200, 4_000)
"""A second look is quick, unless a file system is slow."""
UNKNOWN = "nothing is known of this move here"
RETRY_MS = 500
FREEZES_MS = (500, 3_000, 10_000)
WITHIN_MS = (300, 3_000, 20_000)
"""Soon after a request: in a moment, while its files are shipped, or later."""


class PlannedOriginal(Struct, frozen=True):
    """A process that a user starts on a node, and how long it works."""

    at_ms: int
    node: str
    pid: int
    run_ms: int


class PlannedMove(Struct, frozen=True):
    """Somebody asks that a job, or a process (`pid`), goes to another node. `cancel_ms` later they do not want it any
    more, `guard_dies_ms` later its guard is killed, and `change_ms` later the process changes; 0 is never."""

    at_ms: int
    number: int
    target: str
    job: str = ""
    pid: int = 0
    freeze_ms: int = 10_000
    run_ms: int = 5_000
    cancel_ms: int = 0
    guard_dies_ms: int = 0
    change_ms: int = 0

    @property
    def id(self) -> str:
        return f"{MOVE_PREFIX}{self.number}"


def draw_originals(random: Random, nodes: tuple[str, ...], *, until_ms: int) -> list[PlannedOriginal]:
    """A few processes, most of which outlive the busy time."""
    count = random.choice((0, 1, 3, 6))
    return [
        PlannedOriginal(
            random.randrange(until_ms // 2), random.choice(nodes), 1_000 + number, until_ms * number // 2 + 30_000
        )
        for number in range(1, count + 1)
    ]


def draw_moves(
    random: Random, nodes: tuple[str, ...], originals: list[PlannedOriginal], jobs: list[str], *, until_ms: int
) -> list[PlannedMove]:
    """Moves of some of the jobs, and of every original, some of them twice."""
    moves: list[PlannedMove] = []
    for original in originals:
        for _ in range(random.choice((1, 2))):
            at_ms = original.at_ms + random.randrange(1_000, until_ms // 2)
            moves.append(_move(random, nodes, at_ms, len(moves), pid=original.pid))
    for job in random.sample(jobs, min(len(jobs), random.choice((0, 2, 8)))):
        moves.append(_move(random, nodes, random.randrange(until_ms), len(moves), job=job))
    return moves


def _move(
    random: Random, nodes: tuple[str, ...], at_ms: int, number: int, *, job: str = "", pid: int = 0
) -> PlannedMove:
    return PlannedMove(
        at_ms,
        number,
        random.choice(nodes),
        job,
        pid,
        random.choice(FREEZES_MS),
        random.choice((500, 5_000, 40_000)),
        random.randrange(1, random.choice(WITHIN_MS)) if random.random() < 0.25 else 0,
        random.randrange(1, random.choice(WITHIN_MS)) if random.random() < 0.35 else 0,
    )


def with_change(random: Random, move: PlannedMove) -> PlannedMove:
    """The move of a process that may change soon after the request."""
    if not move.pid or random.random() < 0.7:
        return move
    return replace(move, change_ms=random.randrange(1, random.choice(WITHIN_MS)))


def requested_move(plan: PlannedMove, ledger: Ledger, node: str, original: SimulatedOriginal | None) -> Move | None:
    """The requested move at this moment; None if there is nothing to move."""
    asked = Request(id="unused", user="ada", ask=Amounts(500))
    if original is not None:
        return Move(
            id=plan.id,
            user="ada",
            source=node,
            target=_target(plan, ledger, node),
            way=Way.PROCESS_RESTART,
            request=asked,
            requested_at_ms=0,
            process=MovedProcess(original.identity, "data", look=original.look),
            command=ScriptedJob(plan.run_ms).command(),
            freeze_ms=plan.freeze_ms,
        )
    job = ledger.jobs.get(plan.job)
    if job is None:
        return None
    way = Way.RESTART if job.restartable else Way.CHECKPOINT_RESTART
    way = Way.QUEUE_ELSEWHERE if job.state in (JobState.QUEUED, JobState.ASSIGNED) else way
    source = job.attempt.node if job.attempt is not None else min(ledger.nodes)
    return Move(
        id=plan.id,
        user=job.request.user,
        source=source,
        target=_target(plan, ledger, source),
        way=way,
        request=asked,
        requested_at_ms=0,
        job=job.uid,
    )


def _target(plan: PlannedMove, ledger: Ledger, source: str) -> str:
    """Where it is to go: not where it is."""
    return plan.target if plan.target != source else max(name for name in ledger.nodes if name != source)


class SimulatedMoves:
    """The moves whose original is on one machine, as one agent after the other knows them."""

    def __init__(self, machine: Machine, outbox: Outbox, is_alive: Callable[[], bool]) -> None:
        self._machine = machine
        self._outbox = outbox
        self._is_alive = is_alive
        self._decided: set[str] = set()
        self._looks: dict[str, ProcessLook] = {}
        self._commits: set[str] = set()

    def start(self) -> None:
        """Find the moves of the last agent; those that nobody guards get a guard again."""
        for journal in list(self._machine.journals.values()):
            guard = self._machine.guards.get(journal.move_id)
            if guard is None or guard.journal is not journal:
                guard = self._guard(journal)
                guard.resume()
            guard.hear = self._hearing(journal.move_id)
            if journal.records:
                self._recorded(journal.move_id, journal.records[-1])

    def listed(self) -> tuple[str, ...]:
        return tuple(self._machine.journals)

    def carry_out(self, order: MoveOrder) -> None:
        """Carry an order out; whatever comes of it is reported."""
        move_id = order.move_id
        journal = self._machine.journals.get(move_id)
        guard = self._machine.guards.get(move_id)
        if order.step is Step.CLOSE:
            self._close(move_id)
        elif journal is None and order.step is Step.OPEN:
            self._open(order)
        elif journal is None or guard is None:
            self._answer_unknown(order)
        elif order.step is Step.RETURN:
            self._machine.queue.after(self._machine.random.randint(20, 500), lambda: self._return(move_id))
        elif guard.phase in FINAL_PHASES or order.step is Step.OPEN:
            self._report_again(journal)
        else:
            self._order(guard, order)

    def _order(self, guard: SimulatedGuard, order: MoveOrder) -> None:
        """Pass an order on to the guard; a commit waits for the second look."""
        if order.look is not None:
            self._looks[order.move_id] = order.look
        if order.step is Step.COMMIT and guard.phase is MoveState.FROZEN:
            self._commits.add(order.move_id)
            self._check(order.move_id)
        else:
            guard.order(order.step, order.freeze_ms)

    def _check(self, move_id: str) -> None:
        """Look at the original a second time; that takes a moment, in which the agent may end."""
        machine, first = self._machine, self._looks.get(move_id)
        if first is None:
            return

        def done() -> None:
            guard, journal = machine.guards.get(move_id), machine.journals.get(move_id)
            if not self._is_alive() or guard is None or journal is None or guard.phase is not MoveState.FROZEN:
                return
            original = machine.originals.get(journal.identity.pid)
            same = original is not None and original.identity == journal.identity and original.look == first
            guard.order("check", changes="" if same else CHANGED)

        machine.queue.after(machine.random.randint(1, machine.random.choice(LOOK_MS)) * machine.slowness, done)

    def _open(self, order: MoveOrder) -> None:
        identity = order.process
        assert identity is not None
        original = self._machine.originals.get(identity.pid)
        if original is None or original.identity != identity or not original.is_alive:
            self._outbox.moved(order.move_id, MoveState.GONE, detail=f"process {identity.pid} is not there")
        elif self._machine.disk_is_full:
            self._outbox.moved(order.move_id, MoveState.FAILED, detail=FULL)
        else:
            journal = self._machine.journals[order.move_id] = SimulatedJournal(order.move_id, identity)
            self._guard(journal).hear = self._hearing(order.move_id)
            self._outbox.moved(order.move_id, MoveState.OPENED)

    def _guard(self, journal: SimulatedJournal) -> SimulatedGuard:
        original = self._machine.originals.get(journal.identity.pid)
        same = original is not None and original.identity == journal.identity
        guard = self._machine.guard_type(self._machine, journal, original if same else None)
        self._machine.guards[journal.move_id] = guard
        return guard

    def _close(self, move_id: str) -> None:
        """Forget a move: a frozen process continues, a decided one is ended first."""
        guard = self._machine.guards.get(move_id)
        if move_id not in self._machine.journals:
            return
        if guard is not None and guard.phase not in FINAL_PHASES:
            guard.order(Step.CLOSE)
            self._machine.queue.after(CLOSE_MS, lambda: self._close(move_id) if self._is_alive() else None)
            return
        self._machine.journals.pop(move_id, None)
        self._outbox.forget_move(move_id)

    def _answer_unknown(self, order: MoveOrder) -> None:
        if order.step is Step.RETURN:
            self._outbox.moved(order.move_id, MoveState.RETURNED, detail=UNKNOWN)
            return
        identity = order.process
        original = self._machine.originals.get(identity.pid) if identity is not None else None
        is_there = original is not None and original.identity == identity and original.is_alive
        self._outbox.moved(order.move_id, MoveState.THAWED if is_there else MoveState.GONE, detail=UNKNOWN)

    def _return(self, move_id: str) -> None:
        if self._is_alive():
            full = self._machine.disk_is_full
            self._outbox.moved(move_id, MoveState.FAILED if full else MoveState.RETURNED, files=0 if full else 1)

    # ------------------------------------------------------------------ what guards record

    def _hearing(self, move_id: str) -> Callable[[GuardRecord], None]:
        return lambda record: self._recorded(move_id, record) if self._is_alive() else None

    def _report_again(self, journal: SimulatedJournal) -> None:
        if journal.records:
            self._recorded(journal.move_id, journal.records[-1])
        else:
            self._outbox.moved(journal.move_id, MoveState.OPENED)

    def _recorded(self, move_id: str, record: GuardRecord) -> None:
        if record.step is MoveState.FREEZING:
            return
        if record.step is MoveState.FROZEN:
            self._check(move_id)
        elif record.step is MoveState.CHECKED and move_id in self._commits:
            self._machine.guards[move_id].order(Step.COMMIT)
        if record.step in STILL_PHASES:
            self._outbox.moved(move_id, MoveState.FROZEN, left_ms=max(record.until_ms - self._machine.boot_ms, 0))
            return
        if record.step is MoveState.DECIDED:
            self._decided.add(move_id)
            self._outbox.moved(move_id, MoveState.DECIDED)
        elif record.step is MoveState.DEAD:
            if move_id not in self._decided:
                self._outbox.moved(move_id, MoveState.DECIDED)
            self._outbox.moved(move_id, MoveState.DEAD, detail=record.why)
        else:
            self._outbox.moved(move_id, record.step, detail=record.why)


class SourceFiles(NamedTuple):
    """Access to the files of originals and jobs: the progress in the working directory of a move's original on a node
    (None where it cannot be read), and whether a node can be asked for files."""

    progress: Callable[[str, str], int | None]
    reaches: Callable[[str], bool]


class SimulatedReconciler:
    """Performs the effects of moves during one life of the control plane."""

    def __init__(self, control: SimulatedControlPlane, files: SourceFiles) -> None:
        self._control = control
        self._files = files
        self._life = control.starts
        self._in_flight: set[tuple[str, str]] = set()

    def poll(self) -> None:
        """Repeat what is called for and not under way; orders are repeated by the sessions of agents."""
        for effect in move_effects(self._control.ledger):
            if not isinstance(effect, OrderMoveStep):
                self.perform(effect)

    def perform(self, effect: MoveEffect) -> None:
        move = effect.move
        if isinstance(effect, OrderMoveStep):
            self._control.gateway.order_moves([move_order(effect)])
        elif isinstance(effect, BringResults):
            self._begin(move, "results", partial(self._bring, move))
        elif move.state is MoveState.FROZEN:
            self._begin(move, "difference", partial(self._settle, move))
        else:
            self._begin(move, "ahead", partial(self._ship, move))

    def _begin(self, move: Move, what: str, work: Callable[[], None]) -> None:
        key = (move.id, what)
        if key in self._in_flight:
            return
        self._in_flight.add(key)

        def done() -> None:
            self._in_flight.discard(key)
            if self._is_current():
                work()

        delay = self._control.random.choice((20, 200, 2_000)) * self._control.random.randint(1, 3)
        self._control.queue.after(delay, done)

    def _is_current(self) -> bool:
        return self._control.is_up and self._control.starts == self._life

    def _ship(self, move: Move) -> None:
        found = self._files.progress(move.source, move.id)
        if found is not None:
            self._record(MoveShipped(move.id, str(found), 50))

    def _settle(self, move: Move) -> None:
        found = self._files.progress(move.source, move.id)
        failed = MoveFailed(move.id, "what had changed could not be shipped")
        self._record(failed if found is None else MoveFilesSettled(move.id, str(found), 1))

    def _bring(self, move: Move) -> None:
        node = self._control.ledger.nodes.get(move.ran_on)
        if self._files.reaches(move.ran_on):
            self._record(MoveResultsBrought(move.id, "results"))
        elif node is None or node.state in (NodeState.LOST, NodeState.LEFT):
            self._record(MoveResultsBrought(move.id, problem=f"its files are lost with {move.ran_on}"))

    def _record(self, event: Event) -> None:
        def then(entry: Entry) -> None:
            if isinstance(entry.failure, GridError) and entry.failure.retryable:
                self._control.queue.after(RETRY_MS, lambda: self._record(event))

        if self._is_current():
            self._control.handle(event, then)
