"""Views of workers: each of them, what they cost, and what a provider offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_grid.control.views import Viewer
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.workers import Worker
from distributed_grid.ports import WorkerOffer
from distributed_grid.scheduling.scaling.budget import MICRO, BudgetState, CoreHours, core_hours, settle
from distributed_grid.scheduling.scaling.worker_availability import OfferPlace, closed_text, closure_of

if TYPE_CHECKING:
    from distributed_grid.control.view_types import (
        CoreHourBudget,
        ProviderSpending,
        WorkerBudget,
        WorkerOfferRow,
        WorkerRow,
    )

GIB = 1024**3


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
