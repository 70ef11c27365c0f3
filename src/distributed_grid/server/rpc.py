"""RPC over the Unix socket: the connections of clients, and the table from request type to the method that answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.api.framing import (
    JSON,
    MAX_FRAME_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    STDOUT,
    BrokenFrame,
    Unpacker,
    frame,
    frame_head,
)
from distributed_grid.control.views import View
from distributed_grid.errors import GridError, ProtocolError, Refused, error_view
from distributed_grid.posix.unix_sockets import is_own_peer, peer_uid
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import READ_SECONDS, EncodedAnswer
from distributed_grid.server.prediction.service import PredictionService
from distributed_grid.server.services.auto_offload import AutoOffloadService
from distributed_grid.server.services.boosts import BoostService
from distributed_grid.server.services.daemon import DaemonService
from distributed_grid.server.services.job_notices import JobNotice
from distributed_grid.server.services.jobs import FileSink, JobService
from distributed_grid.server.services.leases import LeaseService
from distributed_grid.server.services.memory import MemoryService
from distributed_grid.server.services.nodes import NodeService, Report
from distributed_grid.server.services.offloading import OffloadingService
from distributed_grid.server.services.pull_workers import PullWorkerService
from distributed_grid.server.services.reports import ReportService
from distributed_grid.server.services.tasks import TaskService
from distributed_grid.server.services.workers import ScalingService, WorkerService
from distributed_grid.supervision import start_logged

MAX_WAITING_BYTES = 2 * MAX_REQUEST_BYTES  # of requests behind the one being answered
REQUEST_OVERHEAD_BYTES = 100
MAX_TAKEN, MAX_TAKEN_BYTES = 8, 64 * 1024  # requests that are looked at together, of those that wait
log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Connection(asyncio.Protocol):
    """Answers one client, in the order of its requests; a client that hangs up cancels what is being answered.

    A client that does not read its answers gets no more of them, and one with too many requests waiting is cut off.
    """

    def __init__(
        self, serve: Callable[[Connection, list[bytes]], Awaitable[None]], connections: set[Connection]
    ) -> None:
        self._serve = serve
        self._connections = connections
        self._unpacker = Unpacker(MAX_REQUEST_BYTES)
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer: socket.socket = transport.get_extra_info("socket")
        if not is_own_peer(peer):
            log.warning("a connection of uid %d was refused", peer_uid(peer))
            transport.abort()
            return
        self._connections.add(self)
        self._task = start_logged(self._run(), "a connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._unpacker.feed(data):
                if kind != JSON:
                    raise BrokenFrame(f"clients send JSON, not {kind!r}")
                self._waiting_bytes += len(body) + REQUEST_OVERHEAD_BYTES
                if self._waiting_bytes > MAX_WAITING_BYTES:
                    raise BrokenFrame("more requests than may wait for their answers")
                self._messages.put_nowait(body)
        except BrokenFrame as broken:
            log.warning("a client broke the protocol: %s", broken)
            self.close()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    @property
    def has_unanswered(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._busy or not self._messages.empty()

    @property
    def is_closing(self) -> bool:
        """Whether the client is gone, as far as is known: what is sent now is not delivered."""
        return self._transport is None or self._transport.is_closing()

    async def _run(self) -> None:
        try:
            await self._answer_all()
        finally:
            self.close()  # whoever waits for an answer that cannot be sent hears at least that

    async def _answer_all(self) -> None:
        while True:
            bodies = [await self._messages.get()]
            taken = len(bodies[0])
            while len(bodies) < MAX_TAKEN and taken < MAX_TAKEN_BYTES and not self._messages.empty():
                bodies.append(self._messages.get_nowait())
                taken += len(bodies[-1])
            self._waiting_bytes -= taken + REQUEST_OVERHEAD_BYTES * len(bodies)
            self._busy = True
            try:
                await self._serve(self, bodies)
            finally:
                self._busy = False

    def send_failure(self, failure: BaseException) -> None:
        """Answer a request that failed; a bug is reported and logged, and the other clients go on."""
        if isinstance(failure, GridError):
            self.send({"error": error_view(failure)})
        else:
            log.error("a request failed", exc_info=failure)
            self.send({"error": {"type": "Bug", "message": "the control plane has a bug; see its log"}})

    async def send_answer(self, answer: View | EncodedAnswer) -> None:
        """Send an answer; a long one in parts, each once the client has taken the one before. A client that takes
        nothing for long is disconnected."""
        if not isinstance(answer, EncodedAnswer):
            self.send(answer)
            return
        self._write(frame_head(JSON, answer.size))
        async for part in answer.paced_parts():
            self._write(part)
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self.drain()
            except TimeoutError:
                log.warning("a client did not read its answer for %g s: disconnected", READ_SECONDS)
                if self._transport is not None:
                    self._transport.abort()
                return

    def send(self, message: Any) -> None:
        """Send a JSON message; where a client could not take it, that is the answer."""
        body = encode_answer(message)
        if len(body) > MAX_FRAME_BYTES:
            why = f"the answer has {len(body):,} bytes, {MAX_FRAME_BYTES:,} can be sent: ask for less"
            body = encode_answer({"error": error_view(Refused(why))})
        self.send_frame(JSON, body)

    def send_frame(self, kind: bytes, body: bytes) -> None:
        self._write(frame(kind, body))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.is_closing:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has received what was sent."""
        await self._writable.wait()


