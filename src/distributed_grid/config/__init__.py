"""Configuration: cluster files in any accepted spelling, read into one normal form.

Here belong the keys a user may write, their units and defaults, and how mistakes are told. What the values
make happen belongs elsewhere: `wiring` turns a `ClusterConfig` into adapters.
"""

from distributed_grid.config.cluster_config import (
    ClusterConfig,
    GpuConfig,
    NodeConfig,
    check_config,
    load_cluster_config,
)
from distributed_grid.config.errors import ConfigProblem, ConfigProblems
from distributed_grid.config.providers import AwsProvider, DockerLocalProvider, GcpProvider, Provider
from distributed_grid.config.sections import (
    Alerts,
    AutoOffload,
    Fairness,
    Logging,
    NodeSharing,
    OwnerPolicy,
    PressureMarks,
    QuotaConfig,
    Ray,
    ResourceSharing,
    Scaling,
    ServerConfig,
    ThresholdConfig,
)
from distributed_grid.config.template import cluster_template

__all__ = [
    "Alerts",
    "AutoOffload",
    "AwsProvider",
    "ClusterConfig",
    "ConfigProblem",
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
    "Provider",
    "QuotaConfig",
    "Ray",
    "ResourceSharing",
    "Scaling",
    "ServerConfig",
    "ThresholdConfig",
    "check_config",
    "cluster_template",
    "load_cluster_config",
]
