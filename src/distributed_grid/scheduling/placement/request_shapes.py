"""What is typically asked for, learned from the requests that came, and how much each kind of it matters.

Rule 1: a request is counted rounded down to an eighth, GPUs to a hundredth: what is nearly the same is the same.
Rule 2: at most `MOST` shapes are kept. A new one takes the place and the count of the rarest: no shape's count is too
low, none is too high by more than the rarest's.
Rule 3: from `MEMORY` requests on, all counts are halved: what nobody asks for any more is forgotten.
Rule 4: weights are whole numbers, taken anew after a fifth more requests. In between they stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed_grid.domain.request_shapes import RequestShape, RequestShapes

MOST = 64
MEMORY = 2**14
ALL_WEIGHTS = 2**17
"""What the weights add up to, but for rounding. With 64 devices on a node its worth stays below 2**33."""
LEAST_SUPPLY = 100
"""A supply below a hundredth of all free GPUs counts as a hundredth: no shape alone decides everything."""


def seen(typical: RequestShapes, shape: RequestShape) -> RequestShapes:
    """What is typical after one more request; one without a GPU changes nothing."""
    if not shape.gpu_milli:
        return typical
    shape, counts = shape.rounded, list(typical.counts)
    at = next((i for i, (known, _) in enumerate(counts) if known == shape), None)
    if at is None and len(counts) == MOST:
        at = min(range(MOST), key=lambda i: (counts[i][1], counts[i][0]))
    if at is None:
        counts.append((shape, 1))
    else:
        counts[at] = (shape, counts[at][1] + 1)
    after = RequestShapes(tuple(counts), typical.counted + 1, typical.weights, typical.taken)
    return after if after.counted < MEMORY else _halved(after)


def weighed(typical: RequestShapes, supply: Sequence[int], free_milli: int) -> RequestShapes:
    """The same with weights taken: the less there is that a shape could use, the more of it matters.

    `supply` is how much of all free GPUs each counted shape could use. A weight is demand over supply, so that the sum
    of weight × supply lost is what a placement takes from the others: the marginal loss of Σ demand × log(supply).
    """
    least = max(free_milli // LEAST_SUPPLY, 1)
    parts = [(count << 60) // max(had, least) for (_, count), had in zip(typical.counts, supply, strict=True)]
    total = max(sum(parts), 1)
    shapes = [shape for shape, _ in typical.counts]
    weights = [(shape, max(ALL_WEIGHTS * part // total, 1)) for shape, part in zip(shapes, parts, strict=True)]
    return RequestShapes(typical.counts, typical.counted, tuple(weights), typical.counted)


def _halved(typical: RequestShapes) -> RequestShapes:
    halves = tuple((shape, count // 2) for shape, count in typical.counts if count > 1)
    return RequestShapes(halves, sum(half for _, half in halves), typical.weights, typical.taken // 2)
