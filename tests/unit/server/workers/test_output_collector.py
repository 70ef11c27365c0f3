"""Bringing home what jobs left on a worker: all of it, once, and openly what not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.agent.files.attempt_files import AttemptFileReader, remove_expired
from distributed_grid.agent.files.job_dir import is_home, make_root
from distributed_grid.api.answers.jobs import FetchedFile, FetchedTree
from distributed_grid.control.agent_files import AttemptFiles, RemoteFiles
from distributed_grid.domain.events import (
    HeartbeatReceived,
    NodeDeclared,
    ScalingRulesSet,
    WorkerAsked,
    WorkerBooted,
    WorkerDrainRequested,
    WorkerRequested,
)
from distributed_grid.domain.jobs import Attempt
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import ScalingRules, Worker, WorkerResources
from distributed_grid.errors import Unreachable
from distributed_grid.server.services.jobs import FileSink, send_files
from distributed_grid.server.services.records import find_job
from distributed_grid.server.workers.output_collector import CHUNK_BYTES, KEPT_LIMIT_TEXT, OutputCollector
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

WORKER = Worker(
    id="worker-1", provider="scripted", worker_type="cpu", resources=WorkerResources(4000, 16 << 30), created_at_ms=0
)


class WorkerAgent:
    """The agent of a worker: reads its files for the control plane, over a link that may break."""

    nodes = ("worker-1",)

    def __init__(self, root: Path) -> None:
        self.root = root
        make_root(str(root))
        self.files = RemoteFiles({"worker-1": self})
        self._reader = AttemptFileReader(root, lambda message: self.files.received(message, self))
        self.reads = 0
        self.breaks_after = 10**9

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: wire.ToAgent) -> None:
        assert isinstance(message, wire.ReadFile | wire.ReadCredit | wire.CloseStream | wire.ListFiles)
        self.reads += isinstance(message, wire.ReadFile)
        if self.reads > self.breaks_after:
            asyncio.get_running_loop().call_soon(self.files.gone, self)
            return
        asyncio.get_running_loop().call_soon(self._reader.received, message)

    def ran(self, lease_id: str, stdout: bytes = b"", **files: bytes) -> None:
        """Leftovers of an attempt."""
        work = self.root / lease_id / "work"
        work.mkdir(parents=True)
        (self.root / lease_id / "stdout").write_bytes(stdout)
        (self.root / lease_id / "stderr").write_bytes(b"")
        for name, content in files.items():
            (work / name).write_bytes(content)


class Home:
    """A control plane with a worker on which jobs have run."""

    def __init__(self, grid: InProcessGrid, agent: WorkerAgent, jobs: Path) -> None:
        self.grid = grid
        self.agent = agent
        self.jobs = jobs
        make_root(str(jobs))
        self.files = AttemptFiles(jobs, agent.files, lambda name: name != "worker-1")

    def collector(self, max_bytes: int = 1 << 30) -> OutputCollector:
        return OutputCollector(self.grid.grid, self.jobs, self.agent.files, max_bytes=max_bytes)

    async def job(self, request_id: str, **fields: Any) -> Attempt:
        """A job that ran on the worker and is over."""
        view = await self.grid.submit(request_id, resource_type="cpu", amount=1, **fields)
        uid = view.job.uid
        await self.grid.starts(uid)
        await self.grid.ends(uid)
        return (await find_job(self.grid.grid, uid)).attempts[-1]


Scenario = Callable[[Home], Awaitable[None]]


@pytest.fixture
def at_home(tmp_path: Path) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            grid = await InProcessGrid().open(a_node("worker-1"))
            home = Home(grid, WorkerAgent(tmp_path / "worker"), tmp_path / "jobs")
            await grid.run(lambda _: scenario(home))

        asyncio.run(whole())

    return run


def test_output_and_files_are_read_at_home_when_the_worker_is_gone(at_home: Callable[[Scenario], None]) -> None:
    async def scenario(home: Home) -> None:
        attempt = await home.job("r1", cwd="/home/ann")
        large = bytes(range(256)) * (CHUNK_BYTES // 128)
        home.agent.ran(attempt.lease_id, b"hello\n", model=b"weights", large=large)
        haul = await home.collector().collect(WORKER)
        assert (haul.files, haul.bytes, haul.lost) == (3, 6 + 7 + len(large), [])
        home.agent.breaks_after = 0
        assert await home.files.read(attempt, b"stdout", 0, 100) == (0, b"hello\n")
        got: dict[str, bytes] = {}
        names: list[str] = []

        async def header(about: FetchedTree | FetchedFile) -> None:
            if isinstance(about, FetchedFile):
                names.append(bytes.fromhex(about.file).decode())
                got[names[-1]] = b""

        async def data(part: bytes) -> None:
            got[names[-1]] += part

        job = await find_job(home.grid.grid, "r1")
        done = await send_files(home.files, job, ("**",), FileSink(header, data))
        assert (got, done.in_place) == ({"model": b"weights", "large": large}, False)

    at_home(scenario)


def test_an_interrupted_copy_goes_on_where_it_was(at_home: Callable[[Scenario], None]) -> None:
    async def scenario(home: Home) -> None:
        for number in range(6):
            attempt = await home.job(f"r{number}")
            home.agent.ran(attempt.lease_id, b"x" * 3 * CHUNK_BYTES, result=b"%d" % number)
        home.agent.breaks_after = 12
        with pytest.raises(Unreachable):
            await home.collector().collect(WORKER)
        before, home.agent.breaks_after = home.agent.reads, 10**9
        haul = await home.collector().collect(WORKER)
        assert not haul.lost
        again = home.agent.reads - before
        home.agent.reads = 0
        assert (await home.collector().collect(WORKER)).files == 0
        assert home.agent.reads == 0, "what is home is not asked for again"
        assert again < 6 * 6, "less than all of it came a second time"
        for number in range(6):
            (attempt,) = (await find_job(home.grid.grid, f"r{number}")).attempts
            assert (home.jobs / attempt.lease_id / "stdout").stat().st_size == 3 * CHUNK_BYTES
            assert (home.jobs / attempt.lease_id / "work" / "result").read_bytes() == b"%d" % number

    at_home(scenario)


def test_what_cannot_come_home_is_named(at_home: Callable[[Scenario], None]) -> None:
    async def scenario(home: Home) -> None:
        first, second = await home.job("r1"), await home.job("r2")
        home.agent.ran(first.lease_id, b"small", large=b"x" * 2 * CHUNK_BYTES)
        (home.agent.root / first.lease_id / "work" / "outside").symlink_to("/etc/passwd")
        haul = await home.collector(max_bytes=CHUNK_BYTES + 100).collect(WORKER)
        assert len(haul.lost) == 2
        assert any("outside" in line for line in haul.lost)
        assert any(KEPT_LIMIT_TEXT in line for line in haul.lost)
        assert (home.jobs / first.lease_id / "stdout").read_bytes() == b"small"
        assert is_home(str(home.jobs), second.lease_id), "it has left nothing there"

    at_home(scenario)


def test_a_worker_that_answers_nothing_is_given_up_and_that_is_recorded(at_home: Callable[[Scenario], None]) -> None:
    async def scenario(home: Home) -> None:
        await home.job("r1")
        grid = home.grid.grid
        await grid.handle(ScalingRulesSet(ScalingRules(provider="scripted")))
        for event in (
            WorkerRequested(replace(WORKER, id="worker-2"), 0),
            WorkerAsked("worker-2"),
            WorkerBooted("worker-2", "i-2"),
            NodeDeclared(a_node("worker-2")),
            HeartbeatReceived(name="worker-2", usage=Usage()),
        ):
            await grid.handle(event)
        view = await home.grid.submit("r2", resource_type="cpu", amount=4, prefer=["worker-2"])
        await home.grid.starts(view.job.uid)
        await home.grid.ends(view.job.uid)
        await grid.handle(WorkerDrainRequested("worker-2", "ann", "not needed"))

        def states() -> list[WorkerState]:
            return [worker.state for worker in grid.ledger.workers.values()]

        patient = OutputCollector(grid, home.jobs, home.agent.files)
        task = asyncio.create_task(patient.run())
        await asyncio.sleep(0.1)
        task.cancel()
        assert states() == [WorkerState.DRAINING], "it may still answer"
        task = asyncio.create_task(OutputCollector(grid, home.jobs, home.agent.files, give_up_seconds=0).run())
        while states() != [WorkerState.TERMINATING]:
            await asyncio.sleep(0.01)
        while not (kept := home.grid.store.events(types=("outputs-kept",), limit=10)):  # it is being committed
            await asyncio.sleep(0.01)
        task.cancel()
        assert [b"worker-2 is not connected" in event.blob for event in kept] == [True]

    at_home(scenario)


def test_what_came_home_is_removed_after_a_month_like_everything_else(at_home: Callable[[Scenario], None]) -> None:
    async def scenario(home: Home) -> None:
        attempt = await home.job("r1")
        home.agent.ran(attempt.lease_id, b"hello")
        await home.collector().collect(WORKER)
        day_ms = 86_400_000
        assert remove_expired(home.jobs, age_ms=day_ms) == 0
        assert remove_expired(home.jobs, age_ms=30 * day_ms) == 0
        assert remove_expired(home.jobs, age_ms=32 * day_ms) == 1
        assert not (home.jobs / attempt.lease_id).exists()

    at_home(scenario)


def test_a_file_whose_name_leads_elsewhere_is_not_written(at_home: Callable[[Scenario], None]) -> None:
    async def scenario(home: Home) -> None:
        attempt = await home.job("r1")
        home.agent.ran(attempt.lease_id, b"hello", result=b"1")
        elsewhere = home.jobs.parent / "elsewhere"
        elsewhere.mkdir()
        (home.jobs / attempt.lease_id).mkdir()
        (home.jobs / attempt.lease_id / "work").symlink_to(elsewhere)
        with pytest.raises(Exception, match="link"):
            await home.collector().collect(WORKER)
        assert not list(elsewhere.iterdir())

    at_home(scenario)
