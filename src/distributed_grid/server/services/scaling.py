"""Requests about scaling: how it stands, what it would do and cost, and one evaluation now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_grid.control.grid import Grid
from distributed_grid.control.scaling_views import plan_view, status_view
from distributed_grid.control.views import View
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import Refused
from distributed_grid.scheduling.scaling.budget import budget_state
from distributed_grid.scheduling.scaling.evaluation import ScalingEvaluation, evaluate
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.services.workers import must_be_admin
from distributed_grid.server.workers.autoscaler import Autoscaler
from distributed_grid.server.workers.reconciler import wall_ms

if TYPE_CHECKING:
    from distributed_grid.control.view_types import ScalingPlanView, ScalingStatus


class ScalingService:
    """Answers the requests about scaling."""

    def __init__(self, grid: Grid, autoscaler: Autoscaler) -> None:
        self._grid = grid
        self._autoscaler = autoscaler

    async def status(self) -> View:
        """Workers by state, utilization, demand, cooldowns and money."""

        def look(ledger: Ledger, now: int) -> ScalingStatus:
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

        return {"scaling": await self._grid.read(look)}

    async def plan(self) -> View:
        """What would be done now, and what it would cost."""
        if self._autoscaler.provider:
            await self._autoscaler.read_types()

        def look(ledger: Ledger, now: int) -> ScalingPlanView:
            return plan_view(ledger, self._evaluate(ledger, now).plan, now, wall_ms())

        return {"plan": await self._grid.read(look), "problem": self._autoscaler.problem or None}

    async def run(self, caller: Caller) -> View:
        """Evaluate now, and act; what was done."""
        must_be_admin(caller)
        if not self._autoscaler.provider:
            raise Refused("scaling.provider is not set: nothing can be started")
        await self._autoscaler.read_types()
        done, started = await self._autoscaler.evaluate_now()

        def look(ledger: Ledger, now: int) -> ScalingPlanView:
            return plan_view(ledger, done, now, wall_ms(), done=True)

        view = await self._grid.read(look)
        return {"plan": view, "started": started, "problem": self._autoscaler.problem or None}

    def _evaluate(self, ledger: Ledger, now: int) -> ScalingEvaluation:
        return evaluate(ledger, now, wall_ms(), warm=self._autoscaler.warm)
