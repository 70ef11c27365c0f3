"""Explanation of a placement: recorded as numbers with every grant, put into sentences when somebody asks.

A choice is made from the state it was decided on and never looked up again.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.indexes.columns import WHOLE
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GB, WHOLE_GPU
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.number_text import counted, plain_number
from distributed_grid.scheduling.placement.confidence import confidence
from distributed_grid.scheduling.placement.placement import Placement, strategy_of
from distributed_grid.scheduling.placement.scores import CLASS_UNIT, priority_weight, room_of


class NodeScore(Struct, frozen=True, array_like=True):
    """A node as it stood: its score, its priority (`rank`) and what that added to the score (`weight`, -1 where it was
    not recorded), and what was free of what it lent."""

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


class Choice(Struct, frozen=True, omit_defaults=True):
    """The node that was chosen and those that came next, how sure that is, and what counted.

    `confidence` is in thousandths, as are its three factors. `fits` is among how many nodes it was chosen; `displaced`
    are the leases that make room, where there was none; `carved` the automatic leases that give a part of it.
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
    """A node that came second, and why."""

    node: str
    score: int
    why: str


class ScoreParts(Struct, frozen=True):
    """What a score was made of: the criterion that the strategy is named for, in words (empty: it has none), then the
    room and what the priority added, both as parts of a node."""

    node: str
    score: int
    criterion: str
    room: float
    priority: float


def choice_of(
    ledger: Ledger, request: Request, place: Placement, now: int, *, displaced: tuple[str, ...] = ()
) -> Choice:
    """The numbers behind a placement."""
    sure = confidence(ledger, request, place, now)
    return Choice(
        _node_score(ledger, place.node, place.score),
        strategy_of(ledger, request) if displaced else place.strategy,
        0 if displaced else place.fits,
        sure.whole,
        sure.margin,
        sure.freshness,
        sure.stay,
        sure.term_ms,
        tuple([_node_score(ledger, node, score) for node, score in place.runners_up]),
        place.preferred,
        request.target,
        request.group,
        tuple([node for node, _ in place.others]),
        displaced,
        tuple([lease_id for lease_id, _ in place.carved]),
    )


def _node_score(ledger: Ledger, node: str, score: int) -> NodeScore:
    lends, claims, known = ledger.lends(node), ledger.claims_on(node), ledger.nodes.get(node)
    return NodeScore(
        node,
        score,
        known.rank if known is not None else 0,
        lends.cpu_milli - claims.cpu_milli,
        lends.cpu_milli,
        lends.memory_bytes - claims.memory_bytes,
        lends.memory_bytes,
        sum([claims.free_milli(device) for device in lends.gpus]) if lends.gpus else 0,
        WHOLE_GPU * len(lends.gpus),
        priority_weight(ledger, node),
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
    """The runners-up, and why they were not chosen."""
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
        why = f"{second.node} is about as good, and the priority {first} of {best.node} weighs more than {other}"
        return [*lines, why, f"free there: {_room(best)}"]
    return [*lines, f"{best.node} {_ROOM.get(choice.strategy, 'has most room')}: {_room(best)} free"]


def _room_score(choice: Choice, one: NodeScore) -> float:
    """How good a node is by what is left of it, whatever its priority."""
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
    """What the strategy is named for, of one node: the upper part of its score."""
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
    """The part of the score above room and priority; 0 by strategies that are named for nothing."""
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
