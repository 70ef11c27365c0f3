"""Answers about workers: machines of providers, scaling, and workers that pull their tasks."""

from __future__ import annotations

from collections import Counter

from msgspec import UNSET, UnsetType

from distributed_grid.api.answers.common import Answer, Viewer, gigabytes
from distributed_grid.api.worker_resources import requirements_view
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Capacity, ResourceType
from distributed_grid.domain.workers import ScalingPlan, Worker
from distributed_grid.scheduling.scaling.budget import MICRO, BudgetState, budget_state, core_hours, settle
from distributed_grid.scheduling.scaling.evaluation import ScalingEvaluation

MIB = 1024**2


def dollars(micro: int | None) -> float | None:
    return None if micro is None else micro / MICRO


class WorkerRow(Answer, frozen=True, kw_only=True):
    """A worker of a provider."""

    worker_id: str
    provider: str
    worker_type: str
    offer: str
    machine_type: str  # the provider's name for its kind of machine
    zone: str | None
    market: str | None
    state: str
    node_id: str
    instance_id: str | None
    cpu_cores: float
    memory_gb: float
    gpus: int
    price_per_hour: float | None  # in dollars; None if unknown
    age_seconds: float
    created_at: str | None
    joined_at: str | None
    ended_at: str | None
    ends_at: str | None  # end of its machine, by announcement or by the provider's limit; None if unknown
    user: str
    reason: str | None
    problem: str | None
    warning: str | None

    @classmethod
    def of(cls, viewer: Viewer, worker: Worker, now: int) -> WorkerRow:
        size = worker.resources
        known = (worker.worker_type, worker.zone, worker.market)
        reason = worker.why
        if worker.is_leaving and worker.notice is not None:
            minutes, seconds = divmod(max(worker.leaving_at_ms - now, 0) // 1000, 60)
            left = f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
            reason = f"ends in {left}: {worker.notice.why}"
        return cls(
            worker_id=worker.id,
            provider=worker.provider,
            worker_type=worker.worker_type,
            offer=worker.offer,
            machine_type=next((part for part in worker.offer.split("/") if part not in known), worker.offer),
            zone=worker.zone or None,
            market=worker.market or None,
            state=str(worker.state),
            node_id=worker.node,
            instance_id=worker.instance or None,
            cpu_cores=size.cpu_milli / 1000,
            memory_gb=gigabytes(size.memory_bytes),
            gpus=size.gpu_count,
            price_per_hour=dollars(worker.price_micro),
            age_seconds=round(max((worker.ended_at_ms or now) - worker.created_at_ms, 0) / 1000, 3),
            created_at=viewer.time(worker.created_at_ms),
            joined_at=viewer.time(worker.joined_at_ms),
            ended_at=viewer.time(worker.ended_at_ms),
            ends_at=viewer.time(min((end for end in (worker.leaving_at_ms, worker.ends_at_ms) if end), default=0)),
            user=worker.by,
            reason=reason or None,
            problem=worker.problem or None,
            warning=worker.warning or None,
        )


class CoreHourBudget(Answer, frozen=True, kw_only=True):
    """Core-hours of the workers of a provider: used today (UTC), expected by midnight, and the limit."""

    core_hours_today: float
    by_midnight: float
    budget_core_hours: float


class WorkerBudget(Answer, frozen=True, kw_only=True):
    """Cost of all workers in dollars: per hour, today (UTC) so far and by midnight; and the limits."""

    per_hour: float
    spent_today: float
    by_midnight: float
    budget_per_hour: float | None
    budget_per_day: float | None
    core_hours: dict[str, CoreHourBudget]  # of the providers with a budget of core-hours

    @classmethod
    def of(cls, state: BudgetState) -> WorkerBudget:
        return cls(
            per_hour=state.rate_micro / MICRO,
            spent_today=state.spent_micro / MICRO,
            by_midnight=state.day_micro / MICRO,
            budget_per_hour=dollars(state.per_hour_micro),
            budget_per_day=dollars(state.per_day_micro),
            core_hours={
                cores.provider: CoreHourBudget(
                    core_hours_today=core_hours(cores.used_ms),
                    by_midnight=core_hours(cores.day_ms),
                    budget_core_hours=cores.limit_milli / 1000,
                )
                for cores in state.cores
            },
        )


class WorkerList(Answer, frozen=True, kw_only=True):
    """Workers, and the cost of all."""

    workers: list[WorkerRow]
    budget: WorkerBudget
    more: bool | UnsetType = UNSET  # in a list: there is a next page
    next: str | UnsetType | None = UNSET


class WorkerDetail(Answer, frozen=True):
    worker: WorkerRow


class WorkerOfferRow(Answer, frozen=True, kw_only=True):
    """A machine that a provider can start."""

    provider: str
    offer: str
    worker_type: str
    cpu_cores: float
    memory_gb: float
    gpus: int
    price_per_hour: float | None
    zone: str | None
    market: str | None
    closed: str | None  # the reason why it is not tried at present


class WorkerOfferList(Answer, frozen=True):
    provider: str
    offers: list[WorkerOfferRow]


# ------------------------------------------------------------------ scaling


class ScalingDemand(Answer, frozen=True, kw_only=True):
    """Waiting requests that a worker could serve."""

    requests: int
    unmet: int  # not served by any node that is there or coming
    not_counted: dict[str, int]  # requests that do not count, by reason


class ProviderSpending(Answer, frozen=True, kw_only=True):
    """Cost of the workers of one provider, per hour and today (UTC), in dollars and core-hours."""

    provider: str
    workers: int
    per_hour: float
    spent_today: float
    core_hours_today: float
    budget_core_hours: float | None  # per day; None: no limit

    @classmethod
    def of_ledger(cls, ledger: Ledger, now: int, wall_ms: int) -> list[ProviderSpending]:
        """Spending of the providers that have or had workers or have a budget."""
        rows, limits = [], ledger.worker_rules.core_hour_budgets
        for provider in sorted({*ledger.spending, *limits}):
            spent, limit = settle(ledger, provider, now, wall_ms), limits.get(provider)
            living = [worker for worker in ledger.workers.values() if worker.provider == provider]
            rows.append(
                cls(
                    provider=provider,
                    workers=len(living),
                    per_hour=sum(worker.price_micro or 0 for worker in living) / MICRO,
                    spent_today=spent.spent_micro / MICRO,
                    core_hours_today=core_hours(spent.core_ms),
                    budget_core_hours=None if limit is None else limit / 1000,
                )
            )
        return rows


class ScalingStatus(Answer, frozen=True, kw_only=True):
    """State of scaling."""

    provider: str | None
    problem: str | None
    min_workers: int
    max_workers: int
    workers: dict[str, int]  # by state
    idle: dict[str, float]  # seconds for which each idle worker has been idle
    window_seconds: float
    utilization: dict[str, float]  # mean of the window by resource; above 1 if more waits than there is
    demand: ScalingDemand
    scale_up_cooldown: float  # seconds left
    scale_down_cooldown: float
    expected_load: float | None  # in workers; None without a forecast
    warm_workers: int  # kept because of the expected load
    budget: WorkerBudget
    spending: list[ProviderSpending]

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        evaluation: ScalingEvaluation,
        now: int,
        wall_ms: int,
        *,
        problem: str,
        expected_milli: int | None,
        warm: int,
    ) -> ScalingStatus:
        rules, since_ms = ledger.scaling, now - ledger.scaling.window_ms
        return cls(
            provider=rules.provider or None,
            problem=problem or None,
            min_workers=rules.min_workers,
            max_workers=rules.max_workers,
            workers=dict(sorted(Counter(str(worker.state) for worker in ledger.workers.values()).items())),
            idle={idle.worker.id: idle.idle_ms / 1000 for idle in evaluation.idle},
            window_seconds=rules.window_ms / 1000,
            utilization={str(kind): evaluation.window.mean(kind, since_ms) / 1000 for kind in ResourceType},
            demand=ScalingDemand(
                requests=evaluation.demand.requests,
                unmet=evaluation.unmet.requests,
                not_counted=dict(evaluation.demand.not_counted),
            ),
            scale_up_cooldown=max(evaluation.up_at_ms - now, 0) / 1000,
            scale_down_cooldown=max(evaluation.down_at_ms - now, 0) / 1000,
            expected_load=None if expected_milli is None else expected_milli / 1000,
            warm_workers=warm,
            budget=WorkerBudget.of(budget_state(ledger, now, wall_ms)),
            spending=ProviderSpending.of_ledger(ledger, now, wall_ms),
        )


