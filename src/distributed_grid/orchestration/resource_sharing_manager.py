"""`ResourceSharingManager`: request and release resources for a node, and the status of sharing.

Leases are rows of the one ledger, so several managers, other programs and the command line never lend the same resource
twice.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from distributed_grid.client.async_client import GridSession
from distributed_grid.client.conversation import JsonObject, as_object, as_objects
from distributed_grid.client.pages import whole_status_async
from distributed_grid.client.placement_arguments import (
    PlacementArguments,
    finite_amount,
    placement_fields,
    positive_seconds,
    resource_name,
)
from distributed_grid.domain.rebalancing import SharingPolicy
from distributed_grid.domain.resources import Priority as AllocationPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.errors import BadInput

if TYPE_CHECKING:
    from distributed_grid.quantities import Span

__all__ = ["AllocationPriority", "ResourceRequest", "ResourceSharingManager", "ResourceStatus", "SharingPolicy"]

DEFAULT_SECONDS = 3600.0
"""The default duration; a lease without an end would outlive a program that dies."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """An amount of one resource for a node; `source` names the preferred lenders.

    Where these are full another node lends, unless `only` is set. Without a node the lease is for its requester, and
    any node may lend.
    """

    node_id: str
    resource_type: ResourceType | str
    amount: float
    priority: AllocationPriority | str = AllocationPriority.MEDIUM
    duration: Span = DEFAULT_SECONDS
    source: Sequence[str] = ()
    wait_seconds: float = 300.0
    only: bool = False

    def message(self) -> dict[str, Any]:
        """The fields of the request."""
        if self.only and not self.source:
            raise BadInput("only the source may lend it: name one")
        where: PlacementArguments = {
            "required_nodes": self.source if self.only else (),
            "anti_affinity": [self.node_id] if self.node_id else [],
        }
        return {
            **placement_fields(where, () if self.only else self.source),
            "request_id": uuid.uuid4().hex,
            "target": self.node_id,
            "resource_type": resource_name(self.resource_type),
            "amount": finite_amount(self.amount),
            "priority": AllocationPriority.parse(self.priority).name.lower(),
            "duration_seconds": positive_seconds(self.duration, "a duration"),
            "wait_seconds": self.wait_seconds,
        }


class ResourceStatus(TypedDict):
    """Settings of sharing, the offers, the leases, and the number of waiting requests."""

    enabled: bool
    mode: str
    policy: SharingPolicy
    offers: list[JsonObject]
    allocations: list[JsonObject]
    waiting: int


class ResourceSharingManager(GridSession):
    """Requests, releases and shows shared resources; the grid chooses the lender."""

    async def request_resource(
        self,
        node_id: str,
        resource_type: ResourceType | str,
        amount: float,
        priority: AllocationPriority | str = AllocationPriority.MEDIUM,
        duration: Span | None = None,
        *,
        duration_minutes: float | None = None,
        source: str | Sequence[str] = (),
        only: bool = False,
        wait_seconds: float = 300.0,
    ) -> str:
        """Borrow for a node from the others; the id of the lease, for `release_resource`.

        Nodes named as `source` are preferred, or with `only` required; where another one lends, the log has a line.
        Waits in the queue up to `wait_seconds`. Raises Refused with the reasons, and TimedOut at the end of the wait.
        """
        if duration is not None and duration_minutes is not None:
            raise BadInput("say either duration or duration_minutes")
        if duration_minutes is not None:
            duration = 60 * duration_minutes
        request = ResourceRequest(
            node_id,
            resource_type,
            amount,
            priority,
            DEFAULT_SECONDS if duration is None else duration,
            ([source] if source else ()) if isinstance(source, str) else source,
            wait_seconds,
            only,
        )
        return await self.submit(request)

    async def submit(self, request: ResourceRequest) -> str:
        """Submit a request; the id of its lease once it is granted."""
        allocation = (await self._client.request_lease(**request.message())).allocation
        if request.source and allocation.node_id not in request.source:
            log.warning("%s lends it instead of %s", allocation.node_id, " or ".join(request.source))
        return allocation.allocation_id

    async def release_resource(self, allocation_id: str) -> JsonObject:
        """Release an allocation; its last state. A second time is harmless; NotFound for an unknown id."""
        return as_object((await self._client.release_lease(allocation_id=allocation_id)).allocation)

    async def get_resource_status(self) -> ResourceStatus:
        """Settings of sharing, the offers, and the allocations."""
        status = await whole_status_async(self._client)
        sharing = (await self._client.get_config()).config["resource_sharing"]
        return {
            "enabled": sharing["enabled"],
            "mode": sharing["mode"],
            "policy": SharingPolicy(sharing["policy"]),
            "offers": as_objects(status.offers),
            "allocations": as_objects(status.allocations),
            "waiting": status.waiting,
        }
