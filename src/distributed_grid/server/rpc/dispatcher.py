"""Dispatch of the socket's requests: the table from request type to the service method that answers it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.api.framing import PROTOCOL, STDOUT
from distributed_grid.control.views import View
from distributed_grid.errors import GridError, ProtocolError, Refused, error_view
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.rpc.socket_connection import Connection, encode_answer
from distributed_grid.server.services.boosts import BoostService
from distributed_grid.server.services.daemon import DaemonService
from distributed_grid.server.services.jobs import FileSink, JobService
from distributed_grid.server.services.leases import LeaseService
from distributed_grid.server.services.memory import MemoryService
from distributed_grid.server.services.nodes import NodeService, Report
from distributed_grid.server.services.reports import ReportService

AnswerTable = dict[type[requests.Message], Callable[[Any, Caller], Awaitable[View]]]
"""Requests with one answer."""
ProgressTable = Mapping[type[requests.Message], Callable[[Any, Caller, Report], Awaitable[View]]]
"""Requests that report progress before their answer."""


def answer_table(
    *,
    daemon: DaemonService,
    nodes: NodeService,
    leases: LeaseService,
    boosts: BoostService,
    jobs: JobService,
    reports: ReportService,
    memory: MemoryService,
    admission: Admission,
) -> AnswerTable:
    """Which method answers which request."""
    return {
        requests.ClientHello: lambda op, caller: daemon.hello(op),
        requests.GetDaemonInfo: lambda op, caller: daemon.info(),
        requests.GetConfig: lambda op, caller: daemon.config(),
        requests.KeepRunning: lambda op, caller: daemon.keep_running(op),
        requests.StopDaemon: lambda op, caller: daemon.stop(),
        requests.GetStatus: lambda op, caller: nodes.status(),
        requests.RequestLease: leases.request_and_wait,
        requests.ReleaseLease: leases.release,
        requests.ExtendLease: leases.extend,
        requests.RequestBoost: boosts.request_and_wait,
        requests.ListBoosts: lambda op, caller: boosts.list(op),
        requests.GetBoost: lambda op, caller: boosts.get(op.boost_id),
        requests.ReleaseBoost: boosts.release,
        requests.ExtendBoost: boosts.extend,
        requests.RunInBoost: boosts.run,
        requests.SubmitJob: jobs.submit,
        requests.ListJobs: lambda op, caller: jobs.list(op),
        requests.GetJob: lambda op, caller: jobs.get(op.job_id),
        requests.CancelJob: jobs.cancel,
        requests.WaitForJob: lambda op, caller: jobs.wait(op),
        requests.Explain: lambda op, caller: reports.explain(op),
        requests.GetLendingReport: lambda op, caller: reports.lending(op),
        requests.GetMetrics: lambda op, caller: reports.metrics(op),
        **_memory_table(memory),
        requests.CreateToken: lambda op, caller: admission.create_token(op),
        requests.ListTokens: lambda op, caller: admission.list_tokens(),
        requests.RevokeToken: lambda op, caller: admission.revoke_token(op.token_id),
        requests.CreateJoinToken: lambda op, caller: admission.create_join_token(op),
        requests.ListJoinTokens: lambda op, caller: admission.list_join_tokens(),
        requests.RevokeJoinToken: lambda op, caller: admission.revoke_join_token(op.token_id),
    }


def _memory_table(memory: MemoryService) -> AnswerTable:
    return {
        requests.AllocateBlock: memory.allocate,
        requests.FindBlock: memory.find,
        requests.FreeBlock: memory.free,
        requests.NameBlock: memory.name,
        requests.RenewBlocks: memory.renew,
        requests.ListBlocks: lambda op, caller: memory.list(),
        requests.GetMemoryStats: lambda op, caller: memory.stats(),
    }


class Dispatcher:
    """Answers the requests of the socket as `owner`, who may do everything; `on_request` is called for each."""

    def __init__(
        self,
        answers: AnswerTable,
        progress: ProgressTable,
        *,
        jobs: JobService,
        reports: ReportService,
        owner: str,
        on_request: Callable[[], None],
    ) -> None:
        self._answers = answers
        self._progress = progress
        self._streams: dict[type[requests.Message], Callable[[Any, Connection], Awaitable[None]]] = {
            requests.ReadLogs: self._read_logs,
            requests.FetchFiles: self._fetch_files,
            requests.ListEvents: self._list_events,
        }
        self._jobs = jobs
        self._reports = reports
        self._owner = Caller(owner, admin=True)
        self._on_request = on_request
        assert {*answers, *progress, *self._streams} == set(requests.REQUEST_TYPES), "a request type has no handler"

    async def serve(self, client: Connection, body: bytes) -> None:
        """Answer one request; what is wrong with it is raised."""
        self._on_request()
        op = requests.parse(body)
        kind = type(op)
        if kind in self._answers:
            client.send(await self._answers[kind](op, self._owner))
        elif kind in self._progress:
            client.send({**await self._progress[kind](op, self._owner, client.send), "done": True})
        else:
            await self._streams[kind](op, client)

    async def _read_logs(self, op: requests.ReadLogs, client: Connection) -> None:
        async def send(kind: bytes, chunk: bytes) -> None:
            client.send_frame(kind, chunk)
            await client.drain()

        client.send({**await self._jobs.read_logs(op, send), "done": True})

    async def _fetch_files(self, op: requests.FetchFiles, client: Connection) -> None:
        async def header(fields: dict[str, Any]) -> None:
            client.send(fields)
            await client.drain()

        async def data(chunk: bytes) -> None:
            client.send_frame(STDOUT, chunk)
            await client.drain()

        client.send({**await self._jobs.fetch_files(op, FileSink(header, data)), "done": True})

    async def _list_events(self, op: requests.ListEvents, client: Connection) -> None:
        async with contextlib.aclosing(self._reports.events(op)) as events:
            async for event in events:
                client.send(event)
                await client.drain()
        client.send({"done": True})


class NodeMemoryDispatcher:
    """Answers programs on other nodes, which ask through their agent: about the memory pool of `owner` alone."""

    def __init__(self, memory: MemoryService, owner: str) -> None:
        self._answers = _memory_table(memory)
        self._memory = memory
        self._caller = Caller(owner)

    async def serve(self, node: str, body: bytes) -> bytes:
        """The answer to one request from a node; what is wrong with it is in the answer."""
        try:
            op = requests.parse(body)
            if isinstance(op, requests.ClientHello):
                if op.protocol != PROTOCOL:
                    raise ProtocolError(f"this control plane speaks protocol {PROTOCOL}, not {op.protocol}")
                return encode_answer({"protocol": PROTOCOL, "version": __version__, "handing_over": False})
            if isinstance(op, requests.AllocateBlock):
                return encode_answer(await self._memory.allocate(op, self._caller, node))
            if type(op) not in self._answers:
                raise Refused("from another node only the memory pool can be asked for")
            return encode_answer(await self._answers[type(op)](op, self._caller))
        except GridError as error:
            return encode_answer({"error": error_view(error)})
