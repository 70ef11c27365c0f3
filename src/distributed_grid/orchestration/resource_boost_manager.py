"""`ResourceBoostManager`: boosts, which a node borrows from the others for a while.

Boosts are leases in the one ledger: other programs and the command line see the same ones, and they outlive the program
that requested them until they are released or their time is over.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from distributed_grid.agent.ray_boost.ray_boost import use_placement_group
from distributed_grid.client.async_client import GridSession
from distributed_grid.client.pages import every_page_async, joined
from distributed_grid.client.placement_arguments import finite_amount, positive_seconds, resource_name
from distributed_grid.config import ClusterConfig
from distributed_grid.control.view_types import BoostRow, BoostStatus
from distributed_grid.domain.resources import Priority as AllocationPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.errors import Ambiguous, BadInput, GridError, NotFound, Refused, TimedOut

__all__ = ["AllocationPriority", "ResourceBoost", "ResourceBoostManager", "ResourceBoostRequest", "ResourceType"]

DEFAULT_SECONDS = 3600.0
"""How long a boost lasts by default."""
REFUSALS = (Refused, TimedOut, BadInput)
"""Answers that mean "no"; anything else is a failure."""
log = logging.getLogger(__name__)


@dataclass
class ResourceBoostRequest:
    """So much of one kind for a node; without a duration for an hour, without a source from whoever can spare it.

    Where the preferred source is full another node lends, unless `only` it may.
    """

    target_node: str
    resource_type: ResourceType
    amount: float
    priority: AllocationPriority = AllocationPriority.NORMAL
    duration_seconds: float | None = None
    preferred_source: str | None = None
    only: bool = False


@dataclass(frozen=True, slots=True)
class ResourceBoost:
    """What one node lends to another, until when; amounts in cores, GPUs or GB.

    `enforced_by` is `ray` where a placement group stands for it in Ray, else `grid`. `automatic`: rebalancing asked for
    it; then `amount` is what is left of it, and `used_amount` what was used.
    """

    boost_id: str
    source_node: str
    target_node: str
    resource_type: str
    amount: float
    priority: AllocationPriority
    state: str
    is_active: bool
    allocated_at: datetime | None
    expires_at: datetime | None
    user: str
    enforced_by: str
    placement_group: str | None
    automatic: bool = False
    used_amount: float | None = None

    def use(self) -> AbstractContextManager[Any]:
        """Inside, the Ray tasks and actors of this program use the boost, unless they say by themselves where to run.

        They run on the source. Raises Refused where no Ray stands behind the boost.
        """
        if self.placement_group is None:
            raise Refused(
                f"boost {self.boost_id} is enforced by grid alone, no Ray reserves it; "
                f"use it with: grid boost run {self.boost_id} -- COMMAND"
            )
        return use_placement_group(self.placement_group)


class ResourceBoostManager(GridSession):
    """Requests, extends, releases and lists boosts; the grid decides who lends.

    `last_refusal` says why the last request or release was refused; None where it was not.
    """

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        ssh_manager: object | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(cluster_config, ssh_manager, state_dir=state_dir)
        self.last_refusal: GridError | None = None

    async def initialize(self) -> None:
        """Make sure that a control plane runs and takes the config. Safe to call twice."""
        await self.start()

    async def request_boost(self, request: ResourceBoostRequest, *, wait_seconds: float = 0.0) -> str | None:
        """The id of the boost once it can be used; None where the grid says no.

        Where another node lends than the preferred source, a line in the log says why. With `wait_seconds` it waits in
        the queue.
        """
        try:
            found = await self._client.call("request_boost", **_message(request, wait_seconds))
        except REFUSALS as refusal:
            self._refused(refusal)
            return None
        self.last_refusal = None
        if found["note"]:
            log.warning("%s", found["note"])
        return str(found["boost"]["boost_id"])

    async def release_boost(self, boost_id: str) -> bool:
        """Give a boost back, by its id or any unique prefix; a second time is harmless. False where none is meant."""
        try:
            await self._client.call("release_boost", boost_id=boost_id)
        except (NotFound, Ambiguous) as refusal:
            self._refused(refusal)
            return False
        self.last_refusal = None
        return True

    async def extend_boost(self, boost_id: str, seconds: float, *, request_id: str | None = None) -> ResourceBoost:
        """The boost with so much more time, counted from its end; NotFound where it is over.

        The same request id again counts once.
        """
        asked = {"request_id": request_id or uuid.uuid4().hex, "boost_id": boost_id, "seconds": seconds}
        found = await self._client.call("extend_boost", **asked)
        return _boost(found["boost"])

    async def get_active_boosts(self, target_node: str | None = None) -> list[ResourceBoost]:
        """The boosts that are active, of all nodes or of one."""
        pages = every_page_async(partial(self._client.call, "list_boosts"), node=target_node or "")
        return [_boost(row) async for page in pages for row in page["boosts"] if row["is_active"]]

    async def get_boost_status(self) -> BoostStatus:
        """How many boosts are active, how much that is of each kind, every one of them, and what is wrong."""
        pages = every_page_async(partial(self._client.call, "list_boosts"))
        found = joined([page async for page in pages], "boosts")
        return {
            "active_boosts": found["active_boosts"],
            "totals": found["totals"],
            "boosts": found["boosts"],
            "persistence_file": found["persistence_file"],
            "warnings": found["warnings"],
        }

    def _refused(self, refusal: GridError) -> None:
        """The one place where a refusal becomes "no": the reason is kept and logged."""
        self.last_refusal = refusal
        log.warning("%s", refusal)


def _message(request: ResourceBoostRequest, wait_seconds: float) -> dict[str, Any]:
    duration = DEFAULT_SECONDS if request.duration_seconds is None else request.duration_seconds
    return {
        "request_id": uuid.uuid4().hex,
        "target": request.target_node,
        "resource_type": resource_name(request.resource_type),
        "amount": finite_amount(request.amount),
        "priority": AllocationPriority.parse(request.priority).name.lower(),
        "duration_seconds": positive_seconds(duration, "a duration"),
        "source": request.preferred_source or "",
        "only": request.only,
        "wait_seconds": wait_seconds,
    }


def _boost(row: BoostRow) -> ResourceBoost:
    return ResourceBoost(
        row["boost_id"],
        row["source_node"] or "",
        row["target_node"],
        row["resource_type"],
        row["amount"],
        AllocationPriority.parse(row["priority"]),
        row["state"],
        row["is_active"],
        _moment(row["allocated_at"]),
        _moment(row["expires_at"]),
        row["user"],
        row["enforced_by"],
        row["placement_group"],
        row["automatic"],
        row["used_amount"],
    )


def _moment(word: str | None) -> datetime | None:
    return datetime.fromisoformat(word) if word is not None else None
