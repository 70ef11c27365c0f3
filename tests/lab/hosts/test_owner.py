"""The owner of a lab host comes back: its agent gives way by itself, and the control plane hears of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.lab.clusters import Cluster
from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.lab.shared_machine import OWNER
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.alone]

SPIN = "import os\nos.fork()\nwhile True: pass"
OWNERS_WORK = """
import sys, time
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until: pass
print(time.process_time())
"""


@pytest.fixture(scope="module")
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    marks = {"cpu_percent_max": 100}  # else nothing is lent for a minute after one test's owner was here
    made = Cluster(shared_lab, tmp_path_factory.mktemp("owner"), gpu2={"thresholds": marks})
    made.results("start", "gpu2")
    yield made
    made.close()


@pytest.fixture(scope="module")
def borrower(cluster: Cluster, shared_lab: Lab) -> Iterator[str]:
    """A job that keeps both cores of gpu2 busy."""
    words = ("--strategy", "node_specific", "-n", "gpu2", "-r", "cpu", "-a", "2", "--workdir", "none")
    wait_until(lambda: cluster.is_alive("gpu2"), 60)
    job_id = cluster.detach(*words, "python3", "-c", SPIN)
    yield job_id
    shared_lab.mend()
    cluster("jobs", "cancel", job_id, check=0)
    cluster("jobs", "wait", job_id, "--timeout", "60")


@pytest.fixture
def lending(cluster: Cluster, shared_lab: Lab, borrower: str) -> tuple[Cluster, Host, str]:
    """gpu2 with both of its cores lent to the job."""
    wait_until(lambda: cluster.is_alive("gpu2") and cluster.job(borrower)["state"] == "running", 60)
    time.sleep(2)  # it has had both cores for as long as an agent looks back
    return cluster, shared_lab.host("gpu2"), borrower


def owners_part(host: Host, seconds: float, processes: int = 2) -> float:
    """CPU share of an ordinary user of the host during this time.

    The host comes before whatever else runs on this machine, so that nothing slows its agent down.
    """
    shares = host.groups.path_of("cpu") / "cpu.shares"
    usual = shares.read_text()
    shares.write_text("262144")
    try:
        before = host.groups.cpu_seconds()
        argv = ["python3", "-S", "-c", OWNERS_WORK, str(seconds)]
        running = [host.popen(argv, user=OWNER, stdout=-1, text=True) for _ in range(processes)]
        used = sum(float(one.communicate(timeout=seconds + 30)[0]) for one in running)
        return used / (host.groups.cpu_seconds() - before)
    finally:
        shares.write_text(usual)


def test_an_owner_gets_the_machine_back_and_the_job_goes_on_afterwards(lending: tuple[Cluster, Host, str]) -> None:
    grid, host, job_id = lending
    assert owners_part(host, 4) > 0.6  # a second at most goes by before borrowed work gives way
    running = [host.popen(["python3", "-S", "-c", OWNERS_WORK, "25"], user=OWNER, stdout=-1) for _ in range(2)]
    try:
        wait_until(lambda: grid.job(job_id)["state"] == "paused", 20)
    finally:
        for one in running:
            one.kill()
            one.communicate()
    wait_until(lambda: grid.job(job_id)["state"] == "running", 20)
    before = host.groups.cpu_seconds()
    wait_until(lambda: host.groups.cpu_seconds() - before > 1.5)


def test_a_machine_that_is_declared_dedicated_works_on_beside_its_owner(lending: tuple[Cluster, Host, str]) -> None:
    grid, host, job_id = lending
    owned = grid.file.read_text()
    owners_part(host, 4)
    running = [host.popen(["python3", "-S", "-c", OWNERS_WORK, "60"], user=OWNER, stdout=-1) for _ in range(2)]
    try:
        wait_until(lambda: grid.job(job_id)["state"] == "paused", 20)
        grid.file.write_text(owned.replace("name: gpu2", "name: gpu2\n  dedicated: true"))
        assert "applied nodes.gpu2.dedicated of " in grid("config", "reload", check=0).stdout
        wait_until(lambda: grid.job(job_id)["state"] == "running", 20)
        assert all(one.poll() is None for one in running), "the owner works on"
    finally:
        for one in running:
            one.kill()
            one.communicate()
    grid.file.write_text(owned)
    grid("config", "reload", check=0)


def test_no_control_plane_is_needed_for_it(lending: tuple[Cluster, Host, str], shared_lab: Lab) -> None:
    _, host, _ = lending
    shared_lab.cut(host)
    assert owners_part(host, 4) > 0.6
