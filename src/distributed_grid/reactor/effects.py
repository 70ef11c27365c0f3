"""Effects: work outside the ledger that its rows call for. Each is safe to repeat, and names its fence or generation.

They are derived from rows alone, so a commit, start-up, reconnection and repair find the same ones (`pending`). A new
kind takes a struct in the union and its derivation here, and its performer in the daemon's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

from distributed_grid.domain.blocks import Block, MemoryServerRow
from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.engines import Binding
from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import DegradedNode, Move
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState, MoveState, Step, WorkerState
from distributed_grid.domain.workers import Worker
from distributed_grid.reactor.workers.host_leases import has_host
from distributed_grid.scheduling.pressure.relief import jobs_to_pause

NEVER_MS = 2**62


class StartAttempt(Struct, frozen=True):
    """Run the job's current attempt under its lease."""

    node: str
    job: Job
    lease: Lease


class StopAttempt(Struct, frozen=True):
    """Stop the whole process tree of the job's current attempt."""

    node: str
    job: Job


class PauseAttempt(Struct, frozen=True):
    """Pause the job's current attempt on a degraded node for a while, or (not `paused`) resume it."""

    node: str
    job: Job
    paused: bool
    why: str


class ResizeAttempt(Struct, frozen=True):
    """Send the agent the size of a lease that may grow, and the most memory that its attempt may hold."""

    node: str
    job: Job
    lease: Lease


class BindLease(Struct, frozen=True):
    """Reserve the claim of a lease in the engine, under the binding's name."""

    binding: Binding
    lease: Lease


class SetGroupTerm(Struct, frozen=True):
    """Send the engine the end of the lease of a group."""

    binding: Binding
    lease: Lease


class FreeBinding(Struct, frozen=True):
    """Remove the group of this binding from the engine."""

    binding: Binding


class ServeMemory(Struct, frozen=True):
    """Start the memory server of a node."""

    node: str


class MakeCopy(Struct, frozen=True):
    """Make the copy that a block is waiting for, from its source on this node."""

    node: str
    block: Block


class FreeCopies(Struct, frozen=True):
    """Free these copies on a node."""

    node: str
    copies: tuple[str, ...]


class CreateWorker(Struct, frozen=True):
    """Create this machine at its provider; the call is recorded before it is made."""

    worker: Worker


class TerminateWorker(Struct, frozen=True):
    """Terminate this machine at its provider, and prove it gone."""

    worker: Worker


class CollectOutputs(Struct, frozen=True):
    """Copy the files that jobs left on a draining worker, so that it can be terminated."""

    worker: Worker


class ShipCheckpoint(Struct, frozen=True):
    """Copy the checkpoint directory of an ended attempt here, for the job's next attempt."""

    job: Job
    attempt: Attempt


class DeliverFiles(Struct, frozen=True):
    """Copy the files of an ended job into the directory of its user."""

    delivery: Delivery


class OrderMoveStep(Struct, frozen=True):
    """Order the next step of a move from the agent of its source."""

    move: Move
    step: Step  # open, freeze, commit, thaw, return or close


class ShipFiles(Struct, frozen=True):
    """Copy the working directory of a move's original here: ahead of the freeze, or, once frozen, the difference."""

    move: Move


class BringResults(Struct, frozen=True):
    """Copy the results of a moved process's job here, so that they can be returned to the source."""

    move: Move


AttemptEffect = StartAttempt | StopAttempt | PauseAttempt | ResizeAttempt
EngineEffect = BindLease | SetGroupTerm | FreeBinding
MemoryEffect = ServeMemory | MakeCopy | FreeCopies
WorkerEffect = CreateWorker | TerminateWorker
MoveEffect = OrderMoveStep | ShipFiles | BringResults
Effect = (
    AttemptEffect
    | EngineEffect
    | MemoryEffect
    | WorkerEffect
    | MoveEffect
    | ShipCheckpoint
    | DeliverFiles
    | CollectOutputs
)
R = TypeVar("R", Job, Worker, Delivery)
Touched = Sequence[Row] | None
"""Changed rows whose effects are derived; None: those of all rows."""


