"""The Ray child of the control plane (`python -m distributed_grid.adapters.ray.driver`): a driver of one Ray cluster.

A dying Ray takes this process with it, and nothing else; the control plane starts another. Every call has a deadline;
one that is missed is reported as a problem.

It connects natively where a node of the cluster runs on this machine, else as Ray's client. The cluster is probed first
(does it answer, does it want a token, which Ray is it), because Ray itself tries for half a minute before it says
"failed to connect", whatever the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.adapters.child_process import MAX_NAME_CHARS, Report, Say, encode_frame, read_frame, run_child
from distributed_grid.adapters.node import installation
from distributed_grid.adapters.node.node_messages import AgentLinkChanged, DropAgentLink, NodeTarget, RunFinished
from distributed_grid.adapters.node.node_worker import NodeWorker
from distributed_grid.adapters.node.script_session import ScriptSession
from distributed_grid.adapters.probes.procfs import find_raylets
from distributed_grid.adapters.ray import driver_messages as messages
from distributed_grid.adapters.ray import placement_group_actor
from distributed_grid.adapters.ray.node_transport import NodeActorConnection
from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.supervision import start_logged

PROBE_SECONDS = 5.0
RAYLET_SECONDS, POLL_SECONDS = 20.0, 0.1
GCS_PORT, CLIENT_PORT = 6379, 10001
GCS_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CLIENT_METHOD = "/ray.rpc.RayletDriver/ClusterInfo"
Endpoint = tuple[str, int]
"""Host and port of Ray's head, or of its client server."""


class ProbeResult(Struct, frozen=True):
    """Answer of a cluster: a token is wanted (None: unknown), ours is accepted, and the version of Ray."""

    wants_token: bool | None = None
    accepts: bool = True
    ray: str = ""


def own_token() -> str:
    """The token that Ray would use in this process; empty where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return ""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        return Path(path).expanduser().read_text().strip()
    except OSError:
        return ""


def _why_unreachable(host: str, port: int) -> str:
    """Why nothing answers there; empty where something does."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except OSError as failure:
        return f"nothing answers at {host}:{port}: {failure.strerror or failure}"
    return ""


def _probe(host: str, port: int, *, client: bool) -> ProbeResult:
    """Ask without a token, and with ours where one is wanted."""
    if importlib.util.find_spec("grpc") is None or os.environ.get("RAY_USE_TLS") == "1":
        return ProbeResult()
    method = CLIENT_METHOD if client else GCS_METHOD
    code, answer = _probe_request(host, port, method, "")
    if code == "UNAUTHENTICATED":
        code, answer = _probe_request(host, port, method, own_token())
        return ProbeResult(True, code != "UNAUTHENTICATED", _version(answer))
    return ProbeResult(False if code in ("OK", "NOT_FOUND") else None, ray=_version(answer))


def _probe_request(host: str, port: int, method: str, token: str) -> tuple[str, bytes]:
    grpc: Any = importlib.import_module("grpc")
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        call = channel.unary_unary(method)
        try:
            metadata = [("authorization", f"Bearer {token}")] if token else None
            return "OK", bytes(call(b"", timeout=PROBE_SECONDS, metadata=metadata))
        except grpc.RpcError as refusal:
            return str(refusal.code().name), b""


def _version(answer: bytes) -> str:
    match = re.search(rb"(\d+\.\d+\.\d+)", answer)
    return match[1].decode() if match else ""


