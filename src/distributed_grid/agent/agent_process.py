"""Agent process: one per directory; serves its node until a signal, and leaves attempts running.

With $GRID_NOTICE_SECONDS, the life of its machine after SIGTERM, as in a batch system, that signal announces the end of
the machine instead: jobs get a notice and are stopped in time, and the agent ends with them. A second one ends it at
once.
"""

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
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

from websockets.asyncio.client import ClientConnection, unix_connect

from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent import join_client
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.shim import NOTICE_VARIABLE
from distributed_grid.agent.files.attempt_files import FetchedWorkDirs
from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.agent.lent_memory import LentMemory, address_towards
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.machine_end import CONTROL_PLANE, SIGNAL, notice_source
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.uplink import EndpointUnknown, Uplink
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.workers import MAX_NOTICE_MS
from distributed_grid.errors import BadInput, GridError, Unreachable
from distributed_grid.log_rate_limit import configure_logging
from distributed_grid.memory.supervisor.supervisor import SERVER_LOCK, ServerSupervisor
from distributed_grid.posix.boot_clock import boot_id, boot_ms, boot_ns
from distributed_grid.posix.private_files import overwrite_private, try_lock, write_private
from distributed_grid.posix.sockets import short_path
from distributed_grid.supervision import end_process_on_failure, start_essential
from distributed_grid.wire import MAX_MESSAGE_BYTES, AnnouncedEnd, ControlPlaneAddress

STOP_GRACE_MS = 5_000
STOP_SECONDS = 30.0
MAX_LOG_BYTES = 5 * 1024 * 1024
POLL_SECONDS = 5.0
LEAVE_POLL_SECONDS = 0.5
JOIN_PAUSE_SECONDS = 1.0
HEARD_FILE = "heard"
"""Its time changes while there is a control plane; the boot script of a rented machine looks at it."""
RAY_RECORD = "ray/started.json"
CPU_VARIABLE, MEMORY_VARIABLE = "GRID_ALLOCATED_CPU_MILLI", "GRID_ALLOCATED_MEMORY_BYTES"
LAST_GRACE_MS = 500
"""The grace of what still runs when the machine is about to end."""
log = logging.getLogger(__name__)


