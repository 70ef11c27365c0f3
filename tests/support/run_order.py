"""Order of parallel test runs: which tests stay in one worker, and which files are begun first.

What takes longest comes first, so that at the end no worker is left with a long file while the others have nothing to
do. Of the tests with real processes, those that mostly wait are begun together with those that mostly compute.
"""

from __future__ import annotations

RAY_LAB = "tests/lab/ray/"
"""Its files share one lab, so they run in one worker."""

INDEPENDENT = frozenset(
    {"tests/e2e/test_installation.py", "tests/e2e/test_documented_commands.py", "tests/e2e/test_bench.py"}
)
"""Files whose tests are long and share nothing: each test may run in a worker of its own."""

FIRST = (
    # real processes
    RAY_LAB,
    "tests/e2e/test_installation.py",
    "tests/lab/hosts/test_faults.py",
    "tests/e2e/test_documented_commands.py",
    "tests/e2e/test_bench.py",
    "tests/e2e/ray/test_attach.py",
    "tests/e2e/slurm/test_slurm_workers.py",
    "tests/e2e/ray/test_ray_in_a_clone.py",
    "tests/lab/hosts/test_memory.py",
    "tests/lab/hosts/test_cluster.py",
    "tests/lab/hosts/test_agents.py",
    "tests/e2e/agents/test_hostile_agent.py",
    "tests/e2e/test_seed_003.py",
    "tests/e2e/docker/test_docker_workers.py",
    "tests/e2e/clouds/test_guide.py",
    "tests/e2e/test_fresh_clone.py",
    "tests/e2e/test_boot_script.py",
    "tests/e2e/test_rest.py",
    "tests/e2e/test_announced_ends.py",
    "tests/e2e/agents/test_full_disks.py",
    "tests/lab/hosts/test_moves.py",
    "tests/lab/hosts/test_join.py",
    "tests/e2e/test_scaling.py",
    "tests/e2e/test_requests.py",
    "tests/e2e/crashes/test_removed_state_dir.py",
    "tests/component/agent/execution/test_damaged_records.py",
    "tests/e2e/test_memory.py",
    "tests/e2e/clouds/test_gcp.py",
    "tests/contract/test_web_providers.py",
    "tests/component/agent/execution/test_owner_guard.py",
    "tests/e2e/test_openapi.py",
    "tests/e2e/crashes/test_kill_nine.py",
    "tests/component/agent/execution/test_escapes.py",
    "tests/e2e/test_idle_offers.py",
    "tests/component/agent/execution/test_full_disk.py",
    "tests/e2e/agents/test_stopped_watchdogs.py",
    "tests/component/agent/execution/test_disk_guard.py",
    "tests/e2e/crashes/test_configs.py",
    "tests/e2e/agents/test_lost_links.py",
    "tests/e2e/clouds/test_aws.py",
    "tests/e2e/crashes/test_one_daemon.py",
    "tests/component/adapters/clouds/test_slurm.py",
    "tests/e2e/agents/test_joined_again.py",
    "tests/contract/test_cloud_campaign.py",
    "tests/e2e/test_workers.py",
    "tests/e2e/test_seed_001.py",
    "tests/component/adapters/node/test_node_script.py",
    "tests/e2e/test_queries.py",
    "tests/component/adapters/clouds/test_docker_local.py",
    "tests/e2e/crashes/test_idle_exit.py",
    "tests/lab/hosts/test_lab.py",
    "tests/component/agent/execution/test_hold.py",
    "tests/e2e/test_fuzz.py",
    "tests/component/adapters/ssh/test_ssh_connection.py",
    "tests/lab/hosts/test_pressed_node.py",
    "tests/e2e/agents/test_stops.py",
    "tests/e2e/test_boosts.py",
    "tests/component/agent/offloading/test_guard_process.py",
    "tests/e2e/agents/test_checkpoint_directory.py",
    "tests/e2e/test_explain.py",
    "tests/e2e/test_pull_workers.py",
    "tests/e2e/test_rebalancing.py",
    "tests/component/agent/execution/test_removed_root.py",
    "tests/e2e/test_provider_credentials.py",
    "tests/component/adapters/clouds/test_aws.py",
    "tests/e2e/test_job_sizing.py",
    "tests/component/agent/execution/test_crashes.py",
    "tests/component/memory/supervisor/test_supervisor.py",
    "tests/e2e/test_auto_offload.py",
    "tests/component/agent/execution/test_usage_measure.py",
    "tests/e2e/test_simulate.py",
    "tests/e2e/agents/test_gpus.py",
    "tests/e2e/crashes/test_damaged_store.py",
    "tests/e2e/test_found_configs.py",
    "tests/e2e/crashes/test_hostile_jobs.py",
    "tests/component/agent/test_agent.py",
    "tests/e2e/test_metrics.py",
    "tests/e2e/crashes/test_clock_jumps.py",
    "tests/e2e/agents/test_checkpoints.py",
    "tests/e2e/test_cli.py",
    "tests/component/adapters/node/test_node_script_ray.py",
    # in-process
    "tests/unit/simulation/test_campaign.py",
    "tests/unit/reactor/test_invariants.py",
    "tests/unit/simulation/test_faults.py",
    "tests/unit/reactor/test_rebalancing_invariants.py",
    "tests/unit/config/test_every_key.py",
    "tests/unit/config/test_key_tables.py",
    "tests/unit/agent/test_uplink.py",
    "tests/unit/server/services/test_workers.py",
    "tests/contract/test_providers.py",
    "tests/unit/adapters/probes/test_machine_probe.py",
    "tests/unit/test_supervision.py",
    "tests/unit/adapters/stores/test_sqlite.py",
    "tests/unit/prediction/test_load_forecast.py",
    "tests/unit/server/prediction/test_service.py",
    "tests/unit/scheduling/scaling/test_scaling_laws.py",
)
_PLACES = {name: place for place, name in enumerate(FIRST)}


def is_in_process(node_id: str) -> bool:
    """Whether a test is one of those of `make test-fast`, unless it is slow."""
    return node_id.startswith(("tests/unit/", "tests/contract/"))


def scope_of(node_id: str) -> str:
    """Group of tests that share a worker with this one: usually its file."""
    path = node_id.partition("::")[0]
    if path.startswith(RAY_LAB):
        return RAY_LAB
    return node_id if path in INDEPENDENT else path


def place_of(node_id: str) -> int:
    """The place of a test's file in the order; those that are not named come last, and stay as they are."""
    path = node_id.partition("::")[0]
    return _PLACES.get(RAY_LAB if path.startswith(RAY_LAB) else path, len(FIRST))
