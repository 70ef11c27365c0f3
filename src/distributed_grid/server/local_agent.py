"""The agent of this machine, connected to the control plane without a network."""

from __future__ import annotations

from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.adapters.probes.nvml import GpuProbe
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.lent_memory import LentMemory, address_towards
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.config import ClusterConfig
from distributed_grid.control.agents import AgentGateway
from distributed_grid.domain.ledger import Ledger
from distributed_grid.state_dir import StateDir


def make_local_agent(
    local: tuple[str, ...],
    config: ClusterConfig,
    *,
    state_dir: StateDir,
    agents: AgentGateway,
    probe: MachineProbe,
    gpus: GpuProbe,
) -> Agent:
    """The agent for these nodes of this machine; the caller starts and stops it."""
    meter = UsageMeter(probe, gpus)
    return Agent(
        local,
        state_dir.jobs,
        meter,
        agents,
        memory=lambda host, send: LentMemory(
            state_dir.host_dir / "memory",
            (*local, ""),
            meter,
            host,
            send,
            addresses=lambda: _addresses(config),
            has_proxy=False,
        ),
    )


def local_nodes(ledger: Ledger, now: int) -> list[str]:
    """The nodes of this machine, also those that only an earlier config named: their jobs still run."""
    return [node.name for node in ledger.nodes.values() if node.host == "local"]


def _addresses(config: ClusterConfig) -> list[str]:
    """From where this machine reaches the others; itself alone where there are none."""
    far = [node.host or node.name for node in config.nodes if not node.is_local]
    return [*(found for name in far if (found := address_towards(name))), "local"]
