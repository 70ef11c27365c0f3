"""The daemon of the control plane: composition, start, serving, and shutdown without dropping a request.

- Exactly one process owns the ledger: the holder of the instance lock.
- Shutdown unlinks the socket first and releases the lock last. A client that was not answered gets no answer and asks
  the next daemon with the same request id.
- Jobs are not the daemon's children: they outlive it and are found again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import getpass
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import IO, Any

from distributed_grid import __version__
from distributed_grid.adapters.child_process import ChildCommand
from distributed_grid.adapters.clock import FILE as AGE_FILE
from distributed_grid.adapters.clock import (
    AgeClock,
    GridClock,
    last_stored_ms,
    load_anchor,
    save_anchor,
    save_anchor_forever,
)
from distributed_grid.adapters.node.node_messages import AgentLinkChanged
from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.stores.minute_store import MinuteStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.adapters.stores.task_history import TaskHistory
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.files.attempt_files import StoredWorkDirs
from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.agent.lent_memory import LentMemory, LocalMemory, address_towards
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.api.answers.common import Viewer
from distributed_grid.config import ClusterConfig
from distributed_grid.config.sections import Logging
from distributed_grid.config_mapping import (
    offload_rules,
    rebalance_rules,
    scaling_rules,
    simulated_nodes,
    tier_settings,
    worker_rules,
)
from distributed_grid.control.agent_files import AttemptFiles, ContentSender
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.boost_file import ResourceBoostPersistence
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import AlertChanged, PressureRead, TimePassed
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, Node, first_node
from distributed_grid.domain.rebalancing import RebalanceRules
from distributed_grid.domain.resources import NOTHING
from distributed_grid.errors import BadInput, GridError
from distributed_grid.log_rate_limit import LogRateLimit, configure_logging
from distributed_grid.memory.supervisor.supervisor import SERVER_LOCK
from distributed_grid.monitoring.alerts import Alert
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.monitoring.usage_history import MINUTE
from distributed_grid.reactor.effects import (
    AttemptEffect,
    CollectOutputs,
    DeliverFiles,
    EngineEffect,
    MemoryEffect,
    MoveEffect,
    ShipCheckpoint,
    WorkerEffect,
)
from distributed_grid.server.access.admission import Admission
from distributed_grid.server.access.agent_sockets import AgentSockets
from distributed_grid.server.active_config import (
    ConfigRegistry,
    SelectionNote,
    declare_nodes,
    save_selection,
    select_config,
)
from distributed_grid.server.answers import AnswerRenderer
from distributed_grid.server.checkpoint_shipping import CheckpointShipper
from distributed_grid.server.cluster import ClusterCommandService, ClusterService
from distributed_grid.server.endpoints import collect
from distributed_grid.server.file_delivery import FileDeliverer
from distributed_grid.server.instance_lock import BACKLOG, InstanceLock, StartupReport
from distributed_grid.server.offloading.auto_offload import AutoOffloader
from distributed_grid.server.offloading.move_reconciler import MoveReconciler, ResultCollector, stored_manifest
from distributed_grid.server.prediction.job_runs import JobSizer, RunRecorder
from distributed_grid.server.prediction.service import PredictionService
from distributed_grid.server.purge_guard import PurgeGuard
from distributed_grid.server.ray.attachment import AttachedNodeSync, RayAttachment
from distributed_grid.server.ray.engine_reconciler import EngineReconciler
from distributed_grid.server.ray.ray_nodes import record_path
from distributed_grid.server.rest.listener import RestListener, RestServices
from distributed_grid.server.rpc import Connection, Dispatcher, NodeMemoryDispatcher
from distributed_grid.server.services.auto_offload import AutoOffloadService
from distributed_grid.server.services.boost_file_sync import BoostFileSync
from distributed_grid.server.services.boosts import BoostService
from distributed_grid.server.services.daemon import DaemonService, IdleTimer, is_unused
from distributed_grid.server.services.jobs import JobService, trim_content_forever
from distributed_grid.server.services.leases import LeaseService, RequestConverter
from distributed_grid.server.services.memory import MemoryService
from distributed_grid.server.services.nodes import NodeService
from distributed_grid.server.services.offloading import OffloadingService
from distributed_grid.server.services.pull_workers import PullWorkerService
from distributed_grid.server.services.reports import ReportService
from distributed_grid.server.services.tasks import TaskService
from distributed_grid.server.services.workers import ScalingService, WorkerService
from distributed_grid.server.workers.agent_packages import AgentPackages
from distributed_grid.server.workers.autoscaler import LOAD_ROW_BYTES, Autoscaler, ExpectedLoad
from distributed_grid.server.workers.output_collector import OutputCollector
from distributed_grid.server.workers.provider_calls import OfferCatalog
from distributed_grid.server.workers.provider_registry import CredentialMask, MaskedLog, ProviderRegistry
from distributed_grid.server.workers.worker_reconciler import WorkerJoinTokens, WorkerReconciler
from distributed_grid.state_dir import StateDir
from distributed_grid.supervision import end_process, end_process_on_failure, start_logged, start_restarted
from distributed_grid.trees.content_store import ContentStore, ContentStores

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
REMOVED_POLL_SECONDS = 2.0
PREDICTIVE = "predictive"
FIRST_ROUND_SECONDS = 5.0
"""Time of the first round of rebalancing: by then the nodes have reported."""
SERVICES = (
    *(DaemonService, NodeService, LeaseService, BoostService, JobService, ReportService, MemoryService),
    *(OffloadingService, AutoOffloadService, PullWorkerService, TaskService, WorkerService, ScalingService),
    *(ClusterCommandService, RayAttachment, PredictionService, Admission),
)
"""The services whose endpoints are the requests of a control plane."""
log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time in UTC, level, logger, message, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info or record.exc_text:
            fields["traceback"] = record.exc_text or self.formatException(record.exc_info)  # type: ignore[arg-type]
        return json.dumps(fields)


def apply_log_settings(settings: Logging, *filters: logging.Filter) -> None:
    """Log by these settings and filters from now on. Raises GridError if the file cannot be
    opened."""
    stream: IO[str] = sys.stderr
    if settings.file is not None:
        try:
            stream = open(os.path.expanduser(settings.file), "a", encoding="utf-8")  # noqa: SIM115 (open for good)
        except OSError as failure:
            raise GridError(f"the log {settings.file} cannot be opened: {failure.strerror}") from failure
    handler = logging.StreamHandler(stream)
    for one in (LogRateLimit(), *filters):
        handler.addFilter(one)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


def serve(state_dir: StateDir, instance_lock: InstanceLock, options: argparse.Namespace, startup: StartupReport) -> int:
    """Serve until stopped or idle, holding the lock; the exit code of the process."""
    configure_logging(logging.StreamHandler())
    end_process_on_failure(state_dir.failure_report)
    try:
        asyncio.run(Daemon(state_dir, instance_lock, options).run(startup))
    except GridError as failure:
        log.error("%s", failure)
        startup.send("failed", message=str(failure), bad_input=isinstance(failure, BadInput))
        return 1
    except Exception as failure:  # a bug: as loud as that of any part
        end_process("the daemon", failure)
    return 0


class Daemon:
    """Composes the control plane, serves the socket, and shuts down in order."""

    def __init__(self, state_dir: StateDir, instance_lock: InstanceLock, options: argparse.Namespace) -> None:
        self._state_dir = state_dir
        self._instance_lock = instance_lock
        keep_running = bool(options.stay) or SelectionNote.read(state_dir).stay
        self._idle_timer = IdleTimer(keep_running=keep_running, idle_seconds=float(options.idle_seconds))
        self._stopping = False  # then connections end because the daemon does, and their clients will reconnect
        self._machine = NOTHING
        self._connections: set[Connection] = set()
        store = SqliteStore(state_dir.database)
        self._clock = GridClock(load_anchor(state_dir), known_ms=last_stored_ms(store))
        self._ages = AgeClock(state_dir.host_dir / AGE_FILE)
        self._selected = select_config(options.config, bool(options.explicit), store, state_dir)
        self._config = config = self._selected.config
        apply_log_settings(config.logging, MaskedLog(CredentialMask.of_providers(config)))
        self._content = ContentStore(state_dir.host_dir / "content")
        self._checkpoints = ContentStore(state_dir.host_dir / "checkpoints", durable=True)
        self._contents = ContentStores(self._content, self._checkpoints)
        self._grid = Grid(store, self._clock, cutoff_ms=self._cutoff_ms)
        self._registry = ConfigRegistry(
            config, state_dir.jobs, is_worker=lambda name: name in self._grid.ledger.workers
        )
        self._agents = AgentGateway(self._grid, self._registry, content=ContentSender(self._contents))
        self._agent_sockets = AgentSockets(state_dir.host_dir / "links", self._agents)
        self._ray = RayEngine(on_connected=self._on_ray_connected, on_link=self._on_ray_link_changed)
        self._reconciler = EngineReconciler(self._grid, self._ray, hold_seconds=config.hold_seconds)
        self._monitor = Monitor(
            config.alerts,
            read=self._grid.read,
            store=store,
            offset_ms=self._clock.wall_offset_ms,
            on_alert=self._record_alert,
            minutes=MinuteStore(state_dir.host_dir / "history.db", row_bytes=MINUTE.itemsize),
            write_seconds=config.resource_sharing.monitoring_interval_seconds,
            retention_ms=round(1000 * config.scaling.history_retention_seconds),
            cutoff_ms=self._cutoff_ms,
        )
        self._files = AttemptFiles(
            state_dir.jobs, self._agents.files, self._is_local, partial(stored_manifest, self._content)
        )
        self._guard = PurgeGuard(self._grid, self._files, self._agents.files, state_dir.jobs)
        self._cluster = ClusterService(
            self._grid, config, state_dir, engine=self._ray, reconciler=self._reconciler, guard=self._guard
        )
        grid_id = self._cluster.grid_id
        self._attachment = RayAttachment(
            self._grid,
            config,
            state_dir,
            engine=self._ray,
            reconciler=self._reconciler,
            nodes=AttachedNodeSync(self._grid, config, engine=self._ray, sockets=self._agent_sockets, grid_id=grid_id),
            grid_id=grid_id,
            guard=self._guard,
        )
        self._boost_file = BoostFileSync(
            self._grid,
            ResourceBoostPersistence(state_dir=state_dir.root),
            offset_ms=self._clock.wall_offset_ms,
        )
        self._prediction = PredictionService(
            TaskHistory(state_dir.host_dir / "predictions.db"),
            tier_settings(config),
            update_interval_seconds=config.prediction.update_interval_seconds,
            now_ms=self._clock.now_ms,
            cutoff_ms=self._cutoff_ms,
            viewer=self._viewer,
        )
        self._compose_services()

    def _compose_services(self) -> None:
        """Make the services, their performers, and the dispatchers of socket and REST."""
        grid, config, viewer = self._grid, self._config, self._viewer
        sharing_enabled = config.resource_sharing.enabled
        custom = frozenset(config.custom_resources) | {name for node in config.nodes for name in node.custom}
        converter = RequestConverter(grid, sharing_enabled=sharing_enabled, custom_resources=custom)
        files = self._files
        renderer = AnswerRenderer(grid.slices)
        nodes = NodeService(grid, viewer, renderer)
        leases = LeaseService(grid, viewer, converter, is_stopping=lambda: self._stopping)
        self._sizer = JobSizer(self._prediction)
        jobs = JobService(grid, viewer, converter=converter, files=files, renderer=renderer, sizer=self._sizer)
        reports = ReportService(grid, viewer, self._monitor, renderer, self._agents.is_connected)
        boosts = BoostService(
            grid,
            viewer,
            leases,
            self._boost_file,
            sharing_enabled=sharing_enabled,
            ray_environment=self._ray_environment,
            is_stopping=lambda: self._stopping,
        )
        pull_workers = self._pull_workers = PullWorkerService(
            grid, viewer, hold_seconds=config.hold_seconds, detect=lambda: HardwareDetector().capacity()
        )
        memory = MemoryService(grid, viewer, sharing_enabled=sharing_enabled, is_stopping=lambda: self._stopping)
        offloading = self._offloading = OffloadingService(
            grid,
            viewer,
            self._agents.questions,
            self._monitor,
            rules=rebalance_rules(config),
            is_connected=self._agents.is_connected,
        )
        self._auto_offload = AutoOffloader(
            grid, self._monitor, rebalance_rules(config), offload_rules(config), alert=self._send_and_record
        )
        auto_offload = AutoOffloadService(grid, viewer, self._auto_offload)
        self._packages = AgentPackages(self._state_dir.root / "wheels")
        self._listener = RestListener(
            RestServices(lambda: table, jobs, self._packages),
            self._state_dir.host_dir,
            config.server,
            configured=[node.name for node in config.nodes],
            agents=self._agents,
            on_request=self._idle_timer.reset,
        )
        catalog = OfferCatalog(ProviderRegistry(config), grid, call_seconds=config.workers.call_seconds)
        tokens = WorkerJoinTokens(self._state_dir.host_dir, self._listener.admission)
        self._workers = WorkerReconciler(
            grid, catalog, tokens, rules=worker_rules(config), grid_id=self._cluster.grid_id, on_alarm=self._alarm
        )
        workers = WorkerService(grid, viewer, catalog, tokens, self._guard)
        predictive = config.resource_sharing.policy == PREDICTIVE
        load = MinuteStore(self._state_dir.host_dir / "load.db", row_bytes=LOAD_ROW_BYTES)
        self._autoscaler = Autoscaler(
            grid,
            catalog,
            scaling_rules(config),
            check_reachable=workers.check_reachable,
            expected=ExpectedLoad(grid, load, cutoff_ms=self._cutoff_ms) if predictive else None,
        )
        self._moves = MoveReconciler(grid, self._agents, self._content, ResultCollector(self._content, files))
        self._checkpoint_shipper = CheckpointShipper(grid, files, self._checkpoints)
        self._deliverer = FileDeliverer(grid, files, self._state_dir)
        self._outputs = OutputCollector(grid, self._state_dir.jobs, self._agents.files)
        grid.perform_with(
            {
                AttemptEffect: self._agents.sessions.perform,
                EngineEffect: self._reconciler.perform,
                MemoryEffect: self._agents.memory.perform,
                WorkerEffect: self._workers.perform,
                MoveEffect: self._moves.perform,
                ShipCheckpoint: self._checkpoint_shipper.perform,
                DeliverFiles: self._deliverer.perform,
                CollectOutputs: self._outputs.perform,
            }
        )
        daemon = DaemonService(
            self._state_dir,
            self._selected,
            grid=grid,
            idle_timer=self._idle_timer,
            listener=self._listener,
            ages=self._ages,
            apply_live=self._apply_config,
        )
        table = collect(
            daemon,
            nodes,
            leases,
            boosts,
            jobs,
            reports,
            memory,
            offloading,
            auto_offload,
            pull_workers,
            TaskService(grid, viewer, pull_workers, self._sizer),
            workers,
            ScalingService(grid, self._autoscaler),
            ClusterCommandService(grid, self._cluster, self._attachment, self._agents),
            self._attachment,
            self._prediction,
            self._listener.admission,
        )
        self._dispatcher = Dispatcher(table, owner=login_name(), on_request=self._idle_timer.reset)
        self._node_memory = NodeMemoryDispatcher(memory, login_name())

    async def run(self, startup: StartupReport) -> None:
        """Serve until the idle timer ends; then shut down in order."""
        save_anchor(self._state_dir, self._clock.anchor())
        save_selection(self._selected, self._state_dir, stay=self._idle_timer.keep_running)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._idle_timer.stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        probe, gpus = MachineProbe(), GpuProbe()
        agent: Agent | None = None
        try:
            await self._grid.start()
            self._agents.start(answer_program=self._node_memory.serve, on_move_report=self._moves.reported)
            self._reconciler.start(on_view=self._attachment.nodes.update)
            await self._monitor.start()
            await self._prediction.start()
            recorder = RunRecorder(self._grid, self._prediction)
            recorder.start()
            self._machine = HardwareDetector(probe, gpus).capacity()
            await declare_nodes(self._grid, self._config, self._machine)
            await self._boost_file.recover()
            local = await self._grid.read(local_nodes)
            simulated = simulated_nodes(self._config, local)
            records = {name: record_path(self._cluster.grid_id(), name) for name in simulated}
            meter = UsageMeter(probe, gpus, simulated=simulated, node_records=records)
            agent = self._make_agent(tuple(node.name for node in local), meter, first_node(local))
            self._agents.memory.attach_local(agent)
            await agent.start()
            self._agents.memory.catch_up("")
            await self._agent_sockets.open(node.name for node in self._config.nodes if not node.is_local)
            await self._cluster.start()
            self._attachment.start()
            await self._agents.settled()
            with contextlib.suppress(GridError):  # a full disk: the next tick tries it again
                await self._grid.handle(TimePassed())  # leases whose term has passed end before the first answer
            await self._listener.start(login_name())
            await self._workers.start()
            await self._autoscaler.start()
            listener = self._instance_lock.listen()
            accept = partial(Connection, self._dispatcher.serve, self._connections)
            server = await asyncio.get_running_loop().create_unix_server(accept, sock=listener, backlog=BACKLOG)
            gc.freeze()  # loaded modules stay: the collector need not visit them again and again
            log.info("serving, version %s, pid %d, config %s", __version__, os.getpid(), self._selected.path)
            simulated_count = sum(self._config.is_simulated(node) for node in self._config.nodes)
            startup.send("ready", config=self._selected.path, notes=self._selected.notes(), simulated=simulated_count)
            loops: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
                "the watch of the state directory": partial(
                    stop_when_removed, self._instance_lock, self._idle_timer.stop
                ),
                "trimming of contents": partial(
                    trim_content_forever, self._grid, self._content, may_delete=self._ages.may_delete
                ),
                "rebalancing": partial(
                    rebalance_forever, self._grid, self._monitor, lambda: rebalance_rules(self._config)
                ),
                "the file of boosts": self._boost_file.run,
                "scaling": self._autoscaler.run,
                "the files of workers that drain": self._outputs.run,
                "moves": self._moves.run,
                "the delivery of files": self._deliverer.run,
                "the checkpoints of jobs": self._checkpoint_shipper.run,
                "automatic offloading": self._auto_offload.run,
                "learning from runs": self._prediction.learn_forever,
                "training of the predictor": self._prediction.train_forever,
                "reassessment of workers": partial(
                    self._pull_workers.reassess_forever, self._config.scaling.worker_reassessment_interval_seconds
                ),
                "the anchor of the clock": partial(save_anchor_forever, self._state_dir, self._clock),
            }
            background = [start_restarted(loop, name) for name, loop in loops.items()]
            background.append(start_logged(recorder.catch_up(), "the last runs of jobs"))
            await self._idle_timer.wait(self._is_idle)
            for task in background:
                task.cancel()
            self._instance_lock.unlink_socket()
            server.close()
        finally:
            await self._shut_down(agent)

    async def _apply_config(self, config: ClusterConfig) -> list[str]:
        """Use a config that differs in live keys only; names of the nodes that keep their old limits."""
        self._config = config
        self._registry.set_config(config)
        self._monitor.set_alerts(config.alerts)
        self._auto_offload.set_rules(rebalance_rules(config), offload_rules(config))
        self._offloading.set_rules(rebalance_rules(config))
        await self._autoscaler.set_rules(scaling_rules(config))
        await self._workers.set_rules(worker_rules(config))
        kept = await declare_nodes(self._grid, config, self._machine)
        self._agents.sessions.send_owner_rules()
        return kept

    def _make_agent(self, local: tuple[str, ...], meter: UsageMeter, typed_on: str) -> Agent:
        """The agent for these nodes of this machine, connected to the control plane without a network."""
        top, addresses = self._state_dir.host_dir / "memory", partial(_addresses, self._config)
        folders = {"": top, **{name: top / f"node-{name}" for name in local}}
        return Agent(
            local,
            self._state_dir.jobs,
            meter,
            self._agents,
            workdirs=lambda send: StoredWorkDirs(self._contents),
            grid_locks=(self._state_dir.lock, *(folder / SERVER_LOCK for folder in folders.values())),
            typed_on=typed_on,
            ages=self._ages,
            memory=lambda host, send: LocalMemory(
                {
                    name: LentMemory(folder, name, meter, host, send, addresses=addresses, has_proxy=False)
                    for name, folder in folders.items()
                }
            ),
        )

    async def _shut_down(self, agent: Agent | None) -> None:
        self._stopping = True
        for connection in list(self._connections):
            connection.close()
        await self._workers.stop()
        await self._moves.stop()
        self._autoscaler.close()
        await self._listener.stop()
        await self._packages.close()
        await self._monitor.stop()
        await self._cluster.stop()
        await self._agent_sockets.close()
        if agent is not None:
            await agent.stop()
        await self._agents.stop()
        await self._reconciler.stop()
        await self._ray.stop()
        await self._boost_file.stop()
        await self._grid.stop()
        await self._prediction.stop()
        self._sizer.stop()
        self._grid.store.close()
        save_anchor(self._state_dir, self._clock.anchor())
        log.info("stopped")

    def _alarm(self, subject: str, reason: str) -> None:
        """Send an alert about a machine that cannot be terminated or an exceeded budget."""
        self._monitor.send_alert(
            Alert(
                node=subject,
                resource="budget",
                raised=True,
                value=1.0,
                mark=1.0,
                at_ms=self._grid.now_ms(),
                detail=reason,
            )
        )

    def _on_ray_connected(self) -> list[ChildCommand]:
        self._reconciler.compare_soon()
        return self._attachment.nodes.desired_state()

    def _on_ray_link_changed(self, link: AgentLinkChanged) -> None:
        self._attachment.nodes.link_changed(link)  # made after the engine

    async def _ray_environment(self, node: str) -> dict[str, str]:
        """Variables with which a Ray program on a node finds its cluster and the grid's namespace there."""
        is_attached = self._attachment.row is not None
        environ = self._attachment.environ() if is_attached else await self._cluster.ray.endpoints.environ(node)
        return {**environ, "RAY_NAMESPACE": "grid"}

    def _send_and_record(self, alert: Alert) -> None:
        """Send an alert that the monitor has not raised, and record it."""
        self._monitor.send_alert(alert)
        self._record_alert(alert)

    def _record_alert(self, alert: Alert) -> None:
        """Record an alert in the audit trail, without waiting for it."""
        event = AlertChanged(alert.node, alert.resource, alert.raised, alert.detail)
        start_logged(self._grid.handle_with_retry(event), "the record of an alert")

    def _is_local(self, name: str) -> bool:
        """True for a node of this machine, and for an unknown one: if it has files, they are here."""
        node = self._grid.ledger.nodes.get(name)
        return node is None or node.host in ("local", PULL_HOST)  # a pull worker has left no files

    async def _is_idle(self) -> bool:
        if self._listener.is_busy or any(connection.has_unanswered for connection in self._connections):
            return False
        return await self._grid.read(is_unused)

    def _cutoff_ms(self, keep_ms: int) -> int:
        """The grid's time before which rows are old enough to be deleted, if they are kept for `keep_ms`."""
        return self._ages.cutoff_ms(self._clock.now_ms(), keep_ms)

    def _viewer(self) -> Viewer:
        return Viewer(
            self._clock.wall_offset_ms(),
            self._config.resource_sharing.max_offers_per_node,
            earlier=[(step.until_ms, step.offset_ms) for step in self._clock.steps],
        )


