"""Confidence of a placement: the probability that it is still right at the end of its term.

It is right while the owner of the node does not need back what was lent. The term is the stated length of the request,
else ten minutes. Confidence is the product of:

- margin: how clearly the node was better than the second best;
- freshness: how old the last heartbeat of the node is;
- stay: how the owner's use of the node has moved so far. Owners come back to CPU and GPU at once, to memory also step
  by step. Without thresholds on the node it is certain; without history the prior of an average owner is used.
"""

from __future__ import annotations

from math import erf, log, sqrt

from msgspec import Struct

from distributed_grid.domain.indexes.columns import WHOLE
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, OfferThresholds
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.statistics import UsageTrace
from distributed_grid.scheduling.offers.owner_activity import HALF_LIFE_MS, HOUR_MS, decay, rises_above
from distributed_grid.scheduling.placement.placement import Placement

DEFAULT_TERM_MS = 600_000
STALE_MS = 30_000
"""News so old is worth half."""

# Fitted by maximum likelihood on every other machine of a day of 1,052 (PlanetLab, 2011-03-03, CPU every 5 minutes,
# terms of 5 minutes to 4 hours); `python -m bench confidence` checks them on the others. The likelihood hardly differs
# between 3 and 8 hours, so of these a shorter one was taken: it learns sooner.
PRIOR_RETURNS_PER_HOUR = 0.009
"""How often the usual owner comes back."""
PRIOR_HOURS = 4.0
"""How many hours of watching one owner weigh as much as knowing the usual one."""

# Not fitted: those machines tell only of CPU, and how narrow a choice was says nothing about their owners.
MIN_MEMORY_DRIFT = 1.0
"""How much the memory of a sleeping machine drifts, as the variance after an hour; in thousandths of it, squared."""
EVICTION_PROBABILITY = 0.6
"""How likely it is this one that has to go for the owner's memory, where others hold memory, too. It is about what the
agent's rule did to the made-up owners of `tests/unit/scheduling/owner_traces.py`."""
MARGIN_WEIGHT = 0.005
"""How much less sure a choice is that could as well have been the second best."""

# How far an owner must come before the node's agent ends borrowed work for the CPU: the floor and the headroom of
# `agent/owner/yield_policy.py`, in thousandths of cores; a test compares.
FLOOR_MILLI = 50
HEADROOM_PART, HEADROOM_LEAST_MILLI, HEADROOM_MOST_MILLI = 120, 150, 2000

_DECAY_MS = HALF_LIFE_MS / log(2)


class Confidence(Struct, frozen=True):
    """How sure, and why; in thousandths, for a term."""

    margin: int
    freshness: int
    stay: int
    term_ms: int

    @property
    def whole(self) -> int:
        return round(self.margin * self.freshness * self.stay / 1_000_000)


def confidence(ledger: Ledger, request: Request, place: Placement, now: int) -> Confidence:
    """How sure the choice of a place is."""
    term_ms = term_of(request)
    certain, stay = freshness(ledger, place.node, now), stay_probability(ledger, request, place.node, now, term_ms)
    for node, _ in place.others:
        certain *= freshness(ledger, node, now)
        stay *= stay_probability(ledger, request, node, now, term_ms)
    narrow = 1 - MARGIN_WEIGHT * (1 - margin(place))
    return Confidence(round(1000 * narrow), round(1000 * certain), round(1000 * stay), term_ms)


def term_of(request: Request) -> int:
    """For how long a choice has to be right."""
    expected, term = request.expects_ms, request.duration_ms
    return min(expected or term, term or expected) or DEFAULT_TERM_MS


def margin(place: Placement) -> float:
    """How clearly the best was better than the second: 0 not at all, 1 as clearly as can be.

    What a strategy is named for is clear by itself; below that it is the part of a whole node that lies between the
    two, so that all strategies mean the same by it. Losses of usable GPU have no scale: less is less.
    """
    if not place.runners_up or place.preferred:
        return 1.0
    ahead = place.score - place.runners_up[0][1]
    scale = 1 if place.strategy is Strategy.FRAGMENTATION_AWARE else WHOLE
    return min(max(ahead / scale, 0.0), 1.0)


