"""Mapping interface of a pool: `pool["key"] = data`, `pool["key"]`, `del pool["key"]`, `"key" in pool`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from distributed_grid.errors import NotFound


class NamedBlocks(Protocol):
    """Stores data under names; NotFound where a name has none."""

    def store(self, name: str, data: Any) -> str: ...
    def retrieve(self, name: str) -> bytes: ...
    def remove(self, name: str) -> None: ...
    def has(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...


class PoolMapping(MutableMapping[str, bytes]):
    """The names of a pool as keys. A pool is equal to itself alone, and true even where it is empty."""

    @property
    @abstractmethod
    def by_name(self) -> NamedBlocks:
        """The pool that stores the values."""

    def __getitem__(self, name: str) -> bytes:
        try:
            return self.by_name.retrieve(name)
        except NotFound:
            raise KeyError(name) from None

    def __setitem__(self, name: str, data: Any) -> None:
        self.by_name.store(name, data)

    def __delitem__(self, name: str) -> None:
        try:
            self.by_name.remove(name)
        except NotFound:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.by_name.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name.names())

    def __len__(self) -> int:
        return len(self.by_name.names())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
