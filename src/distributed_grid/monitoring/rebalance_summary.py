"""How often the grid was rebalanced, and what it holds and recommends: one answer for everybody who shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from distributed_grid.domain.ledger import Ledger
from distributed_grid.scheduling.rebalancing.pressure import automatic


class RebalancingSummary(TypedDict):
    """Rebalances are automatic leases asked for or given back; the last hour also counts what an earlier control
    plane did, the other totals begin with this one."""

    rebalances_per_hour: int
    asked: int
    refused: int
    given_back: int
    automatic_leases: int
    recommendations: int


def open_in(ledger: Ledger) -> tuple[int, int]:
    """How many automatic leases are held, and how many recommendations stand."""
    advised = sum(1 for balance in ledger.balances.values() if balance.advice is not None)
    return len(automatic(ledger)), advised


def summary_of(of_late: int, totals: Mapping[str, int], *, held: int, recommended: int) -> RebalancingSummary:
    """The answer, out of what was counted."""
    return {
        "rebalances_per_hour": of_late,
        "asked": totals.get("asked", 0),
        "refused": totals.get("refused", 0),
        "given_back": totals.get("given_back", 0),
        "automatic_leases": held,
        "recommendations": recommended,
    }
