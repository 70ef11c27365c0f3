"""Agents on this machine that joined by token, with and without a way to the Unix socket of their control plane."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.shell import GRID, Shell, wait_until

LENDING = """
owner_policy: {throttle: false, pause: false, evict: false}
resource_sharing: {thresholds: {cpu_percent_max: 100, cpu_min_cores: 0, memory_percent_max: 100, memory_min_gb: 0}}
"""
"""A config under which a busy machine lends, too, and what it lends does not yield to other tests as to an owner."""
NO_CPU = ("-r", "memory", "-a", "0.05")
"""Options of a job that waits for no core: a machine whose cores are all used has none to lend."""
HIDE = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'


def start_lending(grid: Shell, *words: str) -> None:
    """Start a control plane whose nodes lend however busy the machine of the tests is."""
    (grid.cwd / "lending.yaml").write_text(LENDING)
    grid("daemon", "start", "-c", "lending.yaml", *words, check=0)


class JoinedAgent:
    """`grid agent` of one node. `hidden` is mounted over for it: the state directory, for one that is as good as in a
    container and has only the network."""

    def __init__(self, grid: Shell, name: str, directory: Path, hidden: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self._grid = grid
        self._prefix = ["unshare", "--mount", "sh", "-c", HIDE, "sh", str(hidden)] if hidden else []
        self._process: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """Join with a new token, and serve."""
        token = self._grid("daemon", "join-token", "create", "--node", self.name, check=0).stdout.strip()
        self.start("--join", token)

    def start(self, *words: str) -> None:
        command = [*self._prefix, *GRID, "agent", "--dir", str(self.directory), *words]
        env = {**self._grid.env, "HOME": str(self.directory.parent)}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def joined(self) -> dict[str, Any]:
        """The content of joined.json."""
        found: dict[str, Any] = json.loads((self.directory / "joined.json").read_text())
        return found

    @property
    def log(self) -> str:
        return (self.directory / "agent.log").read_text()

    def until_linked(self, times: int = 1) -> None:
        """Wait until it was connected so many times."""
        wait_until(lambda: (self.directory / "agent.log").exists() and self.log.count("linked to a") >= times, 40)

    def stop(self) -> None:
        """End the agent; what runs goes on."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(20)
