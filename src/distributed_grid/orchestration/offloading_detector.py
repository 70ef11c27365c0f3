"""`OffloadingDetector`: recommendations of work to move to another node, with the way, the target and the reasons.

A scan reads the processes and jobs of the moment and moves nothing; `EnhancedOffloadingExecutor` executes its
recommendations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from msgspec import convert

from distributed_grid.api.answers.offloading import ProposalRow
from distributed_grid.client.async_client import GridSession
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.moves import Way
from distributed_grid.domain.processes import ProcessInfo, ProcessType

__all__ = ["OffloadingDetector", "OffloadingRecommendation", "ProcessInfo", "ProcessType", "Way"]


@dataclass(frozen=True, slots=True)
class OffloadingRecommendation:
    """A process or a job of a node, and the ways to move it; amounts in cores and GB.

    For a process `pid` and `process` are set, for a job `job_id`. `is_movable`: it could be moved now, except that the
    consent of its user may be missing (`needs_consent`, for commands of this `shape`); else `obstacles` has the
    reasons. `is_recommended`: moving it, together with the other recommended ones, relieves its node. `confidence` is
    from 0 to 1.
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

    @classmethod
    def of(cls, row: ProposalRow) -> OffloadingRecommendation:
        return cls(
            node_id=row.node_id,
            command=row.command,
            process_type=ProcessType(row.process_type),
            user=row.user,
            cpu_cores=row.cpu_cores,
            memory_gb=row.memory_gb,
            gpu_memory_gb=row.gpu_memory_gb,
            age_seconds=row.age_seconds,
            is_movable=row.movable,
            is_recommended=row.recommended,
            way=Way(row.way) if row.way is not None else None,
            target_node=row.target_node,
            confidence=row.confidence,
            reasons=tuple(row.reasons),
            obstacles=tuple(row.obstacles),
            needs_consent=row.needs_consent,
            shape=row.shape,
            pid=row.pid,
            job_id=row.job_id,
            process=convert(row.process, ProcessInfo) if row.process is not None else None,
        )

    @property
    def subject(self) -> str:
        """The pid or the id of the job, for `grid offload execute`."""
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
        """Movable work, the recommended first: of one node, or of all above a mark. On request also immovable work,
        with its obstacles."""
        proposals = (await self._client.scan_offload(node=node or "")).proposals
        chosen = [row for row in proposals if include_immovable or row.movable]
        return [
            OffloadingRecommendation.of(row)
            for row in sorted(chosen, key=lambda row: (not row.recommended, not row.movable))
        ]

    async def detect_offloading_candidates(self, node: str | None = None) -> list[OffloadingRecommendation]:
        """The recommended part of `scan_cluster`."""
        return [work for work in await self.scan_cluster(node) if work.is_recommended]
