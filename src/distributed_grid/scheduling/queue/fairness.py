"""Who has had how much: dominant-resource shares with a memory that fades.

Rule 1: a user's share is the largest of its parts in the grid's cores, memory and GPUs; custom resources do not count.
Rule 2: what is held now counts in full; what was used counts as the rate it was used at, half as much after each
half-life. Between two changes a rate is constant, so the fading sum has a closed form and nothing has to tick.
Rule 3: a user's part is its weight (its own, else its team's) among the weights of all who hold something or wait.
Up to three of them share exactly: what they have had of late is compared with each other. With more, a part counts as
two fifths of the grid, or what its weight makes of that: exact parts would make nearly all wait for longer
(docs/fairness.md has the figures).
Rule 4: who holds its part, or has had it of late, is in excess of it, the more so the more it is beyond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from distributed_grid.domain.accounts import Account
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import LeaseEnd

MIB = 1024 * 1024
MOST = 2**62
"""Use beyond this counts as this: a row has to fit into 64 bits."""
RUNS = 2
"""So many run times of a user are remembered."""

FEW = 3
"""Among so many users parts are exact."""
ROOM = 0.4
"""The least part of the grid that is a user's, where there are more."""
STEPS = 10
"""Excess is counted in tenths of the grid."""

_OWN_ENDS = frozenset({LeaseEnd.RELEASED, LeaseEnd.EXPIRED, LeaseEnd.FAILED})
"""Ends by which a job says how long it takes; being displaced or lost says nothing about that."""

Rates = tuple[int, int, int]
"""Millicores, MiB and milli-GPUs: what an account counts by the second."""


def rates(held: NodeClaims) -> Rates:
    """How much is held."""
    gpu = sum(held.gpu_milli.values()) if held.gpu_milli else 0
    return held.cpu_milli, held.memory_bytes // MIB, gpu


def rates_of(ask: Amounts) -> Rates:
    """How much is asked for."""
    return ask.cpu_milli, ask.memory_bytes // MIB, ask.gpu_milli


def fading(elapsed_ms: int, half_life_ms: int) -> tuple[float, float]:
    """What is left of each unit used before, and how many seconds count of those since."""
    left = math.exp2(-elapsed_ms / half_life_ms)
    return left, half_life_ms / 1000 / math.log(2) * (1 - left)


def settled(ledger: Ledger, user: str, now: int, *, begins: Lease | None = None, over: Lease | None = None) -> Account:
    """A user's account up to now, before what it holds changes; `begins` or `over` is the lease of its that does."""
    old = ledger.accounts.get(user) or Account(user, now)
    policy = ledger.policy
    runs, broke_at_ms, lifted_at_ms = old.runs, old.broke_at_ms, old.lifted_at_ms
    if begins is not None and _is_owed(ledger, begins, now):
        lifted_at_ms = now
    if over is not None:
        if over.job and over.end in _OWN_ENDS:
            runs = (*runs, max(now - over.granted_at_ms, 1))[-RUNS:]
        if broke_its_word(over, now):
            broke_at_ms = now
    elapsed_ms = now - old.at_ms
    if not policy.half_life_ms:
        return Account(user, old.at_ms, 0, 0, 0, runs, broke_at_ms, lifted_at_ms)
    if elapsed_ms <= 0:
        return Account(user, old.at_ms, old.cpu, old.memory, old.gpu, runs, broke_at_ms, lifted_at_ms)
    left, seconds = fading(elapsed_ms, policy.half_life_ms)
    cpu, memory, gpu = rates(ledger.held_by(user))
    return Account(
        user,
        now,
        min(round(old.cpu * left + cpu * seconds), MOST),
        min(round(old.memory * left + memory * seconds), MOST),
        min(round(old.gpu * left + gpu * seconds), MOST),
        runs,
        broke_at_ms,
        lifted_at_ms,
    )


