"""Report budget: how many audit records the reports of a node's agent may cause.

An agent that lies, or that is out of order, can report without end, and each report may be worth a record. A node may
cause `BURST` of them at once, and one more every `REFILL_MS`. What is beyond that is only counted, and the count is
recorded with the next record that there is room for. The changes that a report makes are not affected.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import AttemptEnded, AttemptPaused, EpochReported, Event, NodeDeclared
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import NodeObservation
from distributed_grid.reactor.decision import Decision, Record

BURST = 200
REFILL_MS = 10_000
MAX_REASON_CHARS = 500

REPORTS = (AttemptEnded, AttemptPaused, NodeDeclared, EpochReported)
"""The events that an agent can cause as often as it likes."""

_OMITTED = frozenset({"late-report", "paused", "resumed", "node-declared", "node-kept", "node-epoch"})
"""What can be left out: all else follows from a decision of the grid's own, and is missed in the history of a job."""


def charge(ledger: Ledger, event: Event, decision: Decision, now: int) -> Decision:
    """The decision about a report, with no more records than the budget of the reporting node allows."""
    if not isinstance(event, REPORTS) or not decision.records:
        return decision
    name = decision.records[0].node
    changed = [row for row in decision.changes if isinstance(row, NodeObservation)]
    seen = changed[0] if changed else ledger.observations.get(name)
    if seen is None and isinstance(event, NodeDeclared):
        return decision  # by the config: its agent was not heard yet
    before = seen = seen or NodeObservation(name, 0)
    records: list[Record] = []
    for record in decision.records:
        if record.type in _OMITTED and _left(seen, now) < 1:
            seen = replace(seen, records_omitted=seen.records_omitted + 1)
            continue
        if record.type in _OMITTED:
            seen = replace(seen, records_spent_until_ms=max(seen.records_spent_until_ms, now) + REFILL_MS)
        if record.type in _OMITTED and seen.records_omitted:
            why = f"{seen.records_omitted} reports of its agent were not recorded: there were too many"
            records.append(Record("reports-omitted", "", name, name, why, {"count": seen.records_omitted}))
            seen = replace(seen, records_omitted=0)
        records.append(replace(record, reason=record.reason[:MAX_REASON_CHARS]) if record.type in _OMITTED else record)
    decision.records = records
    if seen is not before:
        decision.changes = [row for row in decision.changes if row is not before]
        decision.changes.append(seen)
    return decision


def _left(seen: NodeObservation, now: int) -> int:
    """How many records the reports of this node may still cause."""
    return BURST - -(-max(seen.records_spent_until_ms - now, 0) // REFILL_MS)
