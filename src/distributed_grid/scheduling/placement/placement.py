"""Placement: filters, then scores, then the exact claim on the best node.

Only open nodes (alive, with a fresh offer) are considered. Constraints (required nodes, labels, affinity) come first,
then room, preferred nodes, and the score of the strategy. An affinity names nodes, jobs or groups of requests; those
that hold nothing are nowhere. A gang gets as many different nodes as it has members, or none.

Scores are one integer per node and strategy, higher is better. The strategy's own criterion comes first: being local,
being spread, speed, cost. Below that it is the part of the node, or of its GPUs, that is left, in millionths. The
priority that its owner gave a node is a weight on top: at most a tenth of a node, so it decides among nodes that are
about equally good. Equal scores go to the first row.

The fitness is 0 where a node does not fit, from a half for an exact fit up towards 1 for plenty of room: `1 - m / 2`,
where m is the mean of `asked / free` over the resources that the task asks for. It depends on free amounts alone, so a
node with more of everything free is never less fit for the same task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import THOUSANDTH, WHOLE, FreeColumns
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import NodeKind, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, Claim
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.scheduling.placement.fragmentation import TOTAL_WEIGHT, fragmentation_index, shape_of
from distributed_grid.scheduling.placement.machine_limits import crowded_nodes

Scores = NDArray[np.int64]
PRIORITY_WEIGHT = WHOLE // 10  # what the highest priority of all nodes adds; the others add their part of it
OFFSET = 10 * WHOLE  # keeps what is below a class positive
CLASS_UNIT = 10**10  # above any room and weight: the room everything has below what a strategy is named for
GPU_LOSS = 1000 * TOTAL_WEIGHT  # the loss of a whole GPU that every typical request could have used
SPEED_STEP = 50  # unused speeds that differ by less, in thousandths of the usual speed, are about equal
MAX_LOSS = 2**34
"""Above any loss on one node, which is below 2**33 (`fragmentation.TOTAL_WEIGHT`); stands for an infinite one."""
MAX_CACHED_ASKS = 64  # requests whose part of each node is cached
MAX_RANK = 10**12


def score_rows(ledger: Ledger, request: Request, strategy: Strategy) -> Scores:
    columns, terms = ledger.columns, _score_terms(ledger)
    match strategy:
        case Strategy.BEST_FIT:
            return _best_fit(ledger, request)
        case Strategy.COST_OPTIMIZED:  # the lowest cost; then as best fit, so that costly nodes run empty
            return -columns.cost * CLASS_UNIT + _best_fit(ledger, request)
        case Strategy.FITTEST:  # the highest fitness, with the priority as a weight
            return terms.base + fitness_rows(ledger, request.ask)
        case Strategy.FRAGMENTATION_AWARE:  # for typical requests; before any GPU request, the fewest GPUs left
            if ledger.request_shapes.weights:
                losses = fragmentation_index(ledger).losses(shape_of(request.ask))
                return terms.gpu_weight - np.minimum(losses, MAX_LOSS).astype(np.int64)
            return terms.gpu_weight - columns.gpu_left * (GPU_LOSS // 1000)
        case Strategy.LOCAL_FIRST:
            # The node it is for, else the one it was typed on; where that is not known the head on this machine, or any
            # node on it where the head is elsewhere.
            named = request.target or request.origin
            near = columns.mask_of((named,)) if named else columns.home
            if not named and not near.any():
                near = columns.local
            return near * np.int64(CLASS_UNIT) + _balanced(ledger, request)
        case Strategy.SPREAD:  # the fewest leases of the same group, or of anybody where it is in none
            count = columns.leases
            if request.group:
                count = np.zeros(len(columns.open), dtype=np.int64)
                for lease_id in ledger.groups.get(request.group, ()):
                    count[columns.rows[ledger.leases[lease_id].node]] += 1
            return -count * CLASS_UNIT + _balanced(ledger, request)
        case Strategy.PERFORMANCE_OPTIMIZED:  # the most unused speed
            speed = columns.speed * np.maximum(1000 - columns.busy, 0) // (1000 * SPEED_STEP)
            return speed * (SPEED_STEP * CLASS_UNIT) + _balanced(ledger, request)
        case Strategy.LOAD_BALANCED | Strategy.NODE_SPECIFIC:
            return _balanced(ledger, request)


def priority_weight(ledger: Ledger, node: str) -> int:
    """Weight of a node's priority in its score, in millionths of a node."""
    return int(_score_terms(ledger).weight.item(ledger.columns.rows[node]))


