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
from distributed_grid.server.rpc.connection import Connection, encoded
from distributed_grid.server.services.boosts import BoostService, run_in_boost
from distributed_grid.server.services.drain import cooled
from distributed_grid.server.services.file_stream import FileParcel
from distributed_grid.server.services.jobs import Caller, JobService
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
        self._caller = Caller(login(), admin=True)
        self._handlers: dict[type, Callable[[Connection, Any], Awaitable[None]]] = {
            requests.Hello: self._hello,
            requests.Status: self._status,
            requests.Info: self._info,
            requests.Config: self._config,
            requests.Ask: self._ask,
            requests.Release: self._release,
            requests.Extend: self._extend,
            requests.Boost: self._boost,
            requests.Boosts: self._list_boosts,
            requests.ReleaseBoost: self._release_boost,
            requests.ExtendBoost: self._extend_boost,
            requests.OneBoost: self._one_boost,
            requests.RunBoost: self._run_boost,
            requests.Cooldown: self._cooldown,
            requests.Submit: self._submit,
            requests.Jobs: self._jobs,
            requests.Job: self._job,
            requests.Explain: self._explain,
            requests.Ledger: self._ledger,
            requests.Cancel: self._cancel,
            requests.Wait: self._wait,
            requests.Logs: self._logs,
            requests.Fetch: self._fetch,
            requests.Events: self._events,
            requests.Metrics: self._metrics,
            requests.MemAllocate: self._use_memory,
            requests.MemFind: self._use_memory,
            requests.MemFree: self._use_memory,
            requests.MemName: self._use_memory,
            requests.MemRenew: self._use_memory,
            requests.MemList: self._use_memory,
            requests.MemStats: self._use_memory,
            requests.CreateToken: self._create_token,
            requests.ListTokens: self._list_tokens,
            requests.RevokeToken: self._revoke_token,
            requests.CreateJoinToken: self._create_join_token,
            requests.ListJoinTokens: self._list_join_tokens,
            requests.RevokeJoinToken: self._revoke_join_token,
            requests.Cluster: self._cluster,
            requests.Attach: self._attach,
            requests.Detach: self._detach,
            requests.Stay: self._stay,
            requests.Stop: self._stop,
        }

    async def serve(self, client: Connection, body: bytes) -> None:
        """Answer one message; what is wrong with it is raised."""
        op = requests.parse(body)
        await self._handlers[type(op)](client, op)

    async def answer_program(self, node: str, body: bytes) -> bytes:
        """The answer to what a program on another node asks through its agent: about memory, and nothing else."""
        try:
            op = requests.parse(body)
            if isinstance(op, requests.Hello):
                if op.protocol != PROTOCOL:
                    raise ProtocolError(f"this control plane speaks protocol {PROTOCOL}, not {op.protocol}")
                return encoded({"protocol": PROTOCOL, "version": __version__, "handing_over": False})
            if not isinstance(op, MemoryOp):
                raise Refused("from another node only the memory pool can be asked for")
            return encoded(await self._memory.serve(op, Caller(self._caller.user), node))
        except GridError as error:
            return encoded({"error": error_view(error)})

    async def _hello(self, client: Connection, op: requests.Hello) -> None:
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

    async def _status(self, client: Connection, op: requests.Status) -> None:
        client.send(await self._deeds.status())

    async def _info(self, client: Connection, op: requests.Info) -> None:
        client.send(self._house.info())

    async def _config(self, client: Connection, op: requests.Config) -> None:
        client.send(self._house.config_view())

    async def _ask(self, client: Connection, op: requests.Ask) -> None:
        client.send(await self._deeds.ask_and_wait(op, self._caller))

    async def _release(self, client: Connection, op: requests.Release) -> None:
        client.send(await self._deeds.release(op, self._caller))

    async def _extend(self, client: Connection, op: requests.Extend) -> None:
        client.send(await self._deeds.extend(op, self._caller))

    async def _boost(self, client: Connection, op: requests.Boost) -> None:
        client.send(await self._boosts.request_and_wait(op, self._caller))

    async def _list_boosts(self, client: Connection, op: requests.Boosts) -> None:
        client.send(await self._boosts.list(op))

    async def _release_boost(self, client: Connection, op: requests.ReleaseBoost) -> None:
        client.send(await self._boosts.release(op, self._caller))

    async def _one_boost(self, client: Connection, op: requests.OneBoost) -> None:
        client.send(await self._boosts.one(op.boost_id))

    async def _run_boost(self, client: Connection, op: requests.RunBoost) -> None:
        client.send(await run_in_boost(self._house, self._boosts, op, self._caller))

    async def _extend_boost(self, client: Connection, op: requests.ExtendBoost) -> None:
        client.send(await self._boosts.extend(op, self._caller))

    async def _cooldown(self, client: Connection, op: requests.Cooldown) -> None:
        client.send({**await cooled(self._house.grid, op, self._caller.user, client.send), "done": True})

    async def _use_memory(self, client: Connection, op: Any) -> None:
        client.send(await self._memory.serve(op, self._caller))

    async def _submit(self, client: Connection, op: requests.Submit) -> None:
        client.send(await self._deeds.submit(op, self._caller))

    async def _jobs(self, client: Connection, op: requests.Jobs) -> None:
        client.send(await self._deeds.jobs(op))

    async def _job(self, client: Connection, op: requests.Job) -> None:
        client.send(await self._deeds.job(op.job_id))

    async def _explain(self, client: Connection, op: requests.Explain) -> None:
        client.send(await self._deeds.explain(op))

    async def _ledger(self, client: Connection, op: requests.Ledger) -> None:
        client.send(await self._deeds.ledger(op))

    async def _cancel(self, client: Connection, op: requests.Cancel) -> None:
        client.send(await self._deeds.cancel(op, self._caller))

    async def _wait(self, client: Connection, op: requests.Wait) -> None:
        client.send(await self._deeds.wait(op))

    async def _logs(self, client: Connection, op: requests.Logs) -> None:
        async def send(kind: bytes, chunk: bytes) -> None:
            client.send_frame(kind, chunk)
            await client.drain()

        client.send({**await self._deeds.logs(op, send), "done": True})

    async def _fetch(self, client: Connection, op: requests.Fetch) -> None:
        async def header(fields: dict[str, Any]) -> None:
            client.send(fields)
            await client.drain()

        async def data(chunk: bytes) -> None:
            client.send_frame(STDOUT, chunk)
            await client.drain()

        client.send({**await self._deeds.fetch(op, FileParcel(header, data)), "done": True})

    async def _events(self, client: Connection, op: requests.Events) -> None:
        async with contextlib.aclosing(self._deeds.events(op)) as events:
            async for event in events:
                client.send(event)
                await client.drain()
        client.send({"done": True})

    async def _metrics(self, client: Connection, op: requests.Metrics) -> None:
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

    async def _cluster(self, client: Connection, op: requests.Cluster) -> None:
        async def serve(asked: requests.Cluster) -> dict[str, Any]:
            return await self._house.cluster.serve(asked, client.send)

        house = self._house
        is_look = op.verb == "status"
        view = await (status(op, house.grid, house.ray, house.attaching, serve) if is_look else serve(op))
        client.send({**view, "done": True})

    async def _attach(self, client: Connection, op: requests.Attach) -> None:
        client.send({**await self._house.attaching.attach(op, client.send), "done": True})

    async def _detach(self, client: Connection, op: requests.Detach) -> None:
        client.send({**await self._house.attaching.detach(op, client.send), "done": True})

    async def _stay(self, client: Connection, op: requests.Stay) -> None:
        await self._house.listen(op)
        self._house.stay(True)
        client.send(self._house.info())

    async def _stop(self, client: Connection, op: requests.Stop) -> None:
        self._house.stay(False)
        client.send({"stopping": True})
        self._house.end()


def login() -> str:
    """The user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
