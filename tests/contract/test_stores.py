"""Every store keeps the promises of the `Store` port."""

from pathlib import Path

from distributed_grid.adapters.stores.in_memory import MemoryStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Store
from tests.support.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    def new_store(self, directory: Path) -> Store:
        return MemoryStore()


class TestSqliteStore(StoreContract):
    def new_store(self, directory: Path) -> Store:
        return SqliteStore(directory / "grid.db")
