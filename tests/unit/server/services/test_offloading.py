"""Requests about moves: permissions, consents, requests to agents, and advice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api import requests
from distributed_grid.api.answers.offloading import MoveRow
from distributed_grid.config.sections import Alerts
from distributed_grid.control.agent_files import AgentQuestions
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import ConsentGiven, Event, HeartbeatReceived
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MoveConsent
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.processes import ProcessInfo, StandardStream, StreamKind
from distributed_grid.domain.rebalancing import SHARING_POLICIES, RebalanceRules, SharingMode
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import BadInput, Conflict, NotFound, Refused, Unreachable
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.ports import Batch
from distributed_grid.reactor.decision import Answer
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.services.offloading import OffloadingService
from tests.unit.server.in_process_grid import Clock, InProcessGrid

GB = 1024**3
NULL, FILE = StandardStream(StreamKind.NULL), StandardStream(StreamKind.FILE, "/srv/ann/in")
WORK = ProcessInfo(
    pid=4242,
    pid_start=5,
    boot="boot",
    ppid=1,
    uid=1000,
    user="ann",
    name="python3",
    argv=("python3", "train.py", "--lr", "0.1"),
    cwd="/srv/ann",
    exe="/usr/bin/python3",
    age_ms=60_000,
    cpu_milli=900,
    pss_bytes=GB,
    streams=(NULL, NULL, NULL),
)
ANN = Caller("ann")
ADMIN = Caller("owner", admin=True)
RULES = RebalanceRules(mode=SharingMode.DYNAMIC_BALANCING, policy=SHARING_POLICIES["balanced"], interval_ms=30_000)


class Agents:
    """The agents of all nodes: their listings, their missing files, and their requests."""

    nodes = ("one", "two", "three")

    def __init__(self) -> None:
        self.questions = AgentQuestions(dict.fromkeys(self.nodes, self))
        self.missing_next: list[tuple[str, ...]] = []
        self.processes: list[ProcessInfo] = [WORK]
        self.next_processes: list[list[ProcessInfo]] = []
        self.missing: tuple[str, ...] = ()
        self.asked: list[Any] = []

    def send(self, message: wire.ToAgent) -> None:
        self.asked.append(message)
        if isinstance(message, wire.ListProcesses):
            self.processes = self.next_processes.pop(0) if self.next_processes else self.processes
            kept = [(name, f"value of {name}") for name in message.variables]
            listed = tuple(replace(one, environment=tuple(kept)) for one in self.processes)
            self.questions.received(wire.ProcessListing(message.stream, listed), self)
        elif isinstance(message, wire.CheckFiles):
            missing = self.missing_next.pop(0) if self.missing_next else self.missing
            self.questions.received(wire.FilesChecked(message.stream, missing), self)

    def close(self, why: str) -> None:
        raise AssertionError(why)


class Offloading(InProcessGrid):
    """Machines with four cores, and the service."""

    def __init__(self, grid: Grid | None = None) -> None:
        super().__init__()
        if grid is not None:
            self.grid = grid
            self.compose()
        self.agents = Agents()
        monitor = Monitor(Alerts(), read=self.grid.read, store=self.store, offset_ms=lambda: 0)
        self.service = OffloadingService(
            *(self.grid, self.get_viewer, self.agents.questions, monitor), rules=RULES, is_connected=lambda node: True
        )

    async def open_nodes(self, count: int) -> None:
        names = self.agents.nodes[:count]
        await self.open(*(Node(name=name, capacity=Capacity(4000, 8 * GB), host=name) for name in names))

    async def execute(self, caller: Caller = ANN, number: int = 1, **fields: Any) -> MoveRow:
        asked = {"move_id": f"move-{number:08}", "subject": "4242", "node": "one", **fields}
        return (await self.service.execute(requests.convert(asked, requests.ExecuteOffload), caller)).move


@pytest.fixture
def run() -> Callable[..., None]:
    def run_story(story: Callable[[Offloading], Awaitable[None]], nodes: int = 2) -> None:
        async def whole() -> None:
            grid = Offloading()
            await grid.open_nodes(nodes)
            await grid.run(story)

        asyncio.run(whole())

    return run_story


class CountedGrid(Grid):
    """A grid that counts the waits of one task in the ledger's queue."""

    waits = 0
    counted: asyncio.Task[Any] | None = None

    async def read(self, question: Callable[[Ledger, int], Any]) -> Any:
        self._count()
        return await super().read(question)

    async def handle(self, event: Event) -> Answer:
        self._count()
        return await super().handle(event)

    def _count(self) -> None:
        self.waits += asyncio.current_task() is self.counted


