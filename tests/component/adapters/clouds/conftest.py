"""A real Docker engine for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.docker_engines import LocalDockerEngine, problem

SLEEPER = "sleeper"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDockerEngine]:
    """An engine with an image whose agent only sleeps."""
    if reason := problem():
        pytest.skip(reason)
    engine = LocalDockerEngine(tmp_path_factory.mktemp("docker"), ["--add-runtime=nvidia=/usr/sbin/runc"])
    try:
        engine.start()
        engine.build_small_image(SLEEPER, "trap 'exit 0' TERM; sleep 1000 & wait")
        yield engine
    finally:
        engine.stop()
