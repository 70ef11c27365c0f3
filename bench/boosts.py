"""Boosts: how soon one is durable, what listing them costs, and a thousand of them at once."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable

from bench.commands import BARE
from bench.control_plane import GRID, start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig
from distributed_grid.state_dir import StateDir

GRANTS, MANY, ROUNDS, LOOKS = sized((300, 1_000, 25, 9), smoke=(3, 5, 1, 1))
PAIR = """
nodes:
- {name: master, host: local, cpu_count: 8, memory_gb: 8, trust_declared: true}
- {name: donor, host: local, cpu_count: 1000, memory_gb: 8, trust_declared: true}
"""


def measure() -> list[Line]:
    """The median grant, the warm command as a multiple of a bare interpreter, and a list of a thousand."""
    with temporary_grid(PAIR) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        grants = _grants(state_dir, client_config)
        bare, status = _commands(state_dir)
        began = time.perf_counter()
        names = _thousand(state_dir, client_config)
        rate = MANY / (time.perf_counter() - began)
        api = _median(lambda: _listed(state_dir, client_config))
        shown = _median(lambda: _status(state_dir))
        _release(state_dir, client_config, names)
    return [
        Line(
            "a boost granted, durable p50 at the API", 1000 * statistics.median(grants), 10, "ms", lower_is_better=True
        ),
        Line("warm grid boost status, bare interpreters", status / bare, 5, "×", lower_is_better=True),
        Line(f"{MANY:,} boosts, one after the other", rate, 200, "/s"),
        Line(f"{MANY:,} boosts listed by grid boost status", 1000 * shown, 300, "ms", lower_is_better=True),
        Line("  the same at the API", 1000 * api, 300, "ms", lower_is_better=True),
    ]


def _grants(state_dir: StateDir, client_config: ClientConfig) -> list[float]:
    times: list[float] = []
    with Client(state_dir, client_config) as client:
        for _ in range(GRANTS):
            name = uuid.uuid4().hex
            began = time.perf_counter()
            client.call("request_boost", request_id=name, target="master", resource_type="cpu", amount=1)
            times.append(time.perf_counter() - began)
            client.call("release_boost", boost_id=name)
    return times


def _commands(state_dir: StateDir) -> tuple[float, float]:
    """Medians of a bare interpreter and of the command, taken in turn so that noise hits both alike."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for times, command in zip(taken, (BARE, [GRID, "boost", "status"]), strict=True):
            times.append(_seconds(state_dir, command))
    return statistics.median(taken[0]), statistics.median(taken[1])


def _seconds(state_dir: StateDir, command: list[str]) -> float:
    began = time.perf_counter()
    _run(state_dir, command)
    return time.perf_counter() - began


def _run(state_dir: StateDir, command: list[str]) -> bytes:
    env = os.environ | {"GRID_STATE_DIR": str(state_dir.root)}
    return subprocess.run(command, env=env, cwd="/", check=True, stdout=subprocess.PIPE).stdout


def _thousand(state_dir: StateDir, client_config: ClientConfig) -> list[str]:
    names = [uuid.uuid4().hex for _ in range(MANY)]
    with Client(state_dir, client_config) as client:
        for name in names:
            client.call("request_boost", request_id=name, target="master", resource_type="cpu", amount=0.001)
    return names


def _listed(state_dir: StateDir, client_config: ClientConfig) -> float:
    with Client(state_dir, client_config) as client:
        client.greet()
        began = time.perf_counter()
        found = client.call("list_boosts")
        took = time.perf_counter() - began
    assert found["active_boosts"] == MANY
    return took


def _status(state_dir: StateDir) -> float:
    began = time.perf_counter()
    shown = _run(state_dir, [GRID, "boost", "status"])
    took = time.perf_counter() - began
    assert shown.startswith(f"{MANY} active boosts: ".encode())
    return took


def _release(state_dir: StateDir, client_config: ClientConfig, names: list[str]) -> None:
    with Client(state_dir, client_config) as client:
        for name in names:
            client.call("release_boost", boost_id=name)
        assert client.call("list_boosts")["boosts"] == []


def _median(measurement: Callable[[], float]) -> float:
    return statistics.median(measurement() for _ in range(LOOKS))