class RayConnectError(Exception):
    """Why Ray cannot be used; `final`: trying again will not help by itself."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def connect(settings: messages.Connect) -> tuple[messages.Connected, Endpoint]:
    """Connect this process with the cluster; the address where it listens. Blocks. Raises RayConnectError with the
    reason in one line."""
    if importlib.util.find_spec("ray") is None:
        raise RayConnectError(messages.RAY_MISSING, final=True)
    os.environ.update({**settings.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"})
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call on a connection that is gone must not start a Ray of its own
    address, probed = _usable_address(settings.address, await_raylet=settings.await_raylet)
    ray: Any = importlib.import_module("ray")
    if probed.ray and probed.ray != ray.__version__:
        raise RayConnectError(
            f"Ray at {address} is {probed.ray}, here it is {ray.__version__}: they must be the same", final=True
        )
    try:
        ray.init(
            address=address,
            namespace=settings.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except Exception as failure:  # Ray raises many types: each is a reason not to be connected
        words = " ".join(str(failure).split())
        if re.search("authentication|unauthenticated|auth token", words, re.IGNORECASE):
            advice = "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH and try again"
            raise RayConnectError(f"Ray at {address} did not accept the token; {advice}", final=True) from failure
        if re.search("version mismatch|python version", words, re.IGNORECASE):
            problem = f"Ray at {address} has other versions than this machine: {words[:300]}"
            raise RayConnectError(problem, final=True) from failure
        kind = type(failure).__name__
        raise RayConnectError(f"Ray at {address} does not accept the connection: {kind}: {words[:300]}") from failure
    authenticated = bool(own_token()) if probed.wants_token is None else probed.wants_token
    if address.startswith(messages.CLIENT_SCHEME):
        endpoint = _host_and_port(address.removeprefix(messages.CLIENT_SCHEME), CLIENT_PORT)
    else:
        endpoint = _host_and_port(ray.get_runtime_context().gcs_address, GCS_PORT)
    return messages.Connected("", ray.__version__, platform.python_version(), authenticated), endpoint


def is_connected() -> bool:
    """True while this process is connected; Ray's client does not reconnect after a long absence."""
    ray: Any = importlib.import_module("ray")
    return bool(ray.is_initialized())


