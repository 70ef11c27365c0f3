"""From bytes or fields to a message, or to BadInput: there is no third way."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from distributed_grid.api.requests.boosts import Boost, Boosts, ExtendBoost, OneBoost, ReleaseBoost
from distributed_grid.api.requests.commands import RunBoost, Submit
from distributed_grid.api.requests.daemon import Config, Hello, Info, Stay, Stop
from distributed_grid.api.requests.jobs import Cancel, Fetch, Job, Jobs, Logs, Wait
from distributed_grid.api.requests.leases import Ask, Extend, Release
from distributed_grid.api.requests.memory import MemAllocate, MemFind, MemFree, MemList, MemName, MemRenew, MemStats
from distributed_grid.api.requests.nodes import Attach, Cluster, Cooldown, Detach
from distributed_grid.api.requests.queries import Events, Explain, Ledger, Metrics, Status
from distributed_grid.api.requests.tokens import (
    CreateJoinToken,
    CreateToken,
    ListJoinTokens,
    ListTokens,
    RevokeJoinToken,
    RevokeToken,
)
from distributed_grid.errors import BadInput

T = TypeVar("T")
Op = (
    Hello | Status | Info | Config | Ask | Release | Extend | Submit
    | Jobs | Job | Explain | Ledger | Cancel | Wait | Logs | Fetch | Events | Metrics | Cluster | Stay | Stop
    | Attach | Detach
    | Boost | Boosts | ReleaseBoost | ExtendBoost | OneBoost | RunBoost | Cooldown
    | MemAllocate | MemFind | MemFree | MemName | MemRenew | MemList | MemStats
    | CreateToken | ListTokens | RevokeToken | CreateJoinToken | ListJoinTokens | RevokeJoinToken
)  # fmt: skip
_decoder: msgspec.json.Decoder[Op] = msgspec.json.Decoder(Op)


def parse(body: bytes) -> Op:
    """The message in these bytes; BadInput says what does not fit."""
    try:
        op = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadInput(f"the request makes no sense: {error}") from None
    return _checked(op)


def convert(fields: dict[str, Any], kind: type[T]) -> T:
    """The message of this kind with these fields; BadInput says what does not fit."""
    if "op" in fields:
        raise BadInput("the request makes no sense: Object contains unknown field `op`")
    try:
        op = msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"the request makes no sense: {error}") from None
    return _checked(op)


def _checked(op: T) -> T:
    if isinstance(op, Submit | RunBoost) and (problem := op.problem()) is not None:
        raise BadInput(problem)
    return op
