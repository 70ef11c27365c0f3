"""Ray on a node, as the script starts and stops it: real processes; only Ray itself is a stand-in."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.adapters.node.node_script_ray import MIN_STORE_BYTES, default_store_bytes
from distributed_grid.adapters.node.script_session import BOOT, MARK, SCRIPT, encode_request, ray_script
from tests.component.adapters.node.conftest import Node
from tests.support.processes import is_running
from tests.support.shell import wait_until

TOKEN = "0123456789abcdef"
STAND_IN = """#!/bin/sh
if [ "$3" != start ]; then echo '{"python": "3.11.9", "ray": "2.60.0"}'; exit; fi
temp=$5
mkdir -p "$temp/session_1/sockets"
ln -s "$temp/session_1" "$temp/session_latest"
for name in raylet gcs_server worker; do rm -f "$temp/$name"; cp SLEEP "$temp/$name"; done
case "$*" in *--deaf*) trap '' TERM ;; esac
case "$*" in
*--polite*) rm "$temp/raylet"; cp SHELL "$temp/raylet"
    "$temp/raylet" -c 'trap "touch $HOME/asked; exit" TERM; while :; do sleep 0.05; done' & ;;
*) "$temp/raylet" 1000 & ;;
esac
env -i "$temp/worker" 1000 &
case "$*" in *--head*) "$temp/gcs_server" 1000 & ;; esac
case "$*" in *--slow*) if [ ! -e "$HOME/slow" ]; then
    touch "$HOME/slow"; echo "Exception: The current node timed out during startup."; exit 1; fi ;; esac