def _is_owed(ledger: Ledger, lease: Lease, now: int) -> bool:
    """Whether this one has waited beyond all patience, and no other of its user for longer."""
    if now - lease.asked_at_ms < ledger.policy.starvation_ms:
        return False
    waiting = (ledger.leases[lease_id] for _, _, lease_id in ledger.waiting)
    older = (one for one in waiting if one.request.user == lease.request.user and one.asked_at_ms < lease.asked_at_ms)
    return next(older, None) is None


def broke_its_word(lease: Lease, now: int) -> bool:
    """Whether a lease has been held for longer than was said of it."""
    return bool(lease.request.expects_ms) and now - lease.granted_at_ms > lease.request.expects_ms


class Shares:
    """The shares of users at one moment, each worked out when it is first asked for; a newcomer waits, too."""

    def __init__(self, ledger: Ledger, now: int, *, newcomer: Lease | None = None) -> None:
        self._ledger = ledger
        self._now = now
        self._newcomer = newcomer
        columns = ledger.columns
        self._totals = (
            int(columns.lends_cpu.sum()),
            int(columns.lends_memory.sum()) // MIB,
            1000 * int(columns.lends_gpus.sum()),
        )
        self._known: dict[tuple[str, str], int] = {}

    def excess(self, user: str, team: str = "") -> int:
        """0 for a user who has less than its part of the grid, now and of late; else by how much it has more."""
        excess = self._known.get((user, team))
        if excess is None:
            beyond = max(self.held(user), self._had(user)) - self.part(user, team)
            excess = self._known[user, team] = 1 + int(STEPS * beyond) if beyond >= 0 else 0
        return excess

    def part(self, user: str, team: str = "") -> float:
        """The part of the grid that a user with this weight is entitled to at the moment."""
        weight, users = max(self._ledger.policy.weight_of(user, team), 1), self._here
        exact = weight / max(sum(users.values()), weight)
        return exact if len(users) <= FEW else exact * max(1.0, ROOM * len(users))

    def _had(self, user: str) -> float:
        """What a user had of late: of the grid, and among few users of what they had together."""
        had = self.late(user)
        if len(self._here) > FEW:
            return had
        return had / max(sum(self.late(one) for one in self._here), had) if had else 0.0

    @cached_property
    def _here(self) -> dict[str, int]:
        """All who hold something or wait, with their weights."""
        ledger = self._ledger
        some = [lease_id for _, _, lease_id in ledger.waiting]
        some += [next(iter(leases)) for leases in ledger.leases_by.values() if leases]
        requests = [ledger.leases[lease_id].request for lease_id in some]
        requests += [self._newcomer.request] if self._newcomer is not None else []
        teams = {one.user: one.team for one in requests}
        return {user: max(ledger.policy.weight_of(user, team), 1) for user, team in teams.items()}

    def held(self, user: str) -> float:
        """The part of the grid that a user holds now, whatever its weight."""
        return self.size(rates(self._ledger.held_by(user)))

    def late(self, user: str) -> float:
        """The user's part of the grid of late, whatever its weight: 0.5 where it has always held half of it."""
        return self.size(self._average(user))

    def _average(self, user: str) -> tuple[float, float, float]:
        """What a user held on average, the later the more that counts."""
        half_life_ms, account = self._ledger.policy.half_life_ms, self._ledger.accounts.get(user)
        if account is None or not half_life_ms:
            return 0.0, 0.0, 0.0
        left, seconds = fading(max(self._now - account.at_ms, 0), half_life_ms)
        cpu, memory, gpu = rates(self._ledger.held_by(user))
        each = 1000 * math.log(2) / half_life_ms
        return (
            each * (account.cpu * left + cpu * seconds),
            each * (account.memory * left + memory * seconds),
            each * (account.gpu * left + gpu * seconds),
        )

    def size(self, amounts: Iterable[float]) -> float:
        """How large a part of the grid this is, in its largest resource."""
        parts = [amount / total for amount, total in zip(amounts, self._totals, strict=True) if total]
        return max(parts, default=0.0)
