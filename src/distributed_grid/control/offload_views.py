"""Views of offloading: moves and what each waits for, in words; proposals, consents, and automatic offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import to_builtins

from distributed_grid.api.answers.common import HIDDEN, Viewer
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move, MoveConsent, OffloadRules, OffloadWatch
from distributed_grid.domain.states import MoveState
from distributed_grid.masking.command_line import shown_command
from distributed_grid.reactor.pressure import is_enabled
from distributed_grid.scheduling.offloading.proposals import Proposal

if TYPE_CHECKING:
    from distributed_grid.control.view_types import AutoOffloadLook, AutoOffloadView, ConsentRow, MoveRow, ProposalRow

GIB = 1024**3
MAX_COMMAND_CHARS = 400
IsConnected = Callable[[str], bool]
"""Whether the agent of a node can be sent orders now."""
NOT_SHARED = "resource_sharing.enabled is false: nothing is lent, so nothing can move"


def move_view(viewer: Viewer, move: Move, is_connected: IsConnected) -> MoveRow:
    """A move, over or not."""
    has_frozen = move.frozen_at_ms > 0 or move.frozen_for_ms > 0
    is_shown = viewer.shows(move.user)
    return {
        "move_id": move.id,
        "user": move.user,
        "source_node": move.source,
        "target_node": move.target,
        "way": str(move.way),
        "state": str(move.state),
        "waits_for": waits_for(move, is_connected),
        "reason": move.reason if is_shown else HIDDEN,
        "automatic": move.automatic,
        "pid": move.process.identity.pid if move.process is not None else None,
        "job_id": move.job_id or None,
        "command": HIDDEN
        if not is_shown
        else shown_command(move.command.argv, MAX_COMMAND_CHARS)
        if move.command is not None
        else "",
        "requested_at": viewer.time(move.requested_at_ms),
        "state_since": viewer.time(move.state_at_ms),
        "shipped_bytes": move.shipped_bytes + move.final_bytes,
        "left_out_files": [*move.left_out] if is_shown else [],
        "frozen_seconds": move.frozen_for_ms / 1000 if has_frozen else None,
        "problem": move.problem or None if is_shown else None,
        "end": str(move.end) if move.end is not None else None,
        "ended_at": viewer.time(move.ended_at_ms),
        "result": move.result or None if is_shown else None,
        "returned_files": move.returned,
        "kept_files": [*move.kept] if is_shown else [],
        "notes": [*move.notes] if is_shown else [],
    }


def waits_for(move: Move, is_connected: IsConnected) -> str | None:
    """What a move waits for, in words; None where it is over."""
    if move.is_over:
        return None
    text, node = _process_step(move) if move.process is not None else _job_step(move)
    return text if not node or is_connected(node) else f"{text}, which is not connected"


def _job_step(move: Move) -> tuple[str, str]:
    """What the move of a job waits for, and the node whose agent that takes."""
    if move.state is MoveState.PROPOSED:
        return f"room on {move.target}", ""
    if move.state in (MoveState.RESERVED, MoveState.DECIDED):
        return f"the end of its attempt on {move.source}", move.source
    return f"its start on {move.target}", move.target


def _process_step(move: Move) -> tuple[str, str]:
    """The same of a process."""
    source, target = move.source, move.target
    if move.state is MoveState.PROPOSED:
        return f"room on {target}", ""
    if move.state is MoveState.RESERVED:
        return f"the files of {source}", source
    if move.state is MoveState.SHIPPED:
        return f"the original to stand still on {source}", source
    if move.state is MoveState.FROZEN:
        if not move.commit_asked_at_ms:
            return f"the files that have changed since on {source}", source
        return f"the decision of the guard on {source}", source
    if move.state is MoveState.DECIDED:
        return f"the recorded death of the original on {source}", source
    if not move.result:
        job = move.job_id or "its job"
        return (f"the end of {job}", "") if move.state is MoveState.RUNNING else (f"the start of {job} on {target}", "")
    if not move.results:
        return f"the results on {move.ran_on or target}", move.ran_on or target
    return f"the return of the results to {source}", source


def proposal_view(viewer: Viewer, one: Proposal) -> ProposalRow:
    """A piece of work on a node, and what could be done with it."""
    process, is_shown = one.process, viewer.shows(one.user)
    gpu_bytes = process.gpu_memory_bytes if process is not None else one.ask.gpu_memory_bytes
    return {
        "node_id": one.node,
        "pid": process.pid if process is not None else None,
        "job_id": one.job_id or None,
        "command": one.command if is_shown else HIDDEN,
        "process_type": str(one.process_type),
        "user": one.user,
        "cpu_cores": (process.cpu_milli if process is not None else one.ask.cpu_milli) / 1000,
        "memory_gb": round((process.pss_bytes if process is not None else one.ask.memory_bytes) / GIB, 3),
        "gpu_memory_gb": round(gpu_bytes / GIB, 3),
        "age_seconds": one.age_ms / 1000,
        "movable": one.movable,
        "recommended": one.recommended,
        "way": str(one.way) if one.way is not None else None,
        "target_node": one.target or None,
        "confidence": one.confidence / 1000,
        "reasons": [*one.reasons] if is_shown else [],
        "obstacles": [obstacle.text for obstacle in one.obstacles] if is_shown else [],
        "needs_consent": one.needs_consent,
        "shape": one.shape or None if is_shown else None,
        "process": to_builtins(process) if process is not None and is_shown else None,
    }


def consent_view(viewer: Viewer, consent: MoveConsent) -> ConsentRow:
    """What a user allows."""
    return {
        "user": consent.user,
        "shape": consent.shape,
        "directory": consent.cwd or None,
        "variables": [*consent.variables],
        "given_at": viewer.time(consent.given_at_ms),
    }


def auto_offload_view(viewer: Viewer, ledger: Ledger, rules: OffloadRules, *, shares: bool) -> AutoOffloadView:
    """Whether work moves by itself, by whose word, and what became of it."""
    state = ledger.auto_offload
    stopped = state.stopped_why or ("" if shares else NOT_SHARED)
    return {
        "enabled": is_enabled(ledger, rules) and not stopped,
        "configured": rules.enabled,
        "set_by": state.set_by or None,
        "set_at": viewer.time(state.set_at_ms),
        "stopped": stopped or None,
        "failures": state.failures,
        "last_move_at": viewer.time(state.moved_at_ms),
        "thresholds": {
            "cpu": rules.cpu_high / 1000,
            "memory": rules.memory_high / 1000,
            "gpu": rules.gpu_high / 1000,
        },
        "check_interval_seconds": rules.interval_ms / 1000,
        "cooldown_seconds": rules.cooldown_ms / 1000,
        "degraded": {row.node: row.why for row in ledger.degraded.values()},
        "nodes": [
            offload_node_view(viewer, ledger, watch)
            for watch in sorted(ledger.offload_watches.values(), key=lambda one: one.node)
            if is_enabled(ledger, rules)
        ],
    }


def offload_node_view(viewer: Viewer, ledger: Ledger, watch: OffloadWatch) -> AutoOffloadLook:
    """What was last decided about a node, and why."""
    jobs = ((one, ledger.jobs.get(one.job)) for one in watch.considered)
    return {
        "node_id": watch.node,
        "at": viewer.time(watch.looked_at_ms),
        "reason": watch.reason or "below its thresholds",
        "jobs": [
            {"job_id": job.id, "reason": one.reason if viewer.shows(job.request.user) else HIDDEN}
            for one, job in jobs
            if job is not None
        ],
    }