class AgentDir:
    """The directory of an agent; `__main__` lists its files."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.jobs = self.path / "jobs"
        self.locks = (self.path / "agent.lock", self.path / "memory" / SERVER_LOCK)
        self._lock = -1

    def make(self) -> None:
        """Make it, readable by its owner only."""
        try:
            for folder in (self.path, self.jobs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.geteuid():
                raise BadInput(f"{self.path} belongs to another user")
            self.path.chmod(0o700)
        except OSError as failure:
            raise GridError(f"cannot use {self.path}: {failure.strerror}") from failure

    def lock(self) -> bool:
        """Be the only agent here until this process ends; False where another one runs."""
        fd = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not try_lock(fd):
            os.close(fd)
            return False
        self._lock = fd
        me = process_tree.read_process(os.getpid())
        assert me is not None
        try:
            self.write("agent.pid", {"pid": me.pid, "start": me.start, "boot": boot_id()})
        except OSError as failure:  # a full disk: the lock says that this one runs
            print(f"grid agent: {self.path / 'agent.pid'}: {failure.strerror}", file=sys.stderr)
        return True

    @property
    def is_removed(self) -> bool:
        """True if the locked directory was removed: another agent may have one of that name, this one has none."""
        return self._lock >= 0 and os.fstat(self._lock).st_nlink == 0

    def touch(self, name: str) -> None:
        """Set a file's time to the time since boot: it changes with every call, even if the clock is set back, and
        needs no room on a full disk."""
        path, now = self.path / name, boot_ns()
        try:
            if not os.path.lexists(path):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.utime(path, ns=(now, now), follow_symlinks=False)
        except OSError as failure:
            log.warning("%s: %s", path, failure.strerror)

    def read(self, name: str) -> dict[str, object]:
        """The content of a JSON file; empty where it is missing or broken."""
        try:
            content = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, name: str, content: dict[str, object]) -> None:
        """Replace a JSON file atomically; on a full disk in place."""
        text = json.dumps(content).encode()
        try:
            write_private(self.path / name, text, durable=False)
        except OSError:
            overwrite_private(self.path / name, text)


def serve(options: argparse.Namespace) -> int:
    """Run the agent until a signal stops it; attempts keep running. Returns the exit code."""
    agent_dir = AgentDir(options.dir)
    agent_dir.make()
    if not agent_dir.lock():
        print("grid agent: already running", file=sys.stderr)
        return 0
    exit_seconds = _seconds_of(join_client.EXIT_VARIABLE)
    _seconds_of(NOTICE_VARIABLE)
    notice_source(os.environ)
    if options.join:
        asyncio.run(_join(options, agent_dir, exit_seconds))
    elif join_client.read_joined_key(agent_dir.path) is None and options.name:
        raise BadInput("--name goes with --join or --join-file: over SSH the control plane names the node")
    log_path = agent_dir.path / "agent.log"
    with contextlib.suppress(OSError):
        if log_path.stat().st_size > MAX_LOG_BYTES:
            log_path.replace(log_path.with_suffix(".log.old"))
    handlers: list[logging.Handler] = [logging.FileHandler(log_path)]
    log_path.chmod(0o600)
    if sys.stderr.isatty():
        handlers.append(logging.StreamHandler())
    configure_logging(*handlers)
    logging.getLogger("websockets").setLevel(logging.WARNING)
    log.info("agent on %s", socket.gethostname())
    end_process_on_failure(agent_dir.path / "failure.txt")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    grace_ms = asyncio.run(_serve(agent_dir, options.declare_gpus, exit_seconds))
    return asyncio.run(_stop_jobs(agent_dir, grace_ms)) if grace_ms is not None else 0


def _seconds_of(variable: str) -> float:
    """A time in the environment of a worker's agent; 0 if it is not set, as on a machine of no provider.

    It is either the time without a control plane after which the agent ends with its jobs, or the life of its
    machine after SIGTERM.
    """
    text = os.environ.get(variable) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise BadInput(f"${variable} is {text!r}: expected a number of seconds")
    return seconds


async def _join(options: argparse.Namespace, agent_dir: AgentDir, exit_seconds: float) -> None:
    """Join with the token; a worker tries as long as it may run without a control plane."""
    deadline = time.monotonic() + exit_seconds
    while True:
        try:
            await join_client.join(options.address, options.join, options.name, agent_dir.path)
            return
        except Unreachable:
            if time.monotonic() + JOIN_PAUSE_SECONDS > deadline:
                raise
        await asyncio.sleep(JOIN_PAUSE_SECONDS)


async def _serve(agent_dir: AgentDir, declare_gpus: int, exit_seconds: float) -> int | None:
    """Serve until stopped. None: attempts keep running; else they must end, because the control plane is gone for good
    or this machine ends, and the result is their grace in milliseconds."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    node = await _wait_for_node_name(agent_dir, stopping)
    if node is None:
        return None
    probe, gpus = MachineProbe(), GpuProbe()
    cpus, memory = (os.environ.get(name, "") for name in (CPU_VARIABLE, MEMORY_VARIABLE))
    detector = HardwareDetector(
        probe,
        gpus,
        declare_gpus,
        allocated=Capacity(int(cpus) if cpus.isdecimal() else 0, int(memory) if memory.isdecimal() else 0),
    )
    uplink = Uplink(node, partial(_dial, agent_dir))
    epoch = agent_dir.read("epoch.json").get("epoch", 0)
    meter = UsageMeter(probe, None if declare_gpus else gpus, agent_dir.path / RAY_RECORD)
    agent = Agent(
        (node,),
        agent_dir.jobs,
        meter,
        uplink,
        capacity=detector.capacity,
        workdirs=lambda send: FetchedWorkDirs(agent_dir.path / "content", send),
        memory=lambda host, send: LentMemory(
            agent_dir.path / "memory", node, meter, host, send, addresses=lambda: _addresses(agent_dir)
        ),
        grid_locks=agent_dir.locks,
        epoch=epoch if isinstance(epoch, int) else 0,
        on_epoch=partial(_save_epoch, agent_dir),
        on_address=partial(_save_address, agent_dir),
        notices=notice_source(os.environ),
    )
    await agent.start()
    log.info("serving %s, pid %d", node, os.getpid())
    notice_seconds = _seconds_of(NOTICE_VARIABLE)
    leaving = asyncio.Event()
    if notice_seconds:
        announce = partial(_announce_end, agent, notice_seconds, leaving, stopping)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, announce)
    endings = (uplink.run(agent), stopping.wait(), _wait_until_abandoned(agent_dir, uplink, agent.host))
    tasks = {start_essential(_until(work), "the agent") for work in endings}
    dead_man = start_essential(_wait_for_silence(agent_dir, uplink, exit_seconds), "the dead-man switch")
    end = start_essential(_wait_for_end(agent, leaving), "the end of this machine")
    await asyncio.wait({*tasks, dead_man, end}, return_when=asyncio.FIRST_COMPLETED)
    grace_ms = STOP_GRACE_MS if dead_man.done() else LAST_GRACE_MS if leaving.is_set() else None
    for task in (*tasks, dead_man, end):
        task.cancel()
    await asyncio.gather(*tasks, dead_man, end, return_exceptions=True)
    await agent.stop()
    log.info("stopped; attempts keep running" if grace_ms is None else "stopped, with all attempts")
    return grace_ms