def encode_answer(message: Any) -> bytes:
    """A message as JSON."""
    return _encoder.encode(message)


AnswerTable = dict[type[requests.Message], Callable[[Any, Caller], Awaitable[View | EncodedAnswer]]]
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
    prediction: PredictionService,
    pull_workers: PullWorkerService,
    tasks: TaskService,
    admission: Admission,
    workers: WorkerService,
    scaling: ScalingService,
    offloading: OffloadingService,
    auto_offload: AutoOffloadService,
) -> AnswerTable:
    """Which method answers which request."""
    return {
        requests.ClientHello: lambda op, caller: daemon.hello(op),
        requests.GetDaemonInfo: lambda op, caller: daemon.info(),
        requests.GetConfig: lambda op, caller: daemon.config(),
        requests.ReloadConfig: lambda op, caller: daemon.reload(op),
        requests.KeepRunning: lambda op, caller: daemon.keep_running(op),
        requests.StopDaemon: lambda op, caller: daemon.stop(op),
        requests.ConfirmClocks: lambda op, caller: daemon.confirm_clocks(caller),
        requests.GetClocks: lambda op, caller: daemon.clocks(),
        requests.GetStatus: lambda op, caller: nodes.status(caller),
        requests.RequestLease: leases.request_and_wait,
        requests.ReleaseLease: leases.release,
        requests.ExtendLease: leases.extend,
        requests.RequestBoost: boosts.request_and_wait,
        requests.ListBoosts: boosts.list,
        requests.GetBoost: lambda op, caller: boosts.get(op.boost_id, caller),
        requests.ReleaseBoost: boosts.release,
        requests.ExtendBoost: boosts.extend,
        requests.RunInBoost: boosts.run,
        requests.SubmitJob: jobs.submit,
        requests.ListJobs: jobs.list,
        requests.ListLiveJobs: lambda op, caller: jobs.list_live(caller),
        requests.GetJob: lambda op, caller: jobs.get(op.job_id, caller),
        requests.CancelJob: jobs.cancel,
        requests.DetachJob: jobs.detach,
        requests.WaitForJob: jobs.wait,
        requests.RecordFetch: jobs.record_fetch,
        requests.WaitForDelivery: jobs.wait_for_delivery,
        requests.Explain: reports.explain,
        requests.GetLendingReport: lambda op, caller: reports.lending(op),
        requests.GetMetrics: lambda op, caller: reports.metrics(op),
        **_memory_table(memory),
        **_task_table(pull_workers, tasks),
        **_worker_table(workers),
        **_offloading_table(offloading),
        requests.SetAutoOffload: auto_offload.set,
        requests.GetAutoOffload: lambda op, caller: auto_offload.status(caller),
        requests.GetScaling: lambda op, caller: scaling.status(),
        requests.PlanScaling: lambda op, caller: scaling.plan(),
        requests.RunScaling: lambda op, caller: scaling.run(caller),
        requests.PredictTask: prediction.predict,
        requests.RecordExecution: prediction.record_execution,
        requests.ListTaskTypes: prediction.list_types,
        requests.GetBatchScaling: prediction.batch_scaling,
        requests.CreateToken: lambda op, caller: admission.create_token(op),
        requests.IdentifyToken: lambda op, caller: admission.identify_token(op),
        requests.ListTokens: lambda op, caller: admission.list_tokens(),
        requests.RevokeToken: lambda op, caller: admission.revoke_token(op.token_id),
        requests.CreateJoinToken: lambda op, caller: admission.create_join_token(op),
        requests.ListJoinTokens: lambda op, caller: admission.list_join_tokens(),
        requests.RevokeJoinToken: lambda op, caller: admission.revoke_join_token(op.token_id),
    }


def _worker_table(workers: WorkerService) -> AnswerTable:
    return {
        requests.CreateWorkers: workers.create,
        requests.ListWorkers: lambda op, caller: workers.list(op),
        requests.GetWorker: lambda op, caller: workers.get(op),
        requests.TerminateWorkers: workers.terminate,
        requests.ListWorkerOffers: lambda op, caller: workers.offers(op),
    }


def _offloading_table(offloading: OffloadingService) -> AnswerTable:
    return {
        requests.ScanOffload: offloading.scan,
        requests.ExecuteOffload: offloading.execute,
        requests.ListMoves: offloading.list,
        requests.GetMove: offloading.get,
        requests.CancelMove: offloading.cancel,
        requests.ListConsents: lambda op, caller: offloading.consents(),
        requests.WithdrawConsent: offloading.withdraw,
        requests.AdviseCommand: offloading.advise,
    }


