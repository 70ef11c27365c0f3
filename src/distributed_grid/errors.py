"""Error classes: the class says whose fault it is, whether to retry, and the exit code.

Everything raised on purpose is a `GridError`; anything else is a bug. `retryable` means that the same call, unchanged,
may succeed later. The message is one line a person can act on; the CLI prints it as it is. `error_view` is an error as
JSON, on the socket and in REST.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # every command loads this module, `offload wrap` little else
    from collections.abc import Iterable
    from typing import Any, ClassVar


class GridError(Exception):
    """Something went wrong that the grid has a name for."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class BadInput(GridError):
    """The request is invalid; only the caller can correct it."""

    exit_code = 2


class Refused(GridError):
    """The grid understood the request and refused it; `reasons` says why, one line for each node or rule."""

    def __init__(self, message: str, reasons: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.reasons: tuple[str, ...] = tuple(reasons)


class NotFound(Refused):
    """Nothing known, active or ended, has that name."""


class Ambiguous(Refused):
    """The name matches several things; `candidates` lists them."""

    def __init__(self, message: str, candidates: Iterable[str] = (), reasons: Iterable[str] = ()) -> None:
        super().__init__(message, reasons)
        self.candidates: tuple[str, ...] = tuple(candidates)


class Conflict(Refused):
    """The request contradicts the current state, such as a request id used before with other content."""


class Unreachable(GridError):
    """The other side did not answer; it may when asked again."""

    retryable = True
    exit_code = 3


class NoCapacity(GridError):
    """A provider has no machine of that kind at present; `scope` is what is short of it: `zone:NAME`, `market:spot`,
    `kind:gpu`, several of them with spaces between, or empty for the one offer that was asked for."""

    retryable = True

    def __init__(self, message: str, scope: str = "") -> None:
        super().__init__(message)
        self.scope = scope


class Throttled(GridError):
    """The other side takes fewer calls than it gets; nothing was done, and the same call may succeed later."""

    retryable = True


class TimedOut(GridError):
    """The caller's time limit expired first."""

    exit_code = 124


class JobFailed(GridError):
    """A command that had to succeed did not; `result` is its `Result`, output included."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result  # None where the error comes from elsewhere


class StoreRefused(GridError):
    """The database cannot be used as it is, and was left untouched; an administrator has to look at it."""


class StoreFailed(GridError):
    """A write did not happen and left no trace, such as on a full disk; it may succeed later."""

    retryable = True


class IllegalStep(GridError):
    """A step that the transition table does not allow; nothing was changed."""


class StaleFence(GridError):
    """An order carries a fence older than one already seen, so it is outdated."""


class ProtocolError(GridError):
    """The other side broke the protocol, or speaks a version this side does not."""


class BlockLost(GridError):
    """The bytes of a block are gone with the machine that held them; nothing brings them back."""


class Corrupt(GridError):
    """Bytes came back that are not the ones that were written: their digest differs."""


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
