"""What every message is made of: texts of a largest length, ids that fit a file name, and times in seconds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=4096)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Name = Annotated[str, Meta(max_length=128)]
TokenId = Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Meta(ge=0, le=3.2e9)]


class Message(Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True):
    """A message of the socket protocol."""


class PlacementOptions(Message, frozen=True, kw_only=True):
    """What else can be said of a request, with a command or without.

    `resources` is asked for besides the type and the amount. A label is `key=value`, or a key or tag alone; an
    affinity names a node, a job or a group. `deadline` is a moment, in seconds since 1970.
    """

    resources: dict[Name, float] = {}
    gpu_models: tuple[Name, ...] = ()
    gpu_memory_gb: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    strategy: Name = ""
    labels: tuple[Name, ...] = ()
    affinity: tuple[Name, ...] = ()
    anti_affinity: tuple[Name, ...] = ()
    group: Name = ""
    expects_seconds: Seconds = 0.0
    deadline: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    dry_run: bool = False
