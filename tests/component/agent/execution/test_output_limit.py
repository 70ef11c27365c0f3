"""Output limit: the newest output stays on the disk, and readers skip what was dropped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.attempt_files import AttemptFileReader, open_file, read_at
from distributed_grid.domain.jobs import Ending
from distributed_grid.wire import FileChunk, FileListing, ReadFile
from tests.component.agent.execution.conftest import Driver

MB = 1 << 20
FLOOD = "seq 10000000 15999999"
"""54 MB of lines of 9 bytes, so that each line says where it belongs."""
FLOOD_BYTES = 6_000_000 * 9
LIMIT = 4 * MB


def disk_bytes(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def test_a_flood_leaves_the_newest_output_on_the_disk(driver: Driver) -> None:
    ended = driver.run("a-1", "sh", "-c", FLOOD, max_output_bytes=LIMIT)
    assert (ended.ending, ended.exit_code) == ("exited", 0)
    file = driver.root / "a-1" / "stdout"
    assert file.stat().st_size == FLOOD_BYTES, "offsets stay valid"
    assert disk_bytes(file) <= LIMIT
    dropped = job_dir.dropped_output(str(driver.root), "a-1", "stdout")
    assert FLOOD_BYTES - LIMIT <= dropped <= FLOOD_BYTES - LIMIT * 15 // 16
    fd = open_file(str(driver.root), "a-1", b"stdout")
    try:
        start, data = read_at(str(driver.root), "a-1", b"stdout", fd, FLOOD_BYTES, 0)
    finally:
        os.close(fd)
    assert (start, len(data)) == (dropped, FLOOD_BYTES - dropped)
    expected = b"".join(b"%d\n" % number for number in range(10_000_000 + dropped // 9, 16_000_000))
    assert data == expected[dropped % 9 :]


def test_a_flood_is_bounded_while_the_command_runs(driver: Driver) -> None:
    driver.launch("a-1", "sh", "-c", f"{FLOOD} >&2; exec sleep 1000", max_output_bytes=LIMIT)
    file = driver.root / "a-1" / "stderr"
    driver.until(lambda: file.stat().st_size == FLOOD_BYTES and disk_bytes(file) <= LIMIT)
    driver.run_coroutine(driver.host.stop_attempt("a-1", ending=Ending.CANCELLED))
    assert driver.ended("a-1").ending == "cancelled"


def test_output_below_the_limit_is_kept_whole(driver: Driver) -> None:
    driver.run("a-1", "sh", "-c", "head -c 3000000 /dev/zero", max_output_bytes=LIMIT)
    assert disk_bytes(driver.root / "a-1" / "stdout") >= 3_000_000, "zeros that a command wrote are output"
    assert not (driver.root / job_dir.CONTROL / "a-1" / job_dir.DROPPED_OUTPUT).exists()


def test_a_reader_over_the_link_begins_behind_the_dropped_output(driver: Driver) -> None:
    driver.run("a-1", "sh", "-c", FLOOD, max_output_bytes=LIMIT)
    chunks: list[FileChunk] = []

    def receive(message: FileChunk | FileListing) -> None:
        assert isinstance(message, FileChunk)
        chunks.append(message)

    async def read() -> None:
        reader = AttemptFileReader(driver.root, receive)
        reader.received(ReadFile(stream=1, lease_id="a-1", name=b"stdout", offset=100, credit=1 << 30))
        while not chunks or chunks[-1].data:
            await asyncio.sleep(0.001)
        reader.close()

    driver.run_coroutine(read())
    dropped = job_dir.dropped_output(str(driver.root), "a-1", "stdout")
    assert chunks[0].at == dropped > 0
    assert sum(len(chunk.data) for chunk in chunks) == FLOOD_BYTES - dropped


@pytest.fixture
def disk_without_holes(tmp_path: Path) -> Iterator[Path]:
    """A file system that cannot return the head of a file."""
    place = tmp_path / "ramfs"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ramfs cannot be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_where_nothing_can_be_dropped_the_command_is_paused_and_then_ended(disk_without_holes: Path) -> None:
    driver = Driver(disk_without_holes / "jobs")
    ended = driver.run(
        "a-1", "sh", "-c", "head -c 9000000 /dev/zero; exec sleep 1000", max_output_bytes=LIMIT, grace_ms=300
    )
    assert (ended.ending, ended.is_disk_overrun) == ("over_limit", True), "no limit of its memory"
    # The writer may be paused before it has written everything.
    sized = re.search(
        r"its stdout has ([\d.]+) GB \(limit 0.00391 GB\), whose beginning cannot be dropped", ended.detail
    )
    assert sized is not None, ended.detail
    assert 0.00391 < float(sized[1]) <= 0.00838
    record = disk_without_holes / "jobs" / job_dir.CONTROL / "a-1" / job_dir.DROPPED_OUTPUT
    assert json.loads(record.read_text()) == {"stdout": 0, "stderr": 0}, "all output can be read"
    driver.finish()