def pending(ledger: Ledger, now: int, touched: Touched = None) -> list[Effect]:
    """Effects that the ledger calls for, or only those that touched rows may have called for, in their order."""
    return [
        *attempt_effects(ledger, touched),
        *engine_effects(ledger, touched),
        *memory_effects(ledger, touched),
        *worker_effects(ledger, now, touched),
        *move_effects(ledger, touched),
        *checkpoint_effects(ledger, touched),
        *delivery_effects(ledger, touched),
        *collection_effects(ledger, touched),
    ]


def _living(table: dict[str, R], touched: Touched, kind: type[R]) -> Iterable[R]:
    """Rows of a table, or only its touched ones."""
    if touched is None or not table:
        return table.values()
    keys = dict.fromkeys(row.key for row in touched if isinstance(row, kind))
    return [table[key] for key in keys if key in table]


def attempt_effects(ledger: Ledger, touched: Touched = None, *, node: str | None = None) -> list[AttemptEffect]:
    """Effects on attempts, of one node or of all."""
    if touched is None:
        names = ledger.jobs_on if node is None else (node,)
        effects = _effects_of_jobs(ledger, (job for name in names for job in ledger.jobs_of(name)))
        degraded = (name for name in ledger.degraded if node in (None, name))
        return [*effects, *(effect for name in degraded for effect in _pauses(ledger, name))]
    uids: dict[str, None] = {}
    for row in touched:
        if isinstance(row, Job):
            uids[row.uid] = None
        elif isinstance(row, Lease):
            uids[row.job] = None
        elif isinstance(row, Binding):
            lease = ledger.leases.get(row.lease_id)
            uids[lease.job if lease is not None else ""] = None
    jobs = [ledger.jobs[uid] for uid in uids if uid in ledger.jobs]
    effects = _effects_of_jobs(ledger, jobs)
    effects += [effect for row in touched if isinstance(row, DegradedNode) for effect in _pauses(ledger, row.node)]
    if ledger.degraded:  # jobs that have just begun on a degraded node
        begun = {job.uid: job.attempt.node for job in jobs if job.state is JobState.RUNNING and job.attempt is not None}
        for name in dict.fromkeys(begun.values()):
            if name in ledger.degraded:
                pauses = _pauses(ledger, name)
                effects += [effect for effect in pauses if effect.job.uid in begun and effect not in effects]
    return effects


def overdue(ledger: Ledger, node: str, before_ms: int) -> list[AttemptEffect]:
    """Effects on attempts of a node that were called for before that time and are not reported done."""
    return [effect for effect in attempt_effects(ledger, node=node) if _called_for_at(effect) < before_ms]


def _called_for_at(effect: AttemptEffect) -> int:
    attempt, stop = effect.job.attempt, effect.job.stop
    if isinstance(effect, PauseAttempt | ResizeAttempt):
        return 0  # a pause has to be ordered again and again, and what a node can lend changes
    if isinstance(effect, StopAttempt) and stop is not None:
        return stop.asked_at_ms
    return attempt.assigned_at_ms if attempt is not None else 0


def _effects_of_jobs(ledger: Ledger, jobs: Iterable[Job]) -> list[AttemptEffect]:
    effects: list[AttemptEffect] = []
    for job in jobs:
        attempt = job.attempt
        if attempt is None or attempt.node in ledger.pull_nodes:  # a pull worker asks, and gets a stop as the answer
            continue
        if job.state is JobState.STOPPING:
            effects.append(StopAttempt(attempt.node, job))
            continue
        lease = ledger.leases[attempt.lease_id]
        if job.state is JobState.ASSIGNED:
            binding = ledger.binding_of(lease) if lease.engine else None
            is_bound = not lease.engine or (binding is not None and binding.bound_at_ms > 0)
            if is_bound and not (lease.awaits or job.checkpoint_from):
                effects.append(StartAttempt(attempt.node, job, lease))
        elif job.state in (JobState.RUNNING, JobState.PAUSED) and job.may_outgrow and lease.claim is not None:
            effects.append(ResizeAttempt(attempt.node, job, lease))
    return effects


