"""Jobs of every kind beside owners who come and go: a node evicts a job once at most, and reruns none unasked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest

from tests.lab.clusters import Cluster
from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.lab.shared_machine import OWNER
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.alone]

NODES = ("gpu1", "gpu2")
SPIN = "import time\nuntil = time.monotonic() + %d\nwhile time.monotonic() < until: pass"
CHECKPOINT = "while :; do : > $GRID_CHECKPOINT_DIR/mark; sleep 1; done"
KINDS: tuple[tuple[str, ...], ...] = (
    ("-r", "cpu", "-a", "1", "--restartable", "python3", "-c", SPIN % 20),
    ("-r", "cpu", "-a", "1", "python3", "-c", SPIN % 20),
    ("-r", "memory", "-a", "0.2", "--restartable", "sleep", "30"),
    ("-r", "memory", "-a", "0.2", "sleep", "30"),
    ("-r", "cpu", "-a", "0.5", "--retries", "2", "python3", "-c", SPIN % 20),
    ("-r", "cpu", "-a", "0.5", "--timeout", "40", "sh", "-c", CHECKPOINT),
)
"""One job of each kind: cores, memory alone; restartable, with retries, with a checkpoint, with nothing of that."""
EVICTS = {"throttle": False, "pause": False, "evict": True, "notice_seconds": 0, "grace_seconds": 1}
"""The rules under which most is evicted: nothing is slowed down or paused first."""


@pytest.fixture
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    owned = {"thresholds": {"cpu_percent_max": 60, "memory_min_gb": 0.1}, "owner_policy": EVICTS}
    made = Cluster(shared_lab, tmp_path_factory.mktemp("evicted"), gpu1=owned, gpu2=owned)
    made.results("start", *NODES)
    wait_until(lambda: all(made.is_alive(name) for name in NODES), 60)
    yield made
    made.close()
    wait_until(lambda: all(is_calm(shared_lab.host(name)) for name in NODES), 60)


def is_calm(host: Host) -> bool:
    """Whether a host uses little of its cores over a second: the next test measures it."""
    before = host.groups.cpu_seconds()
    time.sleep(1)
    return host.groups.cpu_seconds() - before < 0.2


def visit(host: Host, seconds: float) -> None:
    """An owner who wants both cores for so long."""
    argv = ["python3", "-S", "-c", SPIN % round(seconds)]
    running = [host.popen(argv, user=OWNER) for _ in range(2)]
    for one in running:
        one.wait(timeout=seconds + 30)


def submit(grid: Cluster, kind: tuple[str, ...], number: int) -> str:
    words = ("-j", f"job-{number}", "--strategy", "spread", "--workdir", "none")
    grid("run-shared", "--detach", *words, *kind, check=0)
    return f"job-{number}"


def allows_rerun(kind: tuple[str, ...]) -> bool:
    return any(word in kind for word in ("--restartable", "--retries")) or CHECKPOINT in kind


@pytest.mark.parametrize(
    ("jobs", "seconds"), [(8, 28), pytest.param(50, 600, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])]
)
def test_no_job_is_evicted_twice_by_the_same_node_nor_rerun_unasked(
    cluster: Cluster, shared_lab: Lab, jobs: int, seconds: float
) -> None:
    kinds = dict(enumerate(islice(cycle(KINDS), jobs)))
    names = {submit(cluster, kind, number): kind for number, kind in kinds.items()}
    until = time.monotonic() + seconds
    hosts = cycle([shared_lab.host(name) for name in NODES])
    while time.monotonic() < until:
        visit(next(hosts), 8)
    rows = [cluster.job(name) for name in names]
    assert sum(_evictions(row).total() for row in rows), "no owner has taken anything back"
    for row in rows:
        assert all(count == 1 for count in _evictions(row).values()), row["attempts"]
        if not allows_rerun(names[row["job_id"]]):
            started = [attempt for attempt in row["attempts"] if attempt["started_at"]]
            assert len(started) <= 1, row["attempts"]
            assert not (row["state"] == "queued" and started), row


def _evictions(row: dict[str, Any]) -> Counter[str]:
    """How often each node has evicted a job that had started there."""
    taken = (one["node_id"] for one in row["attempts"] if one["outcome"] == "reclaimed" and one["started_at"])
    return Counter(taken)
