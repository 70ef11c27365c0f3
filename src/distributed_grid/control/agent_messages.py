"""Messages to and from agents: the orders that effects become, and the events that reports become."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptMarked,
    AttemptOutgrown,
    AttemptPaused,
    AttemptStarted,
    Event,
    MoveReported,
)
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.domain.workers import MAX_NOTICE_MS
from distributed_grid.reactor.effects import (
    AttemptEffect,
    OrderMoveStep,
    PauseAttempt,
    ResizeAttempt,
    StartAttempt,
    most_held_bytes,
    move_effects,
)
from distributed_grid.wire import (
    MAX_WHY_CHARS,
    AgentHello,
    AnnouncedEnd,
    AttemptEndedReport,
    AttemptPausedReport,
    AttemptStartedReport,
    CheckpointAge,
    Heartbeat,
    HeartbeatReply,
    HeldMemory,
    MoveOrder,
    MoveReport,
    PauseAttemptOrder,
    ResizeAttemptOrder,
    StartAttemptOrder,
    StopAttemptOrder,
    ToAgent,
    clipped,
)

MAX_NUMBER_DIGITS = 10
Report = AttemptStartedReport | AttemptPausedReport | AttemptEndedReport


def heartbeat_reply(ledger: Ledger, message: Heartbeat, now: int) -> HeartbeatReply:
    """Answer to a heartbeat: the hold of the node's attempts, its resources lent through Ray, and the announced end of
    its machine."""
    seen = ledger.observations.get(message.node)
    leases = ledger.leases_of(message.node) if ledger.bindings else ()
    lent = NodeClaims(lease.claim for lease in leases if lease.engine and not lease.job and lease.claim is not None)
    return HeartbeatReply(
        beat=message.beat,
        hold_ms=_hold_of(ledger, message.node),
        ray_cpu_milli=lent.cpu_milli,
        ray_memory_bytes=lent.memory_bytes,
        ray_gpu_milli=sum(lent.gpu_milli.values()),
        node=message.node,
        report_capacity=seen is not None and seen.report_wanted,
        end=announced_end(ledger, message.node, now),
        clock_confirmed=seen is not None and seen.clock_confirmed,
    )


def announced_end(ledger: Ledger, node: str, now: int) -> AnnouncedEnd | None:
    worker = ledger.workers.get(node) if ledger.workers else None
    if worker is None or worker.notice is None or not worker.leaving_at_ms:
        return None
    return AnnouncedEnd(worker.notice.why[:MAX_WHY_CHARS], min(max(worker.leaving_at_ms - now, 0), MAX_NOTICE_MS))


def _hold_of(ledger: Ledger, name: str) -> int:
    """How long attempts of a node run without contact; 0: without end."""
    node = ledger.nodes.get(name)
    return node.hold_ms if node is not None else 0


def order_of(ledger: Ledger, effect: AttemptEffect, start_by_ms: int = 0) -> ToAgent:
    """The order of an effect; a start has to happen `start_by_ms` after the last heartbeat of its node was sent (0: at
    any time)."""
    attempt = effect.job.attempt
    assert attempt is not None
    if isinstance(effect, StartAttempt):
        used = ledger.leases.get(effect.lease.request.use_lease, effect.lease)
        claim = used.claim
        assert claim is not None
        seen = ledger.observations.get(effect.node)
        return StartAttemptOrder(
            node=effect.node,
            lease_id=attempt.lease_id,
            fence=attempt.fence,
            job_id=effect.job.id,
            command=replace(effect.job.command, payload=""),  # only pull workers read it
            claim=claim,
            hold_ms=_hold_of(ledger, effect.node),
            beat=seen.beat if seen is not None else 0,
            generation=effect.lease.generation,
            checkpoint=effect.job.checkpoint,
            start_by_ms=start_by_ms,
            may_run_again=effect.job.may_run_again,
            start_ms=ledger.nodes[effect.node].start_ms if start_by_ms and effect.node in ledger.nodes else 0,
            most_memory_bytes=most_held_bytes(ledger, used) if effect.job.may_outgrow and claim.memory_bytes else 0,
        )
    if isinstance(effect, ResizeAttempt):
        size = effect.lease.claim.memory_bytes if effect.lease.claim is not None else 0
        return ResizeAttemptOrder(attempt.lease_id, attempt.fence, size, most_held_bytes(ledger, effect.lease))
    if isinstance(effect, PauseAttempt):
        return PauseAttemptOrder(attempt.lease_id, attempt.fence, effect.paused, clipped(effect.why))
    stop = effect.job.stop
    assert stop is not None
    ending = stop.ending if stop.ending in (Ending.PREEMPTED, Ending.RECLAIMED) else Ending.CANCELLED
    ending = Ending.PREEMPTED if stop.ending is Ending.MOVED else ending  # with the same notice, to mark a checkpoint
    worker = ledger.workers.get(effect.node)
    grace_ms = effect.job.command.grace_ms
    if worker is not None and worker.notice is not None and worker.leaving_at_ms:  # it must be over before the machine
        grace_ms = min(grace_ms, max(worker.notice.stop_by_ms - stop.asked_at_ms, 0))
    return StopAttemptOrder(attempt.lease_id, attempt.fence, ending, clipped(stop.detail), grace_ms)


def event_of(message: Report | CheckpointAge | HeldMemory, nodes: tuple[str, ...]) -> Event:
    """The event of a report of an agent that serves these nodes."""
    uid, _, number = message.lease_id.rpartition(".")
    attempt = int(number) if number.isdecimal() and len(number) < MAX_NUMBER_DIGITS else 0
    if isinstance(message, AttemptStartedReport):
        return AttemptStarted(
            uid=uid,
            number=attempt,
            fence=message.fence,
            pid=message.pid,
            cores=message.cores,
            nodes=nodes,
            pid_start=message.pid_start,
        )
    if isinstance(message, AttemptPausedReport):
        return AttemptPaused(
            uid=uid, number=attempt, fence=message.fence, paused=message.paused, detail=message.detail, nodes=nodes
        )
    if isinstance(message, CheckpointAge):
        return AttemptMarked(uid, attempt, message.fence, message.age_ms, nodes)
    if isinstance(message, HeldMemory):
        return AttemptOutgrown(uid, attempt, message.fence, message.memory_bytes, nodes)
    return AttemptEnded(
        uid=uid,
        number=attempt,
        fence=message.fence,
        outcome=message.outcome,
        nodes=nodes,
        pid=message.pid,
        cores=message.cores,
        mark_age_ms=message.mark_age_ms,
        pid_start=message.pid_start,
        has_checkpoint=message.has_checkpoint,
    )


def move_order(effect: OrderMoveStep) -> MoveOrder:
    move, step = effect.move, effect.step
    returns = step is Step.RETURN
    order = MoveOrder(
        node=move.source,
        move_id=move.id,
        step=step,
        freeze_ms=move.freeze_ms if step is Step.FREEZE else 0,
        manifest=move.results if returns else "",
        shipped=move.final if returns else "",
    )
    if move.process is None:
        return order
    look = move.process.look if step in (Step.FREEZE, Step.COMMIT) else None
    return replace(order, process=move.process.identity, look=look)


def orders_to(ledger: Ledger, node: str) -> list[MoveOrder]:
    """All orders of moves to the agent of a node."""
    if not ledger.moves_at.get(node):
        return []
    effects = (effect for effect in move_effects(ledger) if isinstance(effect, OrderMoveStep))
    return [move_order(effect) for effect in effects if effect.move.source == node]


def unknown_moves(ledger: Ledger, hello: AgentHello, nodes: tuple[str, ...]) -> list[MoveOrder]:
    """Orders to forget the moves in an agent's journal that the ledger does not have (any more)."""
    known = {move_id for node in nodes for move_id in ledger.moves_at.get(node, ())}
    ours = {move_id for move_id in known if ledger.moves[move_id].source in nodes}
    return [
        MoveOrder(node=hello.node, move_id=move_id, step=Step.CLOSE) for move_id in hello.moves if move_id not in ours
    ]


def event_of_move(report: MoveReport, ledger: Ledger, nodes: tuple[str, ...]) -> Event | None:
    """The event of a report of an agent that serves these nodes; None if it changes nothing."""
    move = ledger.moves.get(report.move_id)
    if move is None or move.source not in nodes or report.state is MoveState.OPENED:
        return None
    return MoveReported(
        move_id=move.id,
        state=report.state,
        nodes=nodes,
        detail=report.detail,
        frozen_ms=report.frozen_ms,
        files=report.files,
        kept=report.kept,
        notes=report.notes,
    )
