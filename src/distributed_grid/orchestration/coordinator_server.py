"""`CoordinatorServer`: the messages of workers over WebSockets, in a thread of its own, and the scaling loop.

- Every connection shows a token of the grid (`Authorization: Bearer …`), and a browser's is refused.
- A message is bounded, and answered before the next one of its connection is read.
- A client that does not read its answers is cut off.
- Nothing is kept here but which process a connection has registered: all else is in the ledger.
"""

from __future__ import annotations

import asyncio
import hashlib
import http
import ipaddress
import json
import logging
import ssl
import threading
import uuid
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from distributed_grid.api import requests
from distributed_grid.client.async_client import AsyncClient
from distributed_grid.errors import BadInput, GridError, Refused, TimedOut, Unreachable
from distributed_grid.orchestration.coordinator_messages import CoordinatorCall, Reply, error_reply, parse_message
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.orchestration.coordinator import Coordinator
    from distributed_grid.orchestration.dynamic_resource_manager import DynamicResourceManager, ScalingDecision

MAX_MESSAGE_BYTES = 256 * 1024
MAX_CONNECTIONS = 1_000
SEND_SECONDS = 10.0
START_SECONDS = 60.0
BEARER = "grid_"
"""What every token begins with."""
SCALING_SECONDS = 60.0
log = logging.getLogger(__name__)


