"""A real control plane in a temporary state directory, for measuring."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig
from distributed_grid.state_dir import StateDir

GRID = str(Path(sys.executable).with_name("grid"))
BIG_NODE = """
nodes:
- name: big
  host: local
  cpu_count: 1000000
  memory_gb: 1000000
  trust_declared: true
"""


@contextlib.contextmanager
def temporary_grid(config: str | None = None, parent: Path | None = None) -> Iterator[tuple[StateDir, ClientConfig]]:
    """A state directory, on a real disk unless told otherwise; the control plane that was started in it is stopped
    afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="grid-bench-", dir=parent))
    client_config = ClientConfig()
    if config is not None:
        (folder / "cluster.yaml").write_text(config)
        client_config = ClientConfig(str(folder / "cluster.yaml"), explicit=True)
    state_dir = StateDir(folder / "state")
    try:
        yield state_dir, client_config
    finally:
        run_grid(state_dir, "daemon", "stop")
        shutil.rmtree(folder)


def run_grid(state_dir: StateDir, *words: str) -> None:
    """Run a command line to its end."""
    env = os.environ | {"GRID_STATE_DIR": str(state_dir.root)}
    subprocess.run([GRID, *words], env=env, cwd="/", check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_control_plane(state_dir: StateDir, client_config: ClientConfig) -> None:
    """Have the control plane running."""
    with Client(state_dir, client_config) as client:
        client.call("get_daemon_info")
