"""The files in config/ and of `grid init` load without a warning and let the guides' commands work."""

import pytest

from distributed_grid.config import ClusterConfig, cluster_template
from tests.support.project import PROJECT

ROOT = PROJECT
SHIPPED = ["my-cluster.yaml", "my-cluster-enhanced.yaml", "cluster_config.yaml"]
GIB = 1024**3


@pytest.fixture(params=SHIPPED)
def shipped(request) -> ClusterConfig:
    return ClusterConfig.from_yaml(ROOT / "config" / request.param)


def test_each_names_the_three_machines_as_agents_of_this_one(shipped):
    assert [node.name for node in shipped.nodes] == ["gpu-master", "gpu1", "gpu2"]
    assert all(node.is_local and node.trust_declared for node in shipped.nodes)
    assert shipped.head.name == "gpu-master"
    assert shipped.warnings == ()


def test_each_leaves_the_owner_of_this_machine_without_thresholds_and_policy(shipped):
    assert {shipped.thresholds_for(node) for node in shipped.nodes} == {None}
    assert {shipped.owner_policy_for(node) for node in shipped.nodes} == {None}


def test_each_lets_the_workers_lend_what_the_guides_ask_for(shipped):
    _, gpu1, gpu2 = (node.resource_sharing for node in shipped.nodes)
    assert gpu2.max_share_memory_bytes >= (10 + 15) * GIB
    assert gpu1.max_share_memory_bytes >= 4 * GIB
    assert gpu2.max_share_cpu_milli >= (2 + 4 + 4) * 1000
    assert gpu1.max_share_gpu_count >= 1
    assert gpu2.max_share_gpu_count >= 1


def test_each_declares_at_least_what_it_lends(shipped):
    for node in shipped.nodes:
        assert node.resource_sharing.max_share_cpu_milli <= node.cpu_milli
        assert node.resource_sharing.max_share_memory_bytes <= node.memory_bytes
        assert node.resource_sharing.max_share_gpu_count <= node.gpu_count


def test_only_the_enhanced_one_asks_for_memory_at_70_percent():
    marks = {
        name: ClusterConfig.from_yaml(ROOT / "config" / name).resource_sharing.pressure.memory_high for name in SHIPPED
    }
    assert marks == {"my-cluster.yaml": 0.8, "my-cluster-enhanced.yaml": 0.7, "cluster_config.yaml": 0.8}


def test_the_template_loads_as_it_is():
    config = ClusterConfig.from_text(cluster_template(), env={})
    assert [node.name for node in config.nodes] == ["here"]
    assert config.warnings == ()


def test_the_template_still_loads_with_its_comments_taken_away():
    lines = cluster_template().split("\n\n", 2)[2].splitlines()
    live = []
    for line in lines:
        bare = line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
        prose = bare.strip().endswith(".") and ":" not in bare.split(" #")[0]
        live.append(line if prose or "copy this" in line else bare)
    config = ClusterConfig.from_text("\n".join(live), env={"GRID_ALERT_WEBHOOK": "https://example.org/x"})
    assert [node.name for node in config.nodes] == ["here", "gpu1"]
    assert config.quotas["ana"].cpu_milli == 16000
    assert config.warnings == ()
