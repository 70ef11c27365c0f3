"""A real Slurm cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slurm_cluster import SlurmCluster, problem


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster of one node with eight cores, or what it calls so. It remembers a job for as long as a control plane on
    a busy machine may take to look: the files of one that it has forgotten are removed much later."""
    if reason := problem():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), cpus=8, memory_mb=4096, min_job_age=60) as cluster:
        yield cluster
