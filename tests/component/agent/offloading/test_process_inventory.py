"""The inventory of real processes: each has one thing in its way, and that is what is told of it.

All are started at once, and looked at once.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distributed_grid.agent.offloading.proc_entries import (
    ProcessGone,
    ReaderIdentity,
    read_details,
    read_row,
    read_table,
)
from distributed_grid.agent.offloading.process_inventory import ProcessInventory, Surroundings, pages_of
from distributed_grid.agent.offloading.work_trees import missing_files
from distributed_grid.domain.processes import ProcessInfo, StreamKind
from distributed_grid.posix.boot_clock import boot_id
from distributed_grid.scheduling.offloading.processes import process_obstacles
from distributed_grid.wire import ProcessListing, decode_from_agent, encode
from tests.component.agent.offloading import obstacle_actors

ACTOR = [sys.executable, "-I", "-S", str(Path(obstacle_actors.__file__))]
DEADLINE_SECONDS = 30.0
SECRET = "hunter" + "2222"


class Stage:
    """Starts actors, each in a folder of its own, and ends them and all below them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[str] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._open: list[Any] = []

    def command(self, name: str, actor: str, *arguments: str) -> list[str]:
        (self.folder / name).mkdir()
        self.started.append(name)
        return [*ACTOR, actor, str(self._ready(name)), *arguments]

    def start(self, name: str, actor: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        """Start an actor whose parent ends at once, with files as its standard streams."""
        script = '"$@" </dev/null >out.log 2>>err.log & '
        command = ["sh", "-c", script, "sh", *self.command(name, actor, *arguments)]
        self._run(command, self.folder / name, start_new_session=True, env=env)

    def start_below(self, name: str, actor: str, *before: str) -> None:
        """Start an actor as the child of a command that stays."""
        command = self.command(name, actor)
        self._run([*before, *command], self.folder / name, stdin=subprocess.DEVNULL)

    def start_with(self, name: str, **streams: Any) -> None:
        """Start a plain actor as a child of this test, with these standard streams."""
        self._run(self.command(name, "plain"), self.folder / name, **streams)

    def type_at_shell(self, name: str, actor: str, after: str) -> None:
        """Type a command at an interactive shell in a terminal of its own."""
        command = " ".join(self.command(name, actor))
        controller, terminal = pty.openpty()
        shell = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        self._run(shell, self.folder / name, **streams)
        os.close(terminal)
        os.write(controller, f"{command} </dev/null >out.log 2>&1 {after}\n".encode())
        self._open.append(controller)

    def _run(self, command: list[str], cwd: Path, **how: Any) -> None:
        self._children.append(subprocess.Popen(command, cwd=cwd, **how))

    def _ready(self, name: str) -> Path:
        return self.folder / f"{name}.pid"

    def pid(self, name: str) -> int:
        return int(self._ready(name).read_text())

    def wait(self) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        while missing := [name for name in self.started if not self._ready(name).exists()]:
            assert time.monotonic() < until, f"{missing} did not start"
            time.sleep(0.02)

    def close(self) -> None:
        pids = [self.pid(name) for name in self.started if self._ready(name).exists()]
        table = read_table()
        below = [row.pid for row in table.values() if row.ppid in pids]
        for pid in (*below, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()
        for fd in self._open:
            os.close(fd)


class Seen(NamedTuple):
    stage: Stage
    inventory: ProcessInventory
    listed: dict[int, ProcessInfo]

    def __call__(self, name: str) -> ProcessInfo:
        return self.listed[self.stage.pid(name)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("processes")
    data = folder / "data.bin"
    data.write_bytes(b"x" * 1000)
    shared = Path(f"/dev/shm/{folder.parent.name}-{folder.name}")
    server, unix_server = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix_server.bind(str(folder / "s"))
    unix_server.listen()
    reader, writer = os.pipe()
    stage = Stage(folder)
    try:
        stage.start("plain", "plain", "--epochs", "3", env={**os.environ, "WANTED": "yes", "OTHER": "no"})
        stage.start("busy", "busy")
        stage.start("listens", "listens")
        stage.start("listens_unix", "listens_unix")
        stage.start("connects", "connects", str(server.getsockname()[1]))
        stage.start("connects_unix", "connects_unix", str(folder / "s"))
        stage.start("talks_to_itself", "talks_to_itself")
        stage.start("flocks", "flocks")
        stage.start("locks_range", "locks_range")
        stage.start("writes_outside", "writes_outside", str(folder / "elsewhere.log"))
        stage.start("shares_memory", "shares_memory", str(shared))
        stage.start("maps_outside", "shares_memory", str(folder / "mapped.bin"))
        stage.start("shares_system_v", "shares_system_v")
        stage.start("traced", "traced")
        stage.start("leaves_session", "leaves_session")
        stage.start("other_namespace", "other_namespace")
        stage.start("other_group", "other_group" if os.getuid() == 0 else "plain")
        stage.start("reads_outside", "reads_outside", str(data), "--data=../data.bin", str(folder))
        stage.start("reads_secret", "reads_secret")
        stage.start("names_secret", "plain", "--env-file=.env")
        (folder / "names_secret" / ".env").touch()
        stage.start("secret", "plain", "--password", SECRET)
        stage.start("long", "plain", "x" * 9000)
        stage.start("long_secret", "plain", "x" * 9000, "y" * 55 + "=ghp_" + SECRET * 4, f"PGPASSWORD={SECRET}")
        stage.start("grid", "plain", "-m", "distributed_grid.agent")
        stage.start("ray", "poses_as", "ray::IDLE")
        stage.start_with("pipe", stdin=subprocess.DEVNULL, stdout=writer)
        controller, terminal = pty.openpty()
        stage.start_with("terminal", stdin=terminal)
        script = folder / "run.sh"
        script.write_text('"$@"\ntrue\n')
        stage.start_below("script", "plain", "sh", str(script))
        (folder / "Makefile").write_text("all:\n\t@$(COMMAND)\n\t@true\n")
        command = stage.command("make", "plain")
        stage._run(["make", "-f", str(folder / "Makefile"), f"COMMAND={' '.join(command)}"], folder / "make")
        stage.type_at_shell("background", "plain", "&")
        stage.type_at_shell("foreground", "plain", "")
        stage.wait()
        inventory = ProcessInventory()
        listed = {one.pid: one for one in inventory.scan()}
        yield Seen(stage, inventory, listed)
    finally:
        stage.close()
        shared.unlink(missing_ok=True)
        server.close()
        unix_server.close()
        for fd in (reader, writer, controller, terminal):
            os.close(fd)


def kinds(process: ProcessInfo) -> set[str]:
    return {str(one.kind) for one in process_obstacles(process)}


def test_a_process_of_its_own_is_told_whole(seen: Seen) -> None:
    found, folder = seen("plain"), seen.stage.folder
    row = read_row(found.pid)
    assert row is not None
    assert (found.pid_start, found.boot, found.uid) == (row.start, boot_id(), os.getuid())
    assert found.argv[-3:] == (str(folder / "plain.pid"), "--epochs", "3")
    assert found.cwd == str(folder / "plain")
    assert found.exe == os.path.realpath(sys.executable)
    assert [one.kind for one in found.streams] == [StreamKind.NULL, StreamKind.FILE, StreamKind.FILE]
    assert [one.path for one in found.streams[1:]] == [str(folder / "plain/out.log"), str(folder / "plain/err.log")]
    assert [one.appends for one in found.streams] == [False, False, True]
    assert (found.processes, found.threads, found.parent, found.environment) == (1, 1, "", ())
    assert found.pss_bytes > 1_000_000
    assert found.needs[0] == (found.exe, os.path.getsize(found.exe))
    assert process_obstacles(found) == ()


@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [
        ("listens", "listens", "tcp 127.0.0.1:"),
        ("listens_unix", "listens", "server.sock"),
        ("connects", "connected", "1 connection"),
        ("connects_unix", "connected", "1 connection"),
        ("flocks", "file_lock", "flock write on "),
        ("locks_range", "file_lock", "posix write on "),
        ("writes_outside", "outside_file", "elsewhere.log"),
        ("shares_memory", "shared_memory", "/dev/shm/"),
        ("maps_outside", "shared_memory", "mapped.bin"),
        ("shares_system_v", "shared_memory", "/SYSV"),
        ("traced", "traced", "debugger"),
        ("leaves_session", "other_session", "1 of its"),
        ("other_namespace", "namespace", "namespace"),
        ("secret", "masked", "secret"),
        ("reads_secret", "withheld_file", "not shipped: .env; an explicit ! line in .gridignore"),
        ("names_secret", "withheld_file", ".env"),
        ("long", "unreadable", "too long"),
        ("grid", "grid", "grid's own"),
        ("ray", "ray", "Ray's own"),
    ],
)
def test_one_obstacle_each(seen: Seen, name: str, kind: str, cause: str) -> None:
    (obstacle,) = process_obstacles(seen(name))
    assert obstacle.kind == kind
    assert cause in obstacle.text


def test_a_secret_that_the_user_allows_is_no_obstacle(seen: Seen) -> None:
    (seen.stage.folder / "reads_secret" / ".gridignore").write_text("!.env\n")
    (found,) = seen.inventory.scan(pid=seen.stage.pid("reads_secret"))
    assert process_obstacles(found) == ()


def test_a_process_in_a_home_directory_stays_there(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(seen.stage.folder / "plain"))
    (found,) = seen.inventory.scan(pid=seen.stage.pid("plain"))
    (obstacle,) = process_obstacles(found)
    assert obstacle.kind == "working_directory"
    assert "is a home directory or above one, which is never shipped" in obstacle.text


def test_what_stays_within_a_tree_is_no_obstacle(seen: Seen) -> None:
    found = seen("talks_to_itself")
    assert process_obstacles(found) == ()
    assert found.processes == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its group")
def test_rights_of_another_group(seen: Seen) -> None:
    assert kinds(seen("other_group")) == {"setuid"}


def test_terminals_and_pipes_are_named(seen: Seen) -> None:
    assert {"terminal", "parent_waits"} <= kinds(seen.inventory.scan(pid=seen.stage.pid("terminal"))[0])
    found = seen.inventory.scan(pid=seen.stage.pid("pipe"))[0]
    assert "foreign_pipe" in kinds(found)
    assert found.streams[1].path.startswith("pipe:[")


@pytest.mark.parametrize("name", ["make", "sh"])
def test_a_parent_that_waits_is_named(seen: Seen, name: str) -> None:
    pid = seen.stage.pid("make" if name == "make" else "script")
    (found,) = seen.inventory.scan(pid=pid)
    assert found.parent == f"{name} (pid {found.ppid})"
    assert pid not in seen.listed  # it is part of what its parent does


def test_work_in_the_background_of_a_shell_is_not_waited_for_and_in_the_foreground_it_is(seen: Seen) -> None:
    assert process_obstacles(seen("background")) == ()
    found = seen("foreground")
    assert found.parent.startswith("bash (pid ")
    assert "foreground" in found.parent
    assert found.ppid not in seen.listed  # somebody types there: that is no work


def test_a_secret_never_leaves_the_machine(seen: Seen) -> None:
    found = seen("secret")
    assert found.has_secret
    assert SECRET not in str(found)


def test_a_command_line_that_is_cut_shows_no_beginning_of_a_secret(seen: Seen) -> None:
    found = seen("long_secret")
    assert found.has_secret
    assert found.unreadable.startswith("its command line is too long")
    assert "ghp_" not in str(found)
    assert SECRET not in str(found)
    assert "PGPASSWORD=***" in found.argv


def test_all_that_is_told_can_be_sent(seen: Seen) -> None:
    for page in pages_of(list(seen.listed.values())):
        message = ProcessListing(1, tuple(page))
        assert decode_from_agent(encode(message)) == message


def test_only_variables_that_are_asked_for_are_told(seen: Seen) -> None:
    (found,) = seen.inventory.scan(pid=seen.stage.pid("plain"), variables=("WANTED", "MISSING"))
    assert found.environment == (("WANTED", "yes"),)


def test_needed_files_are_those_outside_that_are_open_or_named(seen: Seen) -> None:
    found, folder = seen("reads_outside"), seen.stage.folder
    assert (str(folder / "data.bin"), 1000) in found.needs
    assert (f"{folder}/", 0) in found.needs
    assert not any(path.startswith(found.cwd + "/") for path, _ in found.needs)
    assert missing_files(found.needs) == []
    wrong = ((str(folder / "data.bin"), 999), (str(folder / "none"), 0), (f"{folder}/data.bin/", 0), ("data.bin", 0))
    assert missing_files(wrong) == [path for path, _ in wrong]


def test_cpu_use_is_that_between_two_looks(seen: Seen) -> None:
    assert seen("busy").cpu_ms >= 250
    assert seen("busy").cpu_milli > 0
    until = time.monotonic() + DEADLINE_SECONDS
    while {one.pid: one for one in seen.inventory.scan()}[seen.stage.pid("busy")].cpu_milli > 0:
        assert time.monotonic() < until, "it does nothing any more"
        time.sleep(0.1)


def test_jobs_and_the_agent_itself_are_left_out(seen: Seen) -> None:
    plain, flocks = seen.stage.pid("plain"), seen.stage.pid("flocks")
    around = Surroundings((flocks,), {plain: "job.1"}, {seen.stage.pid("busy"): 7})
    listed = {one.pid: one for one in seen.inventory.scan(around)}
    assert plain not in listed
    assert flocks not in listed
    assert listed[seen.stage.pid("busy")].gpu_memory_bytes == 7
    (asked,) = seen.inventory.scan(around, pid=plain)
    assert asked.job == "job.1"


def test_a_pid_that_is_used_by_another_process_is_not_mistaken(seen: Seen) -> None:
    row = read_row(seen.stage.pid("plain"))
    assert row is not None
    with pytest.raises(ProcessGone):
        read_details(row._replace(start=row.start - 1, inode=0), ReaderIdentity.read())
    assert read_details(row._replace(inode=0), ReaderIdentity.read()).argv[-1] == "3"
    assert seen.inventory.scan(pid=2**22) == []


def test_processes_that_come_and_go_while_they_are_read_do_no_harm(seen: Seen) -> None:
    done = threading.Event()

    def fork_and_end() -> None:
        while not done.is_set():
            subprocess.run(["sh", "-c", "true & true & true"], check=True)

    storm = threading.Thread(target=fork_and_end)
    storm.start()
    try:
        for _ in range(5):
            assert seen.stage.pid("plain") in {one.pid for one in seen.inventory.scan()}
    finally:
        done.set()
        storm.join()


def test_children_that_end_while_they_are_read_are_no_obstacle(tmp_path: Path) -> None:
    busy = "while :; do sleep 0.002 & sleep 0.1 & wait; done"
    with subprocess.Popen(["sh", "-c", busy], cwd=tmp_path, stdin=subprocess.DEVNULL, start_new_session=True) as work:
        try:
            inventory, looks, until = ProcessInventory(), list[ProcessInfo](), time.monotonic() + 40
            while len(looks) < 30 or not any(one.processes > 1 for one in looks):
                assert time.monotonic() < until, "its children are never seen"
                (one,) = inventory.scan(pid=work.pid)
                looks.append(one)
            assert {one.unreadable for one in looks} == {""}
        finally:
            os.killpg(work.pid, signal.SIGKILL)
