"""Template of a cluster file, written by `grid init`: usable as it is, with the optional keys in comments."""

from __future__ import annotations

_TEMPLATE = """\
# A cluster file for `grid`. Only what is not commented out is set; every other key has a default.
# `grid config check` names every mistake, `grid config show` shows what it comes to.

name: my-cluster

nodes:
# An agent on this machine, without SSH. What it has is measured.
- name: here
  host: local
  role: head

# A machine reached over SSH: copy this for each one.
# - name: gpu1
#   host: 192.168.1.11            # default: the name
#   user: ana                     # default: your login
#   port: 22
#   ssh_key_path: ~/.ssh/id_ed25519
#   role: worker
#   tags: [gpu]
#   labels: {room: cellar}
#   resource_sharing:
#     can_share: true
#     max_share_cpu: 6            # cores; default: all
#     max_share_memory_gb: 12
#     max_share_gpu: 1
#     priority: 2.0               # the higher, the sooner it is asked to lend

resource_sharing:
  enabled: true
  mode: dynamic_balancing         # offload_only, share_and_offload, dynamic_balancing
  policy: balanced                # conservative, balanced, aggressive, predictive
  # check_interval: 60            # seconds before an offer is computed anew
  # offer_expiry: 300             # seconds
  # rebalance_interval: 30        # seconds
  # monitoring_interval: 10       # seconds
  thresholds:
    # How idle another machine must be before it lends.
    cpu_percent_max: 30.0         # percent
    cpu_min_cores: 1.0
    memory_percent_max: 50.0      # percent
    memory_min_gb: 2.0
    gpu_utilization_max: 20.0     # percent
    gpu_memory_min_mb: 1024.0
    # dwell: 1200                 # seconds it must have been so idle before it lends again
    # When a node asks for more (high) and when it gives (low), as ratios.
    cpu_pressure_high: 0.8
    cpu_pressure_low: 0.3
    memory_pressure_high: 0.8
    memory_pressure_low: 0.3
    gpu_pressure_high: 0.8
    gpu_pressure_low: 0.3

# owner_policy:                   # what borrowed work does when the owner is back
#   throttle: true
#   pause: true
#   evict: true
#   notice_seconds: 5

# server:                         # REST, and agents that join with a token
#   host: 192.168.1.10            # default: 127.0.0.1, this machine only; anywhere else TLS is used
#   port: 7433

# ray:                            # how `grid cluster start --ray` starts Ray
#   python: ~/ray/bin/python      # an interpreter on the nodes that has Ray; default: what the grid installs
#   port: 6379
#   tls: false

# alerts:
#   memory: 0.75
#   webhook: ${GRID_ALERT_WEBHOOK}

# quotas:
#   ana: {cpu: 16, memory_gb: 64, gpu: 2}

# scaling:
#   provider: docker_local
#   max_workers: 4
#   budget_per_day: 20

# providers:
#   docker_local:
#     image: grid-worker:latest
#     cpu_limit: 4
#     memory_limit: 16g
"""


def cluster_template() -> str:
    """A commented cluster file that loads."""
    return _TEMPLATE
