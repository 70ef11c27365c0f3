"""Runs of tasks as the predictor remembers them, and what it says about the next one."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from distributed_grid.prediction.tiers import Tier

MAX_QUANTITY = 2**60
Quantity = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]


class TaskRun(Struct, frozen=True):
    """One run that is over; a task and an attempt are recorded once, however often they are reported.

    `key` and `features` come from `task_shape`. A quantity of 0 was not measured. A run that was cut short (over its
    limit, cancelled, preempted) is a lower bound: it used at least this much.
    """

    task_id: str
    attempt: int
    user: str
    key: str
    features: tuple[float, ...] = ()
    input_bytes: Quantity = 0
    memory_bytes: Quantity = 0
    cpu_ms: Quantity = 0
    run_ms: Quantity = 0
    gpu_memory_bytes: Quantity = 0
    ended_at_ms: int = 0
    is_lower_bound: bool = False


class MemoryPrediction(Struct, frozen=True):
    """What the next run should be given, and for how long it will run.

    `next_memory_bytes` are the limits of its reruns should it run over, each above the one before. `run_ms` is the
    median; None: not known. `confidence` is the share of earlier runs that this tier covered before it had seen them.
    """

    memory_bytes: int
    next_memory_bytes: tuple[int, ...]
    run_ms: int | None
    tier: Tier
    confidence: float
    samples: int
