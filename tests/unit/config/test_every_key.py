"""Every key of a cluster file changes a decision or an output.

`BEHAVIOURS` has a check for each key: two files that differ in this key alone, and something the grid makes of them
that differs, too. What only a whole grid can show is in `SHOWN_BY`: the test that shows it, and it names the key.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import logging
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.agent.owner.usage_meter import RayWorkers, SimulatedUsageMeter
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.nodes import OfferRow, RecommendationRow
from distributed_grid.config import ClusterConfig
from distributed_grid.config.key_tables import KeyTable, ListOf, MapOf
from distributed_grid.config_mapping import (
    nodes_from,
    offload_rules,
    owner_rules,
    rebalance_rules,
    scaling_rules,
    scheduling_policy,
    simulated_nodes,
    tier_settings,
    worker_rules,
)
from distributed_grid.control.agent_files import AttemptFiles, RemoteFiles
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
    OffloadPressureRead,
    PolicySet,
    PressureRead,
    TimePassed,
    WorkerJoined,
    WorkerRulesSet,
)
from distributed_grid.domain.jobs import Ending, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import PressureReading, is_automatic
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import WorkerState
from distributed_grid.errors import GridError
from distributed_grid.monitoring.alerts import AlertRules, alert_thresholds
from distributed_grid.monitoring.usage_history import ClusterHistory
from distributed_grid.prediction.task_predictor import TaskPredictor
from distributed_grid.prediction.task_runs import TaskRun
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.server.access.tls import make_certificate
from distributed_grid.server.active_config import ConfigRegistry
from distributed_grid.server.cluster import ClusterService
from distributed_grid.server.daemon import apply_log_settings
from distributed_grid.server.purge_guard import PurgeGuard
from distributed_grid.server.ray.engine_reconciler import EngineReconciler
from distributed_grid.server.ray.ray_nodes import RayCredentials, head_ports, security_risk, start_options
from distributed_grid.server.rest.listener import RestListener
from distributed_grid.server.services.leases import amounts_of
from distributed_grid.state_dir import StateDir
from tests.support.builders import a_capacity, a_command, a_node, a_request, a_submission, a_usage
from tests.support.project import PROJECT
from tests.support.scaling import ScalingScenario, a_type
from tests.support.worker_model import WorkerModel
from tests.unit.server.in_process_grid import Clock

MACHINE = a_capacity(cores=8, memory_gb=16, gpus=2, gpu_memory_gb=8)
Document = dict[str, Any]
Observed = Any
IDLE, DAY_SECONDS = Usage(), 86_400


class Story:
    """A grid of the nodes and policies of a config, without agents: its clock and its heartbeats are the test's."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.clock = Clock()
        self.store = InMemoryStore()
        self.grid = Grid(self.store, self.clock)

    async def open(self) -> Story:
        await self.grid.start()
        await self.grid.handle(PolicySet(scheduling_policy(self.config)))
        registry = ConfigRegistry(self.config, Path("unused"))
        for node in nodes_from(self.config, MACHINE):
            await self.grid.handle(NodeDeclared(node if node.host == "local" else registry.described(node, MACHINE)))
        return self

    async def beat(self, usage: Usage = IDLE, *, seconds: float = 2.0, times: int = 1) -> None:
        for _ in range(times):
            self.clock.ms += round(1000 * seconds)
            for node in self.config.nodes:
                await self.grid.handle(HeartbeatReceived(name=node.name, usage=usage))
            await self.grid.handle(TimePassed())

    async def run(self, uid: str) -> None:
        """The agent says that a job runs."""
        attempt = self.grid.ledger.jobs[uid].attempt
        assert attempt is not None
        await self.grid.handle(AttemptStarted(uid=uid, number=attempt.number, fence=attempt.fence, pid=7))

    async def end(self, uid: str, ending: Ending) -> None:
        """The agent says that a job's attempt is over."""
        attempt = self.grid.ledger.jobs[uid].attempt
        assert attempt is not None
        await self.grid.handle(
            AttemptEnded(uid=uid, number=attempt.number, fence=attempt.fence, outcome=Outcome(ending))
        )

    async def offers(self) -> dict[tuple[str, str], Any]:
        viewer = Viewer(0, self.config.resource_sharing.max_offers_per_node)
        rows = await self.grid.read_each(
            lambda ledger: ledger.nodes, lambda ledger, name, now: OfferRow.of_node(viewer, ledger, name)
        )
        return {(row.node_id, row.resource_type): (row.amount, row.generation) for row in rows}

    async def lent(self, request: Request) -> str:
        """Where a request for a moment would be placed; nothing where it would wait."""
        try:
            answer = await self.grid.dry_run(LeaseAsked(request))
        except GridError:
            return ""
        assert isinstance(answer, LeaseAnswer)
        return answer.lease.node

    async def ask(self, name: str, **fields: Any) -> str:
        """The node that lends, or why it is refused."""
        try:
            answer = await self.grid.handle(LeaseAsked(a_request(name, **fields)))
        except GridError as refusal:
            return str(refusal)
        assert isinstance(answer, LeaseAnswer)
        return answer.lease.node

    async def holders(self) -> list[str]:
        return await self.grid.read(lambda ledger, now: sorted(one.id for one in ledger.leases.values() if one.holds))


