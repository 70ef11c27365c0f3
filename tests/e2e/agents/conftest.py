"""Far nodes without SSH: real agents in directories of their own, over the real link sockets of a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

CONFIG = """
name: far
hold_seconds: {hold}
start_seconds: {start}
nodes:
- {{name: here, host: local}}
{far}
"""
FAR = """\
- name: {name}
  host: 127.0.0.1
  cpu_count: 2
  memory_gb: 2
  trust_declared: true
  resource_sharing: {{priority: 5}}
  dedicated: true
"""


class FarAgent:
    """The agent of one node, started and killed as a test likes."""

    def __init__(self, name: str, folder: Path, socket: Path) -> None:
        self.name = name
        self.folder = folder
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self._socket = socket
        self.plug_in()

    def plug_in(self) -> None:
        """Let it find its control plane."""
        self._link(str(self._socket))

    def unplug(self) -> None:
        """Let it look where nobody is; a link that is up stays up."""
        self._link(str(self.folder / "nobody.sock"))

    def _link(self, socket: str) -> None:
        fresh = self.folder / "link.new"
        fresh.write_text(json.dumps({"node": self.name, "socket": socket}))
        fresh.replace(self.folder / "link.json")

    def start(self, **env: str) -> FarAgent:
        command = [sys.executable, "-m", "distributed_grid.agent", "--dir", str(self.folder)]
        self.process = subprocess.Popen(command, env=os.environ | env, cwd="/")
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(20)
        self.process = None

    def end(self) -> None:
        """Nothing of it runs any more."""
        if self.process is not None:
            self.kill(signal.SIGTERM)
        command = [sys.executable, "-m", "distributed_grid.agent", "--dir", str(self.folder), "--end"]
        subprocess.run(command, check=True, timeout=60, cwd="/")

    @property
    def log(self) -> str:
        return (self.folder / "agent.log").read_text()


class FarGrid(Shell):
    """A grid of this machine and of nodes that are far away, one process each."""

    agents: dict[str, FarAgent]

    def begin(
        self, *names: str, hold: float = 60, start: float = 60, furnish: Callable[[Path], object] | None = None
    ) -> FarGrid:
        """Start everything; `furnish` is called with the directory of each agent before there is anything in it."""
        config = self.cwd.parent / "far.yaml"
        config.write_text(CONFIG.format(hold=hold, start=start, far="".join(FAR.format(name=name) for name in names)))
        self.env["GRID_CONFIG"] = str(config)
        self("daemon", "start", check=0)
        self.agents = {}
        for name in names:
            folder = self.cwd.parent / name
            folder.mkdir(mode=0o700)
            if furnish is not None:
                furnish(folder)
            self.agents[name] = FarAgent(name, folder, self.host_dir / "links" / f"{name}.sock").start()
        self.until_alive(*names)
        return self

    def until_alive(self, *names: str, seconds: float = 20) -> None:
        wait_until(lambda: all(self.state(name) == "alive" for name in names), seconds)

    def state(self, name: str) -> str:
        return str(self.node(name)["state"])

    def node(self, name: str) -> dict[str, Any]:
        nodes = self.observe("status")["nodes"]
        found: dict[str, Any] = next(node for node in nodes if node["node_id"] == name)
        return found

    def on(self, name: str, *words: str) -> list[str]:
        """Options that insist on a node, and a command."""
        return ["--strategy", "node_specific", "-n", name, *words]

    def pid_of(self, job_id: str) -> int:
        """The pid of the running command."""
        return int(wait_until(lambda: self.job(job_id)["attempts"] and self.job(job_id)["attempts"][-1]["pid"]))

    def close(self) -> None:
        super().close()
        for agent in getattr(self, "agents", {}).values():
            with contextlib.suppress(subprocess.SubprocessError):
                agent.end()


@contextlib.contextmanager
def far_grids(folder: Path) -> Iterator[Callable[..., FarGrid]]:
    """Makes grids in a folder; they end with it."""
    made: list[FarGrid] = []

    def make(*names: str, **options: Any) -> FarGrid:
        cwd = folder / f"here{len(made)}"
        cwd.mkdir()
        made.append(FarGrid(folder / f"state{len(made)}", cwd))
        return made[-1].begin(*names, **options)

    try:
        yield make
    finally:
        for one in made:
            one.close()


@pytest.fixture
def far_grid(tmp_path: Path) -> Iterator[Callable[..., FarGrid]]:
    with far_grids(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def shared_far_grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarGrid]:
    """One grid with the far nodes gpu1 and gpu2 for all the tests of a file that leave it as it was."""
    with far_grids(tmp_path_factory.mktemp("far")) as make:
        yield make("gpu1", "gpu2")


__all__ = ["FarAgent", "FarGrid", "far_grid", "far_grids", "is_running", "wait_until"]
