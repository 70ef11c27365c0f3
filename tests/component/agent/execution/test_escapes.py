"""A job cannot excuse itself: whatever a process calls itself and wherever it moves, it stays part of its attempt."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.execution.cpu_control import Throttler
from distributed_grid.agent.limits import process_tree
from distributed_grid.domain.jobs import Ending
from distributed_grid.posix.boot_clock import boot_ms
from tests.component.agent.execution.conftest import BASE_ENV, Driver, a_spec, is_alive, is_hold_expired, python
from tests.support.processes import processes_naming
from tests.support.shell import GRID

pytestmark = pytest.mark.e2e
MB = 1 << 20
MEMORY_GROUP = Path("/sys/fs/cgroup/memory/cgroup.procs")
UNIFIED_GROUP = Path("/sys/fs/cgroup/cgroup.procs")
ROOT_GROUPS = (MEMORY_GROUP, MEMORY_GROUP.parents[1] / "cpu/cgroup.procs", UNIFIED_GROUP)
HOLD_MS = 3000

# Each starts "$@" in a way that might pass for something else than a part of the job.
ESCAPES = {
    **{f"role {role}": f'env GRID_ROLE={role} setsid "$@" &' for role in ("daemon", "spawner", "memory", "agent")},
    "session": 'setsid "$@" &',
    "environment": 'env -i setsid "$@" &',
    "name": '(exec -a raylet setsid "$@") &',
    "command line": "(exec -a 'python -m distributed_grid.server --state-dir x' \"$@\") &",
    "double fork": '(setsid sh -c \'"$@" &\' sh "$@" &) ;',
    "lock of its own": 'setsid flock own.lock "$@" &',
    "open lock": 'setsid "$@" 9<"$LOCK" &',
}
PAYLOAD = """
import ctypes, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).prctl(15, b"raylet", 0, 0, 0)
os.write(1, b"%d\\n" % os.getpid())
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]): time.sleep(0.01)
held = b"x" * (int(sys.argv[2]) << 20) if len(sys.argv) > 2 else b""
time.sleep(1000)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    """The instance lock of the grid, held by its daemon, which is this process."""
    path = tmp_path / "daemon.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


@pytest.fixture
def grid(new_driver: Callable[..., Driver], lock: Path) -> Driver:
    return new_driver(grid_locks=(lock,))


def escape_all(driver: Driver, lock: Path, *, then: str = "wait", **changes: object) -> list[int]:
    """Launch `a.1`, which tries every escape; the pids of those who did, and of the command."""
    script = f"LOCK={lock}; " + " ".join(ESCAPES.values()) + f" {then}"
    spec = a_spec("a.1", "/bin/bash", "-c", script, "sh", *python(PAYLOAD), grace_ms=300, **changes)
    driver.run_coroutine(driver.host.launch(spec))
    return printed(driver, driver.root / "a.1/stdout", len(ESCAPES))


def printed(driver: Driver, path: Path, count: int) -> list[int]:
    """The pids that were printed into a file, once there are so many; until then the hold is renewed."""

    def words() -> list[str]:
        return path.read_text().split() if path.exists() else []

    driver.until(lambda: renewed(driver) and len(words()) >= count)
    return [int(word) for word in words()]


def renewed(driver: Driver) -> bool:
    driver.host.extend_hold(boot_ms() + HOLD_MS)
    return True


@pytest.mark.parametrize("kind", ["cancelled", "preempted", "reclaimed"])
def test_no_escape_from_a_stop(grid: Driver, lock: Path, kind: str) -> None:
    pids = escape_all(grid, lock)
    assert grid.stop("a.1", ending=kind).ending == kind
    assert [pid for pid in pids if is_alive(pid)] == []


def test_no_escape_from_a_hold(grid: Driver, lock: Path) -> None:
    pids = escape_all(grid, lock, hold_ms=HOLD_MS)
    assert is_hold_expired(grid.ended("a.1"))
    assert [pid for pid in pids if is_alive(pid)] == []


def test_no_escape_from_the_end_of_the_command(grid: Driver, lock: Path) -> None:
    pids = escape_all(grid, lock, then="sleep 1; exit 6")
    assert grid.ended("a.1").exit_code == 6
    assert [pid for pid in pids if is_alive(pid)] == []


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_no_escape_from_a_pause(grid: Driver, lock: Path) -> None:
    pids = escape_all(grid, lock)
    throttler = Throttler(grid.host)
    throttler.pause()
    grid.until(lambda: {state_of(pid) for pid in pids} == {"T"})  # one that runs on another core stops a moment later
    throttler.resume()
    grid.stop("a.1")


