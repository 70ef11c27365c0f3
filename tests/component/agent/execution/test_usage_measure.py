"""One measure of every attempt: what its whole tree held at most at one moment, used and took."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from tests.component.agent.execution.conftest import Driver, python

MB = 1_000_000

TWO_WORKERS = f"""
import os, time
(is_full, full), (is_over, over) = os.pipe(), os.pipe()
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os.close(over)
        x = bytearray(b"x") * (60 * {MB})
        os.write(full, b"x")
        os.read(is_over, 1)
        os._exit(0)
    pids.append(pid)
for _ in pids:
    os.read(is_full, 1)
time.sleep(0.8)  # both hold theirs
os.close(over)
for pid in pids:
    os.waitpid(pid, 0)
"""

SHARED = f"""
import os, time
x = bytearray(b"x") * (80 * {MB})
pids = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.8)
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""

MAPPED = f"""
import mmap, os, time
with open("big", "wb") as file:
    for _ in range(120):
        file.write(b"x" * {MB})
with open("big", "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(mapped[at] for at in range(0, len(mapped), 4096))
    time.sleep(1.5)  # long enough to be read, beside other tests too
"""


@pytest.fixture(params=["no limit", "kernel limit", "polled limit"])
def limited(request: pytest.FixtureRequest, new_driver: Callable[..., Driver]) -> tuple[Driver, int]:
    """A host, and the limit of its attempts: whatever enforces it, the measure is the same."""
    driver = new_driver(use_cgroups=request.param == "kernel limit")
    return driver, 0 if request.param == "no limit" else 1000 * MB


def test_processes_count_together(limited: tuple[Driver, int]) -> None:
    driver, limit = limited
    ended = driver.run("a.1", *python(TWO_WORKERS), memory_bytes=limit)
    assert ended.exit_code == 0
    assert 120 * MB <= ended.max_memory_bytes <= 160 * MB


def test_a_page_that_several_share_counts_once(limited: tuple[Driver, int]) -> None:
    driver, limit = limited
    ended = driver.run("a.1", *python(SHARED), memory_bytes=limit)
    assert ended.exit_code == 0
    assert 80 * MB <= ended.max_memory_bytes <= 130 * MB


def test_the_contents_of_mapped_files_do_not_count(limited: tuple[Driver, int]) -> None:
    driver, limit = limited
    ended = driver.run("a.1", *python(MAPPED), memory_bytes=limit)
    assert ended.exit_code == 0
    assert ended.max_memory_bytes <= 60 * MB


def test_a_command_that_is_over_before_any_reading_is_measured_by_the_kernels_mark(driver: Driver) -> None:
    code = f"x = bytearray(b'x') * (90 * {MB})"
    ended = driver.run("a.1", sys.executable, "-I", "-S", "-c", code)
    assert ended.exit_code == 0
    assert 90 * MB <= ended.max_memory_bytes <= 125 * MB


def test_a_peak_between_two_readings_is_known_from_the_kernels_mark(driver: Driver) -> None:
    code = f"import time\ntime.sleep(0.3)\nx = bytearray(b'x') * (90 * {MB})\ndel x\ntime.sleep(0.3)"
    ended = driver.run("a.1", *python(code))
    assert 90 * MB <= ended.max_memory_bytes <= 115 * MB


def test_a_very_short_command_has_a_measure(driver: Driver) -> None:
    ended = driver.run("a.1", "true")
    assert 0 < ended.max_memory_bytes < 60 * MB
    assert ended.wall_ms < 1000
    assert ended.cpu_ms < 200


def test_an_attempt_whose_shim_was_killed_keeps_what_was_read(driver: Driver) -> None:
    code = f"x = bytearray(b'x') * (40 * {MB})\nwhile True: pass"
    driver.launch("a.1", *python(code))
    driver.until(lambda: driver.host.usage()["a.1"].memory_bytes > 40 * MB and driver.host.usage()["a.1"].cpu_ms > 50)
    os.kill(driver.shim_pid("a.1"), signal.SIGKILL)
    ended = driver.ended("a.1")
    assert ended.ending == "lost"
    assert ended.max_memory_bytes >= 40 * MB
    assert ended.cpu_ms > 50
    assert ended.wall_ms >= ended.cpu_ms // 2
