"""A content store in a temporary folder; small real disks to fill."""

from pathlib import Path

import pytest

from distributed_grid.trees.content_store import ContentStore
from tests.support.disk_fixtures import mount, small_disk

__all__ = ["mount", "small_disk", "store"]


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(tmp_path / "store")
