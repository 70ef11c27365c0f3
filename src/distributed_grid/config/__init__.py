"""Configuration: cluster files in any accepted spelling, read into one normal form.

Belongs here: the keys a user may write, their units and defaults, and how mistakes are reported. Does not belong here:
what the values make happen; `config_mapping` turns a `ClusterConfig` into domain values.
"""

from distributed_grid.config.cluster_config import ClusterConfig, check_config, cluster_template, load_cluster_config
from distributed_grid.config.sections import NodeConfig
from distributed_grid.config.yaml_document import ConfigProblem, ConfigProblems

__all__ = [
    "ClusterConfig",
    "ConfigProblem",
    "ConfigProblems",
    "NodeConfig",
    "check_config",
    "cluster_template",
    "load_cluster_config",
]
