"""The command line's manners: options anywhere, JSON everywhere, no traceback ever, nothing raw on a terminal."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distributed_grid.api.framing import JSON, frame
from distributed_grid.posix.sockets import short_path
from distributed_grid.state_dir import machine_id
from tests.support.project import PROJECT
from tests.support.shell import Shell, wait_until


def test_help_tells_the_commands_and_the_exit_codes(shared_grid: Shell) -> None:
    shown = shared_grid("--help", check=0).stdout
    for word in ("run-shared", "shared-status", "jobs", "daemon", "124  waited too long", "3    no control plane"):
        assert word in shown


def test_a_command_that_is_nearly_right_is_suggested(shared_grid: Shell) -> None:
    assert "did you mean 'status'?" in shared_grid("statsu", check=2).stderr


def test_a_shell_gets_its_completion(shared_grid: Shell) -> None:
    asked = {"_GRID_COMPLETE": "bash_complete", "COMP_WORDS": "grid run-sh", "COMP_CWORD": "1"}
    assert "run-shared" in shared_grid(check=0, env=asked).stdout


SLOW_TO_IMPORT = (
    *("asyncio", "click", "concurrent", "datetime", "dataclasses", "decimal", "email", "hashlib", "http", "inspect"),
    *("logging", "msgspec", "multiprocessing", "numpy", "pathlib", "platform", "shutil", "ssl"),
    *("subprocess", "tempfile", "threading", "tokenize", "traceback", "urllib", "uuid", "yaml"),
)
PRINT_MODULES = """
import atexit, sys
from distributed_grid.cli.main import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main()
"""


@pytest.mark.parametrize(
    "words", [("status",), ("run-shared", "-r", "cpu", "-a", "1", "true")], ids=lambda words: words[0]
)
def test_a_warm_command_imports_nothing_that_is_slow_to_import(shared_grid: Shell, words: tuple[str, ...]) -> None:
    shared_grid("status", check=0)
    command = [sys.executable, "-c", PRINT_MODULES, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=shared_grid.cwd, env=shared_grid.env)
    imported = set(done.stderr.split())
    assert "distributed_grid.cli.session" in imported
    assert imported.isdisjoint(SLOW_TO_IMPORT)


@pytest.mark.parametrize(
    "words",
    [
        ("--json", "status"),
        ("status", "--json"),
        ("--json", "jobs", "list"),
        ("jobs", "--json", "list"),
        ("jobs", "list", "--json"),
        ("shared-status", "--json"),
        ("daemon", "status", "--json"),
        ("config", "show", "--json"),
        ("jobs", "wait", "--json"),
    ],
)
def test_global_options_are_taken_anywhere_and_json_is_json(shared_grid: Shell, words: tuple[str, ...]) -> None:
    shared_grid("status")
    json.loads(shared_grid(*words, check=0).stdout)


def test_the_state_directory_can_be_named_after_the_command(shared_grid: Shell, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    done = shared_grid("daemon", "status", "--state-dir", other, check=3)
    assert other in done.stderr


def test_the_same_option_after_the_command_word_belongs_to_the_command(shared_grid: Shell) -> None:
    assert shared_grid("run-shared", "echo", "--json", "-c", "x", check=0).stdout == "--json -c x\n"


def test_the_promised_fields_are_there(shared_grid: Shell) -> None:
    job = json.loads(shared_grid("run-shared", "--detach", "--json", "true", check=0).stdout)
    assert {"job_id", "node_id", "resource_type", "amount", "state"} <= set(job)
    shared_grid("jobs", "wait", job["job_id"], check=0)
    daemon = shared_grid.json("daemon", "status")
    assert {"pid", "socket", "uptime_seconds", "config"} <= set(daemon)
    offer = shared_grid.json("shared-status")["offers"][0]
    assert {"node_id", "resource_type", "amount", "expires_at"} <= set(offer)
    assert offer["expires_at"].endswith("Z")


def test_control_characters_of_others_never_reach_the_terminal(shared_grid: Shell) -> None:
    shared_grid("run-shared", "-j", "rude", "true", "\x1b[31mred\x07", check=0)
    for words in (("jobs", "list"), ("jobs", "show", "rude"), ("events",)):
        shown = shared_grid(*words, check=0).stdout
        assert "\x1b" not in shown
        assert "\x07" not in shown


def test_words_that_are_not_text_are_refused_in_one_line(shared_grid: Shell) -> None:
    done = shared_grid("run-shared", "echo", "\udcff", check=2)
    assert "only UTF-8 text can be passed on" in done.stderr


def test_a_bug_is_one_line_and_a_report(tmp_path: Path) -> None:
    """A control plane that answers nonsense stands in for the bugs we have not found."""
    cwd = tmp_path / "here"
    cwd.mkdir()
    shell = Shell(tmp_path / "state", cwd)
    folder = tmp_path / "state" / "hosts" / machine_id()
    folder.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        with short_path(folder / "grid.sock") as path:
            listener.bind(path)
        listener.listen()

        def talk_nonsense() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(frame(JSON, b"[]"))
                connection.recv(65536)

        thread = threading.Thread(target=talk_nonsense)
        thread.start()
        done = shell("run-shared", "--env=API_TOKEN=geheim", "true", check=1)
        thread.join(10)
    assert len(done.stderr.splitlines()) == 1
    report = Path(done.stderr.rpartition(" ")[2].strip())
    assert "Traceback" in report.read_text()
    assert "command: grid run-shared --env=API_TOKEN=*** …" in report.read_text()
    assert stat.S_IMODE(report.parent.stat().st_mode) == 0o700


def test_init_writes_a_file_that_is_fine_and_replaces_nothing(grid: Shell) -> None:
    target = grid.cwd / "my.yaml"
    grid("init", str(target), check=0)
    written = target.read_text()
    assert "fine" in grid("config", "check", str(target), check=0).stdout
    assert "--force" in grid("init", str(target), check=1).stderr
    assert target.read_text() == written
    grid("init", check=0)
    assert (grid.state_dir / "cluster.yaml").read_text() == written


def test_config_check_lists_every_problem_with_its_line(grid: Shell) -> None:
    bad = grid.cwd / "bad.yaml"
    bad.write_text("nodes:\n- name: a\n  port: -1\n- name: a\nhold_secnds: 5\n")
    done = grid("config", "check", str(bad), check=1)
    assert len(done.stdout.splitlines()) >= 3
    for part in (":3:", "hold_seconds", "bad.yaml:"):
        assert part in done.stdout
    problems = json.loads(grid("config", "check", str(bad), "--json").stdout)
    assert problems["ok"] is False
    assert {problem["line"] for problem in problems["problems"]} >= {3, 5}


@pytest.mark.parametrize("path", sorted((PROJECT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_a_config_is_shown_in_its_normal_form(shared_grid: Shell, path: Path, tmp_path: Path) -> None:
    shown = shared_grid("config", "show", str(path), check=0).stdout
    assert shared_grid("-c", str(path), "config", "show", check=0).stdout == shown
    normal = tmp_path / "normal.yaml"
    normal.write_text(shown)
    assert shared_grid.json("config", "show", str(path)) == shared_grid.json("config", "show", str(normal))


def test_a_type_that_no_event_has_is_refused(shared_grid: Shell) -> None:
    for more in ((), ("--follow",)):
        done = shared_grid("events", "--type", "grantd", *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "grid: no event is of type 'grantd'; did you mean granted?\n"


@pytest.mark.parametrize("kind", ["pipe", "file", "nothing"])
def test_input_that_does_not_reach_a_job_is_said_once(shared_grid: Shell, kind: str, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("some input\n")
    with (tmp_path / "input").open() as file:
        source = {"pipe": subprocess.PIPE, "file": file, "nothing": subprocess.DEVNULL}[kind]
        process = shared_grid.start("run-shared", "-r", "cpu", "-a", "0.1", "cat", stdin=source)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.decode() == ("" if kind == "nothing" else "grid: the standard input does not reach the job\n")


def test_a_boost_in_a_grid_of_one_machine_is_told_that_it_has_no_lender(shared_grid: Shell) -> None:
    node = shared_grid.json("status")["nodes"][0]["node_id"]
    said = shared_grid("boost", "request", node, "cpu", "1", check=1).stderr
    assert "it is the only node: add another one" in said
    assert "ask for less" not in said


def test_a_node_of_this_machine_that_is_stopped_lends_nothing_until_it_is_started(shared_grid: Shell) -> None:
    node = shared_grid.json("status")["nodes"][0]["node_id"]
    job = shared_grid("run-shared", "-r", "cpu", "-a", "0.1", "--detach", "sleep", "600", check=0).stdout.strip()
    done = shared_grid("cluster", "stop", check=0).stdout
    assert f"lends nothing until: grid cluster start {node}" in done
    assert shared_grid.json("cluster", "status")[0]["state"] == "stopped"
    assert shared_grid.json("shared-status")["offers"] == []
    assert shared_grid.json("jobs", "show", job)["state"] == "queued"
    assert "runs inside the control plane" in shared_grid("cluster", "start", check=0).stdout
    assert shared_grid.json("cluster", "status")[0]["state"] == "alive"
    wait_until(lambda: shared_grid.job(job)["state"] == "running")
    shared_grid("jobs", "cancel", job, check=0)
