"""Answers about offloading: proposals, moves, consents, and automatic offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import to_builtins

from distributed_grid.api.answers.common import HIDDEN, Answer, Viewer, gigabytes
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move, MoveConsent, OffloadRules, OffloadWatch
from distributed_grid.domain.states import MoveState
from distributed_grid.masking.command_line import shown_command
from distributed_grid.reactor.pressure import is_enabled
from distributed_grid.scheduling.offloading.proposals import Proposal

MAX_COMMAND_CHARS = 400
IsConnected = Callable[[str], bool]
"""True if the agent of a node can be sent orders now."""
NOT_SHARED = "resource_sharing.enabled is false: nothing is lent, so nothing can move"


class ProposalRow(Answer, frozen=True, kw_only=True):
    """Work on a node: whether and in which way it could run elsewhere, and the reasons."""

    node_id: str
    pid: int | None  # None for a job
    job_id: str | None  # None for a process
    command: str
    process_type: str
    user: str
    cpu_cores: float
    memory_gb: float
    gpu_memory_gb: float
    age_seconds: float
    movable: bool  # it could be moved now, at most with its user's consent
    recommended: bool
    way: str | None
    target_node: str | None
    confidence: float  # from 0 to 1
    reasons: list[str]
    obstacles: list[str]
    needs_consent: bool
    shape: str | None
    process: dict[str, Any] | None  # `domain/processes.py`

    @classmethod
    def of(cls, viewer: Viewer, proposal: Proposal) -> ProposalRow:
        process, is_shown = proposal.process, viewer.shows(proposal.user)
        cpu_milli, memory_bytes = proposal.ask.cpu_milli, proposal.ask.memory_bytes
        gpu_bytes = proposal.ask.gpu_memory_bytes
        if process is not None:
            cpu_milli, memory_bytes, gpu_bytes = process.cpu_milli, process.pss_bytes, process.gpu_memory_bytes
        return cls(
            node_id=proposal.node,
            pid=process.pid if process is not None else None,
            job_id=proposal.job_id or None,
            command=proposal.command if is_shown else HIDDEN,
            process_type=str(proposal.process_type),
            user=proposal.user,
            cpu_cores=cpu_milli / 1000,
            memory_gb=gigabytes(memory_bytes),
            gpu_memory_gb=gigabytes(gpu_bytes),
            age_seconds=proposal.age_ms / 1000,
            movable=proposal.movable,
            recommended=proposal.recommended,
            way=str(proposal.way) if proposal.way is not None else None,
            target_node=proposal.target or None,
            confidence=proposal.confidence / 1000,
            reasons=[*proposal.reasons] if is_shown else [],
            obstacles=[obstacle.text for obstacle in proposal.obstacles] if is_shown else [],
            needs_consent=proposal.needs_consent,
            shape=proposal.shape or None if is_shown else None,
            process=to_builtins(process) if process is not None and is_shown else None,
        )


class ProposalList(Answer, frozen=True):
    """Work that could run elsewhere, and the nodes that could not be asked, with the reasons."""

    proposals: list[ProposalRow]
    problems: list[str]


class CommandAdvice(Answer, frozen=True, kw_only=True):
    """Better place to start a command, here or `elsewhere` on `target_node`, and the reason."""

    elsewhere: bool
    target_node: str | None
    reason: str


class MoveRow(Answer, frozen=True, kw_only=True):
    """A move, under way or ended."""

    move_id: str
    user: str
    source_node: str
    target_node: str
    way: str
    state: str
    waits_for: str | None
    reason: str
    automatic: bool
    pid: int | None
    job_id: str | None
    command: str
    requested_at: str | None
    state_since: str | None
    shipped_bytes: int
    left_out_files: list[str]
    frozen_seconds: float | None
    problem: str | None
    end: str | None  # None while it is under way
    ended_at: str | None
    result: str | None
    returned_files: int
    kept_files: list[str]
    notes: list[str]

    @classmethod
    def of(cls, viewer: Viewer, move: Move, is_connected: IsConnected) -> MoveRow:
        has_frozen = move.frozen_at_ms > 0 or move.frozen_for_ms > 0
        is_shown = viewer.shows(move.user)
        command = shown_command(move.command.argv, MAX_COMMAND_CHARS) if move.command is not None else ""
        return cls(
            move_id=move.id,
            user=move.user,
            source_node=move.source,
            target_node=move.target,
            way=str(move.way),
            state=str(move.state),
            waits_for=waits_for(move, is_connected),
            reason=move.reason if is_shown else HIDDEN,
            automatic=move.automatic,
            pid=move.process.identity.pid if move.process is not None else None,
            job_id=move.job_id or None,
            command=command if is_shown else HIDDEN,
            requested_at=viewer.time(move.requested_at_ms),
            state_since=viewer.time(move.state_at_ms),
            shipped_bytes=move.shipped_bytes + move.final_bytes,
            left_out_files=[*move.left_out] if is_shown else [],
            frozen_seconds=move.frozen_for_ms / 1000 if has_frozen else None,
            problem=move.problem or None if is_shown else None,
            end=str(move.end) if move.end is not None else None,
            ended_at=viewer.time(move.ended_at_ms),
            result=move.result or None if is_shown else None,
            returned_files=move.returned,
            kept_files=[*move.kept] if is_shown else [],
            notes=[*move.notes] if is_shown else [],
        )


def waits_for(move: Move, is_connected: IsConnected) -> str | None:
    """Awaited step of a move as text; None if it has ended."""
    if move.is_over:
        return None
    text, node = _process_step(move) if move.process is not None else _job_step(move)
    return text if not node or is_connected(node) else f"{text}, which is not connected"


def _job_step(move: Move) -> tuple[str, str]:
    """Awaited step of the move of a job, and the node whose agent takes it."""
    if move.state is MoveState.PROPOSED:
        return f"room on {move.target}", ""
    if move.state in (MoveState.RESERVED, MoveState.DECIDED):
        return f"the end of its attempt on {move.source}", move.source
    return f"its start on {move.target}", move.target


def _process_step(move: Move) -> tuple[str, str]:
    """Awaited step of the move of a process, and the node whose agent takes it."""
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


class MoveList(Answer, frozen=True):
    moves: list[MoveRow]
    more: bool  # there is a next page
    next: str | None


class MoveDetail(Answer, frozen=True):
    move: MoveRow


class ConsentRow(Answer, frozen=True, kw_only=True):
    """Consent of a user to restart processes of a command shape in a directory elsewhere."""

    user: str
    shape: str
    directory: str | None  # None: given to an earlier version, and covers nothing
    variables: list[str]  # variables of the process that its restart gets
    given_at: str | None

    @classmethod
    def of(cls, viewer: Viewer, consent: MoveConsent) -> ConsentRow:
        return cls(
            user=consent.user,
            shape=consent.shape,
            directory=consent.cwd or None,
            variables=[*consent.variables],
            given_at=viewer.time(consent.given_at_ms),
        )


class ConsentList(Answer, frozen=True):
    consents: list[ConsentRow]
    more: bool  # there is a next page
    next: str | None


class WithdrawnConsents(Answer, frozen=True):
    withdrawn: str  # the command shape
    users: list[str]


# ------------------------------------------------------------------ automatic offloading


class ConsideredJob(Answer, frozen=True):
    """A job that automatic offloading has considered, and the reason why it was moved or left."""

    job_id: str
    reason: str


class AutoOffloadLook(Answer, frozen=True, kw_only=True):
    """Last evaluation of a node by automatic offloading."""

    node_id: str
    at: str | None
    reason: str
    jobs: list[ConsideredJob]

    @classmethod
    def of(cls, viewer: Viewer, ledger: Ledger, watch: OffloadWatch) -> AutoOffloadLook:
        jobs = ((considered, ledger.jobs.get(considered.job)) for considered in watch.considered)
        return cls(
            node_id=watch.node,
            at=viewer.time(watch.looked_at_ms),
            reason=watch.reason or "below its thresholds",
            jobs=[
                ConsideredJob(job_id=job.id, reason=considered.reason if viewer.shows(job.request.user) else HIDDEN)
                for considered, job in jobs
                if job is not None
            ],
        )


class AutoOffloadView(Answer, frozen=True, kw_only=True):
    """State of automatic offloading."""

    enabled: bool
    configured: bool
    set_by: str | None
    set_at: str | None
    stopped: str | None  # the reason why it stopped itself
    failures: int
    last_move_at: str | None
    thresholds: dict[str, float]
    check_interval_seconds: float
    cooldown_seconds: float
    degraded: dict[str, str]  # the reason by node
    nodes: list[AutoOffloadLook]

    @classmethod
    def of(cls, viewer: Viewer, ledger: Ledger, rules: OffloadRules, *, shares: bool) -> AutoOffloadView:
        state = ledger.auto_offload
        stopped = state.stopped_why or ("" if shares else NOT_SHARED)
        return cls(
            enabled=is_enabled(ledger, rules) and not stopped,
            configured=rules.enabled,
            set_by=state.set_by or None,
            set_at=viewer.time(state.set_at_ms),
            stopped=stopped or None,
            failures=state.failures,
            last_move_at=viewer.time(state.moved_at_ms),
            thresholds={
                "cpu": rules.cpu_high / 1000,
                "memory": rules.memory_high / 1000,
                "gpu": rules.gpu_high / 1000,
            },
            check_interval_seconds=rules.interval_ms / 1000,
            cooldown_seconds=rules.cooldown_ms / 1000,
            degraded={row.node: row.why for row in ledger.degraded.values()},
            nodes=[
                AutoOffloadLook.of(viewer, ledger, watch)
                for watch in sorted(ledger.offload_watches.values(), key=lambda watch: watch.node)
                if is_enabled(ledger, rules)
            ],
        )


class AutoOffloadStatus(Answer, frozen=True):
    auto_offload: AutoOffloadView
