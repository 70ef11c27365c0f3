"""A node that is nothing but a home directory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.node.script_session import MARK, SCRIPT
from distributed_grid.adapters.ssh.ssh_connection import COMMAND, interpreters


class Node:
    """A home directory, and the very command that SSH would run there, run without SSH."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True)
        self.home = home
        self.env = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "SSH_CLIENT": "somebody"}
        self.folder = home / ".distributed_grid"
        self.agent_dir = self.folder / "agents" / "g1" / "n1"

    def ask(self, operation: str, *, blobs: Sequence[bytes] = (), **request: Any) -> dict[str, Any]:
        """Last message of the script for one request."""
        return self.talk([(operation, request, blobs)])[-1]

    def talk(
        self,
        asked: Sequence[tuple[str, dict[str, Any], Sequence[bytes]]],
        *,
        python: str = "",
        script: bytes | None = None,
    ) -> list[dict[str, Any]]:
        """Every message of a conversation."""
        done = self.run(asked, python=python, script=script)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        assert lines, done
        return [json.loads(line[len(MARK) :]) for line in lines]

    def run(
        self,
        asked: Sequence[tuple[str, dict[str, Any], Sequence[bytes]]],
        *,
        python: str = "",
        script: bytes | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        script = script if script is not None else SCRIPT.read_bytes()
        said = f"{python}\n{' '.join(interpreters())}\n{len(script)}\n".encode() + script
        for operation, request, blobs in asked:
            body = json.dumps({"operation": operation, "grid": "g1", "node": "n1", **request}).encode()
            said += b"%d\n" % len(body) + body + b"".join(blobs)
        return subprocess.run(
            ["/bin/sh", "-c", COMMAND],
            input=said,
            capture_output=True,
            env=self.env if env is None else env,
            timeout=90,
            check=False,
        )

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node; whatever agent a test left there is ended."""
    made = Node(tmp_path / "node")
    yield made
    if made.agent_dir.exists():
        made.ask("stop")
