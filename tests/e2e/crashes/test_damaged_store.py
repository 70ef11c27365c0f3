"""The store fails under a running daemon in a way that cannot pass: the daemon ends, and the next one goes on."""

from __future__ import annotations

import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.crashes.conftest import call, daemon_pid, places
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


def overwrite(database: Path, backup: Path) -> None:
    """Something else is written over the file and its log."""
    for path in (database, Path(f"{database}-wal")):
        with path.open("r+b") as file:
            file.write(b"\xff" * path.stat().st_size)


def replace(database: Path, backup: Path) -> None:
    """Another file takes its place, while the daemon still has the old one."""
    shutil.copy(backup, database.with_suffix(".new"))
    os.replace(database.with_suffix(".new"), database)


@pytest.mark.parametrize("damage", [overwrite, replace])
def test_a_daemon_whose_store_is_damaged_ends_and_the_next_one_recovers_everything(
    grid: Shell, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    job = grid.detach("-r", "cpu", "-a", "0.05", "sh", "-c", "echo $$; exec sleep 1000")
    asked = {"request_id": uuid.uuid4().hex, "resource_type": "cpu", "amount": 0.05}
    lease = call(grid, "request_lease", **asked)["allocation"]["allocation_id"]
    wait_until(lambda: grid.job(job)["state"] == "running" and grid("jobs", "logs", job).stdout.strip())
    pid, running = daemon_pid(grid), int(grid("jobs", "logs", job).stdout)
    database, backup = places(grid).database, tmp_path / "backup.db"
    with closing(sqlite3.connect(database)) as ledger, closing(sqlite3.connect(backup)) as copy:
        ledger.backup(copy)
    waiting = grid.start("jobs", "wait", job)

    damage(database, backup)
    grid("run-shared", "-r", "cpu", "-a", "0.05", "true")
    assert pid is not None
    wait_until(lambda: not is_running(pid))
    assert "the owner of the ledger cannot go on" in (grid.host_dir / "failure.txt").read_text()

    if damage is overwrite:
        _, told = waiting.communicate(timeout=30)
        assert waiting.returncode in (1, 3)  # it may have asked again before the daemon ended, and may have heard why
        assert (told[:6], told.count(b"\n")) == (b"grid: ", 1), told
        refused = grid("run-shared", "-r", "cpu", "-a", "0.05", "true", check=1)
        assert "is not a database; move it away to start afresh, or put a backup in its place" in refused.stderr
        for suffix in ("-wal", "-shm"):
            Path(f"{database}{suffix}").unlink(missing_ok=True)
        shutil.copy(backup, database)

    assert grid.job(job)["state"] == "running"
    assert is_running(running)
    assert lease in {one["allocation_id"] for one in call(grid, "get_status")["allocations"]}
    assert grid("run-shared", "-r", "cpu", "-a", "0.05", "echo", "as before", check=0).stdout == "as before\n"
    grid("jobs", "cancel", job, check=0)
    assert waiting.wait(30) != 0
