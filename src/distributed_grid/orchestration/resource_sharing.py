"""The words of resource sharing under the import path the guide uses."""

from distributed_grid.domain.resources import Priority as AllocationPriority
from distributed_grid.domain.resources import ResourceType

__all__ = ["AllocationPriority", "ResourceType"]