def room_of(score: int, weight: int, strategy: Strategy) -> float:
    """Room in a score without class and priority, as parts of the node added up; negative for strategies that prefer
    little room or little loss of GPU."""
    if strategy is Strategy.FRAGMENTATION_AWARE:
        return (score - weight * GPU_LOSS // WHOLE) / GPU_LOSS
    return (score % CLASS_UNIT - OFFSET - weight) / WHOLE


def _balanced(ledger: Ledger, request: Request) -> Scores:
    """The most room left afterwards, in parts of the node's offer: large nodes take more than small ones. GPUs count
    only for requests with GPUs. Leases for another node come from nodes under low pressure."""
    columns = ledger.columns
    room = columns.slack + _score_terms(ledger).without(request.ask)
    if request.ask.gpu_milli:
        room += columns.gpu_whole * 1000 // np.maximum(columns.lends_gpus, 1) * THOUSANDTH
    return room - columns.pressure * THOUSANDTH if request.target else room


def _best_fit(ledger: Ledger, request: Request) -> Scores:
    """The least that is left afterwards, CPU and GPU alike, as parts of the largest node that is there."""
    columns, ask, terms = ledger.columns, request.ask, _score_terms(ledger)
    left = (columns.cpu - ask.cpu_milli) * 4000 // terms.most_cpu
    left += (columns.gpu_left - ask.gpu_milli) * 4000 // terms.most_gpu
    return terms.base - left * (WHOLE // 4000)


def fitness_rows(ledger: Ledger, ask: Amounts) -> Scores:
    """The fitness of every row that has room, in millionths, by the columns; other rows have some number."""
    columns = ledger.columns
    asked = ((ask.cpu_milli, columns.cpu), (ask.memory_bytes, columns.memory), (ask.gpu_milli, columns.gpu_left))
    parts = [amount / np.maximum(free, 1) for amount, free in asked if amount]
    taken = sum(parts) / len(parts) if parts else np.zeros(len(columns.open))
    return WHOLE - (np.minimum(taken, 1.0) * (WHOLE // 2)).astype(np.int64)


def fitness_of(ask: Amounts, lends: Capacity, claims: NodeClaims) -> float:
    """Fitness of a node by its capacity and its claims."""
    if claims.claim_for(ask, lends) is None:
        return 0.0
    pairs = [
        (ask.cpu_milli, lends.cpu_milli - claims.cpu_milli),
        (ask.memory_bytes, lends.memory_bytes - claims.memory_bytes),
        (ask.gpu_milli, sum(claims.free_milli(device) for device in lends.gpus) if ask.gpu_milli else 0),
    ]
    taken = [asked / free for asked, free in pairs if asked]
    return 1 - sum(taken) / max(len(taken), 1) / 2


class _ScoreTerms(Struct, frozen=True):
    """Score terms that depend on the rows of nodes alone: weights of priorities, maxima, and the part of each node that
    a request takes.

    Leases and offers do not change them, so they are cached (`Ledger.cached`). Do not write to them.
    """

    columns: FreeColumns
    version: tuple[int, int]
    weight: Scores
    base: Scores
    gpu_weight: Scores
    most_cpu: int
    most_gpu: int
    known: dict[Amounts, Scores]

    def without(self, ask: Amounts) -> Scores:
        """The weights of priorities, less the parts (at most 1000 thousandths of each resource) that an ask takes."""
        known = self.known.get(ask)
        if known is None:
            if len(self.known) == MAX_CACHED_ASKS:
                self.known.clear()
            columns = self.columns
            cpu = np.minimum(1000 * ask.cpu_milli // np.maximum(columns.lends_cpu, 1), 1000)
            memory = np.minimum(ask.memory_bytes // np.maximum(columns.lends_memory // 1000, 1), 1000)
            gpu = np.minimum(ask.gpu_milli // np.maximum(columns.lends_gpus, 1), 1000)
            known = self.known[ask] = self.base - (cpu + memory + gpu) * THOUSANDTH
        return known


def _score_terms(ledger: Ledger) -> _ScoreTerms:
    columns, known = ledger.columns, ledger.cached(_ScoreTerms)
    version = (columns.layout, columns.terms)
    if known is None or known.version != version:
        rank = np.minimum(columns.rank, MAX_RANK)
        weight = PRIORITY_WEIGHT * rank // max(int(rank.max(initial=1)), 1)
        most_cpu = max(int(columns.lends_cpu.max(initial=1)), 1)
        most_gpu = 1000 * max(int(columns.lends_gpus.max(initial=1)), 1)
        gpu_weight = weight * GPU_LOSS // WHOLE
        known = ledger.cache(_ScoreTerms(columns, version, weight, weight + OFFSET, gpu_weight, most_cpu, most_gpu, {}))
    return known


Mask = NDArray[np.bool_]


def fitting_rows(ledger: Ledger, ask: Amounts) -> Mask:
    """The rows with room by their columns, which do not know GPU memory and custom resources."""
    columns = ledger.columns
    mask = columns.open & (columns.cpu >= ask.cpu_milli)
    if ask.memory_bytes:
        mask &= columns.memory >= ask.memory_bytes
    if ask.gpu_milli >= WHOLE_GPU:
        mask &= columns.gpu_whole >= ask.gpu_milli // WHOLE_GPU
    elif ask.gpu_milli:
        mask &= columns.gpu_part >= ask.gpu_milli
    if ask.gpu_models:
        mask &= columns.has_model(ask.gpu_models)
    return mask


def allowed_rows(ledger: Ledger, request: Request) -> Mask | None:
    """The rows that meet the constraints of a request; None is all."""
    # Kind of node: a task goes to a pull worker that is asking for one, a reservation to any.
    columns = ledger.columns
    mask: Mask | None
    if not ledger.pull_nodes and request.runs_on is not NodeKind.PULL:
        mask = None
    elif request.runs_on is NodeKind.AGENT:
        mask = ~columns.pull
    elif request.task:
        mask = columns.pull.copy() if request.runs_on is NodeKind.PULL else None
    else:
        able = columns.pull & columns.asking
        mask = able if request.runs_on is NodeKind.PULL else able | ~columns.pull
    if request.starts_without_cores and ledger.columns.keeps_cpu.any():
        mask = _intersect(mask, ~ledger.columns.keeps_cpu)
    if request.closed:
        mask = _intersect(mask, ~ledger.columns.mask_of(node for node, _ in request.closed))
    if not (request.require or request.labels or request.affinity or request.anti_affinity):
        return mask
    for names in (request.require, *(ledger.labelled(*label) for label in request.labels)):
        if names or names is not request.require:
            mask = _intersect(mask, ledger.columns.mask_of(names))
    for name in request.affinity:
        nodes = ledger.nodes_of(name)
        mask = _intersect(mask, ledger.columns.mask_of(nodes))
        if not nodes:
            return mask
    apart_from = {node for name in request.anti_affinity for node in ledger.nodes_of(name)}
    return _intersect(mask, ~ledger.columns.mask_of(apart_from)) if apart_from or mask is None else mask


def _intersect(one: Mask | None, other: Mask) -> Mask:
    return other if one is None else one & other


def unmet_constraint(ledger: Ledger, request: Request, node: str) -> str | None:
    return Constraints(ledger, request).unmet(node)


MAX_NODES_NAMED = 10  # nodes that one reason names


class Constraints:
    """Constraints of a request at one moment; each name is looked up once. `lasting`: without an owner's current use
    and recent evictions."""

    def __init__(self, ledger: Ledger, request: Request, *, lasting: bool = False) -> None:
        self._ledger = ledger
        self._request = request
        self._lasting = lasting
        self._required = frozenset(request.require)

    @cached_property
    def _near_to(self) -> list[tuple[str, set[str]]]:
        """Names of the affinity, each with its nodes."""
        return [(name, self._ledger.nodes_of(name)) for name in self._request.affinity]

    @cached_property
    def _apart_from(self) -> dict[str, str]:
        """The nodes that are excluded, each with the first name that excludes it."""
        excluded: dict[str, str] = {}
        for name in self._request.anti_affinity:
            for node in self._ledger.nodes_of(name):
                excluded.setdefault(node, name)
        return excluded

    def unmet(self, node: str) -> str | None:
        """The constraint that a node does not meet, as text, or None."""
        ledger, request = self._ledger, self._request
        is_pull = node in ledger.pull_nodes
        if is_pull and request.runs_on is NodeKind.AGENT:
            return "a pull worker, which only runs tasks"
        if not is_pull and request.runs_on is NodeKind.PULL:
            return "not a pull worker, and the task has no command"
        if request.require and node not in self._required:
            return f"not one of the required nodes ({_listed(request.require)})"
        for key, value in request.labels:
            if node not in ledger.labelled(key, value):
                return f"has no label {key}={value}" if value else f"has no label or tag {key}"
        for name, nodes in self._near_to:
            if not nodes:
                return f"nothing of {name} is running that it could be near to"
            if node not in nodes:
                return f"{name} is on {_listed(sorted(nodes))}"
        here = self._apart_from.get(node)
        if here is not None:
            if here == node == request.target:
                return "it is the borrower"
            return "it must not be here" if here == node else f"{here} is here, and it must not be near to that"
        if is_pull and node not in ledger.asking_nodes and not request.task:
            return "does not ask for a task now"
        if self._lasting:
            return None
        if any(name == node for name, _ in request.closed):
            return "it has evicted this job, and does not get it again for a while"
        offer = ledger.offers.get(node)
        if request.starts_without_cores and offer is not None and offer.keeps_cpu:
            reasons = "; ".join(offer.withheld)
            return (
                f"no command starts there, with or without cores: {reasons}" if reasons else "its owner needs the CPU"
            )
        return None


def _listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = len(names) - MAX_NODES_NAMED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:MAX_NODES_NAMED])} and {more} more"


RUNNERS_UP = 2


class Placement(Struct, frozen=True, kw_only=True):
    """A node and the exact claim there, with the number of nodes that fit and the runners-up with their scores.

    `preferred`: the request prefers the node, and another would be the best without that. `others` are the nodes of the
    other members of a gang. `carved` are the automatic leases that give a part, each with the rest of its claim.
    """

    node: str
    claim: Claim
    strategy: Strategy = Strategy.LOAD_BALANCED
    fits: int = 1
    score: int = 0
    runners_up: tuple[tuple[str, int], ...] = ()
    preferred: bool = False
    others: tuple[tuple[str, Claim], ...] = ()
    carved: tuple[tuple[str, Claim], ...] = ()


def find_placement(ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()) -> Placement | None:
    """The best place for a request, or None where it does not fit anywhere now; never on a node to avoid."""
    if request.runs_on is NodeKind.PULL and not ledger.asking_nodes and not request.task:
        return None  # the usual case of a task: nobody asks for one
    mask = candidate_rows(ledger, request, avoid=avoid)
    fits = int(np.count_nonzero(mask))
    if fits < request.gang:
        return None
    nodes = _placements_by_score(ledger, request, mask, fits)
    best = next(nodes, None)
    if best is None or request.gang == 1:
        return best
    others = tuple((one.node, one.claim) for one in islice(nodes, request.gang - 1))
    return replace(best, others=others) if len(others) == request.gang - 1 else None


def candidate_rows(ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()) -> Mask:
    """The rows that may serve the request and seem to have room for it now."""
    mask = fitting_rows(ledger, request.ask)
    musts = allowed_rows(ledger, request)
    if musts is not None:
        mask &= musts
    avoid |= crowded_nodes(ledger, request)
    if avoid:
        mask &= ~ledger.columns.mask_of(avoid)
    return mask


def strategy_of(ledger: Ledger, request: Request) -> Strategy:
    return request.strategy or ledger.policy.strategy


def _placements_by_score(ledger: Ledger, request: Request, mask: Mask, fits: int) -> Iterator[Placement]:
    """Places from the best on, each on a node of its own; preferred nodes before the others."""
    strategy = strategy_of(ledger, request)
    score = score_rows(ledger, request, strategy)
    preferred = mask & ledger.columns.mask_of(request.prefer) if request.prefer else None
    for part in (mask,) if preferred is None else (preferred, mask & ~preferred):
        for row, runners_up in _rows_by_score(score, part):
            node = ledger.columns.names[row]
            claim = _claim_on_row(ledger, request, row, strategy)
            if claim is not None:  # the columns do not know GPU memory and custom resources
                decided = part is preferred and int(np.where(mask, score, _TAKEN).argmax()) != row
                if part is preferred and not decided:  # it is the best of all: those come next that are second of all
                    runners_up = next(_rows_by_score(score, mask))[1]
                names = tuple([(ledger.columns.names[at], score.item(at)) for at in runners_up])
                yield Placement(
                    node=node,
                    claim=claim,
                    strategy=strategy,
                    fits=fits,
                    score=score.item(row),
                    runners_up=names,
                    preferred=decided,
                )


def _claim_on_row(ledger: Ledger, request: Request, row: int, strategy: Strategy) -> Claim | None:
    """The exact claim on a row; by the fragmentation strategy on the device that loses least."""
    node = ledger.columns.names[row]
    claims, lends, ask = ledger.claims_on(node), ledger.lends(node), request.ask
    if strategy is Strategy.FRAGMENTATION_AWARE and 0 < ask.gpu_milli < WHOLE_GPU and ledger.request_shapes.weights:
        at = fragmentation_index(ledger).device(shape_of(ask), row)
        best = claims.claim_for(ask, lends, device=lends.gpus[at].index) if 0 <= at < len(lends.gpus) else None
        if best is not None:
            return best
    return claims.claim_for(ask, lends)


def _rows_by_score(score: Scores, mask: Mask) -> Iterator[tuple[int, list[int]]]:
    """The rows of a mask, best score first, each with those that come next."""
    left = np.where(mask, score, _TAKEN)
    ahead: list[int] = []
    while True:
        while len(ahead) <= RUNNERS_UP:
            best = int(left.argmax())
            if left.item(best) == _TAKEN:
                break
            ahead.append(best)
            left[best] = _TAKEN
        if not ahead:
            return
        row, *ahead = ahead
        yield row, ahead


_TAKEN = int(np.iinfo(np.int64).min)
