"""Reactor: decisions about events and follow-ups, one decider for each type.

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
from distributed_grid.reactor.effects import pending

__all__ = [
    "BlockAnswer",
    "Decision",
    "JobAnswer",
    "LeaseAnswer",
    "MoveAnswer",
    "Record",
    "WorkerAnswer",
    "decide",
    "pending",
    "step",
    "step_through",
]
