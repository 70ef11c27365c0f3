"""Ray tasks and actors in a boost's placement group, without a word about it in the program.

Rule 1: who says by itself where a task is to run is left alone.
Rule 2: a task that does not say how much it needs gets what the boost has, one core at most: by default Ray asks for a
        whole core, which a boost of memory or of a GPU does not have.
Rule 3: outside of a boost Ray is exactly as it was.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

NAMESPACE = "grid"
_current: contextvars.ContextVar[tuple[Any, float] | None] = contextvars.ContextVar("grid_boost", default=None)
_for_all: list[tuple[str, str]] = []
_found: dict[tuple[str, str], tuple[Any, float]] = {}
_PLACES = ("scheduling_strategy", "placement_group", "_placement_group")
_wrapped = False


@contextlib.contextmanager
def used(group: str, namespace: str = NAMESPACE) -> Iterator[Any]:
    """Inside, Ray tasks and actors run in this placement group; what it is given to is the group."""
    _wrap()
    found = _find(group, namespace)
    before = _current.set(found)
    try:
        yield found[0]
    finally:
        _current.reset(before)


def use_always(group: str, namespace: str = NAMESPACE) -> None:
    """From now on, in every thread, Ray tasks and actors of this program run in this placement group."""
    _for_all[:] = [(group, namespace)]
    _wrap()


def _find(group: str, namespace: str) -> tuple[Any, float]:
    """The group, and how many cores a task gets there that does not say."""
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
    return groups.PlacementGroup(key, bundle_cache=list(row["bundles"].values())), min(cores, 1.0)


def _here() -> tuple[Any, float] | None:
    """The boost that counts here and now."""
    inner = _current.get()
    if inner is not None or not _for_all:
        return inner
    wanted = _for_all[0]
    if wanted not in _found:
        _found[wanted] = _find(*wanted)
    return _found[wanted]


def _wrap() -> None:
    """Let Ray ask us where a task goes; once in a program."""
    global _wrapped
    if _wrapped:
        return
    _wrapped = True
    for module, name in (("ray.remote_function", "RemoteFunction"), ("ray.actor", "ActorClass")):
        kind = getattr(importlib.import_module(module), name)
        kind._remote = _placed(kind._remote)  # noqa: SLF001 (Ray has no other place to say it once)


def _placed(remote: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(remote)
    def placed(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if all(options.get(name) in (None, "default") for name in _PLACES):
            here = _here()
            if here is not None:
                strategies = importlib.import_module("ray.util.scheduling_strategies")
                options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                    here[0], placement_group_capture_child_tasks=True
                )
                options.setdefault("num_cpus", here[1])
        return remote(self, args, kwargs, **options)

    return placed