def told(scenario: Callable[[Story], Awaitable[Observed]]) -> Callable[[ClusterConfig], Observed]:
    """The end of a story in a grid of this config."""

    def observe(config: ClusterConfig) -> Observed:
        async def whole() -> Observed:
            story = await Story(config).open()
            try:
                return await scenario(story)
            finally:
                await story.grid.stop()

        return asyncio.run(asyncio.wait_for(whole(), 60))

    return observe


def offered(*usages: tuple[Usage, float]) -> Callable[[ClusterConfig], Observed]:
    """Which amounts of a node can be had after it was used so, each for so many seconds."""

    async def scenario(story: Story) -> Observed:
        await story.beat()
        for usage, seconds in usages:
            await story.beat(usage, seconds=30, times=max(int(seconds // 30), 1))
        asks = (a_request("c", cores=1), a_request("m", memory_gb=1), a_request("g", gpus=1))
        amounts = {key: amount for key, (amount, _) in (await story.offers()).items()}
        return amounts, [await story.lent(ask) for ask in asks]

    return told(scenario)


def placed(request: Request, *, strategy: str = "") -> Callable[[ClusterConfig], Observed]:
    """Where a request is placed when all nodes are idle."""

    async def scenario(story: Story) -> Observed:
        await story.beat(times=2)
        return await story.lent(request)

    return told(scenario)


async def _offer_ages(story: Story) -> Observed:
    await story.beat(seconds=5, times=12)
    return await story.grid.read(lambda ledger, now: [(o.generation, o.expires_at_ms) for o in ledger.offers.values()])


async def _after_silence(story: Story) -> Observed:
    await story.beat()
    for _ in range(3):
        story.clock.ms += 30_000
        await story.grid.handle(TimePassed())
    return await story.grid.read(lambda ledger, now: [str(node.state) for node in ledger.nodes.values()])


async def _after_the_order(story: Story) -> Observed:
    """Until when the order to start a job is valid."""
    await story.beat()
    await story.grid.handle(a_submission(a_request("job", cores=1)))
    return await story.grid.read(lambda ledger, now: [node.start_ms for node in ledger.nodes.values()])


async def _next_in_line(story: Story) -> Observed:
    """Ana has used the node for an hour, bo a little of it, and ana asks again before bo does; then it is free."""
    await story.beat()
    await story.ask("first", cores=7, user="ana", wait_s=0)
    await story.ask("little", cores=1, user="bo", wait_s=0)
    await story.beat(seconds=60, times=2)
    await story.grid.handle(LeaseReleased("little", "bo"))
    await story.beat(seconds=60, times=58)
    await story.grid.handle(LeaseReleased("first", "ana"))
    await story.ask("carls", cores=8, user="carl", priority="high")
    await story.ask("anas", cores=8, user="ana", wait_s=DAY_SECONDS)
    await story.ask("bos", cores=8, user="bo", wait_s=DAY_SECONDS)
    await story.beat(seconds=60, times=120)
    await story.grid.handle(LeaseReleased("carls", "carl"))
    await story.beat()
    return await story.holders()


async def _small_after_large(story: Story) -> Observed:
    """A large request waits for a node that is half taken; a small one comes ten seconds later."""
    await story.beat()
    await story.ask("half", cores=4)
    await story.ask("large", cores=8, wait_s=3600)
    await story.beat(seconds=2, times=5)
    await story.ask("small", cores=4, wait_s=3600)
    return await story.holders()


async def _urgent_after_job(story: Story) -> Observed:
    """A job has run for ten seconds when somebody in a hurry asks for its place."""
    await story.beat()
    await story.grid.handle(
        JobSubmitted(id="job", command=a_command("true"), request=a_request("job", cores=8, priority="low"))
    )
    job = await story.grid.read(lambda ledger, now: next(iter(ledger.jobs.values())))
    attempt = job.attempts[-1]
    await story.grid.handle(AttemptStarted(uid=job.uid, number=attempt.number, fence=attempt.fence, pid=4242))
    await story.beat(times=5)
    await story.ask("urgent", cores=8, priority="urgent", wait_s=3600)
    return await story.grid.read(lambda ledger, now: [str(one.state) for one in ledger.jobs.values()])


LASTING = ("all", "35-0", "35-1")


def scaled(config: ClusterConfig) -> Observed:
    """What scaling does in an hour and a half in which a queue grows twice, and the budget is known."""
    grid = ScalingScenario(a_node("home", cores=2), scaling=replace(scaling_rules(config), types=(a_type(price=0.1),)))
    grid.handle(WorkerRulesSet(worker_rules(config)))
    grid.ask(a_request("all", cores=1))
    done = []
    for minute in range(90):
        for number in range({5: 1, 12: 8, 35: 8}.get(minute, 0)):
            grid.ask(a_request(f"{minute}-{number}", cores=2, wait_s=DAY_SECONDS))
        plan = grid.evaluate(seconds=60)
        done.append((plan.action, plan.count))
        for name in grid.deliver():
            grid.heartbeat(name)
        held = [one.id for one in grid.ledger.leases.values() if one.holds and one.id not in LASTING]
        for lease_id in held[:1]:
            grid.release(lease_id)
        grid.bring_home()
        grid.end_terminating()
    return done


def rented(config: ClusterConfig) -> Observed:
    """After how many seconds workers are given up: never answered, never joined, terminated, and never heard again."""

    def seconds(faults: list[str], *, joins: bool = False, ends: bool = False) -> int:
        model = WorkerModel(worker_rules(config), forgets=True)
        model.cloud.faults.waiting["create"] = faults
        worker_id = model.want()
        model.perform()
        if joins:
            model.handle(WorkerJoined(worker_id))
        if ends:
            model.terminate(worker_id)
        for second in range(4000):
            state = model.states().get(worker_id)
            if state is None or (state is WorkerState.TERMINATING and not ends):
                return second
            model.perform()
            model.compare()
            model.pass_time(1000)
        return -1

    return (
        seconds(["lose_before"] * 9000),
        seconds([]),
        seconds([], joins=True),
        seconds([], ends=True),
        seconds(["lose_before"], ends=True),
    )


def kept_minutes(config: ClusterConfig) -> Observed:
    """How many minutes of a node are known after an hour."""
    histories = ClusterHistory(round(1000 * config.scaling.history_retention_seconds))
    for second in range(0, 3600, 20):
        histories.add("a", IDLE, MACHINE, 1000 * (DAY_SECONDS + second))
    return len(histories.minutes("a", 1000 * (DAY_SECONDS + 3600), 1440))


def limited(**fields: Any) -> Callable[[ClusterConfig], Observed]:
    """Amount that a user holds after two requests."""

    async def scenario(story: Story) -> Observed:
        await story.beat()
        await story.ask("one", user="ana", **fields)
        await story.ask("two", user="ana", **fields)
        return await story.holders()

    return told(scenario)


def balanced(resource: str, *levels: tuple[int, int]) -> Callable[[ClusterConfig], Observed]:
    """What rebalancing does for a node at these levels (thousandths), each for so many rounds of 10 seconds."""

    async def scenario(story: Story) -> Observed:
        rules = rebalance_rules(story.config)
        assert rules is not None
        seen = []
        for level, rounds in levels:
            for _ in range(rounds):
                await story.beat(seconds=10)
                names = [node.name for node in story.config.nodes]
                idle: dict[str, Any] = {"memory": 0, "cpu": 0, "gpu": 0}
                hot = {**idle, resource: level}
                rest = (PressureReading(node=name, score=0, **idle) for name in names[1:])
                readings = (PressureReading(node=names[0], score=0, **hot), *rest)
                await story.grid.handle(PressureRead(readings, rules))
                held = await story.grid.read(
                    lambda ledger, now: sum(is_automatic(one.request) for one in ledger.leases.values())
                )
                advice = await story.grid.read(lambda ledger, now: len(RecommendationRow.of_ledger(Viewer(0), ledger)))
                seen.append((held, advice))
        reasons = [row.reason for row in story.store.events(types=("rebalanced",), limit=1000)]
        return seen, reasons

    return told(scenario)


def offloaded(resource: str, level: int = 900) -> Callable[[ClusterConfig], Observed]:
    """How many jobs have left a node by themselves after each of so many looks at it, every 30 seconds."""

    async def scenario(story: Story) -> Observed:
        first, *others = (node.name for node in story.config.nodes)
        for uid in ("r1", "r2"):
            request = a_request(uid, cores=1, memory_gb=1, gpus=int(resource == "gpu"), prefer=[first])
            await story.beat()
            known = JobEstimate(run_ms=10**8)
            await story.grid.handle(
                JobSubmitted(id=uid, command=a_command(), request=request, retries=0, estimate=known, restartable=True)
            )
            await story.run(uid)
        idle: dict[str, Any] = {"memory": 0, "cpu": 0, "gpu": 0}
        hot = PressureReading(node=first, score=500, **{**idle, resource: level})
        readings = (hot, *(PressureReading(node=name, score=0, **idle) for name in others))
        rules, seen = offload_rules(story.config), []
        for look in range(16):
            await story.beat(seconds=30)
            event = OffloadPressureRead(readings, rebalance_rules(story.config), rules, (f"move-{look}",))
            await story.grid.handle(event)
            for move in await story.grid.read(lambda ledger, now: list(ledger.moves.values())):
                await story.end(move.job, Ending.MOVED)
                await story.run(move.job)
            seen.append(await story.grid.read(lambda ledger, now: len(list(ledger.jobs_of(others[0])))))
        return seen

    return told(scenario)


def simulated_usage(config: ClusterConfig) -> Observed:
    """Measurement of a simulated node that runs nothing."""
    (node,) = simulated_nodes(config, nodes_from(config, MACHINE)).values()
    return SimulatedUsageMeter(node, RayWorkers()).usage((), 0, 1_000, None)


def yielded(config: ClusterConfig) -> Observed:
    """The rules that a node's agent goes by."""
    return owner_rules(config, config.nodes[0])


def alerted(config: ClusterConfig) -> Observed:
    """The alerts of a node that is busy for two minutes."""
    rules = AlertRules(alert_thresholds(config.alerts))
    usage = Usage(
        cpu_busy_milli=900,
        cpu_outside_milli=900,
        memory_bytes=14 * 1024**3,
        memory_outside_bytes=0,
        gpus=a_usage(gpus={0: (0.9, 4), 1: (0.9, 4)}).gpus,
    )
    return [alert for at in range(60) for alert in rules.observe("a", usage, MACHINE, 1_000 + 2_000 * at)]


def a_cluster_service(
    grid: Grid, config: ClusterConfig, engine: RayEngine, reconciler: EngineReconciler
) -> ClusterService:
    files, jobs = RemoteFiles({}), Path("unused")
    guard = PurgeGuard(grid, AttemptFiles(jobs, files, lambda name: True), files, jobs)
    return ClusterService(grid, config, StateDir("unused"), engine=engine, reconciler=reconciler, guard=guard)


def reached_by(config: ClusterConfig) -> Observed:
    """How SSH reaches the first node."""

    async def target() -> Observed:
        engine = RayEngine()
        grid = Grid(InMemoryStore(), Clock())
        reconciler = EngineReconciler(grid, engine, hold_seconds=60)
        cluster = a_cluster_service(grid, config, engine, reconciler)
        cluster._id = "grid"
        found = cluster.target(config.nodes[0].name)
        return (found.hop, found.via, found.python, cluster.ray.nodes.python(config.nodes[0].name))

    return asyncio.run(target())


def ray_address(config: ClusterConfig) -> Observed:
    """By which address the other nodes reach the first one's Ray."""

    async def address() -> Observed:
        engine = RayEngine()
        grid = Grid(InMemoryStore(), Clock())
        reconciler = EngineReconciler(grid, engine, hold_seconds=60)
        cluster = a_cluster_service(grid, config, engine, reconciler)
        return await cluster.ray.nodes.addresses([node.name for node in config.nodes])

    return asyncio.run(address())


def ray_started(config: ClusterConfig) -> Observed:
    """How Ray's head is started, which ports it needs, and what is risky about it."""
    return start_options("a", "10.0.0.1", "", config.ray, MACHINE), head_ports(config.ray), security_risk(config.ray)


def listening(config: ClusterConfig) -> Observed:
    """Where the control plane listens, and by which names it is known."""

    async def found() -> Observed:
        services: Any = None
        agents: Any = None
        with tempfile.TemporaryDirectory() as folder:
            listener = RestListener(
                services, Path(folder), config.server, configured=(), agents=agents, on_request=lambda: None
            )
            address = listener._configured_address()
            try:
                await listener._certificate_for(address)
                problem = ""
            except (GridError, OSError) as failure:
                problem = str(failure)
            return address, listener._names(address), problem

    return asyncio.run(found())


def connections(config: ClusterConfig) -> Observed:
    """How many connections a peer may have to a memory server."""
    return ConfigRegistry(config, Path("unused")).max_connections_per_peer


def ray_environ(config: ClusterConfig) -> Observed:
    """Environment of a Ray program."""
    with tempfile.TemporaryDirectory() as folder:
        return sorted(RayCredentials(Path(folder)).environ(auth=config.ray.auth, tls=config.ray.tls))


def logged(config: ClusterConfig) -> Observed:
    """A warning and a message in the log's file."""
    assert config.logging.file is not None
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    file = Path(config.logging.file)
    file.unlink(missing_ok=True)
    try:
        apply_log_settings(config.logging)
        logging.getLogger("grid.test").info("a message")
        logging.getLogger("grid.test").warning("a warning")
        for handler in root.handlers:
            handler.close()
            handler.stream.close()  # type: ignore[attr-defined]
    finally:
        root.handlers[:], root.level = handlers, level
    return [re.sub(r"\d", "0", line) for line in file.read_text().splitlines()]


def custom_resources(config: ClusterConfig) -> Observed:
    """Whether a resource can be asked for, as the daemon reads the config."""
    names = frozenset(config.custom_resources) | {name for node in config.nodes for name in node.custom}
    try:
        return amounts_of("fpga", 1, names)
    except GridError as refusal:
        return str(refusal)


def certificate(config: ClusterConfig) -> Observed:
    """Whether the memory server of a node has a certificate."""
    return [bool(part) for part in ConfigRegistry(config, Path("unused")).memory_certificate("a")]


def predicted(runs: int, *, growth: float = 1.0) -> Callable[[ClusterConfig], Observed]:
    """The tier that predicts after so many runs, of which each used so much more than the one before."""

    def observe(config: ClusterConfig) -> Observed:
        predictor = TaskPredictor(tier_settings(config))
        memory = [round(10**8 * growth**i) + i for i in range(runs)]
        predictor.learn_all(
            TaskRun(task_id=f"t{i}", attempt=1, user="ana", key="x", memory_bytes=used) for i, used in enumerate(memory)
        )
        return predictor.tier()[0]

    return observe


@dataclass
class Behaviour:
    """Two values of a key, in a file that otherwise stays the same, and what has to differ."""

    one: Any
    other: Any
    observe: Callable[[ClusterConfig], Observed]
    base: Document
    at: int = 0
    """Which node the key is set on."""


NOW = {"dwell_seconds": 0, "margin": 0}
FAR: Document = {"name": "a", "host": "10.0.0.1"}
SIMULATED: Document = {"nodes": [{"name": "a", "host": "local", "simulated": True}]}
LOCAL: Document = {"nodes": [{"name": "a", "host": "local"}]}
ONE: Document = {"nodes": [{**FAR, "dedicated": True}]}
TWO: Document = {"nodes": [{**FAR, "dedicated": True}, {"name": "b", "host": "10.0.0.2", "dedicated": True}]}
WATCHED: Document = {"nodes": [{**FAR}], "resource_sharing": {"thresholds": NOW}}
OWN: Document = {"nodes": [{**FAR, "thresholds": NOW}]}
POLICY: Document = {"nodes": [{**FAR}]}
HALF = a_usage(cpu_outside=0.5, memory_outside_gb=8, gpus={0: (0.5, 4), 1: (0.5, 4)})
SOME = a_usage(cpu_outside=0.2, memory_outside_gb=4, gpus={0: (0.1, 4), 1: (0.1, 4)})
FORTY = a_usage(cpu_outside=0.4)
busy, some = offered((HALF, 60)), offered((SOME, 60))
long_dwell = offered((FORTY, 1800), (IDLE, 150))
HOT: Document = {
    "nodes": [{**FAR, "dedicated": True}, {"name": "b", "host": "10.0.0.2", "dedicated": True}],
    "resource_sharing": {"rebalance_interval_seconds": 10},
}
OFFLOADED: Document = {
    "nodes": TWO["nodes"],
    "resource_sharing": {"mode": "offload_only", "policy": "aggressive", "auto_offload": {"enabled": True}},
}
A100 = Amounts(gpu_milli=1000, gpu_models=("A100",))
DECLARED_GPU: Document = {"nodes": [{**FAR, "dedicated": True, "trust_declared": True, "gpus": [{}]}]}
FASTEST: Document = {**TWO, "resource_sharing": {"strategy": "performance_optimized"}}
CHEAPEST: Document = {**TWO, "resource_sharing": {"strategy": "cost_optimized"}}
LOGGED: Document = {**LOCAL, "logging": {"file": "LOGFILE"}}

THRESHOLDS = {
    "cpu_percent_max": (10, 90, busy, {}),
    "cpu_min_cores": (1, 8, some, {}),
    "memory_percent_max": (10, 90, busy, {}),
    "memory_min_gb": (1, 15, some, {}),
    "gpu_utilization_max": (10, 90, busy, {}),
    "gpu_memory_min_mb": (100, 7000, some, {}),
    "margin": (0, 0.2, long_dwell, {"dwell_seconds": 600}),
    "dwell_seconds": (0, 1200, long_dwell, {"margin": 0}),
}
POLICIES = {
    "throttle": (True, False),
    "pause": (True, False),
    "evict": (True, False),
    "notice_seconds": (1, 9),
    "grace_seconds": (1, 9),
}
MARKS = {
    f"{kind}_pressure_{mark}": Behaviour(*values, balanced(kind, *levels), HOT)
    for kind in ("memory", "cpu", "gpu")
    for mark, values, levels in (("high", (0.6, 0.95), [(800, 6)]), ("low", (0.05, 0.5), [(900, 6), (200, 12)]))
}
in_line, preempted = told(_next_in_line), told(_urgent_after_job)

BEHAVIOURS: dict[str, Behaviour] = {
    "nodes[].name": Behaviour("a", "z", offered(), {"nodes": [{"host": "10.0.0.1", "dedicated": True}]}),
    "nodes[].host": Behaviour("10.0.0.1", "10.0.0.9", reached_by, {"nodes": [{"name": "a"}]}),
    "nodes[].port": Behaviour(22, 2222, reached_by, ONE),
    "nodes[].user": Behaviour("ana", "bo", reached_by, ONE),
    "nodes[].ssh_key_path": Behaviour("/k1", "/k2", reached_by, ONE),
    "nodes[].known_hosts": Behaviour("/h1", "/h2", reached_by, ONE),
    "nodes[].accept_new": Behaviour(False, True, reached_by, ONE),
    "nodes[].proxy_jump": Behaviour("j1", "j2", reached_by, ONE),
    "nodes[].python": Behaviour("/p1", "/p2", reached_by, ONE),
    "nodes[].ray_python": Behaviour("/p1", "/p2", reached_by, ONE),
    "nodes[].ray_address": Behaviour("10.9.9.9", "10.8.8.8", ray_address, TWO),
    "nodes[].role": Behaviour("worker", "head", lambda config: config.head.name, TWO, at=1),
    "nodes[].cpu_count": Behaviour(2, 4, offered(), {"nodes": [{**ONE["nodes"][0], "trust_declared": True}]}),
    "nodes[].memory_gb": Behaviour(2, 4, offered(), {"nodes": [{**ONE["nodes"][0], "trust_declared": True}]}),
    "nodes[].gpu_count": Behaviour(1, 2, offered(), {"nodes": [{**ONE["nodes"][0], "trust_declared": True}]}),
    "nodes[].gpus[].name": Behaviour("T4", "A100", placed(replace(a_request(), ask=A100)), DECLARED_GPU),
    "nodes[].gpus[].memory_gb": Behaviour(4, 40, placed(a_request(gpus=1, gpu_memory_gb=20)), DECLARED_GPU),
    "nodes[].custom": Behaviour({"tpu": 1}, {"tpu": 2}, offered(), ONE),
    "nodes[].tags": Behaviour(["fast"], ["slow"], placed(a_request(labels=(("fast", ""),))), ONE),
    "nodes[].labels": Behaviour({"room": "1"}, {"room": "2"}, placed(a_request(labels=(("room", "1"),))), ONE),
    "nodes[].trust_declared": Behaviour(False, True, offered(), {"nodes": [{**ONE["nodes"][0], "cpu_count": 2}]}),
    "nodes[].simulated": Behaviour(False, True, offered(), {"nodes": [{**LOCAL["nodes"][0], "cpu_count": 2}]}),
    **{f"nodes[].background.{kind}": Behaviour(0, 50, simulated_usage, SIMULATED) for kind in ("cpu", "memory", "gpu")},
    "nodes[].dedicated": Behaviour(False, True, busy, {"nodes": [FAR]}),
    **{
        f"nodes[].thresholds.{key}": Behaviour(
            one, other, observe, {"nodes": [{**FAR, "thresholds": {**NOW, **extra}}]}
        )
        for key, (one, other, observe, extra) in THRESHOLDS.items()
    },
    **{
        f"nodes[].owner_policy.{key}": Behaviour(one, other, yielded, {"nodes": [{"name": "a", "host": "local"}]})
        for key, (one, other) in POLICIES.items()
    },
    "nodes[].resource_sharing.can_share": Behaviour(False, True, offered(), ONE),
    "nodes[].resource_sharing.max_share_cpu": Behaviour(1, 2, offered(), ONE),
    "nodes[].resource_sharing.max_share_memory_gb": Behaviour(1, 2, offered(), ONE),
    "nodes[].resource_sharing.max_share_gpu": Behaviour(1, 2, offered(), ONE),
    "nodes[].resource_sharing.max_share_custom": Behaviour(
        {"tpu": 1}, {"tpu": 2}, offered(), {"nodes": [{**ONE["nodes"][0], "custom": {"tpu": 4}}]}
    ),
    "nodes[].resource_sharing.priority": Behaviour(1.0, 5.0, placed(a_request()), TWO, at=1),
    "nodes[].speed": Behaviour(1.0, 5.0, placed(a_request()), FASTEST, at=1),
    "nodes[].cost_per_hour": Behaviour(0, 5.0, placed(a_request()), CHEAPEST),
    "custom_resources": Behaviour([], ["fpga"], custom_resources, ONE),
    "resource_sharing.mode": Behaviour("dynamic_balancing", "offload_only", balanced("memory", (900, 8)), HOT),
    "resource_sharing.policy": Behaviour("conservative", "aggressive", balanced("memory", (900, 8)), HOT),
    "resource_sharing.strategy": Behaviour(
        "performance_optimized",
        "cost_optimized",
        placed(a_request()),
        {"nodes": [{**TWO["nodes"][0], "cost_per_hour": 9}, {**TWO["nodes"][1], "speed": 0.5}]},
    ),
    "resource_sharing.check_interval_seconds": Behaviour(10, 3000, told(_offer_ages), ONE),
    "resource_sharing.offer_expiry_seconds": Behaviour(100, 3000, told(_offer_ages), ONE),
    "resource_sharing.max_offers_per_node": Behaviour(1, 5, offered(), ONE),
    "resource_sharing.rebalance_interval_seconds": Behaviour(10, 60, balanced("memory", (900, 6)), TWO),
    **{
        f"resource_sharing.thresholds.{key}": Behaviour(
            one, other, observe, {"nodes": [FAR], "resource_sharing": {"thresholds": {**NOW, **extra}}}
        )
        for key, (one, other, observe, extra) in THRESHOLDS.items()
    },
    **{f"resource_sharing.thresholds.{key}": behaviour for key, behaviour in MARKS.items()},
    "resource_sharing.thresholds.excess_threshold": Behaviour(0.0, 0.5, some, WATCHED),
    "hold_seconds": Behaviour(10, 600, told(_after_silence), ONE),
    "start_seconds": Behaviour(10, 600, told(_after_the_order), ONE),
    "trusted_network": Behaviour(False, True, certificate, ONE),
    **{f"owner_policy.{key}": Behaviour(one, other, yielded, POLICY) for key, (one, other) in POLICIES.items()},
    "fairness.half_life_hours": Behaviour(0, 240, in_line, ONE),
    "fairness.weights": Behaviour({"ana": 1}, {"ana": 10_000}, in_line, ONE),
    "fairness.starvation_hours": Behaviour(1, 48, in_line, ONE),
    "fairness.patience_seconds": Behaviour(1, 3000, told(_small_after_large), ONE),
    "preemption.minimum_run_seconds": Behaviour(0, 3000, preempted, ONE),
    "preemption.max_per_job": Behaviour(0, 3, preempted, ONE),
    "quotas.NAME.members": Behaviour(["ana"], ["bo"], limited(cores=1), {**ONE, "quotas": {"NAME": {"cpu": 1}}}),
    "quotas.NAME.cpu": Behaviour(1, 8, limited(cores=1), {**ONE, "quotas": {"NAME": {"members": ["ana"]}}}),
    "quotas.NAME.memory_gb": Behaviour(1, 8, limited(memory_gb=1), {**ONE, "quotas": {"NAME": {"members": ["ana"]}}}),
    "quotas.NAME.gpu": Behaviour(1, 2, limited(gpus=1), {**ONE, "quotas": {"NAME": {"members": ["ana"]}}}),
    "quotas.NAME.custom": Behaviour(
        {"tpu": 1},
        {"tpu": 2},
        limited(custom={"tpu": 1}),
        {"nodes": [{**ONE["nodes"][0], "custom": {"tpu": 4}}], "quotas": {"NAME": {"members": ["ana"]}}},
    ),
    "quotas.NAME.jobs": Behaviour(1, 2, limited(cores=1), {**ONE, "quotas": {"NAME": {"members": ["ana"]}}}),
    "alerts.cpu": Behaviour(0.5, 0.99, alerted, ONE),
    "alerts.memory": Behaviour(0.5, 0.99, alerted, ONE),
    "alerts.gpu": Behaviour(0.5, 0.99, alerted, ONE),
    "prediction.confidence_threshold": Behaviour(0.0, 1.0, predicted(40, growth=1.1), ONE),
    "prediction.min_samples_for_ml": Behaviour(20, 60, predicted(40), ONE),
    "prediction.min_samples_for_stats": Behaviour(5, 20, predicted(10), ONE),
    "ray.python": Behaviour("/p1", "/p2", reached_by, ONE),
    "ray.port": Behaviour(6379, 6380, ray_started, ONE),
    "ray.client_port": Behaviour(10001, 10002, ray_started, ONE),
    "ray.dashboard_port": Behaviour(8265, 8266, ray_started, ONE),
    "ray.dashboard_host": Behaviour("127.0.0.1", "10.0.0.1", ray_started, ONE),
    "ray.min_worker_port": Behaviour(20000, 20001, ray_started, ONE),
    "ray.max_worker_port": Behaviour(20999, 21999, ray_started, ONE),
    "ray.object_store_memory_gb": Behaviour(1, 2, ray_started, ONE),
    "ray.auth": Behaviour("token", "none", ray_started, ONE),
    "ray.tls": Behaviour(False, True, ray_environ, ONE),
    "server.host": Behaviour("127.0.0.1", "10.0.0.1", listening, ONE),
    "server.port": Behaviour(7433, 7434, listening, ONE),
    "server.names": Behaviour(["a.example"], ["b.example"], listening, ONE),
    "server.certificate": Behaviour("CERTIFICATE", "/none", listening, {**ONE, "server": {"key": "KEY"}}),
    "server.key": Behaviour("KEY", "/none", listening, {**ONE, "server": {"certificate": "CERTIFICATE"}}),
    "server.max_connections_per_peer": Behaviour(3, 300, connections, ONE),
    "logging.level": Behaviour("info", "warning", logged, LOGGED),
    "logging.format": Behaviour("text", "json", logged, LOGGED),
}

SCALED = {"nodes": [{"name": "a"}], "scaling": {"provider": "scripted"}}
BEHAVIOURS |= {
    f"resource_sharing.auto_offload.{key}": Behaviour(one, other, offloaded(resource), OFFLOADED)
    for key, one, other, resource in (
        ("enabled", False, True, "memory"),
        ("cpu_threshold", 0.7, 0.95, "cpu"),
        ("memory_threshold", 0.7, 0.95, "memory"),
        ("gpu_threshold", 0.7, 0.95, "gpu"),
        ("check_interval_seconds", 30, 240, "memory"),
        ("cooldown_seconds", 0, 240, "memory"),
    )
}
BEHAVIOURS |= {
    f"scaling.{key}": Behaviour(one, other, scaled, SCALED)
    for key, one, other in (
        ("min_workers", 0, 2),
        ("max_workers", 1, 10),
        ("target_utilization", 0.4, 0.8),
        ("scale_up_threshold", 0.75, 1.0),
        ("scale_down_threshold", 0.1, 0.6),
        ("evaluation_window_seconds", 60, 600),
        ("scale_up_cooldown_seconds", 0, 600),
        ("scale_down_cooldown_seconds", 0, 900),
        ("budget_per_hour", 0.15, 100),
        ("budget_per_day", 0.15, 100),
    )
}
BEHAVIOURS |= {
    f"workers.{key}": Behaviour(one, other, rented, ONE)
    for key, one, other in (
        ("launch_seconds", 60, 120),
        ("join_seconds", 60, 120),
        ("consistency_seconds", 5, 20),
        ("call_seconds", 5, 40),
        ("exit_seconds", 60, 120),
    )
}
BEHAVIOURS["scaling.provider"] = Behaviour(None, "scripted", scaled, ONE)
BEHAVIOURS["scaling.history_retention_seconds"] = Behaviour(120, 86_400, kept_minutes, ONE)

E2E = "tests/e2e"
SHOWN_BY = {
    "providers": f"{E2E}/test_provider_check.py::test_a_provider_that_can_be_used_says_what_it_offers",
    "scaling.worker_reassessment_interval_seconds": (
        f"{E2E}/test_pull_workers.py::test_workers_report_anew_as_often_as_the_config_says"
    ),
    "prediction.update_interval_seconds": (
        f"{E2E}/test_predict.py::test_the_predictor_is_trained_as_often_as_the_config_says"
    ),
    "alerts.command": f"{E2E}/test_metrics.py::test_an_alert_reaches_its_command_and_the_log",
    "alerts.webhook": "tests/unit/monitoring/test_alerts.py::test_a_webhook_is_called_with_the_alert",
    "max_files_gb": f"{E2E}/test_files_limit.py::test_files_above_the_limit_pause_a_job_and_then_end_it",
    "max_output_gb": f"{E2E}/test_output_limit.py::test_a_flood_is_kept_to_its_limit_and_its_newest_lines_are_shown",
    "server.tls": "tests/unit/config/test_sections.py::test_connections_without_tls_are_refused",
    "server.force_plain": "tests/unit/config/test_sections.py::test_connections_without_tls_are_refused",
    "name": f"{E2E}/test_config_keys.py::test_the_name_of_the_cluster_is_shown",
    "logging.file": f"{E2E}/test_config_keys.py::test_the_log_goes_to_the_file_that_the_config_names",
    "resource_sharing.enabled": f"{E2E}/test_config_keys.py::test_shared_status_says_when_sharing_is_not_enabled",
    "resource_sharing.monitoring_interval_seconds": (
        f"{E2E}/test_metrics.py::test_the_history_survives_a_restart_and_is_written_as_often_as_the_config_says"
    ),
}


def keys_of(kind: object, at: str = "") -> Iterator[str]:
    """Every key of the tables in `config/`, by its first spelling."""
    if isinstance(kind, ListOf):
        yield from keys_of(kind.kind, f"{at}[]")
    elif isinstance(kind, MapOf):
        yield from keys_of(kind.kind, f"{at}.NAME")
    elif isinstance(kind, KeyTable):
        for key in kind.keys:
            if not key.overrides:
                path = f"{at}.{key.spellings[0]}" if at else key.spellings[0]
                yield from [*keys_of(key.kind, path)] or [path]


KEYS = list(keys_of(ClusterConfig.key_table))


def test_no_key_is_without_a_behaviour() -> None:
    shown = {*BEHAVIOURS, *SHOWN_BY}
    assert [key for key in KEYS if key not in shown] == []
    assert shown <= set(KEYS), "no such key any more"


def with_key(document: Document, key: str, value: object, at: int) -> Document:
    """The document with this key set; `at` is which node is meant."""
    changed = copy.deepcopy(document)
    inside: Any = changed
    *parents, last = key.split(".")
    for part in parents:
        name, _, is_list = part.partition("[")
        inside = inside.setdefault(name, [{}] if is_list else {})
        if is_list:
            inside = inside[at if name == "nodes" else 0]
    inside[last] = value
    return changed


def with_files(document: Document, folder: Path) -> Document:
    """The document with the names of real files in place of the words that stand for them."""
    certificate, key = make_certificate("grid", ())
    for name, content in (("CERTIFICATE", certificate), ("KEY", key)):
        (folder / name).write_bytes(content)
    text = json.dumps(document)
    for name in ("CERTIFICATE", "KEY", "LOGFILE"):
        text = text.replace(f'"{name}"', json.dumps(str(folder / name)))
    found: Document = json.loads(text)
    return found


@pytest.mark.parametrize("key", list(BEHAVIOURS))
def test_a_key_changes_what_the_grid_does(key: str, tmp_path: Path) -> None:
    behaviour = BEHAVIOURS[key]
    documents = [with_key(behaviour.base, key, value, behaviour.at) for value in (behaviour.one, behaviour.other)]
    one, other = (ClusterConfig.from_mapping(with_files(document, tmp_path)) for document in documents)
    assert one != other
    assert behaviour.observe(one) != behaviour.observe(other)


@pytest.mark.parametrize("key", list(SHOWN_BY))
def test_key_shown_by_a_whole_grid_has_a_test_that_names_it(key: str) -> None:
    path, _, name = SHOWN_BY[key].partition("::")
    source = (PROJECT / path).read_text()
    tests = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert key.rpartition(".")[2] in (ast.get_source_segment(source, tests[name]) or "")
