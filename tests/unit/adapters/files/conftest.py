"""Property tests here touch real files: fewer examples, and the same ones each time."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from distributed_grid.adapters.files import BlobStore

settings.register_profile(
    "files",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("files")


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")
