"""Tags of a rented machine: worker, grid and order. They are part of the call that makes it, and prove whose it is."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from distributed_grid.errors import Conflict
from distributed_grid.ports import WorkerOrder


class MachineTags(Struct, frozen=True):
    """Keys of the tags, with the separator that a cloud allows in them."""

    worker: str
    grid: str
    order: str

    def of(self, order: WorkerOrder) -> dict[str, str]:
        return {self.worker: order.worker_id, self.grid: order.grid_id, self.order: order.digest}

    def match(self, tags: Mapping[str, str], worker_id: str, grid_id: str) -> bool:
        """True if the tags are those of this worker of this grid."""
        return tags.get(self.worker) == worker_id and tags.get(self.grid) == grid_id

    def check_order(self, tags: Mapping[str, str], order: WorkerOrder, machine: str) -> None:
        """Raise `Conflict` for a machine that another order, or nobody of this grid, has made under this name."""
        if not self.match(tags, order.worker_id, order.grid_id):
            raise Conflict(f"there is {machine} that is not this grid's")
        if tags.get(self.order) != order.digest:
            raise Conflict(f"there is {machine} that was ordered otherwise")


DOTTED_TAGS = MachineTags("distributed-grid.worker", "distributed-grid.grid", "distributed-grid.order")
DASHED_TAGS = MachineTags("distributed-grid-worker", "distributed-grid-grid", "distributed-grid-order")
