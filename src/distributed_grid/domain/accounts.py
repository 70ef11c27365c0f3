"""What a user has used of late, and how its jobs went: what fair shares and predictions are counted from."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct


class Account(Struct, frozen=True):
    """The use of one user up to `at_ms`, the older the less it counts (`scheduling/queue/fairness.py` keeps it).

    In millicore-seconds, MiB-seconds and milli-GPU-seconds, so that 64 bits are enough. `runs` are the last two run
    times of its jobs in milliseconds, the newest last; `broke_at_ms` is when one of its leases last ended later than
    had been said, `lifted_at_ms` when the oldest of its waiting last started after being owed its place (0: never).
    """

    kind: ClassVar[str] = "account"

    user: str
    at_ms: int
    cpu: int = 0
    memory: int = 0
    gpu: int = 0
    runs: tuple[int, ...] = ()
    broke_at_ms: int = 0
    lifted_at_ms: int = 0

    @property
    def key(self) -> str:
        return self.user

    @property
    def is_over(self) -> bool:
        return False