def _pauses(ledger: Ledger, node: str) -> list[PauseAttempt]:
    """Pause orders for a degraded node, or resume orders after recovery. A resume is sent once: an unrenewed pause
    expires on the agent."""
    row = ledger.degraded.get(node)
    if row is None:
        paused = (job for job in ledger.jobs_of(node) if job.state is JobState.PAUSED)
        return [PauseAttempt(node, job, paused=False, why="") for job in paused]
    reason = f"{node} is degraded: {row.why}"
    return [
        PauseAttempt(node, ledger.jobs[uid], paused=True, why=reason) for uid in sorted(jobs_to_pause(ledger, node))
    ]


def most_held_bytes(ledger: Ledger, lease: Lease) -> int:
    """The most memory that an attempt may hold whose lease may grow: its node's whole offer, and its claim."""
    offer = ledger.offers.get(lease.node)
    lends = ledger.nodes[lease.node].lendable if offer is None or offer.withdrawn else offer.lends
    return max(lends.memory_bytes, lease.claim.memory_bytes if lease.claim is not None else 0)


def engine_effects(ledger: Ledger, touched: Touched = None) -> list[EngineEffect]:
    """Effects on the groups of engines."""
    bindings: Iterable[Binding] = ledger.bindings.values()
    if touched is not None and ledger.bindings:
        lease_ids = dict.fromkeys(
            row.id if isinstance(row, Lease) else row.lease_id for row in touched if isinstance(row, Lease | Binding)
        )
        bindings = [ledger.bindings[key] for lease_id in lease_ids for key in ledger.bindings_of.get(lease_id, ())]
    effects: list[EngineEffect] = []
    for binding in bindings:
        lease = ledger.leases.get(binding.lease_id)
        if lease is None or ledger.binding_of(lease) != binding:
            effects.append(FreeBinding(binding))
        elif binding.bound_at_ms:
            if lease.ends_at_ms > binding.term_ms:
                effects.append(SetGroupTerm(binding, lease))
        elif len(ledger.bindings_of[lease.id]) == 1 and not lease.awaits:
            effects.append(BindLease(binding, lease))
    return effects


def memory_effects(ledger: Ledger, touched: Touched = None, *, node: str | None = None) -> list[MemoryEffect]:
    """Effects that blocks call for, on one node or on all."""
    if touched is None:
        names = ledger.blocks if node is None else ledger.blocks_at.get(node, ())
        effects = _effects_of_blocks(ledger, (ledger.blocks[block_id] for block_id in names))
        return effects if node is None else [effect for effect in effects if effect.node == node]
    if not ledger.blocks:
        return []
    block_ids: dict[str, None] = {}
    for row in touched:
        if isinstance(row, Block):
            block_ids[row.id] = None
        elif isinstance(row, MemoryServerRow):
            block_ids.update(dict.fromkeys(ledger.blocks_at.get(row.node, ())))
    return _effects_of_blocks(ledger, (ledger.blocks[block_id] for block_id in block_ids if block_id in ledger.blocks))


def overdue_memory(ledger: Ledger, node: str) -> list[MemoryEffect]:
    """Effects of one node that unsettled blocks call for: there are few, however many blocks there are."""
    unsettled = [ledger.blocks[block_id] for block_id in ledger.unsettled_blocks]
    effects = [effect for effect in _effects_of_blocks(ledger, unsettled) if effect.node == node]
    if node not in ledger.memory_servers and ledger.blocks_at.get(node) and ServeMemory(node) not in effects:
        effects.insert(0, ServeMemory(node))
    return effects


def _effects_of_blocks(ledger: Ledger, blocks: Iterable[Block]) -> list[MemoryEffect]:
    unserved: dict[str, None] = {}
    freed: dict[str, list[str]] = {}
    copies: list[MemoryEffect] = []
    for block in blocks:
        for place in block.leaving:
            freed.setdefault(place.node, []).append(place.copy)
        unserved.update((place.node, None) for place in block.places if place.node not in ledger.memory_servers)
        moving = block.moving
        if moving is None:
            continue
        source = next(place for place in block.places if place.copy == moving.source)
        missing = [name for name in (source.node, moving.place.node) if name not in ledger.memory_servers]
        unserved.update(dict.fromkeys(missing))
        if not missing and (moving.place.on_disk or moving.place.incarnation):
            copies.append(MakeCopy(source.node, block))
    frees = [FreeCopies(node, tuple(names)) for node, names in freed.items()]
    return [*(ServeMemory(node) for node in unserved), *copies, *frees]


