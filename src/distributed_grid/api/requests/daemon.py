"""About the control plane itself: who connects, which config it uses, whether it stays."""

from __future__ import annotations

from distributed_grid.api.requests.message import Message, Name, Text


class Hello(Message, frozen=True):
    """Who connects, and which config it insists on."""

    protocol: int
    version: Name
    config: Name | None = None
    config_path: Text | None = None


class Info(Message, frozen=True):
    """About the control plane itself."""


class Config(Message, frozen=True):
    """The config in use, in its normal form."""


class Stay(Message, frozen=True):
    """Let a control plane that was started on demand stay until it is stopped, and listen there."""

    listen: Name = ""
    tls: bool | None = None
    force_plain: bool = False


class Stop(Message, frozen=True):
    """End the control plane; jobs go on and are found again by the next one."""
