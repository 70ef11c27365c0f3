"""Batches of the ledger's owner, without input or output: decided, encoded for the store, then acted upon.

`BatchSettler` decides all entries of a batch on its ledger. Its driver (the daemon's `Grid`, the simulator's control
plane) commits the batch of `to_commit`, and only then performs the effects and answers. After a failed commit the
driver loads the stored rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from distributed_grid.domain.blocks import copy_id
from distributed_grid.domain.events import (
    BlockAsked,
    HeartbeatReceived,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    MoveRequested,
    WorkerRequested,
)
from distributed_grid.domain.followups import Cause, ScanQueue
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move
from distributed_grid.domain.rows import R, Row, decode_as, decode_row, encode_row
from distributed_grid.domain.workers import Worker
from distributed_grid.errors import Conflict, GridError, IllegalStep, StoreFailed
from distributed_grid.ports import Batch, EndedRow, EventRow, LiveRow, LoadedRows, Store
from distributed_grid.reactor import (
    JobAnswer,
    LeaseAnswer,
    MoveAnswer,
    Record,
    decide,
    step,
)
from distributed_grid.reactor.decision import Answer, WorkerAnswer
from distributed_grid.reactor.dispatch import StepResult

_json = msgspec.json.Encoder()
Question = Callable[[Ledger, int], Any]
Step = Callable[[Ledger, Cause, int], StepResult]
NO_ROOM = "not done, nothing was changed: the control plane's disk is full: only stops, cancels and ends are recorded"


class Entry:
    """An event to decide, or a question about the ledger, and its answer or failure."""

    __slots__ = ("answer", "event", "failure", "question")

    def __init__(self, event: Cause | None, question: Question | None = None) -> None:
        self.event = event
        self.question = question
        self.answer: Any = None
        self.failure: Exception | None = None


class DecisionFailed(Exception):
    """A bug, not a refusal: the ledger may be wrong, so the stored rows must be loaded again."""

    def __init__(self, culprit: Entry, cause: Exception) -> None:
        super().__init__(str(cause))
        self.culprit = culprit
        self.cause = cause


class DecidedBatch(msgspec.Struct):
    now: int
    changes: list[Row] = []
    records: list[Record] = []
    later: dict[Cause, None] = {}  # causes of the next batch, behind the entries that wait
    decided: int = 0  # number of entries


class BatchSettler:
    """The ledger, and decisions of one batch after another; `step` is the reactor's, or one that is observed."""

    def __init__(self, history: Store, step: Step = step) -> None:
        self.ledger = Ledger()
        self._history = history
        self._step = step
        self.last_seq = 0
        self._ended: dict[tuple[str, str], Row] = {}  # rows of this batch, by kind and request id

    def load(self, loaded: LoadedRows, *, keep_volatile: bool = True) -> None:
        """Replace the ledger by the stored rows; volatile ones are kept, unless this is another process."""
        volatile = [row for row in self.ledger.rows() if row.is_volatile] if keep_volatile else []
        self.last_seq = loaded.last_event_seq
        self.ledger = Ledger(decode_row(row.kind, row.blob) for row in loaded.live if row.blob is not None)
        self.ledger.apply(volatile)

    def decide(
        self,
        entries: Iterable[Entry],
        now: int,
        *,
        is_long: Callable[[], bool] = lambda: False,
        has_room: bool = True,
    ) -> DecidedBatch:
        """Decide every entry in its order, until it `is_long`; a refusal is an answer. Raises DecisionFailed. Without
        room in the store new work is refused, and the queue waits."""
        batch = DecidedBatch(now)
        self._ended.clear()
        for entry in entries:
            try:
                self._decide(entry, batch, has_room=has_room)
            except IllegalStep as bug:
                raise DecisionFailed(entry, bug) from bug
            except StoreFailed as refusal:  # there is no room, not even for a record of it
                entry.failure = refusal
            except GridError as refusal:
                entry.failure = refusal
                refused = refusal_record(entry.event, refusal) if entry.event is not None else None
                if refused is not None:
                    batch.records.append(refused)
            except Exception as bug:  # whatever it is, it must not stop the others
                raise DecisionFailed(entry, bug) from bug
            batch.decided += 1
            if is_long():
                break
        return batch

    def _decide(self, entry: Entry, batch: DecidedBatch, *, has_room: bool) -> None:
        if entry.question is not None:
            entry.answer = entry.question(self.ledger, batch.now)
            return
        assert entry.event is not None
        entry.answer = self.recall(entry.event)
        if entry.answer is not None:
            return
        if has_room:
            stepped = self._step(self.ledger, entry.event, batch.now)
        elif self._is_new_work(entry.event):
            raise StoreFailed(NO_ROOM)
        elif isinstance(entry.event, ScanQueue):
            return
        else:
            stepped = step(self.ledger, entry.event, batch.now, scan_queue=False)
        batch.changes += stepped.changes
        batch.records += stepped.records
        batch.later.update(dict.fromkeys(stepped.later))
        entry.answer = stepped.answer
        for row in stepped.changes:
            if row.is_over and (entry_in_history := row.ended()) is not None:
                self._ended[row.kind, entry_in_history.request_id] = row

    def _is_new_work(self, event: Cause) -> bool:
        """True if an event adds a request, block, worker or move to the ledger."""
        match event:
            case JobSubmitted() | LeaseAsked():
                return event.request.id not in self.ledger.by_request
            case BlockAsked():
                return event.id not in self.ledger.blocks
            case WorkerRequested():
                return event.worker.id not in self.ledger.workers
            case MoveRequested():
                return event.move.id not in self.ledger.moves
        return False

    def observe(self, event: HeartbeatReceived, now: int) -> list[Row]:
        """Apply a heartbeat at once, also while a batch is being committed, and return its changes, which are all
        volatile. Its consequences wait their turn, as an event of their own (`NodeHeard`)."""
        changes = decide(self.ledger, event, now).changes
        self.ledger.apply(changes)
        return changes

    def recall(self, event: Cause) -> Answer:
        """The outcome of an ended request that is repeated. Raises Conflict."""
        match event:
            case BlockAsked(id=block_id) if block_id not in self.ledger.blocks:
                first = copy_id(block_id, 1)  # its copies would have the ids of leases that have ended
                if first in self.ledger.by_request or self._ended_row(Lease, first) is not None:
                    raise Conflict(f"block {block_id} was allocated before, and is over")
            case WorkerRequested(worker=Worker(id=worker_id)) if worker_id not in self.ledger.workers:
                worker = self._ended_row(Worker, worker_id)
                return None if worker is None else WorkerAnswer(worker)
            case MoveRequested(move=Move(id=move_id)) if move_id not in self.ledger.moves:
                move = self._ended_row(Move, move_id)
                return None if move is None else MoveAnswer(move)
            case LeaseAsked(request=request, again=False) if request.id not in self.ledger.by_request:
                lease = self._ended_row(Lease, request.id)
                if lease is not None and lease.request != request:
                    raise Conflict(f"request {request.id} was used before for something else")
                return None if lease is None else LeaseAnswer(lease)
            case JobSubmitted(request=request) if request.id not in self.ledger.by_request:
                job = self._ended_row(Job, request.id)
                identity = (request, event.id, event.command, event.fetch)
                if job is not None and (job.request, job.id, job.command, job.fetch) != identity:
                    raise Conflict(f"request {request.id} was used before for something else")
                return None if job is None else JobAnswer(job)
        return None

    def _ended_row(self, row_type: type[R], request_id: str) -> R | None:
        row = self._ended.get((row_type.kind, request_id))
        if isinstance(row, row_type):
            return row
        rows = self._history.ended(row_type.kind, request_id=request_id, limit=1)
        return decode_as(row_type, rows[0].blob) if rows else None

    def to_commit(self, batch: DecidedBatch) -> Batch | None:
        """The batch that the store must keep before any answer; None without durable changes."""
        if not batch.records and all(row.is_volatile for row in batch.changes):
            return None
        return batch_of(batch.changes, batch.records, batch.now, self.last_seq)

    def committed(self, stored: Batch) -> None:
        self.last_seq += len(stored.events)


