"""The detached Ray actor that makes, lists and removes the grid's placement groups.

It travels by value: standard library and Ray only, so that no Ray node needs anything of ours. A group is made once:
asking again for the same name joins the pending request, or finds the group. A group is removed at the end of its term,
and all of them are when the grid was silent for its hold: it may be gone for good.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

PREFIX = "grid-boost-"
AUTOMATIC_PREFIX = PREFIX + "auto-"
WORKERS = 4
FIRST_POLLS, ROOM_POLL_SECONDS = (0.001, 0.002, 0.002, 0.003), 0.02
NO_ROOM_STATES = ("NO_RESOURCES", "INFEASIBLE")
REMOVE_SECONDS, TOTALS_SECONDS, ROOM_SECONDS = 10.0, 5.0, 1.0
RETURN_SECONDS = 1.5
WATCH_SECONDS = 1.0
GRACE = 5.0
BUNDLE = 1000.0
log = logging.getLogger(__name__)
Resources = dict[str, float]


def _plain_number(number: float) -> str:
    """Number without an exponent; this file runs where the package is not installed."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


class PlacementGroupActor:
    """Serves one grid; its methods may be called at once."""

    def __init__(self, grid: str, build: str, hold_seconds: float) -> None:
        import ray

        self._ray: Any = ray
        self._grid, self._build = grid, build
        self._hold = hold_seconds
        self._heard = time.monotonic()
        self._terms: dict[str, float] = {}
        self._made: dict[str, tuple[Any, str, Resources]] = {}
        self._marked: set[str] = set()
        self._returning: list[tuple[float, str, Resources]] = []
        self._under_way: dict[str, Future[str]] = {}
        self._nodes: tuple[float, dict[str, Resources]] = (0.0, {})
        self._room: tuple[float, dict[str, Resources]] = (0.0, {})
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WORKERS)
        self._over = threading.Event()
        for row in self._ray.util.placement_group_table().values():
            if row["name"].startswith(PREFIX) and row["state"] == "CREATED" and self._is_ours(row["name"]):
                node = next(iter(row["bundles_to_node_id"].values()), "")
                group = self._ray.util.get_placement_group(row["name"])
                self._made[row["name"]] = (group, node, dict(next(iter(row["bundles"].values()), {})))
        threading.Thread(target=self._watch, daemon=True).start()

    def identity(self) -> tuple[str, str]:
        return self._grid, self._build

    # ------------------------------------------------------------------ reserving and freeing

    def reserve(
        self, items: list[tuple[str, str, Resources, float]], seconds: float, wait_seconds: float
    ) -> list[str | None]:
        """Have these groups, each on its node and for its seconds (0: without end); for each "" (made), the reason of a
        failure, or None while it is pending."""
        with self._lock:
            for name, node, resources, left in items:
                if name not in self._under_way:
                    self._under_way[name] = self._pool.submit(self._reserve, name, node, resources, seconds)
                if left:
                    self._lengthen(name, left)
            futures = [self._under_way[name] for name, *_ in items]
        wait(futures, timeout=wait_seconds)
        results: list[str | None] = []
        for (name, *_), future in zip(items, futures, strict=True):
            results.append(future.result() if future.done() else None)
            if future.done():
                with self._lock:
                    self._under_way.pop(name, None)
        return results

    def _reserve(self, name: str, node: str, resources: Resources, seconds: float) -> str:
        """Make a group within this time; "" where it is made, else why it is not, and then nothing of it is left."""
        if name in self._made and self._state(self._made[name][0]) == "CREATED":
            return ""
        deadline = time.monotonic() + seconds
        wanted = self._limit_to_node(node, resources)
        if isinstance(wanted, str):
            return wanted
        try:
            while True:
                selector = [{"ray.io/node-id": node}]
                options = {"name": name, "lifetime": "detached", "bundle_label_selector": selector}
                try:
                    group = self._ray.util.placement_group([wanted], **options)
                except self._ray.exceptions.RaySystemError as taken:
                    if "already exists" not in str(taken):
                        raise
                    group = self._ray.util.get_placement_group(name)
                if (self._expects_room(node, wanted) and group.wait(1)) or self._is_made(group, deadline):
                    self._made[name] = (group, node, wanted)
                    return ""
                self._remove(group)
                if time.monotonic() >= deadline:
                    free = self._free_per_node().get(node, {})
                    lacks = [
                        f"{_plain_number(free.get(k, 0))} of {_plain_number(v)} {k}"
                        for k, v in wanted.items()
                        if free.get(k, 0) < v
                    ]
                    had = f"and had no more within {_plain_number(seconds)} s"
                    return f"Ray has {' and '.join(lacks) or 'no room'} free there, {had}"
                while time.monotonic() < deadline:  # Ray does not look long at a group that is made before it has room
                    free = self._free_per_node().get(node, {})
                    if all(free.get(kind, 0) + 1e-9 >= amount for kind, amount in wanted.items()):
                        break
                    time.sleep(ROOM_POLL_SECONDS)
        except Exception as failure:  # any error of Ray is reported to the caller, and nothing is left
            with contextlib.suppress(Exception):  # there may be none; the next sweep finds a remaining one
                self._remove(self._ray.util.get_placement_group(name))
            return f"Ray failed: {(str(failure) or type(failure).__name__).splitlines()[0][:300]}"

    def _limit_to_node(self, node: str, resources: Resources) -> Resources | str:
        """The resources without those that the Ray node does not know; why not, where that leaves nothing."""
        # Totals of the nodes, read seldom, because Ray counts every group among them.
        read_at, totals = self._nodes
        if node not in totals or time.monotonic() - read_at > TOTALS_SECONDS:
            alive = (row for row in self._ray.nodes() if row["Alive"])
            plain = {row["NodeID"]: {k: v for k, v in row["Resources"].items() if "_group_" not in k} for row in alive}
            self._nodes = (time.monotonic(), plain)
        has = self._nodes[1].get(node)
        if has is None:
            return "Ray has no such node any more"
        known = {kind: amount for kind, amount in resources.items() if kind in has or kind in ("CPU", "GPU", "memory")}
        over = [
            f"{_plain_number(has.get(kind, 0))} {kind}" for kind, amount in known.items() if amount > has.get(kind, 0)
        ]
        return f"Ray has only {', '.join(over)} there" if over else known

    def _expects_room(self, node: str, resources: Resources) -> bool:
        """True if Ray had enough free a moment ago: then waiting for Ray's answer is cheaper than polling."""
        with self._lock:
            read_at, free = self._room
            if time.monotonic() - read_at > ROOM_SECONDS:
                free = self._free_per_node()
                self._room = (time.monotonic(), free)
            there = free.get(node, {})
            if any(there.get(kind, 0.0) < amount for kind, amount in resources.items()):
                return False
            for kind, amount in resources.items():
                there[kind] -= amount
            return True

    def _is_made(self, group: Any, deadline: float) -> bool:
        """True if a group was made; False as soon as Ray has found no room for it, because it would look again only
        after half a second."""
        polls = iter(FIRST_POLLS)
        while True:
            row = self._ray.util.placement_group_table(group)
            if row.get("state") == "CREATED":
                return True
            if row.get("stats", {}).get("scheduling_state") in NO_ROOM_STATES or time.monotonic() >= deadline:
                return False
            time.sleep(next(polls, 0.005))

    def _state(self, group: Any) -> str:
        return str(self._ray.util.placement_group_table(group).get("state", ""))

    def free(self, names: list[str]) -> None:
        """Remove these groups; a missing one is not an error."""
        list(self._pool.map(self._free_one, names))

    def _free_one(self, name: str) -> None:
        with self._lock:
            self._terms.pop(name, None)
            under_way = self._under_way.pop(name, None)
        if under_way is not None:
            wait([under_way])
        with self._lock:
            made = self._made.pop(name, None)
        self._remove_made(name, made)

    def _remove_made(self, name: str, made: tuple[Any, str, Resources] | None) -> None:
        if made is not None:
            self._returning.append((time.monotonic(), *made[1:]))
        try:
            self._remove(made[0] if made is not None else self._ray.util.get_placement_group(name))
        except ValueError:
            return  # Ray knows no group of that name

    def _remove(self, group: Any) -> None:
        self._ray.util.remove_placement_group(group)
        until = time.monotonic() + REMOVE_SECONDS
        while self._state(group) not in ("REMOVED", ""):
            if time.monotonic() > until:
                raise TimeoutError("a group was not removed in time")
            time.sleep(0.002)

    # ------------------------------------------------------------------ observing

    def observe(self, full: bool) -> dict[str, Any]:
        """Nodes with their totals and their rest besides our groups; with `full` every group of ours, too."""
        # Our part of each node, groups freed a moment ago included: Ray does not call them free at once.
        sums: dict[str, Resources] = {}
        lately = time.monotonic() - RETURN_SECONDS
        self._returning = [entry for entry in self._returning if entry[0] > lately]
        for _, node, resources in [*self._made.values(), *self._returning]:
            there = sums.setdefault(node, {})
            for kind, amount in resources.items():
                there[kind] = there.get(kind, 0.0) + amount
        free, ours = self._free_per_node(), sums
        nodes = [
            {
                "id": node["NodeID"],
                "name": node.get("NodeName") or "",
                "address": node["NodeManagerAddress"],
                "hostname": node["NodeManagerHostname"],
                "head": "node:__internal_head__" in node["Resources"],
                "has": _amounts(node["Resources"]),
                "room": _room(node["Resources"], free.get(node["NodeID"], {}), ours.get(node["NodeID"], {})),
            }
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        groups = self._list_groups() if full else None
        marked, self._marked = self._marked, set()
        made = [(name, *entry) for name, entry in list(self._made.items()) if name.startswith(AUTOMATIC_PREFIX)]
        client = self._ray._private.worker.global_worker.gcs_client  # noqa: SLF001 (no public call has it)
        # a running task takes a thousandth of the resource that Ray calls a bundle
        return {
            "session": f"{self._ray.get_runtime_context().gcs_address}/{client.cluster_id.hex()}",
            "nodes": nodes,
            "groups": groups,
            "in_use": [
                name
                for name, group, node, _ in made
                if name in marked or 0 < free.get(node, {}).get(f"bundle_group_{group.id.hex()}", 0.0) < BUNDLE
            ],
        }

    def mark_used(self, name: str) -> None:
        """A program is about to run something in a group; use that ends before an observation counts, too."""
        if name in self._made:
            self._marked.add(name)

    def _free_per_node(self) -> dict[str, Resources]:
        state = self._ray._private.state  # noqa: SLF001 (the public calls have only the sum over all nodes)
        resources: dict[str, Resources] = state.available_resources_per_node()
        return resources

    def _list_groups(self) -> list[tuple[str, str]]:
        """The names of all groups that are named as ours and were not removed, each with the node it is on."""
        groups = []
        for row in self._ray.util.placement_group_table().values():
            if row["name"].startswith(PREFIX) and row["state"] != "REMOVED" and self._is_ours(row["name"]):
                made = row["state"] == "CREATED"
                groups.append((row["name"], next(iter(row["bundles_to_node_id"].values()), "") if made else "nowhere"))
        return groups

    def _is_ours(self, name: str) -> bool:
        """True if a group is in our own namespace: another grid's groups are not ours to remove."""
        if name in self._made:
            return True
        try:
            self._ray.util.get_placement_group(name)
        except ValueError:
            return False
        return True

    # ------------------------------------------------------------------ removing groups without a holder

    def extend_hold(self, seconds: float, terms: dict[str, float]) -> list[str]:
        """Extend the hold of the groups: the grid is there. `terms` are the groups with an end of their own; those that
        are missing here are returned, since a group that is being removed gets no more time."""
        self._heard, self._hold = time.monotonic(), seconds
        with self._lock:
            missing = [name for name in terms if name not in self._made and name not in self._under_way]
            for name in terms.keys() - set(missing):
                self._lengthen(name, terms[name])
        return missing

    def _lengthen(self, name: str, left: float) -> None:
        """Extend a group's term; calls may overtake each other, so the longest term counts."""
        until = time.monotonic() + left + GRACE
        self._terms[name] = max(self._terms.get(name, until), until)

    def close(self) -> None:
        self._over.set()
        self.free([name for name, _ in self._list_groups()])

    def _watch(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            try:
                now = time.monotonic()
                if now - self._heard > self._hold:
                    self.free([name for name, _ in self._list_groups()])
                    self._heard = now
                    continue
                for name in [name for name, until in list(self._terms.items()) if until < now]:
                    with self._lock:
                        if name in self._under_way or self._terms.get(name, 0.0) >= time.monotonic():
                            continue
                        self._terms.pop(name, None)
                        made = self._made.pop(name, None)
                    self._remove_made(name, made)
            except Exception:  # Ray may be in trouble: the next round comes soon
                log.exception("groups whose term is over could not be removed yet")


def _room(has: Resources, free: Resources, ours: Resources) -> list[int]:
    """Room of a node for us; a part that was ours until just now may count as free already."""
    return [
        min(most, left + taken) for most, left, taken in zip(_amounts(has), _amounts(free), _amounts(ours), strict=True)
    ]


def _amounts(resources: Resources) -> list[int]:
    """CPU in thousandths, memory in bytes, GPUs in thousandths."""
    return [
        round(1000 * resources.get("CPU", 0.0)),
        int(resources.get("memory", 0.0)),
        round(1000 * resources.get("GPU", 0.0)),
    ]
