"""Invariant checker: holds every invariant against every step and against what really happens on the machines.

Checked when                    what
- a process begins              one run at a time of a job; an attempt runs once; what runs on a machine is within what
                                its node may lend; its lease is held there under this very fence; its hold is not over
- a hold runs out               something kept its agent from renewing it, and be it only for a moment
- a step of the control plane   all of `invariants.py`, the ledger's own; under a lease that ended nothing runs;
                                an attempt ends once, and as it did on its machine; a job is not run more often than was
                                asked for
- a commit, a restart           nothing that was acknowledged is lost; a job ends once; what is stored is the ledger
- a moved process's job begins   nothing of that process is left, and the job has all that it had written
- a process is frozen           it goes on, or is ended, when its freeze lease is over
- a job is cancelled            after the answer it gets no other attempt, it ends as cancelled, and soon after the last
                                fault nothing of it runs
- a process ends               its hold is not over for longer than the watchers of its node take
- a job fills a disk            it is ended within seconds, and no other job is
- an event is decided           before every read that came later
- everything is quiet           whatever was submitted is over, or waits for a reason that still holds
"""

from __future__ import annotations

import traceback
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from distributed_grid.domain.blocks import Block
from distributed_grid.domain.events import MoveReported
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.jobs import Ending, Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move
from distributed_grid.domain.nodes import NodeObservation
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState
from distributed_grid.errors import GridError
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.jobs import DISPLACED
from distributed_grid.scheduling.queue.reasons import never_fits, texts, why_not_now
from tests.simulation.invariants import INVARIANTS, REBUILDING_INVARIANTS, LedgerWatch, ObservedStep
from tests.simulation.machine import Machine, SimulatedProcess
from tests.simulation.move_invariants import MoveInvariants

EVERY = 16
"""A step that changes no more than an observation leaves the ledger as it was: it is built anew every so many times."""
RECONNECT_MS = 45_000
"""Within this time after the last disturbance an agent has a link again, and its first heartbeat is answered."""
WATCHED_MS = 2_000
"""The grace of a hold: the control plane lends again when that is over, too."""
STOPPED = "a stop that was acknowledged is carried out"
_INVARIANTS = [(invariant.__name__.replace("_", " "), invariant) for invariant in INVARIANTS]
_QUIET_INVARIANTS = [(name, invariant) for name, invariant in _INVARIANTS if invariant not in REBUILDING_INVARIANTS]
Note = Callable[[str, str], None]
"""Takes down what happened where."""