case "$*" in *--broken*) echo "ValueError: no such option"; exit 1 ;; esac
"""
HEAD = ["--head", "--num-cpus", "2"]


def _filled(text: str, **programs: str) -> str:
    """A text with the paths of programs in it."""
    for name, program in programs.items():
        text = text.replace(name, str(shutil.which(program)))
    return text


class RayNode(Node):
    """A node with an interpreter that behaves as one with Ray does."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.python = home / "ray-python"
        self.python.write_text(_filled(STAND_IN, SLEEP="sleep", SHELL="bash"))
        self.python.chmod(0o755)
        self.given: dict[str, Any] = {"python": str(self.python), "auth": "token", "token": TOKEN, "role": "head"}
        self.given["options"] = HEAD

    def do(self, step: str, **request: Any) -> dict[str, Any]:
        """Last message of the script for a step of Ray's."""
        messages = self.talk([(step, self.given | request, ())], script=ray_script())
        return messages[-1].get("done") or {"failed": messages[-1]["failed"]}

    def do_all(self, *steps: str) -> list[dict[str, Any]]:
        """Answers of the script to several steps of one conversation."""
        messages = self.talk([(step, self.given, ()) for step in steps], script=ray_script())
        return [message["done"] for message in messages if "done" in message]

    def processes(self) -> list[str]:
        """The programs that run of Ray's, wherever it put itself."""
        return sorted(program for _, program in self._running())

    def pids(self, program: str) -> list[int]:
        """The processes that run one of them."""
        return [pid for pid, name in self._running() if name == program]

    def _running(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_running(int(entry.name)):
                try:
                    program = os.readlink(entry / "exe")
                except OSError:
                    continue
                if program.startswith((str(self.home), self.elsewhere() or "/nowhere")):
                    yield int(entry.name), Path(program).name

    def elsewhere(self) -> str:
        note = self.agent_dir / "ray" / "elsewhere"
        return note.read_text() if note.exists() else ""


@pytest.fixture
def ray_node(tmp_path: Path) -> Iterator[RayNode]:
    made = RayNode(tmp_path / "node")
    yield made
    made.do("ray-stop", purge=True)
    assert made.processes() == []


def test_the_script_is_one_text_that_an_old_python_can_read_and_needs_nothing_of_ours(tmp_path: Path) -> None:
    ast.parse(ray_script().decode(), feature_version=(3, 6))
    for path in (SCRIPT, SCRIPT.with_name("node_script_ray.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 6))
        imports = [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom)]
        names = {name.name for one in imports if isinstance(one, ast.Import) for name in one.names}
        names |= {str(one.module) for one in imports if isinstance(one, ast.ImportFrom)}
        ours = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
        assert ours <= {"distributed_grid.adapters.node.node_script"}, path
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BOOT],  # no site packages: the package itself cannot be found
        input=b"%d\n" % len(ray_script()) + ray_script() + encode_request("ray-stop", "g1", "n1", {}),
        env={"HOME": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert json.loads(done.stdout.removeprefix(MARK)) == {"done": {"stopped": 0}}, done


def test_ray_is_started_once_and_everything_of_it_is_ended(ray_node: RayNode) -> None:
    started, again = ray_node.do_all("ray-start", "ray-start")
    assert (started["started"], started["state"], started["session"]) == (True, "running", "session_1")
    assert (again["started"], again["pid"]) == (False, started["pid"])
    assert ray_node.processes() == ["gcs_server", "raylet", "worker"]
    ended, look, twice = ray_node.do_all("ray-stop", "ray-inspect", "ray-stop")
    assert (ended, look["state"], twice) == ({"stopped": 3}, "stopped", {"stopped": 0})
    assert ray_node.processes() == []


def test_a_raylet_that_ignores_sigterm_is_killed_though_nothing_else_is_left(ray_node: RayNode) -> None:
    started = ray_node.do("ray-start", role="worker", options=["--num-cpus", "2", "--deaf", "1"])
    for pid in ray_node.pids("worker"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ray_node.processes() == ["raylet"])
    assert ray_node.do("ray-stop") == {"stopped": 1}
    assert not is_running(started["pid"])


def test_a_raylet_is_asked_to_leave_its_cluster_only_where_that_has_a_head(ray_node: RayNode) -> None:
    asked = ray_node.home / "asked"
    with socket.create_server(("127.0.0.1", 0)) as head:
        given: dict[str, Any] = {"role": "worker"}
        given["options"] = ["--address", f"127.0.0.1:{head.getsockname()[1]}", "--polite", "1"]
        assert ray_node.do("ray-start", **given)["started"]
        ray_node.do("ray-stop")
        assert asked.exists()
        asked.unlink()
        assert ray_node.do("ray-start", **given)["started"]
        assert ray_node.do("ray-start", **given, session="another", replace=True)["started"]
        assert not asked.exists()
    ray_node.do("ray-stop")
    assert ray_node.processes() == []
    assert not asked.exists()


def test_the_token_is_a_file_for_its_owner_alone(ray_node: RayNode) -> None:
    started = ray_node.do("ray-start")
    path = Path(started["token_path"])
    assert (path.read_text(), path.stat().st_mode & 0o777) == (TOKEN, 0o600)
    environ = Path(f"/proc/{started['pid']}/environ").read_bytes().split(b"\0")
    assert b"RAY_AUTH_MODE=token" in environ
    assert f"RAY_AUTH_TOKEN_PATH={path}".encode() in environ
    assert TOKEN.encode() not in b"".join(environ)


def test_other_settings_than_those_it_runs_with_are_refused_and_named(ray_node: RayNode) -> None:
    ray_node.do("ray-start", role="worker", options=["--num-cpus", "2"])
    refused = ray_node.do("ray-start", role="worker", options=["--num-cpus", "4"])["failed"]
    assert "--num-cpus 2, not 4" in refused
    assert ray_node.processes() == ["raylet", "worker"]


def test_what_is_left_of_a_broken_ray_is_ended_before_it_is_started_anew(ray_node: RayNode) -> None:
    first = ray_node.do("ray-start")
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: not is_running(first["pid"]))
    assert ray_node.do("ray-inspect")["state"] == "broken"
    second = ray_node.do("ray-start")
    assert second["started"]
    assert second["pid"] != first["pid"]
    assert ray_node.processes() == ["gcs_server", "raylet", "worker"]


def test_a_worker_of_another_session_is_replaced_only_where_that_is_asked(ray_node: RayNode) -> None:
    given: dict[str, Any] = {"role": "worker", "options": ["--num-cpus", "2"], "session": "session_2"}
    first = ray_node.do("ray-start", **(given | {"session": ""}))
    assert "another cluster" in ray_node.do("ray-start", **given)["failed"]
    second = ray_node.do("ray-start", **given, replace=True)
    assert second["started"]
    assert not is_running(first["pid"])


def test_a_start_that_fails_says_why_and_leaves_nothing(ray_node: RayNode) -> None:
    failed = ray_node.do("ray-start", options=[*HEAD, "--broken"])
    assert failed == {"failed": "Ray did not start: ValueError: no such option"}
    assert ray_node.processes() == []


def test_a_start_that_ray_itself_found_too_slow_is_tried_once_more(ray_node: RayNode) -> None:
    messages = ray_node.talk(
        [("ray-start", ray_node.given | {"options": [*HEAD, "--slow", "1"]}, ())], script=ray_script()
    )
    assert {"step": "Ray was too slow to start; once more"} in messages
    assert messages[-1]["done"]["state"] == "running"
    assert ray_node.processes() == ["gcs_server", "raylet", "worker"]


def test_a_port_that_somebody_else_has_is_named_and_nothing_is_started(ray_node: RayNode) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for step in ("ray-inspect", "ray-start"):
            problem = ray_node.do(step, ports={"port": port})["failed"]
            assert f"port {port} is taken by pid {os.getpid()} (python" in problem
            assert "set `ray.port`" in problem
    assert ray_node.processes() == []


def test_an_interpreter_that_is_not_there_or_was_never_installed_is_told(ray_node: RayNode) -> None:
    assert "it has no /no/python" in ray_node.do("ray-inspect", python="/no/python")["failed"]
    assert "type: grid cluster install --ray n1" in ray_node.do("ray-inspect", python="")["failed"]


def test_sockets_are_where_their_names_are_short_enough(tmp_path: Path) -> None:
    deep = RayNode(tmp_path / ("d" * 60) / "node")
    try:
        temp = Path(deep.do("ray-start")["temp"])
        assert len(str(temp)) <= 39
        assert str(temp) == deep.elsewhere()
        temp.chmod(0o777)  # as Ray does
        assert temp.parent.stat().st_mode & 0o777 == 0o700
    finally:
        deep.do("ray-stop", purge=True)
    assert not temp.parent.exists()
    assert not (deep.agent_dir / "ray").exists()


def test_the_object_stores_of_simulated_nodes_are_small_and_fit_into_shared_memory_together() -> None:
    shared = shutil.disk_usage("/dev/shm").total
    for nodes in (1, 3, 50):
        store = default_store_bytes(30 * 1024**3, nodes)
        assert store <= 1024**3
        assert nodes * store <= max(shared // 2, nodes * MIN_STORE_BYTES)
