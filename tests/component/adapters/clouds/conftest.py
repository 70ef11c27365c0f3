"""A real Docker engine, and a real Slurm cluster, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import slurm_cluster
from tests.support.docker_engines import LocalDockerEngine, problem
from tests.support.slurm_cluster import SlurmCluster

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


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster of one node."""
    if reason := slurm_cluster.problem():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), cpus=32, memory_mb=8192) as cluster:
        yield cluster
