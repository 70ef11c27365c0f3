"""Reactor: what an event means for the ledger. One decider per event type.

A decider only reads, and returns rows in their new state; `Ledger.apply` writes them. A decider that refuses raises,
and nothing has changed. Effects are a function of the rows (`pending`), never of the event that led there.
"""

from distributed_grid.reactor.decision import (
    BlockAnswer,
    Decision,
    JobAnswer,
    LeaseAnswer,
    MoveAnswer,
    Record,
    WorkerAnswer,
)
from distributed_grid.reactor.dispatch import decide, step, step_through
from distributed_grid.reactor.effects import (
    overdue,
    overdue_memory,
    pending,
    pending_bindings,
    pending_bindings_for,
    pending_for,
    pending_memory,
    pending_memory_for,
    pending_moves,
    pending_moves_for,
    pending_workers,
    pending_workers_for,
)

__all__ = [
    "BlockAnswer",
    "Decision",
    "JobAnswer",
    "LeaseAnswer",
    "MoveAnswer",
    "Record",
    "WorkerAnswer",
    "decide",
    "overdue",
    "overdue_memory",
    "pending",
    "pending_bindings",
    "pending_bindings_for",
    "pending_for",
    "pending_memory",
    "pending_memory_for",
    "pending_moves",
    "pending_moves_for",
    "pending_workers",
    "pending_workers_for",
    "step",
    "step_through",
]
