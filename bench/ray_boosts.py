"""Boosts that a real Ray cluster reserves: how soon, and how many a second beside plain Ray in the same run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from bench.control_plane import GRID, start_control_plane, temporary_grid
from bench.sizes import Unavailable, sized
from bench.table import Line
from distributed_grid.client.async_client import AsyncClient
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig
from distributed_grid.state_dir import StateDir

ONE_BY_ONE, MANY, AT_ONCE = sized((100, 1_000, 128), smoke=(2, 4, 2))
ASKED = {"target": "head", "source": "donor", "resource_type": "cpu"}
HERE = """
nodes:
- {name: here, host: local}
- {name: head, host: 198.51.100.1, dedicated: true}
- {name: donor, host: 198.51.100.2, dedicated: true}
"""
RUNS = "This command will now block"
PLAIN = """
import json, sys, time, ray
from concurrent.futures import ThreadPoolExecutor
ray.init(sys.argv[1], namespace="plain", log_to_driver=False, logging_level="ERROR")
node = next(node["NodeID"] for node in ray.nodes() if node["NodeName"] == "donor")
def one(number):
    group = ray.util.placement_group([{"CPU": 0.001}], name=f"plain-{number}", lifetime="detached",
                                     bundle_label_selector=[{"ray.io/node-id": node}])
    began = time.perf_counter()
    assert group.wait(30)
    return group
one(-1)
took = []
for number in range(int(sys.argv[3])):
    began = time.perf_counter()
    ray.util.remove_placement_group(one(f"single-{number}"))
    took.append(time.perf_counter() - began)
began = time.perf_counter()
with ThreadPoolExecutor(4) as pool:
    groups = list(pool.map(one, range(int(sys.argv[2]))))
rate = len(groups) / (time.perf_counter() - began)
for group in groups:
    ray.util.remove_placement_group(group)
print(json.dumps([rate, sorted(took)[len(took) // 2]]))
"""


def measure() -> list[Line]:
    """The median wait for one boost, and a thousand at once, each beside what Ray does without the grid."""
    if find_spec("ray") is None:
        raise Unavailable("Ray is not installed: make ray")
    with a_ray() as (address, environ), temporary_grid(HERE) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        plain_rate, plain_one = json.loads(
            _run([sys.executable, "-c", PLAIN, address, str(MANY), str(ONE_BY_ONE)], environ)
        )
        _run([GRID, "--state-dir", str(state_dir.root), "cluster", "attach", address], environ)
        bound = _one_by_one(state_dir, client_config)
        rate, listed, released = asyncio.run(_many(state_dir, client_config))
        _run([GRID, "--state-dir", str(state_dir.root), "cluster", "detach"], environ)
    return [
        Line("a boost asked for and bound in Ray, p50", 1000 * bound, 50, "ms", lower_is_better=True),
        Line("  the same, of a group made and removed by plain Ray", bound / plain_one, 10, "×", lower_is_better=True),
        Line(f"{MANY:,} boosts bound in Ray, {AT_ONCE} at once", rate, 200, "/s"),
        Line("  the same, of the groups that plain Ray makes", rate / plain_rate, 200 / 290, "×"),
        Line(f"{MANY:,} boosts in Ray listed", 1000 * listed, 300, "ms", lower_is_better=True),
        Line(f"{MANY:,} boosts in Ray released", released, 200, "/s"),
    ]


def _one_by_one(state_dir: StateDir, client_config: ClientConfig) -> float:
    took: list[float] = []
    with Client(state_dir, client_config) as client:
        for _ in range(ONE_BY_ONE):
            name = uuid.uuid4().hex
            began = time.perf_counter()
            boost = client.call("request_boost", request_id=name, **ASKED, amount=0.5)["boost"]
            took.append(time.perf_counter() - began)
            assert boost["enforced_by"] == "ray", boost
            client.call("release_boost", boost_id=name)
    return statistics.median(took)


async def _many(state_dir: StateDir, client_config: ClientConfig) -> tuple[float, float, float]:
    client, slots = AsyncClient(state_dir, client_config), asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> None:
        async with slots:
            await client.call("request_boost", request_id=name, **ASKED, amount=0.001)

    async def gone(name: str) -> None:
        async with slots:
            await client.call("release_boost", boost_id=name)

    names = [uuid.uuid4().hex for _ in range(MANY)]
    began = time.perf_counter()
    await asyncio.gather(*map(one, names))
    rate = MANY / (time.perf_counter() - began)
    began = time.perf_counter()
    found = await client.call("list_boosts")
    listed = time.perf_counter() - began
    assert found["active_boosts"] == MANY
    began = time.perf_counter()
    await asyncio.gather(*map(gone, names))
    return rate, listed, MANY / (time.perf_counter() - began)


def _run(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} failed: {done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


@contextlib.contextmanager
def a_ray() -> Iterator[tuple[str, dict[str, str]]]:
    """Two nodes of Ray on this machine, one of them with a hundred cores, and the variables to be let in with."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        address, client = f"127.0.0.1:{probe.getsockname()[1]}", other.getsockname()[1]
        probe.close()
        other.close()
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONUNBUFFERED": "1"}
        head = [
            "--head",
            f"--port={address.rpartition(':')[2]}",
            f"--ray-client-server-port={client}",
            f"--temp-dir={folder}/r",
        ]
        nodes = []
        try:
            for name, words in (
                ("head", [*head, "--num-cpus=4"]),
                ("donor", [f"--address={address}", "--num-cpus=100"]),
            ):
                nodes.append(_a_node(name, words, Path(folder, f"{name}.log"), environ))
            yield address, environ
        finally:
            for node in reversed(nodes):
                _end(node)


def _a_node(name: str, words: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-name={name}", *words]
    ray += ["--include-dashboard=false", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
    ray += ["--memory=1073741824", "--object-store-memory=104857600"]
    with log.open("wb") as words_of_it:
        node = subprocess.Popen(
            [word for word in ray if name == "head" or word != "--include-dashboard=false"],
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=words_of_it,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + 90
    while RUNS not in log.read_text():
        if node.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"Ray did not start: {log.read_text()[-1000:]}")
        time.sleep(0.05)
    return node


def _end(node: subprocess.Popen[bytes]) -> None:
    tree = psutil.Process(node.pid).children(recursive=True)
    node.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(tree, timeout=10)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    node.kill()
    node.wait()
