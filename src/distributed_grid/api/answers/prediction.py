"""Answers about the prediction of needs."""

from __future__ import annotations

from distributed_grid.api.answers.common import Answer


class PredictionRow(Answer, frozen=True, kw_only=True):
    """Predicted needs of the next run of a task; None: unknown."""

    key: str  # names the type of task
    user: str
    tier: str
    confidence: float
    tier_confidences: dict[str, float]
    samples: int
    memory_mb: float | None  # the limit of a job without stated needs
    rerun_memory_mb: list[float]  # the limits of its reruns, should it run over
    cpu_cores: float | None  # cores that a run keeps busy
    gpu_memory_mb: float | None
    run_seconds: float | None  # the median
    why: list[str]


class PredictionDetail(Answer, frozen=True):
    prediction: PredictionRow


class TaskTypeRow(Answer, frozen=True, kw_only=True):
    """A type of task that has a history."""

    key: str
    user: str
    samples: int
    last_run_at: str | None
    tier: str | None  # None if its predictor is not in memory
    confidence: float | None
    trained_at: str | None  # None if it was not trained since it is in memory


class TaskTypeList(Answer, frozen=True):
    task_types: list[TaskTypeRow]
    more: bool


class TrainingStep(Answer, frozen=True, kw_only=True):
    """Progress of a training."""

    trained: int
    total: int
    key: str


class TrainingRow(Answer, frozen=True, kw_only=True):
    """A trained type: its tier and held-out coverage, and those before if its predictor was in memory."""

    key: str
    user: str
    samples: int
    tier_before: str | None
    confidence_before: float | None
    tier: str
    confidence: float


class TrainingReport(Answer, frozen=True, kw_only=True):
    trained: list[TrainingRow]
    folded_runs: int  # folded into summaries
    seconds: float


class TrainingDetail(Answer, frozen=True):
    training: TrainingReport


class ExecutionRecord(Answer, frozen=True, kw_only=True):
    """A recorded run."""

    task_id: str
    attempt: int
    key: str
    known: bool  # it was recorded before
    samples: int


class ExecutionDetail(Answer, frozen=True):
    execution: ExecutionRecord


class BatchScaling(Answer, frozen=True, kw_only=True):
    """Factors of a task's needs with another batch size; with the tier `defaults` in proportion to the batch."""

    key: str
    tier: str
    samples: int
    memory: float
    run_time: float
    cpu_time: float


class BatchScalingDetail(Answer, frozen=True):
    scaling: BatchScaling
