"""Everybody is served in bounded time, whatever the others ask for."""

from __future__ import annotations

import random

import pytest

from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from tests.support.builders import a_node, a_request
from tests.support.workload import Workload, WorkloadJob

MINUTE_MS = 60_000
LONGEST_MS = 10 * MINUTE_MS
OTHERS = ("bob", "eve", "joe")
POLICY = SchedulingPolicy(starvation_ms=HOUR_MS)
BOUND_MS = POLICY.starvation_ms + (len(OTHERS) + 1) * (len(OTHERS) + 2) * LONGEST_MS
"""One of each user may be owed a place before, each within one `longest` for every user, as `line` says."""


def more_than_fits(traffic: Workload, seed: int, hours: int, **what: object) -> None:
    """The others ask for half as much again as there is, without end, each thing a few minutes long."""
    dice = random.Random(seed)
    for minute in range(60 * hours):
        for user in OTHERS:
            cores, minutes = dice.choice((1, 1, 1, 2)), dice.randrange(2, 11)
            if dice.random() < 0.5:
                request = a_request(f"{user}{minute}", user=user, cores=cores, wait_s=10**6, **what)  # type: ignore[arg-type]
                traffic.submit(WorkloadJob(minute * MINUTE_MS + dice.randrange(1000), request, minutes * MINUTE_MS))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"cores": 1, "priority": "low"}, {"priority": "high"}),
        ({"cores": 4, "priority": "low"}, {"priority": "medium"}),
        ({"cores": 4}, {"priority": "medium"}),
        ({"cores": 4}, {"priority": "high", "expects_ms": MINUTE_MS}),
        ({"cores": 4, "require": ["n2"]}, {"priority": "medium", "expects_ms": MINUTE_MS}),
    ],
    ids=["low", "low and big", "big", "big among liars", "on one node among liars"],
)
def test_every_waiting_request_is_served_within_the_bound(mine, theirs, seed):
    """On two nodes of four cores that are always full; some say one minute of everything, which takes up to ten."""
    traffic = Workload([a_node("n1", cores=4), a_node("n2", cores=4)], POLICY, tick_ms=MINUTE_MS)
    more_than_fits(traffic, seed, 5, **theirs)
    traffic.submit(WorkloadJob(20 * MINUTE_MS, a_request("mine", user="ann", wait_s=10**6, **mine), LONGEST_MS))
    for hour in range(1, 6):
        if "mine" not in traffic.starts:
            traffic.run(hour * HOUR_MS)
    assert "mine" in traffic.starts, "it never started"
    assert traffic.starts["mine"][0] - 20 * MINUTE_MS <= BOUND_MS
