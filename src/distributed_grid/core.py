"""`GridOrchestrator`: run a command with borrowed resources from Python, and the status of what is shared.

It holds a config and a client of the control plane, nothing else: two programs, or a program and a terminal, always see
the same grid.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from distributed_grid.api.framing import JSON, STDERR, STDOUT
from distributed_grid.client.async_client import AsyncClient, locate_grid
from distributed_grid.client.conversation import ReconnectBackoff
from distributed_grid.client.job_payload import (
    NONE,
    WorkdirUpload,
    caller_environment,
    check_command,
    upload_workdir,
)
from distributed_grid.client.pages import whole_status_async
from distributed_grid.client.placement_arguments import PlacementArguments, placement_fields
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.errors import BadInput, GridError, NotFound, TimedOut, Unreachable
from distributed_grid.number_text import plain_number
from distributed_grid.orchestration.resource_sharing import ResourceSharingProtocol

log = logging.getLogger(__name__)


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


DELAY_SECONDS = 10.0
"""Wait for the delivery of files that has a problem, before it is left to the control plane."""


class SharedResourceStatus(TypedDict):
    """Offers and allocations; the rows are those of `grid shared-status --json`."""

    offers: list[dict[str, Any]]
    allocations: list[dict[str, Any]]


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
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        variables = caller_environment(dict(env or {}))
        check_command(argv, variables, env or {})
        fields = placement_fields(placing, preferred_nodes)
        here = os.path.abspath(cwd or os.getcwd())
        upload = await self._upload(workdir, here, isolated=isolated, require=fields["require"], ship=ship)
        accepted = await self._client.call(
            "submit_job",
            request_id=uuid.uuid4().hex,
            argv=argv,
            resource_type=None if resource_type is None else str(resource_type),
            amount=None if amount is None else float(amount),
            priority=Priority.parse(priority).name.lower(),
            job_id=job_id or "",
            target=target_node or "",
            **{**fields, "require": list(upload.require)},
            workdir=upload.workdir,
            given=list(env or {}),
            wait_seconds=wait_seconds,
            timeout_seconds=timeout,
            retries=retries,
            restartable=restartable,
            env=variables,
            cwd="" if isolated else here,
            **_fetch_fields(fetch, here if workdir in (None, NONE) else os.path.abspath(workdir), overwrite=overwrite),
        )
        uid = accepted["job"]["uid"]
        try:
            result = await self._result(uid)
        except asyncio.CancelledError:
            await asyncio.shield(self._client.call("cancel_job", job_id=uid))
            raise
        return await self._with_files(uid, result) if fetch else result

    async def _upload(
        self,
        workdir: str | os.PathLike[str] | None,
        here: str,
        *,
        isolated: bool,
        require: Sequence[str],
        ship: Sequence[str],
    ) -> WorkdirUpload:
        """Upload a working directory, where there are other machines at all; the log names what is not shipped."""
        welcome = await self._client.greet()
        upload = await asyncio.to_thread(
            upload_workdir,
            None if workdir is None else os.fspath(workdir),
            self._state_dir,
            here=here,
            nodes=welcome["nodes"],
            far=welcome["far_nodes"],
            require=require,
            isolated=isolated,
            ship=ship,
        )
        for note in upload.notes:
            log.warning("%s", note)
        return upload

    async def _with_files(self, uid: str, result: SharedRunResult) -> SharedRunResult:
        """The result, once the files that were wanted are there; Unreachable where they come later."""
        delayed_since = 0.0
        while True:
            delivery = (await self._client.call("wait_for_delivery", job_id=uid, timeout_seconds=DELAY_SECONDS))[
                "delivery"
            ]
            if delivery["state"] == "delivered":
                return replace(result, beside=delivery["beside"])
            if delivery["state"] == "failed":
                raise NotFound(f"the files of {result.job_id} were not fetched: {delivery['problem']}")
            now = time.monotonic()
            delayed_since = (delayed_since or now) if delivery["problem"] else 0.0
            if delayed_since and now - delayed_since >= DELAY_SECONDS:
                raise Unreachable(f"the files of {result.job_id} come when they can be had: {delivery['problem']}")

    async def _result(self, uid: str) -> SharedRunResult:
        output = {STDOUT: bytearray(), STDERR: bytearray()}
        seen = {STDOUT: 0, STDERR: 0}
        backoff = ReconnectBackoff()
        while True:
            position = {"stdout_seen": seen[STDOUT], "stderr_seen": seen[STDERR]}
            try:
                async for kind, part in self._client.stream("read_logs", job_id=uid, follow=True, **position):
                    backoff.reset()
                    if kind == JSON:
                        assert isinstance(part, dict)
                        if "dropped" not in part:
                            return _result_of(part["job"], output)
                        kind = STDOUT if part["stream"] == "stdout" else STDERR
                        seen[kind] += part["dropped"]
                        output[kind] += f"[grid: {part['message']}]\n".encode()
                        continue
                    assert isinstance(part, bytes)
                    output[kind] += part
                    seen[kind] += len(part)
            except Unreachable as loss:  # the control plane went away: the next one knows the job
                await asyncio.sleep(backoff.delay_after(loss))

    async def get_shared_resource_status(self) -> SharedResourceStatus:
        """The offers and active allocations of this moment."""
        status: Any = await whole_status_async(self._client)
        return {"offers": status["offers"], "allocations": status["allocations"]}


class SSHManager(ResourceSharingProtocol):
    """Nodes that are reached by SSH: install, start, stop and show their agents.

    It holds no connection: the control plane does, in a process of its own.
    """


def _fetch_fields(patterns: Sequence[str], directory: str, *, overwrite: bool) -> dict[str, Any]:
    """The fields of a submission about the files that come back."""
    if not patterns:
        return {}
    from distributed_grid.trees.file_return import current_umask  # most programs fetch nothing

    return {"fetch": list(patterns), "fetch_to": directory, "overwrite": overwrite, "umask": current_umask()}


def _result_of(job: dict[str, Any], output: dict[bytes, bytearray]) -> SharedRunResult:
    if job["outcome"] == "waited_too_long":
        raise TimedOut(f"No resource offers available: {job['detail']}")
    if job["outcome"] == "lost":
        raise GridError(f"{job['job_id']} is lost: {job['detail']}")
    return SharedRunResult(
        job["job_id"],
        job["shell_code"],
        output[STDOUT].decode(errors="replace"),
        output[STDERR].decode(errors="replace"),
        job["node_id"],
        job["outcome"],
        job["detail"],
    )
