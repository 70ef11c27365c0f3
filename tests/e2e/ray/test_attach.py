"""A Ray cluster that somebody else started, taken in by the real grid: real `ray start`, real agents, no SSH."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_grid.adapters.node.node_script_ray import RAY_START
from distributed_grid.adapters.ray.driver_messages import Connect
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.client.client import Client
from distributed_grid.errors import Unreachable
from distributed_grid.ports import Engine
from distributed_grid.state_dir import StateDir
from tests.support.engine_contract import EngineContract
from tests.support.ports import free_port
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CONFIG = """
name: attached
hold_seconds: 25
nodes:
- {name: here, host: local}
- {name: w1, host: 198.51.100.1, dedicated: true}
- {name: w2, host: 198.51.100.2, dedicated: true}
"""
LEFT_IN_RAY = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(sys.argv[1], log_to_driver=False, logging_level=50, namespace="grid")
groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps({"actors": ray.util.list_named_actors(all_namespaces=True), "groups": groups}))
"""
PLAIN = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
@ray.remote
def is_in_a_group():
    return ray.util.get_current_placement_group() is not None
print(json.dumps(ray.get(is_in_a_group.remote(), timeout=60)))
"""
USING = """
import asyncio, json, ray
from distributed_grid.orchestration.resource_boost_manager import ResourceBoostManager
async def the_boost():
    async with ResourceBoostManager() as manager:
        return (await manager.get_active_boosts())[0]
boost = asyncio.run(the_boost())
ray.init(log_to_driver=False, logging_level="ERROR")
@ray.remote(num_cpus=0)
def is_in_a_group():
    return ray.util.get_current_placement_group() is not None
@ray.remote
def cores():
    return ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
outside = ray.get(is_in_a_group.remote(), timeout=60)
with boost.use():
    inside, given = ray.get([is_in_a_group.remote(), cores.remote()], timeout=60)
