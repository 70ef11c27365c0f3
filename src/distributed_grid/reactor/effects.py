"""Effects: orders to agents, engines and memory servers, keyed by id and fence; each is safe to repeat.

Which effects are pending is derived from rows alone: start-up, reconnection and reconciliation all use this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from distributed_grid.domain.blocks import Block, MemoryServerRow
from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.engines import Binding
from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import DegradedNode, Move
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState, MoveState, WorkerState
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
    """Let the job's current attempt stand still for the sake of its node, for a while; or (not `paused`) go on."""

    node: str
    job: Job
    paused: bool
    why: str


class ResizeAttempt(Struct, frozen=True):
    """Have the agent know the size of a lease that may grow, and how much memory its attempt may hold at most."""

    node: str
    job: Job
    lease: Lease


class BindLease(Struct, frozen=True):
    """Have the engine reserve what the lease claims, under the binding's name."""

    binding: Binding
    lease: Lease


class SetGroupTerm(Struct, frozen=True):
    """Have the engine know when the lease of a group ends."""

    binding: Binding
    lease: Lease


class FreeBinding(Struct, frozen=True):
    """Have nothing of that name in the engine any more."""

    binding: Binding


class ServeMemory(Struct, frozen=True):
    """Let the memory of a node be used."""

    node: str


class MakeCopy(Struct, frozen=True):
    """Make the copy that a block is waiting for, from its source on this node."""

    node: str
    block: Block


class FreeCopies(Struct, frozen=True):
    """Let go of these copies on a node."""

    node: str
    copies: tuple[str, ...]


class CreateWorker(Struct, frozen=True):
    """Have the provider make this machine; the call is recorded before it is made."""

    worker: Worker


class TerminateWorker(Struct, frozen=True):
    """Have the provider end this machine, and prove it gone."""

    worker: Worker


class BringHome(Struct, frozen=True):
    """Copy what jobs left on a worker that drains, so that it can be terminated."""

    worker: Worker


class ShipCheckpoint(Struct, frozen=True):
    """Bring here what an attempt that is over has left in its checkpoint directory, for the job's next attempt."""

    job: Job
    attempt: Attempt


class DeliverFiles(Struct, frozen=True):
    """Bring the files of an ended job into the directory of its user."""

    delivery: Delivery


class OrderMoveStep(Struct, frozen=True):
    """Have the agent of the source take the next step of a move."""

    move: Move
    step: MoveOrderStep


class ShipFiles(Struct, frozen=True):
    """Bring the working directory of a move's original here: ahead, or, once it stands still, the difference."""

    move: Move


class BringResults(Struct, frozen=True):
    """Bring what the job of a moved process has written here, so that it can be returned to the source."""

    move: Move


MoveOrderStep = Literal["open", "freeze", "commit", "thaw", "return", "close"]
MoveEffect = OrderMoveStep | ShipFiles | BringResults
WorkerEffect = CreateWorker | TerminateWorker
MemoryEffect = ServeMemory | MakeCopy | FreeCopies
Effect = StartAttempt | StopAttempt | PauseAttempt | ResizeAttempt
EngineEffect = BindLease | SetGroupTerm | FreeBinding


def pending(ledger: Ledger, node: str | None = None) -> list[Effect]:
    """Every effect that the ledger calls for from one agent or from all; performing one twice is harmless."""
    nodes = ledger.jobs_on if node is None else (node,)
    jobs = (job for name in nodes for job in ledger.jobs_of(name))
    found = [effect for job in jobs if (effect := _effect_of(ledger, job)) is not None]
    return found + [effect for name in ledger.degraded if node in (None, name) for effect in _pauses(ledger, name)]


def overdue(ledger: Ledger, node: str, before_ms: int) -> list[Effect]:
    """The effects that were called for from one agent before that time, and that it has not reported done."""
    return [effect for effect in pending(ledger, node) if _called_for_at(effect) < before_ms]


def _called_for_at(effect: Effect) -> int:
    attempt, stop = effect.job.attempt, effect.job.stop
    if isinstance(effect, PauseAttempt | ResizeAttempt):
        return 0  # a pause has to be ordered again and again, and what a node can lend changes
    if isinstance(effect, StopAttempt) and stop is not None:
        return stop.asked_at_ms
    return attempt.assigned_at_ms if attempt is not None else 0


def pending_for(ledger: Ledger, changed: Iterable[Row]) -> list[Effect]:
    """The effects that these changed rows may have called for."""
    changed = list(changed)
    uids = dict.fromkeys(
        row.uid if isinstance(row, Job) else row.job if isinstance(row, Lease) else _job_of(ledger, row)
        for row in changed
        if isinstance(row, Job | Lease | Binding)
    )
    jobs = [ledger.jobs[uid] for uid in uids if uid in ledger.jobs]
    found = [effect for job in jobs if (effect := _effect_of(ledger, job)) is not None]
    found += [effect for row in changed if isinstance(row, DegradedNode) for effect in _pauses(ledger, row.node)]
    if ledger.degraded:
        found += [one for one in _pauses_of_begun(ledger, jobs) if one not in found]
    return found


