"""From decided rows to what the store keeps: live rows, ended rows, and the lines of the audit trail."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from distributed_grid.domain.events import Event, JobCancelled, JobSubmitted, LeaseAsked, LeaseExtended
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.rows import VOLATILE, Row, encode_row
from distributed_grid.errors import GridError
from distributed_grid.ports import Batch, EndedRow, EventRow, LiveRow
from distributed_grid.reactor import Record

_json = msgspec.json.Encoder()


def batch_of(changes: Iterable[Row], records: Iterable[Record], now: int, last_seq: int) -> Batch:
    """Everything one commit makes durable; of each row only its last state."""
    last = {(row.kind, row.key): row for row in changes if row.kind not in VOLATILE}
    live = [LiveRow(kind, key, None if row.is_over else encode_row(row)) for (kind, key), row in last.items()]
    ended = [_ended(row) for row in last.values() if row.is_over and isinstance(row, Lease | Job)]
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
    if isinstance(event, JobCancelled):
        return Record("refused", event.by, event.uid, reason=str(refusal), data={"about": "cancel"})
    return None
