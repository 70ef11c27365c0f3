"""One worker that was asked for, in a cloud with faults."""

from __future__ import annotations

from typing import Any

from distributed_grid.domain.workers import WorkerRules
from tests.support.worker_model import WorkerModel

MINUTE = 60_000


def a_model(*faults: str, **rules: Any) -> tuple[WorkerModel, str]:
    """A worker that was asked for, with these faults of the creation."""
    model = WorkerModel(WorkerRules(**rules))
    model.cloud.faults.waiting["create"] = list(faults)
    worker_id = model.want()
    model.perform()
    return model, worker_id


def run_for(model: WorkerModel, ms: int, *, joins: bool = False, every: int = 5_000) -> None:
    """Steps of the control plane for so long, with a list of the cloud `every` so often."""
    end = model.now + ms
    while model.now < end:
        model.perform()
        model.compare()
        if joins:
            model.join()
        model.pass_time(min(every, end - model.now))


def records(model: WorkerModel, kind: str) -> list[str]:
    return [record.reason for record in model.records if record.type == kind]