async def is_refused(endpoint: Endpoint, seconds: float) -> bool:
    """True if the connection is refused; a timeout is not a refusal."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(*endpoint)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def _usable_address(address: str, *, await_raylet: bool) -> tuple[str, ProbeResult]:
    """The address by which this machine can speak to the cluster, and the result of its probe."""
    if address == messages.AUTO:
        if not _runs_ray_node():
            raise RayConnectError(
                "no Ray of this user runs on this machine; give the address of a cluster, for instance ray://HOST:10001"
            )
        return address, ProbeResult()
    if address.startswith(messages.CLIENT_SCHEME):
        return address, _probe_or_raise(
            address, *_host_and_port(address.removeprefix(messages.CLIENT_SCHEME), CLIENT_PORT), client=True
        )
    host, port = _host_and_port(address, GCS_PORT)
    probed = _probe_or_raise(address, host, port, client=False)
    is_node, until = _runs_ray_node(), time.monotonic() + RAYLET_SECONDS
    while await_raylet and not is_node and time.monotonic() < until:  # a head answers before its own node runs
        time.sleep(POLL_SECONDS)
        is_node = _runs_ray_node()
    if is_node:
        return address, probed
    if _why_unreachable(host, CLIENT_PORT):
        raise RayConnectError(
            f"this machine is no node of the Ray cluster at {address}, and that has no client server on port "
            f"{CLIENT_PORT}; join it with `ray start --address={address}`, or give ray://HOST:PORT"
        )
    return f"{messages.CLIENT_SCHEME}{host}:{CLIENT_PORT}", probed


def _probe_or_raise(address: str, host: str, port: int, *, client: bool) -> ProbeResult:
    """Result of a probe; raises RayConnectError if nothing answers, or our token is wrong."""
    silent = _why_unreachable(host, port)
    if silent:
        raise RayConnectError(silent)
    probed = _probe(host, port, client=client)
    if not probed.accepts:
        refusal = "does not accept this token" if own_token() else "asks for a token"
        raise RayConnectError(
            f"Ray at {address} {refusal}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, and try again", final=True
        )
    return probed


def _runs_ray_node() -> bool:
    """True if a Ray node of this user runs on this machine: a program that is no client needs one."""
    return any(True for _ in find_raylets())


def _host_and_port(place: str, port: int) -> Endpoint:
    host, colon, number = place.rpartition(":")
    if not colon:
        return place, port
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise RayConnectError(f"{place!r} is no address; write HOST:PORT, ray://HOST:{CLIENT_PORT} or auto", final=True)
    return host.strip("[]"), int(number)


ACTOR_NAME = "grid-placement-groups"
CALL_SECONDS, CONNECT_SECONDS, CLOSE_SECONDS = 20.0, 60.0, 60.0
FIRST_WAIT_SECONDS, WAIT_SECONDS = 0.2, 2.0
MAX_CALLS, MAX_OPERATIONS = 64, 16
WATCH_SECONDS, RECHECK_SECONDS = 1.0, 0.25
MAX_MISSES, MAX_REFUSALS = 3, 2
BUILD = hashlib.sha256(Path(placement_group_actor.__file__).read_bytes()).hexdigest()[:12]
log = logging.getLogger(__name__)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect with the cluster that the first command names, and carry out the others until the connection closes."""

    def report(message: Report) -> None:
        writer.write(encode_frame(message))

    first = await read_frame(reader, messages.COMMANDS)
    if not isinstance(first, messages.Connect):
        return
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connected, endpoint = await asyncio.to_thread(connect, first)
            driver = RayDriver(first, report, await asyncio.to_thread(_placement_group_actor, first))
            seen = await driver.observe(full=False)
    except TimeoutError:
        report(messages.RayRefused(f"Ray at {first.address} did not answer within {CONNECT_SECONDS:g} s"))
    except RayConnectError as refusal:
        report(messages.RayRefused(str(refusal), refusal.final))
    except Exception as failure:  # Ray raises many types here
        report(messages.RayRefused(f"Ray at {first.address} failed: {_one_line(failure)}"))
    else:
        report(replace(connected, session=seen.session))
        handling = start_logged(_handle_all(reader, driver), "carrying out commands")
        broken = start_logged(driver.until_broken(endpoint), "the watch of the connection with Ray")
        await asyncio.wait((handling, broken), return_when=asyncio.FIRST_COMPLETED)
        if handling.done():
            return
        report(messages.RayRefused(f"Ray at {first.address} broke off"))
    await writer.drain()


async def _handle_all(reader: asyncio.StreamReader, driver: RayDriver) -> None:
    while (command := await read_frame(reader, messages.COMMANDS)) is not None:
        driver.handle(command)


class RayFailed(Exception):
    """A call to Ray without a known result, in one line."""


