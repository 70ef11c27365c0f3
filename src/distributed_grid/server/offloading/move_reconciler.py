"""Reconciler of moves: performs what they call for, again and again until it is reported done.

Orders go to the agents of the sources; files are shipped and results brought here. What has failed for good ends the
move, and leaves the original as it was; what may pass by itself is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from distributed_grid.control.agent_messages import move_order
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.events import Event, MoveFailed, MoveFilesSettled, MoveResultsBrought, MoveShipped
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move
from distributed_grid.domain.states import MoveState, NodeState, Step
from distributed_grid.errors import GridError, NotFound, Unreachable
from distributed_grid.reactor.effects import BringResults, MoveEffect, OrderMoveStep, move_effects
from distributed_grid.server.offloading.move_files import ResultCollector, ShippedTree, ship_tree
from distributed_grid.trees.content_store import ContentStore
from distributed_grid.wire import MoveReport

POLL_SECONDS = 1.0
RETRY_SECONDS = 0.2
OPEN_SECONDS = 20.0
"""So long after its first try the directory of an original may be unknown to its agent, which has not opened it yet."""
MAX_ROUNDS = 3
SMALL_BYTES = 1024 * 1024
"""A round of shipping ahead that brings less than this is the last; the rest is shipped while nothing moves there."""
log = logging.getLogger(__name__)


class MoveReconciler:
    """Performs the effects of moves; orders are repeated by the sessions of agents."""

    def __init__(self, grid: Grid, agents: AgentGateway, store: ContentStore, results: ResultCollector) -> None:
        self._grid = grid
        self._agents = agents
        self._store = store
        self._results = results
        self._work = Reconciler()
        self._opened: dict[str, None] = {}

    def perform(self, effect: MoveEffect) -> None:
        move = effect.move
        if isinstance(effect, OrderMoveStep):
            self._agents.order_moves([move_order(effect)])
            if effect.step is Step.CLOSE:
                self._opened.pop(move.id, None)
        elif isinstance(effect, BringResults):
            self._work.begin((move.id, "results"), partial(self._bring_results, move), f"results of {move.id}")
        elif move.state is MoveState.FROZEN:
            self._work.begin((move.id, "difference"), partial(self._ship_difference, move), f"difference of {move.id}")
        else:
            self._work.begin((move.id, "ahead"), partial(self._ship_ahead, move), f"shipping ahead of {move.id}")

    def reported(self, report: MoveReport) -> None:
        """Note that an agent has opened the files of a move."""
        if report.state is MoveState.OPENED and report.move_id in self._grid.ledger.moves:
            self._opened[report.move_id] = None

    async def run(self) -> None:
        """Perform shipments of files until cancelled."""
        await asyncio.sleep(POLL_SECONDS)  # after a restart agents come back first: a difference is shipped once only
        await self._work.run(self._reconcile, POLL_SECONDS)

    async def stop(self) -> None:
        await self._work.stop()

    async def _reconcile(self) -> None:
        if not self._grid.ledger.moves:
            self._opened.clear()
            return
        for effect in await self._grid.read(lambda ledger, now: move_effects(ledger)):
            if not isinstance(effect, OrderMoveStep):
                self.perform(effect)

    # ------------------------------------------------------------------ the files of the original

    async def _ship_ahead(self, move: Move) -> None:
        """Ship the directory while the original runs, until little is left to ship, or often enough."""
        total = 0
        shipped: ShippedTree | None = None
        try:
            for _ in range(MAX_ROUNDS):
                shipped = await self._ship_once(move, still=False)
                if shipped is None:
                    return
                total += shipped.new_bytes
                if shipped.new_bytes <= SMALL_BYTES:
                    break
        except GridError as failure:
            await self._fail(move, f"its directory cannot be shipped: {failure}")
            return
        if shipped is not None:
            await self._record(MoveShipped(move.id, shipped.digest, total, shipped.left_out))

    async def _ship_difference(self, move: Move) -> None:
        """Ship what has changed while the original stands still: every moment counts, nothing is tried twice."""
        try:
            shipped = await self._ship_tree(move, still=True)
        except GridError as failure:
            await self._fail(move, f"what had changed in its directory could not be shipped: {failure}")
            return
        await self._record(MoveFilesSettled(move.id, shipped.digest, shipped.new_bytes, shipped.left_out))

    async def _ship_once(self, move: Move, *, still: bool) -> ShippedTree | None:
        """One round, tried again while the source is away or has not opened the directory; None where the move has
        gone on or ended meanwhile."""
        until = asyncio.get_running_loop().time() + OPEN_SECONDS
        while self._is_reserved(move.id):
            was_open = move.id in self._opened
            try:
                return await self._ship_tree(move, still=still)
            except Unreachable:
                until = asyncio.get_running_loop().time() + OPEN_SECONDS
            except NotFound:
                if was_open or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
        return None

    async def _ship_tree(self, move: Move, *, still: bool) -> ShippedTree:
        remote = self._agents.files

        async def read(name: bytes, at: int, most: int) -> bytes:
            return (await remote.read(move.source, move.id, name, at, most))[1]

        return await ship_tree(self._store, await remote.find_tree(move.source, move.id), read, still=still)

    def _is_reserved(self, move_id: str) -> bool:
        move = self._grid.ledger.moves.get(move_id)
        return move is not None and move.state is MoveState.RESERVED and move.ending is None

    # ------------------------------------------------------------------ the results of its job

    async def _bring_results(self, move: Move) -> None:
        """Bring what the job has written; where its node is gone for good, say that it is lost."""
        try:
            manifest, problem = await self._results.collect(move)
        except Unreachable as failure:
            if not await self._grid.read(lambda ledger, now: _is_lost(ledger, move.ran_on)):
                return  # tried again with the next poll
            manifest, problem = "", f"its files are lost with {move.ran_on}: {failure}"
        except (GridError, OSError) as failure:
            if isinstance(failure, GridError) and failure.retryable:
                return
            manifest, problem = "", f"its files could not be brought: {failure}"
        await self._record(MoveResultsBrought(move.id, manifest, problem))

    # ------------------------------------------------------------------ reporting

    async def _fail(self, move: Move, why: str) -> None:
        await self._record(MoveFailed(move.id, why))

    async def _record(self, event: Event) -> None:
        """Report what was done; a move that has ended meanwhile does not mind."""
        try:
            await self._grid.handle_with_retry(event)
        except GridError as refusal:
            log.info("%s came too late: %s", type(event).__name__, refusal)


def _is_lost(ledger: Ledger, node: str) -> bool:
    """Whether nobody will ever answer for a node."""
    known = ledger.nodes.get(node)
    return known is None or known.state in (NodeState.LOST, NodeState.LEFT)
