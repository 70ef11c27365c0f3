"""Tasks: submitted as jobs, handed out to the pull workers that ask, reported by them. Used by the socket.

A task that is handed out, and a report that is taken in, is durable before the answer. A report counts once, for the
attempt of its fence, and only from the worker that was given it; any other is answered with the reason and changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.jobs import JobDetail, JobRow
from distributed_grid.api.answers.tasks import (
    AskWithdrawn,
    AssignedTask,
    TaskAssignment,
    TaskList,
    TaskReportAnswer,
    TaskRow,
)
from distributed_grid.api.worker_resources import required_amounts
from distributed_grid.control.grid import Grid, tasks_key
from distributed_grid.domain.events import AttemptEnded, JobSubmitted, NodeHeard, TaskAsked, TaskAskWithdrawn
from distributed_grid.domain.jobs import MAX_DETAIL_CHARS, Attempt, Command, Ending, Job, JobEstimate, Outcome
from distributed_grid.domain.leases import FOREVER_MS, NodeKind, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.rows import decode_as
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput, GridError
from distributed_grid.ports import Store
from distributed_grid.reactor import JobAnswer
from distributed_grid.reactor.workers.pull_workers import registered_worker
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.endpoints import ADMIN, USER, endpoint
from distributed_grid.server.pages import select_page
from distributed_grid.server.prediction.job_runs import JobSizer, command_shape
from distributed_grid.server.services.leases import parse_label
from distributed_grid.server.services.pull_workers import PullWorkerService
from distributed_grid.supervision import start_logged

ASK_SECONDS = 5.0
"""A worker that waits for a task asks anew so often, so that it goes on counting as one that asks."""
MIB = 1024**2


class TaskService:
    """Answers the requests about tasks."""

    def __init__(
        self, grid: Grid, viewer: Callable[[], Viewer], workers: PullWorkerService, sizer: JobSizer | None = None
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._workers = workers
        self._sizer = sizer
        self._waiting: dict[str, set[asyncio.Event]] = {}  # requests that wait for a task, by worker

    @endpoint(USER)
    async def submit(self, op: requests.SubmitTask, caller: Caller) -> JobDetail:
        """Queue a task; the same request id again gets the same one."""
        user = op.user or caller.user
        if user != caller.user and not caller.admin:
            raise Forbidden(f"a task of {user} cannot be submitted by {caller.user}")
        command = Command(
            op.argv,
            tuple(sorted(op.env.items())),
            timeout_ms=round(1000 * op.timeout_seconds),
            given=tuple(sorted(op.env)),
            payload=_json(op.payload, "the task") if op.payload is not None else "{}",
        )
        request = Request(
            id=op.request_id,
            user=user,
            ask=required_amounts(op.requirements),
            priority=Priority.parse(op.priority),
            wait_ms=FOREVER_MS if op.wait_seconds is None else round(1000 * op.wait_seconds),
            team=caller.team if user == caller.user else "",
            strategy=Strategy.FITTEST,
            labels=tuple(parse_label(word) for word in op.labels),
            expects_ms=command.timeout_ms,
            limits_memory=True,
            runs_on=NodeKind.ANY if op.argv else NodeKind.PULL,
        )
        task_id = op.task_id or f"task-{op.request_id[:12]}"
        estimate = await self._estimate(op, command, user)
        answer = await self._grid.handle(
            JobSubmitted(id=task_id, command=command, request=request, retries=op.retries, estimate=estimate)
        )
        assert isinstance(answer, JobAnswer)
        return JobDetail(job=JobRow.of(self._viewer(), answer.job), reasons=list(answer.reasons))

    async def _estimate(self, op: requests.SubmitTask, command: Command, user: str) -> JobEstimate | None:
        """The memory that earlier runs of such a task have used, where it states no needs and a worker has so much."""
        if op.requirements or self._sizer is None:
            return None
        shape = command_shape(command.argv, command.payload)
        estimate = await self._sizer.estimate_shape(shape, user)

        def largest(ledger: Ledger, now: int) -> int:
            return max((node.lendable.memory_bytes for node in ledger.nodes.values()), default=0)

        if estimate is None or estimate.memory_limits[0] > await self._grid.read(largest):
            return None
        return estimate

    @endpoint(ADMIN, keeps_config=True)
    async def list(self, op: requests.ListTasks, caller: Caller) -> TaskList:
        """A page of the waiting tasks, the oldest first."""
        jobs, waiting = await self._grid.read(lambda ledger, now: (tuple(ledger.jobs.values()), tuple(ledger.waiting)))
        lease_ids = {lease_id for *_, lease_id in waiting}
        tasks = await self._grid.slices.select(
            jobs, lambda job: job.lease_id in lease_ids and job.request.runs_on is not NodeKind.AGENT
        )
        page = await select_page(
            self._grid.slices,
            tasks,
            lambda job: (job.submitted_at_ms, job.uid),
            name="tasks",
            cursor=op.cursor,
            limit=op.limit,
        )
        rows = await self._grid.slices.convert(page.rows, TaskRow.of)
        return TaskList(rows, more=page.end is not None, total=len(tasks), next=page.next())

    @endpoint(ADMIN)
    async def take(self, op: requests.TakeTask, caller: Caller) -> TaskAssignment:
        """The task that a worker is to run now, or None; the same one again until it is reported.

        Cancelled, because its connection is gone, it gives back whatever it was about to answer.
        """
        op = op if op.ask_id else msgspec.structs.replace(op, ask_id=uuid.uuid4().hex)
        changed = self._grid.watch(tasks_key(op.worker_id))
        waiting = self._waiting.setdefault(op.worker_id, set())
        waiting.add(changed)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + op.wait_seconds
        asking: asyncio.Task[Job | None] | None = None

        async def give_back() -> None:
            if asking is not None:
                with contextlib.suppress(GridError):
                    await asking
            await self._withdraw(op.worker_id, op.incarnation, op.ask_id)

        try:
            while True:
                asking = asyncio.create_task(self._ask(op))
                job = await asyncio.shield(asking)  # once begun it hands out a task, whether this is cancelled or not
                left = ends_at - loop.time()
                if job is not None or left <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(ASK_SECONDS, left)):
                        await changed.wait()
                changed.clear()
        except asyncio.CancelledError:
            start_logged(give_back(), "a task that was not delivered")
            raise
        finally:
            self._grid.unwatch(tasks_key(op.worker_id), changed)
            waiting.discard(changed)
            if not waiting:
                self._waiting.pop(op.worker_id, None)
        return TaskAssignment(AssignedTask.of(job) if job is not None else None, op.ask_id)

    @endpoint(ADMIN, keeps_config=True)
    async def withdraw(self, op: requests.WithdrawAsk, caller: Caller) -> AskWithdrawn:
        """The answer with this `ask_id` was not delivered; another connection on which the worker asks does so again. A
        second call changes nothing."""
        await self._withdraw(op.worker_id, op.incarnation, op.ask_id)
        return AskWithdrawn(op.worker_id)

    async def _withdraw(self, worker_id: str, incarnation: str, ask_id: str) -> None:
        await self._grid.handle_with_retry(TaskAskWithdrawn(worker_id, incarnation, ask_id))
        for changed in self._waiting.get(worker_id, ()):
            changed.set()

    async def _ask(self, op: requests.TakeTask) -> Job | None:
        """Ask once, and again where asking has brought something. It is a sign of life, too."""
        asked = TaskAsked(op.worker_id, op.incarnation, op.running, op.ask_id)
        registered_worker(self._grid.ledger, op.worker_id, op.incarnation)
        self._workers.hear_again(op.worker_id)
        _, answer = await asyncio.gather(self._grid.handle(NodeHeard(op.worker_id)), self._grid.handle(asked))
        is_assigned = any(job.id not in op.running for job in self._grid.ledger.jobs_of(op.worker_id))
        if answer is None and is_assigned:
            answer = await self._grid.handle(asked)
        return answer.job if isinstance(answer, JobAnswer) else None

    @endpoint(ADMIN, keeps_config=True)
    async def report(self, op: requests.ReportTask, caller: Caller) -> TaskReportAnswer:
        """Close the attempt of a fence; one that is not running there any more is left as it is, and the answer says
        so. The same report again is accepted again; one that contradicts the first is not."""
        job = await self._find(op.task_id)
        attempt = next((one for one in job.attempts if one.fence == op.fence), None) if job is not None else None
        if job is None or attempt is None or attempt.node != op.worker_id:
            return _not_accepted(_why_not(op, job))
        result = _json(op.result, "the result") if op.result is not None else ""
        if attempt.outcome is None:
            is_own = op.user in ("", job.request.user)
            outcome = _outcome(op, attempt, self._grid.now_ms(), is_own=is_own)
            event = AttemptEnded(
                uid=job.uid,
                number=attempt.number,
                fence=op.fence,
                outcome=outcome,
                nodes=(op.worker_id,),
                result=result,
            )
            answer = await self._grid.handle(event)
            if isinstance(answer, JobAnswer):
                return _accepted(answer.job, repeated=False)
            job = await self._find(op.task_id)
            attempt = next((one for one in job.attempts if one.fence == op.fence), None) if job is not None else None
        if job is None or attempt is None or attempt.outcome is None or attempt.outcome.ending is Ending.LOST:
            reason = attempt.outcome.detail if attempt is not None and attempt.outcome is not None else "it is over"
            return _not_accepted(f"this attempt of {op.task_id} was given up: {reason}")
        if _contradicts(op, result, job, attempt):
            result = "completed" if attempt.outcome.exit_code == 0 else "failed"
            return _not_accepted(f"this attempt of {op.task_id} was reported before, as {result}: that report counts")
        return _accepted(job, repeated=True)

    async def _find(self, task_id: str) -> Job | None:
        """The task of exactly this id, alive or ended."""

        def alive(ledger: Ledger, now: int) -> Job | None:
            return ledger.jobs.get(ledger.job_uids.get(task_id, "")) or self._grid.recently_ended(task_id)

        def ended(store: Store) -> list[Job]:
            return [decode_as(Job, row.blob) for row in store.ended("job", request_id=task_id, limit=1)]

        found = await self._grid.read(alive)
        return found if found is not None else next(iter(await self._grid.query(ended)), None)


def _accepted(job: Job, *, repeated: bool) -> TaskReportAnswer:
    return TaskReportAnswer(accepted=True, repeated=repeated, state=str(job.state))


def _not_accepted(reason: str) -> TaskReportAnswer:
    return TaskReportAnswer(accepted=False, reason=reason)


def _why_not(op: requests.ReportTask, job: Job | None) -> str:
    if job is None:
        return f"there is no task {op.task_id}"
    if any(one.fence == op.fence for one in job.attempts):
        return f"{op.task_id} was given to another worker, not to {op.worker_id}"
    return f"the fence {op.fence} is stale: it is of no attempt of {op.task_id}"


def _contradicts(op: requests.ReportTask, result: str, job: Job, attempt: Attempt) -> bool:
    """Whether a report differs from the one that has closed this attempt; a result that a later attempt has replaced is
    not compared."""
    recorded, reported = attempt.outcome, _outcome(op, attempt, attempt.started_at_ms, is_own=True)
    if recorded is None or recorded.ending not in (Ending.EXITED, Ending.OVER_LIMIT):
        return False  # the grid itself ended it: cancelled, or over its time
    if (recorded.ending, recorded.exit_code) != (reported.ending, reported.exit_code):
        return True
    return attempt is job.attempts[-1] and result != job.result


def _outcome(op: requests.ReportTask, attempt: Attempt, now: int, *, is_own: bool) -> Outcome:
    """The end of an attempt. The usage that a worker of another user reports is dropped: nobody has measured it, and it
    would set the size of that user's next tasks."""
    over = op.over_limit and not op.succeeded
    return Outcome(
        Ending.OVER_LIMIT if over else Ending.EXITED,
        exit_code=None if over else 0 if op.succeeded else 1,
        detail=op.error[:MAX_DETAIL_CHARS],
        cpu_ms=round(1000 * op.cpu_seconds) if is_own else 0,
        max_memory_bytes=round(op.peak_memory_mb * MIB) if is_own else 0,
        wall_ms=max(now - attempt.started_at_ms, 0),
    )


def _json(value: Any, what: str) -> str:
    text = msgspec.json.encode(value)
    if len(text) > requests.MAX_PAYLOAD_BYTES:
        raise BadInput(f"{what} has {len(text):,} bytes as JSON, {requests.MAX_PAYLOAD_BYTES:,} are allowed")
    return text.decode()