class NotedStore(InMemoryStore):
    """A store that notes how many waits were counted at each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[int] = []
        self.grid: CountedGrid | None = None

    def commit(self, batch: Batch) -> None:
        if self.grid is not None:
            self.waits.append(self.grid.waits)
        super().commit(batch)


@pytest.mark.parametrize(
    "fields", [{"consent": True}, {"target": "two"}, {"subject": "work-of-ann"}, {"subject": "work-"}], ids=str
)
def test_a_move_reaches_its_first_commit_after_two_waits_in_the_queue_of_the_ledger(fields: dict[str, Any]) -> None:
    async def whole() -> None:
        store = NotedStore()
        setting = Offloading(CountedGrid(store, Clock()))
        await setting.open_nodes(2)
        await setting.run(lambda _: story(setting, store))

    async def story(setting: Offloading, store: NotedStore) -> None:
        assert isinstance(setting.grid, CountedGrid)
        await setting.submit("u1", job_id="work-of-ann", restartable=True, prefer=["one"])
        await setting.starts("u1")
        if not fields.get("consent"):
            await setting.execute(consent=True, number=9)
            setting.agents.processes = [replace(WORK, pid_start=6)]
        setting.grid.counted, setting.grid.waits = asyncio.current_task(), 0
        store.grid = setting.grid
        await setting.execute(**fields)
        assert 1 < store.waits[0] <= 3, "two reads, and the event that is committed"

    asyncio.run(whole())


def test_without_consent_it_is_refused_with_the_shape_what_is_repeated_and_what_to_type(run) -> None:
    async def story(grid: Offloading) -> None:
        with pytest.raises(Refused) as refused:
            await grid.execute()
        text = str(refused.value)
        assert "`python train.py --lr`" in text
        assert "0.1" not in text
        assert "a restart repeats side effects" in text
        assert "grid offload execute 4242 -n one --consent [--env NAME]" in text
        assert (await grid.service.list(requests.ListMoves(), ADMIN)).moves == []

    run(story)


def test_a_consent_is_remembered_with_its_variables_until_it_is_withdrawn(run) -> None:
    async def story(grid: Offloading) -> None:
        first = await grid.execute(consent=True, variables=["SEED"])
        assert (first.source_node, first.target_node, first.state) == ("one", "two", "reserved")
        assert first.waits_for == "the files of one"
        command = await grid.grid.read(lambda ledger, now: ledger.moves["move-00000001"].command)
        assert (command.env, command.given) == ((("SEED", "value of SEED"),), ("SEED",))
        (consent,) = (await grid.service.consents(requests.ListConsents(), ADMIN)).consents
        assert (consent.user, consent.variables) == ("ann", ["SEED"])
        grid.agents.processes = [replace(WORK, pid_start=6)]
        second = await grid.execute(number=2)
        assert second.state == "reserved"
        assert grid.agents.asked[-1].variables == ("SEED",)
        await grid.service.withdraw(requests.WithdrawConsent(consent.shape), ANN)
        with pytest.raises(NotFound):
            await grid.service.withdraw(requests.WithdrawConsent(consent.shape), ANN)
        grid.agents.processes = [replace(WORK, pid_start=7)]
        with pytest.raises(Refused, match="--consent"):
            await grid.execute(number=3)

    run(story)


def test_a_consent_covers_neither_another_directory_nor_other_variables(run) -> None:
    async def story(grid: Offloading) -> None:
        await grid.execute(consent=True, variables=["SEED"])
        (consent,) = (await grid.service.consents(requests.ListConsents(), ADMIN)).consents
        assert consent.directory == "/srv/ann"
        elsewhere = replace(WORK, pid_start=6, cwd="/srv/bob")
        grid.agents.processes = [elsewhere]
        with pytest.raises(Refused, match=r"your consent is for /srv/ann only.*--consent"):
            await grid.execute(number=2)
        await grid.execute(number=3, consent=True)
        grid.agents.processes = [replace(WORK, pid_start=7)]
        with pytest.raises(Refused, match="your consent is for the variables SEED only"):
            await grid.execute(number=4, variables=["SEED", "TOKEN"])
        await grid.execute(number=5, variables=["SEED"])
        assert len((await grid.service.consents(requests.ListConsents(), ADMIN)).consents) == 2
        await grid.service.withdraw(requests.WithdrawConsent(consent.shape), ANN)
        assert (await grid.service.consents(requests.ListConsents(), ADMIN)).consents == []

    run(story)


def test_a_consent_of_an_earlier_version_is_listed_withdrawn_and_covers_nothing(run) -> None:
    async def story(grid: Offloading) -> None:
        await grid.grid.handle(
            ConsentGiven(MoveConsent(user="ann", shape="python train.py --lr", given_at_ms=0, variables=("SEED",)))
        )
        with pytest.raises(Refused, match=r"given to an earlier version, without its directory.*--consent"):
            await grid.execute()
        (consent,) = (await grid.service.consents(requests.ListConsents(), ADMIN)).consents
        assert consent.directory is None
        await grid.service.withdraw(requests.WithdrawConsent(consent.shape), ANN)
        assert (await grid.service.consents(requests.ListConsents(), ADMIN)).consents == []

    run(story)


def test_a_process_that_runs_another_command_when_its_variables_are_read_is_not_moved(run) -> None:
    async def story(grid: Offloading) -> None:
        await grid.execute(consent=True, variables=["SEED"])
        first = replace(WORK, pid_start=6)
        grid.agents.next_processes = [[first], [replace(first, argv=("python3", "other.py"))]]
        with pytest.raises(Conflict, match=r"its command line is `python3 other.py`"):
            await grid.execute(number=2)
        assert len((await grid.service.list(requests.ListMoves(), ADMIN)).moves) == 1

    run(story)


@pytest.mark.parametrize(
    ("seen", "name"), [({"shape": "python other.py"}, "shape"), ({"directory": "/x"}, "directory")]
)
def test_a_consent_for_what_a_scan_has_shown_is_none_for_what_runs_by_now(run, seen, name) -> None:
    async def story(grid: Offloading) -> None:
        with pytest.raises(Conflict, match=f"has changed since the scan: its {name}"):
            await grid.execute(consent=True, **seen)
        assert (await grid.service.consents(requests.ListConsents(), ADMIN)).consents == []
        await grid.execute(consent=True, shape="python train.py --lr", directory="/srv/ann")

    run(story)


def test_only_its_owner_or_an_admin_moves_a_process_and_cancels_the_move(run) -> None:
    async def story(grid: Offloading) -> None:
        with pytest.raises(Forbidden, match="belongs to ann"):
            await grid.execute(Caller("bob"), consent=True)
        await grid.execute(Caller("root", admin=True), consent=True)
        with pytest.raises(Forbidden):
            await grid.service.cancel(requests.CancelMove("move-00000001"), Caller("bob"))
        with pytest.raises(Forbidden):
            await grid.execute(Caller("bob"), consent=True)  # the same id again
        cancelled = (await grid.service.cancel(requests.CancelMove("move-00000001"), ANN)).move
        assert (cancelled.state, cancelled.end) == ("ended", "cancelled")
        again = (await grid.service.cancel(requests.CancelMove("move-0000"), ANN)).move
        assert again.end == "cancelled"
        listed = (await grid.service.list(requests.ListMoves(all=True), ADMIN)).moves
        assert [one.move_id for one in listed] == ["move-00000001"]

    run(story)


def test_a_process_whose_children_come_and_go_is_looked_at_again(run) -> None:
    async def story(grid: Offloading) -> None:
        looks: list[ProcessInfo] = [replace(WORK, unreadable="1 of its processes ended"), WORK]
        answer = grid.agents.send

        def send(message: wire.ToAgent) -> None:
            if isinstance(message, wire.ListProcesses):
                grid.agents.processes = [looks.pop(0) if len(looks) > 1 else looks[0]]
            answer(message)

        grid.agents.send = send  # type: ignore[method-assign]
        assert (await grid.execute(consent=True)).state == "reserved"
        looks[:] = [replace(WORK, unreadable="it cannot be read", pid_start=6)]
        with pytest.raises(Refused, match="cannot be read"):
            await grid.execute(consent=True, number=2)

    run(story)


def test_a_repeated_request_moves_once_and_asks_no_agent(run) -> None:
    async def story(grid: Offloading) -> None:
        first = await grid.execute(consent=True)
        asked = len(grid.agents.asked)
        assert await grid.execute(consent=True) == first
        assert len(grid.agents.asked) == asked

    run(story)


def test_what_cannot_be_moved_is_refused_with_every_cause(run) -> None:
    async def story(grid: Offloading) -> None:
        grid.agents.processes = [replace(WORK, listening=("0.0.0.0:80",), locks=("/var/lock/x",))]
        with pytest.raises(Refused, match=r"cannot be moved: .*80.*/var/lock/x"):
            await grid.execute(consent=True)
        grid.agents.processes = [replace(WORK, streams=(replace(FILE, path="/srv/other/in"), NULL, NULL))]
        with pytest.raises(Refused, match="/srv/other/in"):
            await grid.execute(consent=True)
        grid.agents.processes = []
        with pytest.raises(NotFound, match="no process 4242"):
            await grid.execute(consent=True)
        assert (await grid.service.consents(requests.ListConsents(), ADMIN)).consents == []

    run(story)


def test_files_that_the_target_lacks_are_an_obstacle_and_so_is_a_target_that_does_not_answer(run) -> None:
    async def story(grid: Offloading) -> None:
        grid.agents.processes = [replace(WORK, needs=(("/data/set", 100),))]
        grid.agents.missing = ("/data/set",)
        with pytest.raises(Refused, match="/data/set"):
            await grid.execute(consent=True)
        grid.agents.missing = ()
        assert (await grid.execute(consent=True)).state == "reserved"

    run(story)


def test_where_one_target_lacks_a_file_the_next_one_is_asked_for_it(run) -> None:
    async def story(grid: Offloading) -> None:
        grid.agents.processes = [replace(WORK, needs=(("/data/set", 100),))]
        grid.agents.missing_next = [("/data/set",)]
        assert (await grid.execute(consent=True)).target_node in ("two", "three")
        assert [type(one) for one in grid.agents.asked].count(wire.CheckFiles) == 2

    run(story, 3)


def test_names_that_mean_nothing_are_refused(run) -> None:
    async def story(grid: Offloading) -> None:
        cases: tuple[tuple[dict[str, Any], type[Exception]], ...] = (
            ({"subject": "nothing"}, NotFound),
            ({"subject": "1"}, BadInput),
            ({"node": "nowhere"}, NotFound),
            ({"target": "nowhere"}, NotFound),
            ({"target": "one"}, Refused),
            ({"move_id": "x"}, BadInput),
            ({"move_id": "move-a.b.c"}, BadInput),
        )
        for fields, failure in cases:
            with pytest.raises(failure):
                await grid.execute(consent=True, **fields)
        del grid.agents
        with pytest.raises(NotFound):
            await grid.service.get(requests.GetMove("move-9999"), ADMIN)

    run(story)


def test_a_scan_of_a_node_that_does_not_answer_says_so_and_tells_of_its_jobs(run) -> None:
    async def story(grid: Offloading) -> None:
        await grid.submit("r1", prefer=["one"])
        grid.agents.questions.gone(grid.agents)
        grid.agents.send = lambda message: grid.agents.questions.gone(grid.agents)  # type: ignore[method-assign]
        found = await grid.service.scan(requests.ScanOffload("one"), ADMIN)
        assert [one.job_id for one in found.proposals] == ["job-r1"]
        assert "the processes of one are not known" in found.problems[0]
        with pytest.raises(Unreachable):
            await grid.execute(consent=True)

    run(story)


def test_a_command_starts_elsewhere_only_if_its_node_is_pressed_and_another_is_not(run) -> None:
    async def story(grid: Offloading) -> None:
        op = requests.AdviseCommand(("make",), "one")
        assert (await grid.service.advise(op, ANN)).reason == "one is not pressed"
        await grid.grid.handle(HeartbeatReceived(name="one", usage=Usage(cpu_busy_milli=990)))
        found = await grid.service.advise(op, ANN)
        assert (found.elsewhere, found.target_node) == (True, "two")
        await grid.grid.handle(HeartbeatReceived(name="two", usage=Usage(cpu_busy_milli=990)))
        found = await grid.service.advise(op, ANN)
        assert (found.elsewhere, found.target_node) == (False, None)
        assert (await grid.service.advise(requests.AdviseCommand(("make",)), ANN)).elsewhere is False

    run(story)
