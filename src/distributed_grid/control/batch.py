"""Batches of the ledger's owner, without input or output: decided, encoded for the store, then acted upon.

`BatchSettler` decides all entries of a batch on its ledger. Whoever drives it (the daemon's `Grid`, the simulator's
control plane) commits what `to_commit` says, and only then performs the effects and answers. A batch that could not be
committed has not happened: the driver loads the stored rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from distributed_grid.domain.blocks import copy_id
from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.events import (
    BlockAsked,
    Event,
    HeartbeatReceived,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    MoveRequested,
    QueueScanned,
    WorkerRequested,
)
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move
from distributed_grid.domain.rows import VOLATILE, Row, decode_row, encode_row
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
Step = Callable[[Ledger, Event, int], StepResult]
NO_ROOM = "not done, nothing was changed: the control plane's disk is full: only stops, cancels and ends are recorded"


class Entry:
    """An event to decide, or a question about the ledger, and what came of it."""

    __slots__ = ("answer", "event", "failure", "question")

    def __init__(self, event: Event | None, question: Question | None = None) -> None:
        self.event = event
        self.question = question
        self.answer: Any = None
        self.failure: Exception | None = None


class DecisionFailed(Exception):
    """A bug, not a refusal: the ledger is not to be trusted, the stored rows must be loaded again."""

    def __init__(self, culprit: Entry, cause: Exception) -> None:
        super().__init__(str(cause))
        self.culprit = culprit
        self.cause = cause


class DecidedBatch(msgspec.Struct):
    """Rows and audit records that one batch of entries has brought; how many of them were decided, and the events to
    enter `later`, as soon as others have had their turn."""

    now: int
    changes: list[Row] = []
    records: list[Record] = []
    later: dict[Event, None] = {}
    decided: int = 0


class BatchSettler:
    """The ledger, and the deciding of one batch after another; `step` is the reactor's, or one that is observed."""

    def __init__(self, history: Store, step: Step = step) -> None:
        self.ledger = Ledger()
        self._history = history
        self._step = step
        self.last_seq = 0
        self._ended: dict[str, Lease | Job] = {}
        self._ended_workers: dict[str, Worker] = {}
        self._ended_moves: dict[str, Move] = {}

    def load(self, loaded: LoadedRows, *, keep_volatile: bool = True) -> None:
        """Go on from what is stored; what is never stored is kept, unless this is another process."""
        volatile = [row for row in self.ledger.rows() if row.kind in VOLATILE] if keep_volatile else []
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
        """Decide every entry in its order, until it `is_long`; a refusal is an answer. Raises DecisionFailed. Where the
        store has no room new work is refused, and the queue waits."""
        batch = DecidedBatch(now)
        self._ended.clear()
        self._ended_workers.clear()
        self._ended_moves.clear()
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
        elif isinstance(entry.event, QueueScanned):
            return
        else:
            stepped = step(self.ledger, entry.event, batch.now, scan_queue=False)
        batch.changes += stepped.changes
        batch.records += stepped.records
        batch.later.update(dict.fromkeys(stepped.later))
        entry.answer = stepped.answer
        for row in stepped.changes:
            if isinstance(row, Lease | Job) and row.is_over:
                self._ended[row.request.id] = row
            elif isinstance(row, Worker) and row.is_over:
                self._ended_workers[row.id] = row
            elif isinstance(row, Move) and row.is_over:
                self._ended_moves[row.id] = row

    def _is_new_work(self, event: Event) -> bool:
        """Whether an event asks for something that the ledger does not have yet."""
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
        """Apply a heartbeat at once, also while a batch is being committed: the rows it has changed, none of which is
        ever stored. What follows from it (`NodeHeard`) is an event of its own, which waits its turn."""
        changes = decide(self.ledger, event, now).changes
        self.ledger.apply(changes)
        return changes

    def recall(self, event: Event) -> Answer:
        """The outcome of a request that is over already, when it is repeated. Raises Conflict."""
        if isinstance(event, BlockAsked):
            self._refuse_block_that_is_over(event.id)
        if isinstance(event, WorkerRequested):
            return self._recall_worker(event.worker.id)
        if isinstance(event, MoveRequested):
            return self._recall_move(event.move.id)
        if not isinstance(event, LeaseAsked | JobSubmitted) or event.request.id in self.ledger.by_request:
            return None
        if isinstance(event, LeaseAsked) and event.again:
            return None
        kind = "lease" if isinstance(event, LeaseAsked) else "job"
        row: Row | None = self._ended.get(event.request.id)
        if row is None:
            found = self._history.ended(kind, request_id=event.request.id, limit=1)
            if not found:
                return None
            row = decode_row(kind, found[0].blob)
        if not isinstance(row, Lease | Job) or not _is_of(row, event):
            raise Conflict(f"request {event.request.id} was used before for something else")
        return LeaseAnswer(row) if isinstance(row, Lease) else JobAnswer(row)

    def _recall_worker(self, worker_id: str) -> WorkerAnswer | None:
        """A worker that is gone already: its id names no other machine."""
        if worker_id in self.ledger.workers:
            return None
        worker = self._ended_workers.get(worker_id)
        if worker is None:
            found = self._history.ended(Worker.kind, request_id=worker_id, limit=1)
            row = decode_row(Worker.kind, found[0].blob) if found else None
            worker = row if isinstance(row, Worker) else None
        return None if worker is None else WorkerAnswer(worker)

    def _recall_move(self, move_id: str) -> MoveAnswer | None:
        """A move that is over already: its id names no other one."""
        if move_id in self.ledger.moves:
            return None
        move = self._ended_moves.get(move_id)
        if move is None:
            found = self._history.ended(Move.kind, request_id=move_id, limit=1)
            row = decode_row(Move.kind, found[0].blob) if found else None
            move = row if isinstance(row, Move) else None
        return None if move is None else MoveAnswer(move)

    def _refuse_block_that_is_over(self, block_id: str) -> None:
        """Its copies would have the ids of leases that have ended."""
        first = copy_id(block_id, 1)
        if block_id in self.ledger.blocks:
            return
        if (
            first in self.ledger.by_request
            or first in self._ended
            or self._history.ended("lease", request_id=first, limit=1)
        ):
            raise Conflict(f"block {block_id} was allocated before, and is over")

    def to_commit(self, batch: DecidedBatch) -> Batch | None:
        """What the store must keep before anybody hears of this batch; None where nothing durable has changed."""
        if not batch.records and all(row.kind in VOLATILE for row in batch.changes):
            return None
        return batch_of(batch.changes, batch.records, batch.now, self.last_seq)

    def committed(self, stored: Batch) -> None:
        """The store has it."""
        self.last_seq += len(stored.events)


