"""Deliveries: files of an ended job that are brought into a directory of its user, until all of them are there."""

from __future__ import annotations

import enum
from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.rows import HistoryEntry, Row

MAX_NAMED_FILES = 100
"""Paths that a delivery names at most; the rest is only counted."""


class FetchOrder(Struct, frozen=True, omit_defaults=True):
    """Files to bring back when a job has ended."""

    patterns: tuple[str, ...]
    directory: str = ""
    """Directory on the control plane's machine; empty: one of the control plane's own."""
    overwrite: bool = False
    umask: int = 0o077


class DeliveryEnd(enum.StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"
    """There is nothing to bring: the job never started, or its directory is gone."""


class DeliveredFiles(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Files that were written into a directory, and what their user has to know about them."""

    directory: str = ""
    files: int = 0
    bytes: int = 0
    unchanged: int = 0
    in_place: bool = False
    """The job ran in its user's own directory: its files are there."""
    beside: tuple[tuple[str, str], ...] = ()
    """Local files that stay, each with the name of the job's version."""
    protected: tuple[str, ...] = ()
    executable: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class Delivery(Row, frozen=True, omit_defaults=True, kw_only=True):
    """Files of one ended job on their way to its user; over when they are there."""

    kind: ClassVar[str] = "delivery"

    job: str
    """Uid of the job; `job_id` is its name."""
    job_id: str
    user: str
    node: str
    order: FetchOrder
    began_at_ms: int
    shipped: str = ""
    """Manifest of the tree that the job began with; needed to tell which files it has changed."""
    problem: str = ""
    """Reason of the last failed try, or of the end."""
    delivered: DeliveredFiles = DeliveredFiles()
    end: DeliveryEnd | None = None
    ended_at_ms: int = 0

    @property
    def key(self) -> str:
        return self.job

    @property
    def is_over(self) -> bool:
        return self.end is not None

    def ended(self) -> HistoryEntry:
        return HistoryEntry(
            key=self.job,
            request_id=self.job,
            user=self.user,
            node=self.node,
            ended_at_ms=self.ended_at_ms,
            reason=str(self.end),
        )
