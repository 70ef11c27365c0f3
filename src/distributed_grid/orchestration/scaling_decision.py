"""`ScalingDecision`: what scaling does or would do, as the guides name it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from distributed_grid.control.view_types import ScalingDecisionRow


class ScalingDecision(Struct, frozen=True):
    """Whether to start or give back workers: `action` is `scale_up`, `scale_down` or `none`.

    With `scale_up`, `count` workers of `worker_type` with these `resource_requirements` are to be created by the
    `provider`; with `scale_down`, those of `worker_ids` are to be terminated. `utilization` is the mean of the window
    for the bottleneck, above 1 where more waits than there is.
    """

    action: str
    reason: str
    count: int = 0
    worker_ids: list[str] = field(default_factory=list)
    utilization: float = 0.0
    worker_type: str | None = None
    resource_requirements: dict[str, Any] | None = None
    provider: str | None = None

    @classmethod
    def from_row(cls, row: ScalingDecisionRow) -> ScalingDecision:
        """The decision that the control plane has made."""
        needs = row["resource_requirements"]
        return cls(
            row["action"],
            row["reason"],
            row["count"],
            list(row["worker_ids"]),
            row["utilization"],
            row["worker_type"],
            None if needs is None else {**needs},
            row["provider"],
        )
