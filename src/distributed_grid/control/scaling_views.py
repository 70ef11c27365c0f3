"""Views of scaling: how it stands, and what it does or would do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distributed_grid.control.worker_views import budget_view, dollars, spending_view
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.workers import ScalingPlan, Worker
from distributed_grid.scheduling.scaling.budget import BudgetState, budget_state
from distributed_grid.scheduling.scaling.evaluation import ScalingEvaluation

if TYPE_CHECKING:
    from distributed_grid.control.view_types import (
        ScalingDecisionRow,
        ScalingDemand,
        ScalingPlanView,
        ScalingStatus,
        WorkerNeeds,
    )

MIB = 1024**2


def decision_row(plan: ScalingPlan, provider: str) -> ScalingDecisionRow:
    """A plan as it is shown."""
    worker = plan.worker
    return {
        "action": plan.action,
        "reason": plan.reason,
        "count": plan.count,
        "worker_ids": list(plan.worker_ids),
        "utilization": plan.utilization_milli / 1000,
        "bottleneck": str(plan.bottleneck),
        "worker_type": worker.worker_type if worker is not None else None,
        "offer": worker.offer if worker is not None else None,
        "resource_requirements": _needs(worker) if worker is not None else None,
        "provider": provider or None,
        "price_per_hour": dollars(worker.price_micro) if worker is not None else None,
    }


def _needs(worker: Worker) -> WorkerNeeds:
    has = worker.resources
    return {
        "cpu_cores": has.cpu_milli / 1000,
        "memory_mb": has.memory_bytes // MIB,
        "gpu_count": has.gpu_count,
    }


def demand_view(evaluation: ScalingEvaluation) -> ScalingDemand:
    """The waiting requests that count, and those that do not."""
    return {
        "requests": evaluation.demand.requests,
        "unmet": evaluation.unmet.requests,
        "not_counted": dict(evaluation.demand.not_counted),
    }


def plan_view(ledger: Ledger, plan: ScalingPlan, now: int, wall_ms: int, *, done: bool = False) -> ScalingPlanView:
    """What would be done, or was, and what all workers cost then."""
    state, added = budget_state(ledger, now, wall_ms), added_micro(plan)
    is_planned = not done and plan.worker is not None and bool(plan.count)
    after = state.with_workers(plan.worker, plan.count) if is_planned and plan.worker is not None else state
    return {
        "decision": decision_row(plan, ledger.scaling.provider),
        "cost_per_hour": dollars(added),
        "cost_until_midnight": None if added is None else dollars(_cost_by_midnight(plan, state)),
        "budget": budget_view(after),
    }


def _cost_by_midnight(plan: ScalingPlan, state: BudgetState) -> int:
    return plan.count * state.new_cost_micro(plan.worker) if plan.worker is not None else 0


def added_micro(plan: ScalingPlan) -> int | None:
    """What an hour of the new workers costs; None where nobody knows."""
    if not plan.count or plan.worker is None:
        return 0
    price = plan.worker.price_micro
    return None if price is None else plan.count * price


def status_view(
    ledger: Ledger,
    evaluation: ScalingEvaluation,
    state: BudgetState,
    now: int,
    wall_ms: int,
    *,
    problem: str,
    expected_milli: int | None,
    warm: int,
) -> ScalingStatus:
    """How scaling stands."""
    rules, since_ms = ledger.scaling, now - ledger.scaling.window_ms
    states = Counter(str(worker.state) for worker in ledger.workers.values())
    return {
        "provider": rules.provider or None,
        "problem": problem or None,
        "min_workers": rules.min_workers,
        "max_workers": rules.max_workers,
        "workers": dict(sorted(states.items())),
        "idle": {one.worker.id: one.idle_ms / 1000 for one in evaluation.idle},
        "window_seconds": rules.window_ms / 1000,
        "utilization": {str(one): evaluation.window.mean(one, since_ms) / 1000 for one in ResourceType},
        "demand": demand_view(evaluation),
        "scale_up_cooldown": _left_seconds(evaluation.up_at_ms, now),
        "scale_down_cooldown": _left_seconds(evaluation.down_at_ms, now),
        "expected_load": None if expected_milli is None else expected_milli / 1000,
        "warm_workers": warm,
        "budget": budget_view(state),
        "spending": spending_view(ledger, now, wall_ms),
    }


def _left_seconds(until_ms: int, now: int) -> float:
    return max(until_ms - now, 0) / 1000
