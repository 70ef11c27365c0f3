"""A program on a node uses the memory pool with what is installed there; a command and the control plane start with
what they use."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("asyncssh", "cryptography", "numpy", "rich", "starlette", "uvicorn", "yaml")
WITHOUT = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"{name} is not installed here")

HEAVY = sys.argv[2:]
sys.meta_path.insert(0, Missing())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "distributed_grid.orchestration.distributed_memory_pool",
        "distributed_grid.cli.commands.memory",
        "distributed_grid.cli.memory_transfer",
        "distributed_grid.cli.root_command",
    ],
)
def test_it_is_imported_without_anything_heavy(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, module, *HEAVY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_heavy_would_be_found_out() -> None:
    command = [sys.executable, "-c", WITHOUT, "distributed_grid.memory.client.arrays", *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "numpy is not installed here" in done.stderr


def test_the_control_plane_starts_without_what_only_rest_needs() -> None:
    program = "import sys, distributed_grid.server.daemon; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert {"anyio", "starlette", "uvicorn"}.isdisjoint(done.stdout.split())
