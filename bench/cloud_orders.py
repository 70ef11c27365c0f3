"""From a task that fits nowhere to the call that rents a machine for it: a real daemon, EC2 as its stand-in.

Each time a task is submitted that no node of the grid can run, and the moment at which the stand-in gets RunInstances
is compared with that at which the submission was answered. Then the calls of the provider on EC2, in CPU time with the
stand-in's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.sizes import sized
from bench.table import Line
from distributed_grid.ports import WorkerOrder
from tests.support.clouds.ec2 import Ec2StandIn
from tests.support.shell import Shell, wait_until

TASKS = sized(5, smoke=1)
CALLS = sized(100, smoke=2)


def measure() -> list[Line]:
    """The delays of a few tasks, and the cost of each call."""
    return [*_delays(), *_calls()]


def _delays() -> list[Line]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        cloud = Ec2StandIn()
        shell = Shell(here / "state", here)
        try:
            config = {
                "name": "bench",
                "nodes": [{"name": "home", "host": "local", "cpu_count": 1, "memory_gb": 1, "trust_declared": True}],
                "server": {"host": "0.0.0.0", "port": 0},
                "scaling": {"provider": "aws", "max_workers": 2 * TASKS},
                "providers": {"aws": cloud.config()},
            }
            (here / "cluster.yaml").write_text(json.dumps(config))
            shell("daemon", "start", "--config", "cluster.yaml", check=0)
            shell("scale", "plan", check=0)
            for number in range(TASKS):
                shell.detach("-r", "cpu", "-a", "2", "true")
                submitted = time.time()
                wait_until(lambda number=number: len(cloud.machines()) > number, 60)
                found.append(cloud.machines()[-1].made_at - submitted)
        finally:
            shell.close()
            cloud.close()
    return [
        Line("a task that fits nowhere: until RunInstances, median", statistics.median(found), 1, "s", True),
        Line("the same, the longest", max(found), 0, "s", True),
    ]


def _calls() -> list[Line]:
    cloud = Ec2StandIn()
    try:
        provider = cloud.provider()
        offers = provider.offers()
        orders = [
            WorkerOrder(f"worker-{number}", "grid", offers[number % len(offers)], offers[0].resources)
            for number in range(CALLS)
        ]
        steps: dict[str, Callable[[WorkerOrder], object]] = {
            "create": provider.create,
            "describe": lambda order: provider.describe(order.worker_id, "grid"),
            "terminate": lambda order: provider.terminate(order.worker_id, "grid"),
        }
        lines = []
        for name, step in steps.items():
            began = time.process_time()
            for order in orders:
                step(order)
            lines.append(Line(f"{name}, {CALLS} instances", 1000 * (time.process_time() - began) / CALLS, 0, "ms"))
        return lines
    finally:
        cloud.close()
