"""The policies of balancing: one table of numbers, which docs/policies.md shows to people."""

from __future__ import annotations

from distributed_grid.domain.rebalancing import RebalancePolicy
from distributed_grid.domain.resources import Priority

POLICIES: dict[str, RebalancePolicy] = {
    "conservative": RebalancePolicy(
        act_after=10,
        portion_milli=250,
        leases_max=2,
        term=20,
        renew_at=10,
        cool_down=20,
        ahead=0,
        sure_milli=0,
        spread_milli=0,
        priority=Priority.LOW,
        shares=True,
        evens_out=False,
    ),
    "balanced": RebalancePolicy(
        act_after=2,
        portion_milli=500,
        leases_max=3,
        term=20,
        renew_at=10,
        cool_down=4,
        ahead=0,
        sure_milli=0,
        spread_milli=400,
        priority=Priority.LOW,
        shares=True,
        evens_out=True,
    ),
    "aggressive": RebalancePolicy(
        act_after=0,
        portion_milli=1000,
        leases_max=6,
        term=40,
        renew_at=20,
        cool_down=1,
        ahead=0,
        sure_milli=0,
        spread_milli=200,
        priority=Priority.MEDIUM,
        shares=True,
        evens_out=True,
    ),
    "predictive": RebalancePolicy(
        act_after=2,
        portion_milli=500,
        leases_max=4,
        term=20,
        renew_at=10,
        cool_down=4,
        ahead=10,
        sure_milli=800,
        spread_milli=300,
        priority=Priority.LOW,
        shares=True,
        evens_out=True,
    ),
}