class ScalingDetail(Answer, frozen=True):
    scaling: ScalingStatus


class WorkerNeeds(Answer, frozen=True, kw_only=True):
    """Resources of each new worker."""

    cpu_cores: float
    memory_mb: int
    gpu_count: int


class ScalingDecisionRow(Answer, frozen=True, kw_only=True):
    """Decision of scaling: start `count` workers of a type, or give back those of `worker_ids`."""

    action: str
    reason: str
    count: int
    worker_ids: list[str]  # with `scale_up`: draining workers that are kept
    utilization: float
    bottleneck: str
    worker_type: str | None
    offer: str | None
    resource_requirements: WorkerNeeds | None
    provider: str | None
    price_per_hour: float | None  # in dollars

    @classmethod
    def of(cls, plan: ScalingPlan, provider: str) -> ScalingDecisionRow:
        worker = plan.worker
        needs: WorkerNeeds | None = None
        if worker is not None:
            size = worker.resources
            needs = WorkerNeeds(
                cpu_cores=size.cpu_milli / 1000, memory_mb=size.memory_bytes // MIB, gpu_count=size.gpu_count
            )
        return cls(
            action=plan.action,
            reason=plan.reason,
            count=plan.count,
            worker_ids=list(plan.worker_ids),
            utilization=plan.utilization_milli / 1000,
            bottleneck=str(plan.bottleneck),
            worker_type=worker.worker_type if worker is not None else None,
            offer=worker.offer if worker is not None else None,
            resource_requirements=needs,
            provider=provider or None,
            price_per_hour=dollars(worker.price_micro) if worker is not None else None,
        )


