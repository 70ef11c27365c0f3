"""How eagerly the grid balances itself: the four policies by their names."""

from __future__ import annotations

import enum


class SharingPolicy(enum.StrEnum):
    """`policy:` in the config; `scheduling/policies.py` has the numbers behind each."""

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    PREDICTIVE = "predictive"

    @classmethod
    def _missing_(cls, value: object) -> SharingPolicy | None:
        folded = str(value).lower()
        return next((policy for policy in cls if policy.value == folded), None)
