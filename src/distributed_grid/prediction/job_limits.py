"""Memory limits of a job's first run and its reruns, from what is predicted for it.

The daemon and the benchmark of sizing get their limits here.
"""

from __future__ import annotations

from typing import Final

from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.prediction.task_runs import MemoryPrediction

MIN_LIMIT_BYTES: Final = 64 * 1024**2
"""The smallest limit: below that, a limit costs more reruns than it saves memory."""
LEAST_GROWTHS: Final = (1.25, 2.0, 4.0)
"""Of the limit before, for each rerun."""
STEP_BITS: Final = 7
"""There are 2 ** 7 limits between a power of two and the next."""


def limits_of(predicted: MemoryPrediction) -> tuple[int, ...]:
    """The limits of the first run and its reruns: as predicted, and each so much above the one before at least, so that
    a job that needs ten times as much is not ended by a guess. Limits are rounded up, so that not every waiting job is
    different from all others."""
    limits = [rounded_limit(predicted.memory_bytes)]
    for at, growth in enumerate(LEAST_GROWTHS):
        sizes = predicted.next_memory_bytes[at : at + 1]
        bigger = rounded_limit(max((*sizes, int(limits[-1] * growth))))
        if bigger > limits[-1]:
            limits.append(bigger)
    return tuple(limits)


def rounded_limit(size: int) -> int:
    """The next limit of at least this size."""
    size = min(max(size, MIN_LIMIT_BYTES), MAX_AMOUNT)
    step = 1 << max(size.bit_length() - 1 - STEP_BITS, 0)
    return min(-(-size // step) * step, MAX_AMOUNT)
