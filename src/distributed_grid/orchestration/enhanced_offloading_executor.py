"""`EnhancedOffloadingExecutor`: moves what `OffloadingDetector` has found, and shows and cancels moves.

A move is a row of the one ledger: the command line and other programs see it, and it goes on without the program that
asked for it. Its id is the task id here, and what `grid offload status` and `cancel` take.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from functools import partial

from distributed_grid.client.async_client import GridSession
from distributed_grid.client.pages import every_page_async
from distributed_grid.config import ClusterConfig
from distributed_grid.control.view_types import BoostRow, MoveRow
from distributed_grid.domain.moves import MOVE_PREFIX
from distributed_grid.domain.rebalancing import SharingMode as OffloadingMode
from distributed_grid.errors import BadInput, Refused, TimedOut
from distributed_grid.orchestration.offloading_detector import OffloadingRecommendation

__all__ = ["EnhancedOffloadingExecutor", "OffloadingMode", "OffloadingRecommendation"]

POLL_SECONDS = 0.2


class EnhancedOffloadingExecutor(GridSession):
    """Moves recommended work.

    The mode says where to; it changes nothing of the config's, nor what moves by itself:

    - `OFFLOAD_ONLY`: to the node of the recommendation, nowhere else.
    - `SHARE_AND_OFFLOAD`: to the node that already lends to the pressed one (an automatic boost) where enough is left
      of that, else to the node of the recommendation.
    - `DYNAMIC_BALANCING`: the same, else to whichever node is the best when the move begins.
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
        """Begin to move it; the id of the move, at once. Refused where it cannot be moved.

        With `consent` its user allows that processes of its command shape are restarted elsewhere, with these variables
        of theirs; that is remembered. A restart repeats what the work has sent or written by then.
        """
        if not recommendation.is_movable:
            causes = recommendation.obstacles
            raise Refused(f"{recommendation.subject} cannot be moved: {'; '.join(causes) or 'no way is known'}", causes)
        process = recommendation.process
        found = await self._client.call(
            "execute_offload",
            move_id=f"{MOVE_PREFIX}{secrets.token_hex(6)}",
            subject=recommendation.subject,
            node=recommendation.node_id,
            target=await self._target(recommendation),
            consent=consent,
            variables=list(variables),
            pid_start=process.pid_start if process is not None else 0,
            shape=recommendation.shape or "",
            directory=process.cwd if process is not None else "",
        )
        move_id: str = found["move"]["move_id"]
        return move_id

    async def get_offloading_status(self, task_id: str) -> MoveRow:
        """How a move stands, by its id or any unique prefix; ended ones, too. NotFound where there is none."""
        row: MoveRow = (await self._client.call("get_move", move_id=task_id))["move"]
        return row

    async def list_offloading(self, *, include_ended: bool = False) -> list[MoveRow]:
        """The active moves, and on request then those that have ended, the last ended first."""
        pages = every_page_async(partial(self._client.call, "list_moves"), all=include_ended)
        return [row async for page in pages for row in page["moves"]]

    async def cancel_offloading(self, task_id: str) -> MoveRow:
        """Leave the original as it was; a second time is harmless. Refused once the original cannot go on any more:
        then its job can be cancelled."""
        row: MoveRow = (await self._client.call("cancel_move", move_id=task_id))["move"]
        return row

    async def wait_for_offloading(self, task_id: str, *, timeout_seconds: float | None = None) -> MoveRow:
        """Wait until the work runs on the other node, or the move has ended; TimedOut where that takes longer."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    row = await self.get_offloading_status(task_id)
                    if row["end"] is not None or row["state"] == "running":
                        return row
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimedOut(f"{task_id} is still on its way after {timeout_seconds:g} s") from None

    async def _target(self, recommendation: OffloadingRecommendation) -> str:
        """Where to, by the mode; empty leaves it to the grid."""
        if self.mode is not OffloadingMode.OFFLOAD_ONLY:
            pages = every_page_async(partial(self._client.call, "list_boosts"), node=recommendation.node_id)
            lender = _lender([row async for page in pages for row in page["boosts"]], recommendation)
            if lender:
                return lender
        return "" if self.mode is OffloadingMode.DYNAMIC_BALANCING else recommendation.target_node or ""


def _lender(boosts: Sequence[BoostRow], recommendation: OffloadingRecommendation) -> str:
    """Who lends so much to the node of the recommendation, by an automatic boost, that the work fits into it."""
    needs = {"memory": recommendation.memory_gb, "cpu": recommendation.cpu_cores}
    for boost in boosts:
        need = needs.get(boost["resource_type"], 0.0)
        if boost["automatic"] and boost["is_active"] and 0 < need <= boost["amount"] and boost["source_node"]:
            return str(boost["source_node"])
    return ""
