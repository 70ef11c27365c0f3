"""Offers come from what is really idle: the owner's work withdraws them, the grid's own does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("own_cgroup")]
BUSY = [sys.executable, "-c", "while True: pass"]
CONFIG = """
nodes:
- name: here
  host: local
  thresholds: {cpu_percent_max: 85, cpu_min_cores: 0.1, memory_percent_max: 99, memory_min_gb: 0.1}
"""


@pytest.fixture
def owned(grid: Shell) -> Shell:
    """A machine whose owner comes first."""
    (grid.cwd / "owned.yaml").write_text(CONFIG)
    grid("status", "--config", "owned.yaml", check=0)
    return grid


@pytest.fixture
def owners_work() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def _offers_cpu(grid: Shell) -> bool:
    offers = grid.json("shared-status")["offers"]
    return any(offer["resource_type"] == "cpu" and offer["state"] == "open" for offer in offers)


def test_the_owners_work_withdraws_the_offer_and_its_end_brings_it_back(
    owned: Shell, owners_work: list[subprocess.Popen[bytes]]
) -> None:
    wait_until(lambda: _offers_cpu(owned), seconds=40)
    owners_work += [subprocess.Popen(BUSY) for _ in range(2)]
    wait_until(lambda: not _offers_cpu(owned), seconds=40)
    refused = owned("run-shared", "-w", "0", "true", check=1)
    assert refused.stderr.startswith("grid: No resource offers available: here: ")
    assert re.search(
        r"its owner uses .* % of the CPU \(limit 85 %\)|CPU .* % over the last minute, limit 85 %", refused.stderr
    )
    for process in owners_work:
        process.kill()
    wait_until(lambda: _offers_cpu(owned), seconds=40)


@pytest.mark.parametrize("own_cgroup", [2], indirect=True)
def test_the_grids_own_work_does_not_count_as_the_owners(owned: Shell) -> None:
    """With half the machine lent and kept busy, the other half is still offered.

    Were the job counted as the owner's work, nothing would be left to offer. Looking is work of the owner's, so
    it is done seldom.
    """
    wait_until(lambda: _offers_cpu(owned), seconds=40)
    owned.detach("-j", "busy", "-a", "1", "--timeout", "100", "--shell", "while :; do :; done")
    wait_until(lambda: owned.job("busy")["state"] == "running")
    wait_until(lambda: owned.observe("status")["nodes"][0]["cpu_percent"] > 45, seconds=40, pause=2)
    assert wait_until(lambda: _offers_cpu(owned), seconds=30, pause=2)
