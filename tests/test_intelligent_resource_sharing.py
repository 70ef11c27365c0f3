"""Resource sharing from Python, part by part, against a real grid: the three nodes of the shipped cluster file."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from distributed_grid.api.answers.jobs import JobRow
from distributed_grid.api.answers.leases import AllocationRow
from distributed_grid.api.answers.metrics import SchedulingFigures
from distributed_grid.api.answers.nodes import NodeRow, OfferRow
from distributed_grid.client.client import Client
from distributed_grid.config import ClusterConfig, load_cluster_config
from distributed_grid.core import GridOrchestrator, SSHManager
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused, TimedOut
from distributed_grid.monitoring.resource_metrics import ResourceMetricsCollector, ResourceSnapshot
from distributed_grid.orchestration import resource_sharing
from distributed_grid.orchestration.intelligent_scheduler import (
    IntelligentScheduler,
    ResourceRequirement,
    SchedulingDecision,
    SchedulingRequest,
    SchedulingStatus,
    SchedulingStrategy,
    TaskPriority,
)
from distributed_grid.orchestration.resource_sharing_manager import (
    AllocationPriority,
    ResourceRequest,
    ResourceSharingManager,
    ResourceStatus,
    SharingPolicy,
)
from distributed_grid.orchestration.resource_sharing_orchestrator import ClusterStatus, ResourceSharingOrchestrator
from distributed_grid.state_dir import StateDir
from tests.support.answer_fields import fields_of
from tests.support.project import copy_configs
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

NODES = {"gpu-master", "gpu1", "gpu2"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """One grid for all of this file, found as any program finds it; every test leaves it as it was."""
    folder = tmp_path_factory.mktemp("sharing")
    copy_configs(folder / "config")
    shell = Shell(folder / "state", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRID_STATE_DIR", str(shell.state_dir))
        patch.delenv("GRID_CONFIG", raising=False)
        patch.chdir(folder)
        yield shell
    shell.close()


@pytest.fixture
def config(cluster: Shell) -> Iterator[ClusterConfig]:
    """The config of that grid; a test gives back everything it borrowed."""
    yield load_cluster_config("config/my-cluster-enhanced.yaml")
    with Client(StateDir(cluster.state_dir)) as client:
        assert [row["allocation_id"] for row in client.call("get_status")["allocations"]] == []


def run(story: Awaitable[Any]) -> Any:
    async def whole() -> Any:
        return await asyncio.wait_for(story, 60)

    return asyncio.run(whole())


def named(word: str) -> str:
    return f"{word}-{uuid.uuid4().hex[:8]}"


@contextlib.asynccontextmanager
async def gives_back(scheduler: IntelligentScheduler, *tasks: str) -> AsyncIterator[None]:
    """Complete these tasks in the end, however the test ends."""
    try:
        yield
    finally:
        for task in tasks:
            with contextlib.suppress(NotFound):
                await scheduler.complete_task(task)


class TestResourceMetricsCollector:
    def test_every_node_is_measured_and_summed_up(self, config: ClusterConfig) -> None:
        async def story() -> None:
            collector = ResourceMetricsCollector(config, SSHManager(config))
            await collector.start()
            async with asyncio.timeout(20):
                while not all(node.known for node in collector.get_all_latest_snapshots().values()):
                    await asyncio.sleep(0.1)
            snapshots = collector.get_all_latest_snapshots()
            assert set(snapshots) == NODES
            assert all(node.pressure is not None and 0 <= node.pressure <= 1 for node in snapshots.values())
            assert collector.get_cluster_summary()["nodes"]["total"] == 3
            assert collector.get_resource_trend("gpu1", "cpu").node_id == "gpu1"
            assert len(collector.get_history("gpu1", minutes=1)) <= 2
            await collector.stop()

        run(story())


class TestResourceSharingManager:
    def test_it_is_one_class_under_both_names(self) -> None:
        assert resource_sharing.ResourceSharingManager is ResourceSharingManager
        assert resource_sharing.AllocationPriority is AllocationPriority

    def test_another_node_lends_and_gets_it_back(self, config: ClusterConfig, cluster: Shell) -> None:
        async def story() -> None:
            async with ResourceSharingManager(config, None) as manager:
                held = await manager.request_resource("gpu-master", "cpu", 2.0, "high", 600)
                status = await manager.get_resource_status()
                (row,) = status["allocations"]
                assert (row["allocation_id"], row["target_node"], row["amount"]) == (held, "gpu-master", 2.0)
                assert row["node_id"] in NODES - {"gpu-master"}
                assert row["priority"] == "high"
                assert cluster.json("shared-status")["allocations"][0]["allocation_id"] == held
                ended = await manager.release_resource(held)
                assert (ended["state"], ended["reason"]) == ("ended", "released")
                assert (await manager.release_resource(held))["reason"] == "released"
                assert (await manager.get_resource_status())["allocations"] == []

        run(story())

    def test_the_status_says_how_and_what_is_shared(self, config: ClusterConfig) -> None:
        async def story() -> ResourceStatus:
            async with ResourceSharingManager(config) as manager:
                return await manager.get_resource_status()

        status: ResourceStatus = run(story())
        assert set(status) == ResourceStatus.__required_keys__
        assert (status["enabled"], status["mode"], status["waiting"]) == (True, "dynamic_balancing", 0)
        assert status["policy"] is SharingPolicy.BALANCED
        assert {offer["node_id"] for offer in status["offers"]} == NODES
        assert all(set(offer) >= fields_of(OfferRow) for offer in status["offers"])

    @pytest.mark.parametrize(
        ("said", "seconds"),
        [
            ({"duration": 90}, 90),
            ({"duration": timedelta(minutes=2)}, 120),
            ({"duration_minutes": 30}, 1800),
            ({}, 3600),
        ],
    )
    def test_a_loan_has_an_end_however_that_is_said(
        self, config: ClusterConfig, said: dict[str, Any], seconds: float
    ) -> None:
        async def story() -> dict[str, Any]:
            manager = ResourceSharingManager(config)
            return await manager.release_resource(await manager.request_resource("gpu1", "memory", 0.5, **said))

        row = run(story())
        assert row["expires_at"] is not None
        assert row["allocated_at"] is not None
        term = datetime.fromisoformat(row["expires_at"]) - datetime.fromisoformat(row["allocated_at"])
        assert term == timedelta(seconds=seconds)

    def test_a_loan_ends_by_itself(self, config: ClusterConfig) -> None:
        async def story() -> None:
            manager = ResourceSharingManager(config)
            held = await manager.request_resource("gpu1", "cpu", 1, duration=0.3)
            while (await manager.get_resource_status())["allocations"]:
                await asyncio.sleep(0.05)
            assert (await manager.release_resource(held))["reason"] == "expired"

        run(story())

    @pytest.mark.parametrize(("word", "means"), [("CRITICAL", "urgent"), ("normal", "medium"), ("low", "low")])
    def test_every_word_for_a_priority_is_understood(self, config: ClusterConfig, word: str, means: str) -> None:
        async def story() -> dict[str, Any]:
            manager = ResourceSharingManager(config)
            return await manager.release_resource(await manager.request_resource("gpu1", "CPU", 0.5, word))

        assert run(story())["priority"] == means

    def test_a_refusal_has_its_reasons_node_by_node(self, config: ClusterConfig) -> None:
        async def story() -> None:
            manager = ResourceSharingManager(config)
            with pytest.raises(Refused, match="No node can ever lend 500 cores") as no:
                await manager.request_resource("gpu-master", "cpu", 500)
            assert no.value.reasons == (
                "gpu-master: it is the borrower",
                "gpu1: 6 cores at most, 500 cores asked",
                "gpu2: 14 cores at most, 500 cores asked",
            )
            with pytest.raises(Refused, match="no node is called nobody"):
                await manager.request_resource("nobody", "cpu", 1)
            with pytest.raises(BadInput, match="no resource is called"):
                await manager.request_resource("gpu1", "time", 1)
            with pytest.raises(BadInput, match="either duration or duration_minutes"):
                await manager.request_resource("gpu1", "cpu", 1, duration=5, duration_minutes=5)
            with pytest.raises(NotFound):
                await manager.release_resource("never-lent")

        run(story())

    def test_the_lender_can_be_named(self, config: ClusterConfig) -> None:
        async def story() -> None:
            manager = ResourceSharingManager(config)
            held = await manager.submit(ResourceRequest("gpu-master", "cpu", 1, source=["gpu1"]))
            assert (await manager.release_resource(held))["node_id"] == "gpu1"
            held = await manager.request_resource("gpu-master", "cpu", 1, source="gpu2")
            assert (await manager.release_resource(held))["node_id"] == "gpu2"

        run(story())

    def test_another_node_lends_where_the_preferred_one_is_full(
        self, config: ClusterConfig, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def story() -> None:
            manager = ResourceSharingManager(config)
            all_of_it = await manager.request_resource("gpu-master", "gpu", 2, source="gpu2", only=True)
            with pytest.raises(Refused, match="gpu2: 0 GPUs free"):
                await manager.request_resource("gpu-master", "gpu", 1, source="gpu2", only=True, wait_seconds=0)
            assert caplog.messages == []
            other = await manager.request_resource("gpu-master", "gpu", 1, source="gpu2", wait_seconds=0)
            assert caplog.messages == ["gpu1 lends it instead of gpu2"]
            assert (await manager.release_resource(other))["node_id"] == "gpu1"
            await manager.release_resource(all_of_it)
            with pytest.raises(BadInput, match="only the source may lend it: name one"):
                await manager.request_resource("gpu-master", "gpu", 1, only=True)

        run(story())

    def test_who_waits_is_served_when_something_comes_back(self, config: ClusterConfig) -> None:
        async def story() -> None:
            manager = ResourceSharingManager(config)
            both = await manager.request_resource("gpu1", "gpu", 2)
            with pytest.raises(Refused, match="gpu2: 0 GPUs free, 2 GPUs asked"):
                await manager.request_resource("gpu1", "gpu", 2, wait_seconds=0)
            with pytest.raises(TimedOut, match=r"waited 0\.2 s"):
                await manager.request_resource("gpu1", "gpu", 2, wait_seconds=0.2)
            waiting = asyncio.create_task(manager.request_resource("gpu1", "gpu", 2))
            while not (await manager.get_resource_status())["waiting"]:
                await asyncio.sleep(0.02)
            await manager.release_resource(both)
            assert (await manager.release_resource(await waiting))["node_id"] == "gpu2"

        run(story())

    def test_who_stops_waiting_leaves_nothing_in_the_line(self, config: ClusterConfig) -> None:
        async def story() -> None:
            manager = ResourceSharingManager(config)
            both = await manager.request_resource("gpu1", "gpu", 2)
            waiting = asyncio.create_task(manager.request_resource("gpu1", "gpu", 2))
            while not (await manager.get_resource_status())["waiting"]:
                await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            while (await manager.get_resource_status())["waiting"]:
                await asyncio.sleep(0.02)
            await manager.release_resource(both)

        run(story())

    def test_many_at_once_never_get_more_than_there_is(self, config: ClusterConfig) -> None:
        async def one(manager: ResourceSharingManager) -> str | None:
            try:
                return await manager.request_resource("gpu-master", "cpu", 1, wait_seconds=0)
            except Refused:
                return None

        async def story() -> None:
            managers = [ResourceSharingManager(config) for _ in range(3)]
            asked = await asyncio.gather(*(one(managers[number % 3]) for number in range(30)))
            held = [allocation for allocation in asked if allocation is not None]
            assert len(held) == len(set(held)) == 6 + 14
            await asyncio.gather(*(managers[0].release_resource(allocation) for allocation in held))

        run(story())


class TestIntelligentScheduler:
    def test_a_task_gets_a_place_with_the_reasons(self, config: ClusterConfig) -> None:
        async def story() -> None:
            async with IntelligentScheduler(config, SSHManager(config)) as scheduler:
                task = named("task")
                async with gives_back(scheduler, task):
                    decision = await scheduler.schedule_task(
                        SchedulingRequest(
                            task,
                            [ResourceRequirement("cpu", 2), ResourceRequirement("memory", 1)],
                            priority=TaskPriority.NORMAL,
                            strategy=SchedulingStrategy.LOAD_BALANCED,
                        )
                    )
                    assert isinstance(decision, SchedulingDecision)
                    assert (decision.task_id, decision.allocation_id) == (task, task)
                    assert decision.node_id in NODES
                    assert decision.nodes == (decision.node_id,)
                    assert decision.strategy is SchedulingStrategy.LOAD_BALANCED
                    assert 0 < decision.confidence <= 1
                    assert decision.reasoning
                    others = [one.node_id for one in decision.alternatives]
                    assert len(others) == len(set(others)) == 2
                    assert set(others) == NODES - {decision.node_id}
                    assert all(one.why for one in decision.alternatives)
                    assert decision.estimated_start is not None
                    assert abs(decision.estimated_start - datetime.now(UTC)) < timedelta(seconds=30)
                ended = await scheduler.complete_task(task)
                assert (ended["state"], ended["reason"], ended["node_id"]) == ("ended", "released", decision.node_id)
                assert ended["resources"]["memory_gb"] == 1

        run(story())

    def test_wishes_are_wishes_and_musts_are_musts(self, config: ClusterConfig) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)

            async def where(**wishes: Any) -> str | None:
                request = SchedulingRequest(named("where"), {"cpu": 1}, dry_run=True, wait_seconds=0, **wishes)
                return (await scheduler.schedule_task(request)).node_id

            assert await where(preferred_nodes=["gpu1"]) == "gpu1"
            assert await where(required_nodes=["gpu-master"]) == "gpu-master"
            assert await where(labels=["head"]) == "gpu-master"
            assert await where(strategy="node_specific", preferred_nodes=["gpu1"]) == "gpu1"
            assert await where(affinity=["gpu1"]) == "gpu1"
            assert await where(anti_affinity=["gpu1", "gpu2"]) == "gpu-master"
            assert await where(strategy="local_first", target_node="gpu1") == "gpu1"
            first = named("first")
            async with gives_back(scheduler, first):
                await scheduler.schedule_task(SchedulingRequest(first, {"cpu": 1}, required_nodes=["gpu1"]))
                assert await where(affinity=[first]) == "gpu1"
                assert await where(anti_affinity=[first]) != "gpu1"
            big = SchedulingRequest(named("big"), {"gpu": 2}, preferred_nodes=["gpu1"], dry_run=True)
            assert (await scheduler.schedule_task(big)).node_id == "gpu2"
            with pytest.raises(Refused) as no:
                await where(labels=["tropical"])
            assert "gpu1: has no label or tag tropical" in no.value.reasons

        run(story())

    def test_a_group_is_spread(self, config: ClusterConfig) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)
            group = named("group")
            tasks = [f"{group}-{number}" for number in range(6)]
            async with gives_back(scheduler, *tasks):
                requests = [SchedulingRequest(task, {"cpu": 0.5}, strategy="spread", group=group) for task in tasks]
                places = [(await scheduler.schedule_task(request)).node_id for request in requests]
            assert Counter(places) == dict.fromkeys(NODES, 2)

        run(story())

    def test_a_gang_has_all_its_places_or_none(self, config: ClusterConfig) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)
            gang = named("gang")
            async with gives_back(scheduler, gang):
                decision = await scheduler.schedule_task(SchedulingRequest(gang, {"cpu": 1}, gang=3))
                assert set(decision.nodes) == NODES
                assert decision.nodes[0] == decision.node_id
                assert len((await scheduler.get_scheduling_status())["allocations"]) == 3
                await scheduler.complete_task(gang)
                assert (await scheduler.get_scheduling_status())["allocations"] == []
            with pytest.raises(Refused, match="a gang of 4 needs as many nodes"):
                await scheduler.schedule_task(SchedulingRequest(gang, {"cpu": 1}, gang=4))

        run(story())

    def test_a_dry_run_is_the_verdict_and_holds_nothing(self, config: ClusterConfig) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)
            for strategy in SchedulingStrategy:
                task = named("dry")
                wish: dict[str, Any] = {"strategy": strategy, "preferred_nodes": ["gpu1"], "expects": 5}
                dry = await scheduler.schedule_task(SchedulingRequest(task, {"cpu": 1.5}, dry_run=True, **wish))
                assert dry.allocation_id is None
                with pytest.raises(NotFound):
                    await scheduler.complete_task(task)
                async with gives_back(scheduler, task):
                    real = await scheduler.schedule_task(SchedulingRequest(task, {"cpu": 1.5}, **wish))
                assert (dry.node_id, dry.strategy, real.strategy) == (real.node_id, strategy, strategy)
                assert [one.node_id for one in dry.alternatives] == [one.node_id for one in real.alternatives]

        run(story())

    def test_a_task_that_fits_nowhere_now_waits_or_is_refused(self, config: ClusterConfig) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)
            first, second = named("first"), named("second")
            async with gives_back(scheduler, first, second):
                await scheduler.schedule_task(SchedulingRequest(first, {"gpu": 2}, expects=600))
                with pytest.raises(Refused) as no:
                    await scheduler.schedule_task(SchedulingRequest(second, {"gpu": 2}, wait_seconds=0))
                assert "gpu2: 0 GPUs free, 2 GPUs asked" in no.value.reasons
                would = await scheduler.schedule_task(SchedulingRequest(second, {"gpu": 2}, dry_run=True))
                assert (would.node_id, would.nodes, would.allocation_id) == (None, (), None)
                assert would.reasoning
                waiting = asyncio.create_task(scheduler.schedule_task(SchedulingRequest(second, {"gpu": 2})))
                while not (await scheduler.get_scheduling_status())["waiting"]:
                    await asyncio.sleep(0.02)
                await scheduler.complete_task(first)
                assert (await waiting).node_id == "gpu2"

        run(story())

    def test_a_task_is_one_whoever_asks_and_its_id_may_be_used_again(self, config: ClusterConfig) -> None:
        async def story() -> None:
            mine, yours = IntelligentScheduler(config), IntelligentScheduler(config)
            task = named("task")
            async with gives_back(mine, task):
                request = SchedulingRequest(task, {"cpu": 1})
                first = await mine.schedule_task(request)
                again = await yours.schedule_task(request)
                assert (again.node_id, again.allocation_id) == (first.node_id, first.allocation_id)
                assert len((await mine.get_scheduling_status())["allocations"]) == 1
                with pytest.raises(Conflict):
                    await yours.schedule_task(SchedulingRequest(task, {"cpu": 2}))
                with pytest.raises(NotFound):
                    await mine.complete_task(task[:-1])
                await yours.complete_task(task)
                await mine.complete_task(task)
                assert (await mine.schedule_task(SchedulingRequest(task, {"cpu": 2}))).node_id in NODES

        run(story())

    def test_a_term_ends_a_task_by_itself(self, config: ClusterConfig) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)
            task = named("short")
            await scheduler.schedule_task(SchedulingRequest(task, {"cpu": 1}, duration=timedelta(seconds=0.3)))
            while (await scheduler.get_scheduling_status())["allocations"]:
                await asyncio.sleep(0.05)
            assert (await scheduler.complete_task(task))["reason"] == "expired"

        run(story())

    def test_the_status_tells_how_well_requests_are_served(self, config: ClusterConfig, cluster: Shell) -> None:
        async def story() -> None:
            scheduler = IntelligentScheduler(config)
            before = await scheduler.get_scheduling_status()
            assert set(before) == SchedulingStatus.__required_keys__
            assert (before["strategy"], set(before["open_nodes"])) == ("load_balanced", NODES)
            async with GridOrchestrator(config) as grid:
                busy = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
                done = await grid.run_with_shared_resources(["python", "-c", busy], isolated=True, strategy="best_fit")
                assert done.succeeded, done
            with pytest.raises(Refused):
                await scheduler.schedule_task(SchedulingRequest("never", {"cpu": 999}))
            after = await scheduler.get_scheduling_status()
            assert after["jobs_measured"] == before["jobs_measured"] + 1
            assert (after["granted"], after["refused"]) == (before["granted"] + 1, before["refused"] + 1)
            asked = after["granted"] + after["refused"] + after["withdrawn"]
            assert after["allocation_success_rate"] == round(after["granted"] / asked, 4)
            assert after["task_time_mean_seconds"] is not None
            assert after["task_time_p95_seconds"] is not None
            assert after["task_time_p95_seconds"] >= after["task_time_mean_seconds"] >= 0.3
            assert after["resource_efficiency"] is not None
            assert 0 < after["resource_efficiency"] <= 1.5
            assert after["rebalances_per_hour"] >= 0

        run(story())


class TestResourceSharingOrchestrator:
    def test_the_status_is_complete_and_has_its_shape(self, config: ClusterConfig, cluster: Shell) -> None:
        async def story() -> Any:
            async with ResourceSharingOrchestrator(config, SSHManager(config)) as orchestrator:
                held = await orchestrator.request_resources("gpu1", "memory", 1, duration_minutes=1)
                job = cluster.detach("-j", named("job"), "sleep", "30")
                wait_until(lambda: cluster.job(job)["state"] == "running")
                status = await orchestrator.get_cluster_status()
                cluster("jobs", "cancel", job, check=0)
                cluster("jobs", "wait", job)
                await orchestrator.release_resources(held)
                return status

        status = run(story())
        assert set(status) == ClusterStatus.__required_keys__
        assert (status["name"], status["policy"]) == ("my-cluster-enhanced", SharingPolicy.BALANCED)
        assert {node["node_id"] for node in status["nodes"]} == NODES
        assert set(status["nodes"][0]) >= fields_of(NodeRow)
        assert set(status["allocations"][0]) >= fields_of(AllocationRow)
        assert set(status["jobs"][0]) >= fields_of(JobRow)
        assert len(status["allocations"]) == 2
        assert status["summary"]["nodes"]["total"] == 3
        assert set(status["scheduling"]) == SchedulingFigures.__required_keys__

    def test_it_starts_and_stops_as_often_as_one_likes(self, config: ClusterConfig) -> None:
        async def story() -> None:
            orchestrator = ResourceSharingOrchestrator(config, None)
            for _ in range(2):
                await orchestrator.initialize()
                await orchestrator.start()
                assert set(orchestrator.get_node_resource_snapshots()) == NODES
            for _ in range(2):
                await orchestrator.stop()
            held = await orchestrator.request_resources("gpu-master", "gpu", 1, priority="urgent")
            assert (await orchestrator.release_resources(held[:12]))["allocation_id"] == held
            snapshots = orchestrator.get_node_resource_snapshots()
            assert all(isinstance(node, ResourceSnapshot) for node in snapshots.values())
            await orchestrator.stop()

        run(story())

    def test_prometheus_is_told_the_same_figures(self, config: ClusterConfig, cluster: Shell) -> None:
        async def story() -> tuple[dict[str, Any], str]:
            scheduler = IntelligentScheduler(config)
            text = (await scheduler._client.call("get_metrics", kind="prometheus"))["text"]
            return dict(await scheduler.get_scheduling_status()), text

        figures, text = run(story())
        shown = dict(
            line.split() for line in text.splitlines() if line and not line.startswith("#") and "{" not in line
        )
        assert float(shown["grid_allocation_success_ratio"]) == figures["allocation_success_rate"]
        assert float(shown["grid_task_time_mean_seconds"]) == figures["task_time_mean_seconds"]
        assert float(shown["grid_task_time_p95_seconds"]) == figures["task_time_p95_seconds"]
        assert float(shown["grid_resource_efficiency_ratio"]) == figures["resource_efficiency"]
        assert float(shown["grid_rebalances_per_hour"]) == figures["rebalances_per_hour"]


class TestGridOrchestrator:
    def test_a_command_can_say_where_it_may_run(self, config: ClusterConfig) -> None:
        async def story() -> None:
            async with GridOrchestrator(config) as grid:

                async def where(**placing: Any) -> str | None:
                    done = await grid.run_with_shared_resources("true", isolated=True, wait_seconds=0, **placing)
                    return done.node_id

                assert await where(required_nodes=["gpu-master"]) == "gpu-master"
                assert await where(labels=["head"], also={"memory": 1}) == "gpu-master"
                assert await where(strategy=SchedulingStrategy.NODE_SPECIFIC, preferred_nodes=["gpu1"]) == "gpu1"
                assert await where(anti_affinity=["gpu-master", "gpu2"], expects=timedelta(seconds=5)) == "gpu1"
                with pytest.raises(Refused, match="gpu1: has no label or tag tropical"):
                    await where(labels=["tropical"])
                with pytest.raises(TypeError, match="no such placement argument: lables"):
                    await where(lables=["head"])

        run(story())


class TestDistribute:
    def test_workers_are_shown_as_the_scheduler_sees_them(self, config: ClusterConfig, cluster: Shell) -> None:
        rows = {row["node_id"]: row for row in cluster.json("distribute", "status")}
        assert set(rows) == NODES
        assert all(set(row) >= fields_of(NodeRow) for row in rows.values())
        assert (rows["gpu2"]["cpu_free"], rows["gpu2"]["gpus_free"], rows["gpu2"]["priority"]) == (14, 2, 3)
        shown = cluster("distribute", "status", check=0).stdout.splitlines()
        assert shown[0].split()[:3] == ["NODE", "STATE", "OPEN"]
        assert [line.split()[0] for line in shown[1:]] == ["gpu-master", "gpu1", "gpu2"]

    def test_probes_are_real_and_spread(self, config: ClusterConfig, cluster: Shell) -> None:
        found = cluster.json("distribute", "test", "-n", "6")
        assert (found["strategy"], len(found["probes"])) == ("spread", 6)
        assert {row["node_id"]: row["probes"] for row in found["nodes"]} == dict.fromkeys(NODES, 2)
        assert all(probe["ok"] and probe["ran_seconds"] >= 0.9 for probe in found["probes"])
        assert cluster.job(found["probes"][0]["job_id"])["outcome"] == "exited"
        only = cluster("distribute", "test", "--node", "gpu1", "--strategy", "node_specific", "-n", "2", "-s", "0")
        assert "2 probes on 1 node by node_specific, 0 failed" in only.stdout

    def test_a_probe_that_fits_nowhere_is_refused_in_one_line(self, config: ClusterConfig, cluster: Shell) -> None:
        done = cluster("distribute", "test", "-n", "2", "-a", "100", check=1)
        assert done.stderr.startswith("grid: No node can ever lend 100 cores: ")
        assert len(done.stderr.splitlines()) == 1
        assert "needs a node" in cluster("distribute", "test", "--strategy", "node_specific", check=2).stderr

    def test_an_interrupt_takes_every_probe_back(self, config: ClusterConfig, cluster: Shell) -> None:
        process = cluster.start("distribute", "test", "-n", "4", "-s", "300")
        wait_until(lambda: len(cluster.json("status")["allocations"]) == 4)
        process.terminate()
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"grid: 4 probes cancelled\n"
        wait_until(lambda: cluster.json("status")["allocations"] == [])
