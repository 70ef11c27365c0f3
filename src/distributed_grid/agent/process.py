"""The life of an agent's process: be the only one of its directory, serve, and leave what runs running."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from websockets.asyncio.client import ClientConnection, unix_connect

from distributed_grid.adapters.probes.machine import MachineProbe
from distributed_grid.adapters.probes.nvml import GpuProbe
from distributed_grid.agent import join_client
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files.workdir_fetch import FetchedWorkDirs
from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.agent.lent_memory import LentMemory, address_towards
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.uplink import Dial, NoWayYet, Uplink
from distributed_grid.errors import BadInput, GridError
from distributed_grid.memory.supervisor.supervisor import ServerSupervisor
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.posix.private_files import try_lock, write_private
from distributed_grid.posix.unix_sockets import short_path
from distributed_grid.wire import MAX_MESSAGE_BYTES

END_GRACE_MS = 5_000
END_SECONDS = 30.0
LARGEST_LOG = 5 * 1024 * 1024
LOOK_SECONDS = 5.0
log = logging.getLogger(__name__)


class AgentDir:
    """The directory of an agent."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.jobs = self.path / "jobs"

    def make(self) -> None:
        """Make it, for its owner's eyes only."""
        try:
            for folder in (self.path, self.jobs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.geteuid():
                raise BadInput(f"{self.path} belongs to another user")
            self.path.chmod(0o700)
        except OSError as failure:
            raise GridError(f"cannot use {self.path}: {failure.strerror}") from failure

    def take(self) -> bool:
        """Be the one agent here for the life of this process; False where another one is."""
        lock = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not try_lock(lock):
            os.close(lock)
            return False
        me = process_tree.read_process(os.getpid())
        assert me is not None
        self.write("agent.pid", {"pid": me.pid, "start": me.start, "boot": boot_id()})
        return True

    def read(self, name: str) -> dict[str, object]:
        """What a JSON file says; nothing where it is missing or broken."""
        try:
            found = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, content: dict[str, object]) -> None:
        """Have a JSON file say that, whole or not at all."""
        write_private(self.path / name, json.dumps(content).encode(), durable=False)


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal says stop; what runs goes on."""
    house = AgentDir(options.dir)
    house.make()
    if not house.take():
        print("grid agent: already running", file=sys.stderr)
        return 0
    if options.join:
        asyncio.run(join_client.join(options.address, options.join, options.name, house.path))
    elif join_client.joined(house.path) is None and options.name:
        raise BadInput("--name goes with --join: over SSH the control plane names the node")
    _begin_log(house.path / "agent.log", to_terminal=sys.stderr.isatty())
    _take_what_the_machine_gives()
    asyncio.run(_serve(house, options.declare_gpus))
    return 0


async def _serve(house: AgentDir, declare_gpus: int) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    node = await _name_of(house, ending)
    if node is None:
        return
    probe, gpus = MachineProbe(), GpuProbe()
    detector = HardwareDetector(probe, gpus, declare_gpus)
    uplink = Uplink(node, _dial(house))
    seen = house.read("epoch.json").get("epoch", 0)
    meter = UsageMeter(probe, None if declare_gpus else gpus)
    agent = Agent(
        (node,),
        house.jobs,
        meter,
        uplink,
        capacity=detector.capacity,
        workdirs=lambda send: FetchedWorkDirs(house.path / "content", send),
        memory=lambda host, send: LentMemory(
            house.path / "memory", (node,), meter, host, send, addresses=lambda: _addresses(house)
        ),
        epoch=seen if isinstance(seen, int) else 0,
        on_epoch=lambda epoch: house.write("epoch.json", {"epoch": epoch}),
    )
    await agent.start()
    log.info("serving %s, pid %d", node, os.getpid())
    linked = asyncio.create_task(uplink.run(agent))
    ended = asyncio.create_task(ending.wait())
    forsaken = asyncio.create_task(_until_forsaken(house, uplink, agent.host))
    tasks = {linked, ended, forsaken}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await agent.stop()
    log.info("stopped; what runs goes on")


async def _until_forsaken(house: AgentDir, uplink: Uplink, host: AttemptHost) -> None:
    """Return when nobody has been there for as long as the link's file says, and nothing runs; else never."""
    linger: object = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        linger = house.read("link.json").get("linger", linger)  # the file may be gone with all the others
        if isinstance(linger, int | float) and 0 < linger < uplink.seconds_alone and not host.running():
            log.info("nobody was there for %g s", linger)
            return


def _addresses(house: AgentDir) -> list[str]:
    """The addresses of this machine that the cluster uses: where SSH came in, or from where it reaches its grid."""
    joined = join_client.joined(house.path)
    if joined is not None:
        return [address_towards(joined.address.rpartition(":")[0].strip("[]"))]
    found = house.read("link.json").get("address")
    return [found] if isinstance(found, str) else []


async def _name_of(house: AgentDir, ending: asyncio.Event) -> str | None:
    """The node this agent is; None where it was told to stop before anybody said."""
    while not ending.is_set():
        joined = join_client.joined(house.path)
        name = joined.node if joined is not None else house.read("link.json").get("node")
        if isinstance(name, str) and name:
            return name
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), 0.3)
    return None


def _dial(house: AgentDir) -> Dial:
    """How to reach the control plane: where the files say now, which changes with every SSH connection."""

    async def dial() -> ClientConnection:
        joined = join_client.joined(house.path)
        if joined is not None:
            return await join_client.open_channel(joined)
        path = house.read("link.json").get("socket")
        if not isinstance(path, str) or not os.path.exists(path):
            raise NoWayYet
        with short_path(path) as name:
            return await unix_connect(
                name,
                "ws://control-plane/v1/agent",
                compression=None,
                ping_interval=None,
                max_size=MAX_MESSAGE_BYTES,
                open_timeout=10,
                close_timeout=1,
                user_agent_header=None,
            )

    return dial


def end(directory: str) -> int:
    """Stop every job that is left in an agent's directory; 1 where something would not end."""
    house = AgentDir(directory)
    if not house.jobs.is_dir():
        return 0
    house.make()
    if not house.take():
        raise GridError(f"the agent of {house.path} still runs: end it first")
    return asyncio.run(_end(house))


async def _end(house: AgentDir) -> int:
    host = AttemptHost(house.jobs, report=lambda report: None)
    await host.start()
    try:
        for attempt_id in host.running():
            await host.stop_attempt(attempt_id, kind="cancelled", detail="the node was stopped", grace_ms=END_GRACE_MS)
        async with asyncio.timeout(END_SECONDS):
            while host.running():
                await asyncio.sleep(0.02)
    except TimeoutError:
        print(f"grid agent: still running: {', '.join(host.running())}", file=sys.stderr)
        return 1
    finally:
        await host.stop()
    await _end_memory(house.path / "memory")
    return 0


async def _end_memory(folder: Path) -> None:
    """End the memory server of a directory, if there is one."""
    if folder.is_dir():
        supervisor = ServerSupervisor(folder, report=lambda report: None)
        await supervisor.start()
        await supervisor.terminate()


def _begin_log(path: Path, *, to_terminal: bool) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_size > LARGEST_LOG:
            path.replace(path.with_suffix(".log.old"))
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    path.chmod(0o600)
    if to_terminal:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=handlers)
    logging.getLogger("websockets").setLevel(logging.WARNING)
    log.info("agent on %s", socket.gethostname())


def _take_what_the_machine_gives() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
