"""From a request as it is sent to the request that the ledger decides about: the border of units and words."""

from __future__ import annotations

from collections.abc import Collection

from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts, Priority
from distributed_grid.domain.strategies import Strategy
from distributed_grid.errors import BadInput
from distributed_grid.orchestration.asking import GB, amounts_of, together
from distributed_grid.server import requests


def request_of(op: requests.Ask | requests.Submit, user: str, team: str, custom: Collection[str]) -> Request:
    """The request in the ledger's units; BadInput says what makes no sense."""
    timeout_ms = round(1000 * op.timeout_seconds) if isinstance(op, requests.Submit) else 0
    return Request(
        op.request_id,
        user,
        _ask(op, custom),
        Priority.parse(op.priority),
        op.prefer,
        op.require,
        round(1000 * op.wait_seconds),
        round(1000 * op.duration_seconds) if isinstance(op, requests.Ask) else 0,
        op.target if isinstance(op, requests.Ask) else "",
        team=team,
        strategy=Strategy.parse(op.strategy) if op.strategy else None,
        labels=tuple(_label(word) for word in op.labels),
        affinity=op.affinity,
        anti_affinity=op.anti_affinity,
        group=op.group,
        gang=op.gang if isinstance(op, requests.Ask) else 1,
        expects_ms=round(1000 * op.expects_seconds) or timeout_ms,
        deadline_ms=round(1000 * op.deadline),
    )


def _ask(op: requests.Ask | requests.Submit, custom: Collection[str]) -> Amounts:
    named = amounts_of(op.resource_type, op.amount, custom)
    others = [amounts_of(kind, amount, custom) for kind, amount in sorted(op.resources.items())]
    memory = round(op.gpu_memory_gb * GB)
    return together(named, *others, Amounts(gpu_memory_bytes=memory, gpu_models=op.gpu_models))


def _label(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    if not key:
        raise BadInput(f"a label needs a key: {word!r}")
    return key, value
