"""Placement arguments of programs: places and times of a request, as its fields.

No msgspec and no asyncio here: `grid.run` and the command line import this file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from distributed_grid.client.job_payload import caller_node
from distributed_grid.errors import BadInput
from distributed_grid.number_text import plain_number
from distributed_grid.quantities import parse_seconds

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from distributed_grid.domain.resources import ResourceType
    from distributed_grid.domain.scheduling_policy import Strategy
    from distributed_grid.quantities import Span

    Moment = float | str | datetime | timedelta
    """Seconds since 1970, a moment (local without a time zone), a text of either, or a time from now."""

NODE_SPECIFIC = "node_specific"


class PlacementArguments(TypedDict, total=False):
    """Places and times of a request; omitted arguments do not matter.

    `also` is more of other kinds on the same node. `labels` are `{"disk": "ssd"}`, or words such as `"disk=ssd"` or a
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
    """The fields of a message; with the strategy `node_specific` the preferred nodes are required."""
    check_names(placing, PlacementArguments, "placement argument")
    strategy = str(placing.get("strategy") or "").strip().lower().replace("-", "_")
    required = _names(placing.get("required_nodes", ()), "required_nodes")
    preferred = _names(prefer, "preferred_nodes")
    if strategy == NODE_SPECIFIC and not required:
        required, preferred = preferred, []
    expects, deadline, labels = placing.get("expects"), placing.get("deadline"), placing.get("labels", ())
    if isinstance(labels, Mapping):
        labels = [f"{key}={value}" if value else key for key, value in labels.items()]
    return {
        "strategy": strategy,
        "prefer": preferred,
        "require": required,
        "resources": {resource_name(kind): finite_amount(amount) for kind, amount in placing.get("also", {}).items()},
        "gpu_models": _names(placing.get("gpu_models", ()), "gpu_models"),
        "gpu_memory_gb": finite_amount(placing.get("gpu_memory_gb", 0.0)),
        "labels": _names(labels, "labels"),
        "affinity": _names(placing.get("affinity", ()), "affinity"),
        "anti_affinity": _names(placing.get("anti_affinity", ()), "anti_affinity"),
        "group": placing.get("group", ""),
        "expects_seconds": positive_seconds(expects, "an expected time") if expects is not None else 0.0,
        "deadline": parse_deadline(deadline) if deadline is not None else 0.0,
        "origin": caller_node(),
    }


def check_names(options: Mapping[str, Any], known: Any, noun: str) -> None:
    """Raise TypeError for an option that a TypedDict does not have, as Python does for an unknown parameter."""
    unknown = set(options) - known.__optional_keys__
    if unknown:
        raise TypeError(f"no such {noun}: {', '.join(sorted(unknown))}")


def resource_name(resource_type: ResourceType | str) -> str:
    """A kind of resource by its one name, whatever its case."""
    return str(resource_type).lower()


def finite_amount(amount: float) -> float:
    """An amount that JSON can carry."""
    if not isinstance(amount, int | float):
        raise BadInput(f"the amount must be a number, not {amount!r}")
    if not math.isfinite(amount):
        raise BadInput(f"the amount must be a number, not {plain_number(amount)}")
    return float(amount)


def positive_seconds(span: Span, noun: str) -> float:
    """A span of time in seconds; it must be more than nothing."""
    if isinstance(span, str):
        seconds = parse_seconds(span, noun)
    else:
        seconds = span.total_seconds() if hasattr(span, "total_seconds") else float(span)
    if not math.isfinite(seconds) or seconds <= 0:
        raise BadInput(f"{noun} must be more than zero seconds, not {plain_number(seconds)}")
    return seconds


def parse_deadline(moment: Moment, needs: str = "a deadline is") -> float:
    """A moment in seconds since 1970; BadInput for one that is over, and for a text that is none."""
    from datetime import datetime, timedelta  # most requests have no deadline

    try:
        if isinstance(moment, str) and not moment.startswith("+"):
            moment = datetime.fromisoformat(moment)
        if isinstance(moment, datetime):
            wall_seconds = moment.timestamp()
        elif isinstance(moment, timedelta):
            wall_seconds = time.time() + moment.total_seconds()
        else:
            wall_seconds = float(moment) + (time.time() if isinstance(moment, str) else 0.0)
    except (ValueError, OverflowError):
        raise BadInput(f"{needs} +SECONDS or a time such as 2026-05-01T18:00, not {moment!r}") from None
    if not time.time() < wall_seconds < math.inf:
        raise BadInput(f"the deadline {moment} is over already")
    return wall_seconds


def _names(names: Sequence[str], what: str) -> list[str]:
    if isinstance(names, str):
        raise BadInput(f"{what} is a list of names, not one text: write [{names!r}]")
    return [str(name) for name in names]