async def stop_when_removed(lock: InstanceLock, stop: Callable[[], None]) -> None:
    """Stop the daemon when its state directory is removed: no client can reach it any more."""
    while not lock.is_removed:
        await asyncio.sleep(REMOVED_POLL_SECONDS)
    log.warning("the state directory was removed: stopping")
    stop()


async def rebalance_forever(
    grid: Grid,
    monitor: Monitor,
    current_rules: Callable[[], RebalanceRules | None],
    first_seconds: float = FIRST_ROUND_SECONDS,
) -> None:
    """Rebalance soon, and then at every interval, until cancelled; without rules do nothing."""
    rules = current_rules()
    pause = min(rules.interval_ms / 1000, first_seconds) if rules is not None else 0.0
    while rules is not None:
        await asyncio.sleep(pause)
        rules = current_rules() or rules
        pause = rules.interval_ms / 1000
        try:
            await rebalance_once(grid, monitor, rules)
        except Exception:  # the outermost loop: the next round may well succeed
            log.exception("the grid could not be balanced")


async def rebalance_once(grid: Grid, monitor: Monitor, rules: RebalanceRules) -> None:
    readings = await monitor.readings(rules.policy.ahead * rules.interval_ms)
    await grid.handle(PressureRead(readings, rules))


def local_nodes(ledger: Ledger, now: int) -> list[Node]:
    """Nodes of this machine, also those that left the config: their jobs still run."""
    return [node for node in ledger.nodes.values() if node.host == "local"]


def _addresses(config: ClusterConfig) -> list[str]:
    """Addresses of this machine on the routes to the others, and `local`."""
    far = [node.host or node.name for node in config.nodes if not node.is_local]
    return [*(found for name in far if (found := address_towards(name))), "local"]


def login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())
