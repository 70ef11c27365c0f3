"""Placement arguments of Python programs, as fields of a request."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict

from distributed_grid.client.job_payload import caller_node
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput
from distributed_grid.number_text import plain_number

Span = float | timedelta
"""Seconds, or a timedelta."""
Moment = float | datetime | timedelta
"""Seconds since 1970, a moment (local where it has no time zone), or a span from now."""


class PlacementArguments(TypedDict, total=False):
    """Nodes and deadline of a request; an argument that is left out restricts nothing.

    `also` has amounts of other resources on the same node. `labels` are `{"disk": "ssd"}`, or words such as `"disk=ssd"` or a
    tag. An affinity names a node, a job, a task or a group; `group` is a name that requests share.
    """

    strategy: Strategy | str | None
    required_nodes: Sequence[str]
    also: Mapping[str, float]
    gpu_models: Sequence[str]
    gpu_memory_gb: float
    labels: Mapping[str, str] | Sequence[str]
    affinity: Sequence[str]
    anti_affinity: Sequence[str]
    group: str
    expects: Span | None
    deadline: Moment | None


def placement_fields(placing: PlacementArguments, prefer: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a request; with the strategy `node_specific` the preferred nodes are required."""
    unknown = set(placing) - PlacementArguments.__optional_keys__
    if unknown:
        raise TypeError(f"no such placement argument: {', '.join(sorted(unknown))}")
    strategy, labels = placing.get("strategy"), placing.get("labels", ())
    if isinstance(labels, Mapping):
        labels = [f"{key}={value}" if value else key for key, value in labels.items()]
    chosen = Strategy.parse(strategy) if strategy else None
    required = _names(placing.get("required_nodes", ()), "required_nodes")
    preferred = _names(prefer, "preferred_nodes")
    if chosen is Strategy.NODE_SPECIFIC and not required:
        required, preferred = preferred, []
    expects, deadline = placing.get("expects"), placing.get("deadline")
    return {
        "strategy": str(chosen or ""),
        "prefer": preferred,
        "require": required,
        "resources": {resource_name(kind): finite_amount(amount) for kind, amount in placing.get("also", {}).items()},
        "gpu_models": _names(placing.get("gpu_models", ()), "gpu_models"),
        "gpu_memory_gb": float(placing.get("gpu_memory_gb", 0.0)),
        "labels": _names(labels, "labels"),
        "affinity": _names(placing.get("affinity", ()), "affinity"),
        "anti_affinity": _names(placing.get("anti_affinity", ()), "anti_affinity"),
        "group": placing.get("group", ""),
        "expects_seconds": positive_seconds(expects, "an expected time") if expects is not None else 0.0,
        "deadline": _moment(deadline) if deadline is not None else 0.0,
        "origin": caller_node(),
    }


def resource_name(resource_type: ResourceType | str) -> str:
    """A kind of resource by its one name, whatever its case."""
    return str(resource_type).lower()


def finite_amount(amount: float) -> float:
    """An amount that JSON can carry."""
    if not math.isfinite(amount):
        raise BadInput(f"the amount must be a number, not {plain_number(amount)}")
    return float(amount)


def positive_seconds(span: Span, what: str) -> float:
    """A span of time in seconds; BadInput for one that is not positive."""
    seconds = span.total_seconds() if isinstance(span, timedelta) else float(span)
    if not math.isfinite(seconds) or seconds <= 0:
        raise BadInput(f"{what} must be more than zero seconds, not {plain_number(seconds)}")
    return seconds


def _moment(moment: Moment) -> float:
    if isinstance(moment, datetime):
        at = moment.timestamp()
    elif isinstance(moment, timedelta):
        at = time.time() + moment.total_seconds()
    else:
        at = float(moment)
    if not math.isfinite(at) or at <= time.time():
        raise BadInput(f"the deadline {moment} is over already")
    return at


def _names(names: Sequence[str], what: str) -> list[str]:
    if isinstance(names, str):
        raise BadInput(f"{what} is a list of names, not one text: write [{names!r}]")
    return [str(name) for name in names]
