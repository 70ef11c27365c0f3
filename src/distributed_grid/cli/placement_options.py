"""The options that say where a request should go, shared by every command that makes one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

from distributed_grid.errors import BadInput

F = TypeVar("F", bound=Callable[..., Any])
STRATEGIES = (
    "load_balanced", "local_first", "best_fit", "spread", "performance_optimized", "cost_optimized",
    "node_specific", "fragmentation_aware",
)  # fmt: skip

_OPTIONS = (
    click.option(
        "--strategy",
        type=click.Choice(STRATEGIES, case_sensitive=False),
        help="How the place is chosen; with node_specific only the nodes of -n will do.",
    ),
    click.option(
        "--also", multiple=True, metavar="TYPE=AMOUNT", help="More of another kind in the same place: --also memory=4."
    ),
    click.option("--label", multiple=True, metavar="KEY[=VALUE]", help="Only nodes with this label or tag."),
    click.option("--gpu-model", multiple=True, help="Only GPUs whose name has this in it; any of several."),
    click.option("--gpu-memory", type=click.FloatRange(min=0), default=0.0, help="GB of memory on each GPU."),
    click.option("--near", multiple=True, metavar="NAME", help="Only where this job, group or node is."),
    click.option("--apart-from", multiple=True, metavar="NAME", help="Never where this job, group or node is."),
    click.option("--group", default="", help="A name that this request shares with others, to be near to or apart."),
    click.option(
        "--expects", type=click.FloatRange(min=0), default=0.0, help="Seconds it will take: short ones fit into gaps."
    ),
    click.option(
        "--deadline", metavar="TIME", help="When it must be over: +SECONDS, or a time such as 2026-05-01T18:00."
    ),
)


def placing_options(command: F) -> F:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def placing(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that the options mean."""
    named = options["node"]
    insists = options["strategy"] == "node_specific"
    if insists and not named:
        raise BadInput("--strategy node_specific needs a node: -n NODE")
    if not math.isfinite(options["gpu_memory"]) or not math.isfinite(options["expects"]):
        raise BadInput("an amount or a time must be a number, not nan or inf")
    return {
        "strategy": options["strategy"] or "",
        "prefer": [] if insists else list(named),
        "require": list(named) if insists else [],
        "resources": dict(_amount(word) for word in options["also"]),
        "labels": list(options["label"]),
        "gpu_models": list(options["gpu_model"]),
        "gpu_memory_gb": options["gpu_memory"],
        "affinity": list(options["near"]),
        "anti_affinity": list(options["apart_from"]),
        "group": options["group"],
        "expects_seconds": options["expects"],
        "deadline": _moment(options["deadline"]) if options["deadline"] else 0.0,
    }


def _amount(word: str) -> tuple[str, float]:
    kind, _, amount = word.partition("=")
    try:
        return kind, float(amount)
    except ValueError:
        raise BadInput(f"--also needs TYPE=AMOUNT, such as memory=4, not {word!r}") from None


def _moment(word: str) -> float:
    """The moment that a deadline means, in seconds since 1970; without a time zone it is the local one."""
    try:
        moment = time.time() + float(word) if word.startswith("+") else datetime.fromisoformat(word).timestamp()
    except (ValueError, OverflowError):
        raise BadInput(f"--deadline needs +SECONDS or a time such as 2026-05-01T18:00, not {word!r}") from None
    if not math.isfinite(moment) or moment <= time.time():
        raise BadInput(f"the deadline {word} is over already")
    return moment
