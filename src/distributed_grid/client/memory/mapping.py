"""A pool as a mapping: `pool["key"] = data`, `pool["key"]`, `del pool["key"]`, `"key" in pool`, and so on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from distributed_grid.errors import NotFound

EMPTY = '{"length": 0}'
"""What is noted of a value without bytes: its block has one that means nothing."""


def length_of(block: Mapping[str, Any]) -> int:
    """How many bytes were stored in a block: all it has, or none."""
    return 0 if block["meta"] == EMPTY else int(block["size"])


class NamedBlocks(Protocol):
    """What keeps data under names; NotFound where nothing goes by one."""

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
        """What does it."""

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