def _announce_end(agent: Agent, seconds: float, leaving: asyncio.Event, stopping: asyncio.Event) -> None:
    """The first SIGTERM announces the end of this machine after these seconds, the second one its end now."""
    if leaving.is_set():
        stopping.set()
        return
    leaving.set()
    ends_in_ms = min(round(1000 * seconds), MAX_NOTICE_MS)
    agent.machine_end.announce(SIGNAL, AnnouncedEnd("SIGTERM: the time of this machine is over", ends_in_ms))


async def _wait_for_end(agent: Agent, leaving: asyncio.Event) -> None:
    """Return when a signal has announced the end of this machine, and everything here is done and known to the control
    plane, or the time is up; else never."""
    await leaving.wait()
    while (end := agent.machine_end.end) is None or boot_ms() < end.exit_at_ms:
        if agent.is_done and agent.machine_end.is_known_to(CONTROL_PLANE):
            log.info("nothing is left to do here")
            return
        await asyncio.sleep(LEAVE_POLL_SECONDS)
    log.warning("the time of this machine has passed")


async def _wait_for_silence(agent_dir: AgentDir, uplink: Uplink, seconds: float) -> None:
    """Return after this time without a control plane; never if it is 0. While there is one, a file shows it to the
    watchdog of this process (the boot script of a rented machine)."""
    if not seconds:
        await asyncio.Event().wait()
    while (silent_seconds := uplink.seconds_disconnected) < seconds:
        if not silent_seconds:
            agent_dir.touch(HEARD_FILE)
        await asyncio.sleep(min(POLL_SECONDS, seconds / 4))
    log.warning("no control plane for %g s: this worker ends", seconds)


async def _wait_until_abandoned(agent_dir: AgentDir, uplink: Uplink, host: AttemptHost) -> None:
    """Return when there was no link for the time in link.json (`linger`) and nothing runs, or when the directory was
    removed; else never."""
    linger: object = 0
    ray = agent_dir.read(RAY_RECORD)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if agent_dir.is_removed:
            log.warning("stopping: %s was removed", agent_dir.path)
            await asyncio.to_thread(_stop_ray, ray)
            return
        ray = agent_dir.read(RAY_RECORD) or ray
        linger = agent_dir.read("link.json").get("linger", linger)  # the file may be gone with all the others
        if isinstance(linger, int | float) and 0 < linger < uplink.seconds_disconnected and not host.running():
            log.info("stopping: no control plane for %g s and nothing runs", linger)
            return


