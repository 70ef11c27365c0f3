"""How each message of the socket is answered: one short method each, named by `requests`."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_grid import __version__
from distributed_grid.api import requests
from distributed_grid.api.errors import error_view
from distributed_grid.api.framing import PROTOCOL, STDOUT
from distributed_grid.errors import GridError, ProtocolError, Refused
from distributed_grid.server.context import DaemonContext
from distributed_grid.server.ray.attach_status import status
from distributed_grid.server.rpc.connection import Connection, encode_answer
from distributed_grid.server.services.boosts import BoostService, run_in_boost
from distributed_grid.server.services.drain import cooled
from distributed_grid.server.services.jobs import Caller, FileSink, JobService
from distributed_grid.server.services.memory import MemoryService
from distributed_grid.server.services.memory import Op as MemoryOp
from distributed_grid.server.services.metrics import measured


class Dispatcher:
    """Answers messages; holds nothing but the house it serves in. Who owns the socket may do everything."""

    def __init__(self, house: DaemonContext) -> None:
        self._house = house
        self._deeds = JobService(house)
        self._boosts = BoostService(house, self._deeds)
        self._memory = MemoryService(house)
        self._caller = Caller(login_name(), admin=True)
        self._handlers: dict[type, Callable[[Connection, Any], Awaitable[None]]] = {
            requests.ClientHello: self._hello,
            requests.GetStatus: self._status,
            requests.GetDaemonInfo: self._info,
            requests.GetConfig: self._config,
            requests.RequestLease: self._ask,
            requests.ReleaseLease: self._release,
            requests.ExtendLease: self._extend,
            requests.RequestBoost: self._boost,
            requests.ListBoosts: self._list_boosts,
            requests.ReleaseBoost: self._release_boost,
            requests.ExtendBoost: self._extend_boost,
            requests.GetBoost: self._one_boost,
            requests.RunInBoost: self._run_boost,
            requests.DrainNode: self._cooldown,
            requests.SubmitJob: self._submit,
            requests.ListJobs: self._jobs,
            requests.GetJob: self._job,
            requests.Explain: self._explain,
            requests.GetLendingReport: self._ledger,
            requests.CancelJob: self._cancel,
            requests.WaitForJob: self._wait,
            requests.ReadLogs: self._logs,
            requests.FetchFiles: self._fetch,
            requests.ListEvents: self._events,
            requests.GetMetrics: self._metrics,
            requests.AllocateBlock: self._use_memory,
            requests.FindBlock: self._use_memory,
            requests.FreeBlock: self._use_memory,
            requests.NameBlock: self._use_memory,
            requests.RenewBlocks: self._use_memory,
            requests.ListBlocks: self._use_memory,
            requests.GetMemoryStats: self._use_memory,
            requests.CreateToken: self._create_token,
            requests.ListTokens: self._list_tokens,
            requests.RevokeToken: self._revoke_token,
            requests.CreateJoinToken: self._create_join_token,
            requests.ListJoinTokens: self._list_join_tokens,
            requests.RevokeJoinToken: self._revoke_join_token,
            requests.ManageCluster: self._cluster,
            requests.AttachRay: self._attach,
            requests.DetachRay: self._detach,
            requests.KeepRunning: self._stay,
            requests.StopDaemon: self._stop,
        }

    async def serve(self, client: Connection, body: bytes) -> None:
        """Answer one message; what is wrong with it is raised."""
        op = requests.parse(body)
        await self._handlers[type(op)](client, op)

    async def answer_program(self, node: str, body: bytes) -> bytes:
        """The answer to what a program on another node asks through its agent: about memory, and nothing else."""
        try:
            op = requests.parse(body)
            if isinstance(op, requests.ClientHello):
                if op.protocol != PROTOCOL:
                    raise ProtocolError(f"this control plane speaks protocol {PROTOCOL}, not {op.protocol}")
                return encode_answer({"protocol": PROTOCOL, "version": __version__, "handing_over": False})
            if not isinstance(op, MemoryOp):
                raise Refused("from another node only the memory pool can be asked for")
            return encode_answer(await self._memory.serve(op, Caller(self._caller.user), node))
        except GridError as error:
            return encode_answer({"error": error_view(error)})

    async def _hello(self, client: Connection, op: requests.ClientHello) -> None:
        handing_over = await self._house.greet(op)
        if op.protocol != PROTOCOL and not handing_over:
            raise ProtocolError(
                f"this control plane speaks protocol {PROTOCOL}, not {op.protocol}: upgrade the older side"
            )
        client.send(
            {
                "protocol": PROTOCOL,
                "version": __version__,
                "pid": os.getpid(),
                "handing_over": handing_over,
                **await self._deeds.reach(),
            }
        )

    async def _status(self, client: Connection, op: requests.GetStatus) -> None:
        client.send(await self._deeds.status())

    async def _info(self, client: Connection, op: requests.GetDaemonInfo) -> None:
        client.send(self._house.info())

    async def _config(self, client: Connection, op: requests.GetConfig) -> None:
        client.send(self._house.config_view())

    async def _ask(self, client: Connection, op: requests.RequestLease) -> None:
        client.send(await self._deeds.ask_and_wait(op, self._caller))

    async def _release(self, client: Connection, op: requests.ReleaseLease) -> None:
        client.send(await self._deeds.release(op, self._caller))

    async def _extend(self, client: Connection, op: requests.ExtendLease) -> None:
        client.send(await self._deeds.extend(op, self._caller))

    async def _boost(self, client: Connection, op: requests.RequestBoost) -> None:
        client.send(await self._boosts.request_and_wait(op, self._caller))

    async def _list_boosts(self, client: Connection, op: requests.ListBoosts) -> None:
        client.send(await self._boosts.list(op))

    async def _release_boost(self, client: Connection, op: requests.ReleaseBoost) -> None:
        client.send(await self._boosts.release(op, self._caller))

    async def _one_boost(self, client: Connection, op: requests.GetBoost) -> None:
        client.send(await self._boosts.one(op.boost_id))

    async def _run_boost(self, client: Connection, op: requests.RunInBoost) -> None:
        client.send(await run_in_boost(self._house, self._boosts, op, self._caller))

    async def _extend_boost(self, client: Connection, op: requests.ExtendBoost) -> None:
        client.send(await self._boosts.extend(op, self._caller))

    async def _cooldown(self, client: Connection, op: requests.DrainNode) -> None:
        client.send({**await cooled(self._house.grid, op, self._caller.user, client.send), "done": True})

    async def _use_memory(self, client: Connection, op: Any) -> None:
        client.send(await self._memory.serve(op, self._caller))

    async def _submit(self, client: Connection, op: requests.SubmitJob) -> None:
        client.send(await self._deeds.submit(op, self._caller))

    async def _jobs(self, client: Connection, op: requests.ListJobs) -> None:
        client.send(await self._deeds.jobs(op))

    async def _job(self, client: Connection, op: requests.GetJob) -> None:
        client.send(await self._deeds.job(op.job_id))

    async def _explain(self, client: Connection, op: requests.Explain) -> None:
        client.send(await self._deeds.explain(op))

    async def _ledger(self, client: Connection, op: requests.GetLendingReport) -> None:
        client.send(await self._deeds.ledger(op))

    async def _cancel(self, client: Connection, op: requests.CancelJob) -> None:
        client.send(await self._deeds.cancel(op, self._caller))

    async def _wait(self, client: Connection, op: requests.WaitForJob) -> None:
        client.send(await self._deeds.wait(op))

    async def _logs(self, client: Connection, op: requests.ReadLogs) -> None:
        async def send(kind: bytes, chunk: bytes) -> None:
            client.send_frame(kind, chunk)
            await client.drain()

        client.send({**await self._deeds.logs(op, send), "done": True})

    async def _fetch(self, client: Connection, op: requests.FetchFiles) -> None:
        async def header(fields: dict[str, Any]) -> None:
            client.send(fields)
            await client.drain()

        async def data(chunk: bytes) -> None:
            client.send_frame(STDOUT, chunk)
            await client.drain()

        client.send({**await self._deeds.fetch(op, FileSink(header, data)), "done": True})

    async def _events(self, client: Connection, op: requests.ListEvents) -> None:
        async with contextlib.aclosing(self._deeds.events(op)) as events:
            async for event in events:
                client.send(event)
                await client.drain()
        client.send({"done": True})

    async def _metrics(self, client: Connection, op: requests.GetMetrics) -> None:
        client.send(await measured(self._house.monitor, op))

    async def _create_token(self, client: Connection, op: requests.CreateToken) -> None:
        client.send(await self._house.admission.create_token(op))

    async def _list_tokens(self, client: Connection, op: requests.ListTokens) -> None:
        client.send(self._house.admission.list_tokens())

    async def _revoke_token(self, client: Connection, op: requests.RevokeToken) -> None:
        client.send(await self._house.admission.revoke_token(op.token_id))

    async def _create_join_token(self, client: Connection, op: requests.CreateJoinToken) -> None:
        client.send(await self._house.admission.create_join_token(op))

    async def _list_join_tokens(self, client: Connection, op: requests.ListJoinTokens) -> None:
        client.send(self._house.admission.list_join_tokens())

    async def _revoke_join_token(self, client: Connection, op: requests.RevokeJoinToken) -> None:
        client.send(await self._house.admission.revoke_join_token(op.token_id))

    async def _cluster(self, client: Connection, op: requests.ManageCluster) -> None:
        async def serve(asked: requests.ManageCluster) -> dict[str, Any]:
            return await self._house.cluster.serve(asked, client.send)

        house = self._house
        is_look = op.verb == "status"
        view = await (status(op, house.grid, house.ray, house.attaching, serve) if is_look else serve(op))
        client.send({**view, "done": True})

    async def _attach(self, client: Connection, op: requests.AttachRay) -> None:
        client.send({**await self._house.attaching.attach(op, client.send), "done": True})

    async def _detach(self, client: Connection, op: requests.DetachRay) -> None:
        client.send({**await self._house.attaching.detach(op, client.send), "done": True})

    async def _stay(self, client: Connection, op: requests.KeepRunning) -> None:
        await self._house.listen(op)
        self._house.stay(True)
        client.send(self._house.info())

    async def _stop(self, client: Connection, op: requests.StopDaemon) -> None:
        self._house.stay(False)
        client.send({"stopping": True})
        self._house.end()


def login_name() -> str:
    """The user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
