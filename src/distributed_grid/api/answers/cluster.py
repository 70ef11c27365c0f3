"""Answers about the machines of the cluster and about Ray."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from distributed_grid.api.answers.common import Answer


class UnfetchedResult(Answer, frozen=True, omit_defaults=True):
    """Files of an ended job that were not fetched."""

    job_id: str
    files: int
    bytes: int
    problem: str = ""  # the reason why they could not be counted


class NodeResult(Answer, frozen=True, kw_only=True):
    """Result of a command on one node."""

    node_id: str
    ok: bool
    detail: str
    results: Sequence[UnfetchedResult] | UnsetType = UNSET  # of a refused purge


class NodeResults(Answer, frozen=True):
    results: Sequence[NodeResult]


class AttachedRay(Answer, frozen=True, kw_only=True):
    """Results of attaching a Ray cluster, by node."""

    results: Sequence[NodeResult]
    address: str
    warnings: list[str]


class RayOnNode(Answer, frozen=True, kw_only=True):
    """Part of a node in the grid's Ray cluster."""

    address: str
    session: str | None
    authenticated: bool
    risk: str | None
    state: str


class RayStatus(Answer, frozen=True, kw_only=True):
    """The Ray cluster: its address, the ways to it, and its risk."""

    mode: str
    address: str
    session: str | None
    authenticated: bool
    tls: bool | UnsetType = UNSET  # of the grid's own Ray
    problem: str | UnsetType | None = UNSET  # of an attached cluster: the reason why it is not connected
    nodes: dict[str, str]  # the state of Ray by node
    risk: str | None
    dashboard: str | None
    client: str | None
    head: str | None

    def on_node(self, name: str) -> RayOnNode | None:
        if name not in self.nodes:
            return None
        return RayOnNode(
            address=self.address,
            session=self.session,
            authenticated=self.authenticated,
            risk=self.risk,
            state=self.nodes[name],
        )


class ClusterNodeRow(Answer, frozen=True, kw_only=True):
    """A machine of the cluster, its agent and the link to it."""

    node_id: str
    address: str
    state: str | None
    cooling: bool
    wanted: bool
    link: str | None
    detail: str | None
    version: str | None
    python: str | None
    seconds_since_heard: float | None
    jobs: int
    ray: RayOnNode | None = None
    # resources of a node that the ledger has, as in `grid status`
    cpu_cores: float | UnsetType = UNSET
    cpu_free: float | UnsetType = UNSET
    cpu_lent: float | UnsetType = UNSET
    memory_gb: float | UnsetType = UNSET
    memory_free_gb: float | UnsetType = UNSET
    memory_lent_gb: float | UnsetType = UNSET
    gpus: int | UnsetType = UNSET
    gpus_free: float | UnsetType = UNSET
    gpus_lent: float | UnsetType = UNSET
    keeps: list[str] | UnsetType = UNSET
    stopped: bool | UnsetType = UNSET


class ClusterMachines(Answer, frozen=True):
    nodes: Sequence[ClusterNodeRow]
    ray: RayStatus | None


class ClusterEnvironment(Answer, frozen=True):
    """Variables with which programs find Ray."""

    environ: dict[str, str]
    ray: RayStatus | None
