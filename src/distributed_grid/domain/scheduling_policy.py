"""Scheduling policy of the grid: placement strategy, fair shares, quotas, starvation, preemption."""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct

from distributed_grid.errors import BadInput


class Strategy(enum.StrEnum):
    """The ways of choosing; `score_rows` in `scheduling/placement/placement.py` has the score of each."""

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
        """The strategy a word means, whatever its case; `-` and `_` are the same."""
        try:
            return cls(word.strip().lower().replace("-", "_"))
        except ValueError:
            raise BadInput(f"no strategy {word!r}: use one of {', '.join(cls)}") from None


HOUR_MS = 3_600_000


class Quota(Struct, frozen=True):
    """The most one user, or the members of a team together, hold at once; None is "no limit"."""

    name: str
    members: tuple[str, ...] = ()
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    gpu_milli: int | None = None
    custom: tuple[tuple[str, int], ...] = ()
    leases: int | None = None

    def covers(self, user: str, team: str) -> bool:
        """Whether what this user holds counts here: the user's own, or one of a team it is in."""
        return user == self.name or user in self.members or (bool(team) and team == self.name)


class SchedulingPolicy(Struct, frozen=True):
    """Scheduling settings of the whole grid; the ledger has one.

    Past use counts half after `half_life_ms` (0: only what is held now counts). Weights are in thousandths. Who has
    waited for `reserve_after_ms` gets a reservation; who has waited for `starvation_ms` goes before everybody else.
    What has run for less than `minimum_run_ms`, or was displaced `preemptions_max` times, is not displaced.
    """

    kind: ClassVar[str] = "policy"

    strategy: Strategy = Strategy.LOAD_BALANCED
    half_life_ms: int = 24 * HOUR_MS
    weights: tuple[tuple[str, int], ...] = ()
    quotas: tuple[Quota, ...] = ()
    reserve_after_ms: int = 30_000
    starvation_ms: int = 48 * HOUR_MS
    minimum_run_ms: int = 1_000
    preemptions_max: int = 3

    @property
    def key(self) -> str:
        return self.kind

    @property
    def is_over(self) -> bool:
        return False

    def weight_of(self, user: str, team: str = "") -> int:
        """How much a user counts for, in thousandths: by its own name, else by its team's, else as everybody."""
        if not self.weights:
            return 1000
        weights = dict(self.weights)
        teams = (team, *(quota.name for quota in self.quotas if user in quota.members))
        return next((weights[name] for name in (user, *teams) if name in weights), 1000)
