"""One job's output cannot fill the disk of all: the newest is kept, readers skip the rest and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e
MB = 1 << 20
LIMIT = 10 * MB
LINES = 10_000_000
FLOOD = f"seq 10000000 {10_000_000 + LINES - 1}"
"""90 MB in lines of 9 bytes."""


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def capped(grid: Shell, tmp_path: Path) -> Shell:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"nodes: [{{name: desk, host: local}}]\nmax_output_gb: {LIMIT / 2**30}\n")
    grid("--config", str(config), "daemon", "start", check=0)
    return grid


def test_a_flood_is_kept_to_its_limit_and_its_newest_lines_are_shown(capped: Shell) -> None:
    other = capped("run-shared", "--detach", "sh", "-c", "echo begin; sleep 1000", check=0).stdout.strip()
    flood = capped("run-shared", "--detach", "sh", "-c", f"{FLOOD}; echo last; sleep 1000", check=0).stdout.strip()

    def flooded() -> bool:
        sizes = [(file.stat().st_size, disk_bytes(file)) for file in capped.state_dir.glob("**/jobs/*/stdout")]
        return any(size == 9 * LINES + 5 and on_disk <= LIMIT for size, on_disk in sizes)

    wait_until(flooded)

    shown = capped("jobs", "logs", flood, check=0)
    dropped = 9 * LINES + 5 - len(shown.stdout)
    message = f"grid: {dropped} bytes of its stdout were dropped: a node keeps the newest output (max_output_gb)\n"
    assert shown.stderr == message
    assert LIMIT // 2 < len(shown.stdout) <= LIMIT
    lines = shown.stdout.splitlines()
    first = 10_000_000 + LINES - len(lines) + 2
    assert lines[1:] == [*map(str, range(first, 10_000_000 + LINES)), "last"]
    assert capped("jobs", "logs", "--tail", "14", flood, check=0).stdout == f"{9_999_999 + LINES}\nlast\n"

    assert capped("jobs", "logs", other, check=0).stdout == "begin\n"
    assert capped.job(other)["state"] == "running"
    capped("jobs", "cancel", flood, other, check=0)


def test_a_follower_of_a_flood_counts_what_was_dropped_once(capped: Shell) -> None:
    shown = capped("run-shared", "sh", "-c", f"{FLOOD}; echo last", check=0)
    notes = [line for line in shown.stderr.splitlines() if "were dropped" in line]
    dropped = sum(int(line.split()[1]) for line in notes)
    assert len(shown.stdout) + dropped == 9 * LINES + 5
    assert shown.stdout.endswith(f"{9_999_999 + LINES}\nlast\n")
    assert "\0" not in shown.stdout, "a hole is never shown as output"
