"""Every store satisfies the contract of the `Store` port."""

from pathlib import Path

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.ports import Store
from tests.support.store_contract import StoreContract


class TestInMemoryStore(StoreContract):
    def new_store(self, directory: Path) -> Store:
        return InMemoryStore()


class TestSqliteStore(StoreContract):
    def new_store(self, directory: Path) -> Store:
        return SqliteStore(directory / "grid.db")
