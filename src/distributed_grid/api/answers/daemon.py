"""Answers about the daemon, its config and the wall clocks."""

from __future__ import annotations

from typing import Any

from distributed_grid.api.answers.common import Answer


class Greeting(Answer, frozen=True, kw_only=True):
    """Answer to the hello of a client."""

    protocol: int
    version: str
    pid: int
    handing_over: bool
    notes: list[str]
    config: str | None
    config_digest: str | None
    started_at: float
    nodes: list[str]
    far_nodes: list[str]  # nodes on other machines: files of a submission are shipped to them


class DaemonInfo(Answer, frozen=True, kw_only=True):
    pid: int
    socket: str
    uptime_seconds: float
    config: str | None
    name: str  # of the cluster
    version: str
    state_dir: str
    stays: bool  # it does not exit when idle
    python: str
    host: str
    rest: str | None  # the address of REST
    warnings: list[str]


class Health(Answer, frozen=True):
    status: str


class ActiveConfig(Answer, frozen=True):
    path: str | None
    config: dict[str, Any]


class ReloadedConfig(Answer, frozen=True, kw_only=True):
    """Keys of a config that were applied, and those that need a new control plane."""

    path: str | None
    applied: list[str]
    pending: list[str]
    advice: str
    notes: list[str]
    handing_over: bool


class DaemonStopping(Answer, frozen=True, kw_only=True):
    stopping: bool = True
    workers: list[str]  # of providers, that remain


class ClockRow(Answer, frozen=True, kw_only=True):
    """Wall clock of the control plane (`node_id` is None) or of a node."""

    node_id: str | None
    jumped_seconds: float | None  # None: no jump is pending
    waits_seconds: float | None

    @classmethod
    def of(cls, node: str | None, by_ms: int, waits_ms: int) -> ClockRow:
        return cls(
            node_id=node,
            jumped_seconds=by_ms / 1000 if by_ms else None,
            waits_seconds=waits_ms / 1000 if by_ms else None,
        )


class ClockList(Answer, frozen=True):
    clocks: list[ClockRow]
