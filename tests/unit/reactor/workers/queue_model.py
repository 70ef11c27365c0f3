"""A control plane whose provider has a queue."""

from __future__ import annotations

from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.scheduling.scaling.budget import HOUR_MS, budget_state
from tests.support.clouds.slurm_commands import SlurmCommands
from tests.support.worker_model import ControlPlaneModel

RULES = WorkerRules(core_hour_budgets={"slurm": 10_000})


class QueueModel(ControlPlaneModel):
    """A control plane with a Slurm cluster whose queue is so long."""

    def __init__(self, wait_seconds: float, rules: WorkerRules = RULES) -> None:
        super().__init__(
            rules, lambda clock: SlurmCommands(clock, queue_seconds=lambda: wait_seconds, stops_in=1), "slurm"
        )
        self.worker_id = self.want()
        self.perform()

    @property
    def worker(self) -> Worker:
        return self.ledger.workers[self.worker_id]

    def run_for(self, ms: int, *, every: int = 10_000) -> None:
        end = self.now + ms
        while self.now < end:
            self.now = min(self.now + every, end)
            self.check()
            self.perform()
            self.compare()

    @property
    def used_hours(self) -> float:
        (cores,) = budget_state(self.ledger, self.now, self.wall_ms).cores
        return cores.used_ms / HOUR_MS

    @property
    def day_hours(self) -> float:
        (cores,) = budget_state(self.ledger, self.now, self.wall_ms).cores
        return cores.day_ms / HOUR_MS
