"""Jobs, their attempts, files and notices."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from distributed_grid.api.answers.common import HIDDEN, Answer, AskedResources, PageAnswer, Viewer, gigabytes, headline
from distributed_grid.api.answers.leases import DecisionRow
from distributed_grid.api.worker_resources import requirements_view
from distributed_grid.domain.deliveries import DeliveredFiles, Delivery
from distributed_grid.domain.jobs import Attempt, Command, Ending, Job, Outcome
from distributed_grid.masking.command_line import CUT_MARGIN_CHARS, mask_text, shown_command

MAX_LISTED_CHARS, MAX_LISTED_VARIABLES, MAX_LISTED_ATTEMPTS = 1000, 200, 50
"""Of one job in a list."""


def shell_code(outcome: Outcome) -> int:
    """The exit code that tells a shell how a job ended."""
    if outcome.ending in (Ending.TIMED_OUT, Ending.WAITED_TOO_LONG):
        return 124
    if outcome.ending is Ending.CANCELLED:
        return 130
    if outcome.ending in (Ending.EXITED, Ending.NEVER_STARTED) and outcome.exit_code is not None:
        return outcome.exit_code
    if outcome.ending is Ending.OVER_LIMIT:
        return 137
    if outcome.signal is not None:
        return 128 + outcome.signal
    return 1


class OutcomeRow(Answer, frozen=True, kw_only=True):
    """The end of a job or an attempt; its usage is known with its end."""

    outcome: str | None
    exit_code: int | None
    signal: int | None
    detail: str | None
    cpu_seconds: float | UnsetType = UNSET
    max_memory_gb: float | UnsetType = UNSET
    wall_seconds: float | UnsetType = UNSET
    shell_code: int | UnsetType = UNSET


def _outcome_fields(outcome: Outcome | None, *, hides_detail: bool) -> dict[str, Any]:
    if outcome is None:
        return {"outcome": None, "exit_code": None, "signal": None, "detail": None}
    return {
        "outcome": str(outcome.ending),
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "detail": None if hides_detail else outcome.detail or None,
        "cpu_seconds": outcome.cpu_ms / 1000,
        "max_memory_gb": gigabytes(outcome.max_memory_bytes),
        "wall_seconds": outcome.wall_ms / 1000,
        "shell_code": shell_code(outcome),
    }


class AttemptRow(OutcomeRow, frozen=True, kw_only=True):
    """One run of a job's command on one node."""

    number: int
    allocation_id: str
    node_id: str
    fence: int
    pid: int | None
    cores: list[int]
    memory_limit_gb: float | None
    growths: int  # how often its lease has grown, of which the memory was learned
    growth_refused: str | None  # why it could not when the job last held more
    assigned_at: str | None
    started_at: str | None
    checkpoint_at: str | None
    ended_at: str | None

    @classmethod
    def of(cls, viewer: Viewer, attempt: Attempt, *, hides_detail: bool = False) -> AttemptRow:
        return cls(
            number=attempt.number,
            allocation_id=attempt.lease_id,
            node_id=attempt.node,
            fence=attempt.fence,
            pid=attempt.pid or None,
            cores=list(attempt.cores),
            memory_limit_gb=gigabytes(attempt.memory_limit_bytes) if attempt.memory_limit_bytes else None,
            growths=attempt.growths,
            growth_refused=attempt.growth_refused or None,
            assigned_at=viewer.time(attempt.assigned_at_ms),
            started_at=viewer.time(attempt.started_at_ms),
            checkpoint_at=viewer.time(attempt.marked_at_ms),
            ended_at=viewer.time(attempt.ended_at_ms),
            **_outcome_fields(attempt.outcome, hides_detail=hides_detail),
        )


class SizingRow(Answer, frozen=True, kw_only=True):
    """The memory that the grid gave a job without stated needs, and its origin."""

    memory_gb: float
    limits_gb: list[float]  # of the job and its reruns
    tier: str
    confidence: float
    samples: int
    overruns: int
    may_outgrow: bool  # the memory is that of a lease that grows
    reduced_from_gb: float | None  # the learned memory, if the job got the free rest after a long wait

    @classmethod
    def of(cls, job: Job) -> SizingRow | None:
        """None where the grid gave no limit."""
        estimate = job.estimate
        if estimate is None or not estimate.memory_limits:
            return None
        return cls(
            memory_gb=gigabytes(job.given_limit_bytes),
            limits_gb=[gigabytes(limit) for limit in estimate.memory_limits],
            tier=estimate.tier,
            confidence=estimate.confidence_milli / 1000,
            samples=estimate.samples,
            overruns=job.overruns,
            may_outgrow=job.may_outgrow,
            reduced_from_gb=gigabytes(estimate.reduced_from_bytes) if estimate.reduced_from_bytes else None,
        )


