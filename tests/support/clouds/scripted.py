"""A cloud in memory that follows a script of faults: the smallest stand-in, on a clock that is handed to it.

Besides the faults of every stand-in its script knows `die_before`, `die_after` and `hang`, which act on the process
that calls it where the cloud is behind a file (`tests/support/scripted_provider.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder
from tests.support.clouds.stand_in import FaultScript, Machine

GIB = 1024**3
OFFERS = (
    WorkerOffer("small-a", "cpu", WorkerResources(2000, 4 * GIB), 100_000, "zone-a"),
    WorkerOffer("small-b", "cpu", WorkerResources(2000, 4 * GIB), 120_000, "zone-b"),
    WorkerOffer("gpu-a", "gpu", WorkerResources(4000, 16 * GIB, 1), 900_000, "zone-a"),
)


class ScriptedCloud:
    """Machines, and what goes wrong with the calls about them. Where it `forgets`, it knows nothing of what is gone;
    where it is `blind`, a machine that is not listed yet cannot be terminated either. `omit` is what it does to a list
    before it answers."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        visible_after: float = 0.0,
        stops_in: float = 0.0,
        forgets: bool = False,
        blind: bool = False,
        offers: Sequence[WorkerOffer] = OFFERS,
    ) -> None:
        self.clock = clock
        self.offers = offers
        self.visible_after = visible_after
        self.stops_in = stops_in
        self.forgets = forgets
        self.blind = blind
        self.faults = FaultScript()
        self.omit: Callable[[Sequence[WorkerInstance]], Sequence[WorkerInstance]] = lambda found: found
        self.rows: dict[str, dict[str, Any]] = {}
        self._ended: list[Machine] = []
        self._made = 0

    def provider(self) -> CloudProviderBase:
        return MemoryProvider(self)

    def existing(self) -> list[dict[str, Any]]:
        """The machines that cost money now."""
        now = self.clock()
        return [one for one in self.rows.values() if one["ends_at"] is None or one["ends_at"] > now]

    def machines(self) -> list[Machine]:
        return [*self._ended, *(self._machine(one) for one in self.rows.values())]

    def _machine(self, row: Mapping[str, Any]) -> Machine:
        ended_at = row["ends_at"] if row["ends_at"] is not None and row["ends_at"] <= self.clock() else None
        return Machine(
            row["worker_id"],
            row["grid_id"],
            row["instance"],
            row["made_at"],
            ended_at,
            row.get("market", ""),
            row.get("zone", ""),
        )

    def add_foreign(self, tags: Mapping[str, str] | None = None) -> str:
        """Have a machine there that is not of any grid."""
        self._made += 1
        name = f"foreign-{self._made}"
        found = {"worker_id": name, "grid_id": "", "ends_at": None, "price_micro": 0}
        self.rows[name] = {**found, **(tags or {}), "instance": f"i-{name}", "made_at": self.clock()}
        return f"i-{name}"

    def take_away(self, instance: str) -> None:
        """End a machine as the cloud does with a spot one, or as it ends itself by its power-off."""
        for one in self.rows.values():
            if one["instance"] == instance and (one["ends_at"] is None or one["ends_at"] > self.clock()):
                one["ends_at"] = self.clock()
                self.on_terminated(one)

    def close(self) -> None:
        """Nothing was started."""

    # ------------------------------------------------------------------ the calls

    def create(self, order: WorkerOrder) -> WorkerInstance:
        with self._faults("create", order.worker_id, order.offer):
            self._forget()
            found = self.rows.get(order.worker_id)
            if found is None:
                found = self._make(order)
            if found.get("order", _content(order)) != _content(order):
                raise Refused(f"{order.worker_id} was ordered otherwise")
        return self._view(found)

    def _make(self, order: WorkerOrder) -> dict[str, Any]:
        now, offer = self.clock(), order.offer
        self._made += 1
        made: dict[str, Any] = {
            "worker_id": order.worker_id,
            "grid_id": order.grid_id,
            "instance": f"i-{self._made}-{len(self.faults.calls)}",
            "made_at": now,
            "ends_at": now + offer.lifetime_seconds if offer.lifetime_seconds else None,
            "lifetime": bool(offer.lifetime_seconds),
            "price_micro": offer.price_micro,
            "market": offer.market,
            "zone": offer.zone,
            "order": _content(order),
        }
        self.rows[order.worker_id] = made
        self.on_created(order, made)
        return made

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        with self._faults("list", ""):
            views = [self._view(one) for one in self.rows.values() if one["grid_id"] == grid_id and self._is_seen(one)]
        found = [one for one in views if one.state != "gone"]
        return self.omit(found)

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        with self._faults("describe", worker_id):
            self._forget()
            found = self.rows.get(worker_id)
        if found is None or found["grid_id"] != grid_id or not self._is_seen(found):
            return None
        return self._view(found)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        with self._faults("terminate", worker_id):
            found = self.rows.get(worker_id)
            if found is None or found["grid_id"] != grid_id or (self.blind and not self._is_seen(found)):
                return
            ends_at = self.clock() + self.stops_in
            if not found.get("is_ending") and (found["ends_at"] is None or found["ends_at"] > ends_at):
                found["ends_at"], found["is_ending"] = ends_at, True
                self.on_terminated(found)

    def read_offers(self) -> Sequence[WorkerOffer]:
        with self._faults("offers", ""):
            return list(self.offers)

    def _is_seen(self, machine: Mapping[str, Any]) -> bool:
        return bool(self.clock() - machine["made_at"] >= self.visible_after)

    def _forget(self) -> None:
        """Where this provider `forgets`, nothing is known of what is gone, as with containers that are removed."""
        if self.forgets:
            kept = [one["worker_id"] for one in self.existing()]
            self._ended += [self._machine(one) for name, one in self.rows.items() if name not in kept]
            self.rows = {name: one for name, one in self.rows.items() if name in kept}

    def on_created(self, order: WorkerOrder, machine: dict[str, Any]) -> None:
        """A machine was made."""

    def on_terminated(self, machine: dict[str, Any]) -> None:
        """A machine was ended."""

    def _view(self, machine: Mapping[str, Any]) -> WorkerInstance:
        now, ends_at = self.clock(), machine["ends_at"]
        state: Any = "running"
        if ends_at is not None:
            state = "gone" if ends_at <= now else "stopping" if machine.get("is_ending") else "running"
        return WorkerInstance(
            machine["worker_id"],
            machine["grid_id"],
            machine["instance"],
            state,
            now - machine["made_at"],
            ends_in_seconds=max(ends_at - now, 0) if machine.get("lifetime") else None,
        )

    @contextlib.contextmanager
    def _faults(self, method: str, worker_id: str, offer: WorkerOffer | None = None) -> Iterator[None]:
        """The next fault of this method: some happen before its effect, some after."""
        fault, _, scope = self.faults.next(method, worker_id).partition(":")
        self.before_effect(fault)
        if fault == "lose_before":
            raise Unreachable(f"{method}: the connection was lost")
        if fault == "throttle":
            raise Throttled(f"{method}: too many requests")
        if fault == "no_capacity":
            raise NoCapacity(f"{method}: no capacity", scope)
        if fault == "quota" and offer is not None:
            raise NoCapacity(f"{method}: a limit of the account is reached", f"kind:{offer.worker_type}")
        if fault == "refuse":
            raise Refused(f"{method}: not allowed")
        if fault in ("fail", "quota"):
            raise RuntimeError(f"{method}: it broke")
        yield
        self.after_effect(fault)
        if fault == "lose_after":
            raise Unreachable(f"{method}: the connection was lost")

    def before_effect(self, fault: str) -> None:
        """Where a fault acts before the effect."""

    def after_effect(self, fault: str) -> None:
        """Where a fault acts after the effect."""


def _content(order: WorkerOrder) -> list[Any]:
    """What makes an order the same again."""
    has = order.resources
    return [order.grid_id, order.offer.id, has.cpu_milli, has.memory_bytes, has.gpu_count]


class MemoryProvider(CloudProviderBase):
    """The adapter of a scripted cloud in the same process."""

    name = "scripted"

    def __init__(self, cloud: ScriptedCloud) -> None:
        self._cloud = cloud

    def create(self, order: WorkerOrder) -> WorkerInstance:
        return self._cloud.create(order)

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        return self._cloud.list(grid_id)

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        return self._cloud.describe(worker_id, grid_id)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        self._cloud.terminate(worker_id, grid_id)

    def offers(self) -> Sequence[WorkerOffer]:
        return self._cloud.read_offers()
