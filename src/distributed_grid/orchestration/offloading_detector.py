"""`OffloadingDetector`: work that had better run on another node, with the way, the target and the reasons.

A scan looks at what runs at that moment; it moves nothing. `EnhancedOffloadingExecutor` takes what it returns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from msgspec import convert

from distributed_grid.client.async_client import GridSession
from distributed_grid.config import ClusterConfig
from distributed_grid.control.view_types import ProposalRow
from distributed_grid.domain.moves import Way
from distributed_grid.domain.processes import ProcessInfo, ProcessType

__all__ = ["OffloadingDetector", "OffloadingRecommendation", "ProcessInfo", "ProcessType", "Way"]


@dataclass(frozen=True, slots=True)
class OffloadingRecommendation:
    """A process or a job of a node, and what could be done with it; amounts in cores and GB.

    For a process `pid` and `process` are set, for a job `job_id`. `is_movable`: it could be moved now, at most its
    user's consent is missing (`needs_consent`, for commands of this `shape`); else `obstacles` says why not.
    `is_recommended`: with the others that are, moving it relieves its node. `confidence` is from 0 to 1.
    """

    node_id: str
    command: str
    process_type: ProcessType
    user: str
    cpu_cores: float
    memory_gb: float
    gpu_memory_gb: float
    age_seconds: float
    is_movable: bool
    is_recommended: bool
    way: Way | None
    target_node: str | None
    confidence: float
    reasons: tuple[str, ...]
    obstacles: tuple[str, ...]
    needs_consent: bool
    shape: str | None
    pid: int | None = None
    job_id: str | None = None
    process: ProcessInfo | None = None

    @property
    def subject(self) -> str:
        """What `grid offload execute` takes: the pid or the id of the job."""
        return str(self.job_id if self.pid is None else self.pid)


class OffloadingDetector(GridSession):
    """Scans nodes for processes and jobs that could run elsewhere."""

    def __init__(
        self,
        ssh_manager: object | None = None,
        cluster_config: ClusterConfig | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        super().__init__(cluster_config, ssh_manager, state_dir=state_dir)

    async def scan_cluster(
        self, node: str | None = None, *, include_immovable: bool = False
    ) -> list[OffloadingRecommendation]:
        """What could be moved, the recommended first: of one node, or of all that are above a mark. On request also
        what cannot, with its obstacles."""
        found = await self._client.call("scan_offload", node=node or "")
        rows: list[ProposalRow] = found["proposals"]
        all_ = [_recommendation(row) for row in rows if include_immovable or row["movable"]]
        return sorted(all_, key=lambda one: (not one.is_recommended, not one.is_movable))

    async def detect_offloading_candidates(self, node: str | None = None) -> list[OffloadingRecommendation]:
        """What should be moved: the recommended part of `scan_cluster`."""
        return [one for one in await self.scan_cluster(node) if one.is_recommended]


def _recommendation(row: ProposalRow) -> OffloadingRecommendation:
    process = row["process"]
    return OffloadingRecommendation(
        node_id=row["node_id"],
        command=row["command"],
        process_type=ProcessType(row["process_type"]),
        user=row["user"],
        cpu_cores=row["cpu_cores"],
        memory_gb=row["memory_gb"],
        gpu_memory_gb=row["gpu_memory_gb"],
        age_seconds=row["age_seconds"],
        is_movable=row["movable"],
        is_recommended=row["recommended"],
        way=Way(row["way"]) if row["way"] is not None else None,
        target_node=row["target_node"],
        confidence=row["confidence"],
        reasons=tuple(row["reasons"]),
        obstacles=tuple(row["obstacles"]),
        needs_consent=row["needs_consent"],
        shape=row["shape"],
        pid=row["pid"],
        job_id=row["job_id"],
        process=convert(process, ProcessInfo) if process is not None else None,
    )
