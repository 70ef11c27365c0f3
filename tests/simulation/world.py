"""Simulated world of one scenario: machines, a control plane, users and faults.

A run has two parts: a stretch with faults, and a quiet one in which everything has to come to its end.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter as Tally
from collections import deque
from functools import partial
from pathlib import PurePath

from msgspec import Struct

from distributed_grid.agent.offloading.guard_core import FINAL_PHASES
from distributed_grid.agent.orders import OrderExecutor
from distributed_grid.domain.events import (
    BlockAsked,
    Event,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    MoveCancelled,
    MoveRequested,
)
from distributed_grid.errors import GridError
from distributed_grid.replay.event_queue import EventQueue
from tests.simulation.faults import Fault, FaultInjector
from tests.simulation.invariant_checker import InvariantChecker, InvariantViolated, Note
from tests.simulation.machine import Machine
from tests.simulation.network import Network, SimulatedLink, SimulatedUplink
from tests.simulation.scenario import Scenario, UserRequest
from tests.simulation.simulated_agent import SimulatedAgent
from tests.simulation.simulated_control_plane import SimulatedControlPlane
from tests.simulation.simulated_moves import PlannedMove, PlannedOriginal, SourceFiles, requested_move
from tests.simulation.simulated_tasks import SimulatedTask

ANSWER_MS = 3_000
"""Who has not heard back by then asks again."""
USE_MS = 2_000
"""When whoever has got a block first writes to it."""
STOP_MS = 60_000
"""What a stop takes besides the grace of the job, when nothing breaks: a lost agent is there again by then."""
LAST = 80


class RunLog:
    """Log of a run: its last lines, or all when asked to, and a fingerprint of all of them."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self._lines: deque[str] = deque(maxlen=None if keep_all else LAST)
        self._hash = hashlib.sha256()

    def note(self, at_ms: int, who: str, what: str) -> None:
        line = f"{at_ms / 1000:9.3f}  {who:<8}  {what}"
        self._lines.append(line)
        self._hash.update(line.encode() + b"\n")

    @property
    def lines(self) -> list[str]:
        return list(self._lines)

    @property
    def fingerprint(self) -> str:
        """The same for the same history, to the letter."""
        return self._hash.hexdigest()[:16]


BEGIN_MS = 1_000_000_000
"""The grid's time at the beginning of every run; 0 has a meaning of its own in the ledger."""
STEP_MS = 2_000
SETTLE_MS = 240_000
"""What the slowest of the rest takes: nodes that begin to lend again, agents that look for their control plane."""


class RunReport(Struct, frozen=True):
    """What became of one seed; `violated` names the invariant that did not hold, if any."""

    seed: int
    violated: str
    detail: str
    last: list[str]
    fingerprint: str
    visited: dict[str, int]
    accepted: int
    refused: int
    runs: int
    faults: dict[str, int]
    steps: int
    checks: dict[str, int]
    simulated_ms: int


