"""How a request wants its place chosen among those that fit."""

from __future__ import annotations

import enum

from distributed_grid.errors import BadInput


class Strategy(enum.StrEnum):
    """The ways of choosing; `scheduling/scores.py` says what each of them counts."""

    LOAD_BALANCED = "load_balanced"
    LOCAL_FIRST = "local_first"
    BEST_FIT = "best_fit"
    SPREAD = "spread"
    PERFORMANCE_OPTIMIZED = "performance_optimized"
    COST_OPTIMIZED = "cost_optimized"
    NODE_SPECIFIC = "node_specific"
    FRAGMENTATION_AWARE = "fragmentation_aware"

    @classmethod
    def parse(cls, word: str | Strategy) -> Strategy:
        """The strategy a word means, whatever its case; `-` and `_` are the same."""
        try:
            return cls(word.strip().lower().replace("-", "_"))
        except ValueError:
            raise BadInput(f"no strategy {word!r}: use one of {', '.join(cls)}") from None
