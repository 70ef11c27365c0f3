"""Reconciler of the engine: binds and frees groups as the ledger demands, and compares both.

A binding is in the ledger before its group is made, and a group is gone before its binding leaves. While the engine is
away leases stay as they are; when it is back, and every minute, both are compared, and groups of the grid that the
ledger does not have are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from distributed_grid.control.grid import Grid
from distributed_grid.control.reconciler import Reconciler
from distributed_grid.domain.engines import Binding, parse_group_name
from distributed_grid.domain.events import EngineObserved, GroupBound, GroupFreed, GroupRefused, GroupTermSet
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import Refused, Unreachable
from distributed_grid.ports import Engine, EngineGroup, EngineView
from distributed_grid.reactor.effects import BindLease, EngineEffect, SetGroupTerm, engine_effects

NAME = "ray"
BIND_SECONDS, RETRY_SECONDS = 10.0, 0.25
POLL_SECONDS, COMPARE_SECONDS = 3.0, 60.0
log = logging.getLogger(__name__)


class EngineReconciler:
    """Performs effects on one engine, observes it often and extends its hold; compares every minute and whenever the
    engine is back."""

    def __init__(self, grid: Grid, engine: Engine, *, hold_seconds: float) -> None:
        self._grid = grid
        self._engine = engine
        self._hold_seconds = hold_seconds
        self._work = Reconciler()
        self._is_full_due = True
        self._compared_at = self._held_at = float("-inf")
        self._on_view: Callable[[EngineView], Awaitable[None]] | None = None

    def start(self, *, on_view: Callable[[EngineView], Awaitable[None]]) -> None:
        """Begin to reconcile; `on_view` gets each view of the engine before the ledger does."""
        self._on_view = on_view
        self._work.start(self._reconcile, POLL_SECONDS, "the comparison with Ray")

    async def stop(self) -> None:
        """Leave everything as it is for the next control plane. Safe to call twice."""
        await self._work.stop()

    def compare_soon(self) -> None:
        """Compare at once: the engine is back."""
        self._is_full_due = True
        self._work.wake()

    def perform(self, effect: EngineEffect) -> None:
        binding = effect.binding
        if isinstance(effect, BindLease):
            self._work.begin(binding.key, partial(self._bind, binding, effect.lease), binding.key)
        elif isinstance(effect, SetGroupTerm):
            key = f"term {binding.key} {effect.lease.ends_at_ms}"
            self._work.begin(key, partial(self._set_term, binding, effect.lease.ends_at_ms), key)
        else:
            key = f"free {binding.key}"
            self._work.begin(key, partial(self._free, binding), key)

    async def _bind(self, binding: Binding, lease: Lease) -> None:
        """Reserve the group of a binding, or report its refusal; one that was bound before waits for the engine."""
        loop = asyncio.get_running_loop()
        until = loop.time() + BIND_SECONDS
        while True:
            try:
                await self._engine.reserve(group_of(binding, lease, self._grid.now_ms()), seconds=BIND_SECONDS)
            except Refused as refusal:
                await self._grid.handle_with_retry(GroupRefused(binding.key, f"{binding.node}: {refusal}"))
            except Unreachable as away:
                if not binding.again and loop.time() < until:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if not binding.again:
                    await self._grid.handle_with_retry(GroupRefused(binding.key, f"{binding.node}: {away}"))
            else:
                await self._grid.handle_with_retry(GroupBound(binding.key, lease.ends_at_ms))
            return

    async def _set_term(self, binding: Binding, ends_at_ms: int) -> None:
        """Send the engine the end of a lease; while it is away the next `_extend_hold` does."""
        left = max(ends_at_ms - self._grid.now_ms(), 0) / 1000
        try:
            missing = await self._engine.extend_hold(self._hold_seconds, {binding.group: left})
        except Unreachable as away:
            log.info("%s gets its longer term when the engine is back: %s", binding.group, away)
            return
        if missing:
            self.compare_soon()  # the engine has forgotten the group: it is bound again
        else:
            await self._grid.handle_with_retry(GroupTermSet(binding.key, ends_at_ms))

    async def _free(self, binding: Binding) -> None:
        """Free the group of a binding; while the engine is away the binding stays, and is freed later."""
        await self._work.wait_for(binding.key)
        try:
            await self._engine.free(binding.group)
        except Unreachable as away:
            log.info("%s is freed when the engine is back: %s", binding.group, away)
        else:
            await self._grid.handle_with_retry(GroupFreed(binding.key))

    # ------------------------------------------------------------------ comparing

    async def _reconcile(self) -> None:
        loop = asyncio.get_running_loop()
        full = self._is_full_due or loop.time() - self._compared_at >= COMPARE_SECONDS
        self._is_full_due = False
        try:
            if full or loop.time() - self._held_at >= self._hold_seconds / 6:
                await self._extend_hold()
                self._held_at = loop.time()
            await self.compare(full=full)
            self._compared_at = loop.time() if full else self._compared_at
        except Unreachable:
            self._compared_at = float("-inf")
        except Exception:  # the outermost loop: the next try comes soon
            log.exception("the engine could not be observed")

    async def compare(self, *, full: bool) -> None:
        """Bring the ledger in line with the engine, and with `full` the engine with the ledger."""
        grid = self._grid
        if NAME not in grid.ledger.engines:
            return
        asked_at_ms = grid.now_ms()
        view = await self._engine.observe(full=full)
        if self._on_view is not None:
            await self._on_view(view)
        observed = EngineObserved(
            name=NAME,
            session=view.session,
            asked_at_ms=asked_at_ms,
            nodes=view.nodes,
            groups=view.groups,
            in_use=view.in_use,
        )
        await grid.handle_with_retry(observed)
        if full:
            strays = await grid.read(lambda ledger, now: find_strays(ledger, view))
            for name in strays:
                log.warning("removing %s: no lease goes by that name", name)
                await self._engine.free(name)
            for effect in await grid.read(lambda ledger, now: engine_effects(ledger)):
                self.perform(effect)

    async def _extend_hold(self) -> None:
        """Renew the hold, with the end of each lease: without a control plane the engine frees groups by it."""

        def terms(ledger: Ledger, now: int) -> tuple[dict[str, float], list[tuple[Binding, int]]]:
            pairs = ((binding, ledger.leases.get(binding.lease_id)) for binding in ledger.bindings.values())
            ends = [(binding, lease.ends_at_ms) for binding, lease in pairs if lease is not None and lease.ends_at_ms]
            left = {binding.group: max(ends_at_ms - now, 0) / 1000 for binding, ends_at_ms in ends}
            return left, [(binding, ends_at_ms) for binding, ends_at_ms in ends if binding.term_ms < ends_at_ms]

        left, extended = await self._grid.read(terms)
        missing = await self._engine.extend_hold(self._hold_seconds, left)
        for binding, ends_at_ms in extended:
            if binding.bound_at_ms and binding.group not in missing:
                await self._grid.handle_with_retry(GroupTermSet(binding.key, ends_at_ms))


def find_strays(ledger: Ledger, view: EngineView) -> list[str]:
    """Groups with names of this grid that have no binding."""
    named = ((name, parse_group_name(name)) for name, _ in view.groups or ())
    return [name for name, key in named if key is not None and f"{key[0]}-{key[1]}" not in ledger.bindings]


def group_of(binding: Binding, lease: Lease, now: int) -> EngineGroup:
    claim = lease.claim
    assert claim is not None
    return EngineGroup(
        binding.group,
        binding.place,
        cpu_milli=claim.cpu_milli,
        memory_bytes=claim.memory_bytes,
        gpu_milli=sum(share.milli for share in claim.gpus),
        custom=claim.custom,
        left_seconds=max(lease.ends_at_ms - now, 1) / 1000 if lease.ends_at_ms else 0.0,
    )