class CheckpointRow(Answer, frozen=True):
    """Checkpoint directory of a job, as the next attempt finds it."""

    attempt: int | None  # that left it; None where nothing is in it
    files: int
    bytes: int
    awaited_attempt: int | None  # whose directory is brought first
    problem: str | None  # why the last could not be brought

    @classmethod
    def of(cls, job: Job, *, hides_problem: bool = False) -> CheckpointRow | None:
        """None where no attempt has left anything."""
        problem = "" if hides_problem else job.checkpoint_problem
        if not (job.checkpoint or job.checkpoint_from or problem):
            return None
        return cls(
            job.checkpoint_attempt or None,
            job.checkpoint_files,
            job.checkpoint_bytes,
            job.checkpoint_from or None,
            problem or None,
        )


class DeliveryRow(Answer, frozen=True, kw_only=True):
    """Files of a job that are brought into a directory of its user."""

    state: str
    patterns: list[str]
    directory: str | None
    files: int
    bytes: int
    unchanged: int
    in_place: bool
    beside: dict[str, str]
    protected: list[str]
    executable: list[str]
    skipped: list[str]
    problem: str | None
    ended_at: str | None

    @classmethod
    def of(cls, viewer: Viewer, job: Job, delivery: Delivery | None) -> DeliveryRow | None:
        """None where no files are wanted, or the reader may not see them."""
        order = delivery.order if delivery is not None else job.fetch
        if order is None or not viewer.shows(job.request.user):
            return None
        files, state = DeliveredFiles(), "waiting"
        if delivery is not None:
            files, state = delivery.delivered, str(delivery.end) if delivery.end is not None else "delivering"
        return cls(
            state=state,
            patterns=list(order.patterns),
            directory=files.directory or order.directory or None,
            files=files.files,
            bytes=files.bytes,
            unchanged=files.unchanged,
            in_place=files.in_place,
            beside=dict(files.beside),
            protected=list(files.protected),
            executable=list(files.executable),
            skipped=list(files.skipped),
            problem=delivery.problem or None if delivery is not None else None,
            ended_at=viewer.time(delivery.ended_at_ms) if delivery is not None else None,
        )


class JobRow(OutcomeRow, frozen=True, kw_only=True):
    """A job, alive or ended."""

    job_id: str
    uid: str
    command: str
    cwd: str | None
    environment_names: list[str]
    user: str
    state: str
    node_id: str | None
    resource_type: str
    amount: float
    resources: AskedResources
    sizing: SizingRow | None
    expected_seconds: float | None
    priority: str
    wait_seconds: float | None  # for its first start; None: until it starts or is cancelled
    submitted_at: str | None
    ended_at: str | None
    attempts: list[AttemptRow]
    checkpoint: CheckpointRow | None
    retries_left: int
    restartable: bool
    moved_at: str | None  # the last move
    detached_at: str | None  # when the command that followed it left it running
    detached_reason: str | None
    result: Any  # reported by a task

    @classmethod
    def of(cls, viewer: Viewer, job: Job) -> JobRow:
        kind, amount = headline(job.request.ask)
        is_shown, command, estimate = viewer.shows(job.request.user), job.command, job.estimate
        text = (shown_command(command.argv) or f"task {mask_text(command.payload)}") if is_shown else HIDDEN
        return cls(
            job_id=job.id,
            uid=job.uid,
            command=text,
            cwd=command.cwd or None if is_shown else None,
            environment_names=sorted(name for name, _ in command.env) if is_shown else [],
            user=job.request.user,
            state=str(job.state),
            node_id=job.attempts[-1].node if job.attempts else None,
            resource_type=kind,
            amount=amount,
            resources=AskedResources.of(job.sized_request.ask),
            sizing=SizingRow.of(job),
            expected_seconds=estimate.run_ms / 1000 if estimate is not None and estimate.run_ms else None,
            priority=job.request.priority.name.lower(),
            wait_seconds=None if job.request.waits_forever else job.request.wait_ms / 1000,
            submitted_at=viewer.time(job.submitted_at_ms),
            ended_at=viewer.time(job.ended_at_ms),
            attempts=[AttemptRow.of(viewer, attempt, hides_detail=not is_shown) for attempt in job.attempts],
            checkpoint=CheckpointRow.of(job, hides_problem=not is_shown),
            retries_left=job.retries_left,
            restartable=job.restartable,
            moved_at=viewer.time(job.moved_at_ms),
            detached_at=viewer.time(job.detached_at_ms),
            detached_reason=job.detached_reason or None if is_shown else None,
            result=json.loads(job.result) if job.result and is_shown else None,
            **_outcome_fields(job.outcome, hides_detail=not is_shown),
        )

    @classmethod
    def listed(cls, viewer: Viewer, job: Job) -> JobRow:
        """A job in a list: the beginning of its command, its last attempts, and no result."""
        attempts = job.attempts[-MAX_LISTED_ATTEMPTS:]
        row = cls.of(viewer, replace(job, command=_short_command(job.command), attempts=attempts, result=""))
        if len(row.command) > MAX_LISTED_CHARS:
            return replace(row, command=row.command[:MAX_LISTED_CHARS] + "…")
        return row


