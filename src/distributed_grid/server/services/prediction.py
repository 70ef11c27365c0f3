"""Prediction of what work needs, from what its earlier runs used."""

from __future__ import annotations

from collections.abc import Sequence

from distributed_grid.prediction.task_runs import MemoryPrediction, TaskRun


class PredictionService:
    """Records runs, sizes jobs without stated needs, and answers the requests about both."""

    async def size(self, user: str, argv: Sequence[str], input_bytes: int) -> MemoryPrediction | None:
        """Memory for a job that states no needs; None: too little is known, so it gets no limit."""
        return None

    async def run_ms(self, user: str, argv: Sequence[str], input_bytes: int) -> int | None:
        """Median run time of such a command, also where its memory is not known; None: not known."""
        return None

    def record(self, run: TaskRun) -> None:
        """Take in a run that is over, without waiting. The same task and attempt a second time changes nothing."""