class CoordinatorServer:
    """Serves a coordinator's messages at an address of this machine; `start` and `stop` are safe to call twice."""

    def __init__(
        self,
        coordinator: Coordinator,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ssl_context: ssl.SSLContext | None = None,
        force_plain: bool = False,
        scaling_seconds: float = SCALING_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        """Port 0 is any that is free. Without an `ssl_context` an address of this machine has the certificate of the
        control plane (`certificate`); one that other machines reach needs its own, unless `force_plain`.

        With a `cloud_provider_manager` scaling is evaluated every `scaling_seconds`. A client that has not taken an
        answer after `send_seconds` is cut off.
        """
        if ssl_context is None and not force_plain and not _is_loopback(host):
            raise BadInput(f"{host} is reached from other machines: give an ssl_context, or force_plain=True")
        self.coordinator = coordinator
        self._ssl = ssl_context
        self._force_plain = force_plain
        self.certificate = ""
        """The file with the certificate that workers are to trust; empty with an `ssl_context` of one's own."""
        self._host = host
        self._port = port
        self._scaling_seconds = scaling_seconds
        self._send_seconds = send_seconds
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._address: tuple[str, int] | None = None
        self._failures: list[BaseException] = []  # of the last start

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where workers connect to."""
        if self._address is None:
            raise Refused("the coordinator's server was not started")
        host, port = self._address
        return f"{'ws' if self._ssl is None else 'wss'}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> str:
        """Begin to serve; the address. Raises where that cannot be had."""
        if self._thread is None:
            self._failures.clear()
            ready = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(ready,), name="coordinator", daemon=True)
            self._thread.start()
            if not ready.wait(START_SECONDS):
                raise TimedOut(f"the coordinator's server did not start within {START_SECONDS:g} s")
            if self._failures:
                self.stop()
                raise Refused(f"the coordinator cannot serve at {self._host}:{self._port}: {self._failures[0]}")
        return self.url

    def stop(self) -> None:
        """End all connections, and the server; workers connect again, and nothing that was acknowledged is lost."""
        thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None:
            return
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
        thread.join()
        self._thread = self._loop = self._stopping = self._address = None

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except Exception as failure:  # `start` raises it
            self._failures.append(failure)
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        client = self.coordinator.session.async_client()
        await client.start()
        if self._ssl is None and not self._force_plain:
            self._ssl, self.certificate = await asyncio.to_thread(_own_context, self.coordinator.state_dir)
        sessions = WorkerSessions(client, self._send_seconds)
        async with serve(
            sessions.serve,
            self._host,
            self._port,
            process_request=sessions.authenticate,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=4,
            compression=None,
            ssl=self._ssl,
            logger=log.getChild("websocket"),
        ) as server:
            host, port, *_ = next(iter(server.sockets)).getsockname()
            self._address = str(host), int(port)
            ready.set()
            scales = self.cloud_provider_manager is not None
            scaling = [asyncio.create_task(self._scaling_evaluation_loop())] if scales else []
            await self._stopping.wait()
            for task in scaling:
                task.cancel()
            await asyncio.gather(*scaling, return_exceptions=True)

    @property
    def dynamic_resource_manager(self) -> DynamicResourceManager:
        return self.coordinator.dynamic_resource_manager

    @property
    def cloud_provider_manager(self) -> Any:
        return self.coordinator.cloud_provider_manager

    async def _scaling_evaluation_loop(self) -> None:
        """Evaluate scaling, and act on it, every so many seconds until cancelled."""
        while True:
            await asyncio.sleep(self._scaling_seconds)
            try:
                await asyncio.to_thread(self.evaluate_and_scale)
            except GridError as failure:  # the next round may well succeed
                log.warning("scaling: %s", failure)

    def evaluate_and_scale(self) -> ScalingDecision:
        """Evaluate once: create the workers that are missing, terminate those that are too many; the decision."""
        scaling_decision = self.dynamic_resource_manager.evaluate_scaling()
        provider_name = scaling_decision.provider
        if scaling_decision.action == "scale_up":
            for _ in range(scaling_decision.count):
                self.cloud_provider_manager.create_worker(
                    provider=provider_name,
                    resources=scaling_decision.resource_requirements,
                    worker_type=scaling_decision.worker_type,
                )
        elif scaling_decision.action == "scale_down":
            for worker_id in scaling_decision.worker_ids:
                self.cloud_provider_manager.terminate_worker(provider=provider_name, worker_id=worker_id)
        return scaling_decision


class WorkerSessions:
    """The connections of workers."""

    def __init__(self, client: AsyncClient, send_seconds: float) -> None:
        self._client = client
        self._send_seconds = send_seconds
        self._open = 0
        self._users: WeakKeyDictionary[ServerConnection, str] = WeakKeyDictionary()

    async def authenticate(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse whoever shows no valid token before anything else is read of it."""
        if request.headers.get("Origin") is not None:
            return connection.respond(http.HTTPStatus.FORBIDDEN, "not for browsers\n")
        if self._open >= MAX_CONNECTIONS:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token_id, _, secret = token.strip().removeprefix(BEARER).partition("_")
        if scheme.lower() != "bearer" or not token.strip().startswith(BEARER) or not secret:
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "a token of the grid is needed\n")
        try:
            hashed = hashlib.sha256(secret.encode()).hexdigest()
            identity = await self._client.identify_token(token_id=token_id, secret_hash=hashed)
        except Unreachable:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "the control plane does not answer\n")
        except GridError:
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the token is not valid\n")
        self._users[connection] = identity.user
        return None

    async def serve(self, connection: ServerConnection) -> None:
        """Answer the messages of one connection, one after the other, until it ends."""
        self._open += 1
        registered: dict[str, str] = {}
        closed = asyncio.ensure_future(connection.wait_closed())
        asked: list[CoordinatorCall] = []  # for a task, and the answer was not sent yet
        try:
            async for body in connection:
                asked.clear()
                answering = asyncio.create_task(self._answer(body, connection, registered, asked))
                await asyncio.wait((answering, closed), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()  # the worker is gone: what it waits for goes to others
                    await asyncio.wait((answering,))
                    break
                if connection.state is not State.OPEN:
                    break
                asked.clear()  # from here on it may have been delivered
                async with asyncio.timeout(self._send_seconds):
                    await connection.send(json.dumps(answering.result()))
        except ConnectionClosed:
            pass
        except TimeoutError:
            log.warning("a worker does not read its answers: it is cut off")
            connection.transport.abort()
        finally:
            self._open -= 1
            closed.cancel()
            for call in asked:
                await self._withdraw(call)

    async def _withdraw(self, call: CoordinatorCall) -> None:
        """A request for a task whose answer was not delivered: another worker gets that task."""
        fields = {name: call.arguments[name] for name in ("worker_id", "incarnation", "ask_id")}
        try:
            await self._client.withdraw_ask(**fields)
        except GridError as error:  # then it is lost when the worker's hold runs out
            log.warning("a task that %s did not get could not be given back: %s", fields["worker_id"], error)

    async def _answer(
        self, body: str | bytes, peer: ServerConnection, registered: dict[str, str], asked: list[CoordinatorCall]
    ) -> Reply:
        """The reply to one message. A worker that this connection has registered is the process that it said it is; a
        request for a task is put into `asked`. Tasks that it adds and reports about are those of its token's user."""
        connection = str(peer.id)
        try:
            message = json.loads(body)
            worker = message.get("worker_id") if isinstance(message, dict) else None
            named = registered.get(worker, connection) if isinstance(worker, str) else connection
            if isinstance(message, dict) and message.get("type") == "register":
                named = connection
            call = parse_message(message, connection=named)
            if call.request is requests.TakeTask:
                call = replace(call, arguments={**call.arguments, "ask_id": uuid.uuid4().hex})
                asked.append(call)
            if call.request in (requests.SubmitTask, requests.ReportTask):
                call = replace(call, arguments={**call.arguments, "user": self._users[peer]})
            reply = call.reply(await self._client.call(call.op, **call.arguments))
        except GridError as error:
            return error_reply(error)
        except (ValueError, RecursionError) as error:
            return {"type": "error", "error": "BadInput", "message": f"a message must be JSON: {error}"}
        if reply["type"] == "registered":
            registered[reply["worker_id"]] = reply["incarnation"]
        if isinstance(message, dict) and isinstance(message.get("request_id"), str | int):
            reply["request_id"] = message["request_id"]
        return reply


def _own_context(state_dir: StateDir) -> tuple[ssl.SSLContext, str]:
    """The context of a server with the certificate of the control plane, and the file with that certificate."""
    certificate, key = (state_dir.host_dir / f"certificate.{suffix}" for suffix in ("pem", "key"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as failure:  # ssl.SSLError is one; the config may name another certificate
        raise Refused(f"cannot use {certificate} ({failure}): give an ssl_context") from failure
    return context, str(certificate)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
