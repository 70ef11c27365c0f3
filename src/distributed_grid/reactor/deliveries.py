"""Deciders of deliveries: files of an ended job are on their way from its end until they are reported there."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.deliveries import Delivery, DeliveryEnd, FetchOrder
from distributed_grid.domain.events import FilesDelayed, FilesDelivered, FilesFetched, FilesUndeliverable
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.reactor.decision import Decision, Record, RecordType


def begin_deliveries(decision: Decision, now: int) -> Decision:
    """The decision, with a delivery for each job that it ends and whose files are wanted."""
    decision.changes += [
        Delivery(
            job=row.uid,
            job_id=row.id,
            user=row.request.user,
            node=row.attempts[-1].node if row.attempts else "",
            order=row.fetch,
            began_at_ms=now,
            shipped=row.command.workdir,
        )
        for row in decision.changes
        if isinstance(row, Job) and row.is_over and row.fetch is not None
    ]
    return decision


def on_delivered(ledger: Ledger, event: FilesDelivered, now: int) -> Decision:
    """End a delivery. One that is over already stays as it is."""
    delivery = ledger.deliveries.get(event.job)
    if delivery is None:
        return Decision()
    ended = replace(delivery, delivered=event.delivered, end=DeliveryEnd.DELIVERED, ended_at_ms=now, problem="")
    return Decision([ended], [_record("files-delivered", ended)])


def on_delayed(ledger: Ledger, event: FilesDelayed, now: int) -> Decision:
    """Note why the files could not be brought yet; they are tried again."""
    delivery = ledger.deliveries.get(event.job)
    if delivery is None or delivery.problem == event.problem:
        return Decision()
    return Decision([replace(delivery, problem=event.problem)])


def on_undeliverable(ledger: Ledger, event: FilesUndeliverable, now: int) -> Decision:
    """End a delivery of files that nobody can bring any more."""
    delivery = ledger.deliveries.get(event.job)
    if delivery is None:
        return Decision()
    ended = replace(delivery, problem=event.problem, end=DeliveryEnd.FAILED, ended_at_ms=now)
    return Decision([ended], [_record("files-not-delivered", ended)])


def on_fetched(ledger: Ledger, event: FilesFetched, now: int) -> Decision:
    """Record files that their user has fetched by hand; an ordered delivery goes on."""
    if event.job in ledger.deliveries:
        return Decision()
    fetched = Delivery(
        job=event.job,
        job_id=event.job_id,
        user=event.user,
        node=event.node,
        order=FetchOrder(event.patterns, event.delivered.directory),
        began_at_ms=now,
        delivered=event.delivered,
        end=DeliveryEnd.DELIVERED,
        ended_at_ms=now,
    )
    return Decision([fetched], [_record("files-fetched", fetched)])


def _record(kind: RecordType, delivery: Delivery) -> Record:
    files = delivery.delivered
    data = {"job_id": delivery.job_id, "files": files.files, "bytes": files.bytes, "directory": files.directory}
    return Record(kind, delivery.user, delivery.job, delivery.node, delivery.problem, data=data)