class ScalingPlanView(Answer, frozen=True, kw_only=True):
    """A decision, its cost per hour and until midnight (UTC), and the cost of all workers with it."""

    decision: ScalingDecisionRow
    cost_per_hour: float | None
    cost_until_midnight: float | None
    budget: WorkerBudget

    @classmethod
    def of(cls, ledger: Ledger, plan: ScalingPlan, now: int, wall_ms: int, *, done: bool = False) -> ScalingPlanView:
        """A plan, or with `done` an executed one, and the cost of all workers with it."""
        state, worker = budget_state(ledger, now, wall_ms), plan.worker
        added_micro: int | None = 0
        midnight_micro: int | None = 0
        if worker is not None and plan.count:
            added_micro = None if worker.price_micro is None else plan.count * worker.price_micro
            midnight_micro = None if added_micro is None else plan.count * state.new_cost_micro(worker)
            if not done:
                state = state.with_workers(worker, plan.count)
        return cls(
            decision=ScalingDecisionRow.of(plan, ledger.scaling.provider),
            cost_per_hour=dollars(added_micro),
            cost_until_midnight=dollars(midnight_micro),
            budget=WorkerBudget.of(state),
        )


class ScalingPlanDetail(Answer, frozen=True, kw_only=True):
    plan: ScalingPlanView
    started: list[str] | UnsetType = UNSET  # of an evaluation that acted: the workers it started
    problem: str | None  # the reason why the provider cannot be used


# ------------------------------------------------------------------ workers that pull their tasks


class UnwantedTask(Answer, frozen=True, kw_only=True):
    """A task that a worker is to stop."""

    task_id: str
    fence: int
    reason: str


class PullWorkerRow(Answer, frozen=True, kw_only=True):
    """A pull worker, in the answers to its registration and heartbeats."""

    worker_id: str
    incarnation: str
    state: str
    hold_seconds: float
    heartbeat_seconds: float
    report_resources: bool  # the next heartbeat is to have them
    tasks: list[str]
    stop: list[UnwantedTask]


class PullWorkerDetail(Answer, frozen=True):
    worker: PullWorkerRow


class PullWorkerRemoved(Answer, frozen=True):
    worker_id: str
    removed: bool = True


class ReassessmentStarted(Answer, frozen=True):
    workers: int  # pull workers that are asked


class ReservationRow(Answer, frozen=True, kw_only=True):
    """Resources of a worker that are held for a task."""

    reservation_id: str
    worker_id: str
    task_id: str
    requirements: dict[str, float]
    user: str
    state: str
    fence: int
    reserved_at: str | None
    expires_at: str | None

    @classmethod
    def of(cls, viewer: Viewer, lease: Lease, task_id: str) -> ReservationRow:
        return cls(
            reservation_id=lease.id,
            worker_id=lease.node,
            task_id=task_id,
            requirements=requirements_view(lease.request.ask),
            user=lease.request.user,
            state=str(lease.state),
            fence=lease.fence,
            reserved_at=viewer.time(lease.granted_at_ms),
            expires_at=viewer.time(lease.ends_at_ms),
        )


class ReservationDetail(Answer, frozen=True):
    reservation: ReservationRow


class WorkerFit(Answer, frozen=True, kw_only=True):
    """Fitness of a worker for a task, or the reason why it has no room now."""

    available: bool
    reasons: list[str]
    fitness: float


class CpuResources(Answer, frozen=True):
    cores: float
    physical_cores: int | None
    available_cores: float


class MemoryResources(Answer, frozen=True):
    total_mb: int
    available_mb: int


class GpuResources(Answer, frozen=True):
    devices: int
    available_devices: int
    total_memory_mb: int
    available_memory_mb: int


class NodeResources(Answer, frozen=True):
    """Resources of a worker, in all and free, in the nested form of its reports."""

    cpu: CpuResources
    memory: MemoryResources
    gpu: GpuResources

    @classmethod
    def of(cls, has: Capacity, free: Capacity, free_gpu_bytes: int, physical_cores: int = 0) -> NodeResources:
        gpu_bytes = sum(device.memory_bytes for device in has.gpus)
        return cls(
            CpuResources(has.cpu_milli / 1000, physical_cores or None, free.cpu_milli / 1000),
            MemoryResources(has.memory_bytes // MIB, free.memory_bytes // MIB),
            GpuResources(len(has.gpus), len(free.gpus), gpu_bytes // MIB, free_gpu_bytes // MIB),
        )


class WorkerResourceList(Answer, frozen=True, kw_only=True):
    workers: dict[str, NodeResources]
    reservations: list[ReservationRow]  # on these workers
    more: bool  # there is a next page
    next: str | None