def _pauses(ledger: Ledger, node: str) -> list[PauseAttempt]:
    """What stands still on a degraded node; what may go on where it is not one any more. That is told once: a pause
    that is not ordered again ends by itself."""
    row = ledger.degraded.get(node)
    if row is None:
        paused = (job for job in ledger.jobs_of(node) if job.state is JobState.PAUSED)
        return [PauseAttempt(node, job, paused=False, why="") for job in paused]
    why = f"{node} is degraded: {row.why}"
    return [PauseAttempt(node, ledger.jobs[uid], paused=True, why=why) for uid in sorted(jobs_to_pause(ledger, node))]


def _pauses_of_begun(ledger: Ledger, jobs: Iterable[Job]) -> list[PauseAttempt]:
    """The pauses of jobs that have just begun on a degraded node."""
    begun = [job for job in jobs if job.state is JobState.RUNNING and job.attempt is not None]
    nodes = dict.fromkeys(job.attempt.node for job in begun if job.attempt is not None)
    pauses = (effect for node in nodes if node in ledger.degraded for effect in _pauses(ledger, node))
    uids = {job.uid for job in begun}
    return [effect for effect in pauses if effect.job.uid in uids]


def _job_of(ledger: Ledger, binding: Binding) -> str:
    lease = ledger.leases.get(binding.lease_id)
    return lease.job if lease is not None else ""


def _effect_of(ledger: Ledger, job: Job) -> Effect | None:
    attempt = job.attempt
    if attempt is None or attempt.node in ledger.pull_nodes:  # a pull worker asks, and hears of a stop when it does
        return None
    if job.state is JobState.STOPPING:
        return StopAttempt(attempt.node, job)
    lease = ledger.leases[attempt.lease_id]
    if job.state is JobState.ASSIGNED and not (lease.awaits or job.checkpoint_from) and _is_bound(ledger, lease):
        return StartAttempt(attempt.node, job, lease)
    if job.state in (JobState.RUNNING, JobState.PAUSED) and job.may_outgrow and lease.claim is not None:
        return ResizeAttempt(attempt.node, job, lease)
    return None


def most_held_bytes(ledger: Ledger, lease: Lease) -> int:
    """The most that an attempt may hold whose lease may grow: all that its node lends, and what it has leased."""
    offer = ledger.offers.get(lease.node)
    lends = ledger.nodes[lease.node].lendable if offer is None or offer.withdrawn else offer.lends
    return max(lends.memory_bytes, lease.claim.memory_bytes if lease.claim is not None else 0)


def _is_bound(ledger: Ledger, lease: Lease) -> bool:
    """Whether everybody who has to reserve a lease has done so."""
    if not lease.engine:
        return True
    binding = ledger.binding_of(lease)
    return binding is not None and binding.bound_at_ms > 0


def pending_bindings(ledger: Ledger) -> list[EngineEffect]:
    """Every effect that the ledger calls for from engines; performing one twice is harmless."""
    return [effect for one in ledger.bindings.values() if (effect := _binding_effect(ledger, one)) is not None]


def pending_bindings_for(ledger: Ledger, changed: Iterable[Row]) -> list[EngineEffect]:
    """The effects that these changed rows may have called for from engines."""
    if not ledger.bindings:
        return []
    touched = dict.fromkeys(
        row.id if isinstance(row, Lease) else row.lease_id for row in changed if isinstance(row, Lease | Binding)
    )
    bindings = (ledger.bindings[key] for lease_id in touched for key in ledger.bindings_of.get(lease_id, ()))
    return [effect for one in bindings if (effect := _binding_effect(ledger, one)) is not None]


def _binding_effect(ledger: Ledger, binding: Binding) -> EngineEffect | None:
    lease = ledger.leases.get(binding.lease_id)
    if lease is None or ledger.binding_of(lease) != binding:
        return FreeBinding(binding)
    if binding.bound_at_ms:
        return SetGroupTerm(binding, lease) if lease.ends_at_ms > binding.term_ms else None
    alone = len(ledger.bindings_of[lease.id]) == 1
    return BindLease(binding, lease) if alone and not lease.awaits else None


def pending_memory(ledger: Ledger, node: str | None = None) -> list[MemoryEffect]:
    """Every effect that blocks call for, of one node or of all; performing one twice is harmless."""
    names = ledger.blocks if node is None else ledger.blocks_at.get(node, ())
    found = _effects(ledger, (ledger.blocks[block_id] for block_id in names))
    return found if node is None else [effect for effect in found if effect.node == node]


def overdue_memory(ledger: Ledger, node: str) -> list[MemoryEffect]:
    """The effects of one node that unsettled blocks call for: there are few, however many blocks there are."""
    unsettled = [ledger.blocks[block_id] for block_id in ledger.unsettled_blocks]
    found = [effect for effect in _effects(ledger, unsettled) if effect.node == node]
    if node not in ledger.memory_servers and ledger.blocks_at.get(node) and ServeMemory(node) not in found:
        found.insert(0, ServeMemory(node))
    return found


