"""Another host's memory, across two hosts of a lab: ours beside a bare socket, Redis, Arrow Flight and Ray, in one run.

`$GRID_PEERS_PYTHON` names a Python that has `redis` and `pyarrow`; `redis-server` is looked for on the PATH. What is
missing is left out, and said so. The machine needs root, as the lab does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.control_plane import temporary_grid
from bench.memory_peer import SIZE
from bench.sizes import VARIABLE, Unavailable, is_smoke, sized
from bench.table import Line
from distributed_grid.agent.lent_memory import QUERY_SOCKET
from distributed_grid.client.memory.directory import block_directory
from tests.lab.clusters import Cluster
from tests.lab.lab import Lab, problem
from tests.lab.lab_host import Host
from tests.support.shell import wait_until

LENDER, USER = "lender", "user"
ROUNDS, TIMES = sized((3, 4), smoke=(1, 1))
CLIENTS, SECONDS = sized((16, 4.0), smoke=(2, 0.2))
BLOCKS, AT_ONCE = sized((10_000, 32), smoke=(20, 2))
SOURCE, PACKAGES, PEERS, BENCH = "/opt/grid-source", "/opt/grid-packages", "/opt/grid-peers", "/opt/grid-bench"
SCRIPT = f"{BENCH}/memory_peer.py"
RAY = "import sys; sys.argv[0] = 'ray'; from ray.scripts.scripts import main; main()"
BARS = {"ray": 3.0, "redis": 2.0, "flight": 2.0}
Found = dict[str, list[dict[str, Any]]]


def measure() -> list[Line]:
    """All lines, with the peers that are there."""
    if reason := problem():
        raise Unavailable(reason)
    here = Path(__file__).resolve().parents[1]
    share = {SOURCE: here / "src", PACKAGES: Path(sysconfig.get_path("purelib")), BENCH: here / "bench"}
    peers = _peers_packages()
    if peers is not None:
        share[PEERS] = peers
    with Lab((LENDER, USER), memory_gb=7, share=share) as lab, tempfile.TemporaryDirectory() as folder:
        found: Found = {}
        with a_pool(lab, Path(folder), trusted=True):
            with _servers(lab, with_peers=peers is not None) as clients:
                for _ in range(TIMES):
                    for kind, client in clients.items():
                        measured = client()
                        for one, row in (measured if kind == "beside" else {kind: measured}).items():
                            found.setdefault(one, []).append(row)
            with _ray(lab.host(LENDER), lab.host(USER)) as ray:  # alone: its processes are busy while nobody asks
                if ray:
                    words = ("measure", "ray", str(ROUNDS), ray, LENDER)
                    found["ray"] = [_in_host(lab.host(USER), *words) for _ in range(TIMES)]
            many = _many(lab)
            near = _in_host(lab.host(LENDER), "mapped", LENDER, directory=True)
        with a_pool(lab, Path(folder), trusted=False) as (_, encrypted):
            found["encrypted"] = [encrypted() for _ in range(TIMES)]
    rates = _allocating()
    return [*_lines(found), *_small_lines(found, many), *_near_lines(near), *rates]


def _lines(found: Found) -> list[Line]:
    for verb in ("write", "new", "again", "read", "into"):
        rates = (f"{kind} {_rate(found, kind, verb):.2f} GB/s" for kind, rows in found.items() if rows[0][verb])
        print(f"{verb}: {', '.join(rates)}", file=sys.stderr)
    for kind in BARS.keys() - found.keys():
        print(f"{kind} is not here, so ours was not compared with it", file=sys.stderr)

    def of(mine: str, kind: str, theirs: str) -> float:
        return _rate(found, "ours", mine) / _rate(found, kind, theirs)

    peers = [kind for kind in BARS if kind in found]
    tls = {verb: _rate(found, "encrypted", verb) / _rate(found, "bare", verb) for verb in ("write", "into")}
    return [
        Line("256 MiB written to a new block, of a bare socket's rate", of("write", "bare", "write"), 0.85, "×"),
        *(Line(f"  the same, of {kind}'s", of("write", kind, "write"), BARS[kind], "×") for kind in peers),
        Line("  the same with TLS, of a bare socket's", tls["write"], 0, "×"),
        Line("  the same, of a bare socket's into new memory", of("write", "bare", "new"), 0, "×"),
        Line("  written over what is there", of("again", "bare", "write"), 0.85, "×"),
        Line("256 MiB read into a buffer, of a bare socket's rate", of("into", "bare", "into"), 0.85, "×"),
        *(Line(f"  the same, of {kind}'s", of("into", kind, "read"), BARS[kind], "×") for kind in peers),
        Line("  the same with TLS, of a bare socket's", tls["into"], 0, "×"),
        Line("  read as new bytes, of a bare socket's", of("read", "bare", "read"), 0.85, "×"),
        *(Line(f"  the same, of {kind}'s", of("read", kind, "read"), BARS[kind], "×") for kind in peers),
    ]


def _rate(found: Found, kind: str, verb: str) -> float:
    return statistics.median(SIZE / took for one in found[kind] for took in one[verb]) / 1e9


def _small_lines(found: Found, many: float) -> list[Line]:
    small = {kind: statistics.median(one["small"] for one in rows) for kind, rows in found.items()}
    print("4 KiB: " + ", ".join(f"{kind} {1e6 * took:.0f} µs" for kind, took in small.items()), file=sys.stderr)
    return [
        Line(
            "read of 4 KiB, p50, of a bare socket's time", small["ours"] / small["bare"], 2.5, "×", lower_is_better=True
        ),
        Line(f"reads of 4 KiB, {CLIENTS} programs", many, 15_000, "/s"),
    ]


def _near_lines(near: dict[str, Any]) -> list[Line]:
    return [
        Line("mapping a block of 1 GiB on the same host", 1000 * near["map"], 5, "ms", lower_is_better=True),
        Line("  then the second pass over it, of an own array's", near["ratio"], 0.9, "×"),
        Line("memory server besides 1 GiB that it holds", 100 * near["overhead"], 5, "%", lower_is_better=True),
    ]


# ------------------------------------------------------------------ ours


@contextlib.contextmanager
def a_pool(lab: Lab, folder: Path, *, trusted: bool) -> Iterator[tuple[Cluster, Callable[[], dict[str, Any]]]]:
    """A grid over the lab, and a measurement of it by a program on the host that lends nothing."""
    place = folder / f"grid-{trusted}"
    place.mkdir()
    dedicated = {LENDER: {"dedicated": True}, USER: {"dedicated": True}}
    cluster = Cluster(lab, place, top={"trusted_network": trusted}, **dedicated)
    try:
        cluster("cluster", "start", check=0, timeout=120)
        for name in (LENDER, USER):
            wait_until(lambda name=name: cluster.is_alive(name), 60)
        yield cluster, lambda: _in_host(lab.host(USER), "measure", "ours", str(ROUNDS), LENDER, directory=True)
    finally:
        cluster.close()


def _in_host(host: Host, *words: str, directory: bool = False) -> dict[str, Any]:
    done = host.run(["python3", SCRIPT, *words], env=_environ(host, directory=directory), timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environ(host: Host, *, directory: bool = False) -> dict[str, str]:
    environ = {"PYTHONPATH": f"{SOURCE}:{PACKAGES}:{PEERS}"} | ({VARIABLE: "1"} if is_smoke() else {})
    if directory:
        found = host.run(["sh", "-c", f"ls -d ~/.distributed_grid/agents/*/*/memory/{QUERY_SOCKET}"]).stdout.split()
        environ["GRID_MEMORY_SOCKET"] = found[0]
    return environ


def _many(lab: Lab) -> float:
    """Small reads a second of many programs at once."""
    host = lab.host(USER)
    environ = _environ(host, directory=True)
    made = host.run(["python3", "-c", MAKE, LENDER, str(SIZE)], env=environ, timeout=120).stdout.split()[-1]
    command = ["python3", SCRIPT, "many", LENDER, made, str(SECONDS)]
    programs = [host.popen(command, env=environ, stdin=-1, stdout=-1, text=True) for _ in range(CLIENTS)]
    try:
        for one in programs:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in programs:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        return sum(json.loads(one.communicate(timeout=60)[0].splitlines()[-1])["rate"] for one in programs)
    finally:
        for one in programs:
            one.kill()
        host.run(["python3", "-c", DROP, made], env=environ)


MAKE = f"""
import sys; sys.path.insert(0, {BENCH!r})
from memory_peer import Ours
ours = Ours(sys.argv[1])
ours.write(bytes(range(256)) * (int(sys.argv[2]) // 256))
print(ours.block)
"""
DROP = """
import sys
from distributed_grid.client.memory.directory import block_directory
block_directory().call("free_block", block_id=sys.argv[1])
"""


def _allocating() -> list[Line]:
    """Ten thousand blocks allocated and freed, by one program with several threads, on this machine's own grid."""
    with temporary_grid() as (state_dir, _), contextlib.closing(block_directory(None, state_dir.root)) as directory:
        names = [uuid.uuid4().hex for _ in range(BLOCKS)]
        directory.call("allocate_block", request_id="warm", size=65536)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            began = time.perf_counter()
            list(threads.map(lambda name: directory.call("allocate_block", request_id=name, size=65536), names))
            allocated = time.perf_counter() - began
            began = time.perf_counter()
            list(threads.map(lambda name: directory.call("free_block", block_id=name), names))
            freed = time.perf_counter() - began
        directory.call("free_block", block_id="warm")
    both = BLOCKS / (allocated + freed) * 2
    return [
        Line(f"{BLOCKS:,} blocks allocated, {AT_ONCE} threads", BLOCKS / allocated, 1000, "/s"),
        Line(f"{BLOCKS:,} blocks freed", BLOCKS / freed, 1000, "/s"),
        Line("  both together", both, 1000, "/s"),
    ]


# ------------------------------------------------------------------ peers


def _peers_packages() -> Path | None:
    python = os.environ.get("GRID_PEERS_PYTHON")
    if python is None:
        print("GRID_PEERS_PYTHON is not set: no Redis, no Arrow Flight", file=sys.stderr)
        return None
    ask = "import sysconfig, redis, pyarrow; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())


@contextlib.contextmanager
def _servers(lab: Lab, *, with_peers: bool) -> Iterator[dict[str, Callable[[], dict[str, Any]]]]:
    """Who is compared with, but for Ray: servers on the lender, as clients on the other host."""
    lender, user = lab.host(LENDER), lab.host(USER)
    running = []
    clients: dict[str, Callable[[], dict[str, Any]]] = {}

    def serve(command: list[str], ready: str) -> None:
        process = lender.popen(command, env=_environ(lender), stdout=-1, stderr=subprocess.STDOUT, text=True)
        running.append(process)
        assert process.stdout is not None
        wait_until(lambda: ready in process.stdout.readline(), 30)

    def measured(kind: str, port: int) -> Callable[[], dict[str, Any]]:
        return lambda: _in_host(user, "measure", kind, str(ROUNDS), lender.address, str(port))

    try:
        serve(["python3", SCRIPT, "serve", "bare", lender.address, "7801"], "ready")
        words = ("beside", str(ROUNDS), LENDER, lender.address, "7801")
        clients["beside"] = lambda: _in_host(user, *words, directory=True)
        if with_peers:
            serve(["python3", SCRIPT, "serve", "flight", lender.address, "7802"], "ready")
            clients["flight"] = measured("flight", 7802)
        redis = shutil.which("redis-server")
        if with_peers and redis:
            options = ["--bind", lender.address, "--port", "7803", "--protected-mode", "no", "--save", ""]
            serve([redis, *options], "Ready to accept")
            clients["redis"] = measured("redis", 7803)
        yield clients
    finally:
        for process in running:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def _ray(lender: Host, user: Host) -> Iterator[str]:
    """A Ray of both hosts; no address where there is none, and for a smoke test, which takes a minute less."""
    if is_smoke():
        yield ""
        return
    store = ["--object-store-memory", str(1200 * 1024 * 1024), "--num-cpus", "2", "--disable-usage-stats"]
    head = ["start", "--head", "--port", "6379", "--node-ip-address", lender.address, "--include-dashboard", "false"]
    worker = ["start", "--address", f"{lender.address}:6379", "--node-ip-address", user.address]
    try:
        for host, words in ((lender, head), (user, worker)):
            named = ["--resources", json.dumps({LENDER if host is lender else USER: 1})]
            host.run(["python3", "-c", RAY, *words, *store, *named], env=_environ(host), timeout=120)
    except (AssertionError, subprocess.TimeoutExpired) as problem:
        print(f"Ray could not be started: {str(problem)[-300:]}", file=sys.stderr)
        yield ""
        return
    try:
        yield f"{lender.address}:6379"
    finally:
        for host in (user, lender):
            host.run(["python3", "-c", RAY, "stop", "--force"], env=_environ(host), check=False, timeout=60)
