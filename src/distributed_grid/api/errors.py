"""Errors as JSON on the socket and in REST, and back."""

from __future__ import annotations

from typing import Any

from distributed_grid.errors import (
    Ambiguous,
    BadInput,
    BlockLost,
    Conflict,
    GridError,
    NotFound,
    ProtocolError,
    Refused,
    StoreFailed,
    TimedOut,
    Unreachable,
)

_KINDS: dict[str, type[GridError]] = {
    kind.__name__: kind
    for kind in (
        GridError,
        BadInput,
        Refused,
        NotFound,
        Conflict,
        Unreachable,
        TimedOut,
        StoreFailed,
        ProtocolError,
        BlockLost,
    )
}


def error_view(error: GridError) -> dict[str, Any]:
    """An error as JSON."""
    view: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    if isinstance(error, Refused):
        view["reasons"] = list(error.reasons)
    if isinstance(error, Ambiguous):
        view["candidates"] = list(error.candidates)
    return view


def error_from(error: dict[str, Any]) -> GridError:
    """The error that the control plane raised."""
    if error["type"] == "Ambiguous":
        return Ambiguous(error["message"], error.get("candidates", ()))
    kind = _KINDS.get(error["type"], GridError)
    if issubclass(kind, Refused):
        return kind(error["message"], error.get("reasons", ()))
    return kind(error["message"])
