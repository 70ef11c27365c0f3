"""Scaling: when workers are started and given back, and what is remembered between two evaluations.

Levels are thousandths: of what the grid has, or of the time of a window.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct

from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.workers import Worker

DEFAULT_TARGET_UTILIZATION = 0.7
DEFAULT_SCALE_UP_THRESHOLD = 0.8
DEFAULT_SCALE_DOWN_THRESHOLD = 0.3
DEFAULT_EVALUATION_WINDOW = 300.0
DEFAULT_SCALE_UP_COOLDOWN = 300.0
DEFAULT_SCALE_DOWN_COOLDOWN = 600.0
DEFAULT_WORKER_REASSESSMENT_INTERVAL = 3600.0
DEFAULT_HISTORY_RETENTION = 86400.0

SCALED_UP, SCALED_DOWN = "scaled_up_ms", "scaled_down_ms"
"""The counters that say when a worker last joined, and when one was last given back."""
MAX_LEVEL = 10_000
"""The level of a resource that is wanted and that the grid has none of."""
MAX_SAMPLES = 128

Action = Literal["scale_up", "scale_down", "none"]


class ScalingRules(Struct, frozen=True):
    """Scaling settings of the config, and the workers that the provider can start, the preferred ones first; the
    ledger has one. Without a `provider` nothing is started or given back. `types_known`: the provider was asked what it
    can start; until then a request that no node can serve waits."""

    kind: ClassVar[str] = "scaling"

    provider: str = ""
    min_workers: int = 0
    max_workers: int = 10
    target_milli: int = 700
    up_milli: int = 800
    down_milli: int = 300
    window_ms: int = 300_000
    up_cooldown_ms: int = 300_000
    down_cooldown_ms: int = 600_000
    types: tuple[Worker, ...] = ()
    types_known: bool = True

    @property
    def key(self) -> str:
        return self.kind

    @property
    def is_over(self) -> bool:
        return False


class UtilizationSample(Struct, frozen=True):
    """How much of each resource was taken or waited for at one moment; above 1000 where more waited than there was."""

    at_ms: int
    cpu: int = 0
    memory: int = 0
    gpu: int = 0

    def level(self, resource: ResourceType) -> int:
        found: int = getattr(self, str(resource))
        return found


class UtilizationWindow(Struct, frozen=True):
    """The samples of the evaluation window, oldest first; the ledger has one. Never stored: it begins anew."""

    kind: ClassVar[str] = "utilization"

    samples: tuple[UtilizationSample, ...] = ()

    @property
    def key(self) -> str:
        return self.kind

    @property
    def is_over(self) -> bool:
        return False

    def mean(self, resource: ResourceType, since_ms: int) -> int:
        """The mean level since that moment; 0 where there is no sample."""
        levels = [sample.level(resource) for sample in self.samples if sample.at_ms >= since_ms]
        return sum(levels) // len(levels) if levels else 0

    def added(self, sample: UtilizationSample, window_ms: int) -> UtilizationWindow:
        """With this sample. Samples that are too near to each other are one, so that a window of them is bounded."""
        gap_ms = window_ms // (MAX_SAMPLES // 2)
        kept = [one for one in self.samples if sample.at_ms - window_ms <= one.at_ms < sample.at_ms]
        if len(kept) > 1 and kept[-1].at_ms - kept[-2].at_ms < gap_ms:
            kept.pop()
        return UtilizationWindow((*kept, sample)[-MAX_SAMPLES:])


class ScalingPlan(Struct, frozen=True):
    """What scaling would do now, and why.

    `worker` is what each of `count` new workers would be. `worker_ids` are those that would be given back, or that
    drain and would be kept. `utilization_milli` is the mean of the window for the bottleneck.
    """

    action: Action
    reason: str
    count: int = 0
    worker_ids: tuple[str, ...] = ()
    utilization_milli: int = 0
    bottleneck: ResourceType = ResourceType.CPU
    worker: Worker | None = None
