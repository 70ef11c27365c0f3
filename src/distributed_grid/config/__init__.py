"""Configuration: cluster files in any accepted spelling, read into one normal form.

Here belong the keys a user may write, their units and defaults, and how mistakes are told. What the values
make happen belongs elsewhere: `wiring` turns a `ClusterConfig` into adapters.
"""

from distributed_grid.config.problems import ConfigProblems, Problem
from distributed_grid.config.providers import AwsProvider, DockerLocalProvider, GcpProvider, Provider
from distributed_grid.config.schema import (
    ClusterConfig,
    GpuConfig,
    NodeConfig,
    check_config,
    load_cluster_config,
)
from distributed_grid.config.sections import (
    Alerts,
    AutoOffload,
    Fairness,
    Logging,
    NodeSharing,
    OwnerPolicy,
    PressureMarks,
    Quota,
    Ray,
    ResourceSharing,
    Scaling,
    Server,
    Thresholds,
)
from distributed_grid.config.template import cluster_template

__all__ = [
    "Alerts",
    "AutoOffload",
    "AwsProvider",
    "ClusterConfig",
    "ConfigProblems",
    "DockerLocalProvider",
    "Fairness",
    "GcpProvider",
    "GpuConfig",
    "Logging",
    "NodeConfig",
    "NodeSharing",
    "OwnerPolicy",
    "PressureMarks",
    "Problem",
    "Provider",
    "Quota",
    "Ray",
    "ResourceSharing",
    "Scaling",
    "Server",
    "Thresholds",
    "check_config",
    "cluster_template",
    "load_cluster_config",
]
