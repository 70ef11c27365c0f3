"""Fair shares and quotas of users and teams.

A share is dominant-resource: the largest part of the grid's cores, memory and GPUs. Current claims count in full, past
usage decays by half after each half-life; between two changes the rate is constant, so the decayed sum has a closed
form. A user's entitlement is its weight (its own, else its team's) among all who hold something or wait. Up to
`EXACT_SHARE_USERS` users share exactly; with more, the entitlement is at least `MIN_SHARE` of the grid times the
relative weight, because exact parts would make nearly all wait for longer (docs/guide/fairness.md).

A quota limits what one user or team holds at once; a gang counts whole. A request beyond a quota waits for its own
side and blocks nobody; one larger than the quota itself is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from itertools import islice

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts, cores, gigabytes, gpus
from distributed_grid.domain.scheduling_policy import Quota
from distributed_grid.domain.states import LeaseEnd
from distributed_grid.domain.statistics import Account

MIB = 1024 * 1024
MAX_USAGE = 2**62  # upper bound of recorded usage: a row has to fit into 64 bits
RUNS_KEPT = 2  # run times that are remembered of a user

EXACT_SHARE_USERS = 3  # up to so many users share exactly
MAX_WAITING_USERS = 256
"""Users that only wait, and count in the entitlements: the mean weight of more is about the same."""
MIN_SHARE = 0.4  # least entitlement of a user, where there are more
EXCESS_STEPS = 10  # excess is counted in tenths of the grid

_OWN_ENDS = frozenset({LeaseEnd.RELEASED, LeaseEnd.EXPIRED, LeaseEnd.FAILED})
"""Ends after which the run time of a job counts; a preempted or lost one says nothing about it."""

Rates = tuple[int, int, int]  # millicores, MiB and milli-GPUs: what an account counts by the second


def rates(held: NodeClaims) -> Rates:
    gpu = sum(held.gpu_milli.values()) if held.gpu_milli else 0
    return held.cpu_milli, held.memory_bytes // MIB, gpu


def rates_of(ask: Amounts) -> Rates:
    return ask.cpu_milli, ask.memory_bytes // MIB, ask.gpu_milli


def decay_factors(elapsed_ms: int, half_life_ms: int) -> tuple[float, float]:
    """Factor of earlier usage, and weight in seconds of the rate since."""
    left = math.exp2(-elapsed_ms / half_life_ms)
    return left, half_life_ms / 1000 / math.log(2) * (1 - left)


def settle_account(
    ledger: Ledger, user: str, now: int, *, begins: Lease | None = None, over: Lease | None = None
) -> Account:
    """A user's account up to now, before its holdings change by a lease that `begins` or is `over`."""
    old = ledger.accounts.get(user) or Account(user=user, at_ms=now)
    policy = ledger.policy
    runs, overran_at_ms, promoted_at_ms = old.runs, old.overran_at_ms, old.promoted_at_ms
    if begins is not None and now - begins.asked_at_ms >= policy.starvation_ms:
        oldest = ledger.waiting_index.oldest_of(begins.request.user)
        if oldest is None or oldest[0] >= begins.asked_at_ms:  # no other of its user waits for longer
            promoted_at_ms = now
    if over is not None:
        if over.job and over.end in _OWN_ENDS:
            runs = (*runs, max(now - over.granted_at_ms, 1))[-RUNS_KEPT:]
        if overran_estimate(over, now):
            overran_at_ms = now
    elapsed_ms = now - old.at_ms
    if not policy.half_life_ms:
        return Account(
            user=user,
            at_ms=old.at_ms,
            cpu=0,
            memory=0,
            gpu=0,
            runs=runs,
            overran_at_ms=overran_at_ms,
            promoted_at_ms=promoted_at_ms,
        )
    if elapsed_ms <= 0:
        return Account(
            user=user,
            at_ms=old.at_ms,
            cpu=old.cpu,
            memory=old.memory,
            gpu=old.gpu,
            runs=runs,
            overran_at_ms=overran_at_ms,
            promoted_at_ms=promoted_at_ms,
        )
    left, seconds = decay_factors(elapsed_ms, policy.half_life_ms)
    cpu, memory, gpu = rates(ledger.held_by(user))
    return Account(
        user=user,
        at_ms=now,
        cpu=min(round(old.cpu * left + cpu * seconds), MAX_USAGE),
        memory=min(round(old.memory * left + memory * seconds), MAX_USAGE),
        gpu=min(round(old.gpu * left + gpu * seconds), MAX_USAGE),
        runs=runs,
        overran_at_ms=overran_at_ms,
        promoted_at_ms=promoted_at_ms,
    )


