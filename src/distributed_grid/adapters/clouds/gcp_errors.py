"""Errors of Google's Compute Engine, as errors of the port.

Google says what went wrong in the answer to a call, or in an operation that has ended; the codes differ, the meaning is
the same. Where an operation has failed nothing was made, and the same request would only bring back the same failure:
another machine may be had under another name, so it is `NoCapacity` unless it can never succeed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from distributed_grid.errors import GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer

MAX_LINE = 300
STOCKOUT = frozenset(
    {
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "STOCKOUT",
        "UNSUPPORTED_OPERATION",
        "insufficientCapacity",
        "resource_availability",
    }
)
QUOTA = frozenset({"QUOTA_EXCEEDED", "quotaExceeded"})
RATE = frozenset(
    {
        "rateLimitExceeded",
        "userRateLimitExceeded",
        "RATE_LIMIT_EXCEEDED",
        "resourceOperationRateExceeded",
        "RESOURCE_OPERATION_RATE_EXCEEDED",
        "concurrentOperationQuotaExceeded",
        "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED",
    }
)
BUSY = frozenset({"resourceNotReady", "resourceInUseByAnotherResource"})
DISABLED = frozenset({"accessNotConfigured", "SERVICE_DISABLED"})
IMPOSSIBLE = re.compile(r"INVALID|NOT_FOUND|PERMISSION|NOT_SUPPORTED|BAD_|CONDITION_NOT_MET", re.ASCII)
_PERMISSION = re.compile(r"[Rr]equired '?([a-z]+\.[A-Za-z]+\.[A-Za-z]+)'? permission")
_METRIC = re.compile(r"[Qq]uota '([A-Z0-9_]+)' exceeded")


class ApiFailure(Exception):
    """What Google said when a call or an operation failed. `codes` are its words for it, `metric` the quota."""

    def __init__(self, status: int, codes: Iterable[str], message: str, metric: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.codes = frozenset(codes)
        self.message = message
        found = _METRIC.search(message)
        self.metric = metric or (found[1] if found else "")

    @classmethod
    def of(cls, status: int, body: Any) -> ApiFailure:
        """The failure that the answer to a call describes, in the old or the new form."""
        error = _mapping(_mapping(body).get("error"))
        parts = (*_mappings(error.get("errors")), *_mappings(error.get("details")))
        codes = {str(error.get("status") or ""), *(str(one.get("reason") or "") for one in parts)}
        message = one_line(str(error.get("message") or "")) or f"HTTP {status}"
        return cls(status, codes - {""}, message)

    @classmethod
    def of_operation(cls, operation: Mapping[str, Any]) -> ApiFailure | None:
        """Why an operation failed; None where it did not."""
        errors = _mappings(_mapping(operation.get("error")).get("errors"))
        if not errors:
            return None
        codes, metric = set(), ""
        for one in errors:
            codes.add(str(one.get("code") or ""))
            for detail in _mappings(one.get("errorDetails")):
                codes.add(str(_mapping(detail.get("errorInfo")).get("reason") or ""))
                limit = str(_mapping(detail.get("quotaInfo")).get("limitName") or "")
                metric = metric or limit.partition("-per-")[0].replace("-", "_")
        status = operation.get("httpErrorStatusCode")
        message = one_line("; ".join(str(one.get("message") or one.get("code")) for one in errors))
        return cls(status if isinstance(status, int) else 0, codes - {""}, message, metric)


def call_error(
    failure: ApiFailure, why: str, offer: WorkerOffer | None = None, *, is_one_region: bool = True
) -> GridError:
    """What a call that failed means; `offer` is what was to be created."""
    if offer is not None and (found := _shortage(failure, why, offer, is_one_region)):
        return found
    if failure.codes & RATE or failure.status == 429:
        return Throttled(f"{why}: {failure.message}")
    if failure.status == 401:
        return Refused(f"{why}: Google does not accept the credentials: {failure.message}")
    if failure.codes & DISABLED:
        return Refused(f"{why}: the Compute Engine API is not enabled in this project: {failure.message}")
    if failure.status == 403:
        missing = _PERMISSION.search(failure.message)
        which = f"the credentials lack the permission {missing[1]}" if missing else "the credentials may not do that"
        return Refused(f"{why}: {which}: {failure.message}")
    if failure.codes & BUSY or failure.status in (408, 409) or not 400 <= failure.status < 500:
        return Unreachable(f"{why}: {failure.message}")
    return Refused(f"{why}: {failure.message}")


def operation_error(failure: ApiFailure, why: str, offer: WorkerOffer, *, is_one_region: bool = True) -> GridError:
    """What it means that the operation of a creation has failed."""
    if found := _shortage(failure, why, offer, is_one_region):
        return found
    if any(IMPOSSIBLE.search(code) for code in failure.codes):
        return Refused(f"{why}: {failure.message}")
    return NoCapacity(f"{why}: {failure.message}")


def _shortage(failure: ApiFailure, why: str, offer: WorkerOffer, is_one_region: bool) -> NoCapacity | None:
    """No machine to be had, or a limit of the project reached, with what is short of it."""
    if failure.codes & STOCKOUT:
        return NoCapacity(f"{why}: {failure.message}")
    if not failure.codes & QUOTA:
        return None
    words = f"{why}: {failure.message}"
    if failure.metric.endswith("_ALL_REGIONS"):
        return NoCapacity(words, f"kind:{offer.worker_type}")
    # A zone of another region may have room: with several regions only this offer is closed.
    return NoCapacity(words, f"market:{offer.market} kind:{offer.worker_type}" if is_one_region else "")


def one_line(text: str) -> str:
    """Printable text of bounded length, on one line."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))[:MAX_LINE]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