def _memory_table(memory: MemoryService) -> AnswerTable:
    return {
        requests.AllocateBlock: memory.allocate,
        requests.FindBlock: memory.find,
        requests.FreeBlock: memory.free,
        requests.NameBlock: memory.name,
        requests.RenewBlocks: memory.renew,
        requests.ListBlocks: lambda op, caller: memory.list(op),
        requests.GetMemoryStats: lambda op, caller: memory.stats(),
    }


def _task_table(workers: PullWorkerService, tasks: TaskService) -> AnswerTable:
    return {
        requests.RegisterPullWorker: lambda op, caller: workers.register(op),
        requests.ReportPullWorker: lambda op, caller: workers.heard(op),
        requests.RemovePullWorker: lambda op, caller: workers.remove(op),
        requests.ReassessWorkers: lambda op, caller: workers.reassess(),
        requests.ReserveOnWorker: workers.reserve,
        requests.CheckWorkerFit: lambda op, caller: workers.check(op),
        requests.ListWorkerResources: lambda op, caller: workers.resources(),
        requests.SubmitTask: tasks.submit,
        requests.ListTasks: lambda op, caller: tasks.list(op),
        requests.TakeTask: lambda op, caller: tasks.take(op),
        requests.WithdrawAsk: lambda op, caller: tasks.withdraw(op),
        requests.ReportTask: lambda op, caller: tasks.report(op),
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
        self._owner = Caller(owner, admin=True, is_here=True)
        self._on_request = on_request
        assert {*answers, *progress, *self._streams} == set(requests.REQUEST_TYPES), "a request type has no handler"

    async def serve(self, client: Connection, bodies: list[bytes]) -> None:
        """Answer requests in their order, each before the next is begun; only submissions that a client sends without
        waiting for the answers are begun together, so that they share a commit."""
        for is_submission, ops in itertools.groupby(map(_parse, bodies), lambda op: isinstance(op, requests.SubmitJob)):
            if is_submission:
                self._on_request()
                submitted = (self._answers[requests.SubmitJob](op, self._owner) for op in ops)
                for answer in await asyncio.gather(*submitted, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        client.send_failure(answer)
                    else:
                        client.send(answer)
                await client.drain()
                continue
            for op in ops:
                try:
                    await self._serve_one(client, op)
                except Exception as failure:  # the outermost loop of a client
                    client.send_failure(failure)
                await client.drain()

    async def _serve_one(self, client: Connection, op: requests.Message | GridError) -> None:
        """Answer one request; what is wrong with it is raised."""
        self._on_request()
        if isinstance(op, GridError):
            raise op
        kind = type(op)
        if kind in self._answers:
            answer = await self._answers[kind](op, self._owner)
            await client.send_answer(answer)
            if isinstance(op, requests.TakeTask) and client.is_closing:  # it was not written: the client is gone
                assert isinstance(answer, dict)
                undelivered = requests.WithdrawAsk(op.worker_id, op.incarnation, answer["ask_id"])
                start_logged(self._withdraw(undelivered), "a task that was not delivered")
        elif kind in self._progress:
            client.send({**await self._progress[kind](op, self._owner, client.send), "done": True})
        else:
            await self._streams[kind](op, client)

    async def _withdraw(self, op: requests.WithdrawAsk) -> None:
        await self._answers[requests.WithdrawAsk](op, self._owner)

    async def _read_logs(self, op: requests.ReadLogs, client: Connection) -> None:
        client.send({**await self._jobs.read_logs(op, self._owner, _SocketOutput(client)), "done": True})

    async def _fetch_files(self, op: requests.FetchFiles, client: Connection) -> None:
        async def header(fields: dict[str, Any]) -> None:
            client.send(fields)
            await client.drain()

        async def data(chunk: bytes) -> None:
            client.send_frame(STDOUT, chunk)
            await client.drain()

        client.send({**await self._jobs.fetch_files(op, self._owner, FileSink(header, data)), "done": True})

    async def _list_events(self, op: requests.ListEvents, client: Connection) -> None:
        async with contextlib.aclosing(self._reports.events(op, self._owner)) as events:
            async for event in events:
                client.send(event)
                await client.drain()
        client.send({"done": True})


class _SocketOutput:
    """Output of a job on the socket: frames of bytes, and a message where bytes were dropped."""

    def __init__(self, client: Connection) -> None:
        self._client = client

    async def send(self, kind: bytes, chunk: bytes) -> None:
        self._client.send_frame(kind, chunk)
        await self._client.drain()

    async def skip(self, kind: bytes, dropped: int, message: str) -> None:
        stream = "stdout" if kind == STDOUT else "stderr"
        self._client.send({"stream": stream, "dropped": dropped, "message": message})
        await self._client.drain()

    async def notify(self, notice: JobNotice) -> None:
        self._client.send(msgspec.structs.asdict(notice))
        await self._client.drain()


def _parse(body: bytes) -> requests.Message | GridError:
    """The request, or what is wrong with it."""
    try:
        return requests.parse(body)
    except GridError as failure:
        return failure


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
