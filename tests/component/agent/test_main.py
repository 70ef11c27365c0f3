"""The agent's process has no join token where others can see it, however the token came to it."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from distributed_grid.agent.join_client import JoinToken
from distributed_grid.server.access.tls import ensure_certificate, server_context
from tests.support.shell import wait_until

GRID = "import sys; from distributed_grid.cli.main import main; main(sys.argv[1:])"


class ControlPlane(http.server.BaseHTTPRequestHandler):
    """Hears who wants to join, and answers when it is told to."""

    heard: ClassVar[list[dict[str, Any]]] = []
    may_answer: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append(asked)
        self.may_answer.wait(20)
        body = json.dumps({"node": "box"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name of the base)
        pass


@pytest.fixture
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    own = ensure_certificate(tmp_path_factory.mktemp("control-plane"), [])
    ControlPlane.heard.clear()
    ControlPlane.may_answer.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ControlPlane) as server:
        server.socket = server_context(own.certificate, own.key).wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield JoinToken((f"127.0.0.1:{server.server_address[1]}",), own.fingerprint, "abc", "hush").text()
        ControlPlane.may_answer.set()
        server.shutdown()
        thread.join()


def seen(pid: int) -> bytes:
    """What every process of this machine's owner sees of another."""
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("command", ["grid agent", "the agent alone"])
@pytest.mark.parametrize("way", ["command line", "environment", "file", "standard input"])
def test_a_join_token_is_used_and_seen_nowhere(token: str, tmp_path: Path, way: str, command: str) -> None:
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    words = {
        "command line": ["--join", token],
        "environment": [],
        "file": ["--join-file", str(file)],
        "standard input": ["--join-file", "-"],
    }[way]
    program = ["-c", GRID, "agent"] if command == "grid agent" else ["-m", "distributed_grid.agent"]
    env = {**os.environ, **({"GRID_JOIN_TOKEN": token} if way == "environment" else {})}
    directory = tmp_path / "agent"
    with open(file) as stdin:
        process = subprocess.Popen([sys.executable, *program, "--dir", str(directory), *words], env=env, stdin=stdin)
    try:
        wait_until(lambda: ControlPlane.heard)
        assert ControlPlane.heard[0]["token"] == token
        assert token.encode() not in seen(process.pid), "while it still joins"
        assert b"distributed_grid" in seen(process.pid) or way in ("file", "standard input")
        ControlPlane.may_answer.set()
        wait_until((directory / "joined.json").exists)
        assert token.encode() not in seen(process.pid)
        left = [path for path in directory.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
        assert left == []
    finally:
        process.terminate()
        process.wait(20)


def test_a_token_in_the_environment_is_for_the_first_time_only(token: str, tmp_path: Path) -> None:
    directory = tmp_path / "agent"
    ControlPlane.may_answer.set()
    env = {**os.environ, "GRID_JOIN_TOKEN": token}
    for _ in range(2):
        words = [sys.executable, "-m", "distributed_grid.agent", "--dir", str(directory)]
        process = subprocess.Popen(words, env=env)
        try:
            wait_until(lambda: (directory / "agent.log").exists() and "serving box" in _log(directory))
            assert token.encode() not in seen(process.pid)
        finally:
            process.terminate()
            process.wait(20)
        (directory / "agent.log").unlink()
    assert len(ControlPlane.heard) == 1


def _log(directory: Path) -> str:
    return (directory / "agent.log").read_text()


@pytest.mark.parametrize("content", ["", "no token"])
def test_what_is_no_token_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    for source in (str(file), str(tmp_path / "missing")):
        words = ["--dir", str(tmp_path / "agent"), "--join-file", source]
        done = subprocess.run(
            [sys.executable, "-m", "distributed_grid.agent", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.startswith("grid agent: ")
        assert done.stderr.count("\n") == 1