def overran_estimate(lease: Lease, now: int) -> bool:
    """True if a lease is held for longer than its stated length."""
    return bool(lease.request.expects_ms) and now - lease.granted_at_ms > lease.request.expects_ms


class Shares:
    """The shares of users at one moment, computed on first use; a newcomer counts as waiting."""

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
        """0 for a user below its entitlement, now and recently; else by how much it is above, in steps from 1 on."""
        excess = self._known.get((user, team))
        if excess is None:
            recent = self.recent(user)
            if self.is_exact and recent:  # among few users, the part of what they had together
                recent /= max(sum(self.recent(active_user) for active_user in self._active_users), recent)
            excess_share = max(self.held(user), recent) - self.part(user, team)
            excess = self._known[user, team] = 1 + int(EXCESS_STEPS * excess_share) if excess_share >= 0 else 0
        return excess

    def part(self, user: str, team: str = "") -> float:
        """Current entitlement of a user, as a part of the grid."""
        weight, users = max(self._ledger.policy.weight_of(user, team), 1), self._active_users
        exact = weight / max(sum(users.values()), weight)
        return exact if self.is_exact else exact * max(1.0, MIN_SHARE * len(users))

    @property
    def is_exact(self) -> bool:
        """True if few enough users hold or wait for something to share exactly."""
        return len(self._active_users) <= EXACT_SHARE_USERS

    @cached_property
    def _active_users(self) -> dict[str, int]:
        """Users with leases or waiting requests, with their weights."""
        ledger = self._ledger
        holding = [ledger.leases[next(iter(leases))] for leases in ledger.leases_by_user.values() if leases]
        requests = [lease.request for lease in holding]
        requests += [self._newcomer.request] if self._newcomer is not None else []
        waiting = list(islice(ledger.waiting_index.by_user.items(), MAX_WAITING_USERS))
        waiting.sort(key=lambda entry: entry[1][0])  # by priority and age of the first request; the last names the team
        teams = {user: ledger.leases[keys[-1][-1]].request.team for user, keys in waiting}
        teams |= {request.user: request.team for request in requests}
        return {user: max(ledger.policy.weight_of(user, team), 1) for user, team in teams.items()}

    def held(self, user: str) -> float:
        return self.size(rates(self._ledger.held_by(user)))

    def recent(self, user: str) -> float:
        """The decayed average part of the grid that a user held, whatever its weight."""
        half_life_ms, account = self._ledger.policy.half_life_ms, self._ledger.accounts.get(user)
        if account is None or not half_life_ms:
            return 0.0
        left, seconds = decay_factors(max(self._now - account.at_ms, 0), half_life_ms)
        before, held = (account.cpu, account.memory, account.gpu), rates(self._ledger.held_by(user))
        each = 1000 * math.log(2) / half_life_ms
        return self.size([each * (old * left + now * seconds) for old, now in zip(before, held, strict=True)])

    def size(self, amounts: Iterable[float]) -> float:
        """Largest part of the grid over the resources."""
        parts = [amount / total for amount, total in zip(amounts, self._totals, strict=True) if total]
        return max(parts, default=0.0)


Excess = tuple[str, str, str]  # what is held, the limit, and what is asked for, in words


