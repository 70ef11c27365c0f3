"""`ResourceBoostManager`: boosts, which a node borrows from other nodes for a while.

Boosts are leases in the one ledger: other programs and the command line see the same ones, and they outlive the program
that requested them until they are released or expire.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from distributed_grid.agent.ray_boost.ray_boost import use_placement_group
from distributed_grid.api.answers.leases import BoostRow
from distributed_grid.client.async_client import GridSession
from distributed_grid.client.conversation import JsonObject, as_objects, present, required
from distributed_grid.client.pages import every_page_async
from distributed_grid.client.placement_arguments import finite_amount, positive_seconds, resource_name
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.resources import Priority as AllocationPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.errors import Ambiguous, BadInput, GridError, NotFound, Refused, TimedOut

__all__ = ["AllocationPriority", "ResourceBoost", "ResourceBoostManager", "ResourceBoostRequest", "ResourceType"]

DEFAULT_SECONDS = 3600.0
"""The default duration of a boost."""
REFUSALS = (Refused, TimedOut, BadInput)
"""Refusals; any other error is a failure."""
log = logging.getLogger(__name__)


@dataclass
class ResourceBoostRequest:
    """An amount of one resource for a node; without a duration for an hour, without a source from any node.

    Where the preferred source is full another node lends, unless `only` is set.
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
    """A resource that one node lends to another until a moment; amounts in cores, GPUs or GB.

    `enforced_by` is `ray` where a placement group reserves it in Ray, else `grid`. `automatic`: requested by
    rebalancing; then `amount` is the unused rest, and `used_amount` the used part.
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
        """Inside, the Ray tasks and actors of this program use the boost, unless they state their own placement.

        They run on the source. Raises Refused where no Ray reserves the boost.
        """
        if self.placement_group is None:
            raise Refused(
                f"boost {self.boost_id} is enforced by grid alone, no Ray reserves it; "
                f"use it with: grid boost run {self.boost_id} -- COMMAND"
            )
        return use_placement_group(self.placement_group)


class BoostSummary(TypedDict):
    """Number of active boosts, their totals by kind, the boosts, the file of their copies, and warnings."""

    active_boosts: int
    totals: dict[str, float]
    boosts: list[JsonObject]
    persistence_file: str
    warnings: list[str]


class ResourceBoostManager(GridSession):
    """Requests, extends, releases and lists boosts; the grid chooses the lender.

    `last_refusal` is the error of the last request or release if it was refused, else None.
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
        """The id of the boost once it can be used; None where the grid refuses.

        Where another node lends than the preferred source, the log has the reason. With `wait_seconds` it waits in the
        queue.
        """
        try:
            duration = DEFAULT_SECONDS if request.duration_seconds is None else request.duration_seconds
            answer = await self._client.request_boost(
                request_id=uuid.uuid4().hex,
                target=request.target_node,
                resource_type=resource_name(request.resource_type),
                amount=finite_amount(request.amount),
                priority=AllocationPriority.parse(request.priority).name.lower(),
                duration_seconds=positive_seconds(duration, "a duration"),
                source=request.preferred_source or "",
                only=request.only,
                wait_seconds=wait_seconds,
            )
        except REFUSALS as refusal:
            self._refused(refusal)
            return None
        self.last_refusal = None
        if present(answer.note):
            log.warning("%s", answer.note)
        return required(answer.boost).boost_id

    async def release_boost(self, boost_id: str) -> bool:
        """Release a boost, by its id or any unique prefix; a second time is harmless. False where none has it."""
        try:
            await self._client.release_boost(boost_id=boost_id)
        except (NotFound, Ambiguous) as refusal:
            self._refused(refusal)
            return False
        self.last_refusal = None
        return True

    async def extend_boost(self, boost_id: str, seconds: float, *, request_id: str | None = None) -> ResourceBoost:
        """The boost with this much more time, counted from its end; NotFound where it has ended.

        The same request id again counts once.
        """
        answer = await self._client.extend_boost(
            request_id=request_id or uuid.uuid4().hex, boost_id=boost_id, seconds=seconds
        )
        return _boost(required(answer.boost))

    async def get_active_boosts(self, target_node: str | None = None) -> list[ResourceBoost]:
        """The active boosts, of all target nodes or of one."""
        pages = every_page_async(self._client.list_boosts, node=target_node or "")
        return [_boost(row) async for page in pages for row in page.boosts if row.is_active]

    async def get_boost_status(self) -> BoostSummary:
        pages = [page async for page in every_page_async(self._client.list_boosts)]
        return {
            "active_boosts": pages[0].active_boosts,
            "totals": pages[0].totals,
            "boosts": as_objects([boost for page in pages for boost in page.boosts]),
            "persistence_file": pages[0].persistence_file,
            "warnings": pages[0].warnings,
        }

    def _refused(self, refusal: GridError) -> None:
        """Keep and log the error that the caller sees as None or False."""
        self.last_refusal = refusal
        log.warning("%s", refusal)


def _boost(row: BoostRow) -> ResourceBoost:
    return ResourceBoost(
        boost_id=row.boost_id,
        source_node=row.source_node or "",
        target_node=row.target_node,
        resource_type=row.resource_type,
        amount=row.amount,
        priority=AllocationPriority.parse(row.priority),
        state=row.state,
        is_active=row.is_active,
        allocated_at=_moment(row.allocated_at),
        expires_at=_moment(row.expires_at),
        user=row.user,
        enforced_by=row.enforced_by,
        placement_group=row.placement_group,
        automatic=row.automatic,
        used_amount=row.used_amount,
    )


def _moment(word: str | None) -> datetime | None:
    return datetime.fromisoformat(word) if word is not None else None
