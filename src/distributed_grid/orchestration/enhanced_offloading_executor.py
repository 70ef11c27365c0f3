"""`EnhancedOffloadingExecutor`: executes, shows and cancels the moves that `OffloadingDetector` recommends.

A move is a row of the one ledger: the command line and other programs see it, and it continues without the program that
requested it. Its id is the task id here, and the id that `grid offload status` and `cancel` take.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence

from distributed_grid.api.answers.leases import BoostRow
from distributed_grid.client.async_client import GridSession
from distributed_grid.client.conversation import JsonObject, as_object, as_objects
from distributed_grid.client.pages import every_page_async
from distributed_grid.config import ClusterConfig
from distributed_grid.domain.moves import MOVE_PREFIX
from distributed_grid.domain.rebalancing import SharingMode as OffloadingMode
from distributed_grid.errors import BadInput, Refused, TimedOut
from distributed_grid.orchestration.offloading_detector import OffloadingRecommendation

__all__ = ["EnhancedOffloadingExecutor", "OffloadingMode", "OffloadingRecommendation"]

POLL_SECONDS = 0.2


class EnhancedOffloadingExecutor(GridSession):
    """Moves recommended work.

    The mode selects the target; it changes neither the config nor automatic offloading:

    - `OFFLOAD_ONLY`: the target of the recommendation, and no other.
    - `SHARE_AND_OFFLOAD`: the node that already lends to the pressed one (an automatic boost) where enough of that is
      left, else the target of the recommendation.
    - `DYNAMIC_BALANCING`: the same lender, else the best node when the move begins.
    """

    def __init__(
        self,
        ssh_manager: object | None = None,
        cluster_config: ClusterConfig | None = None,
        mode: OffloadingMode | str = OffloadingMode.DYNAMIC_BALANCING,
        *,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`ssh_manager` may be left out: the control plane holds the SSH connections."""
        super().__init__(cluster_config, ssh_manager, state_dir=state_dir)
        try:
            self.mode = OffloadingMode(mode)
        except ValueError:
            raise BadInput(f"the mode is one of {', '.join(OffloadingMode)}, not {mode!r}") from None

    async def execute_offloading(
        self, recommendation: OffloadingRecommendation, *, consent: bool = False, variables: Sequence[str] = ()
    ) -> str:
        """Begin a move and return its id at once. Refused where the work cannot be moved.

        With `consent` its user allows restarts of processes of this command shape elsewhere, with these variables; the
        consent is recorded. A restart repeats the effects that the work has had by then.
        """
        if not recommendation.is_movable:
            causes = recommendation.obstacles
            raise Refused(f"{recommendation.subject} cannot be moved: {'; '.join(causes) or 'no way is known'}", causes)
        process, target = recommendation.process, ""
        if self.mode is not OffloadingMode.OFFLOAD_ONLY:
            pages = every_page_async(self._client.list_boosts, node=recommendation.node_id)
            target = lender_of([boost async for page in pages for boost in page.boosts], recommendation)
        if self.mode is not OffloadingMode.DYNAMIC_BALANCING:  # else the grid chooses where no lender is
            target = target or recommendation.target_node or ""
        answer = await self._client.execute_offload(
            move_id=f"{MOVE_PREFIX}{secrets.token_hex(6)}",
            subject=recommendation.subject,
            node=recommendation.node_id,
            target=target,
            consent=consent,
            variables=list(variables),
            pid_start=process.pid_start if process is not None else 0,
            shape=recommendation.shape or "",
            directory=process.cwd if process is not None else "",
        )
        return answer.move.move_id

    async def get_offloading_status(self, task_id: str) -> JsonObject:
        """A move, also an ended one, by its id or any unique prefix. NotFound where there is none."""
        return as_object((await self._client.get_move(move_id=task_id)).move)

    async def list_offloading(self, *, include_ended: bool = False) -> list[JsonObject]:
        """The active moves, and on request then those that have ended, the last ended first."""
        pages = every_page_async(self._client.list_moves, all=include_ended)
        return as_objects([move async for page in pages for move in page.moves])

    async def cancel_offloading(self, task_id: str) -> JsonObject:
        """Leave the original as it was; a second time is harmless. Refused once the original cannot be resumed: then
        its job can be cancelled."""
        return as_object((await self._client.cancel_move(move_id=task_id)).move)

    async def wait_for_offloading(self, task_id: str, *, timeout_seconds: float | None = None) -> JsonObject:
        """Wait until the work runs on the other node, or the move has ended; TimedOut where that takes longer."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    move = (await self._client.get_move(move_id=task_id)).move
                    if move.end is not None or move.state == "running":
                        return as_object(move)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimedOut(f"{task_id} is still on its way after {timeout_seconds:g} s") from None


def lender_of(boosts: Sequence[BoostRow], recommendation: OffloadingRecommendation) -> str:
    """The lender of an automatic boost into which the work fits, if any."""
    needs = {"memory": recommendation.memory_gb, "cpu": recommendation.cpu_cores}
    for boost in boosts:
        fits = 0 < needs.get(boost.resource_type, 0.0) <= boost.amount
        if fits and boost.automatic and boost.is_active and boost.source_node:
            return boost.source_node
    return ""