class Quotas:
    """Quotas at one moment; claims are summed up on first use."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: dict[str, tuple[NodeClaims, int]] = {}
        self._admitted: dict[str, tuple[int, int, int, int]] = {}

    def admit(self, request: Request, count: int) -> int:
        """Number of these equal requests that fit into the quotas; they count as held from now on."""
        covering = [quota for quota in self._ledger.policy.quotas if quota.covers(request.user, request.team)]
        ask, times = request.ask, request.gang
        each = (times * ask.cpu_milli, times * ask.memory_bytes, times * ask.gpu_milli, times)
        for quota in covering:
            claims, leases = self._held_under(quota)
            held = (claims.cpu_milli, claims.memory_bytes, sum(claims.gpu_milli.values()), leases)
            limits = (quota.cpu_milli, quota.memory_bytes, quota.gpu_milli, quota.leases)
            admitted = self._admitted.get(quota.name, (0, 0, 0, 0))
            for limit, before, more, one in zip(limits, held, admitted, each, strict=True):
                if limit is not None and one:
                    count = min(count, max(limit - before - more, 0) // one)
        for quota in covering:
            admitted = self._admitted.get(quota.name, (0, 0, 0, 0))
            cpu, memory, gpu, leases = (more + count * one for more, one in zip(admitted, each, strict=True))
            self._admitted[quota.name] = cpu, memory, gpu, leases
        return count

    def exceeded(self, request: Request) -> str | None:
        """The quota that a request exceeds now, with numbers, or None."""
        for quota in self._ledger.policy.quotas:
            if quota.covers(request.user, request.team):
                over = _quota_excess(quota, request, *self._held_under(quota))
                if over is not None:
                    return f"quota of {quota.name}: {over[0]} of {over[1]} held, {over[2]} asked"
        return None

    def memory_left(self, request: Request) -> tuple[int, str] | None:
        """Bytes that the quotas leave for a request's user, and the quota that leaves least; None if none limits
        memory."""
        covering = (quota for quota in self._ledger.policy.quotas if quota.covers(request.user, request.team))
        left = [
            (max(quota.memory_bytes - self._held_under(quota)[0].memory_bytes, 0), quota.name)
            for quota in covering
            if quota.memory_bytes is not None
        ]
        return min(left, default=None)

    def _held_under(self, quota: Quota) -> tuple[NodeClaims, int]:
        found = self._held.get(quota.name)
        if found is None:
            leases = (self._ledger.leases[one] for ids in self._ledger.leases_by_user.values() for one in ids)
            held = [lease for lease in leases if quota.covers(lease.request.user, lease.request.team)]
            found = NodeClaims(lease.claim for lease in held if lease.claim is not None), len(held)
            self._held[quota.name] = found
        return found


def exceeds_quota_alone(ledger: Ledger, request: Request) -> str | None:
    """The quota that a request exceeds all by itself, with numbers, or None."""
    for quota in ledger.policy.quotas:
        if quota.covers(request.user, request.team):
            over = _quota_excess(quota, request, NodeClaims(), 0)
            if over is not None:
                return f"quota of {quota.name}: at most {over[1]}, {over[2]} asked"
    return None


def _quota_excess(quota: Quota, request: Request, held: NodeClaims, leases: int) -> Excess | None:
    """The first resource that is exceeded; a unit that is the same everywhere is named once."""
    ask, times = request.ask, request.gang
    for limit, before, asked, words in (
        (quota.cpu_milli, held.cpu_milli, ask.cpu_milli, cores),
        (quota.memory_bytes, held.memory_bytes, ask.memory_bytes, gigabytes),
        (quota.gpu_milli, sum(held.gpu_milli.values()), ask.gpu_milli, gpus),
    ):
        if limit is not None and asked and before + times * asked > limit:
            unit = words(limit).partition(" ")[2]
            return _bare_number(words(before), unit), words(limit), _bare_number(words(times * asked), unit)
    limits = dict(quota.custom)
    for name, asked in ask.custom:
        if name in limits and held.custom.get(name, 0) + times * asked > limits[name]:
            return str(held.custom.get(name, 0)), f"{limits[name]} {name}", str(times * asked)
    if quota.leases is not None and leases + times > quota.leases:
        return str(leases), f"{quota.leases} leases", str(times)
    return None


def _bare_number(amount: str, unit: str) -> str:
    number, _, own = amount.partition(" ")
    return number if own.rstrip("s") == unit.rstrip("s") else amount
