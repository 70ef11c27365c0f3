"""The lab keeps its promises: hosts that are machines of their own, and that can be hurt one by one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.config import ClusterConfig
from tests.lab import lab_leftovers
from tests.lab.lab import GB, MB, Lab
from tests.lab.lab_cgroups import hierarchies
from tests.lab.lab_host import Host
from tests.support.project import PROJECT
from tests.support.shell import wait_until

pytestmark = pytest.mark.lab

CLOCKS = "import time; time.sleep(0.05); print(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())"


def answers(host: Host, seconds: float = 0.5) -> bool:
    """Whether its SSH port can be reached."""
    with contextlib.suppress(OSError), socket.create_connection((host.address, 22), seconds):
        return True
    return False


def said(host: Host, *words: str) -> str:
    return host.ssh(words).stdout.strip()


# ---------------------------------------------------------------- machines of their own


def test_three_hosts_have_names_and_addresses_of_their_own(lab: Lab) -> None:
    hosts = list(lab)
    assert [host.name for host in hosts] == ["gpu-master", "gpu1", "gpu2"]
    texts = [said(host, "sh", "-c", "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id") for host in hosts]
    assert [lines.splitlines()[0] for lines in texts] == [host.name for host in hosts]
    assert len({line for lines in texts for line in lines.splitlines()}) == 9
    assert len({host.address for host in hosts} | {lab.address}) == 4


def test_a_login_is_an_ordinary_user_who_sees_nothing_of_the_project(lab: Lab) -> None:
    host = lab.host("gpu1")
    assert said(host, "id", "-un") == lab.user == said(host, "whoami")
    assert said(host, "pwd") == host.home
    assert host.ssh(["ls", "/root"], check=False).returncode == 2
    assert host.run(["ls", str(PROJECT)], user="root", check=False).returncode == 2
    assert host.ssh(["touch", "/usr/x", "/etc/x"], check=False).returncode == 1
    assert host.ssh(["python3", "-c", "import distributed_grid"], check=False).returncode == 1


def test_a_login_has_a_bare_python_that_makes_environments(lab: Lab) -> None:
    host = lab.host("gpu1")
    version = said(host, "python3", "-c", "import sys; print(*sys.version_info[:2])")
    assert tuple(map(int, version.split())) == sys.version_info[:2] >= (3, 11)
    assert host.ssh(["python3", "-c", "import pip"], check=False).returncode == 1
    said(host, "python3", "-m", "venv", "--without-pip", "env")
    inside = said(host, "env/bin/python3", "-c", "import sys, ssl, sqlite3, ctypes; print(sys.prefix, sys.base_prefix)")
    assert inside == f"{host.home}/env /opt/python"


def test_files_of_one_host_are_not_on_another_nor_here(lab: Lab) -> None:
    one, other = lab.host("gpu1"), lab.host("gpu2")
    for place in (one.home, "/tmp", "/dev/shm", "/var/tmp"):
        path = f"{place}/only-on-gpu1"
        one.run(["sh", "-c", f"echo here > {path}"])
        assert one.outside(path).read_text() == "here\n"
        assert not other.outside(path).exists()
        assert not Path(path).exists()


def test_processes_are_seen_and_ended_only_where_they_run(lab: Lab) -> None:
    one, other = lab.host("gpu1"), lab.host("gpu2")
    sleeping = one.popen(["sleep", "1234"])
    (pid,) = wait_until(lambda: one.find("sleep 1234"))
    assert f"{pid} " in f"{said(one, 'pgrep', '-f', 'sleep 1234')} "
    assert other.find("sleep 1234") == []
    one.kill(pid, signal.SIGTERM)
    assert sleeping.wait(5) == -signal.SIGTERM
    assert one.find("sleep 1234") == []
    with pytest.raises(ProcessLookupError):
        one.kill(pid)


def test_a_signal_to_the_handle_of_a_command_reaches_the_command(lab: Lab) -> None:
    host = lab.host("gpu1")
    for user in (None, "root"):
        for moment in (0, 0.1):  # while it is being started, and when it runs
            sleeping = host.popen(["sleep", "4321"], user=user)
            time.sleep(moment)
            sleeping.kill()
            assert sleeping.wait(5) == -signal.SIGKILL
            assert host.find("sleep 4321") == []
    polite = host.popen(["sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"], stdout=-1)
    assert polite.stdout.readline() == b"ready\n"
    polite.terminate()
    with polite:
        assert polite.wait(5) == 7
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sleep", "9876"], timeout=0.3)
    assert host.find("sleep 9876") == []


def test_the_orphans_of_a_host_are_buried_by_its_own_process_one(lab: Lab) -> None:
    host = lab.host("gpu1")
    host.run(["sh", "-c", "sh -c 'echo $$ > orphan; exec sleep 0.3' >/dev/null 2>&1 & sleep 0.1"])
    orphan = host.outside(f"{host.home}/orphan").read_text().strip()
    assert host.run(["ps", "-o", "ppid=", "-p", orphan]).stdout.strip() == "1"
    wait_until(lambda: not host.outside(f"/proc/{orphan}").exists())


def test_hosts_reach_each_other_and_us_by_name(lab: Lab) -> None:
    host = lab.host("gpu1")
    greeting = "import socket, sys; print(socket.create_connection((sys.argv[1], 22), 5).recv(4))"
    assert said(host, "python3", "-c", greeting, "gpu2") == "b'SSH-'"
    with socket.create_server((lab.address, 0)) as server:
        calling = "import socket, sys; socket.create_connection(('control', int(sys.argv[1])), 5).sendall(b'hi')"
        host.run(["python3", "-c", calling, str(server.getsockname()[1])])
        server.settimeout(5)
        connection, (peer, _) = server.accept()
        with connection:
            assert (connection.recv(2), peer) == (b"hi", host.address)


def test_the_cluster_file_names_every_host(lab: Lab) -> None:
    text = lab.config(hold_seconds=10, nodes={"gpu2": {"labels": {"room": "cellar"}}})
    config = ClusterConfig.from_text(text)
    assert [(node.name, node.host, node.user) for node in config.nodes] == [(h.name, h.address, lab.user) for h in lab]
    assert {(node.ssh_key_path, node.known_hosts) for node in config.nodes} == {
        (str(lab.key_path), str(lab.known_hosts))
    }
    assert (config.hold_seconds, config.nodes[2].labels, config.warnings) == (10, {"room": "cellar"}, ())


# ---------------------------------------------------------------- load and memory


def test_load_on_one_host_does_not_count_on_another(lab: Lab) -> None:
    one, other = lab.host("gpu1"), lab.host("gpu2")
    before = one.groups.cpu_seconds(), other.groups.cpu_seconds()
    with one.burn(1):
        owner = wait_until(lambda: one.run(["ps", "-u", "owner", "-o", "pid="], check=False).stdout.split())
        wait_until(lambda: one.groups.cpu_seconds() - before[0] > 0.5)
    after = one.groups.cpu_seconds(), other.groups.cpu_seconds()
    assert len(owner) == 1
    assert after[0] - before[0] > 0.4
    assert after[1] - before[1] < 0.1
    wait_until(lambda: not one.find("while :"))


def test_a_host_may_use_no_more_than_its_cores(a_lab: Callable[..., Lab]) -> None:
    with a_lab(["small"], cores=0.5, memory_gb=0.25) as lab:
        small = lab.host("small")
        with small.burn(2):
            before, began = small.groups.cpu_seconds(), time.monotonic()
            wait_until(lambda: small.groups.cpu_seconds() - before > 0.4)
            used = (small.groups.cpu_seconds() - before) / (time.monotonic() - began)
        assert used < 0.65
        greedy = small.run(["python3", "-c", "b = b'x' * (400 << 20)"], check=False)
        assert greedy.returncode == -signal.SIGKILL
        assert said(small, "echo", "still there") == "still there"


def test_the_limits_are_seen_from_inside_and_root_can_make_groups(lab: Lab) -> None:
    host = lab.host("gpu1")
    files = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
    assert said(host, "sh", "-c", files).split() == [str(3 * GB), "200000"]
    made = (
        "mkdir /sys/fs/cgroup/memory/job && echo $$ > /sys/fs/cgroup/memory/job/cgroup.procs && cat /proc/self/cgroup"
    )
    assert ":memory:/job\n" in host.run(["sh", "-c", made], user="root").stdout
    group = host.groups.path_of("memory") / "job"
    assert group.is_dir()
    lab_leftovers.drop(group)
    assert host.ssh(["mkdir", "/sys/fs/cgroup/memory/mine"], check=False).returncode == 1


# ---------------------------------------------------------------- what can go wrong


def test_a_cut_host_is_silent_until_it_is_healed(lab: Lab) -> None:
    host, other = lab.host("gpu2"), lab.host("gpu1")
    lab.cut(host)
    assert not answers(host)
    assert answers(other)
    host.run(["true"])  # it lives on
    lab.heal(host)
    wait_until(lambda: answers(host))


def test_a_connection_outlives_a_short_cut(lab: Lab) -> None:
    host = lab.host("gpu2")
    command = [*host.ssh_command, f"{host.user}@{host.address}", "echo one; read line; echo $line"]
    talk = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert talk.stdout.readline() == "one\n"
    lab.cut(host)
    talk.stdin.write("two\n")
    talk.stdin.flush()
    time.sleep(0.3)
    assert talk.poll() is None
    lab.heal(host)
    assert talk.communicate(timeout=20)[0] == "two\n"


def test_a_slow_cable_takes_its_time(lab: Lab) -> None:
    host = lab.host("gpu2")

    def took() -> float:
        began = time.monotonic()
        out = host.ssh(["head", "-c", "200000", "/dev/zero"]).stdout
        assert len(out) == 200000
        return time.monotonic() - began

    fast = took()
    lab.slow(host, kbit=1600)
    assert took() > max(0.6, fast)
    lab.slow(host, None)
    assert took() < 0.8


def test_what_goes_through_a_relay_arrives_late(lab: Lab) -> None:
    relay = lab.relay("gpu2", 22, delay_ms=150)
    began = time.monotonic()
    with socket.create_connection((relay.address, relay.port), 5) as there:
        assert there.recv(4) == b"SSH-"
        assert time.monotonic() - began >= 0.15
        relay.close()
        while there.recv(4096):
            pass


def test_a_full_disk_refuses_the_next_byte_and_only_there(lab: Lab) -> None:
    host, other = lab.host("gpu2"), lab.host("gpu1")
    write = ["sh", "-c", "head -c 100000 /dev/zero > more"]
    host.run(["sh", "-c", "echo kept > kept"])
    host.fill_disk()
    refused = host.ssh(write, check=False)
    assert refused.returncode != 0
    assert "No space left" in refused.stderr
    assert said(host, "cat", "kept") == "kept"
    other.ssh(write)
    host.free_disk()
    host.ssh(write)
    assert said(host, "stat", "-c", "%s", "more") == "100000"
    disk = os.statvfs(host.outside(host.home))
    assert disk.f_blocks * disk.f_frsize == 600 * MB


@pytest.mark.usefixtures("needs_skew")
def test_a_skewed_clock_is_wrong_for_logins_and_jumps_while_they_run(lab: Lab) -> None:
    host, other = lab.host("gpu2"), lab.host("gpu1")

    def off(wall: str) -> float:
        return float(wall) - time.time()

    host.skew_seconds(3600)
    for output in (said(host, "python3", "-c", CLOCKS), host.run(["python3", "-c", CLOCKS]).stdout):
        wall, boot, steady = output.split()
        assert abs(off(wall) - 3600) < 5
        assert abs(float(boot) - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5
        assert abs(float(steady) - time.monotonic()) < 5
    assert abs(off(said(other, "python3", "-c", CLOCKS).split()[0])) < 5

    watch = host.popen(
        ["python3", "-c", "import time\nwhile input(): print(time.time(), flush=True)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def now() -> str:
        watch.stdin.write("now\n")
        watch.stdin.flush()
        return watch.stdout.readline()

    for seconds in (3600, -7200, 0):
        host.skew_seconds(seconds)
        wait_until(lambda seconds=seconds: abs(off(now()) - seconds) < 5, 5)
    watch.communicate("\n", timeout=5)
    assert "LD_PRELOAD" not in said(host, "env")


def test_a_changed_host_key_is_noticed(lab: Lab) -> None:
    host = lab.host("gpu2")
    host.new_host_key()
    refused = host.ssh(["true"], check=False)
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr or "verification failed" in refused.stderr
    lab.mend()
    host.ssh(["true"])


def test_a_new_ssh_server_lets_old_sessions_go_on(lab: Lab) -> None:
    host = lab.host("gpu2")
    command = [*host.ssh_command, f"{host.user}@{host.address}", "echo one; read line; echo two"]
    talk = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert talk.stdout.readline() == "one\n"
    host.restart_sshd()
    assert talk.communicate("\n", timeout=5)[0] == "two\n"
    assert said(host, "echo", "new") == "new"


def test_a_reboot_ends_everything_and_keeps_home(lab: Lab) -> None:
    host = lab.host("gpu2")
    ask = "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id"
    before = said(host, "sh", "-c", ask).split()
    host.ssh(["sh", "-c", "echo kept > kept; echo lost > /tmp/lost; nohup sleep 2468 >/dev/null 2>&1 &"])
    wait_until(lambda: host.find("sleep 2468"))
    host.reboot()
    after = said(host, "sh", "-c", ask).split()
    assert before[:2] == after[:2]
    assert before[2] != after[2]
    assert said(host, "cat", "kept") == "kept"
    assert not host.outside("/tmp/lost").exists()
    assert host.find("sleep 2468") == []


def test_a_connection_does_not_hear_of_the_reboot(lab: Lab) -> None:
    host = lab.host("gpu2")
    with socket.create_connection((host.address, 22), 5) as there:
        there.recv(100)
        host.reboot()
        there.settimeout(0.3)
        with pytest.raises(TimeoutError):
            there.recv(100)
        there.sendall(b"anybody?\n")
        there.settimeout(5)
        with pytest.raises(ConnectionResetError):
            there.recv(100)


def test_the_lesson_in_the_docs_is_true(lab: Lab) -> None:
    page = (PROJECT / "docs/internals/lab.md").read_text()
    (lesson,) = re.findall(r"```text\n(def test_.*?)```", page, re.DOTALL)
    names: dict[str, Callable[[Lab], None]] = {}
    exec(lesson, names)
    names["test_the_first_lesson"](lab)


# ---------------------------------------------------------------- nothing is left


def traces(number: int) -> list[str]:
    """Remains of a lab on the machine."""
    groups = [path for each in hierarchies() for path in each.own.glob(f"gridlab{number}-*")]
    links = [name for name in os.listdir("/sys/class/net") if name.startswith(f"lab{number}")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"/gridlab/{number}/" in f"{line}/"]
    files = [*lab_leftovers.BASE.glob(f"{number}*")]
    return [*map(str, groups), *links, *mounts, *map(str, files)]


def namespaces() -> set[str]:
    """Every namespace in which something runs."""
    return {name for process in Path("/proc").iterdir() if process.name.isdigit() for name in namespaces_of(process)}


def namespaces_of(process: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {os.readlink(process / "ns" / kind) for kind in ("net", "pid", "mnt", "ipc", "uts", "cgroup")}
    return set()


def namespaces_in(number: int) -> set[str]:
    """Those of the processes of a lab, which are not ours."""
    groups = [Path(line) for line in (lab_leftovers.folder_of(number) / "groups").read_text().splitlines()]
    pids = {pid for group in groups for pid in (group / "cgroup.procs").read_text().split()}
    return {name for pid in pids for name in namespaces_of(Path("/proc", pid))} - namespaces_of(Path("/proc/self"))


@pytest.fixture
def other_lab(a_lab: Callable[..., Lab]) -> Iterator[Callable[[], tuple[subprocess.Popen[str], int]]]:
    """Labs that other processes own: each with its number."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-m", "tests.lab", "1"]
        process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        address = process.stdout.readline().split()[1]
        process.stdout.readline()
        return process, int(address.split(".")[2])

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_closed_lab_leaves_nothing(a_lab: Callable[..., Lab]) -> None:
    with a_lab(2) as lab:
        host = lab.host("host1")
        host.ssh(["sh", "-c", "nohup sleep 1357 >/dev/null 2>&1 &"])
        assert len(traces(lab.number)) > 8
        used = namespaces_in(lab.number)
        assert len(used) == 12
    lab.close()
    assert traces(lab.number) == []
    assert not used & namespaces()


