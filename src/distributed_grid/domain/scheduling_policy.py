"""Scheduling policy of the grid: placement strategy, fair shares, quotas, starvation, preemption."""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.rows import Row
from distributed_grid.errors import BadInput


class Strategy(enum.StrEnum):
    """Placement strategies; `score_rows` in `scheduling/placement/placement.py` has the score of each."""

    LOAD_BALANCED = "load_balanced"
    LOCAL_FIRST = "local_first"
    BEST_FIT = "best_fit"
    SPREAD = "spread"
    PERFORMANCE_OPTIMIZED = "performance_optimized"
    COST_OPTIMIZED = "cost_optimized"
    NODE_SPECIFIC = "node_specific"
    FRAGMENTATION_AWARE = "fragmentation_aware"
    FITTEST = "fittest"

    @classmethod
    def parse(cls, word: str | Strategy) -> Strategy:
        """The strategy of this name, in any case; `-` and `_` are the same."""
        try:
            return cls(word.strip().lower().replace("-", "_"))
        except ValueError:
            raise BadInput(f"no strategy {word!r}: use one of {', '.join(cls)}") from None


HOUR_MS = 3_600_000


class Quota(Struct, frozen=True, kw_only=True):
    """The most one user, or the members of a team together, hold at once; None is "no limit"."""

    name: str
    members: tuple[str, ...] = ()
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    gpu_milli: int | None = None
    custom: tuple[tuple[str, int], ...] = ()
    leases: int | None = None

    def covers(self, user: str, team: str) -> bool:
        """Whether a user's leases count here: as its own, or as those of its team."""
        return user == self.name or user in self.members or (bool(team) and team == self.name)


class SchedulingPolicy(Row, frozen=True, kw_only=True):
    """Scheduling settings of the whole grid; the ledger has one row of them."""

    kind: ClassVar[str] = "policy"

    strategy: Strategy = Strategy.LOAD_BALANCED
    half_life_ms: int = 24 * HOUR_MS  # age at which past use counts half; 0: only present leases count
    weights: tuple[tuple[str, int], ...] = ()  # in thousandths
    quotas: tuple[Quota, ...] = ()
    reserve_after_ms: int = 30_000  # wait after which a request gets a reservation
    starvation_ms: int = 48 * HOUR_MS  # wait after which a request precedes all others
    minimum_run_ms: int = 1_000  # shorter runs are not preempted
    preemptions_max: int = 3  # a job that was preempted more often stays

    def weight_of(self, user: str, team: str = "") -> int:
        """Weight of a user in thousandths: by its own name, else by its team's, else 1000."""
        if not self.weights:
            return 1000
        weights = dict(self.weights)
        teams = (team, *(quota.name for quota in self.quotas if user in quota.members))
        return next((weights[name] for name in (user, *teams) if name in weights), 1000)
