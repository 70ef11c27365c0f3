"""A real Docker engine with the image of `make worker-image`, for all tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.docker_engines import LocalDockerEngine, problem
from tests.support.project import PROJECT


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDockerEngine]:
    """The engine."""
    if reason := problem():
        pytest.skip(reason)
    engine = LocalDockerEngine(tmp_path_factory.mktemp("docker"))
    try:
        engine.start()
        build = ["make", "worker-image", f"IMAGE_ARGS=--engine {engine.url}"]
        subprocess.run(build, cwd=PROJECT, check=True, timeout=300)
        yield engine
    finally:
        engine.stop()
