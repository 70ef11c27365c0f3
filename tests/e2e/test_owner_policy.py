"""An owner policy on a node of this machine: borrowed work gives way to its owner there, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.shell import Shell, wait_until

CONFIG = """
nodes:
- name: desk
  host: local
  owner_policy: pause
resource_sharing:
  thresholds: {cpu_percent_max: 5, memory_percent_max: 99, memory_min_gb: 0.1}
"""


def test_a_job_on_a_local_node_is_paused_while_its_owner_works(grid: Shell, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    owner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        grid("--config", str(config), "run-shared", "--detach", "-j", "work", "-a", "0.1", "sleep", "600", check=0)
        follower = grid.start("jobs", "logs", "-f", "work")
        wait_until(lambda: grid.job("work")["state"] == "paused", 40)
        grid("jobs", "cancel", "work", check=0)
        said = follower.communicate(timeout=30)[1].decode()
    finally:
        owner.kill()
        owner.wait()
    assert said.startswith("grid: work is paused on desk: its owner uses ")
