"""The engine in memory keeps the promises of the `Engine` port; Ray's does in tests/acceptance/ray."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from distributed_grid.adapters.engines.local import LocalEngine
from distributed_grid.domain.engines import Room
from distributed_grid.ports import Engine
from distributed_grid.testing.engine_contract import EngineContract


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return LocalEngine({"n1": Room(4000, 1 << 30, 1000), "n2": Room(2000, 1 << 30, 0)})

    def run(self, deed: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(deed)
