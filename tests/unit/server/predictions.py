"""A prediction service with a history of its own, and runs to fill it with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed_grid.adapters.stores.task_history import TaskHistory
from distributed_grid.api.answers.common import Viewer
from distributed_grid.prediction.task_runs import TaskRun, TierSettings, task_shape
from distributed_grid.server.prediction.service import PredictionService

MB = 1024**2


def a_prediction_service(folder: Path) -> PredictionService:
    return PredictionService(
        TaskHistory(folder / "predictions.db"),
        TierSettings(),
        update_interval_seconds=3600.0,
        now_ms=lambda: 1_700_000_000_000,
        viewer=lambda: Viewer(0),
    )


async def learn_runs(
    prediction: PredictionService,
    argv: Sequence[str],
    *memory_mb: int,
    user: str = "ann",
    run_ms: int = 30_000,
    input_bytes: int = 0,
) -> None:
    """Have the service know runs of a command that ended well."""
    shape = task_shape(argv)
    for number, memory in enumerate(memory_mb):
        prediction.record(
            TaskRun(
                task_id=f"known-{number}-{memory}",
                attempt=1,
                user=user,
                key=shape.key,
                features=shape.features,
                input_bytes=input_bytes,
                memory_bytes=memory * MB,
                cpu_ms=run_ms,
                run_ms=run_ms,
                ended_at_ms=1_699_999_000_000 + number,
                measured_bytes=memory * MB,
            )
        )
    await prediction.store()
