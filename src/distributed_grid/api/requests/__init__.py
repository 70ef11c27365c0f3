"""What can be asked on the socket, as types: a message that does not fit is refused before anything happens.

One file per noun. Here belongs what a message may say; what it makes happen is in `deeds` and its neighbours.
"""

from distributed_grid.api.requests.boosts import Boost, Boosts, ExtendBoost, OneBoost, ReleaseBoost
from distributed_grid.api.requests.commands import RunBoost, Submit
from distributed_grid.api.requests.daemon import Config, Hello, Info, Stay, Stop
from distributed_grid.api.requests.jobs import Cancel, Fetch, Job, Jobs, Logs, Wait
from distributed_grid.api.requests.leases import Ask, Extend, Release
from distributed_grid.api.requests.memory import MemAllocate, MemFind, MemFree, MemList, MemName, MemRenew, MemStats
from distributed_grid.api.requests.nodes import Attach, Cluster, Cooldown, Detach
from distributed_grid.api.requests.parsing import Op, convert, parse
from distributed_grid.api.requests.queries import Events, Explain, Ledger, Metrics, Status
from distributed_grid.api.requests.tokens import (
    CreateJoinToken,
    CreateToken,
    Join,
    ListJoinTokens,
    ListTokens,
    RevokeJoinToken,
    RevokeToken,
)

__all__ = [
    "Ask",
    "Attach",
    "Boost",
    "Boosts",
    "Cancel",
    "Cluster",
    "Config",
    "Cooldown",
    "CreateJoinToken",
    "CreateToken",
    "Detach",
    "Events",
    "Explain",
    "Extend",
    "ExtendBoost",
    "Fetch",
    "Hello",
    "Info",
    "Job",
    "Jobs",
    "Join",
    "Ledger",
    "ListJoinTokens",
    "ListTokens",
    "Logs",
    "MemAllocate",
    "MemFind",
    "MemFree",
    "MemList",
    "MemName",
    "MemRenew",
    "MemStats",
    "Metrics",
    "OneBoost",
    "Op",
    "Release",
    "ReleaseBoost",
    "RevokeJoinToken",
    "RevokeToken",
    "RunBoost",
    "Status",
    "Stay",
    "Stop",
    "Submit",
    "Wait",
    "convert",
    "parse",
]