def batch_of(changes: Iterable[Row], records: Iterable[Record], now: int, last_seq: int) -> Batch:
    """The content of one commit; of each row only its last state."""
    last = {(row.kind, row.key): row for row in changes if not row.is_volatile}
    live = [LiveRow(kind, key, None if row.is_over else encode_row(row)) for (kind, key), row in last.items()]
    ended = [
        EndedRow(kind=row.kind, blob=encode_row(row), **msgspec.structs.asdict(entry))
        for row in last.values()
        if row.is_over and (entry := row.ended()) is not None
    ]
    events = [
        EventRow(
            seq=seq,
            at_ms=now,
            type=record.type,
            user=record.user,
            subject=record.subject,
            node=record.node,
            reason="",
            blob=_json.encode(record),
        )
        for seq, record in enumerate(records, last_seq + 1)
    ]
    return Batch(live, ended, events)


def refusal_record(event: Cause, refusal: GridError) -> Record | None:
    """The audit line of a request that was refused; reports that come too late are not requests."""
    if isinstance(event, LeaseAsked | JobSubmitted):
        data = {"job_id": event.id} if isinstance(event, JobSubmitted) else {}
        return Record("refused", event.request.user, event.request.id, reason=str(refusal), data=data)
    if isinstance(event, LeaseExtended):
        return Record("refused", event.by, event.lease_id, reason=str(refusal), data={"about": "extend"})
    if isinstance(event, MoveRequested):
        data = {"about": "move", "from": event.move.source, "to": event.move.target, "way": str(event.move.way)}
        data |= {"job": event.move.job, "job_id": event.move.job_id} if event.move.job else {}
        return Record("refused", event.move.user, event.move.id, event.move.source, str(refusal), data=data)
    if isinstance(event, JobCancelled):
        return Record("refused", event.by, event.uid, reason=str(refusal), data={"about": "cancel"})
    return None