class _Asked:
    """A request that has no answer yet."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.is_scheduled = self.is_answered = False


class Users:
    """Simulated users: each of their requests is sent, under the same id, until it is answered. The grid must keep
    accepted requests from then on."""

    def __init__(
        self, queue: EventQueue, control: SimulatedControlPlane, checker: InvariantChecker, note: Note, quiet_at: int
    ) -> None:
        self._queue = queue
        self._control = control
        self._checker = checker
        self._note = note
        self._quiet_at = quiet_at
        self._graces: dict[str, int] = {}
        self.accepted = self.refused = self.waiting = 0

    def plan(self, requests: list[UserRequest], begin_ms: int) -> None:
        """Have each request sent at its moment."""
        for request in requests:
            at_ms = begin_ms + request.at_ms
            event = request.event_at(at_ms)
            if isinstance(event, JobSubmitted):
                self._checker.allowed_runs[event.request.id] = 1 + event.retries
                self._graces[event.request.id] = event.command.grace_ms
            self._plan(at_ms, _Asked(event))

    def submit(self, event: Event) -> None:
        """Send an event now, and again until it is answered."""
        self._plan(self._queue.now, _Asked(event))

    def _plan(self, at_ms: int, asked: _Asked) -> None:
        self.waiting += not asked.is_scheduled
        asked.is_scheduled = True
        self._queue.at(at_ms, lambda: self._ask(asked))

    def _ask(self, asked: _Asked) -> None:
        if asked.is_answered:
            return
        if self._control.is_up:
            self._control.handle(asked.event, lambda entry: self._answered(asked, entry.failure))
        self._plan(self._queue.now + ANSWER_MS, asked)

    def _answered(self, asked: _Asked, failure: Exception | None) -> None:
        if asked.is_answered or (isinstance(failure, GridError) and failure.retryable):
            return
        asked.is_answered = True
        self.waiting -= 1
        event = asked.event
        if isinstance(event, BlockAsked) and failure is None:
            self._queue.after(USE_MS, lambda: self._checker.use_block(event.id))
        if isinstance(event, JobCancelled) and failure is None:
            self._stop_acknowledged(event.uid)
        if not isinstance(event, JobSubmitted | LeaseAsked):
            return
        if failure is None:
            self.accepted += 1
            self._checker.acknowledged[event.request.id] = None
        else:
            self.refused += 1
            self._note(event.request.user, f"{event.request.id} is refused: {failure}")

    def _stop_acknowledged(self, uid: str) -> None:
        """A job is cancelled for all its user knows: when nothing keeps it from that any more it soon is."""
        self._checker.stop_acknowledged(uid)
        over_at = max(self._queue.now, self._quiet_at) + self._graces[uid] + STOP_MS
        self._queue.at(over_at, lambda: self._checker.stop_is_over(uid))


class World:
    """Everything of one scenario; broken machines and order executors can be put in, to see that it is noticed."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        machine: type[Machine] = Machine,
        orders: type[OrderExecutor[SimulatedTask]] = OrderExecutor,
        control: type[SimulatedControlPlane] = SimulatedControlPlane,
        keep_all: bool = False,
    ) -> None:
        self.scenario = scenario
        self.queue = EventQueue(BEGIN_MS)
        self.log = RunLog(keep_all=keep_all)
        self.injector = FaultInjector(self)
        self.checker = InvariantChecker(self.note, BEGIN_MS, self.injector.undisturbed_ms)
        random = scenario.random
        names = tuple(node.name for node in scenario.nodes)
        self.network = Network(self.queue, random, names)
        if scenario.local:
            route = self.network.routes[scenario.local]
            route.min_delay_ms = route.max_delay_ms = 0
        self.control = control(
            self.queue,
            random,
            self.network,
            scenario.nodes,
            policy=scenario.policy,
            rules=scenario.rules,
            observer=self.checker,
            files=SourceFiles(self._progress, self._reaches),
        )
        self.users = Users(self.queue, self.control, self.checker, self.note, BEGIN_MS + scenario.quiet_ms)
        self.machines = {node.name: machine(node, self.queue, random, self.checker) for node in scenario.nodes}
        for one in self.machines.values():
            one.neighbours = self.machines
        self.checker.machines = self.checker.moves.machines = self.machines
        self.agents: dict[str, SimulatedAgent] = {}
        self._orders = orders

    def note(self, who: str, what: str) -> None:
        self.log.note(self.queue.now - BEGIN_MS, who, what)

    def run(self) -> RunReport:
        """Simulate the whole scenario; a violated invariant, or a bug, ends it."""
        try:
            self._simulate()
        except InvariantViolated as broken:
            return self._report(broken.invariant, broken.detail)
        except Exception as bug:  # whatever a decision raises that is no refusal
            place = traceback.extract_tb(bug.__traceback__)[-1]
            where = f"{PurePath(place.filename).name}, line {place.lineno}"
            return self._report("nothing fails but by refusal", f"{bug!r} in {where}")
        return self._report("", "")

    def _simulate(self) -> None:
        self.control.start()
        for name in self.machines:
            self.start_agent(name)
        self.users.plan(self.scenario.requests, BEGIN_MS)
        for original in self.scenario.originals:
            self._plan_original(original)
        for move in self.scenario.moves:
            self.queue.at(BEGIN_MS + move.at_ms, partial(self._request_move, move))
        for fault in self.scenario.faults:
            self._plan(fault)
        quiet = BEGIN_MS + self.scenario.quiet_ms
        while self.queue.run_next(quiet):
            pass
        self.note("world", "everything works again")
        end = quiet + self._settle_ms()
        while self.queue.now < end and not self._is_settled:
            stop = min(self.queue.now + STEP_MS, end)
            while self.queue.run_next(stop):
                pass
        self.checker.settled(self.control.now)

    def _plan(self, fault: Fault) -> None:
        self.queue.at(BEGIN_MS + fault.at_ms, lambda: self.injector.begin(fault))
        self.queue.at(BEGIN_MS + fault.at_ms + fault.lasts_ms, lambda: self.injector.end(fault))

    def _settle_ms(self) -> int:
        """How long what is left may take when nothing breaks any more: all of it twice, one after the other."""
        ledger = self.control.ledger
        left = sum(request.lasts_ms for request in self.scenario.requests if request.uid in ledger.by_request)
        held = [lease.ends_at_ms - self.control.now for lease in ledger.leases.values() if lease.ends_at_ms]
        left += sum(move.run_ms + 20_000 for move in self.scenario.moves)
        return SETTLE_MS + 3 * max(node.hold_ms for node in self.scenario.nodes) + 2 * left + max([0, *held])

    @property
    def _is_settled(self) -> bool:
        return not self.users.waiting and self.checker.unsettled(self.control.now) is None

    # ------------------------------------------------------------------ moves

    def _plan_original(self, planned: PlannedOriginal) -> None:
        start = partial(self.machines[planned.node].start_original, planned.pid, planned.run_ms)
        self.queue.at(BEGIN_MS + planned.at_ms, start)

    def _request_move(self, planned: PlannedMove) -> None:
        """A user asks to move something, as it is now; later they may think again, and its guard may be killed."""
        node = next((name for name, one in self.machines.items() if planned.pid in one.originals), "")
        original = self.machines[node].originals[planned.pid] if node else None
        if planned.pid and (original is None or not original.is_alive):
            return
        move = requested_move(planned, self.control.ledger, node, original) if self.control.is_up else None
        if move is None:
            return
        self.users.submit(MoveRequested(move))
        if planned.cancel_ms:
            self.queue.after(planned.cancel_ms, lambda: self.users.submit(MoveCancelled(move.id, move.user)))
        if planned.pid and planned.guard_dies_ms:
            self.queue.after(planned.guard_dies_ms, lambda: self.machines[node].kill_guard(move.id))
        if original is not None and planned.change_ms:
            self.queue.after(planned.change_ms, original.change)

    def _progress(self, node: str, move_id: str) -> int | None:
        """Progress of a move's original, read over the link of its node."""
        machine = self.machines[node]
        journal = machine.journals.get(move_id)
        original = machine.originals.get(journal.identity.pid) if journal is not None else None
        if journal is None or original is None or original.identity != journal.identity or not self._reaches(node):
            return None
        return original.worked_ms if original.is_alive and journal.phase not in FINAL_PHASES else None

    def _reaches(self, node: str) -> bool:
        """Whether the agent of a node can be asked for files."""
        agent = self.agents.get(node)
        return self.network.routes[node].is_open and agent is not None and agent.alive

    # ------------------------------------------------------------------ agents and their links

    def dial(self, node: str, uplink: SimulatedUplink) -> SimulatedLink | None:
        """A link for an agent, where the control plane is up and can be reached."""
        if not self.control.is_up or not self.network.routes[node].is_open:
            return None
        return self.network.connect(node, uplink, self.control.gateway)

    def start_agent(self, name: str) -> None:
        """Start the agent of a node, unless something keeps it down."""
        alive = self.agents.get(name)
        if (alive is not None and alive.alive) or self.injector.keeps_down(name):
            return
        if name == self.scenario.local and not self.control.is_up:
            return
        self.note(name, "the agent starts")
        self.agents[name] = SimulatedAgent(self.machines[name], self, self._orders)
        self.agents[name].start()

    def end_agent(self, name: str, *, with_machine: bool) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.alive:
            agent.die(with_machine=with_machine)

    def join_again(self, name: str) -> None:
        """The node joins with an empty directory: its old agent is cut off, and its jobs run on until their hold is
        over."""
        self.end_agent(name, with_machine=False)
        self.network.cut(name)
        self.machines[name].lose_directory()
        if self.machines[name].is_on:
            self.start_agent(name)

    # ------------------------------------------------------------------ the end

    def _report(self, violated: str, detail: str) -> RunReport:
        return RunReport(
            self.scenario.seed,
            violated,
            detail,
            self.log.lines,
            self.log.fingerprint,
            dict(self.checker.visited),
            self.users.accepted,
            self.users.refused,
            len(self.checker.ran),
            dict(Tally(str(fault.kind) for fault in self.scenario.faults)),
            self.checker.steps,
            dict(self.checker.held),
            self.queue.now - BEGIN_MS,
        )