def worker_effects(ledger: Ledger, now: int, touched: Touched = None) -> list[WorkerEffect]:
    """Effects on machines of providers that are due by now."""
    effects: list[WorkerEffect] = []
    for worker in _living(ledger.workers, touched, Worker):
        if worker.next_call_at_ms > now:
            continue
        if worker.state in (WorkerState.WANTED, WorkerState.ASKED) and has_host(ledger, worker):
            effects.append(CreateWorker(worker))
        elif worker.state is WorkerState.TERMINATING:
            effects.append(TerminateWorker(worker))
    return effects


def move_effects(ledger: Ledger, touched: Touched = None) -> list[MoveEffect]:
    """Effects of moves. The end of a move is sent to its source once; if that is lost, the source thaws the original
    by itself, and names the move when its agent comes again."""
    moves: Iterable[Move] = ledger.moves.values()
    if touched is not None:
        last = {row.id: row for row in touched if isinstance(row, Move)}
        moves = [ledger.moves.get(move.id, move) for move in last.values()]
    return [effect for move in moves for effect in _effects_of_move(move)]


def _effects_of_move(move: Move) -> list[MoveEffect]:
    if move.process is None:  # a job: its attempts are stopped and started as always
        return []
    if move.is_over:
        thaws = [OrderMoveStep(move, Step.THAW)] if move.frozen_at_ms and not move.job else []
        return [*thaws, OrderMoveStep(move, Step.CLOSE)]
    state, is_committed = move.state, move.commit_asked_at_ms > 0
    if state is MoveState.RESERVED:
        return [OrderMoveStep(move, Step.OPEN), ShipFiles(move)]
    if state is MoveState.SHIPPED:
        return [OrderMoveStep(move, Step.FREEZE)]
    if state is MoveState.FROZEN and not is_committed:
        return [ShipFiles(move)]
    if state in (MoveState.FROZEN, MoveState.DECIDED):
        return [OrderMoveStep(move, Step.THAW if move.ending is not None and not move.is_decided else Step.COMMIT)]
    if state in (MoveState.DEAD, MoveState.RUNNING) and move.result:
        return [OrderMoveStep(move, Step.RETURN) if move.results else BringResults(move)]
    return []


def checkpoint_effects(ledger: Ledger, touched: Touched = None) -> list[ShipCheckpoint]:
    """Shipments of the checkpoint directories that jobs wait for."""
    awaited = {uid: ledger.jobs[uid] for uid in ledger.awaited_checkpoints}
    return [
        ShipCheckpoint(job, attempt)
        for job in _living(awaited, touched, Job)
        for attempt in job.attempts
        if attempt.number == job.checkpoint_from
    ]


def delivery_effects(ledger: Ledger, touched: Touched = None) -> list[DeliverFiles]:
    """Deliveries of files to the users of ended jobs."""
    return [DeliverFiles(delivery) for delivery in _living(ledger.deliveries, touched, Delivery)]


def collection_effects(ledger: Ledger, touched: Touched = None) -> list[CollectOutputs]:
    """Collections of files from draining workers, those that end first before the others.

    A worker is due when nothing is leased there any more, so nobody waits for its files; one that its provider takes
    away is due at once, for the files of ended jobs.
    """
    due = [
        worker
        for worker in _living(ledger.workers, touched, Worker)
        if worker.state is WorkerState.DRAINING and (worker.is_leaving or not is_still_needed(ledger, worker.node))
    ]
    due.sort(key=lambda worker: worker.leaving_at_ms or NEVER_MS)
    return [CollectOutputs(worker) for worker in due if worker.node in ledger.nodes]


def is_still_needed(ledger: Ledger, node: str) -> bool:
    """True if a node has lent something, or a job waits for a checkpoint that is there."""
    if ledger.leases_on.get(node):
        return True
    return any(effect.attempt.node == node for effect in checkpoint_effects(ledger))
