"""Requests about workers and scaling: start, list, show and end workers, offers of providers, state of scaling.

A worker is refused before anything is spent if the budget does not allow it, or if it could never reach this control
plane; this holds for persons and the autoscaler.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer, gigabytes
from distributed_grid.api.answers.workers import (
    ScalingDetail,
    ScalingPlanDetail,
    ScalingPlanView,
    ScalingStatus,
    WorkerBudget,
    WorkerDetail,
    WorkerList,
    WorkerOfferList,
    WorkerOfferRow,
    WorkerRow,
    dollars,
)
from distributed_grid.api.id_prefixes import fits, not_found
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import Event, WorkerDrainRequested, WorkerRequested, WorkerTerminationRequested
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_as
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.errors import Ambiguous, GridError, Refused
from distributed_grid.ports import Store
from distributed_grid.reactor.decision import WorkerAnswer
from distributed_grid.scheduling.scaling.budget import BudgetState, budget_state
from distributed_grid.scheduling.scaling.evaluation import evaluate
from distributed_grid.scheduling.scaling.worker_availability import closed_text, closure_of
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, endpoint
from distributed_grid.server.pages import HistoryList
from distributed_grid.server.purge_guard import PurgeGuard
from distributed_grid.server.workers.autoscaler import Autoscaler
from distributed_grid.server.workers.provider_calls import OfferCatalog, place_of_offer, worker_of
from distributed_grid.server.workers.worker_reconciler import WorkerJoinTokens, wall_ms

GIB = 1024**3


class WorkerService:
    """Answers the requests about workers."""

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        catalog: OfferCatalog,
        tokens: WorkerJoinTokens,
        guard: PurgeGuard,
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._catalog = catalog
        self._tokens = tokens
        self._guard = guard
        self._workers = HistoryList(
            grid, Worker, lambda ledger: ledger.workers.values(), lambda worker: worker.created_at_ms
        )

    # ------------------------------------------------------------------ starting

    @endpoint(ADMIN)
    async def create(self, op: requests.CreateWorkers, caller: Caller) -> WorkerList:
        """Start workers of a kind, all of them or none; a dry run shows the cost."""
        provider = op.provider or self._catalog.registry.default()
        needs = WorkerResources(round(1000 * op.cpu), round(GIB * op.memory_gb), op.gpu)
        await self.check_reachable(provider)
        offer = await self._catalog.choose(provider, op.worker_type, needs)
        wanted = [worker_of(offer, provider, needs, by=caller.user, worker_id=name) for name in op.worker_ids]

        def check_budget(ledger: Ledger, now: int) -> BudgetState:
            state = budget_state(ledger, now, wall_ms())
            for worker in wanted:
                if worker.id in ledger.workers:
                    continue
                if (refusal := state.refusal(worker)) is not None:
                    raise Refused(refusal)
                state = state.with_workers(worker)
            return state

        after = await self._grid.read(check_budget)
        if op.dry_run:
            rows = [WorkerRow.of(self._viewer(), worker, 0) for worker in wanted]
            return WorkerList(workers=rows, budget=WorkerBudget.of(after))
        started = []
        for worker in wanted:  # the same one a second time is answered with its row
            answer = await self._grid.handle(WorkerRequested(worker, wall_ms()))
            assert isinstance(answer, WorkerAnswer)
            started.append(answer.worker)
        return await self._with_budget(await self._rows(started))

    async def check_reachable(self, provider: str) -> None:
        """Refuse a provider whose machines could never reach this control plane."""
        opened = (await self._catalog.calls(provider)).provider
        if not opened.is_on_this_host and await self._tokens.is_loopback_only():
            raise Refused(
                f"a worker of {provider} could not reach this control plane, which listens on this machine only; "
                "type: grid daemon start --listen 0.0.0.0:7433"
            )

    # ------------------------------------------------------------------ showing

    @endpoint(READ)
    async def list(self, op: requests.ListWorkers, caller: Caller) -> WorkerList:
        """A page of the workers that are not proven gone, and with `all` then of the others, the last gone first."""

        async def choose(workers: Sequence[Worker]) -> Sequence[Worker]:
            return [worker for worker in workers if op.provider in ("", worker.provider)]

        page = await self._workers.page(
            op.cursor,
            op.limit,
            choose=choose,
            fits=(lambda row: op.provider in ("", row.target)) if op.all else None,
        )
        workers = await self._grid.slices.convert(page.rows, self._workers.decode)
        answer = await self._with_budget(await self._rows(workers))
        return replace(answer, more=page.end is not None, next=page.next())

    @endpoint(READ)
    async def get(self, op: requests.GetWorker, caller: Caller) -> WorkerDetail:
        """One worker, gone or not."""
        (row,) = await self._rows([await self.find(op.worker_id, op.provider)])
        return WorkerDetail(row)

    async def find(self, name: str, provider: str = "") -> Worker:
        """The worker of this id or unique prefix; gone ones, too."""

        def living(ledger: Ledger, now: int) -> builtins.list[Worker]:
            return [worker for worker in ledger.workers.values() if fits(worker.id, name)]

        def gone(store: Store) -> builtins.list[Worker]:
            rows = store.ended(Worker.kind, key=name, limit=1) or store.ended(Worker.kind, key_prefix=name, limit=5)
            return [worker for worker in (decode_as(Worker, row.blob) for row in rows) if fits(worker.id, name)]

        workers = await self._grid.read(living) or await self._grid.query(gone)
        workers = [worker for worker in workers if provider in ("", worker.provider)]
        if not workers:
            raise not_found("worker", name)
        if len(workers) > 1:
            raise Ambiguous(f"{name!r} fits several workers: {', '.join(sorted(worker.id for worker in workers))}")
        return workers[0]

    @endpoint(READ)
    async def offers(self, op: requests.ListWorkerOffers, caller: Caller) -> WorkerOfferList:
        """Offers of a provider, the preferred first."""
        provider = op.provider or self._catalog.registry.default()
        offers = await self._catalog.offers(provider)

        def rows(ledger: Ledger, now: int) -> builtins.list[WorkerOfferRow]:
            return [
                WorkerOfferRow(
                    provider=provider,
                    offer=offer.id,
                    worker_type=offer.worker_type,
                    cpu_cores=offer.resources.cpu_milli / 1000,
                    memory_gb=gigabytes(offer.resources.memory_bytes),
                    gpus=offer.resources.gpu_count,
                    price_per_hour=dollars(offer.price_micro),
                    zone=offer.zone or None,
                    market=offer.market or None,
                    closed=offer.unavailable
                    or closed_text(closure_of(ledger, place_of_offer(provider, offer)), now)
                    or None,
                )
                for offer in offers
            ]

        return WorkerOfferList(provider, await self._grid.read(rows))

    # ------------------------------------------------------------------ ending

    @endpoint(ADMIN, keeps_config=True)
    async def terminate(self, op: requests.TerminateWorkers, caller: Caller) -> WorkerList:
        """End workers; an ended one stays as it is. If one of them is unknown, nothing is done.

        One that has joined drains first, and is terminated when the files of its jobs are home. With `force` it is
        terminated at once; that is refused while it has results that were never fetched, unless `discard_results`.
        """
        workers = [await self.find(name, op.provider) for name in op.worker_ids]
        problems: list[str] = []
        for worker in workers:
            if worker.is_over:
                continue
            reason = f"{caller.user} asked for it"
            event: Event = WorkerTerminationRequested(worker.id, caller.user, reason, wall_ms(), force=op.force)
            has_joined = worker.state in (WorkerState.JOINED, WorkerState.DRAINING)
            if has_joined and not op.force:
                event = WorkerDrainRequested(worker.id, caller.user, reason)
            try:
                if has_joined and op.force:
                    await self._guard.check(worker.node, set(), discard=op.discard_results)
                await self._grid.handle(event)
            except GridError as refusal:
                problems.append(str(refusal))
        if problems:
            raise Refused("; ".join(problems))
        return await self._with_budget(await self._rows([await self.find(worker.id) for worker in workers]))

    async def _rows(self, workers: Sequence[Worker]) -> builtins.list[WorkerRow]:
        viewer = self._viewer()
        return await self._grid.read(lambda ledger, now: [WorkerRow.of(viewer, worker, now) for worker in workers])

    async def _with_budget(self, rows: builtins.list[WorkerRow]) -> WorkerList:
        state = await self._grid.read(lambda ledger, now: budget_state(ledger, now, wall_ms()))
        return WorkerList(workers=rows, budget=WorkerBudget.of(state))


class ScalingService:
    """Answers the requests about scaling."""

    def __init__(self, grid: Grid, autoscaler: Autoscaler) -> None:
        self._grid = grid
        self._autoscaler = autoscaler

    @endpoint(READ)
    async def status(self, op: requests.GetScaling, caller: Caller) -> ScalingDetail:
        """Workers by state, utilization, demand, cooldowns and money."""

        def read(ledger: Ledger, now: int) -> ScalingStatus:
            autoscaler, today_ms = self._autoscaler, wall_ms()
            return ScalingStatus.of(
                ledger,
                evaluate(ledger, now, today_ms, warm=autoscaler.warm),
                now,
                today_ms,
                problem=autoscaler.problem,
                expected_milli=autoscaler.expected_milli,
                warm=autoscaler.warm,
            )

        return ScalingDetail(await self._grid.read(read))

    @endpoint(READ)
    async def plan(self, op: requests.PlanScaling, caller: Caller) -> ScalingPlanDetail:
        """The decision of an evaluation now, and its cost."""
        if self._autoscaler.provider:
            await self._autoscaler.read_types()

        def read(ledger: Ledger, now: int) -> ScalingPlanView:
            evaluation = evaluate(ledger, now, wall_ms(), warm=self._autoscaler.warm)
            return ScalingPlanView.of(ledger, evaluation.plan, now, wall_ms())

        return ScalingPlanDetail(plan=await self._grid.read(read), problem=self._autoscaler.problem or None)

    @endpoint(ADMIN)
    async def run(self, op: requests.RunScaling, caller: Caller) -> ScalingPlanDetail:
        """Evaluate now, and act."""
        if not self._autoscaler.provider:
            raise Refused("scaling.provider is not set: nothing can be started")
        await self._autoscaler.read_types()
        done, started = await self._autoscaler.evaluate_now()
        plan = await self._grid.read(lambda ledger, now: ScalingPlanView.of(ledger, done, now, wall_ms(), done=True))
        return ScalingPlanDetail(plan=plan, started=started, problem=self._autoscaler.problem or None)
