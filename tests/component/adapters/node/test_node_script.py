"""The script that does the work on a node, run by the very command that SSH runs there."""

import ast
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from base64 import b64decode, b64encode
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest

from distributed_grid.adapters.node.installation import gather_wheels, version_name
from distributed_grid.adapters.node.node_messages import NodeFacts
from distributed_grid.adapters.node.script_session import SCRIPT
from distributed_grid.adapters.ssh.ssh_connection import COMMAND
from tests.support.processes import is_running
from tests.support.shell import wait_until
from tests.support.small_disks import small_disk

__all__ = ["small_disk"]
NO_NETWORK = {"PIP_NO_INDEX": "1"}


def a_wheel(**files):
    """A small wheel: file names (with __ for /) to contents."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def order(version, *wheels, sent=True):
    """A request to build a version of these wheels."""
    listed = [
        {"name": f"w{number}.whl", "sha256": sha256(data).hexdigest(), "size": len(data), "sent": sent}
        for number, data in enumerate(wheels)
    ]
    return {"version": version, "wheels": listed}


def build(node, version, *wheels):
    return node.ask("build", blobs=wheels, **order(version, *wheels))


@functools.cache
def packed(facts):
    """The real package and what it needs, packed once."""
    return gather_wheels(facts, Path("/nowhere"), NO_NETWORK)


@pytest.fixture
def installed(node):
    """A node with the real package in it; its version."""
    seen = node.ask("inspect")["done"]
    facts = NodeFacts(**{name: seen[name] for name in ("python", "machine", "libc", "libc_version", "executable")})
    wheels = packed(facts)
    version = version_name(wheels, facts)
    said = node.ask("build", blobs=[wheel.data for wheel in wheels], **order(version, *(w.data for w in wheels)))
    assert said == {"done": {"version": version}}
    return version


# ---------------------------------------------------------------- getting started


def test_the_command_is_one_constant_line_that_any_shell_takes():
    assert COMMAND.isprintable()
    assert "!" not in COMMAND
    inner = COMMAND.removeprefix("exec /bin/sh -c '").removesuffix("'")
    assert "'" not in inner
    for shell in ("sh", "bash", "dash", "zsh", "fish", "csh", "tcsh"):
        found = subprocess.run(["which", shell], capture_output=True, text=True)
        if found.returncode == 0:
            checked = subprocess.run([shell, "-c", COMMAND], input=b"/nowhere\n\n", capture_output=True)
            assert checked.returncode == 98, shell


def test_an_old_python_can_read_the_script():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def test_a_python_that_is_too_old_says_so(node):
    script = SCRIPT.read_bytes().replace(b"MIN_PYTHON = (3, 11)", b"MIN_PYTHON = (3, 99)")
    (said,) = node.talk([("inspect", {}, ())], script=script)
    assert re.match(r"it has Python 3\.\d+, at least 3\.99 is needed", said["failed"])
    assert "set `python:`" in said["failed"]


def test_a_node_without_python_ends_with_a_code_of_its_own(node, tmp_path):
    (tmp_path / "empty").mkdir()
    done = node.run([("inspect", {}, ())], env={"HOME": str(node.home), "PATH": str(tmp_path / "empty")})
    everywhere = shutil.which("python3", path="/usr/local/bin")  # which is always looked at
    assert done.returncode == (0 if everywhere else 97)
    assert node.run([], python="/no/such/python").returncode == 98


def test_the_python_that_is_named_is_the_one_that_runs(node):
    own = node.home / "own"
    own.symlink_to(sys.executable)
    seen = node.talk([("inspect", {}, ())], python="~/own")[-1]["done"]
    assert seen["python"] == "{}.{}.{}".format(*sys.version_info[:3])


def test_a_name_with_shell_in_it_is_only_a_name(node):
    done = node.run([("inspect", {}, ())], python='$(touch ~/a) `touch ~/b`; touch ~/c; "')
    assert done.returncode == 98
    assert node.files() == []


def test_looking_changes_nothing(node):
    seen = node.ask("inspect")["done"]
    assert (seen["versions"], seen["wheels"], seen["version"], seen["running"]) == ([], [], "", "")
    assert seen["machine"] == os.uname().machine
    assert node.files() == []


def test_names_that_lead_elsewhere_are_refused(node):
    assert "no name for a file" in node.ask("inspect", node="../../etc")["failed"]
    assert "no name for a file" in build(node, "../x", a_wheel())["failed"]


# ---------------------------------------------------------------- installing


def test_a_version_is_built_from_the_wheels_that_were_sent(node):
    wheel = a_wheel(**{"thing/__init__.py": "x = 7", "thing-1.data/purelib/more.py": "y = 8", "t.data/scripts/s": "no"})
    assert build(node, "1-a", wheel) == {"done": {"version": "1-a"}}
    root = node.folder / "versions" / "1-a"
    said = subprocess.run(
        [root / "bin" / "python", "-I", "-c", "import thing, more; print(thing.x, more.y)"],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "7 8\n", said.stderr
    assert not list(root.rglob("s"))
    assert node.ask("inspect")["done"]["version"] == "1-a"
    for folder in ("", "versions", "wheels", "agents", "agents/g1/n1"):
        assert (node.folder / folder).stat().st_mode & 0o777 == 0o700


def test_building_again_needs_no_wheels_and_changes_nothing(node):
    wheel = a_wheel(**{"thing.py": "x = 7"})
    build(node, "1-a", wheel)
    before = (node.folder / "versions" / "1-a").stat()
    said = node.talk([("build", order("1-a", wheel, sent=False), ())])
    assert said == [{"done": {"version": "1-a"}}]  # no step was told: nothing was built
    assert (node.folder / "versions" / "1-a").stat().st_ino == before.st_ino


def test_wheels_that_arrive_damaged_are_refused_and_not_kept(node):
    wheel = a_wheel(**{"thing.py": "x = 7"})
    request = order("1-a", wheel)
    said = node.ask("build", blobs=[wheel[:-1] + b"!"], **request)
    assert "arrived damaged" in said["failed"]
    assert list((node.folder / "wheels").iterdir()) == []
    assert "connection ended" in node.ask("build", blobs=[wheel[:-5]], **request)["failed"]
    assert build(node, "1-a", wheel) == {"done": {"version": "1-a"}}


def test_a_wheel_that_leads_outside_is_refused(node):
    for name in ("../../escaped.py", "/escaped.py", "a/../../escaped.py"):
        assert "leads outside" in build(node, "1-a", a_wheel(**{name: ""}))["failed"]
    assert node.ask("inspect")["done"]["versions"] == []
    assert not [name for name in node.files() if "escaped" in name or ".new-" in name]


def test_a_version_that_a_crash_left_in_pieces_is_built_anew(node):
    wheel = a_wheel(**{"thing.py": "x = 7" * 100})
    build(node, "1-a", wheel)
    (file,) = (node.folder / "versions" / "1-a").rglob("thing.py")
    file.write_text("")
    assert node.ask("inspect")["done"]["versions"] == []
    assert node.ask("build", **order("1-a", wheel, sent=False)) == {"done": {"version": "1-a"}}
    assert file.read_text().startswith("x = 7")
    assert not [name for name in os.listdir(node.folder / "versions") if name.startswith(".")]


def test_a_build_that_fails_leaves_the_old_version_usable(node):
    build(node, "1-a", a_wheel(**{"thing.py": "x = 1"}))
    assert "failed" in build(node, "2-b", a_wheel(**{"../bad.py": ""}))
    seen = node.ask("inspect")["done"]
    assert (seen["version"], seen["versions"]) == ("1-a", ["1-a"])


def test_a_new_version_takes_the_place_of_one_that_nobody_uses(node):
    build(node, "1-a", a_wheel(**{"thing.py": "x = 1"}))
    build(node, "2-b", a_wheel(**{"thing.py": "x = 2"}))
    assert node.ask("inspect")["done"]["versions"] == ["2-b"]


def test_a_version_that_another_grid_uses_stays(node):
    wheel = a_wheel(**{"thing.py": "x = 1"})
    node.ask("build", grid="g2", blobs=[wheel], **order("1-a", wheel))
    build(node, "2-b", a_wheel(**{"thing.py": "x = 2"}))
    assert node.ask("inspect")["done"]["versions"] == ["1-a", "2-b"]
    node.ask("purge")
    assert node.ask("inspect")["done"]["versions"] == ["1-a"]
    node.ask("purge", grid="g2")
    assert node.files() == []


def test_a_directory_of_somebody_else_is_refused(node):
    (node.home / "elsewhere").mkdir()
    (node.home / ".distributed_grid").symlink_to(node.home / "elsewhere")
    assert "not a directory of your own" in build(node, "1-a", a_wheel())["failed"]


# ---------------------------------------------------------------- the agent


def test_an_agent_is_started_once_and_leaves_nothing(node, installed):
    path = node.ask("link")["done"]["socket"]
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    first = node.ask("launch", socket=path)["done"]
    assert first["started"]
    assert is_running(first["pid"])
    assert json.loads((node.agent_dir / "link.json").read_text()) == {"node": "n1", "socket": path, "linger": 0}
    again = node.ask("launch", socket=path + "x")["done"]
    assert again == {"pid": first["pid"], "started": False, "running": installed}
    assert json.loads((node.agent_dir / "link.json").read_text())["socket"] == path + "x"
    assert node.ask("inspect")["done"]["running"] == installed
    environ = Path(f"/proc/{first['pid']}/environ").read_bytes()
    assert b"SSH_CLIENT" not in environ
    assert node.ask("stop")["done"] == {"stopped": True}
    assert not is_running(first["pid"])
    assert not (node.agent_dir / "run").exists()
    assert node.ask("stop")["done"] == {"stopped": False}
    node.ask("purge")
    assert node.files() == []


def test_what_jobs_have_left_is_counted_and_read_without_an_agent(node, installed):
    jobs = node.agent_dir / "jobs"
    for attempt, contents in {
        "a.1": {"work/model": "weights", "stdout": "hello"},
        "b.1": {"stderr": "x" * 600_000},
    }.items():
        (jobs / attempt / "work").mkdir(parents=True)
        for name, content in contents.items():
            (jobs / attempt / name).write_text(content)
    (jobs / "b.1" / "stdout").symlink_to("/etc/passwd")
    asked = {"a.1": "0" * 64, "b.1": "", "gone.1": ""}
    assert node.ask("list-results", attempts=asked)["done"] == {"results": {"a.1": [1, 7]}}
    assert "is no name for a file" in node.ask("list-results", attempts={"../../x": ""})["failed"]
    files = [
        ["a.1", "stdout", 1],
        ["b.1", "stdout", 0],
        ["gone.1", "stdout", 0],
        ["b.1", "stderr", 0],
        ["a.1", "stderr", 0],
    ]
    answer = node.ask("read-output", files=files)["done"]
    (first, second), more = answer["parts"], answer["more"]
    assert (first, more) == (["a.1", "stdout", b64encode(b"ello").decode()], True)
    assert second[:2] == ["b.1", "stderr"]
    assert len(b64decode(second[2])) == 512 * 1024 - 4
    assert "is no output" in node.ask("read-output", files=[["a.1", "../a.1/stdout", 0]])["failed"]


def test_results_that_cannot_be_counted_are_a_failure_and_not_none(node):
    (node.agent_dir / "jobs" / "a.1" / "work").mkdir(parents=True)
    failed = node.ask("list-results", attempts={"a.1": ""})["failed"]
    assert failed == "the environment that knows how to list results is gone; type: grid cluster install n1"
    build(node, "1-a", a_wheel(**{"distributed_grid/agent/files/__init__.py": ""}))  # of a version without the command
    failed = node.ask("list-results", attempts={"a.1": ""})["failed"]
    assert "No module named distributed_grid.agent.files.result_listing" in failed
    assert failed.endswith("; type: grid cluster install n1")


@contextlib.contextmanager
def an_agent_that_starts(node, **options):
    """A process with the command of the node's agent, which has not noted its pid; it is ended."""
    command = ["/bin/sh", "-c", "read its_end", "-m", "distributed_grid.agent", "--dir", str(node.agent_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", **options) as starting:
        try:
            wait_until(lambda: b"--dir" in Path(f"/proc/{starting.pid}/cmdline").read_bytes())
            yield starting
        finally:
            starting.kill()


def test_one_that_has_just_been_started_is_stopped_though_it_has_not_noted_its_pid(node, installed):
    node.ask("link")
    with an_agent_that_starts(node) as starting:
        assert node.ask("stop")["done"] == {"stopped": True}
        assert starting.wait(10) == -signal.SIGTERM
    assert node.ask("stop")["done"] == {"stopped": False}


def test_an_agent_is_stopped_where_the_disk_takes_no_file_more(node, small_disk):
    node.agent_dir.mkdir(parents=True)
    small_disk(node.agent_dir).allow_no_more_files()
    with pytest.raises(OSError, match="No space left"):
        (node.agent_dir / "another").touch()
    with an_agent_that_starts(node) as starting:
        assert node.ask("stop") == {"done": {"stopped": True}}
        assert starting.wait(10) == -signal.SIGTERM


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of somebody else")
def test_somebody_else_who_poses_as_the_agent_is_left_alone_and_stops_nothing(node):
    node.agent_dir.mkdir(parents=True)
    with an_agent_that_starts(node, user="nobody") as other:
        assert node.ask("stop") == {"done": {"stopped": False}}
        assert other.poll() is None


def test_a_launch_that_comes_after_the_stop_starts_nothing(node, installed):
    path = node.ask("link")["done"]["socket"]
    assert node.ask("stop")["done"] == {"stopped": False}
    assert node.ask("launch", socket=path) == {"failed": "it was stopped meanwhile"}
    assert node.ask("inspect")["done"]["running"] == ""
    path = node.ask("link")["done"]["socket"]
    assert node.ask("launch", socket=path)["done"]["started"]
    assert node.ask("stop")["done"] == {"stopped": True}


def test_an_agent_that_was_killed_is_started_again(node, installed):
    path = node.ask("link")["done"]["socket"]
    first = node.ask("launch", socket=path)["done"]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    again = node.ask("launch", socket=path)["done"]
    assert again["started"]
    assert again["pid"] != first


def test_an_agent_of_another_version_is_retired_and_one_of_this_version_is_not(node, installed):
    path = node.ask("link")["done"]["socket"]
    pid = node.ask("launch", socket=path)["done"]["pid"]
    assert node.ask("retire")["done"] == {"retired": False}
    (node.agent_dir / "version").write_text("0-other")
    assert node.ask("retire")["done"] == {"retired": True}
    assert not is_running(pid)
    (node.agent_dir / "version").write_text(installed)


def test_an_agent_that_cannot_start_says_its_last_words(node):
    build(
        node, "1-a", a_wheel(**{"distributed_grid/__init__.py": "", "distributed_grid/agent.py": "raise OSError('no')"})
    )
    path = node.ask("link")["done"]["socket"]
    assert node.ask("launch", socket=path)["failed"] == "the agent ended while starting: OSError: no"


def test_a_link_needs_the_package(node):
    assert "type: grid cluster start n1" in node.ask("link")["failed"]


def test_a_home_too_deep_for_sockets_has_them_elsewhere(node):
    deep = node.home / ("d" * 60)
    deep.mkdir()
    node.env["HOME"] = str(deep)
    build(node, "1-a", a_wheel(**{"thing.py": ""}))
    path = node.ask("link")["done"]["socket"]
    assert path.startswith("/tmp/grid-")
    assert len(path) < 100
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    second = node.ask("link")["done"]["socket"]
    assert not Path(path).parent.exists()
    node.ask("stop")
    assert not Path(second).parent.exists()


def test_sockets_of_earlier_connections_are_removed(node):
    build(node, "1-a", a_wheel(**{"thing.py": ""}))
    first = Path(node.ask("link")["done"]["socket"])
    first.write_text("stale")
    second = Path(node.ask("link")["done"]["socket"])
    assert first != second
    assert not first.exists()
