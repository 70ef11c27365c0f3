"""The boot script of rented machines on a bare machine, against a real control plane: it brings the agent there, and
whatever goes wrong powers the machine off."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.adapters.clouds.boot_script import DEADLINE_VARIABLE, HEARD_FILE
from distributed_grid.agent.join_client import JoinToken
from distributed_grid.server.access.tls import ensure_certificate
from tests.support.bare_machine import TOOLS, BareMachine, order_for
from tests.support.processes import is_running
from tests.support.shell import GRID, Shell, wait_until
from tests.support.small_disks import SmallDisk, small_disk  # noqa: F401 - a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
Make = Callable[..., BareMachine]
SYSTEM_PYTHON = "/usr/bin/python3.11"


LENDS = """
name: lends
resource_sharing:
  thresholds: {cpu_percent_max: 100, cpu_min_cores: 0, memory_percent_max: 100, memory_min_gb: 0}
"""
"""Nodes that lend beside whatever else runs on this machine."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A control plane that other machines reach by TLS."""
    folder = tmp_path_factory.mktemp("plane")
    (folder / "here").mkdir()
    shell = Shell(folder / "state", folder / "here")
    config = folder / "lends.yaml"
    config.write_text(LENDS)
    shell("daemon", "start", "--config", str(config), "--listen", "127.0.0.1:0", "--tls", check=0)
    yield shell
    shell.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Make]:
    made: list[BareMachine] = []

    def make(name: str = "machine", **options: object) -> BareMachine:
        made.append(BareMachine(tmp_path / name, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def token_for(plane: Shell, name: str) -> str:
    return plane("daemon", "join-token", "create", "--node", name, check=0).stdout.strip()


def is_alive(plane: Shell, name: str) -> bool:
    return any(one["node_id"] == name and one["state"] == "alive" for one in plane.observe("status")["nodes"])


def run_on(plane: Shell, name: str, *command: str) -> str:
    where = ("-n", name, "--strategy", "node_specific", "--workdir", "none")
    return plane("run-shared", "-r", "cpu", "-a", "0.1", *where, *command, check=0).stdout


def test_a_machine_with_only_python_joins_and_runs_a_job(plane: Shell, machine: Make) -> None:
    token = token_for(plane, "bare-1")
    booted = machine().boot(order_for("bare-1", token))
    wait_until(lambda: is_alive(plane, "bare-1") or booted.power_offs(), 60)
    assert booted.power_offs() == [], booted.said
    script = 'echo "$GRID_NODE" "$HOME"; python -c "import sys; print(sys.prefix)"'
    name, home, prefix = run_on(plane, "bare-1", "sh", "-c", script).split()
    assert (name, home) == ("bare-1", str(booted.home / "home"))
    assert prefix == str(booted.home / "agent-program")
    assert "distributed-grid: starting the agent of bare-1" in booted.said
    assert "warning: jobs run as" in booted.said
    the_token_is_nowhere(booted, token)
    # The agent is ended: so is the machine.
    agent = next(pid for pid in booted.processes() if b"distributed_grid.agent\0" in read(pid, "cmdline"))
    os.kill(agent, signal.SIGKILL)
    assert "powering off: the agent ended with exit code 137" in booted.wait_until_off()
    assert booted.power_offs() == ["-P now"]


def the_token_is_nowhere(booted: BareMachine, token: str) -> None:
    secret = JoinToken.parse(token).secret.encode()
    for pid in booted.processes():
        for part in ("cmdline", "environ"):
            said = read(pid, part)
            assert secret not in said
            assert token.encode() not in said
    for folder, _, names in os.walk(booted.home):
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                content = path.read_bytes()
                assert secret not in content, path
                assert token.encode() not in content, path
    assert token not in booted.said


def read(pid: int, part: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{part}").read_bytes()
    except OSError:
        return b""


def test_an_image_that_has_grid_of_this_version_downloads_nothing(plane: Shell, machine: Make) -> None:
    image = machine(python=None)
    image.add_program("grid", f'exec {GRID[0]} "$@"')
    image.boot(order_for("with-grid", token_for(plane, "with-grid")))
    wait_until(lambda: is_alive(plane, "with-grid") or image.power_offs(), 60)
    assert image.power_offs() == [], image.said
    assert not (image.home / "agent-program").exists()


def test_an_image_with_another_version_gets_the_right_one(plane: Shell, machine: Make) -> None:
    image = machine()
    image.add_program("grid", "echo grid 0.0.1")
    image.boot(order_for("other-grid", token_for(plane, "other-grid")))
    wait_until(lambda: is_alive(plane, "other-grid") or image.power_offs(), 60)
    assert image.power_offs() == [], image.said
    assert (image.home / "agent-program/bin/python").exists()


def test_without_a_python_the_machine_says_so_and_ends(plane: Shell, machine: Make) -> None:
    booted = machine(python=None).boot(order_for("no-python", token_for(plane, "no-python")))
    assert "powering off: there is no Python 3.11 or later on this image" in booted.wait_until_off()


def test_a_second_machine_with_a_spent_token_ends_at_once(plane: Shell, machine: Make) -> None:
    token = token_for(plane, "twice")
    first = machine("first").boot(order_for("twice", token))
    wait_until(lambda: is_alive(plane, "twice"), 60)
    second = machine("second").boot(order_for("twice", token))
    said = second.wait_until_off()
    assert "powering off: no agent: the control plane says: the join token was used already" in said
    assert is_alive(plane, "twice")
    assert first.power_offs() == []


def test_a_machine_that_boots_again_is_the_same_node(plane: Shell, machine: Make) -> None:
    order = order_for("again", token_for(plane, "again"))
    booted = machine().boot(order)
    wait_until(lambda: is_alive(plane, "again"), 60)
    booted.close()  # the power fails
    booted.boot(order)
    wait_until(lambda: is_alive(plane, "again") or booted.power_offs(), 60)
    assert run_on(plane, "again", "sh", "-c", "echo $GRID_NODE").strip() == "again"
    assert booted.power_offs() == []


class Impostor:
    """A server with a certificate of its own, which keeps what it was sent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        own = ensure_certificate(folder, ["127.0.0.1"])
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(own.certificate, own.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = b""
        self.visits = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.visits += 1
            try:
                with self._context.wrap_socket(plain, server_side=True) as visitor:
                    visitor.settimeout(5)
                    while chunk := visitor.recv(65536):
                        self.heard += chunk
            except OSError:
                continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Impostor]:
    found = Impostor(tmp_path / "impostor")
    yield found
    found.close()


def test_a_server_with_another_certificate_is_told_nothing(plane: Shell, machine: Make, impostor: Impostor) -> None:
    real = JoinToken.parse(token_for(plane, "fooled"))
    token = JoinToken((impostor.address,), real.fingerprint, real.id, real.secret).text()
    booted = machine().boot(order_for("fooled", token))
    said = booted.wait_until_off()
    assert f"no agent: {impostor.address} is not the control plane: its certificate is another" in said
    assert impostor.visits == 1
    assert impostor.heard == b""


def test_the_right_one_of_several_addresses_is_found(plane: Shell, machine: Make, impostor: Impostor) -> None:
    real = JoinToken.parse(token_for(plane, "several"))
    token = JoinToken((impostor.address, *real.addresses), real.fingerprint, real.id, real.secret).text()
    booted = machine().boot(order_for("several", token))
    wait_until(lambda: is_alive(plane, "several") or booted.power_offs(), 60)
    assert booted.power_offs() == [], booted.said
    assert impostor.heard == b""


def test_without_a_control_plane_the_machine_ends_when_its_time_is_over(machine: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    token = JoinToken((address,), "ab" * 32, "0" * 12, "secret").text()
    booted = machine().boot(order_for("alone", token, **{DEADLINE_VARIABLE: "1"}))
    assert f"no agent: {address}: [Errno 111] Connection refused" in booted.wait_until_off(60)


def test_a_full_disk_is_said_and_ends_the_machine(
    plane: Shell,
    machine: Make,
    small_disk: Callable[..., SmallDisk],  # noqa: F811
) -> None:
    booted = machine()
    small_disk(booted.home, 2 << 20)
    booted.boot(order_for("full", token_for(plane, "full")))
    said = booted.wait_until_off()
    assert "No space left on device" in said
    assert not (booted.home / "agent-program").exists()


def test_a_script_that_is_killed_in_the_middle_ends_the_machine(machine: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        token = JoinToken((address,), "ab" * 32, "0" * 12, "secret").text()
        booted = machine().boot(order_for("killed", token))
        wait_until(lambda: any(b"agent_download.py" in read(pid, "cmdline") for pid in booted.processes()))
        assert booted.process is not None
        booted.process.kill()
        booted.process.wait()
        booted.wait_until_off()
        assert booted.power_offs() == ["-P now"]


def test_an_agent_that_never_joins_is_not_waited_for(plane: Shell, machine: Make) -> None:
    image = machine(python=None)
    image.add_program("grid", f'[ "$1" = --version ] && exec {GRID[0]} --version; exec sleep 300')
    image.boot(order_for("hangs", token_for(plane, "hangs"), **{DEADLINE_VARIABLE: "1"}))
    wait_until(image.power_offs, 40)
    assert image.process is not None
    assert is_running(image.process.pid), "it was not the script that ended it"


def test_a_hung_agent_does_not_keep_the_machine_alive(plane: Shell, machine: Make) -> None:
    order = order_for("stopped", token_for(plane, "stopped"), GRID_WORKER_EXIT_SECONDS="8")
    booted = machine().boot(order, margin_seconds=2)
    heard = booted.home / "agent" / HEARD_FILE
    wait_until(lambda: heard.exists() or booted.power_offs(), 60)
    begun = heard.stat().st_mtime
    assert begun < 1.1 * float(Path("/proc/uptime").read_text().split()[0]), "it is no time of a clock that may be set"
    wait_until(lambda: heard.stat().st_mtime > begun + 11 or booted.power_offs(), 40)
    assert booted.power_offs() == [], "an agent that is heard is left alone, however long"
    agent = next(pid for pid in booted.processes() if b"distributed_grid.agent\0" in read(pid, "cmdline"))
    os.kill(agent, signal.SIGSTOP)
    wait_until(booted.power_offs, 40)
    assert booted.process is not None
    assert is_running(agent), "it was not its own end"
    assert is_running(booted.process.pid), "it was not the script that ended it"


def test_no_file_keeps_the_machine_alive_when_the_control_plane_is_gone(tmp_path: Path, machine: Make) -> None:
    (tmp_path / "here").mkdir()
    plane = Shell(tmp_path / "state", tmp_path / "here")
    plane("daemon", "start", "--listen", "127.0.0.1:0", "--tls", check=0)
    try:
        order = order_for("kept", token_for(plane, "kept"), GRID_WORKER_EXIT_SECONDS="8")
        booted = machine().boot(order, margin_seconds=2)
        folder = booted.home / "agent"
        wait_until(lambda: (folder / HEARD_FILE).exists() or booted.power_offs(), 60)
        assert booted.power_offs() == [], booted.said
        assert booted.planned_ends()[-1].startswith("-P +"), "it has an end of its own, should all of it be killed"
        # A job does all that it can: it stops the agent, and has every file of the agent look new.
        agent = next(pid for pid in booted.processes() if b"distributed_grid.agent\0" in read(pid, "cmdline"))
        os.kill(agent, signal.SIGSTOP)
        (folder / "joined.json").unlink()
        script = f"while :; do touch {folder}/{HEARD_FILE} {folder}/joined.json; sleep 0.5; done"
        with subprocess.Popen(["sh", "-c", script]) as toucher:
            try:
                touched = (folder / HEARD_FILE).stat().st_mtime_ns
                wait_until(lambda: (folder / HEARD_FILE).stat().st_mtime_ns > touched)
                plane.close()
                wait_until(booted.power_offs, 60)
            finally:
                toucher.kill()
        assert booted.process is not None
        assert is_running(agent), "it was not its own end"
        assert is_running(booted.process.pid), "it was not the script that ended it"
    finally:
        plane.close()


@pytest.fixture
def private_accounts() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes users")
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mount namespace: {done.stderr.strip()}")


@pytest.mark.usefixtures("private_accounts")
def test_jobs_run_as_a_user_of_their_own_who_cannot_change_the_agent(
    plane: Shell, machine: Make, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip(f"no {SYSTEM_PYTHON}, which every user may run")
    booted = machine(tools=(*TOOLS, "setpriv", "useradd", "chown", "touch", "rm"), python=SYSTEM_PYTHON)
    booted.boot(order_for("unprivileged", token_for(plane, "unprivileged")), private_etc=True)
    wait_until(lambda: is_alive(plane, "unprivileged") or booted.power_offs(), 60)
    assert booted.power_offs() == [], booted.said
    program = booted.home / "agent-program"
    script = f"id -u; touch {program}/x 2>&1 || echo refused; cat {booted.folder}/user-data 2>&1 || echo hidden"
    said = run_on(plane, "unprivileged", "sh", "-c", script).splitlines()
    assert said[0] != "0"
    assert "refused" in said
    assert said[-1] == "hidden"
    assert "warning" not in booted.said
