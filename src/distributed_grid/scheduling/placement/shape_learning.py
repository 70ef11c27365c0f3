"""What the requests so far teach, and the index of losses that follows a ledger.

Rule 1: every request for a GPU that is taken in counts, once. What came before decides where it goes itself.
Rule 2: the index is a memory of what the rows say (`Ledger.memo`): it may be thrown away at any moment.
"""

from __future__ import annotations

from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.request_shapes import RequestShape, RequestShapes
from distributed_grid.domain.resources import Amounts
from distributed_grid.scheduling.placement.fragmentation import FragmentationIndex
from distributed_grid.scheduling.placement.request_shapes import seen, weighed
from distributed_grid.scheduling.placement.usable_capacity import supply


def shape_of(ask: Amounts) -> RequestShape:
    """What matters of an ask for where it fits."""
    return RequestShape(ask.cpu_milli, ask.memory_bytes, ask.gpu_milli, ask.gpu_models)


def learned(ledger: Ledger, request: Request) -> RequestShapes | None:
    """What is typical after this request too; None where it teaches nothing."""
    if not request.ask.gpu_milli:
        return None
    typical = seen(ledger.typical, shape_of(request.ask))
    if not typical.is_due:
        return typical
    columns = ledger.columns
    could_use = supply(typical.counts, columns, columns.open)
    return weighed(typical, could_use, int(columns.gpu_left[columns.open].sum()))


def losses_of(ledger: Ledger) -> FragmentationIndex:
    """The index of a ledger, up to date with its rows and with what is typical."""
    index = ledger.memo.get("losses")
    if not isinstance(index, FragmentationIndex) or index.layout != ledger.columns.layout:
        index = ledger.memo["losses"] = FragmentationIndex(ledger.columns, ledger.typical)
    elif index.typical.weights is not ledger.typical.weights:
        index.use(ledger.typical)
    return index
