"""A content store in a temporary folder."""

from pathlib import Path

import pytest

from distributed_grid.adapters.workdir.content_store import ContentStore


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "store")
