"""Which nodes may serve a request, as masks over the columns.

Rule 1: `allowed` is about musts (named nodes, labels, affinity), `fitting` about room; a place needs both.
Rule 2: an affinity names nodes, jobs or groups of requests. Those that hold nothing have no place to be near to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts

Mask = NDArray[np.bool_]


def fitting(ledger: Ledger, ask: Amounts) -> Mask:
    """Which rows have room, by their columns; GPU memory and custom resources only the book of a node can tell."""
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


def allowed(ledger: Ledger, request: Request) -> Mask | None:
    """Which rows the request's musts leave; None is all of them."""
    if not (request.require or request.labels or request.affinity or request.anti_affinity):
        return None
    mask = None
    for names in (request.require, *(ledger.labelled(*label) for label in request.labels)):
        if names or names is not request.require:
            mask = _both(mask, ledger.columns.mask_of(names))
    for name in request.affinity:
        mask = _both(mask, ledger.columns.mask_of(ledger.places_of(name)))
    for name in request.anti_affinity:
        mask = _both(mask, ~ledger.columns.mask_of(ledger.places_of(name)))
    return mask



def _both(one: Mask | None, other: Mask) -> Mask:
    return other if one is None else one & other


def forbidden_by(ledger: Ledger, request: Request, node: str) -> str | None:
    """The must that a node does not meet, in words, or None."""
    if request.require and node not in request.require:
        return f"not one of the required nodes ({', '.join(request.require)})"
    for key, value in request.labels:
        if node not in ledger.labelled(key, value):
            return f"has no label {key}={value}" if value else f"has no label or tag {key}"
    for name in request.affinity:
        places = ledger.places_of(name)
        if not places:
            return f"nothing of {name} is running that it could be near to"
        if node not in places:
            return f"{name} is on {', '.join(sorted(places))}"
    for name in request.anti_affinity:
        if node in ledger.places_of(name):
            if name == node == request.target:
                return "it is for this node, from another"
            return "it must not be here" if name == node else f"{name} is here, and it must not be near to that"
    return None
