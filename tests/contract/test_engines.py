"""The engine in memory keeps the promises of the `Engine` port; Ray's does in tests/acceptance/ray."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from distributed_grid.domain.engines import EngineResources
from distributed_grid.ports import Engine
from tests.support.engine_contract import EngineContract
from tests.support.local_engine import LocalEngine


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return LocalEngine({"n1": EngineResources(4000, 1 << 30, 1000), "n2": EngineResources(2000, 1 << 30, 0)})

    def run(self, deed: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(deed)