def test_a_lab_that_fails_to_start_leaves_nothing(a_lab: Callable[..., Lab], capfd: pytest.CaptureFixture[str]) -> None:
    lab = a_lab(2, share={"/opt/x": Path("/no/such/folder")})
    with pytest.raises(RuntimeError, match="host1 did not start"), lab:
        pass
    assert "/no/such/folder" in capfd.readouterr().err
    assert traces(lab.number) == []


def test_a_lab_whose_owner_is_killed_cleans_itself_up(
    other_lab: Callable[[], tuple[subprocess.Popen[str], int]],
) -> None:
    owner, number = other_lab()
    used = namespaces_in(number)
    assert len(used) == 6
    assert traces(number) != []
    owner.kill()
    wait_until(lambda: traces(number) == [])  # by its janitor: nobody makes a new lab
    wait_until(lambda: not used & namespaces())


def test_a_new_lab_removes_what_a_dead_owner_and_a_dead_janitor_left(
    other_lab: Callable[[], tuple[subprocess.Popen[str], int]], a_lab: Callable[..., Lab]
) -> None:
    owner, number = other_lab()
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    (janitor,) = [pid for pid in children if b"leftovers" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(janitor), signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert traces(number) != []
    with a_lab(1) as lab:
        lab.host("host1").ssh(["true"])
        assert lab.number == number or traces(number) == []
    assert traces(number) == []


def test_a_lab_to_play_with_says_how_to_get_in_and_ends_when_told(
    other_lab: Callable[[], tuple[subprocess.Popen[str], int]],
) -> None:
    owner, number = other_lab()
    config = ClusterConfig.from_yaml(lab_leftovers.folder_of(number) / "cluster.yaml")
    assert [node.name for node in config.nodes] == ["host1"]
    owner.send_signal(signal.SIGINT)
    assert owner.wait(60) == 0
    assert traces(number) == []