@pytest.mark.parametrize("spawner_too", [False, True], ids=["shim", "shim and spawner"])
def test_no_escape_by_killing_the_shim(grid: Driver, lock: Path, spawner_too: bool) -> None:
    pids = escape_all(grid, lock)
    grid.until(lambda: grid.host.usage()["a.1"].memory_bytes > 0)
    shim = grid.shim_pid("a.1")
    if spawner_too:
        os.kill(grid.host.spawner_pid, signal.SIGKILL)
    os.kill(shim, signal.SIGKILL)
    assert grid.ended("a.1").ending == "lost"
    grid.until(lambda: not any(map(is_alive, pids)))


def test_no_escape_by_stopping_the_shim(grid: Driver, lock: Path) -> None:
    pids = escape_all(grid, lock, then='kill -STOP "$PPID"; wait', timeout_ms=3000)
    for _ in range(20):
        grid.pass_time(0.2)
        grid.host.usage()  # as with every heartbeat
    assert grid.ended("a.1").ending == "timed_out"
    assert [pid for pid in pids if is_alive(pid)] == []


@pytest.mark.parametrize("use_cgroups", [True, False], ids=["cgroups", "watched"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_no_escape_from_the_memory_limit(
    new_driver: Callable[..., Driver], lock: Path, escape: str, use_cgroups: bool
) -> None:
    driver = new_driver(grid_locks=(lock,), use_cgroups=use_cgroups)
    script = f"LOCK={lock}; {ESCAPES[escape]} wait; sleep 1000"
    argv = ("/bin/bash", "-c", script, "sh", *python(PAYLOAD), "/", "200")
    assert driver.run("a.1", *argv, memory_bytes=100 * MB).ending == "over_limit"
    assert not any(map(is_alive, driver.numbers("a.1", 1)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may move to any control group")
@pytest.mark.parametrize("how", ["moved", "raised"])
def test_no_escape_from_the_memory_limit_through_control_groups(grid: Driver, tmp_path: Path, how: str) -> None:
    root_group = MEMORY_GROUP if MEMORY_GROUP.exists() else UNIFIED_GROUP
    if not root_group.exists():
        pytest.skip("there are no control groups here")
    go, groups = tmp_path / "go", grid.root / ".control/a.1/groups.json"
    grid.run_coroutine(grid.host.launch(a_spec("a.1", *python(PAYLOAD), str(go), "200", memory_bytes=100 * MB)))
    (pid,) = grid.numbers("a.1", 1)
    if not groups.exists():
        pytest.skip("control groups cannot be used here")
    group = Path(next(iter(process_groups(groups))))
    if how == "moved":
        root_group.write_text(str(pid))
    elif (group / "memory.max").exists():
        (group / "memory.max").write_text("max")
    else:
        for name in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes"):
            if (group / name).exists():
                (group / name).write_text("-1")
    go.touch()
    assert grid.ended("a.1").ending == "over_limit"
    assert not is_alive(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may move to any control group")
@pytest.mark.parametrize("how", ["cancelled", "preempted", "reclaimed", "hold_expired", "lost"])
def test_no_escape_from_a_stop_through_control_groups(grid: Driver, how: str) -> None:
    """The command and what it has sent to a session of its own have left the job's groups."""
    script = 'setsid "$@" & (setsid "$@" &); exec "$@"'
    argv = ("/bin/bash", "-c", script, "sh", *python(PAYLOAD))
    spec = a_spec("a.1", *argv, memory_bytes=1000 * MB, cpu_milli=500, grace_ms=300, hold_ms=hold_for(how))
    grid.run_coroutine(grid.host.launch(spec))
    pids = printed(grid, grid.root / "a.1/stdout", 3)
    if not (grid.root / ".control/a.1/groups.json").exists():
        pytest.skip("control groups cannot be used here")
    for pid, root_group in itertools.product(pids, ROOT_GROUPS):
        if root_group.exists():
            root_group.write_text(str(pid))
    assert not any("grid-" in Path(f"/proc/{pid}/cgroup").read_text() for pid in pids)
    assert end_by(grid, how) == how
    grid.until(lambda: not any(map(is_alive, pids)))


def hold_for(how: str) -> int:
    """The hold of an attempt that is to end in this way; 0: none."""
    return HOLD_MS if how == "hold_expired" else 0


def end_by(driver: Driver, how: str) -> str:
    """Have `a.1` end in this way; as what it has ended."""
    if how == "lost":
        os.kill(driver.shim_pid("a.1"), signal.SIGKILL)
    elif how not in ("hold_expired", "over_limit"):
        driver.run_coroutine(driver.host.stop_attempt("a.1", ending=Ending(how)))
    outcome = driver.ended("a.1")
    return "hold_expired" if is_hold_expired(outcome) else str(outcome.ending)


def process_groups(file: Path) -> list[str]:
    return [path for _, path in json.loads(file.read_text())]


def test_a_group_made_inside_the_jobs_group_is_removed_with_it(grid: Driver) -> None:
    script = (
        'for g in /sys/fs/cgroup/memory$(sed -n "s/^[0-9]*:memory://p" /proc/self/cgroup); do mkdir "$g/mine"; done'
    )
    ended = grid.run("a.1", "/bin/sh", "-c", script, memory_bytes=100 * MB)
    assert ended.ending == "exited"  # the fixture finds what is left of its groups


# ---------------------------------------------------------------------- another grid


@pytest.mark.parametrize("how", ["cancelled", "reclaimed", "hold_expired", "over_limit"])
def test_another_grid_inside_a_job_is_part_of_it(grid: Driver, tmp_path: Path, how: str) -> None:
    """Its daemon holds a lock, leads a session and has jobs in control groups of its own: all of it is this job's."""
    state, go = tmp_path / "nested", tmp_path / "go"
    inner = (*GRID, "run-shared", "--detach", "-a", "0.1", *python(PAYLOAD), str(go), "500")
    env = BASE_ENV | {"GRID_STATE_DIR": str(state), "HOME": str(tmp_path)}
    argv = ("/bin/sh", "-c", '"$@" >&2; exec sleep 1000', "sh", *inner)
    spec = a_spec("a.1", *argv, env=env, memory_bytes=400 * MB, grace_ms=300, hold_ms=hold_for(how))
    grid.run_coroutine(grid.host.launch(spec))
    grid.until(lambda: renewed(grid) and list(state.glob("hosts/*/jobs/*/stdout")))
    (stdout,) = state.glob("hosts/*/jobs/*/stdout")
    payload = printed(grid, stdout, 1)
    pids = processes_naming(str(state))
    assert payload[0] in pids
    assert len(pids) >= 4  # its daemon, spawner, a shim and the payload
    if how == "over_limit":
        go.touch()
    assert end_by(grid, how) == how
    grid.until(lambda: not any(map(is_alive, pids)))


# ---------------------------------------------------------------------- who is exempt


def test_the_holder_of_this_grids_lock_and_what_it_started_are_left_alone(
    new_driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """It, and what it started, live on; the job does not wait for it, not even within its memory limit."""
    lock = tmp_path / "daemon.lock"
    driver = new_driver(grid_locks=(lock,))
    for attempt_id, memory in (("a.1", 0), ("a.2", 1 << 30)):
        script = f"setsid flock -x {lock} sh -c 'sleep 1000 & echo $PPID $$ $!; wait' & sleep 0.5; exit 6"
        ended = driver.run(attempt_id, "/bin/sh", "-c", script, memory_bytes=memory)
        pids = driver.numbers(attempt_id, 3)
        try:
            assert (ended.ending, ended.exit_code) == ("exited", 6)
            assert all(map(is_alive, pids))
        finally:
            for pid in pids:
                os.kill(pid, 9)
            driver.until(lambda pids=pids: not any(map(is_alive, pids)))


def test_the_command_itself_is_never_exempt(new_driver: Callable[..., Driver], tmp_path: Path) -> None:
    lock = tmp_path / "daemon.lock"
    driver = new_driver(grid_locks=(lock,))
    hold = f"import fcntl, os, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(os.getpid())"
    driver.launch("a.1", *python(f"{hold}\nimport sys; sys.stdout.flush(); time.sleep(1000)"))
    (pid,) = driver.numbers("a.1", 1)
    assert process_tree.held_locks(pid) != set()
    assert driver.stop("a.1").ending == "cancelled"
    assert not is_alive(pid)


def test_a_shared_lock_exempts_nobody(new_driver: Callable[..., Driver], tmp_path: Path) -> None:
    lock = tmp_path / "daemon.lock"
    driver = new_driver(grid_locks=(lock,))
    driver.launch("a.1", "/bin/sh", "-c", f"setsid flock -s {lock} sh -c 'echo $PPID $$; sleep 1000' & wait")
    pids = driver.numbers("a.1", 2)
    driver.stop("a.1")
    assert not any(map(is_alive, pids))


# ---------------------------------------------------------------------- forged records


def test_a_forged_list_of_groups_kills_nobody(grid: Driver, tmp_path: Path) -> None:
    grid.launch("a.1", "sleep", "1000")
    bystander = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    shim = grid.shim_pid("a.1")
    for name in ("anything", f"grid-a.1.{shim}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text(f"{bystander}\n")
    forged = f'[[1, "{tmp_path}/anything"], [2, "{tmp_path}/grid-a.1.{shim}"]]'
    (grid.root / ".control/a.1/groups.json").write_text(forged)
    os.kill(shim, signal.SIGKILL)
    assert grid.ended("a.1").ending == "lost"
    try:
        assert is_alive(bystander)
    finally:
        (grid.root / ".control/a.1/groups.json").unlink()
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)
