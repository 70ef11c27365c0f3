"""A grid with Ray on the hosts of a lab, and what a user of Ray does on such a host."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

from distributed_grid.adapters.node.node_script_ray import RAY_START
from tests.lab.clusters import Cluster, remains
from tests.lab.lab import Lab
from tests.lab.lab_host import Host

PACKAGES = "/opt/ray-packages"
PYTHON = "rayenv/bin/python"
SHARE = {PACKAGES: Path(sysconfig.get_path("purelib"))}
"""What the hosts of a lab have to see of this machine: the packages of the project's own environment."""
ONE_THREAD = 'import os; os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")'
"""Every process of Ray loads this library, whose idle threads are busy for a while."""


def furnish(host: Host) -> None:
    """Give a host an interpreter that has Ray, as its user would make it."""
    host.run(["python3", "-m", "venv", "--without-pip", "rayenv"])
    site = f"{host.home}/rayenv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    host.run(["tee", f"{site}/ray.pth"], input=f"{PACKAGES}\n{ONE_THREAD}\n")


class RayGrid(Cluster):
    """A control plane outside the lab whose nodes can have Ray; gpu-master is the head."""

    def __init__(self, lab: Lab, folder: Path, *, ray: dict[str, Any] | None = None, **nodes: dict[str, Any]) -> None:
        settings = {"python": f"~/{PYTHON}", "object_store_memory_gb": 0.1, **(ray or {})}
        given = {"gpu_master": {"role": "head", **nodes.pop("gpu_master", {})}, **nodes}
        super().__init__(lab, folder, top={"ray": settings}, **given)

    def start_ray(self) -> None:
        """Start everything; every node has to have it."""
        rows = self.results("start", "--ray")
        assert all(row["ok"] for row in rows.values()), rows

    def lends(self, node: str) -> bool:
        """Whether a core can be had of a node, reserved in Ray: it is asked for, and given back."""
        asked = self("boost", "request", "gpu-master", "cpu", "1", "--source", node, "--only", "--json", timeout=60)
        if asked.returncode != 0:
            return False
        found = json.loads(asked.stdout)
        self("boost", "release", found["boost_id"], check=0)
        return bool(found["enforced_by"] == "ray")

    def leaves_nothing(self) -> bool:
        """Whether none of our processes and files is on any host, besides what the tests themselves put there."""
        return all(found == ([], []) for found in map(remains_of, self.lab))

    def environ(self, host: Host | None = None) -> dict[str, str]:
        """What `grid cluster env` says to export, here or on a host."""
        found = self.json("cluster", "env", *([host.name] if host is not None else []))
        assert isinstance(found, dict)
        return found

    def ray(
        self, host: Host, *words: str, check: bool = True, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Ray's own commands on a host, as its user."""
        given = self.environ(host) if env is None else env
        return host.run([PYTHON, "-c", RAY_START, *words], env=given, check=check, timeout=timeout)

    def program(self, host: Host, text: str, *, timeout: float = 60) -> Any:
        """Run a Ray program on a host, as its user; its last line as JSON."""
        done = host.run([PYTHON, "-"], input=text, env=self.environ(host), timeout=timeout)
        return json.loads(done.stdout.strip().splitlines()[-1])


def boost(grid: RayGrid, *words: str) -> dict[str, Any]:
    """A boost that was granted, by the source that was named where one was."""
    insisting = ("--only",) if "--source" in words else ()
    found = json.loads(grid("boost", "request", *words, *insisting, "--json", check=0, timeout=60).stdout)
    assert isinstance(found, dict)
    return found


def remains_of(host: Host) -> tuple[list[str], list[str]]:
    processes, files = remains(host)
    return processes, [file for file in files if not file.startswith((f"{host.home}/rayenv", f"{host.home}/other-"))]


def ray_processes(host: Host) -> list[str]:
    """The command lines of everything of Ray on a host."""
    return [line for _, line in host.processes() if "ray" in line.replace("/ray-packages", "").replace("rayenv", "")]


CONSOLE = """
import json, os, sys, ray
ray.init(namespace="grid", log_to_driver=False, logging_level="ERROR")
space = {"ray": ray, "os": os}
print("\\x1e" + json.dumps("ready"), flush=True)
for line in sys.stdin:
    code = json.loads(line)
    try:
        exec("def answer():\\n" + code, space)
        said = space["answer"]()
    except Exception as failure:
        said = {"failed": f"{type(failure).__name__}: {failure}"}
    print("\\x1e" + json.dumps(said), flush=True)
"""


class Console:
    """A Ray program on a host that does one thing after the other: starting one for each would cost seconds."""

    def __init__(self, grid: RayGrid, host: Host) -> None:
        self._process = host.popen(
            [PYTHON, "-u", "-c", CONSOLE],
            env=grid.environ(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._hear() == "ready"

    def __call__(self, code: str) -> Any:
        """Result of a function with this body, as JSON; a failure is `{"failed": why}`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(textwrap.indent(textwrap.dedent(code).strip(), "    ")) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def groups(self) -> dict[str, str]:
        """The grid's groups that Ray has, each with the name of the node it is on; empty where it is on none yet."""
        found = self(
            """
            names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
            rows = [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
            return {row["name"]: names.get(next(iter(row["bundles_to_node_id"].values()), ""), "")
                    for row in rows if row["name"].startswith("grid-boost-")}
            """
        )
        assert isinstance(found, dict), found
        return found

    def close(self) -> None:
        """End it. Safe to call twice, and when Ray has ended it already."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.kill()
        self._process.wait(10)

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("\x1e"):
                return json.loads(line[1:])
        raise EOFError("the Ray program has ended")