def _short_command(command: Command) -> Command:
    """The beginning of a command as a list shows it, and a margin, so that a secret is not cut where it begins."""
    words: list[str] = []
    left = MAX_LISTED_CHARS
    for word in command.argv:
        if left < 0:
            break
        words.append(word[: MAX_LISTED_CHARS + CUT_MARGIN_CHARS])
        left -= len(word) + 1
    env = tuple((name, "") for name, _ in command.env[:MAX_LISTED_VARIABLES])
    return replace(command, argv=tuple(words), env=env, payload=command.payload[: MAX_LISTED_CHARS + CUT_MARGIN_CHARS])


class JobList(PageAnswer, frozen=True, kw_only=True):
    jobs: list[JobRow]
    total: int
    """All that are kept, in any state."""
    by_state: dict[str, int]
    """Number of these in each state."""


class JobDetail(Answer, frozen=True, kw_only=True):
    """One job, with the files that are brought back; when it is submitted also why it waits, node by node, and the
    decision about it."""

    job: JobRow
    delivery: DeliveryRow | UnsetType | None = UNSET
    reasons: list[str] | UnsetType = UNSET
    decision: DecisionRow | UnsetType = UNSET
    note: str | UnsetType | None = UNSET


class LiveJobs(Answer, frozen=True):
    """Uids of jobs that have not ended."""

    uids: list[str]
    next: str | None


class FetchRecorded(Answer, frozen=True):
    job_id: str


class DeliveryDetail(Answer, frozen=True):
    delivery: DeliveryRow | None


class FetchedTree(Answer, frozen=True):
    """Header of the files of a job."""

    job_id: str
    workdir: str


class FetchedFile(Answer, frozen=True):
    """Header of one file; its bytes follow."""

    file: str  # the path in hexadecimal
    size: int
    executable: bool


class FetchedFiles(Answer, frozen=True):
    """Totals of the files of a job."""

    files: int
    bytes: int
    in_place: bool
    skipped: list[str]
    unchanged: int


class JobNotice(Answer, frozen=True, kw_only=True):
    """A change of a running job, or (with the number 0) the beginning of an attempt's output."""

    seq: int  # number of its audit record
    notice: str
    node_id: str
    reason: str
    attempt: int  # the one that has begun
    message: str


class TaskRow(Answer, frozen=True, kw_only=True):
    """A waiting task."""

    task_id: str
    payload: Any
    command: list[str]
    env: dict[str, str]
    timeout_seconds: float
    requirements: dict[str, float]
    priority: str
    retries_left: int

    @classmethod
    def of(cls, job: Job) -> TaskRow:
        return cls(**_task_fields(job))


class AssignedTask(TaskRow, frozen=True, kw_only=True):
    """A task as its worker gets it, with its fence and the reservation that it runs under."""

    worker_id: str
    attempt: int
    fence: int
    resource_reservation_id: str

    @classmethod
    def of(cls, job: Job) -> AssignedTask:
        attempt = job.attempts[-1]
        return cls(
            worker_id=attempt.node,
            attempt=attempt.number,
            fence=attempt.fence,
            resource_reservation_id=attempt.lease_id,
            **_task_fields(job),
        )


def _task_fields(job: Job) -> dict[str, Any]:
    command = job.command
    return {
        "task_id": job.id,
        "payload": msgspec.json.decode(command.payload or "{}"),
        "command": list(command.argv),
        "env": dict(command.env),
        "timeout_seconds": command.timeout_ms / 1000,
        "requirements": requirements_view(job.sized_request.ask),
        "priority": job.request.priority.name.lower(),
        "retries_left": job.retries_left,
    }


class TaskList(Answer, frozen=True):
    tasks: list[TaskRow]
    more: bool
    total: int  # in all pages
    next: str | None


class TaskAssignment(Answer, frozen=True):
    """The task that a worker is to run now, or none."""

    task: AssignedTask | None
    ask_id: str


class AskWithdrawn(Answer, frozen=True):
    worker_id: str


class TaskReportAnswer(Answer, frozen=True, kw_only=True):
    """Whether a report was taken in, and the state of the task; else the reason."""

    accepted: bool
    repeated: bool = False
    reason: str | None = None
    state: str | None = None
