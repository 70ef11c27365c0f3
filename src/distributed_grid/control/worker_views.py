"""Views of workers and scaling: each worker, what they cost, what a provider offers, what scaling does or would do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distributed_grid.api.answers.common import Viewer
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.workers import ScalingPlan, Worker
from distributed_grid.ports import WorkerOffer
from distributed_grid.scheduling.scaling.budget import MICRO, BudgetState, CoreHours, budget_state, core_hours, settle
from distributed_grid.scheduling.scaling.evaluation import ScalingEvaluation
from distributed_grid.scheduling.scaling.worker_availability import OfferPlace, closed_text, closure_of

if TYPE_CHECKING:
    from distributed_grid.control.view_types import (
        CoreHourBudget,
        ProviderSpending,
        ScalingDecisionRow,
        ScalingDemand,
        ScalingPlanView,
        ScalingStatus,
        WorkerBudget,
        WorkerNeeds,
        WorkerOfferRow,
        WorkerRow,
    )

GIB = 1024**3
MIB = 1024**2


def worker_view(viewer: Viewer, worker: Worker, now: int) -> WorkerRow:
    """A worker, gone or not."""
    has = worker.resources
    return {
        "worker_id": worker.id,
        "provider": worker.provider,
        "worker_type": worker.worker_type,
        "offer": worker.offer,
        "machine_type": machine_type(worker),
        "zone": worker.zone or None,
        "market": worker.market or None,
        "state": str(worker.state),
        "node_id": worker.node,
        "instance_id": worker.instance or None,
        "cpu_cores": has.cpu_milli / 1000,
        "memory_gb": round(has.memory_bytes / GIB, 3),
        "gpus": has.gpu_count,
        "price_per_hour": dollars(worker.price_micro),
        "age_seconds": round(max((worker.ended_at_ms or now) - worker.created_at_ms, 0) / 1000, 3),
        "created_at": viewer.time(worker.created_at_ms),
        "joined_at": viewer.time(worker.joined_at_ms),
        "ended_at": viewer.time(worker.ended_at_ms),
        "user": worker.by,
        "ends_at": viewer.time(end_ms(worker)),
        "reason": _reason(worker, now) or None,
        "problem": worker.problem or None,
        "warning": worker.warning or None,
    }


def end_ms(worker: Worker) -> int:
    """When a machine ends, by an announcement or by its lifetime at the provider; 0 where that is not known."""
    return min((at for at in (worker.leaving_at_ms, worker.ends_at_ms) if at), default=0)


def _reason(worker: Worker, now: int) -> str:
    """Why a worker is in its state; where its end was announced, in how long that is."""
    if not worker.is_leaving or worker.notice is None:
        return worker.why
    minutes, seconds = divmod(max(worker.leaving_at_ms - now, 0) // 1000, 60)
    left = f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
    return f"ends in {left}: {worker.notice.why}"


def machine_type(worker: Worker) -> str:
    """The provider's name of the kind of machine: the offer's id without its zone, its market and its kind."""
    known = (worker.worker_type, worker.zone, worker.market)
    return next((part for part in worker.offer.split("/") if part not in known), worker.offer)


def spending_view(ledger: Ledger, now: int, wall_ms: int) -> list[ProviderSpending]:
    """What the workers of each provider cost, and have cost today: of those that had workers or have a budget."""
    found: list[ProviderSpending] = []
    limits = ledger.worker_rules.core_hour_budgets
    for provider in sorted({*ledger.spending, *limits}):
        spent, limit = settle(ledger, provider, now, wall_ms), limits.get(provider)
        living = [worker for worker in ledger.workers.values() if worker.provider == provider]
        found.append(
            {
                "provider": provider,
                "workers": len(living),
                "per_hour": sum(worker.price_micro or 0 for worker in living) / MICRO,
                "spent_today": spent.spent_micro / MICRO,
                "core_hours_today": core_hours(spent.core_ms),
                "budget_core_hours": None if limit is None else limit / 1000,
            }
        )
    return found


def budget_view(state: BudgetState) -> WorkerBudget:
    """What workers cost, and the limits."""
    return {
        "per_hour": state.rate_micro / MICRO,
        "spent_today": state.spent_micro / MICRO,
        "by_midnight": state.day_micro / MICRO,
        "budget_per_hour": dollars(state.per_hour_micro),
        "budget_per_day": dollars(state.per_day_micro),
        "core_hours": {one.provider: core_hours_view(one) for one in state.cores},
    }


def core_hours_view(one: CoreHours) -> CoreHourBudget:
    """What workers of a provider use of its core-hours, and the limit."""
    return {
        "core_hours_today": core_hours(one.used_ms),
        "by_midnight": core_hours(one.day_ms),
        "budget_core_hours": one.limit_milli / 1000,
    }


def offer_view(ledger: Ledger, provider: str, offer: WorkerOffer, now: int) -> WorkerOfferRow:
    """What a provider can start, and why it is not tried at present."""
    place = OfferPlace(provider, offer.id, offer.zone, offer.market, offer.worker_type)
    closed = closed_text(closure_of(ledger, place), now)
    return {
        "provider": provider,
        "offer": offer.id,
        "worker_type": offer.worker_type,
        "cpu_cores": offer.resources.cpu_milli / 1000,
        "memory_gb": round(offer.resources.memory_bytes / GIB, 3),
        "gpus": offer.resources.gpu_count,
        "price_per_hour": dollars(offer.price_micro),
        "zone": offer.zone or None,
        "market": offer.market or None,
        "closed": offer.unavailable or closed or None,
    }


def dollars(micro: int | None) -> float | None:
    """An amount of money in dollars."""
    return None if micro is None else micro / MICRO


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