def freshness(ledger: Ledger, node: str, now: int) -> float:
    """How much the last heartbeat of a node still counts: half after `STALE_MS`."""
    seen = ledger.observations.get(node)
    age_ms = max(now - seen.at_ms, 0) if seen is not None else STALE_MS
    return 1 / (1 + (age_ms / STALE_MS) ** 2)


def stay_probability(ledger: Ledger, request: Request, name: str, now: int, term_ms: int) -> float:
    """The probability that the owner of a node leaves alone what is lent there, for a term from now on."""
    node, seen = ledger.nodes.get(name), ledger.observations.get(name)
    if node is None or seen is None or node.thresholds is None or seen.volatility is None:
        return 1.0
    ahead_ms = term_ms + max(now - seen.at_ms, 0)
    owner, limits = seen.volatility, node.thresholds
    likely = _no_return_probability(owner.cpu, cpu_mark(node), now, ahead_ms, usual=PRIOR_RETURNS_PER_HOUR)
    likely *= _memory_stay_probability(
        node, limits, owner.memory, (ledger.claims_on(name).memory_bytes, request), now, ahead_ms
    )
    if request.ask.gpu_milli and owner.gpu is not None:
        likely *= _no_return_probability(owner.gpu, float(limits.gpu_busy_max_milli), now, ahead_ms)
    return likely


def _no_return_probability(trace: UsageTrace, mark: float, now: int, ahead_ms: int, *, usual: float = 0.0) -> float:
    """That the use of a resource does not climb above a mark: by how often it did, in the time it was watched.

    The rate of coming back is not known; it is spread as a gamma distribution around what was seen. `usual` is the
    rate without history, told of CPU alone: an owner who comes back for anything uses that.
    """
    if trace.level >= mark:
        return 0.0
    watched = _DECAY_MS * (1 - decay(now - trace.since_ms)) / HOUR_MS + PRIOR_HOURS
    count = rises_above(trace, mark, now) + PRIOR_HOURS * usual
    return float((watched / (watched + ahead_ms / HOUR_MS)) ** count)


def _memory_stay_probability(
    node: Node, limits: OfferThresholds, trace: UsageTrace, lent: tuple[int, Request], now: int, ahead_ms: int
) -> float:
    """That nothing of this request has to go for the owner's memory; `lent` is what others hold there, and it.

    Beside others it is one of several, and who holds less than must be free is not worth ending.
    """
    others_hold, request = lent
    ask = request.ask.memory_bytes
    if others_hold and ask < limits.memory_min_bytes:
        return 1.0
    mark = memory_mark(node, limits, others_hold + ask)
    likely = _no_return_probability(trace, mark, now, ahead_ms) * _no_drift_probability(trace, mark, ahead_ms)
    return 1 - (1 - likely) * (EVICTION_PROBABILITY if others_hold else 1)


def _no_drift_probability(trace: UsageTrace, mark: float, ahead_ms: int) -> float:
    """That usage does not drift above a mark: a random walk with the recent variance."""
    wide = sqrt(2 * (trace.drift + MIN_MEMORY_DRIFT) * ahead_ms / HOUR_MS)
    return erf(max(mark - trace.level, 0.0) / wide)


def cpu_mark(node: Node) -> float:
    """The owner's use above which nothing is left for borrowed work, in thousandths of the node."""
    has = node.capacity.cpu_milli
    headroom = min(HEADROOM_MOST_MILLI, max(HEADROOM_LEAST_MILLI, has * HEADROOM_PART // 1000))
    return 1000 * (has - headroom - FLOOR_MILLI) / max(has, 1)


def memory_mark(node: Node, limits: OfferThresholds, lent_bytes: int) -> float:
    """The owner's use above which borrowed work is evicted for memory, were all that is lent used."""
    has = max(node.capacity.memory_bytes, 1)
    grown = min(has * limits.memory_used_max_milli // 1000, has - lent_bytes)
    return 1000 * max(has - limits.memory_min_bytes - lent_bytes, grown) / has