class InvariantViolated(BaseException):
    """An invariant does not hold. No code under test can take it for one of its own failures."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class InvariantChecker:
    """Sees everything that happens, and raises at the first moment a invariant is broken."""

    def __init__(self, note: Note, now: int, undisturbed_ms: Callable[[str], int]) -> None:
        self._note = note
        self._undisturbed_ms = undisturbed_ms
        self._watch = LedgerWatch(now)
        self._moment: ObservedStep | None = None
        self.running: dict[str, tuple[Machine, SimulatedProcess]] = {}
        self.ran: dict[str, SimulatedProcess] = {}
        self.acknowledged: dict[str, None] = {}
        self.over: dict[str, None] = {}
        self.allowed_runs: dict[str, int] = {}
        self.machines: Mapping[str, Machine] = {}
        self.liars: set[str] = set()
        """Nodes whose agents have lied: what really runs there is nobody's fault but theirs."""
        self.stopped: dict[str, tuple[str, Ending]] = {}
        """Jobs whose cancellation was acknowledged before they were over, with the attempt that may still begin, and
        how they end: one that was being stopped for good already ends as that."""
        self.moves = MoveInvariants(self._hold, self.liars)
        self._last_read = 0
        self.steps = 0
        self.held: Tally[str] = Tally()
        """How often each invariant was checked."""
        self.visited: Tally[str] = Tally()
        """How often something of each type was told to the ledger, or by it."""

    def _hold(self, true: bool, invariant: str, detail: str) -> None:
        self.held[invariant] += 1
        if not true:
            raise InvariantViolated(invariant, detail)

    # ------------------------------------------------------------------ on the machines

    def began(self, machine: Machine, run: SimulatedProcess) -> None:
        """A process begins: nothing else may make a second run of a job, or fill a machine beyond its limits."""
        name, lease_id = machine.node.name, run.lease_id
        self._note(name, f"{lease_id} begins under fence {run.fence:x}")
        if name in self.liars:
            self.ran[lease_id] = run
            self.running[lease_id] = (machine, run)
            return
        self.moves.began(run)
        self._hold(lease_id not in self.ran, "an attempt runs once", f"{lease_id} runs again, on {name}")
        job = lease_id.rpartition(".")[0]
        for other in self._honest():
            self._hold(
                other.rpartition(".")[0] != job,
                "a job runs once at a time",
                f"{lease_id} begins on {name} while {other} runs on {self._where(other)}",
            )
        may_begin, _ = self.stopped.get(job, (lease_id, None))
        self._hold(may_begin == lease_id, STOPPED, f"{lease_id} begins on {name} after that")
        self.ran[lease_id] = run
        self.running[lease_id] = (machine, run)
        claims = [one.claim for there, one in self.running.values() if there is machine]
        excess = NodeClaims(claims).excess_over(machine.node.lendable)
        excess = excess or shared_though_exclusive(claims, machine.node.lendable)
        self._hold(excess is None, "a machine runs no more than its node lends", f"{name}: {excess}")
        held = not run.order.hold_ms or machine.boot_ms < machine.holds_until(run)
        self._hold(held, "nothing begins when its hold is over", f"{lease_id} on {name}")
        lease = self._watch.ledger.leases.get(lease_id)
        self._hold(lease is not None and lease.holds, "what runs is held in the ledger", f"{lease_id} on {name} is not")
        assert lease is not None
        self._hold(
            lease.fence == run.fence, "no stale fence acts", f"{lease_id}: {run.fence:x}, held under {lease.fence:x}"
        )
        self._hold(
            lease.node == name, "what runs is held in the ledger", f"{lease_id} runs on {name}, held on {lease.node}"
        )

    def ended(self, machine: Machine, run: SimulatedProcess) -> None:
        self._note(machine.node.name, f"{run.lease_id} is gone")
        if run.order.hold_ms and machine.is_on and machine.node.name not in self.liars:
            late_ms = machine.boot_ms - machine.holds_until(run)
            self._hold(late_ms < WATCHED_MS, "a command is gone soon after its hold", f"{run.lease_id}: {late_ms} ms")
        self.running.pop(run.lease_id, None)  # what a liar was ordered to run may have begun twice

    def _honest(self) -> list[str]:
        """What runs where the agent has never lied."""
        return [one for one, (machine, _) in self.running.items() if machine.node.name not in self.liars]

    def hold_expired(self, machine: Machine, run: SimulatedProcess) -> None:
        """A process is stopped because its hold is over: something must have kept its agent from renewing it."""
        undisturbed = self._undisturbed_ms(machine.node.name)
        self._hold(
            undisturbed < run.order.hold_ms + RECONNECT_MS,
            "a healthy agent's holds are renewed",
            f"{run.lease_id} on {machine.node.name}, undisturbed for {undisturbed} ms",
        )

    def flood_outlasted(self, machine: Machine, run: SimulatedProcess) -> None:
        """A command fills the disk of its node, though the agent there had time to end it."""
        ended = machine.node.name in self.liars
        self._hold(ended, "a job that fills the disk of its node is ended", f"{run.lease_id} on {machine.node.name}")

    def decided(self, number: int, *, is_read: bool) -> None:
        """An entry of the control plane's inbox was decided; they are numbered as they came."""
        if is_read:
            self._last_read = number
            return
        late = f"entry {number} after the read {self._last_read}"
        self._hold(self._last_read < number, "no read that came later keeps a request waiting", late)

    def _where(self, lease_id: str) -> str:
        return self.running[lease_id][0].node.name

    def stop_acknowledged(self, uid: str) -> None:
        """Somebody was answered that a job is cancelled."""
        job = self._watch.ledger.jobs.get(uid)
        if job is not None:
            self.stopped[uid] = (job.lease_id, job.stop.ending if job.stop is not None else Ending.CANCELLED)

    def stop_is_over(self, uid: str) -> None:
        """Time enough has passed since then, and since the last fault."""
        left = [one for one in self.running if one.rpartition(".")[0] == uid]
        where = ", ".join(f"{one} on {self._where(one)}" for one in left)
        self._hold(uid not in self.stopped or not left, STOPPED, f"{where} still runs")

    def use_block(self, block_id: str) -> None:
        """Whoever has got a block writes to it: from now on its copies are really there."""
        block = self._watch.ledger.blocks.get(block_id)
        for place in block.places if block is not None else ():
            memory = self.machines[place.node].memory
            if place.incarnation and place.incarnation == memory.incarnation:
                memory.put(place.copy)

    def _lost_blocks_are_lost(self, before: Iterable[Row], after: Iterable[Row]) -> None:
        """A block is called lost when no machine has a copy of it any more."""
        lost = [row for row in after if isinstance(row, Block) and row.lost]
        known = {row.id: row for row in before if isinstance(row, Block)} if lost else {}
        for row in lost:
            if not known.get(row.id, row).lost:
                for place in known[row.id].places:
                    machine = self.machines[place.node]
                    machine.check_memory_hold()
                    there = (
                        place.copy in machine.memory.on_disk
                        if place.on_disk
                        else place.copy in machine.memory.in_memory
                    )
                    same = place.on_disk or machine.memory.incarnation == place.incarnation
                    is_there = there and same and machine.is_on and place.node not in self.liars
                    self._hold(not is_there, "what is called lost is lost", f"{place.copy} is still on {place.node}")

    # ------------------------------------------------------------------ in the control plane

    def about_to(self, ledger: Ledger, event: Cause, now: int) -> None:
        """An event is about to be decided."""
        self._watch.ledger, self._watch.now = ledger, now
        self._moment = self._watch.begin(event)

    def stepped(self, stepped: StepResult) -> None:
        """It has been decided and applied."""
        for record in stepped.records:
            self.visited[record.type] += 1
            self._note(record.node or "grid", f"{record.type} {record.subject} {record.reason}".rstrip())
        for row in stepped.changes:
            if isinstance(row, Lease) and row.is_over:
                running = row.id in self._honest()
                self._hold(
                    not running, "what the ledger calls free is free", f"{row.id} ended ({row.end}), and still runs"
                )
            elif isinstance(row, Job):
                self._attempts_end_once(row)
                if row.is_over and row.uid in self.stopped and row.outcome is not None:
                    ending = row.outcome.ending
                    self._hold(ending is self.stopped[row.uid][1], STOPPED, f"{row.uid} is over, but {ending}")
        self._check_step(stepped)

    def refused(self, refusal: GridError) -> None:
        """It was refused."""
        self._check_step(refusal)

    def _check_step(self, came_of_it: StepResult | GridError) -> None:
        """Hold every invariant of the ledger against what has just happened."""
        moment, self._moment = self._moment, None
        assert moment is not None
        self.steps += 1
        self.visited[type(moment.event).__name__] += 1
        if isinstance(moment.event, MoveReported):
            self.visited[f"move-{moment.event.state}"] += 1
        self._watch.end(moment, came_of_it)
        self._lost_blocks_are_lost(moment.rows_before, moment.changes)
        for row in moment.changes:
            if isinstance(row, Move):
                self.moves.changed(row)
        self.moves.check_freezes()
        is_quiet = all(isinstance(row, NodeObservation) for row in moment.changes) and self.steps % EVERY
        for name, invariant in _QUIET_INVARIANTS if is_quiet else _INVARIANTS:
            self.held[name] += 1
            try:
                invariant(self._watch, moment)
            except AssertionError as wrong:
                raise InvariantViolated(name, f"{_words(wrong)}, after {moment.event}") from None

    def _attempts_end_once(self, job: Job) -> None:
        """An end is as it was on the machine, it is told of nothing that runs, and each attempt has one."""
        over = [attempt for attempt in job.attempts if attempt.outcome is not None]
        for attempt in over:
            if attempt.node in self.liars:
                continue
            self._hold(
                attempt.lease_id not in self.running,
                "an attempt is over when nothing of it runs",
                f"{attempt.lease_id} ended, and still runs on {attempt.node}",
            )
            run, outcome = self.ran.get(attempt.lease_id), attempt.outcome
            if outcome is not None and outcome.ending is Ending.EXITED:
                real = run.real_outcome if run is not None else None
                told = real is not None and (real.ending, real.exit_code) == (outcome.ending, outcome.exit_code)
                self._hold(told, "an end is told as it was", f"{attempt.lease_id}: {outcome}, really {real}")
            if outcome is not None and outcome.is_disk_overrun:
                floods = attempt.lease_id in self.machines[attempt.node].flooders
                self._hold(floods, "only the job that fills a disk is ended for it", attempt.lease_id)
            if outcome is not None and outcome.is_failed_start:
                self._hold(run is None, "what was not started in time never ran", f"{attempt.lease_id}: {outcome}")
        numbers = [attempt.number for attempt in job.attempts]
        self._hold(numbers == [*range(1, len(numbers) + 1)], "attempts are numbered", f"{job.uid}: {numbers}")
        self._hold(len(over) >= len(numbers) - 1, "one attempt after the other", f"{job.uid}: {len(numbers)} attempts")
        spared = {Ending.LOST} if job.restartable or job.moved_at_ms else set()
        spared |= {Ending.NEVER_STARTED} if job.moved_at_ms else set()
        free = DISPLACED | spared
        outcomes = [one.outcome for one in over if one.outcome is not None]
        counted = sum(1 for one in outcomes if one.ending not in free and not one.is_failed_start)
        most = self.allowed_runs.get(job.uid, 1)
        declared = job.restartable or most > 1 or not job.overruns
        self._hold(declared, "no job is run again for a learned limit unless that is allowed", job.uid)
        most += job.overruns
        self._hold(counted <= most, "a job runs as often as was asked", f"{job.uid}: {counted} runs, {most} allowed")

    def committed(self, changes: list[Row]) -> None:
        """A batch is durable: ended rows stay ended, once."""
        self._watch.keep()
        for row in changes:
            if isinstance(row, Lease | Job) and row.is_over and row.key == row.request.id:
                once = row.key not in self.over or is_automatic(row.request)
                self._hold(once, "everything ends once", f"{row.kind} {row.key} ended again")
                self.over[row.key] = None
        self._nothing_is_lost(self._watch.ledger)

    def reloaded(self, ledger: Ledger, now: int, *, anew: bool) -> None:
        """What was stored has been loaded, by a new control plane or by one that could not commit: nothing acknowledged
        is missing, committed rows are there, and running attempts hold leases."""
        watch = self._watch
        watch.undo()
        watch.now = now
        if anew:
            watch.begin_anew(ledger)
        watch.ledger = ledger
        self._nothing_is_lost(ledger)
        there = {(row.kind, row.key): row for row in ledger.rows(durable_only=True)}
        kept = {(row.kind, row.key): row for row in watch.rebuilt().rows(durable_only=True)}
        self._hold(there == kept, "what was committed is stored", f"{len(kept)} rows were, {len(there)} are there")
        self.what_runs_is_held()

    def what_runs_is_held(self) -> None:
        """Whatever runs anywhere has a lease that counts, under the fence it was started with."""
        ledger = self._watch.ledger
        for lease_id in self._honest():
            machine, lease = self.running[lease_id][0], ledger.leases.get(lease_id)
            there = lease is not None and lease.holds and lease.node == machine.node.name
            self._hold(
                there, "what the ledger calls free is free", f"{lease_id} runs on {machine.node.name}, not held there"
            )

    def _nothing_is_lost(self, ledger: Ledger) -> None:
        for request_id in self.acknowledged:
            known = request_id in ledger.by_request or request_id in self.over
            self._hold(known, "what was acknowledged is never lost", f"{request_id} is gone")

    def unsettled(self, now: int) -> str | None:
        """Unfinished work that could end, in words; impossible requests may wait."""
        ledger = self._watch.ledger
        for job in ledger.jobs.values():
            request = ledger.leases[job.lease_id].request
            if job.state is not JobState.QUEUED:
                return f"{job.uid} is {job.state} on {ledger.leases[job.lease_id].node}"
            if all(map(ledger.nodes_of, request.affinity)) and never_fits(ledger, request) is None:
                return f"{job.uid} waits: {'; '.join(texts(why_not_now(ledger, request, now)))}"
        moving = self.moves.unsettled(ledger, self.over)
        if moving is not None:
            return moving
        for block in ledger.blocks.values():
            return f"{block.id} is not over"
        for name, machine in self.machines.items():
            left = {*machine.memory.in_memory, *machine.memory.on_disk}
            if left:
                return f"{name} still holds {', '.join(sorted(left))}"
        kept = {move.lease_id for move in ledger.moves.values()}
        counted = [one for one in ledger.leases.values() if one.holds and one.id not in kept]
        held = [lease.id for lease in counted if not is_automatic(lease.request)]
        return f"still running: {', '.join((*self.running, *held))}" if self.running or held else None

    def settled(self, now: int) -> None:
        """Faults have ceased and time enough has passed: everything is over, or waits for a reason that holds."""
        left = self.unsettled(now)
        self._hold(left is None, "everything comes to its end", left or "")


def _words(wrong: AssertionError) -> str:
    """Message of an assertion, or else its line."""
    trace: TracebackType | None = wrong.__traceback__
    return str(wrong) or str(traceback.extract_tb(trace)[-1].line)
