"""Conversion of requests from people's units (`cpu`, 1.5) to the ledger's (1500 millicores)."""

from __future__ import annotations

import math
from collections.abc import Collection

from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import RequestRefused
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts, Priority, ResourceType
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput, GridError, Refused
from distributed_grid.server.access.tokens import Caller

GB = 1024**3


def amounts_of(resource_type: str, amount: float, custom: Collection[str] = ()) -> Amounts:
    """The integers that "this much of that" means; refuses what is no amount of anything."""
    if not math.isfinite(amount) or amount <= 0:
        raise BadInput(f"the amount must be more than zero, not {amount:g}")
    kind = resource_type.lower()
    if kind == ResourceType.CPU:
        return Amounts(cpu_milli=_milli(amount, "cores"))
    if kind == ResourceType.GPU:
        return Amounts(gpu_milli=_milli(amount, "GPUs"))
    if kind == ResourceType.MEMORY:
        return Amounts(memory_bytes=_whole(amount * GB, "memory"))
    names = {name.lower(): name for name in custom}
    if kind not in names:
        known = ", ".join([*(kind.value for kind in ResourceType), *sorted(names.values())])
        raise BadInput(f"no resource is called {resource_type!r}: there is {known}")
    if amount != int(amount):
        raise BadInput(f"{names[kind]} can only be asked for in whole numbers, not {amount:g}")
    return Amounts(custom=((names[kind], _whole(amount, names[kind])),))


def combine_amounts(*parts: Amounts) -> Amounts:
    """Several asks as one; asking twice for the same is refused."""
    total = Amounts()
    for part in parts:
        names = [name for name in _SUMMED if getattr(part, name) and getattr(total, name)]
        if names or {name for name, _ in part.custom} & {name for name, _ in total.custom}:
            raise BadInput("a resource is asked for twice")
        total = Amounts(
            **{name: getattr(part, name) or getattr(total, name) for name in _SUMMED},
            custom=tuple(sorted(total.custom + part.custom)),
            gpu_models=total.gpu_models + part.gpu_models,
        )
    return total


_SUMMED = ("cpu_milli", "memory_bytes", "gpu_milli", "gpu_memory_bytes")


def _milli(amount: float, of: str) -> int:
    return _whole(amount * 1000, of)


def _whole(number: float, of: str) -> int:
    if number > 2**60:
        raise BadInput(f"no machine has that much: {of} {number:g}")
    if round(number) == 0:
        raise BadInput(f"that is too little {of} to lend")
    return round(number)


class RequestConverter:
    """Converts requests, and records those it refuses in the audit trail."""

    def __init__(self, grid: Grid, *, sharing_enabled: bool, custom_resources: frozenset[str]) -> None:
        self._grid = grid
        self.sharing_enabled = sharing_enabled
        self._custom_resources = custom_resources

    async def convert(self, op: requests.RequestLease | requests.SubmitJob, caller: Caller) -> Request:
        """The request in the ledger's units; a refusal is raised, and recorded unless it is a dry run."""
        try:
            if not self.sharing_enabled:
                raise Refused("Resource sharing not enabled: set resource_sharing.enabled to true in the config")
            return request_of(op, caller.user, caller.team, self._custom_resources)
        except GridError as refusal:
            if not op.dry_run:
                await self._grid.handle(RequestRefused(op.request_id, caller.user, str(refusal)))
            raise


def request_of(
    op: requests.RequestLease | requests.SubmitJob, user: str, team: str, custom: Collection[str]
) -> Request:
    """The request in the ledger's units; BadInput says what is wrong with it."""
    timeout_ms = round(1000 * op.timeout_seconds) if isinstance(op, requests.SubmitJob) else 0
    return Request(
        op.request_id,
        user,
        _ask(op, custom),
        Priority.parse(op.priority),
        op.prefer,
        op.require,
        round(1000 * op.wait_seconds),
        round(1000 * op.duration_seconds) if isinstance(op, requests.RequestLease) else 0,
        op.target if isinstance(op, requests.RequestLease) else "",
        team=team,
        strategy=Strategy.parse(op.strategy) if op.strategy else None,
        labels=tuple(_label(word) for word in op.labels),
        affinity=op.affinity,
        anti_affinity=op.anti_affinity,
        group=op.group,
        gang=op.gang if isinstance(op, requests.RequestLease) else 1,
        expects_ms=round(1000 * op.expects_seconds) or timeout_ms,
        deadline_ms=round(1000 * op.deadline),
    )


def _ask(op: requests.RequestLease | requests.SubmitJob, custom: Collection[str]) -> Amounts:
    named = amounts_of(op.resource_type, op.amount, custom)
    others = [amounts_of(kind, amount, custom) for kind, amount in sorted(op.resources.items())]
    memory = round(op.gpu_memory_gb * GB)
    return combine_amounts(named, *others, Amounts(gpu_memory_bytes=memory, gpu_models=op.gpu_models))


def _label(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    if not key:
        raise BadInput(f"a label needs a key: {word!r}")
    return key, value
