"""Placement scores: one integer per node and strategy, higher is better; and the fitness of a node for a task.

What a strategy is named for comes first: being local, being spread, speed, cost. Below that it is how much of the node,
or of its GPUs, is left, in millionths. The priority that its owner gave a node is a weight on top: at most a tenth of a
node, so it decides among nodes that are about equally good. Equal scores go to the first row.

The fitness is 0 where a node does not fit, from a half for an exact fit up towards 1 for plenty of room: `1 - m / 2`,
where m is the mean of `asked / free` over the resources that the task asks for. It depends on what is free and on
nothing else, so a node with more of everything free is never less fit for the same task.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.domain.indexes.columns import THOUSANDTH, WHOLE, FreeColumns
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.scheduling.placement.fragmentation import TOTAL_WEIGHT, fragmentation_index, shape_of

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
