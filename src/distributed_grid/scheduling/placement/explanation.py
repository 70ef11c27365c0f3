"""Explanation of a placement, recorded as numbers with every grant, and its confidence.

A choice is made from the state it was decided on and never looked up again. Confidence is the probability that the
owner of the node leaves the lease alone until the end of the term: the stated length of the request, else ten minutes.
It is the product of:

- margin: how clearly the node was better than the second best;
- freshness: the age of the node's last heartbeat;
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
from distributed_grid.domain.resources import GB, WHOLE_GPU
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.statistics import UsageTrace
from distributed_grid.number_text import counted, plain_number
from distributed_grid.scheduling.offers.owner_activity import HALF_LIFE_MS, HOUR_MS, decay, rises_above
from distributed_grid.scheduling.placement.placement import CLASS_UNIT, Placement, priority_weight, room_of, strategy_of

DEFAULT_TERM_MS = 600_000
STALE_MS = 30_000  # news so old is worth half

# Fitted by maximum likelihood on every other machine of a day of 1,052 (PlanetLab, 2011-03-03, CPU every 5 minutes,
# terms of 5 minutes to 4 hours); `python -m bench confidence` checks them on the others. The likelihood hardly differs
# between 3 and 8 hours, so of these a shorter one was taken: it learns sooner.
PRIOR_RETURNS_PER_HOUR = 0.009  # how often the usual owner comes back
PRIOR_HOURS = 4.0  # how many hours of watching one owner weigh as much as knowing the usual one

# Not fitted: those machines tell only of CPU, and how narrow a choice was says nothing about their owners.
MIN_MEMORY_DRIFT = 1.0
"""How much the memory of a sleeping machine drifts, as the variance after an hour; in thousandths of it, squared."""
EVICTION_PROBABILITY = 0.6
"""How likely it is this one that has to go for the owner's memory, where others hold memory, too. It is about what the
agent's rule did to the made-up owners of `tests/unit/scheduling/owner_traces.py`."""
MARGIN_WEIGHT = 0.005  # how much less sure a choice is that could as well have been the second best

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
    term_ms = term_of(request)
    certain, stay = freshness(ledger, place.node, now), stay_probability(ledger, request, place.node, now, term_ms)
    for node, _ in place.others:
        certain *= freshness(ledger, node, now)
        stay *= stay_probability(ledger, request, node, now, term_ms)
    narrow = 1 - MARGIN_WEIGHT * (1 - margin(place))
    return Confidence(round(1000 * narrow), round(1000 * certain), round(1000 * stay), term_ms)


def term_of(request: Request) -> int:
    """Term for which a choice has to be right."""
    expected, term = request.expects_ms, request.duration_ms
    return min(expected or term, term or expected) or DEFAULT_TERM_MS


def margin(place: Placement) -> float:
    """Margin between the best and the second best node, from 0 (none) to 1.

    The strategy's own criterion decides with certainty. Below it the margin is a part of a whole node, so that all
    strategies mean the same by it. Losses of usable GPU have no scale: any loss less is certain.
    """
    if not place.runners_up or place.preferred:
        return 1.0
    ahead = place.score - place.runners_up[0][1]
    scale = 1 if place.strategy is Strategy.FRAGMENTATION_AWARE else WHOLE
    return min(max(ahead / scale, 0.0), 1.0)


def freshness(ledger: Ledger, node: str, now: int) -> float:
    """Weight of a node's last heartbeat: one half after `STALE_MS`."""
    seen = ledger.observations.get(node)
    age_ms = max(now - seen.at_ms, 0) if seen is not None else STALE_MS
    return 1 / (1 + (age_ms / STALE_MS) ** 2)


def stay_probability(ledger: Ledger, request: Request, name: str, now: int, term_ms: int) -> float:
    """Probability that the owner of a node leaves a lease there alone for a term from now on."""
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
    """Probability that the use of a resource stays below a mark, from its rises in the observed time.

    The unknown rate is a gamma distribution around the observed one. `usual` is the rate without history, for the CPU
    alone: owners use it for anything they come back for.
    """
    if trace.level >= mark:
        return 0.0
    watched = _DECAY_MS * (1 - decay(now - trace.since_ms)) / HOUR_MS + PRIOR_HOURS
    count = rises_above(trace, mark, now) + PRIOR_HOURS * usual
    return float((watched / (watched + ahead_ms / HOUR_MS)) ** count)


def _memory_stay_probability(
    node: Node, limits: OfferThresholds, trace: UsageTrace, lent: tuple[int, Request], now: int, ahead_ms: int
) -> float:
    """Probability that this request keeps its memory; `lent` is the memory held by others there, and the request.

    Beside others it is one of several candidates for eviction; less than the minimum of free memory is not evicted.
    """
    others_hold, request = lent
    ask = request.ask.memory_bytes
    if others_hold and ask < limits.memory_min_bytes:
        return 1.0
    mark = memory_mark(node, limits, others_hold + ask)
    # Probability that usage does not drift above a mark: a random walk with the recent variance.
    wide = sqrt(2 * (trace.drift + MIN_MEMORY_DRIFT) * ahead_ms / HOUR_MS)
    likely = _no_return_probability(trace, mark, now, ahead_ms) * erf(max(mark - trace.level, 0.0) / wide)
    return 1 - (1 - likely) * (EVICTION_PROBABILITY if others_hold else 1)