def pending_memory_for(ledger: Ledger, changed: Iterable[Row]) -> list[MemoryEffect]:
    """The effects that these changed rows may have called for."""
    touched: dict[str, None] = {}
    for row in changed:
        if isinstance(row, Block):
            touched[row.id] = None
        elif isinstance(row, MemoryServerRow):
            touched.update(dict.fromkeys(ledger.blocks_at.get(row.node, ())))
    return _effects(ledger, (ledger.blocks[block_id] for block_id in touched if block_id in ledger.blocks))


def _effects(ledger: Ledger, blocks: Iterable[Block]) -> list[MemoryEffect]:
    unserved: dict[str, None] = {}
    freed: dict[str, list[str]] = {}
    moves: list[MemoryEffect] = []
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
            moves.append(MakeCopy(source.node, block))
    frees = [FreeCopies(node, tuple(copies)) for node, copies in freed.items()]
    return [*(ServeMemory(node) for node in unserved), *moves, *frees]


def pending_deliveries(ledger: Ledger) -> list[DeliverFiles]:
    """The deliveries that are not over."""
    return [DeliverFiles(delivery) for delivery in ledger.deliveries.values()]


def pending_checkpoints(ledger: Ledger) -> list[ShipCheckpoint]:
    """The checkpoint directories that jobs wait for; performing one twice is harmless."""
    jobs = (ledger.jobs[uid] for uid in ledger.awaited_checkpoints)
    return [
        ShipCheckpoint(job, attempt)
        for job in jobs
        for attempt in job.attempts
        if attempt.number == job.checkpoint_from
    ]


def is_still_needed(ledger: Ledger, node: str) -> bool:
    """Whether a node has lent something, or a job waits for a checkpoint that is there."""
    if ledger.leases_on.get(node):
        return True
    return any(effect.attempt.node == node for effect in pending_checkpoints(ledger))


def pending_homecomings(ledger: Ledger) -> list[BringHome]:
    """The workers that drain and on which nothing is lent any more: what is left there are files that nobody waits for.
    Of those that are taken away what has ended is brought home at once, the first to end first."""
    draining = [worker for worker in ledger.workers.values() if worker.state is WorkerState.DRAINING]
    due = [one for one in draining if one.is_leaving or not is_still_needed(ledger, one.node)]
    due.sort(key=lambda one: one.leaving_at_ms or NEVER_MS)
    return [BringHome(one) for one in due if one.node in ledger.nodes]


def pending_workers(ledger: Ledger, now: int) -> list[WorkerEffect]:
    """Every effect that workers call for from their providers by now; performing one twice is harmless."""
    return _worker_effects(ledger, ledger.workers.values(), now)


def pending_workers_for(ledger: Ledger, changed: Iterable[Row], now: int) -> list[WorkerEffect]:
    """The effects that these changed rows may have called for from providers."""
    ids = dict.fromkeys(row.id for row in changed if isinstance(row, Worker))
    return _worker_effects(ledger, (ledger.workers[one] for one in ids if one in ledger.workers), now)


def _worker_effects(ledger: Ledger, workers: Iterable[Worker], now: int) -> list[WorkerEffect]:
    effects: list[WorkerEffect] = []
    for worker in workers:
        if worker.next_call_at_ms > now:
            continue
        if worker.state in (WorkerState.WANTED, WorkerState.ASKED) and has_host(ledger, worker):
            effects.append(CreateWorker(worker))
        elif worker.state is WorkerState.TERMINATING:
            effects.append(TerminateWorker(worker))
    return effects


def pending_moves(ledger: Ledger, now: int) -> list[MoveEffect]:
    """Every effect that moves call for by now: of agents, and of whoever ships files; each is safe to repeat."""
    return [effect for move in ledger.moves.values() for effect in _move_effects(move)]


def pending_moves_for(ledger: Ledger, changed: Iterable[Row], now: int) -> list[MoveEffect]:
    """The effects that these changed rows may have called for. A move that is over is told to its source once; if that
    is lost, the source thaws the original by itself, and names the move when its agent comes again."""
    last = {row.id: row for row in changed if isinstance(row, Move)}
    return [effect for move in last.values() for effect in _move_effects(ledger.moves.get(move.id, move))]


def _move_effects(move: Move) -> list[MoveEffect]:
    """What the state of a move calls for. Jobs need nothing: their attempts are stopped and started as always."""
    if move.process is None:
        return []
    if move.is_over:
        thaws = [OrderMoveStep(move, "thaw")] if move.frozen_at_ms and not move.job else []
        return [*thaws, OrderMoveStep(move, "close")]
    state, is_committed = move.state, move.commit_asked_at_ms > 0
    if state is MoveState.RESERVED:
        return [OrderMoveStep(move, "open"), ShipFiles(move)]
    if state is MoveState.SHIPPED:
        return [OrderMoveStep(move, "freeze")]
    if state is MoveState.FROZEN and not is_committed:
        return [ShipFiles(move)]
    if state in (MoveState.FROZEN, MoveState.DECIDED):
        return [OrderMoveStep(move, "thaw" if move.ending is not None and not move.is_decided else "commit")]
    if state in (MoveState.DEAD, MoveState.RUNNING) and move.result:
        return [OrderMoveStep(move, "return") if move.results else BringResults(move)]
    return []
