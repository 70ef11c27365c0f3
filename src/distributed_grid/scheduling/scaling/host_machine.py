"""The control plane's machine as the host of workers: what it can lend them, and what they would get of it."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, gigabytes
from distributed_grid.domain.workers import Worker


def own_machine(ledger: Ledger) -> str:
    """The node that the control plane's machine is; empty where it is none, or lends nothing anyway."""
    own = (node for node in ledger.nodes.values() if node.host == "local" and not node.simulated)
    return next((node.name for node in own if node.caps.can_share), "")


def with_host(ledger: Ledger, worker: Worker) -> Worker:
    """The worker with the node on which it would run, and with no more than that lends in all.

    A warning says where that is less than was asked for.
    """
    host = own_machine(ledger) if worker.on_this_machine else ""
    if not host:
        return worker
    lends, asked = ledger.lends(host), worker.resources
    cpu_milli, memory_bytes = min(asked.cpu_milli, lends.cpu_milli), min(asked.memory_bytes, lends.memory_bytes)
    less = []
    if cpu_milli < asked.cpu_milli:
        less.append(f"{cpu_milli / 1000:g} cores instead of {asked.cpu_milli / 1000:g}")
    if memory_bytes < asked.memory_bytes:
        less.append(f"{gigabytes(memory_bytes)} of memory instead of {gigabytes(asked.memory_bytes)}")
    if not less or not cpu_milli or not memory_bytes:
        return replace(worker, host=host)
    resources = replace(asked, cpu_milli=cpu_milli, memory_bytes=memory_bytes)
    return replace(worker, host=host, resources=resources, warning=f"{' and '.join(less)}: {host} lends no more")


def host_amounts(worker: Worker) -> Amounts:
    """What a worker takes out of its host."""
    has = worker.resources
    return Amounts(has.cpu_milli, has.memory_bytes, has.gpu_count * WHOLE_GPU)


def has_room(ledger: Ledger, worker: Worker) -> bool:
    """Whether the machine on which a worker would run has room for it now; one elsewhere needs none here."""
    hosted = with_host(ledger, worker)
    if not hosted.host:
        return True
    return ledger.claims_on(hosted.host).claim_for(host_amounts(hosted), ledger.lends(hosted.host)) is not None