def cpu_mark(node: Node) -> float:
    """Owner's use that leaves nothing for borrowed work, in thousandths of the node."""
    has = node.capacity.cpu_milli
    headroom = min(HEADROOM_MOST_MILLI, max(HEADROOM_LEAST_MILLI, has * HEADROOM_PART // 1000))
    return 1000 * (has - headroom - FLOOR_MILLI) / max(has, 1)


def memory_mark(node: Node, limits: OfferThresholds, lent_bytes: int) -> float:
    """Owner's use above which borrowed work is evicted for memory, if all lent memory were used."""
    has = max(node.capacity.memory_bytes, 1)
    grown = min(has * limits.memory_used_max_milli // 1000, has - lent_bytes)
    return 1000 * max(has - limits.memory_min_bytes - lent_bytes, grown) / has


class NodeScore(Struct, frozen=True, array_like=True, kw_only=True):
    """Score and state of a node at the decision: its priority (`rank`), the priority's part of the score (`weight`, -1
    if not recorded), and the free and lent amounts."""

    node: str
    score: int
    rank: int
    cpu_free: int
    cpu_lends: int
    memory_free: int
    memory_lends: int
    gpu_free: int = 0
    gpu_lends: int = 0
    weight: int = -1


class Choice(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Chosen node, its runners-up, and the confidence.

    `confidence` and its three factors are in thousandths. `fits` counts the nodes that fit; `displaced` are the leases
    that make room; `carved` the automatic leases that give a part.
    """

    best: NodeScore
    strategy: Strategy
    fits: int
    confidence: int
    margin: int = 1000
    freshness: int = 1000
    stay: int = 1000
    term_ms: int = 0
    next: tuple[NodeScore, ...] = ()
    preferred: bool = False
    target: str = ""
    group: str = ""
    others: tuple[str, ...] = ()
    displaced: tuple[str, ...] = ()
    carved: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        return self.best.node


class RunnerUp(Struct, frozen=True):
    node: str
    score: int
    why: str


class ScoreParts(Struct, frozen=True):
    """Parts of a score: the strategy's criterion in words (empty: none), the room, and the priority's weight, both as
    parts of a node."""

    node: str
    score: int
    criterion: str
    room: float
    priority: float


def choice_of(
    ledger: Ledger, request: Request, place: Placement, now: int, *, displaced: tuple[str, ...] = ()
) -> Choice:
    sure = confidence(ledger, request, place, now)
    return Choice(
        best=_node_score(ledger, place.node, place.score),
        strategy=strategy_of(ledger, request) if displaced else place.strategy,
        fits=0 if displaced else place.fits,
        confidence=sure.whole,
        margin=sure.margin,
        freshness=sure.freshness,
        stay=sure.stay,
        term_ms=sure.term_ms,
        next=tuple([_node_score(ledger, node, score) for node, score in place.runners_up]),
        preferred=place.preferred,
        target=request.target,
        group=request.group,
        others=tuple([node for node, _ in place.others]),
        displaced=displaced,
        carved=tuple([lease_id for lease_id, _ in place.carved]),
    )


def _node_score(ledger: Ledger, node: str, score: int) -> NodeScore:
    lends, claims, known = ledger.lends(node), ledger.claims_on(node), ledger.nodes.get(node)
    return NodeScore(
        node=node,
        score=score,
        rank=known.rank if known is not None else 0,
        cpu_free=lends.cpu_milli - claims.cpu_milli,
        cpu_lends=lends.cpu_milli,
        memory_free=lends.memory_bytes - claims.memory_bytes,
        memory_lends=lends.memory_bytes,
        gpu_free=sum([claims.free_milli(device) for device in lends.gpus]) if lends.gpus else 0,
        gpu_lends=WHOLE_GPU * len(lends.gpus),
        weight=priority_weight(ledger, node),
    )


def reasoning(choice: Choice) -> tuple[str, ...]:
    """Why there, in short sentences with numbers."""
    best = choice.best
    lines = [_summary_line(choice)]
    if choice.preferred and not choice.carved:
        lines.append(f"{best.node} is preferred by the request")
    if choice.target and choice.strategy is not Strategy.LOCAL_FIRST:
        lines.append(f"it is for {choice.target}")
    if not choice.displaced and not choice.carved:
        lines += _deciding_factors(choice)
    if choice.others:
        lines.append(f"the other members of its gang are on {', '.join(choice.others)}")
    return (*lines, _confidence_line(choice))


def runners_up(choice: Choice) -> tuple[RunnerUp, ...]:
    return tuple(RunnerUp(one.node, one.score, _why_second(choice, one)) for one in choice.next)


def _summary_line(choice: Choice) -> str:
    if choice.displaced:
        count = len(choice.displaced)
        return f"nothing was free: {count} lease{' makes' if count == 1 else 's make'} room on {choice.node}"
    if choice.carved:
        return f"{choice.node} lends it already, to the node whose work it is: carved out of {', '.join(choice.carved)}"
    if choice.fits == 1:
        return f"{choice.node} is the only node that fits"
    return f"{choice.node} is the best of {choice.fits} nodes that fit, by {choice.strategy}"


def scores(choice: Choice) -> tuple[ScoreParts, ...]:
    """The scores that decided, the best first; none where leases make room, and in records that lack the parts."""
    compared = (choice.best, *choice.next)
    if choice.displaced or any(one.weight < 0 for one in compared):
        return ()
    return tuple(
        ScoreParts(
            one.node,
            one.score,
            _class_description(choice, one),
            round(room_of(one.score, one.weight, choice.strategy), 3),
            round(one.weight / WHOLE, 3),
        )
        for one in compared
    )


def _deciding_factors(choice: Choice) -> list[str]:
    best, second = choice.best, next(iter(choice.next), None)
    named = _class_description(choice, best)
    lines = [f"{best.node} {named}"] if named else []
    if second is None or _class(choice, second) != _class(choice, best) or choice.preferred:
        return [*lines, f"free there: {_room(best)}"]
    if _room_score(choice, second) > _room_score(choice, best):
        first, other = plain_number(best.rank / 1000), plain_number(second.rank / 1000)
        reason = f"{second.node} is about as good, and the priority {first} of {best.node} weighs more than {other}"
        return [*lines, reason, f"free there: {_room(best)}"]
    return [*lines, f"{best.node} {_ROOM.get(choice.strategy, 'has most room')}: {_room(best)} free"]


def _room_score(choice: Choice, one: NodeScore) -> float:
    """Room that is left on a node, without its priority."""
    return room_of(one.score, max(one.weight, 0), choice.strategy)


def _why_second(choice: Choice, one: NodeScore) -> str:
    best = choice.best
    if _class(choice, one) != _class(choice, best):
        return _class_description(choice, one)
    if one.score == best.score:
        return f"as good, but later in order: {_room(one)} free"
    if one.rank < best.rank and _room_score(choice, one) >= _room_score(choice, best):
        own, other = plain_number(one.rank / 1000), plain_number(best.rank / 1000)
        return f"about as good, but its priority {own} weighs less than {other}"
    return f"{_LESS.get(choice.strategy, 'less room')}: {_room(one)} free"


_ROOM = {
    Strategy.BEST_FIT: "is left with least",
    Strategy.COST_OPTIMIZED: "is left with least",
    Strategy.FRAGMENTATION_AWARE: "keeps most GPU usable",
    Strategy.FITTEST: "is fittest",
}
_LESS = {
    Strategy.BEST_FIT: "more would be left over",
    Strategy.COST_OPTIMIZED: "more would be left over",
    Strategy.FRAGMENTATION_AWARE: "more GPU would become useless",
    Strategy.FITTEST: "less fit",
}


def _class_description(choice: Choice, one: NodeScore) -> str:
    """The strategy's criterion for one node, from the upper part of its score."""
    number = _class(choice, one)
    if choice.strategy is Strategy.LOCAL_FIRST:
        what = f"the node it is for ({choice.target})" if choice.target else "the node it was submitted on"
        return f"is {what}" if number else f"is not {what}"
    if choice.strategy is Strategy.SPREAD:
        of = f" of group {choice.group}" if choice.group else ""
        return f"has {-number} lease{'' if number == -1 else 's'}{of}"
    if choice.strategy is Strategy.PERFORMANCE_OPTIMIZED:
        times = "" if number == 1000 else f"{plain_number(number / 1000)} times "
        return f"has {times}the usual speed to spare"
    if choice.strategy is Strategy.COST_OPTIMIZED:
        return f"costs {plain_number(-number / 1000)} an hour"
    return ""


def _class(choice: Choice, one: NodeScore) -> int:
    return one.score // CLASS_UNIT if choice.strategy in _HAVE_A_CLASS else 0


_HAVE_A_CLASS = frozenset(
    {Strategy.LOCAL_FIRST, Strategy.SPREAD, Strategy.PERFORMANCE_OPTIMIZED, Strategy.COST_OPTIMIZED}
)


def _room(one: NodeScore) -> str:
    parts = [f"{plain_number(max(one.cpu_free, 0) / 1000)} of {counted(one.cpu_lends / 1000, 'core')}"]
    parts.append(f"{max(one.memory_free, 0) / GB:.1f} of {one.memory_lends / GB:.1f} GB")
    if one.gpu_lends:
        parts.append(f"{plain_number(one.gpu_free / 1000)} of {counted(one.gpu_lends / 1000, 'GPU')}")
    return ", ".join(parts)


def _confidence_line(choice: Choice) -> str:
    term = duration(choice.term_ms)
    if choice.stay == 1000:
        return f"nobody takes it back within {term}: the node yields to no owner"
    return f"its owner will leave it alone for {term} with a probability of {plain_number(choice.stay / 10)} %"


def duration(ms: int) -> str:
    """A time in the largest unit that reads well."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms >= 2 * size or ms == size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 1000:.3g} s"