print(json.dumps([outside, inside, ray.get(is_in_a_group.remote(), timeout=60), given]))
"""
HEAD = "h0"
ONLY = ("--strategy", "node_specific", "-n")
STARTED = "This command will now block"


class RayHost:
    """Several Ray nodes on this machine, each with a name of its own; whoever owns them knows nothing of the grid."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.folder = folder
        self.port, self.client_port = free_port(), free_port()
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",  # every process of Ray loads it, and idle threads of it are busy for a while
            "GRID_TEST_RUN": str(run),  # by which it is found and ended if the test run is interrupted
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def home_of(self, name: str) -> Path:
        """The home that a node's owner has there: machines of their own would have one each."""
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        return home

    def start(self, *names: str) -> None:
        """Start nodes, and wait until they say that they run; Ray itself gives up on a slow machine."""
        for name in names:
            self._begin(name)
        for name in names:
            wait_until(lambda name=name: self._runs(name), 100)

    def _runs(self, name: str) -> bool:
        if self.nodes[name].poll() is not None:
            self._begin(name)
        return STARTED in (self.folder / f"{name}.log").read_text()

    def _begin(self, name: str) -> None:
        command = [sys.executable, "-c", RAY_START, "start", "--block"]
        head = ["--head", f"--port={self.port}", f"--ray-client-server-port={self.client_port}"]
        where = [*head, "--include-dashboard=false"] if name == HEAD else [f"--address={self.address}"]
        where += [f"--temp-dir={self.folder}/ray-{name}"]  # of two nodes that start at once one fails in a common one
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        sizes = ["--num-cpus=1", "--memory=1073741824", "--object-store-memory=104857600"]
        spared = ["--disable-usage-stats", "--include-log-monitor=false"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                [*command, f"--node-name={name}", *spared, *where, *ports, *sizes],
                env=self.env | {"HOME": str(self.home_of(name))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        """End a node as its owner would."""
        process = self.nodes.pop(name)
        tree = psutil.Process(process.pid).children(recursive=True)
        raylets = [one for one in tree if one.name() == "raylet"]
        for raylet in raylets:
            raylet.terminate()
        psutil.wait_procs(raylets, timeout=5)
        for left in tree:
            with contextlib.suppress(psutil.Error):
                left.kill()
        process.kill()
        process.wait()

    def node_actor(self, name: str) -> int:
        """The process of the grid's actor on a node; 0 where there is none."""
        for child in psutil.Process(self.nodes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::NodeActor"):
                    return child.pid
        return 0

    def close(self) -> None:
        """End all nodes at once, so that none restarts the work of another."""
        alive = [process for process in self.nodes.values() if process.poll() is None]
        trees = [psutil.Process(process.pid).children(recursive=True) for process in alive]
        for left in [one for tree in trees for one in tree]:
            with contextlib.suppress(psutil.Error):
                left.kill()
        for process in self.nodes.values():
            process.kill()
            process.wait()
        self.nodes.clear()
        for pid in self.agents():  # of a test that failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> dict[str, Any]:
        """Which actors and groups Ray still has."""
        program = [sys.executable, "-c", LEFT_IN_RAY, self.address]
        done = subprocess.run(
            program, env=self.env | {"HOME": str(self.home_of(HEAD))}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def agents(self) -> list[int]:
        """Whatever of the grid runs out of this home."""
        running = psutil.process_iter(["cmdline"])
        return [one.pid for one in running if any(f"{self.folder}/home-" in word for word in one.info["cmdline"] or ())]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHost]:
    folder = Path(tempfile.mkdtemp(prefix="att-", dir="/tmp"))  # Ray's sockets need a short path
    host = RayHost(folder, tmp_path_factory.getbasetemp())
    try:
        host.start(HEAD)
        host.start("w1", "w2")
        yield host
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def grid(ray: RayHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A grid that is attached to the cluster."""
    folder = tmp_path_factory.mktemp("attached")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    (shell.cwd / "cluster.yaml").write_text(CONFIG)
    shell("--config", "cluster.yaml", "daemon", "start", check=0)
    token = {"RAY_AUTH_TOKEN_PATH": str(ray.token)}
    try:
        attached = shell("cluster", "attach", ray.address, env=token, timeout=120)
        assert attached.returncode == 0, attached.stdout + attached.stderr
        yield shell
    finally:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            shell("cluster", "detach", "--force", "--discard-results", timeout=100)
        shell.close()


def states(grid: Shell) -> dict[str, str]:
    return {row["node_id"]: row["state"] for row in grid.observe("cluster", "status")}


def is_linked(grid: Shell, node: str) -> bool:
    row = next(row for row in grid.observe("cluster", "status") if row["node_id"] == node)
    return row["state"] == "alive" and row["link"] == "up" and row["seconds_since_heard"] < 3


@contextlib.contextmanager
def counting(grid: Shell, node: str) -> Iterator[str]:
    """A job on a node that counts until it is told to stop; its id."""
    code = "import itertools, time\nfor i in itertools.count():\n    print(i, flush=True)\n    time.sleep(0.1)"
    job = grid.detach(*ONLY, node, "-a", "0.1", sys.executable, "-c", code)
    wait_until(lambda: grid("jobs", "logs", job).stdout)
    try:
        yield job
    finally:
        grid("jobs", "cancel", job, check=0)
        grid("jobs", "wait", job)


def counted(grid: Shell, job: str) -> list[int]:
    """Number that the job has counted so far; nothing while its node cannot be asked."""
    said = grid("jobs", "logs", job)
    return [int(line) for line in said.stdout.split()] if said.returncode == 0 else []


def goes_on(grid: Shell, job: str) -> None:
    """The same attempt still counts, and not a number is missing."""
    before = len(wait_until(lambda: counted(grid, job), 60))
    numbers = wait_until(lambda: (found := counted(grid, job)) and len(found) > before and found, 60)
    assert numbers == list(range(len(numbers)))
    assert grid.job(job)["state"] == "running"
    assert len(grid.job(job)["attempts"]) == 1


def test_every_node_of_the_cluster_becomes_one_of_the_grid(grid: Shell, ray: RayHost) -> None:
    rows = {row["node_id"]: row for row in grid.json("cluster", "status")}
    assert {name for name, row in rows.items() if row["state"] == "alive"} == {"here", "h0", "w1", "w2"}
    assert {rows[name]["ray"]["state"] for name in ("h0", "w1", "w2")} == {"running"}
    assert all(rows[name]["ray"]["authenticated"] and rows[name]["ray"]["risk"] is None for name in ("h0", "w1"))
    nodes = {row["node_id"]: row for row in grid.json("status")["nodes"]}
    assert nodes["h0"]["role"] == "head"


def test_its_token_is_kept_for_its_owner_only_and_shown_nowhere(grid: Shell, ray: RayHost) -> None:
    secret = ray.token.read_text()
    kept = [path for path in grid.state_dir.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert [path.name for path in kept] == ["ray-attached.token"]
    assert kept[0].stat().st_mode & 0o777 == 0o600
    assert secret not in grid("events").stdout


def test_a_job_runs_on_a_node_and_its_output_streams(grid: Shell, ray: RayHost) -> None:
    with counting(grid, "w1") as job:
        assert grid.job(job)["node_id"] == "w1"
        goes_on(grid, job)
    said = grid("run-shared", *ONLY, "w2", "-a", "0.5", "sh", "-c", "echo $GRID_NODE", check=0)
    assert said.stdout == "w2\n"


def test_a_ray_program_uses_a_boost_inside_use_and_when_it_is_run_in_it(grid: Shell, ray: RayHost) -> None:
    (grid.cwd / "plain.py").write_text(PLAIN)
    found = json.loads(grid("boost", "request", HEAD, "cpu", "0.5", "--source", "w1", "--json", check=0).stdout)
    environ = ray.env | {"RAY_ADDRESS": ray.address, "GRID_STATE_DIR": str(grid.state_dir), "HOME": str(grid.cwd)}
    done = subprocess.run([sys.executable, "-c", USING], env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False, True, False, 0.5]
    token = f"RAY_AUTH_TOKEN_PATH={ray.token}"  # here it is not where Ray looks for it
    run = grid(
        "boost", "run", "-e", token, found["boost_id"][:8], "--", sys.executable, "plain.py", check=0, timeout=90
    )
    assert json.loads(run.stdout.splitlines()[-1]) is True
    grid("boost", "release", found["boost_id"], check=0)


def test_a_boost_that_is_extended_just_before_its_end_keeps_its_group(grid: Shell, ray: RayHost) -> None:
    boost = grid.json("boost", "request", HEAD, "cpu", "0.5", "--source", "w1", "--duration", "8")
    group = boost["placement_group"]
    assert group
    ends = datetime.fromisoformat(boost["expires_at"])
    # Over an open connection: on a busy machine the start of a command can take longer than the boost has left.
    with Client(StateDir(grid.state_dir), may_start=False) as client:
        wait_until(lambda: datetime.now(UTC) > ends - timedelta(seconds=1.5))
        extension = {"request_id": secrets.token_hex(8), "boost_id": boost["boost_id"], "seconds": 120}
        longer = client.call("extend_boost", **extension)["boost"]
    assert datetime.fromisoformat(longer["expires_at"]) == ends + timedelta(seconds=120)
    wait_until(lambda: datetime.now(UTC) > ends + timedelta(seconds=9))  # past the old end, and all patience of Ray's
    assert grid.json("boost", "status")["boosts"][0]["placement_group"] == group, "not even bound again"
    events = [json.loads(line) for line in grid("events", "--subject", boost["boost_id"], "--json").stdout.splitlines()]
    assert [event["type"] for event in events if event["type"] in ("rebinding", "extended", "bound")] == [
        "bound",
        "extended",
    ]
    grid("boost", "release", boost["boost_id"], check=0)


def test_a_node_that_joins_gets_an_agent_and_one_that_leaves_is_let_go(grid: Shell, ray: RayHost) -> None:
    ray.start("w3")
    wait_until(lambda: "w3" in states(grid), 60)
    wait_until(lambda: is_linked(grid, "w3"), 60)
    ray.stop("w3")
    wait_until(lambda: states(grid).get("w3") != "alive", 60)


def test_a_killed_node_actor_is_made_again_while_the_job_runs_on(grid: Shell, ray: RayHost) -> None:
    with counting(grid, "w1") as job:
        actor = ray.node_actor("w1")
        assert actor
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: ray.node_actor("w1") not in (0, actor), 60)
        wait_until(lambda: is_linked(grid, "w1"), 60)
        goes_on(grid, job)


def test_a_killed_ray_process_is_replaced_while_the_job_runs_on(grid: Shell, ray: RayHost) -> None:
    def child() -> int:
        for one in psutil.Process(grid.daemon_pid()).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
                if "distributed_grid.adapters.ray.driver" in one.cmdline():
                    return one.pid
        return 0

    with counting(grid, "w2") as job:
        before = child()
        assert before  # pid 0 would be this very process group
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: child() not in (0, before), 60)
        wait_until(lambda: is_linked(grid, "w2"), 60)
        goes_on(grid, job)


def test_the_next_control_plane_goes_on_with_it_by_itself(grid: Shell, ray: RayHost) -> None:
    with counting(grid, "w1") as job:
        grid.kill_daemon()
        wait_until(lambda: is_linked(grid, "w1"), 60)
        goes_on(grid, job)


def test_what_cannot_be_attached_is_refused_in_one_line_and_changes_nothing(grid: Shell, ray: RayHost) -> None:
    other = grid("cluster", "attach", "127.0.0.1:1", env={"RAY_AUTH_TOKEN": "x"})
    assert other.returncode == 1
    assert "first type: grid cluster detach" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1
    wait_until(lambda: is_linked(grid, "w1"))


def test_a_wrong_address_or_token_is_told_in_one_line_and_changes_nothing(
    tmp_path: Path, ray: RayHost, grid: Shell
) -> None:
    (tmp_path / "here").mkdir()
    another = Shell(tmp_path / "state", tmp_path / "here")
    try:
        for address, token, message in (
            (f"127.0.0.1:{free_port()}", "x", "nothing answers"),
            (ray.address, "wrong", "does not accept this token"),
            ("nowhere", "x", "nothing answers"),
        ):
            refused = another("cluster", "attach", address, env={"RAY_AUTH_TOKEN": token}, timeout=100)
            assert (refused.returncode, message in refused.stderr) == (1, True), refused.stderr
            assert len(refused.stderr.strip().splitlines()) == 1
        assert another("cluster", "detach").stderr.strip().endswith("no Ray cluster is attached")
        assert not list(another.state_dir.rglob("ray-attached.token"))
        assert len(another.json("cluster", "status")) == 1
    finally:
        another.close()


def test_a_node_that_left_is_forgotten_when_its_hold_is_over(grid: Shell, ray: RayHost) -> None:
    wait_until(lambda: "w3" not in states(grid), 90)


def test_detaching_removes_no_result_that_was_never_fetched(grid: Shell, ray: RayHost) -> None:
    grid("run-shared", "-j", "train", *ONLY, "w2", "-a", "0.1", "sh", "-c", "echo 42 > model; echo trained", check=0)
    for options in ((), ("--force",)):
        refused = grid("cluster", "detach", *options, "--json", check=1, timeout=100)
        rows = {row["node_id"]: row for row in json.loads(refused.stdout)}
        assert rows["w2"]["results"] == [{"job_id": "train", "files": 1, "bytes": 3}]
        assert rows["w2"]["detail"].startswith("w2 has results that were never fetched: train (1 file, 3 bytes); ")
        assert rows["w1"]["detail"] == "as it was: the cluster stays attached"
    assert is_linked(grid, "w2"), "not even drained"
    grid("jobs", "fetch", "train", check=0)
    assert (grid.cwd / "model").read_text() == "42\n"


def test_detaching_leaves_nothing_behind(grid: Shell, ray: RayHost) -> None:
    job = grid.detach(*ONLY, "w1", "-a", "0.1", "sleep", "1000")
    wait_until(lambda: grid.job(job)["state"] == "running")
    grid("cluster", "detach", check=0, timeout=100)
    assert grid.job(job)["state"] == "queued"
    assert ray.left() == {"actors": [], "groups": []}
    rows = {row["node_id"]: row["state"] for row in grid.json("cluster", "status")}
    assert rows == {"here": "alive", "w1": "joining", "w2": "joining"}
    assert not list(grid.state_dir.rglob("ray-attached.token"))
    wait_until(lambda: not [pid for pid in ray.agents() if is_running(pid)], 60)
    assert not [path for name in (HEAD, "w1", "w2") for path in ray.home_of(name).iterdir()]
    assert grid("jobs", "logs", "train", check=0).stdout == "trained\n"


class Connection:
    """An engine in a loop of its own, and how it is connected."""

    def __init__(self, settings: Connect) -> None:
        self.settings = settings
        self.engine = RayEngine()
        self.loop = asyncio.new_event_loop()

    async def connect(self) -> None:
        await self.engine.stop()
        self.engine.connect(self.settings)
        async with asyncio.timeout(60):
            while self.engine.connected is None:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def connection(ray: RayHost) -> Iterator[Connection]:
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(ray.token), "HOME": str(ray.home_of(HEAD))}
    made = Connection(Connect(ray.address, "a-grid", "contract", environ=environ, wheels=str(ray.folder)))
    try:
        made.loop.run_until_complete(made.connect())
        yield made
    finally:
        made.loop.run_until_complete(made.engine.stop())
        made.loop.close()


@pytest.fixture
def engine(connection: Connection) -> RayEngine:
    return connection.engine


class TestRayEngine(EngineContract):
    """Ray as an engine keeps the promises of the `Engine` port."""

    @pytest.fixture(autouse=True)
    def _connected(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, deed: Coroutine[Any, Any, Any]) -> Any:
        return self._connection.loop.run_until_complete(deed)

    def meet_again(self, engine: Engine) -> None:
        """Connected anew: whoever has cleared it has no placement group actor any more."""
        self.run(self._connection.connect())

    def test_an_engine_that_goes_away_says_so_and_is_there_again(self, engine: RayEngine) -> None:
        group = self.group(engine, cpu_milli=100)
        self.run(engine.stop())
        with pytest.raises(Unreachable):
            self.run(engine.reserve(group, seconds=1))
        self.meet_again(engine)
        self.run(engine.reserve(group, seconds=10))
        assert group.name in self.names(engine)
        self.run(engine.free(group.name))

    def test_what_nobody_holds_any_more_goes_by_itself(self, engine: RayEngine) -> None:
        kept, short = self.group(engine, cpu_milli=100), self.group(engine, cpu_milli=100)
        for group in (kept, short):
            self.run(engine.reserve(group, seconds=10))
        self.run(engine.extend_hold(60, {short.name: -60}))  # its term was over long ago, and nobody has freed it
        wait_until(lambda: short.name not in self.names(engine))
        assert kept.name in self.names(engine)
        self.run(engine.extend_hold(1, {}))  # and then the grid was never heard again
        wait_until(lambda: self.names(engine) == {})
