"""`ResourcePerformancePredictor`: needs of tasks, learned from their use of resources.

The history is the control plane's: every program and the command line predict from the records of all programs and from
the measurements of jobs. The methods are plain and safe inside a running event loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Literal, Self, TypedDict

from distributed_grid.client.async_client import locate_grid
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import JsonObject, as_object
from distributed_grid.client.task_descriptions import execution_fields, task_fields
from distributed_grid.config import ClusterConfig
from distributed_grid.errors import BadInput
from distributed_grid.prediction.task_runs import (
    DEFAULT_MIN_SAMPLES_FOR_ML,
    DEFAULT_MIN_SAMPLES_FOR_STATS,
    DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD,
    DEFAULT_PREDICTION_UPDATE_INTERVAL,
)

__all__ = [
    "DEFAULT_CPU_CORES",
    "DEFAULT_GPU_MEMORY_MB",
    "DEFAULT_MEMORY_MB",
    "DEFAULT_MIN_SAMPLES_FOR_ML",
    "DEFAULT_MIN_SAMPLES_FOR_STATS",
    "DEFAULT_PREDICTION_CONFIDENCE_THRESHOLD",
    "DEFAULT_PREDICTION_UPDATE_INTERVAL",
    "ResourcePerformancePredictor",
    "ResourcePrediction",
]

DEFAULT_CPU_CORES = 1.0
DEFAULT_MEMORY_MB = 1024.0
DEFAULT_GPU_MEMORY_MB = 0.0
"""Needs of an unknown task."""


class ResourcePrediction(TypedDict):
    """Needs of a task. With the tier `defaults`, and for quantities that were never measured, they are the defaults;
    `execution_time_seconds` is None where it is unknown."""

    cpu_cores: float
    memory_mb: float
    gpu_memory_mb: float
    execution_time_seconds: float | None
    tier: str
    confidence: float
    samples: int


class ResourcePerformancePredictor:
    """Records executions, predicts requirements, trains. One call at a time, so several threads may share one."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        self.config = cluster_config
        self._client = Client(*locate_grid(cluster_config, state_dir))
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; a later call attaches again. Safe to call twice."""
        with self._lock:
            self._client.close()

    def record_task_execution(self, task_id: str, execution_data: Mapping[str, Any]) -> JsonObject:
        """Record the resources that a run used. The same task and `attempt` again changes nothing, and is `known`."""
        fields = execution_fields(task_id, execution_data)
        with self._lock:
            return as_object(self._client.record_execution(**fields).execution)

    def predict_resource_requirements(self, task_data: Mapping[str, Any]) -> ResourcePrediction:
        """Needs of a task: by models, by statistics or by default, see `tier`."""
        fields = task_fields(task_data)
        with self._lock:
            prediction = self._client.predict_task(**fields).prediction
        memory_mb, cpu_cores, gpu_mb = prediction.memory_mb, prediction.cpu_cores, prediction.gpu_memory_mb
        return {
            "cpu_cores": DEFAULT_CPU_CORES if cpu_cores is None else cpu_cores,
            "memory_mb": DEFAULT_MEMORY_MB if memory_mb is None else memory_mb,
            "gpu_memory_mb": DEFAULT_GPU_MEMORY_MB if gpu_mb is None else gpu_mb,
            "execution_time_seconds": prediction.run_seconds,
            "tier": prediction.tier,
            "confidence": prediction.confidence,
            "samples": prediction.samples,
        }

    def train_models(self) -> JsonObject:
        """Train every type of task from its history; it returns when that is done."""
        with self._lock:
            return as_object(self._client.train_predictor(lambda step: None).training)

    def calculate_batch_scaling_factor(
        self,
        task_data: Mapping[str, Any] | str,
        batch_size: float,
        base_batch_size: float | None = None,
        *,
        resource: Literal["memory", "run_time", "cpu_time"] = "memory",
    ) -> float:
        """Ratio of the resource that a task takes with `batch_size` to that with `base_batch_size` (by default the one
        in `task_data`, else 1). For an unknown task it is in proportion to the batch."""
        if resource not in ("memory", "run_time", "cpu_time"):
            raise BadInput(f"resource must be memory, run_time or cpu_time, not {resource!r}")
        fields = task_fields({"task_type": task_data} if isinstance(task_data, str) else task_data)
        given = fields.get("parameters", {}).get("batch_size")
        base = base_batch_size if base_batch_size is not None else given if isinstance(given, float) else 1.0
        with self._lock:
            answer = self._client.get_batch_scaling(**fields, base_batch_size=base, batch_size=batch_size)
        factor: float = getattr(answer.scaling, resource)
        return factor
