"""The processes under test: a daemon with an honest node and some that lie, an agent with a lying control plane."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.shell import Shell, wait_until

LIARS = 4
CONFIG = """
name: fuzzed
hold_seconds: 60
nodes:
- {name: here, host: local}
"""
FAR = """\
- name: {name}
  host: 127.0.0.1
  cpu_count: 2
  memory_gb: 2
  trust_declared: true
  dedicated: true
"""


class Watched:
    """A process that must stay as it is: alive, of the same size, with the same descriptors, silent in its log."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name = name
        self.pid = pid
        self._log = log
        self._read = 0
        self.rss_before = self.rss_bytes()
        self.fds_before = self.fds()

    def set_baseline(self) -> None:
        """Compare with how it is now: it has warmed up."""
        self.rss_before, self.fds_before = self.rss_bytes(), self.fds()

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"{self.name} (pid {self.pid}) is gone; see {self._log}")

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def new_tracebacks(self) -> str:
        """Tracebacks in the log since the last call."""
        with contextlib.suppress(FileNotFoundError), open(self._log, "rb") as file:
            file.seek(self._read)
            text = file.read()
            self._read += len(text)
            at = text.find(b"Traceback (most recent call last)")
            if at >= 0:
                return text[max(0, at - 500) : at + 5000].decode(errors="replace")
        return ""


class FuzzedGrid(Shell):
    """A grid with this machine, an honest node and liars; beside it an agent whose control plane lies."""

    def __init__(self, folder: Path) -> None:
        (folder / "here").mkdir()
        super().__init__(folder / "state", folder / "here")
        self._folder = folder
        self._agents: list[tuple[Path, subprocess.Popen[bytes]]] = []
        config = folder / "cluster.yaml"
        liars = [f"liar{number}" for number in range(LIARS)]
        config.write_text(CONFIG + "".join(FAR.format(name=name) for name in ("honest", *liars)))
        self.env["GRID_CONFIG"] = str(config)
        self("daemon", "start", check=0)
        self.links = [self.host_dir / "links" / f"{name}.sock" for name in liars]

    def start_honest_agent(self) -> Watched:
        """The agent of the node `honest`, as it is shipped."""
        folder = self._folder / "honest"
        folder.mkdir(mode=0o700)
        socket = self.host_dir / "links" / "honest.sock"
        (folder / "link.json").write_text(json.dumps({"node": "honest", "socket": str(socket)}))
        process = self._start(folder, "distributed_grid.agent", "--dir", str(folder))
        wait_until(lambda: "honest alive" in self._states(), 30)
        return Watched("honest agent", process.pid, folder / "agent.log")

    def start_fuzzed_agent(self, node: str, socket: Path) -> Watched:
        """An agent for which somebody else plays the control plane."""
        folder = self._folder / node
        folder.mkdir(mode=0o700)
        process = self._start(folder, "tests.fuzz.impatient_agent", str(folder), node, str(socket))
        return Watched("fuzzed agent", process.pid, folder / "agent.log")

    def _states(self) -> set[str]:
        return {f"{node['node_id']} {node['state']}" for node in self.json("status")["nodes"]}

    def _start(self, folder: Path, module: str, *words: str) -> subprocess.Popen[bytes]:
        root = Path(__file__).parents[2]
        with open(folder / "agent.log", "ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *words], cwd=root, stdout=log, stderr=log)
        self._agents.append((folder, process))
        return process

    def close(self) -> None:
        super().close()
        for folder, process in self._agents:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
            end = [sys.executable, "-m", "distributed_grid.agent", "--dir", str(folder), "--end"]
            subprocess.run(end, timeout=60, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