async def _until(work: Awaitable[object]) -> None:
    await work


def _save_epoch(agent_dir: AgentDir, epoch: int) -> None:
    """Record the highest epoch seen; on a full disk the next agent knows of an earlier one, which is harmless."""
    try:
        agent_dir.write("epoch.json", {"epoch": epoch})
    except OSError as failure:
        log.warning("the epoch %d could not be recorded: %s", epoch, failure.strerror)


def _save_address(agent_dir: AgentDir, named: ControlPlaneAddress) -> None:
    """Keep the addresses of the control plane; it names them again on each connection."""
    try:
        join_client.store_address(agent_dir.path, named)
    except GridError as failure:
        log.warning("the address of the control plane could not be kept: %s", failure)


def _stop_ray(record: dict[str, object]) -> None:
    """Stop the Ray that the grid has started here: without the directory it could not be found again."""
    from distributed_grid.adapters.node.node_script_ray import stop_processes

    try:
        stop_processes(record)
    except Exception as failure:  # the agent ends all the same
        log.warning("Ray could not be stopped: %s", failure)


def _addresses(agent_dir: AgentDir) -> list[str]:
    """The addresses at which the cluster reaches this machine: where SSH came in, or the route to its control plane."""
    key = join_client.read_joined_key(agent_dir.path)
    if key is not None:
        return [address_towards(key.address.rpartition(":")[0].strip("[]"))]
    address = agent_dir.read("link.json").get("address")
    return [address] if isinstance(address, str) else []


async def _wait_for_node_name(agent_dir: AgentDir, stopping: asyncio.Event) -> str | None:
    """The node this agent serves; None if the agent was stopped, or its directory removed, before that was known."""
    while not stopping.is_set() and not agent_dir.is_removed:
        key = join_client.read_joined_key(agent_dir.path)
        name = key.node if key is not None else agent_dir.read("link.json").get("node")
        if isinstance(name, str) and name:
            return name
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await stopping.wait()
    return None


async def _dial(agent_dir: AgentDir) -> ClientConnection:
    """Connect to the address in the files, which changes with every SSH connection."""
    key = join_client.read_joined_key(agent_dir.path)
    if key is not None:
        return await join_client.open_websocket(key, agent_dir.path)
    path = agent_dir.read("link.json").get("socket")
    if not isinstance(path, str) or not os.path.exists(path):
        raise EndpointUnknown
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


def stop_jobs(directory: str) -> int:
    """Stop every job that is left in an agent's directory; 1 where something did not stop."""
    agent_dir = AgentDir(directory)
    if not agent_dir.jobs.is_dir():
        return 0
    agent_dir.make()
    if not agent_dir.lock():
        raise GridError(f"the agent of {agent_dir.path} still runs: stop it first")
    return asyncio.run(_stop_jobs(agent_dir))


async def _stop_jobs(agent_dir: AgentDir, grace_ms: int = STOP_GRACE_MS) -> int:
    host = AttemptHost(agent_dir.jobs, report=lambda report: None, grid_locks=agent_dir.locks)
    await host.start()
    try:
        for attempt_id in host.running():
            await host.stop_attempt(
                attempt_id, ending=Ending.CANCELLED, detail="the node was stopped", grace_ms=grace_ms
            )
        async with asyncio.timeout(STOP_SECONDS):
            while host.running():
                await asyncio.sleep(0.02)
    except TimeoutError:
        print(f"grid agent: still running: {', '.join(host.running())}", file=sys.stderr)
        return 1
    finally:
        await host.stop()
    memory_folder = agent_dir.path / "memory"
    if memory_folder.is_dir():
        supervisor = ServerSupervisor(memory_folder, report=lambda report: None)
        await supervisor.start()
        await supervisor.terminate()
    return 0
