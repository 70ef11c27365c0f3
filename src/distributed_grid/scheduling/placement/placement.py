"""Where a request fits best right now.

Rule 1: only open nodes (alive, with a fresh offer) are considered, never a guess.
Rule 2: musts (`filters.allowed`) come first, then room, then preferred nodes, then the strategy's score.
Rule 3: the same ledger and request always give the same place.
Rule 4: a gang gets as many different nodes as it has members, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Claim
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.scheduling.placement.filters import Mask, allowed, fitting
from distributed_grid.scheduling.placement.scores import Scores, scores
from distributed_grid.scheduling.placement.shape_learning import losses_of, shape_of

RUNNERS_UP = 2


class Placement(Struct, frozen=True):
    """A node and the exact claim there; how it was chosen, among how many, and who came next with which score.

    `others` are the places of the other members of a gang.
    """

    node: str
    claim: Claim
    strategy: Strategy = Strategy.LOAD_BALANCED
    fits: int = 1
    score: int = 0
    runners_up: tuple[tuple[str, int], ...] = ()
    preferred: bool = False
    others: tuple[tuple[str, Claim], ...] = ()


def place(ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()) -> Placement | None:
    """The best place for a request, or None where it does not fit anywhere now; never on a node to avoid."""
    mask = candidates(ledger, request, avoid=avoid)
    fits = int(np.count_nonzero(mask))
    if fits < request.gang:
        return None
    places = _best_first(ledger, request, mask, fits)
    best = next(places, None)
    if best is None or request.gang == 1:
        return best
    others = tuple((one.node, one.claim) for one in islice(places, request.gang - 1))
    return replace(best, others=others) if len(others) == request.gang - 1 else None


def candidates(ledger: Ledger, request: Request, *, avoid: frozenset[str] = frozenset()) -> Mask:
    """The rows that may serve the request and seem to have room for it now."""
    mask = fitting(ledger, request.ask)
    musts = allowed(ledger, request)
    if musts is not None:
        mask &= musts
    if avoid:
        mask &= ~ledger.columns.mask_of(avoid)
    return mask


def strategy_of(ledger: Ledger, request: Request) -> Strategy:
    """How this request is placed: as it says itself, else as the grid does."""
    return request.strategy or ledger.policy.strategy


def _best_first(ledger: Ledger, request: Request, mask: Mask, fits: int) -> Iterator[Placement]:
    """Places from the best on, each on a node of its own; preferred nodes before the others."""
    strategy = strategy_of(ledger, request)
    score = scores(ledger, request, strategy)
    wished = mask & ledger.columns.mask_of(request.prefer) if request.prefer else None
    for part in (mask,) if wished is None else (wished, mask & ~wished):
        for row, runners_up in _descending(score, part):
            node = ledger.columns.names[row]
            claim = _claim(ledger, request, row, strategy)
            if claim is not None:  # the columns do not know GPU memory and custom resources
                names = tuple([(ledger.columns.names[at], score.item(at)) for at in runners_up])
                yield Placement(node, claim, strategy, fits, score.item(row), names, part is wished)


def _claim(ledger: Ledger, request: Request, row: int, strategy: Strategy) -> Claim | None:
    """The exact claim on a row; where devices are told apart by what would be lost, on the best of them."""
    node = ledger.columns.names[row]
    book, lends, ask = ledger.book(node), ledger.lends(node), request.ask
    if strategy is Strategy.FRAGMENTATION_AWARE and 0 < ask.gpu_milli < WHOLE_GPU and ledger.typical.weights:
        at = losses_of(ledger).device(shape_of(ask), row)
        best = book.claim_for(ask, lends, device=lends.gpus[at].index) if 0 <= at < len(lends.gpus) else None
        if best is not None:
            return best
    return book.claim_for(ask, lends)


def _descending(score: Scores, mask: Mask) -> Iterator[tuple[int, list[int]]]:
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
