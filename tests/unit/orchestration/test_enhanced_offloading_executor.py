"""Decisions of the executor itself: its mode, and requests that it does not make."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.client.conversation import JsonObject
from distributed_grid.errors import BadInput, Refused
from distributed_grid.orchestration.enhanced_offloading_executor import (
    EnhancedOffloadingExecutor,
    OffloadingMode,
    OffloadingRecommendation,
    lender_of,
)
from distributed_grid.orchestration.offloading_detector import ProcessType


def recommendation(**changes: Any) -> OffloadingRecommendation:
    fields: dict[str, Any] = {
        "node_id": "gpu-master",
        "command": "python simulate.py",
        "process_type": ProcessType.COMPUTE,
        "user": "ana",
        "cpu_cores": 1.0,
        "memory_gb": 2.0,
        "gpu_memory_gb": 0.0,
        "age_seconds": 60.0,
        "is_movable": True,
        "is_recommended": True,
        "way": None,
        "target_node": "gpu1",
        "confidence": 0.9,
        "reasons": (),
        "obstacles": (),
        "needs_consent": False,
        "shape": None,
        "job_id": "job-1",
    }
    return OffloadingRecommendation(**(fields | changes))


def boost(**changes: Any) -> Any:
    fields = {"automatic": True, "is_active": True, "resource_type": "memory", "amount": 4.0, "source_node": "gpu2"}
    return JsonObject(fields | changes)


def test_the_mode_is_one_of_three(tmp_path: Path) -> None:
    executor = EnhancedOffloadingExecutor(None, None, "share_and_offload", state_dir=tmp_path)
    assert executor.mode is OffloadingMode.SHARE_AND_OFFLOAD
    assert EnhancedOffloadingExecutor(state_dir=tmp_path).mode is OffloadingMode.DYNAMIC_BALANCING
    with pytest.raises(BadInput, match="offload_only, share_and_offload, dynamic_balancing"):
        EnhancedOffloadingExecutor(mode="always", state_dir=tmp_path)


def test_what_cannot_be_moved_is_refused_with_its_obstacles(tmp_path: Path) -> None:
    executor = EnhancedOffloadingExecutor(state_dir=tmp_path)
    asked = executor.execute_offloading(recommendation(is_movable=False, obstacles=("a terminal",)))
    with pytest.raises(Refused, match="job-1 cannot be moved: a terminal"):
        asyncio.run(asked)


def test_work_goes_to_the_node_that_lends_enough_already() -> None:
    work = recommendation()
    assert lender_of([boost()], work) == "gpu2"
    assert lender_of([boost(resource_type="cpu", amount=1.0)], work) == "gpu2"
    for other in (
        boost(automatic=False),
        boost(is_active=False),
        boost(amount=1.5),
        boost(resource_type="gpu"),
        boost(source_node=None),
    ):
        assert lender_of([other], work) == ""


def test_the_subject_is_a_pid_or_a_job() -> None:
    assert recommendation().subject == "job-1"
    assert recommendation(pid=4711, job_id=None).subject == "4711"
