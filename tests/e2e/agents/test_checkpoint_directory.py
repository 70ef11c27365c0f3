"""The checkpoint directory of a job all the way: the next attempt finds the files of the last one, wherever it runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarGrid
from tests.support.shell import wait_until

pytestmark = pytest.mark.e2e
Make = Callable[..., FarGrid]
SUMS = """
cd "$GRID_CHECKPOINT_DIR" || exit 9
[ -e latest/state ] && read n sum < latest/state || { n=0; sum=0; mkdir -p step "it's
empty"; ln -s "$PWD/step" latest; chmod 700 step; }
set -- "$1" *; echo "$GRID_NODE from $n of $(($# - 1)) entries"
until [ -e "$1" ]; do
  n=$((n + 1)); sum=$((sum + n))
  echo "$n $sum" > step/.new && mv step/.new step/state && touch "$GRID_CHECKPOINT"
  sleep 0.05
done
echo "sum of $n is $sum"
"""


def submitted(grid: FarGrid, *words: str) -> str:
    """A job that adds up its steps, until `finish`."""
    ask = ("-r", "cpu", "-a", "1", "--workdir", "none")
    return grid.detach(*ask, *words, "sh", "-c", SUMS, "sh", str(grid.cwd.parent / "end"))


def finish(grid: FarGrid, job: str) -> list[int]:
    """Let the job finish; the steps from which its attempts began. Its sum is right."""
    (grid.cwd.parent / "end").touch()
    assert grid("jobs", "wait", job, timeout=60).returncode == 0
    *starts, last = grid("jobs", "logs", job, check=0).stdout.splitlines()
    _, _, n, _, total = last.split()
    assert int(total) == int(n) * (int(n) + 1) // 2
    assert all(line.endswith("of 3 entries") for line in starts)
    return [int(line.split()[2]) for line in starts]


def steps_in(folder: Path) -> int:
    """How many steps the attempt that has its files there has saved."""
    try:
        return int((folder / "checkpoints" / "step" / "state").read_text().split()[0])
    except (OSError, IndexError):
        return 0


def attempt_folder(grid: FarGrid, job: str) -> Path | None:
    """Where the running attempt has its files."""
    found = grid.job(job)
    if found["state"] != "running":
        return None
    attempt = found["attempts"][-1]
    node = attempt["node_id"]
    root = grid.agents[node].folder / "jobs" if node in grid.agents else grid.host_dir / "jobs"
    return Path(root / attempt["allocation_id"])


def until_saved(grid: FarGrid, job: str, more: int = 3) -> int:
    """Let the running attempt save some steps; which the last was."""
    folder = wait_until(lambda: attempt_folder(grid, job), 40)
    first = steps_in(folder)
    return int(wait_until(lambda: (n := steps_in(folder)) >= first + more and n, 40))


def test_it_follows_the_job_from_node_to_node_through_a_crash_of_the_control_plane(far_grid: Make) -> None:
    grid = far_grid("gpu2", "gpu3")
    job = submitted(grid, "-n", "gpu2")
    saved = [until_saved(grid, job)]
    visited = [grid.job(job)["node_id"]]
    for _ in range(2):  # from far to far, and between far and here
        grid("resource-sharing", "cooldown", "--node", visited[-1], check=0)
        wait_until(lambda: attempt_folder(grid, job) and grid.job(job)["node_id"] not in visited, 40)
        visited.append(grid.job(job)["node_id"])
        saved.append(until_saved(grid, job))
    assert set(visited) == {"gpu2", "gpu3", "here"}
    grid("resource-sharing", "cooldown", "--node", visited[0], "--off", check=0)
    grid("resource-sharing", "cooldown", "--node", visited[2], "--wait", "0")
    wait_until(lambda: len(grid.job(job)["attempts"]) > 3 or grid.job(job)["checkpoint"]["awaited_attempt"], 20)
    grid.kill_daemon()
    until_saved(grid, job)
    assert grid.job(job)["node_id"] == visited[0]
    wait_until(lambda: "2 files, " in grid("jobs", "show", job, check=0).stdout)  # it may be on its way
    begun = finish(grid, job)
    assert begun[0] == 0
    assert all(before <= n for before, n in zip(saved, begun[1:], strict=True)), (saved, begun)
    wait_until(lambda: not [*(grid.host_dir / "checkpoints").glob("??/*")])


def test_a_lost_node_that_comes_back_in_time_brings_it_along_and_nobody_waits_who_can_start_elsewhere(
    far_grid: Make,
) -> None:
    grid = far_grid("gpu2", "gpu3", hold=3)
    loyal = submitted(grid, "--retries", "1", *grid.on("gpu2"))
    free = submitted(grid, "--retries", "1", "-n", "gpu2")
    saved = until_saved(grid, loyal)
    until_saved(grid, free)
    assert grid.job(free)["node_id"] == "gpu2"
    agent = grid.agents["gpu2"].process
    assert agent is not None
    agent.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: grid.job(loyal)["state"] == "queued", 40)
        wait_until(lambda: grid.job(free)["attempts"][-1]["node_id"] == "gpu3", 40)
        until_saved(grid, free)
    finally:
        agent.send_signal(signal.SIGCONT)
    until_saved(grid, loyal)
    first, second = finish(grid, loyal)
    assert first == 0
    assert second >= saved
    assert finish(grid, free) == [0, 0]
