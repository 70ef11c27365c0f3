"""Default placement group of a Ray program: its tasks and actors run in a boost without changes to the program.

A task with a placement of its own is left alone. One that does not say how many cores it needs gets what the boost
has, one at most: Ray's default is a whole core, which a boost of memory or of a GPU does not have.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

NAMESPACE = "grid"
ACTOR_NAME = "grid-placement-groups"
_current: contextvars.ContextVar[tuple[Any, float] | None] = contextvars.ContextVar("grid_boost", default=None)
_default: list[tuple[str, str]] = []
_groups_found: dict[tuple[str, str], tuple[Any, float]] = {}
_PLACEMENT_OPTIONS = ("scheduling_strategy", "placement_group", "_placement_group")
_wrapped = False


@contextlib.contextmanager
def use_placement_group(group: str, namespace: str = NAMESPACE) -> Iterator[Any]:
    """Inside the block, Ray tasks and actors run in this placement group, which the block gets."""
    _wrap()
    boost = _find(group, namespace)
    before = _current.set(boost)
    try:
        yield boost[0]
    finally:
        _current.reset(before)


def use_placement_group_everywhere(group: str, namespace: str = NAMESPACE) -> None:
    """Run Ray tasks and actors of all threads of this program in this placement group from now on."""
    _default[:] = [(group, namespace)]
    _wrap()


def _find(group: str, namespace: str) -> tuple[Any, float]:
    """The group, and the cores of a task there that names none."""
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(namespace=namespace)
    state = ray._private.state.state  # noqa: SLF001 (the public way looks in the program's own namespace only)
    row = state.get_placement_group_by_name(group, namespace)
    if row is None:
        raise LookupError(f"Ray has no placement group {group}: the boost is over, or this is another cluster")
    groups = importlib.import_module("ray.util.placement_group")
    key = importlib.import_module("ray._raylet").PlacementGroupID(bytes.fromhex(row["placement_group_id"]))
    cores = sum(bundle.get("CPU", 0.0) for bundle in row["bundles"].values())
    # Report the use of the group to the grid before the first task shows in Ray, without waiting for the answer.
    with contextlib.suppress(Exception):  # Ray raises errors of many kinds; without the actor the use is not counted
        ray.get_actor(ACTOR_NAME, namespace=namespace).mark_used.remote(group)
    return groups.PlacementGroup(key, bundle_cache=list(row["bundles"].values())), min(cores, 1.0)


def _active_group() -> tuple[Any, float] | None:
    """The placement group that applies in this context, if any."""
    inner = _current.get()
    if inner is not None or not _default:
        return inner
    default = _default[0]
    if default not in _groups_found:
        _groups_found[default] = _find(*default)
    return _groups_found[default]


def _wrap() -> None:
    """Wrap Ray's submission of tasks and actors; once in a program."""
    global _wrapped
    if _wrapped:
        return
    _wrapped = True
    for module, name in (("ray.remote_function", "RemoteFunction"), ("ray.actor", "ActorClass")):
        kind = getattr(importlib.import_module(module), name)
        kind._remote = _placed(kind._remote)  # noqa: SLF001 (Ray has no public hook for it)


def _placed(remote: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remote)
    def placed(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if all(options.get(name) in (None, "default") for name in _PLACEMENT_OPTIONS):
            active = _active_group()
            if active is not None:
                strategies = importlib.import_module("ray.util.scheduling_strategies")
                options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                    active[0], placement_group_capture_child_tasks=True
                )
                options.setdefault("num_cpus", active[1])
        return remote(self, args, kwargs, **options)

    return placed
