"""Carries out the control plane's orders: to start and stop attempts, to read their files.

Rule 1. An order that is too old, in its fence, its hold or the offer it counts on, is refused and changes nothing.
Rule 2. A start that fails, or that counts on a hold or an offer which is gone, is answered, and the answer is final.
Rule 3. Orders are carried out each in its turn. What takes its time (files are fetched, a notice runs) goes on aside.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Protocol

from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.execution.environment import own_environment
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.files.reader import AttemptFileReader
from distributed_grid.agent.lent_memory import LentMemory
from distributed_grid.agent.outbox import Outbox
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import (
    CloseStream,
    FetchedChunk,
    ListFiles,
    ReadCredit,
    ReadFile,
    StartAttemptOrder,
    StopAttemptOrder,
    ToAgent,
)

LEAST_HOLD_MS = 200
MOST_REFUSED = 10_000
log = logging.getLogger(__name__)


class WorkDirs(Protocol):
    """Brings what a job is to find in its directory."""

    async def lay_out(self, digest: str, target: Path) -> None:
        """Lay out the tree of this digest in a directory; done again it changes nothing."""

    def received(self, piece: FetchedChunk) -> None:
        """Bytes that were asked for."""

    def unlinked(self) -> None:
        """The link is gone, and with it what was on its way."""


class OrderExecutor:
    """Orders that wait for their turn, and attempts that are being prepared, were refused or have notice."""

    def __init__(
        self,
        host: AttemptHost,
        guard: OwnerGuard,
        outbox: Outbox,
        reading: AttemptFileReader,
        *,
        workdirs: WorkDirs | None,
        memory: LentMemory | None,
    ) -> None:
        self._host = host
        self._guard = guard
        self._outbox = outbox
        self._reading = reading
        self._workdirs = workdirs
        self._memory = memory
        self._waiting: asyncio.Queue[ToAgent] = asyncio.Queue()
        self._preparing: dict[str, tuple[StartAttemptOrder, asyncio.Task[None]]] = {}
        self._fences: dict[str, int] = {}
        self._refused: dict[str, None] = {}
        self._displaced: dict[str, asyncio.Task[None]] = {}

    def take(self, order: ToAgent) -> None:
        """Carry it out when its turn comes."""
        self._waiting.put_nowait(order)

    def preparing(self) -> list[str]:
        """Attempts whose files are being brought."""
        return list(self._preparing)

    def under_way(self) -> list[asyncio.Task[None]]:
        """What goes on aside, for whoever ends it."""
        return [*(task for _, task in self._preparing.values()), *self._displaced.values()]

    def ended(self, attempt_id: str) -> None:
        """An attempt is over: nobody has to stop it any more."""
        displaced = self._displaced.pop(attempt_id, None)
        if displaced is not None and displaced is not asyncio.current_task():
            displaced.cancel()

    def forget(self, attempt_id: str) -> None:
        """Its end is known where it matters. Safe twice."""
        self._fences.pop(attempt_id, None)

    async def obey(self) -> None:
        """Carry out orders, each in its turn; an order that fails is answered, never swallowed."""
        while True:
            order = await self._waiting.get()
            try:
                await self._carry_out(order)
            except Exception as failure:  # the outermost loop: the next order may well succeed
                log.warning("order %s failed", type(order).__name__, exc_info=failure)
                if isinstance(order, StartAttemptOrder):
                    self._refuse(order, Ending.NEVER_STARTED, f"{order.node}: {failure}")

    async def _carry_out(self, order: ToAgent) -> None:
        if isinstance(order, StartAttemptOrder):
            await self._start(order)
        elif isinstance(order, StopAttemptOrder):
            await self._stop(order)
        elif isinstance(order, ReadFile | ReadCredit | CloseStream | ListFiles):
            self._reading.received(order)

    def _refuse(self, order: StartAttemptOrder, ending: Ending, detail: str) -> None:
        """Answer an order that is not carried out; that is final."""
        self._refused[order.lease_id] = None
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._outbox.never_run(order.lease_id, order.fence, Outcome(ending, detail=detail))

    # ------------------------------------------------------------------ starting

    async def _start(self, order: StartAttemptOrder) -> None:
        if order.lease_id in self._preparing or order.lease_id in self._refused:
            return  # what was refused stays so: the refusal and this order have crossed
        if self._is_stale(order.lease_id, order.fence):
            log.warning("a start of %s with an old fence was refused", order.lease_id)
            return
        if order.lease_id not in self._host.running():
            if order.hold_ms and not self._is_in_time(order):
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: the order came too late")
                return
            if order.generation < self._guard.generation:
                self._refuse(order, Ending.RECLAIMED, f"{order.node} had withdrawn its offer: its owner needs it")
                return
        self._fences[order.lease_id] = order.fence
        if self._workdirs is not None and order.command.workdir and not self._host.knows(order.lease_id):
            preparing = asyncio.create_task(self._prepare(order, self._workdirs))
            self._preparing[order.lease_id] = (order, preparing)
            preparing.add_done_callback(lambda _: self._preparing.pop(order.lease_id, None))
            return
        await self._host.launch(self._spec(order))

    def _is_stale(self, lease_id: str, fence: int) -> bool:
        return fence < self._fences.get(lease_id, 0)

    def _is_in_time(self, order: StartAttemptOrder) -> bool:
        """Whether the order's hold, counted from the heartbeat it names, has not run out; what it says holds."""
        now = boot_ms()
        if order.beat > now or order.beat + order.hold_ms < now + LEAST_HOLD_MS:
            return False
        self.renew(order.beat + order.hold_ms)
        return True

    def renew(self, until_boot_ms: int) -> None:
        """Let everything go on until then. What was being prepared when the last hold ran out is given up: the control
        plane has done so, too, or will when it hears of it."""
        if not self._host.is_held:
            for order, preparing in tuple(self._preparing.values()):
                preparing.cancel()
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: its hold ran out before its files were there")
        self._host.hold(until_boot_ms)
        if self._memory is not None:
            self._memory.hold(until_boot_ms)

    async def _prepare(self, order: StartAttemptOrder, workdirs: WorkDirs) -> None:
        """Bring the working directory, then run; other orders go on meanwhile."""
        try:
            await workdirs.lay_out(order.command.workdir, self._host.work_dir(order.lease_id))
            if order.hold_ms and not self._host.is_held:
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: its hold ran out before its files were there")
                return
            await self._host.launch(self._spec(order))
        except asyncio.CancelledError:
            raise
        except Exception as failure:  # the outermost place of this task: it is answered, never swallowed
            log.warning("%s could not be prepared", order.lease_id, exc_info=failure)
            self._refuse(order, Ending.NEVER_STARTED, f"{order.node}: its working directory: {failure}")

    # ------------------------------------------------------------------ stopping

    async def _stop(self, order: StopAttemptOrder) -> None:
        if self._is_stale(order.lease_id, order.fence):
            log.warning("a stop of %s with an old fence was refused", order.lease_id)
            return
        _, preparing = self._preparing.get(order.lease_id, (None, None))
        if preparing is not None:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        if not self._host.knows(order.lease_id):
            outcome = Outcome(Ending.NEVER_STARTED, detail=f"{order.lease_id} is not known here")
            self._outbox.never_run(order.lease_id, order.fence, outcome)
            return
        noticed = self._displaced.get(order.lease_id)
        if order.ending == Ending.PREEMPTED and self._host.is_under_way(order.lease_id):
            if noticed is None:
                in_ms = self._guard.displace(order.lease_id, order.detail)
                self._displaced[order.lease_id] = asyncio.create_task(self._stop_after(in_ms, order))
            return
        if noticed is not None:
            noticed.cancel()
            del self._displaced[order.lease_id]
        await self._stop_now(order)

    async def _stop_after(self, notice_ms: int, order: StopAttemptOrder) -> None:
        """Stop what was displaced when its notice is over; other orders go on meanwhile."""
        await asyncio.sleep(notice_ms / 1000)
        try:
            await self._stop_now(order)
        except OSError as failure:  # a full disk: the order comes again with the next link
            log.warning("%s could not be stopped", order.lease_id, exc_info=failure)
            self._displaced.pop(order.lease_id, None)

    async def _stop_now(self, order: StopAttemptOrder) -> None:
        await self._host.stop_attempt(order.lease_id, kind=order.ending, detail=order.detail, grace_ms=order.grace_ms)

    # ------------------------------------------------------------------ what is run

    @property
    def _is_remote(self) -> bool:
        """Whether the control plane is on another machine: then nothing here is the caller's."""
        return self._workdirs is not None

    def _spec(self, order: StartAttemptOrder) -> AttemptSpec:
        command, claim = order.command, order.claim
        env = dict(command.env)
        return AttemptSpec(
            attempt_id=order.lease_id,
            job_id=order.job_id,
            node=order.node,
            fence=order.fence,
            argv=command.argv,
            env=self._own_environment(env, command.given) if self._is_remote else env,
            cwd=None if self._is_remote else command.cwd or None,
            cpu_milli=claim.cpu_milli,
            memory_bytes=claim.memory_bytes,
            gpu_indexes=tuple(share.index for share in claim.gpus),
            timeout_ms=command.timeout_ms,
            grace_ms=command.grace_ms,
            hold_ms=order.hold_ms,
        )

    def _own_environment(self, env: dict[str, str], given: tuple[str, ...]) -> dict[str, str]:
        """What a job finds here; a Python that knows the memory pool, and where to ask about it, among it."""
        made = own_environment(env, given)
        desk = self._memory.desk if self._memory is not None else None
        return made if desk is None else {**made, "GRID_MEMORY_SOCKET": str(desk.path), "GRID_PYTHON": sys.executable}
