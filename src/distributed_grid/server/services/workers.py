"""Requests about workers and scaling: start, list, show and end workers, what providers offer, what scaling does.

Whoever wants a worker, a person or the autoscaler, asks `start`: it is refused before anything is spent where the
budget does not allow it, or where the worker could never reach this control plane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.id_prefixes import fits, not_found
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.control.worker_views import budget_view, offer_view, plan_view, status_view, worker_view
from distributed_grid.domain.events import Event, WorkerDrainRequested, WorkerRequested, WorkerTerminationRequested
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.errors import Ambiguous, GridError, Refused
from distributed_grid.ports import Store, WorkerOffer
from distributed_grid.reactor.decision import WorkerAnswer
from distributed_grid.scheduling.scaling.budget import BudgetState, budget_state
from distributed_grid.scheduling.scaling.evaluation import ScalingEvaluation, evaluate
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, endpoint
from distributed_grid.server.purge_guard import PurgeGuard
from distributed_grid.server.workers.autoscaler import Autoscaler
from distributed_grid.server.workers.join_tokens import WorkerJoinTokens
from distributed_grid.server.workers.offers import OfferCatalog, worker_of
from distributed_grid.server.workers.worker_reconciler import wall_ms

if TYPE_CHECKING:
    from distributed_grid.control.view_types import ScalingPlanView, ScalingStatus, WorkerRow

GIB = 1024**3
MAX_ENDED = 200
"""So many workers that are gone are listed, the last first."""


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

    # ------------------------------------------------------------------ starting

    @endpoint(ADMIN)
    async def create(self, op: requests.CreateWorkers, caller: Caller) -> View:
        """Start so many workers of a kind, or say what that would cost; none where not all of them may be."""
        provider = op.provider or self._catalog.registry.default()
        needs = WorkerResources(round(1000 * op.cpu), round(GIB * op.memory_gb), op.gpu)
        await self.check_reachable(provider)
        offer = await self._catalog.choose(provider, op.worker_type, needs)
        wanted = [worker_of(offer, provider, needs, by=caller.user, worker_id=one) for one in op.worker_ids]
        after = await self._check_budget(wanted)
        if op.dry_run:
            rows = [worker_view(self._viewer(), worker, 0) for worker in wanted]
            return {"workers": rows, "budget": budget_view(after)}
        started = [await self.start(worker) for worker in wanted]
        return await self._with_budget([await self._view(worker) for worker in started])

    async def start(self, worker: Worker) -> Worker:
        """Want one worker; the same one a second time is answered with how it stands. Refused beyond the budget."""
        answer = await self._grid.handle(WorkerRequested(worker, wall_ms()))
        assert isinstance(answer, WorkerAnswer)
        return answer.worker

    async def check_reachable(self, provider: str) -> None:
        """Refuse a provider whose machines could never reach this control plane."""
        opened = (await self._catalog.calls(provider)).provider
        if not opened.is_on_this_host and await self._tokens.is_loopback_only():
            raise Refused(
                f"a worker of {provider} could not reach this control plane, which listens on this machine only; "
                "type: grid daemon start --listen 0.0.0.0:7433"
            )

    async def _check_budget(self, wanted: list[Worker]) -> BudgetState:
        """What workers cost with these; Refused where the budget does not allow all of them."""

        def check(ledger: Ledger, now: int) -> BudgetState:
            state = budget_state(ledger, now, wall_ms())
            for worker in wanted:
                if worker.id in ledger.workers:
                    continue
                if (refusal := state.refusal(worker)) is not None:
                    raise Refused(refusal)
                state = state.with_workers(worker)
            return state

        return await self._grid.read(check)

    # ------------------------------------------------------------------ showing

    @endpoint(READ)
    async def list(self, op: requests.ListWorkers, caller: Caller) -> View:
        """The workers that are not proven gone, and with `all` the last ones that were."""

        def living(ledger: Ledger, now: int) -> list[WorkerRow]:
            return [worker_view(viewer, worker, now) for worker in ledger.workers.values()]

        viewer = self._viewer()
        rows = await self._grid.read(living)
        ended = await self._grid.query(_ended) if op.all else []
        rows += [worker_view(viewer, worker, 0) for worker in ended[:MAX_ENDED]]
        listed = await self._with_budget([row for row in rows if op.provider in ("", row["provider"])])
        return listed | {"more": len(ended) > MAX_ENDED}

    @endpoint(READ)
    async def get(self, op: requests.GetWorker, caller: Caller) -> View:
        """One worker, gone or not."""
        return {"worker": await self._view(await self.find(op.worker_id, op.provider))}

    async def find(self, name: str, provider: str = "") -> Worker:
        """The worker of this id or unique prefix; gone ones, too."""

        def living(ledger: Ledger, now: int) -> list[Worker]:
            return [worker for worker in ledger.workers.values() if fits(worker.id, name)]

        def gone(store: Store) -> list[Worker]:
            rows = store.ended(Worker.kind, key=name, limit=1) or store.ended(Worker.kind, key_prefix=name, limit=5)
            return [worker for worker in map(_decoded, rows) if fits(worker.id, name)]

        found = await self._grid.read(living) or await self._grid.query(gone)
        found = [worker for worker in found if provider in ("", worker.provider)]
        if not found:
            raise not_found("worker", name)
        if len(found) > 1:
            raise Ambiguous(f"{name!r} fits several workers: {', '.join(sorted(one.id for one in found))}")
        return found[0]

    @endpoint(READ)
    async def offers(self, op: requests.ListWorkerOffers, caller: Caller) -> View:
        """What a provider can start, the preferred first."""
        provider = op.provider or self._catalog.registry.default()
        offers = await self._catalog.offers(provider)

        def views(ledger: Ledger, now: int) -> list[Any]:
            return [offer_view(ledger, provider, offer, now) for offer in offers]

        return {"provider": provider, "offers": await self._grid.read(views)}

    async def known_offers(self, provider: str) -> Sequence[WorkerOffer]:
        """What a provider can start, for whoever plans with it."""
        return await self._catalog.offers(provider)

    # ------------------------------------------------------------------ ending

    @endpoint(ADMIN)
    async def terminate(self, op: requests.TerminateWorkers, caller: Caller) -> View:
        """End workers; one that is gone already is left so. Nothing is done where one of them is not known.

        One that has joined drains first, and is terminated when the files of its jobs are home. With `force` it is
        terminated at once; that is refused while it has results that were never fetched, unless `discard_results`.
        """
        workers = [await self.find(name, op.provider) for name in op.worker_ids]
        problems: list[str] = []
        for worker in workers:
            if worker.is_over:
                continue
            why = f"{caller.user} asked for it"
            event: Event = WorkerTerminationRequested(worker.id, caller.user, why, wall_ms(), force=op.force)
            has_joined = worker.state in (WorkerState.JOINED, WorkerState.DRAINING)
            if has_joined and not op.force:
                event = WorkerDrainRequested(worker.id, caller.user, why)
            try:
                if has_joined and op.force:
                    await self._guard.check(worker.node, set(), discard=op.discard_results)
                await self._grid.handle(event)
            except GridError as refusal:
                problems.append(str(refusal))
        if problems:
            raise Refused("; ".join(problems))
        return await self._with_budget([await self._view(await self.find(worker.id)) for worker in workers])

    async def _view(self, worker: Worker) -> WorkerRow:
        viewer = self._viewer()
        return await self._grid.read(lambda ledger, now: worker_view(viewer, worker, now))

    async def _with_budget(self, rows: Sequence[WorkerRow]) -> View:
        state = await self._grid.read(lambda ledger, now: budget_state(ledger, now, wall_ms()))
        return {"workers": [*rows], "budget": budget_view(state)}


def _ended(store: Store) -> list[Worker]:
    return [_decoded(row) for row in store.ended(Worker.kind, limit=MAX_ENDED + 1)]


def _decoded(row: Any) -> Worker:
    worker = decode_row(Worker.kind, row.blob)
    assert isinstance(worker, Worker)
    return worker


class ScalingService:
    """Answers the requests about scaling."""

    def __init__(self, grid: Grid, autoscaler: Autoscaler) -> None:
        self._grid = grid
        self._autoscaler = autoscaler

    @endpoint(READ)
    async def status(self, op: requests.GetScaling, caller: Caller) -> View:
        """Workers by state, utilization, demand, cooldowns and money."""

        def read(ledger: Ledger, now: int) -> ScalingStatus:
            return status_view(
                ledger,
                self._evaluate(ledger, now),
                budget_state(ledger, now, wall_ms()),
                now,
                wall_ms(),
                problem=self._autoscaler.problem,
                expected_milli=self._autoscaler.expected_milli,
                warm=self._autoscaler.warm,
            )

        return {"scaling": await self._grid.read(read)}

    @endpoint(READ)
    async def plan(self, op: requests.PlanScaling, caller: Caller) -> View:
        """What would be done now, and what it would cost."""
        if self._autoscaler.provider:
            await self._autoscaler.read_types()

        def read(ledger: Ledger, now: int) -> ScalingPlanView:
            return plan_view(ledger, self._evaluate(ledger, now).plan, now, wall_ms())

        return {"plan": await self._grid.read(read), "problem": self._autoscaler.problem or None}

    @endpoint(ADMIN)
    async def run(self, op: requests.RunScaling, caller: Caller) -> View:
        """Evaluate now, and act; what was done."""
        if not self._autoscaler.provider:
            raise Refused("scaling.provider is not set: nothing can be started")
        await self._autoscaler.read_types()
        done, started = await self._autoscaler.evaluate_now()

        def read(ledger: Ledger, now: int) -> ScalingPlanView:
            return plan_view(ledger, done, now, wall_ms(), done=True)

        view = await self._grid.read(read)
        return {"plan": view, "started": started, "problem": self._autoscaler.problem or None}

    def _evaluate(self, ledger: Ledger, now: int) -> ScalingEvaluation:
        return evaluate(ledger, now, wall_ms(), warm=self._autoscaler.warm)
