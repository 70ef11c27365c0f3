"""A grid of a user who may do nothing special: no root, no control groups, no real-time clock to set."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import distributed_grid
from tests.e2e.crashes.conftest import needs_root, one_line
from tests.support.processes import processes_naming
from tests.support.shell import GRID, wait_until

pytestmark = pytest.mark.e2e

NOBODY = 65534


class Nobody:
    """Types commands as a user without any rights, in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state_dir = home / "state"
        self.env = {"PATH": f"{Path(GRID[0]).parent}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8"}
        self._prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        opening = _way_in(home / "hold")
        if opening:
            self._prefix = ["unshare", "--mount", "sh", "-ec", f'{opening}; exec "$@"', "sh", *self._prefix]

    def __call__(self, *words: str, state_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(*GRID, *words, state_dir=state_dir)

    def run(self, *words: str, state_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = self.env | {"GRID_STATE_DIR": str(state_dir or self.state_dir)}
        return subprocess.run(
            [*self._prefix, *words], cwd=self.home, env=env, capture_output=True, text=True, timeout=60, check=False
        )


def _way_in(hold: Path) -> str:
    """What opens, for one command and all it starts, the folders that keep others from our interpreter."""
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, Path(distributed_grid.__file__).parent)}
    shut: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        outermost = [folder for folder in reversed(path.parents) if not folder.stat().st_mode & stat.S_IXOTH]
        if outermost:
            shut.setdefault(outermost[0], []).append(path)
    steps = []
    for folder, inside in shut.items():
        for number, path in enumerate(inside):
            place = shlex.quote(f"{hold}{number}")
            steps += [f"mkdir -p {place}", f"mount --bind {shlex.quote(str(path))} {place}"]
        steps.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(folder))}")
        for number, path in enumerate(inside):
            place = shlex.quote(str(path))
            steps += [f"mkdir -p {place}", f"mount --bind {shlex.quote(f'{hold}{number}')} {place}"]
    return "; ".join(steps)


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    needs_root("become another user")
    home = Path(tempfile.mkdtemp(prefix="grid-nobody-"))
    home.chmod(0o755)
    os.chown(home, NOBODY, NOBODY)
    user = Nobody(home)
    try:
        ready = user.run(sys.executable, "-c", "import os, distributed_grid.cli.main; print(os.getuid())")
        if ready.stdout != f"{NOBODY}\n":
            reason = f"another user cannot use this Python: {ready.stderr.strip()[-200:]}"
            pytest.skip(reason)
        yield user
        user("daemon", "stop")
        wait_until(lambda: not processes_naming(str(home)))
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(home)


def test_a_job_runs_pinned_as_the_user_who_asked(nobody: Nobody) -> None:
    script = "id -u; grep Cpus_allowed_list /proc/self/status; exit 3"
    done = nobody("run-shared", "-r", "cpu", "-a", "1", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (3, "")
    user, cores = done.stdout.splitlines()
    assert user == str(NOBODY)
    assert cores.split(":")[1].strip().isdigit(), f"not one core: {cores}"
    (daemon,) = [pid for pid in processes_naming(str(nobody.home)) if _is_daemon(pid)]
    assert Path(f"/proc/{daemon}").stat().st_uid == NOBODY
    jobs = json.loads(nobody("jobs", "list", "--json").stdout)
    assert [(job["user"], job["outcome"]) for job in jobs] == [("nobody", "exited")]


def _is_daemon(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"distributed_grid.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_a_memory_overrun_is_stopped_without_control_groups(nobody: Nobody) -> None:
    greedy = "import time\nhoard = b'x' * (400 << 20)\ntime.sleep(60)"
    done = nobody("run-shared", "-j", "greedy", "-r", "memory", "-a", "0.1", sys.executable, "-S", "-c", greedy)
    assert done.returncode == 137
    assert "over limit: used" in done.stderr
    assert "of 0.1 GB" in done.stderr
    job = json.loads(nobody("jobs", "show", "greedy", "--json").stdout)
    assert job["outcome"] == "over_limit"
    assert job["wall_seconds"] < 10
    kept = list(nobody.state_dir.glob("hosts/*/jobs/.control/*/groups.json"))
    assert kept == [], "it had control groups, so watching was not tested"
    modest = nobody("run-shared", "-r", "memory", "-a", "0.2", sys.executable, "-S", "-c", "b'x' * (50 << 20)")
    assert (modest.returncode, modest.stderr) == (0, "")


def test_somebody_elses_state_directory_is_refused_in_one_line(nobody: Nobody, tmp_path: Path) -> None:
    for mode in (0o700, 0o755):
        theirs = nobody.home / f"theirs-{mode:o}"
        theirs.mkdir()
        theirs.chmod(mode)
        said = one_line(nobody("status", state_dir=theirs))
        assert str(theirs) in said
