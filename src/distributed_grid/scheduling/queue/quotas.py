"""What one user, or a team together, may hold at once.

Rule 1: what is held and what is asked for must stay within every quota that covers the request; a gang counts whole.
Rule 2: beyond it a request waits for what its own side holds, and nobody else waits for it.
Rule 3: a request larger than a quota itself can never be met and is refused at once.
"""

from __future__ import annotations

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import cores, gigabytes, gpus
from distributed_grid.domain.scheduling_policy import Quota

Excess = tuple[str, str, str]
"""What is held, the limit, and what is asked for, in words."""


class Quotas:
    """The quotas at one moment; what each covers is summed up once, when it is first asked about."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: dict[str, tuple[NodeClaims, int]] = {}

    def beyond(self, request: Request) -> str | None:
        """The quota that does not leave room for a request now, with numbers, or None."""
        for quota in self._ledger.policy.quotas:
            if quota.covers(request.user, request.team):
                over = _excess(quota, request, *self._held_under(quota))
                if over is not None:
                    return f"quota of {quota.name}: {over[0]} of {over[1]} held, {over[2]} asked"
        return None

    def _held_under(self, quota: Quota) -> tuple[NodeClaims, int]:
        found = self._held.get(quota.name)
        if found is None:
            held = [lease for lease in self._leases() if quota.covers(lease.request.user, lease.request.team)]
            found = NodeClaims(lease.claim for lease in held if lease.claim is not None), len(held)
            self._held[quota.name] = found
        return found

    def _leases(self) -> list[Lease]:
        ledger = self._ledger
        return [ledger.leases[lease_id] for ids in ledger.leases_by.values() for lease_id in ids]


def never_within(ledger: Ledger, request: Request) -> str | None:
    """The quota that a request exceeds all by itself, with numbers, or None."""
    for quota in ledger.policy.quotas:
        if quota.covers(request.user, request.team):
            over = _excess(quota, request, NodeClaims(), 0)
            if over is not None:
                return f"quota of {quota.name}: at most {over[1]}, {over[2]} asked"
    return None


def _excess(quota: Quota, request: Request, held: NodeClaims, leases: int) -> Excess | None:
    """The first resource of which this would be too much; a unit that is the same everywhere is named once."""
    ask, times = request.ask, request.gang
    for limit, before, asked, words in (
        (quota.cpu_milli, held.cpu_milli, ask.cpu_milli, cores),
        (quota.memory_bytes, held.memory_bytes, ask.memory_bytes, gigabytes),
        (quota.gpu_milli, sum(held.gpu_milli.values()), ask.gpu_milli, gpus),
    ):
        if limit is not None and asked and before + times * asked > limit:
            unit = words(limit).partition(" ")[2]
            return _short(words(before), unit), words(limit), _short(words(times * asked), unit)
    limits = dict(quota.custom)
    for name, asked in ask.custom:
        if name in limits and held.custom.get(name, 0) + times * asked > limits[name]:
            return str(held.custom.get(name, 0)), f"{limits[name]} {name}", str(times * asked)
    if quota.leases is not None and leases + times > quota.leases:
        return str(leases), f"{quota.leases} leases", str(times)
    return None


def _short(amount: str, unit: str) -> str:
    number, _, own = amount.partition(" ")
    return number if own.rstrip("s") == unit.rstrip("s") else amount