def _is_of(row: Lease | Job, event: LeaseAsked | JobSubmitted) -> bool:
    """Whether this is what became of that very request: its content too, not only its id."""
    if row.request != event.request or isinstance(row, Job) != isinstance(event, JobSubmitted):
        return False
    if isinstance(row, Job) and isinstance(event, JobSubmitted):
        return (row.id, row.command, row.fetch) == (event.id, event.command, event.fetch)
    return True


def batch_of(changes: Iterable[Row], records: Iterable[Record], now: int, last_seq: int) -> Batch:
    """Everything one commit makes durable; of each row only its last state."""
    last = {(row.kind, row.key): row for row in changes if row.kind not in VOLATILE}
    live = [LiveRow(kind, key, None if row.is_over else encode_row(row)) for (kind, key), row in last.items()]
    ended = [_ended(row) for row in last.values() if row.is_over and isinstance(row, Lease | Job)]
    ended += [_ended_worker(row) for row in last.values() if isinstance(row, Worker) and row.is_over]
    ended += [_ended_move(row) for row in last.values() if isinstance(row, Move) and row.is_over]
    ended += [_ended_delivery(row) for row in last.values() if isinstance(row, Delivery) and row.is_over]
    events = [_event(record, now, seq) for seq, record in enumerate(records, last_seq + 1)]
    return Batch(live, ended, events)


def _ended(row: Lease | Job) -> EndedRow:
    blob = encode_row(row)
    request = row.request
    ask = request.ask
    if isinstance(row, Lease):
        start, node, reason = row.granted_at_ms, row.node, str(row.end)
        key = row.id
    else:
        attempt = row.attempts[-1] if row.attempts else None
        start, node = (attempt.started_at_ms, attempt.node) if attempt is not None else (0, "")
        reason = str(row.outcome.ending) if row.outcome is not None else ""
        key = row.id
    return EndedRow(
        row.kind,
        key,
        request.id,
        request.user,
        node,
        row.ended_at_ms,
        start,
        reason,
        ask.cpu_milli,
        ask.memory_bytes,
        ask.gpu_milli,
        blob,
        request.target,
    )


def _ended_worker(row: Worker) -> EndedRow:
    has = row.resources
    return EndedRow(
        row.kind,
        row.id,
        row.id,
        row.by,
        row.node,
        row.ended_at_ms,
        row.created_at_ms,
        "gone",
        has.cpu_milli,
        has.memory_bytes,
        1000 * has.gpu_count,
        encode_row(row),
        row.provider,
    )


def _ended_move(row: Move) -> EndedRow:
    """A move in the history; what it used is counted with its lease and its job."""
    blob, end = encode_row(row), str(row.end)
    return EndedRow(row.kind, row.id, row.id, row.user, row.source, row.ended_at_ms, 0, end, 0, 0, 0, blob, row.target)


def _ended_delivery(row: Delivery) -> EndedRow:
    blob, end = encode_row(row), str(row.end)
    return EndedRow(row.kind, row.job, row.job, row.user, row.node, row.ended_at_ms, 0, end, 0, 0, 0, blob, "")


def _event(record: Record, now: int, seq: int) -> EventRow:
    blob = _json.encode(record)
    return EventRow(seq, now, record.type, record.user, record.subject, record.node, "", blob)


def refusal_record(event: Event, refusal: GridError) -> Record | None:
    """The audit line of a request that was refused; reports that come too late are not requests."""
    if isinstance(event, LeaseAsked | JobSubmitted):
        data = {"job_id": event.id} if isinstance(event, JobSubmitted) else {}
        return Record("refused", event.request.user, event.request.id, reason=str(refusal), data=data)
    if isinstance(event, LeaseExtended):
        return Record("refused", event.by, event.lease_id, reason=str(refusal), data={"about": "extend"})
    if isinstance(event, MoveRequested):
        data = {"about": "move", "from": event.move.source, "to": event.move.target, "way": str(event.move.way)}
        data |= {"job": event.move.job, "job_id": event.move.job_id} if event.move.job else {}
        return Record("refused", event.move.user, event.move.id, event.move.source, str(refusal), data)
    if isinstance(event, JobCancelled):
        return Record("refused", event.by, event.uid, reason=str(refusal), data={"about": "cancel"})
    return None