class RayDriver:
    """Carries out commands; holds nothing that the next control plane does not ask for again."""

    def __init__(self, settings: messages.Connect, report: Callable[[Report], None], actor: Any) -> None:
        self._report = report
        self._actor = actor
        self._sources = installation.InstallSources(Path(settings.wheels))
        self._nodes: NodeWorker[messages.AttachedNode, NodeActorConnection] = NodeWorker(
            NodeActorConnection, report, max_operations=MAX_OPERATIONS, prepare=self._install
        )
        self._misses = 0

    async def until_broken(self, endpoint: Endpoint) -> None:
        """Return when the connection with Ray is gone for good: only another process gets a new one.

        A head that refuses connections has ended. Ray itself polls for it, with all of a core.
        """
        refusals = 0
        while self._misses < MAX_MISSES and refusals < MAX_REFUSALS and is_connected():
            await asyncio.sleep(RECHECK_SECONDS if refusals else WATCH_SECONDS)
            refusals = refusals + 1 if await is_refused(endpoint, WATCH_SECONDS) else 0

    def handle(self, command: messages.RayCommand) -> None:
        """Begin the work of a command."""
        match command:
            case messages.ReserveGroups():
                self._begin(self._reserve(list(command.items), command.seconds))
            case messages.FreeGroups():
                self._begin(self._free(command.names))
            case messages.ObserveGroups():
                self._begin(self._report_view(command))
            case messages.ExtendGroupHold():
                self._begin(self._extend_hold(command))
            case messages.Close():
                self._begin(self._close(command))
            case messages.PackageSettings():
                self._sources.environ, self._sources.cache = command.environ, Path(command.wheels)
            case messages.KeepAttachedNode():
                self._nodes.keep_link(command.target)
            case DropAgentLink():
                self._nodes.drop_link(command.node)
            case messages.RunOnAttachedNode():
                name = f"{command.operation} on {command.target.name}"
                self._nodes.run(command.number, name, lambda say: self._run(command, say))
            case messages.Connect():
                log.error("a second Connect was ignored")

    # ------------------------------------------------------------------ nodes

    async def _install(self, target: NodeTarget, session: ScriptSession) -> None:
        """Have our package there before the agent is started; a node that joins gets it by itself."""

        def say(step: str) -> None:
            self._report(AgentLinkChanged(target.name, "connecting", step))

        async with self._nodes.slots:
            await installation.install(session, self._sources, say)

    async def _run(self, command: messages.RunOnAttachedNode, say: Say) -> RunFinished:
        target = command.target
        self._nodes.drop_link(target.name, target)
        connection = self._nodes.pop_connection(target)
        connection.close()  # a launch that is under way must not come after the end
        facts, summary = None, "forgotten"
        if command.operation != "forget":
            end = installation.purge if command.operation == "purge" else installation.stop
            async with self._nodes.slots, connection.open() as transport, transport.session() as session:
                facts, summary = await end(session, say)
        await connection.remove_actor()
        return RunFinished(command.number, summary=summary, facts=facts)

    # ------------------------------------------------------------------ placement groups

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        start_logged(work, "a call to Ray")

    async def _call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Answer of the placement group actor, within this time; raises RayFailed."""
        if self._actor is None:
            raise RayFailed("everything of the grid in this Ray cluster was removed")
        try:
            reference = getattr(self._actor, method).remote(*arguments)
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(reference.future())
        except Exception as failure:  # Ray raises many types, errors of the actor included
            raise RayFailed(_one_line(failure)) from failure

    async def _reserve(self, items: list[messages.GroupSpec], seconds: float) -> None:
        """Answer each item as soon as it is known; one that takes its time does not hold up the others."""
        wait_seconds = FIRST_WAIT_SECONDS
        try:
            while items:
                asked = [(item.name, item.node, item.resources, item.left_seconds) for item in items]
                answers = await self._call("reserve", asked, seconds, wait_seconds, seconds=seconds + CALL_SECONDS)
                for item, answer in zip(items, answers, strict=True):
                    if answer is not None:
                        self._report(messages.PlacementGroupReserved(item.name, answer))
                items = [item for item, answer in zip(items, answers, strict=True) if answer is None]
                wait_seconds = WAIT_SECONDS
        except RayFailed as failure:
            for item in items:
                self._report(messages.PlacementGroupReserved(item.name, f"{messages.AWAY}{failure}"))

    async def _free(self, names: tuple[str, ...]) -> None:
        problem = ""
        try:
            await self._call("free", list(names), seconds=CALL_SECONDS + len(names) / 20)
        except RayFailed as failure:
            problem = str(failure)
        for name in names:
            self._report(messages.PlacementGroupFreed(name, problem))

    async def observe(self, *, full: bool) -> messages.RayView:
        seen = await self._call("observe", full)
        try:
            return bounded_view(seen)
        except (AttributeError, KeyError, TypeError, ValueError) as failure:
            raise RayFailed(f"its actor reports something else than a view: {_one_line(failure)}") from failure

    async def _report_view(self, command: messages.ObserveGroups) -> None:
        try:
            self._report(messages.GroupsObserved(command.number, await self.observe(full=command.full)))
        except RayFailed as failure:
            self._misses += 1
            self._report(messages.GroupsObserved(command.number, None, str(failure)))
        else:
            self._misses = 0

    async def _extend_hold(self, command: messages.ExtendGroupHold) -> None:
        try:
            missing = await self._call("extend_hold", command.seconds, command.terms)
            self._report(messages.HoldExtended(command.number, tuple(missing)))
        except RayFailed as failure:
            self._misses += 1
            self._report(messages.HoldExtended(command.number, problem=str(failure)))

    async def _close(self, command: messages.Close) -> None:
        problem = ""
        try:
            if self._actor is not None:
                await self._call("close", seconds=CLOSE_SECONDS)
                await asyncio.to_thread(_kill, self._actor)
                self._actor = None
        except RayFailed as failure:
            problem = str(failure)
        self._report(messages.Closed(command.number, problem))


def bounded_view(view: Mapping[str, Any]) -> messages.RayView:
    """The actor's report, within the bounds of a message: Ray's names and amounts are foreign."""
    nodes = tuple(
        messages.RayNode(
            id=node["id"][:MAX_NAME_CHARS],
            name=node["name"][:MAX_NAME_CHARS],
            address=node["address"][:MAX_NAME_CHARS],
            hostname=node["hostname"][:MAX_NAME_CHARS],
            head=node["head"],
            has=_bounded_amounts(node["has"]),
            room=_bounded_amounts(node["room"]),
        )
        for node in view["nodes"][: messages.MAX_NODES]
    )
    groups = view["groups"]
    if groups is not None:  # a longer name is not one of ours
        groups = tuple((name, place) for name, place in groups if max(len(name), len(place)) <= MAX_NAME_CHARS)
    in_use = tuple(name for name in view["in_use"] if len(name) <= MAX_NAME_CHARS)[: messages.MAX_IN_USE]
    return messages.RayView(
        str(view["session"])[:MAX_NAME_CHARS], nodes, groups and groups[: messages.MAX_GROUPS], in_use
    )


def _bounded_amounts(amounts: Sequence[int]) -> tuple[int, int, int]:
    cpu, memory, gpu = (min(max(int(amount), 0), MAX_AMOUNT) for amount in amounts)
    return cpu, memory, gpu


def _one_line(failure: Exception) -> str:
    words = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {words[:300]}" if words else type(failure).__name__


def _placement_group_actor(settings: messages.Connect) -> Any:
    """The actor of this grid, made where there is none, and made anew where it is of another build; blocks."""
    ray: Any = importlib.import_module("ray")
    pinned: Any = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    ray.cloudpickle.register_pickle_by_value(placement_group_actor)
    head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    options: dict[str, Any] = {
        "name": ACTOR_NAME,
        "namespace": settings.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": MAX_CALLS,
    }
    if head:
        options["scheduling_strategy"] = pinned(head[0], soft=True)
    for _ in range(3):
        actor = (
            ray.remote(placement_group_actor.PlacementGroupActor)
            .options(**options)
            .remote(settings.grid, BUILD, settings.hold_seconds)
        )
        grid, build = ray.get(actor.identity.remote(), timeout=CALL_SECONDS)
        if grid != settings.grid:
            raise RayConnectError(
                f"another grid ({grid}) uses the namespace {settings.namespace!r} of that Ray cluster; "
                "detach that one first",
                final=True,
            )
        if build == BUILD:
            return actor
        _kill(actor)
    raise RayConnectError("the placement group actor of an older build does not go")


def _kill(actor: Any) -> None:
    """Let Ray end an actor for good; blocks. Raises RayFailed."""
    ray: Any = importlib.import_module("ray")
    try:
        ray.kill(actor, no_restart=True)
    except Exception as failure:  # Ray raises many types
        raise RayFailed(_one_line(failure)) from failure


if __name__ == "__main__":
    run_child(serve)
