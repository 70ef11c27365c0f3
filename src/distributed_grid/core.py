"""`GridOrchestrator`: run a command with borrowed resources from Python, and the status of what is shared.

It holds a config and a client of the control plane, nothing else: two programs, or a program and a terminal, always see
the same grid.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from distributed_grid.client.async_client import AsyncClient, AsyncioTransport, locate_grid
from distributed_grid.client.conversation import JsonObject, as_objects
from distributed_grid.client.job_payload import NONE
from distributed_grid.client.job_requests import JobRequest, argv_of, command_fields
from distributed_grid.client.jobs import run_request
from distributed_grid.client.pages import whole_status_async
from distributed_grid.client.placement_arguments import PlacementArguments, placement_fields
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.errors import BadInput
from distributed_grid.number_text import plain_number
from distributed_grid.orchestration.resource_sharing import ResourceSharingProtocol


@dataclass(frozen=True, slots=True)
class SharedRunResult:
    """How a command ended that ran with shared resources."""

    job_id: str
    exit_code: int
    stdout: str
    stderr: str
    node_id: str | None
    outcome: str
    detail: str | None
    beside: Mapping[str, str] = field(default_factory=dict)
    """Fetched files whose local version was edited meanwhile and stays, each with the name of the job's version."""

    @property
    def succeeded(self) -> bool:
        return self.outcome == "exited" and self.exit_code == 0


class SharedResourceStatus(TypedDict):
    """Offers and allocations; the rows are those of `grid shared-status --json`."""

    offers: list[JsonObject]
    allocations: list[JsonObject]


class GridOrchestrator:
    """Runs commands on borrowed resources of the grid that a config describes."""

    def __init__(self, config: ClusterConfig | None = None, *, state_dir: str | os.PathLike[str] | None = None) -> None:
        self.config = config
        self._state_dir, client_config = locate_grid(config, state_dir)
        self._client = AsyncClient(self._state_dir, client_config)

    async def __aenter__(self) -> GridOrchestrator:
        await self.initialize()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def initialize(self) -> None:
        """Attach to the control plane, starting one in the background where none runs. Safe to call twice."""
        await self._client.start()

    async def shutdown(self) -> None:
        """Detach from the grid; what was started goes on, and the control plane exits by itself when idle."""

    async def run_with_shared_resources(
        self,
        command: str | Sequence[str],
        resource_type: ResourceType | str | None = None,
        amount: float | None = None,
        priority: str | Priority = "medium",
        job_id: str | None = None,
        *,
        preferred_nodes: Sequence[str] = (),
        target_node: str | None = None,
        wait_seconds: float = 300.0,
        timeout: float = 0.0,
        retries: int = 0,
        restartable: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        isolated: bool = False,
        workdir: str | os.PathLike[str] | None = None,
        ship: Sequence[str] = (),
        fetch: Sequence[str] = (),
        overwrite: bool = False,
        **placing: Unpack[PlacementArguments],
    ) -> SharedRunResult:
        """Borrow, run, give back; returns when the command is over. One string goes through `sh -c`.

        Without a type and an amount it gets one core, and a memory limit where earlier runs say how much it needs.
        On another machine it finds `workdir` (default: `cwd`, if small and no home directory; "none": nothing), without
        files that look like secrets, unless a pattern of `ship` names them. Files that fit `fetch` come back into that
        directory: a file that was edited there since stays, and the job's version is put beside it as NAME.from-JOB;
        `overwrite` replaces it. `target_node` is the node whose work it is, wherever it runs. `restartable`: it may be
        started again from the beginning on another node. `placing` says more about where it may run:
        `strategy="spread"`, `labels=["ssd"]`.

        Raises Refused where the grid says no and TimedOut where the wait for resources was in vain. Cancelling the
        awaiting task cancels the job.
        """
        if amount is not None and not math.isfinite(amount):
            raise BadInput(f"the amount must be a number, not {plain_number(amount)}")
        here = os.path.abspath(cwd or os.getcwd())
        shipped = None if workdir is None else os.fspath(workdir)
        fields = {
            **placement_fields(placing, preferred_nodes),
            **command_fields(
                argv_of(command, shell=isinstance(command, str)),
                env or {},
                job_id=job_id or "",
                directory=here,
                isolated=isolated,
                ship=ship,
                fetch=fetch,
                fetch_to=here if shipped in (None, NONE) else os.path.abspath(shipped or here),
                overwrite=overwrite,
            ),
            "resource_type": None if resource_type is None else str(resource_type),
            "amount": None if amount is None else float(amount),
            "priority": Priority.parse(priority).name.lower(),
            "target": target_node or "",
            "wait_seconds": wait_seconds,
            "timeout_seconds": timeout,
            "retries": retries,
            "restartable": restartable,
        }
        request = JobRequest(fields, shipped, here, isolated, ship)
        result = await run_request(AsyncioTransport(self._client, self._state_dir), request)
        return SharedRunResult(
            job_id=result.job_id,
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            node_id=result.node,
            outcome=result.outcome,
            detail=result.detail,
            beside=result.beside,
        )

    async def get_shared_resource_status(self) -> SharedResourceStatus:
        """The offers and active allocations of this moment."""
        status = await whole_status_async(self._client)
        return {"offers": as_objects(status.offers), "allocations": as_objects(status.allocations)}


class SSHManager(ResourceSharingProtocol):
    """Nodes that are reached by SSH: install, start, stop and show their agents.

    It holds no connection: the control plane does, in a process of its own.
    """
