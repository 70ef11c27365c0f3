"""Fairness: how equal the shares of three users are who ask very differently, each for more than a third.

Jain's index is 1 where all have the same and 1/n where one has everything. It is taken every hour over what each has
had of late (half of it forgotten after twelve hours), from the second day on; the table has the lowest of all.
"""

from __future__ import annotations

import random
import sys

from bench.sizes import sized
from bench.table import Line
from distributed_grid.domain.scheduling_policy import HOUR_MS, SchedulingPolicy
from distributed_grid.scheduling.queue.fairness import Shares
from tests.support.builders import a_node, a_request
from tests.support.workload import Workload, WorkloadJob

USERS = ("steady", "bursts", "large")
SEEDS = sized(range(10), smoke=range(1))
HOURS = sized(96, smoke=4)
SETTLED = sized(24, smoke=1)
BAR = 0.95


def measure() -> list[Line]:
    """The lowest index of ten runs of four days."""
    lowest = []
    for seed in SEEDS:
        found = indexes(seed, HOURS)
        lowest.append(min(found[SETTLED:]))
        print(f"  seed {seed}: lowest {lowest[-1]:.4f}, at the end {found[-1]:.4f}", file=sys.stderr)
    return [Line("Jain index of three users' decayed shares, lowest of any hour", min(lowest), BAR, "")]


def indexes(seed: int, hours: int) -> list[float]:
    """The index after each hour."""
    users, found = Users(seed), []
    for hour in range(hours):
        users.advance(hour)
        shares = Shares(users.traffic.ledger, users.traffic.now)
        found.append(jain([shares.recent(user) for user in USERS]))
    return found


def jain(values: list[float]) -> float:
    """1 where all have the same, 1/n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


class Users:
    """One asks steadily for little, one in bursts every eight hours, one for few things that are large and take long;
    each waits with some of it whenever it asks, so that nobody's share is small because it wants no more."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._number = 0
        self.traffic = Workload([a_node("n1", cores=32)], SchedulingPolicy(half_life_ms=12 * HOUR_MS), tick_ms=HOUR_MS)

    def advance(self, hour: int) -> None:
        """An hour more, in which everybody asks as it does."""
        dice, start, ledger = self._dice, hour * HOUR_MS, self.traffic.ledger
        waiting = [ledger.leases[lease_id].request.user for _, _, lease_id in ledger.waiting]
        for _ in range(24 - waiting.count("steady")):
            self._ask("steady", start + dice.randrange(HOUR_MS), dice.choice((1, 2)), dice.uniform(20, 60))
        for _ in range((hour % 8 == 0) * (60 - waiting.count("bursts"))):
            self._ask("bursts", start, dice.choice((2, 4, 6)), dice.uniform(20, 60))
        if waiting.count("large") < 2:
            self._ask("large", start, 16, dice.uniform(60, 180))
        self.traffic.run(start + HOUR_MS)

    def _ask(self, user: str, at_ms: int, cores: int, minutes: float) -> None:
        self._number += 1
        request = a_request(f"{user}{self._number}", user=user, cores=cores, wait_s=10**7)
        self.traffic.submit(WorkloadJob(at_ms, request, int(minutes * 60_000)))
