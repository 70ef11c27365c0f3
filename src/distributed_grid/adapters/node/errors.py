"""Failures of operations on a node."""

from __future__ import annotations

from distributed_grid.errors import GridError


class NodeOperationFailed(GridError):
    """Something on the way to a node, or on it, did not work; `final`: trying again will not help by itself."""

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final
