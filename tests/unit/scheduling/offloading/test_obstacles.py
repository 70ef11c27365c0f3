"""Each refusal names its cause."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_grid.scheduling.offloading.obstacles import process_obstacles
from tests.unit.scheduling.offloading.processes import FILES, a_process, a_stream


def test_a_process_with_files_of_its_own_has_no_obstacle() -> None:
    assert process_obstacles(a_process()) == ()


@pytest.mark.parametrize(
    ("facts", "kind", "cause"),
    [
        ({"streams": (a_stream("terminal", "/dev/pts/3"), *FILES[1:])}, "terminal", "stdin is the terminal /dev/pts/3"),
        (
            {"streams": (FILES[0], a_stream("pipe", "pipe:[9]"), FILES[2])},
            "foreign_pipe",
            "stdout is a pipe (pipe:[9])",
        ),
        ({"streams": (*FILES[:2], a_stream("socket", "socket:[9]"))}, "foreign_pipe", "stderr is a socket"),
        ({"streams": (a_stream("other", "/run/fifo"), *FILES[1:])}, "foreign_pipe", "/run/fifo"),
        ({"listening": ("tcp *:80", "tcp *:81", "tcp *:82", "tcp *:83")}, "listens", "tcp *:82 and 1 more"),
        ({"connections": 2}, "connected", "2 connections are open"),
        ({"locks": ("flock write on /data/x.lock",)}, "file_lock", "/data/x.lock"),
        ({"outside_writes": ("/data/log",)}, "outside_file", "outside of /srv/alice/work: /data/log"),
        ({"shared_memory": ("/dev/shm/x",)}, "shared_memory", "/dev/shm/x"),
        ({"traced": True}, "traced", "debugger"),
        ({"setuid": True}, "setuid", "another user"),
        ({"foreign_namespace": "process 7 is in another net namespace"}, "namespace", "net namespace"),
        ({"gpu_memory_bytes": 1}, "gpu_context", "$GRID_CHECKPOINT"),
        ({"other_sessions": 1}, "other_session", "1 of its processes is in another session"),
        ({"parent": "make (pid 12)"}, "parent_waits", "make (pid 12) waits for it"),
        ({"parent": "systemd, as x.service"}, "parent_waits", "grid offload wrap"),
        ({"is_ray": True}, "ray", "Ray's own"),
        ({"is_grid": True}, "grid", "the grid's own"),
        ({"job": "j1.1"}, "grid", "j1.1"),
        ({"has_secret": True}, "masked", "secret"),
        ({"unreadable": "process 7 cannot be looked into"}, "unreadable", "process 7"),
        ({"cwd": "/"}, "working_directory", "is /"),
        (
            {"cwd_problem": "is a home directory"},
            "working_directory",
            "/srv/alice/work is a home directory: start it in",
        ),
        ({"needed_secrets": (".env", "a.key")}, "withheld_file", ".env, a.key; an explicit ! line in .gridignore"),
        ({"cwd": "/tmp/x (deleted)"}, "working_directory", "deleted"),
    ],
)
def test_obstacle(facts: dict[str, Any], kind: str, cause: str) -> None:
    (found,) = process_obstacles(a_process(**facts))
    assert found.kind == kind
    assert cause in found.text
    assert "\n" not in found.text


def test_all_causes_are_named_at_once() -> None:
    kinds = {one.kind for one in process_obstacles(a_process(traced=True, connections=1, parent="make (pid 1)"))}
    assert kinds == {"traced", "connected", "parent_waits"}
