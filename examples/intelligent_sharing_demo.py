"""A tour of resource sharing in five parts: nodes, their use, borrowing, scheduling, balancing.

    python examples/intelligent_sharing_demo.py
    python examples/intelligent_sharing_demo.py config/my-cluster.yaml

Each part also works alone: `asyncio.run(ResourceSharingDemo(path)._demo_cluster_status())`. Whatever the demo borrows
it gives back, even when it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator

from distributed_grid.config import load_cluster_config
from distributed_grid.core import GridOrchestrator
from distributed_grid.errors import NotFound, Refused
from distributed_grid.orchestration.intelligent_scheduler import (
    ResourceRequirement,
    SchedulingDecision,
    SchedulingRequest,
    SchedulingStrategy,
    TaskPriority,
)
from distributed_grid.orchestration.resource_boost_manager import ResourceBoost, ResourceBoostManager
from distributed_grid.orchestration.resource_sharing_orchestrator import ResourceSharingOrchestrator

DEFAULT = "config/my-cluster-enhanced.yaml"
LOOKS = 4
LOOK_SECONDS = 2.5
"""A node is measured every two seconds."""
LOAD_CORES, LOAD_SECONDS = 2, 6
LOAD = f'echo "$GRID_NODE"; for _ in 1 2; do timeout {LOAD_SECONDS} sh -c "while :; do :; done" & done; wait'
TASKS = 6
POLL_SECONDS = 0.5
SPARE_SECONDS = 10
MAX_INTERVAL_SECONDS = 60


class ResourceSharingDemo:
    """Shows what the grid of a cluster file can do."""

    def __init__(self, config_path: str = DEFAULT) -> None:
        self.config = load_cluster_config(config_path)
        self.orchestrator = ResourceSharingOrchestrator(self.config)

    async def run_demo(self) -> None:
        """All five parts, one after the other."""
        await self._demo_cluster_status()
        await self._demo_resource_monitoring()
        await self._demo_resource_requests()
        await self._demo_intelligent_scheduling()
        await self._demo_load_balancing()
        await self._show_automatic_leases()

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[ResourceSharingOrchestrator]:
        """The orchestrator, attached to the grid for one part of the story."""
        await self.orchestrator.initialize()
        await self.orchestrator.start()
        try:
            yield self.orchestrator
        finally:
            await self.orchestrator.stop()

    async def _demo_cluster_status(self) -> None:
        """Nodes and their offers."""
        _heading("Cluster status")
        async with self._started() as grid:
            status = await grid.get_cluster_status()
        print(f"{status['name']}: {status['mode']} by the policy {status['policy']}")
        for node in status["nodes"]:
            free = {"cpu": node["cpu_free"], "memory": node["memory_free_gb"], "gpu": node["gpus_free"]}
            lends = ", ".join(_amount(kind, amount) for kind, amount in free.items() if amount) + " to lend"
            print(f"  {node['node_id']:<12} {node['state']:<8} {lends if node['open'] else '; '.join(node['keeps'])}")
        cpu, memory = status["summary"]["cpu"], status["summary"]["memory_gb"]
        cores, gigabytes = (f"{one['idle']:.1f} of {one['total']:.1f}" for one in (cpu, memory))
        print(f"together: {cores} cores and {gigabytes} GB idle")
        counts = (("leases", status["allocations"]), ("jobs", status["jobs"]))
        print(", ".join(f"{name}: {len(rows)}" for name, rows in counts) + f", waiting: {status['waiting']}")

    async def _demo_resource_monitoring(self) -> None:
        """Levels of the nodes before, during and after a load, and their trends."""
        _heading("Resource monitoring")
        async with self._started() as grid, asyncio.TaskGroup() as tasks:
            self._look(grid, 1)
            print(f"for {LOAD_SECONDS} seconds a job keeps {_amount('cpu', LOAD_CORES)} busy", flush=True)
            load = tasks.create_task(self._load())
            for look in range(2, LOOKS):
                await asyncio.sleep(LOOK_SECONDS)
                self._look(grid, look)
            print(await load)
            await asyncio.sleep(2 * LOOK_SECONDS)
            self._look(grid, LOOKS)
            for name in grid.get_node_resource_snapshots():
                windows = grid.metrics.get_resource_trend(name, "cpu").windows
                ways = ", ".join(f"{one.direction} over {one.window_minutes} min" for one in windows)
                print(f"  CPU of {name}: {ways or 'too little is known yet for a trend'}")

    def _look(self, grid: ResourceSharingOrchestrator, number: int) -> None:
        told = (
            f"{node.node_id} CPU {node.cpu_percent:.0f} %, memory {node.memory_percent:.0f} %"
            if node.cpu_percent is not None and node.memory_percent is not None
            else f"{node.node_id} unknown"
            for node in grid.get_node_resource_snapshots().values()
        )
        print(f"look {number}: " + "; ".join(told), flush=True)

    async def _load(self) -> str:
        """Keep cores busy for a while, wherever there is room; a line that says where that was."""
        async with GridOrchestrator(self.config) as grid:
            try:
                result = await grid.run_with_shared_resources(LOAD, "cpu", LOAD_CORES, wait_seconds=0)
            except Refused as no:
                return f"no node has room for the job: {no}"
        return f"the job ran on {result.stdout.strip()}"

    async def _demo_resource_requests(self) -> None:
        """Borrow for the head node from the others, look at it, give it back."""
        _heading("Resource requests")
        head = self.config.head.name
        async with self._started() as grid:
            for kind, amount in (("cpu", 2.0), ("memory", 4.0), ("gpu", 1.0)):
                await self._borrow(grid, head, kind, amount)
            await self._borrow(grid, head, "cpu", 10_000.0)

    async def _borrow(self, grid: ResourceSharingOrchestrator, node: str, kind: str, amount: float) -> None:
        asked = f"{_amount(kind, amount)} for {node}"
        try:
            allocation_id = await grid.request_resources(
                node_id=node, resource_type=kind, amount=amount, priority="high", duration_minutes=5, wait_seconds=0
            )
        except Refused as no:
            print(f"{asked}: refused")
            for reason in no.reasons or (str(no),):
                print(f"  {reason}")
            return
        try:
            held = (await grid.sharing.get_resource_status())["allocations"]
            lender = next(row["node_id"] for row in held if row["allocation_id"] == allocation_id)
            print(f"{asked}: lent by {lender} as {allocation_id[:8]}", end="")
        finally:
            ended = await grid.release_resources(allocation_id)
            print(f", {ended['reason']}")

    async def _demo_intelligent_scheduling(self) -> None:
        """The same task by every strategy: where it would go, how sure that is, and why."""
        _heading("Intelligent scheduling")
        needs = [ResourceRequirement("cpu", 1.0), ResourceRequirement("memory", 0.5)]
        async with self._started() as grid:
            for strategy in SchedulingStrategy:
                if strategy is SchedulingStrategy.NODE_SPECIFIC:
                    continue
                task = SchedulingRequest(
                    f"demo-{uuid.uuid4().hex[:12]}",
                    needs,
                    priority=TaskPriority.NORMAL,
                    strategy=strategy,
                    expects=60,
                    wait_seconds=0,
                )
                try:
                    decision = await grid.scheduler.schedule_task(task)
                    _tell(decision)
                except Refused as no:
                    print(f"{strategy}: {no}")
                finally:
                    with contextlib.suppress(NotFound):
                        await grid.scheduler.complete_task(task.task_id)

    async def _demo_load_balancing(self) -> None:
        """Several tasks at once: how they spread, what that leaves, and how the grid has balanced itself so far."""
        _heading("Load balancing")
        name = f"demo-{uuid.uuid4().hex[:8]}"
        tasks = [f"{name}-{number}" for number in range(TASKS)]
        places: Counter[str] = Counter()
        async with self._started() as grid:
            try:
                for task in tasks:
                    request = SchedulingRequest(
                        task, {"cpu": 0.5}, strategy=SchedulingStrategy.SPREAD, group=name, wait_seconds=0
                    )
                    decision = await grid.scheduler.schedule_task(request)
                    places.update(decision.nodes)
                status = await grid.scheduler.get_scheduling_status()
            except Refused as no:
                print(f"not all of {TASKS} tasks fit: {no}")
                status = await grid.scheduler.get_scheduling_status()
            finally:
                for task in tasks:
                    with contextlib.suppress(NotFound):
                        await grid.scheduler.complete_task(task)
        for node, count in sorted(places.items()):
            print(f"  {node:<12} {'#' * count} {count}")
        rate = status["allocation_success_rate"]
        print(f"requests served of late: {'unknown' if rate is None else f'{100 * rate:.0f} %'}")
        print(f"rebalanced in the last hour: {status['rebalances_per_hour']} times")
        print("everything is given back")

    async def _show_automatic_leases(self) -> None:
        """Automatic leases for a node above its memory mark, and work of that node that uses them."""
        mark = 100 * self.config.resource_sharing.pressure.memory_high
        interval = self.config.resource_sharing.rebalance_interval_seconds
        async with self._started() as grid:
            used = {name: node.memory_percent or 0.0 for name, node in grid.get_node_resource_snapshots().items()}
        pressed = sorted(name for name, percent in used.items() if percent > mark)
        for name in pressed:
            print(f"{name}: memory at {used[name]:.1f} %, above its mark of {mark:g} %")
        if not pressed or interval > MAX_INTERVAL_SECONDS:
            return
        async with GridOrchestrator(self.config) as grid:  # what went back unused is borrowed again when work arrives
            await grid.run_with_shared_resources("true", "memory", 0.1, target_node=pressed[0])
        print(f"waiting for the grid to borrow for {pressed[0]}, at most three intervals of {interval:g} s", flush=True)
        borrowed = await self._automatic(pressed[0], 3 * interval + SPARE_SECONDS)
        if borrowed is None:
            print("  nothing: grid events --type rebalanced says why")
            return
        amount = _amount("memory", borrowed.amount + (borrowed.used_amount or 0.0))
        lender, borrower = borrowed.source_node, borrowed.target_node
        print(f"  {borrowed.boost_id}: {amount} of {lender} for {borrower}, borrowed by the grid itself")
        await self._use(borrowed)

    async def _automatic(self, node: str, seconds: float) -> ResourceBoost | None:
        """An automatic lease of memory for a node, once there is one; None where there is none in time."""
        boosts = ResourceBoostManager(self.config)
        await boosts.initialize()
        for _ in range(round(seconds / POLL_SECONDS)):
            found = [one for one in await boosts.get_active_boosts(node) if one.automatic]
            if memory := [one for one in found if one.resource_type == "memory"]:
                return max(memory, key=lambda one: one.amount)
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def _use(self, borrowed: ResourceBoost) -> None:
        """Work of the node under pressure: it gets its memory out of the automatic lease, and so runs on the lender."""
        amount = min(1.0, borrowed.amount / 2)  # less than all of it, which would end the lease
        async with GridOrchestrator(self.config) as grid:
            result = await grid.run_with_shared_resources(
                'echo "$GRID_NODE"', "memory", amount, target_node=borrowed.target_node
            )
        work = f"work of {borrowed.target_node} that needs {_amount('memory', amount)}"
        print(f"  {work}: ran on {result.stdout.strip()}")
        for boost in await ResourceBoostManager(self.config).get_active_boosts(borrowed.target_node):
            if boost.used_amount:
                print(f"  {boost.boost_id}: {_amount(boost.resource_type, boost.used_amount)} of it used")


UNITS = {"cpu": ("core", "cores"), "memory": ("GB", "GB"), "gpu": ("GPU", "GPUs")}


def _amount(kind: str, amount: float) -> str:
    one, several = UNITS[kind]
    shown = round(amount, 1) or float(f"{amount:.1g}")
    return f"{shown:g} {one if shown == 1 else several}"


def _heading(text: str) -> None:
    print(f"\n== {text} ==")


def _tell(decision: SchedulingDecision) -> None:
    print(f"{decision.strategy}: {decision.node_id}, confidence {decision.confidence:.2f}")
    for reason in decision.reasoning:
        print(f"  {reason}")
    if decision.alternatives:
        print("  next: " + "; ".join(f"{one.node_id} ({one.why})" for one in decision.alternatives))


def main() -> None:
    """Tell the whole story."""
    parser = argparse.ArgumentParser(description="A tour of resource sharing.")
    parser.add_argument("config", nargs="?", default=DEFAULT, help="a cluster file (default: %(default)s)")
    asyncio.run(ResourceSharingDemo(parser.parse_args().config).run_demo())


if __name__ == "__main__":
    main()
