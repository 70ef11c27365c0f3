"""Guard of a purge: results that nobody has fetched are named and kept, and output is here before it is removed."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distributed_grid.agent.files.attempt_files import remove_expired
from distributed_grid.agent.files.result_listing import list_results
from distributed_grid.api.answers.cluster import UnfetchedResult
from distributed_grid.domain.deliveries import DeliveredFiles, FetchOrder
from distributed_grid.domain.events import FilesDelivered, FilesFetched, FilesUndeliverable
from distributed_grid.domain.jobs import Ending
from distributed_grid.server.purge_guard import PurgeGuard, PurgeRefused, StoppedNodeFiles
from distributed_grid.server.services.records import find_job
from distributed_grid.server.workers.output_collector import CHUNK_BYTES
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid
from tests.unit.server.workers.test_output_collector import Home, WorkerAgent

NODE = "worker-1"
Scenario = Callable[[Home], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def at_home(tmp_path: Path) -> Run:
    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            grid = await InProcessGrid().open(a_node(NODE))
            home = Home(grid, WorkerAgent(tmp_path / "node" / "jobs"), tmp_path / "jobs")
            await grid.run(lambda _: scenario(home))

        asyncio.run(whole())

    return run


def guard_of(home: Home, **bounds: int) -> PurgeGuard:
    return PurgeGuard(home.grid.grid, home.files, home.agent.files, home.jobs, **bounds)


async def refusal(
    home: Home, examined: set[str] | None = None, guard: PurgeGuard | None = None, **options: Any
) -> PurgeRefused:
    with pytest.raises(PurgeRefused) as refused:
        await (guard or guard_of(home)).check(NODE, set() if examined is None else examined, **options)
    return refused.value


async def fetch(home: Home, name: str, patterns: tuple[str, ...], files: int) -> None:
    job = await find_job(home.grid.grid, name)
    delivered = DeliveredFiles(directory="/home/ann", files=files, bytes=files)
    await home.grid.handle(
        FilesFetched(job=job.uid, job_id=job.id, user="ann", node=NODE, patterns=patterns, delivered=delivered)
    )


def test_results_that_were_never_fetched_are_named_the_newest_first(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        for number in range(12):
            attempt = await home.job(f"r{number}", job_id=f"train-{number}")
            home.agent.ran(attempt.lease_id, model=b"x" * 2048, log=b"y" * number)
            await home.grid.later(1)
        home.agent.ran((await home.job("r12", job_id="empty")).lease_id, b"only output")
        refused = await refusal(home)
        assert refused.results[0] == UnfetchedResult("train-11", 2, 2048 + 11)
        assert len(refused.results) == 12
        assert str(refused).startswith(
            "worker-1 has results that were never fetched: train-11 (2 files, 2.011 KB), train-10 (2 files, 2.01 KB), "
        )
        assert str(refused).endswith(
            "train-2 (2 files, 2.002 KB) and 2 more; fetch them with: grid jobs fetch JOB, "
            "or remove them with --discard-results"
        )
        assert msgspec.to_builtins(refused.results[0]) == {"job_id": "train-11", "files": 2, "bytes": 2059}

    at_home(scenario)


def test_fetched_results_may_go_but_a_pattern_without_a_match_has_fetched_nothing(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        attempt = await home.job("r1")
        home.agent.ran(attempt.lease_id, model=b"weights")
        await fetch(home, "r1", ("typo*",), 0)
        assert (await refusal(home)).results == (UnfetchedResult("job-r1", 1, 7),)
        await fetch(home, "r1", ("model",), 1)
        await guard_of(home).check(NODE, set())

    at_home(scenario)


def test_an_ordered_delivery_counts_when_it_is_done(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        order = {"fetch": ["**"], "fetch_to": "/home/ann"}
        first, second = await home.job("r1", **order), await home.job("r2", **order)
        for attempt in (first, second):
            home.agent.ran(attempt.lease_id, model=b"weights")
        assert home.grid.grid.ledger.deliveries["r1"].order == FetchOrder(("**",), "/home/ann")
        assert len((await refusal(home)).results) == 2, "they are still on their way"
        await home.grid.handle(FilesDelivered("r1", DeliveredFiles(directory="/home/ann", files=1, bytes=7)))
        await home.grid.handle(FilesUndeliverable("r2", "no room"))
        assert [result.job_id for result in (await refusal(home)).results] == ["job-r2"]

    at_home(scenario)


def test_caches_shipped_files_brought_files_and_jobs_that_go_on_are_no_results(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        attempt = await home.job("r1")
        home.agent.ran(attempt.lease_id)
        cache = home.agent.root / attempt.lease_id / "work" / "__pycache__"
        cache.mkdir()
        (cache / "x.pyc").write_bytes(b"x")
        brought = await home.job("r2")
        home.agent.ran(brought.lease_id, model=b"weights")
        (home.jobs / ".control" / brought.lease_id).mkdir()
        (home.jobs / ".control" / brought.lease_id / "home").write_bytes(b"{}")
        gone = await home.job("r3")
        assert not (home.agent.root / gone.lease_id).exists()
        view = await home.grid.submit("r4", resource_type="cpu", amount=1, restartable=True)
        await home.grid.starts(view.job.uid)
        await home.grid.ends(view.job.uid, Ending.RECLAIMED)
        (ended, *_) = (await find_job(home.grid.grid, "r4")).attempts
        home.agent.ran(ended.lease_id, b"so far\n", partial=b"1")
        await guard_of(home).check(NODE, set())
        assert await home.files.read(ended, b"stdout", 0, 100) == (0, b"so far\n")

    at_home(scenario)


def test_output_is_read_here_after_the_purge_and_expires_like_that_of_every_job(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        attempt = await home.job("r1")
        long = b"x" * (CHUNK_BYTES + 5)
        home.agent.ran(attempt.lease_id, long)
        await guard_of(home).check(NODE, set())
        reads = home.agent.reads
        await guard_of(home).check(NODE, set())
        assert home.agent.reads == reads, "what is here is not copied again"
        assert await home.files.read(attempt, b"stdout", 0, 2 * CHUNK_BYTES) == (0, long)
        assert await home.files.read(attempt, b"stderr", 0, 100) == (0, b"")
        assert home.agent.reads == reads
        assert not home.files.was_brought_home(attempt), "its files are not here"
        assert [remove_expired(home.jobs, age_ms=days * 86_400_000) for days in (1, 30, 32)] == [0, 0, 1]

    at_home(scenario)


def test_output_that_cannot_be_kept_is_a_reason_to_refuse_unless_it_is_discarded(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        guard = guard_of(home, max_output_bytes=CHUNK_BYTES)
        attempt = await home.job("r1")
        home.agent.ran(attempt.lease_id, b"x" * 2 * CHUNK_BYTES)
        refused = await refusal(home, guard=guard)
        assert str(refused) == (
            f"the output of jobs on worker-1 cannot be kept: {attempt.lease_id}: stdout: it is larger than 1 MB with "
            "that of the others; remove it with --discard-results"
        )
        steps: list[str] = []
        await guard.check(NODE, set(), discard=True, say=steps.append)
        assert steps[-1].startswith("output is lost: ")

    at_home(scenario)


def test_a_later_check_looks_only_at_what_has_ended_since(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        clean = await home.job("r1")
        home.agent.ran(clean.lease_id)
        examined: set[str] = set()
        await guard_of(home).check(NODE, examined)
        assert examined == {clean.lease_id}
        (home.agent.root / clean.lease_id / "work" / "unseen").write_bytes(b"1")
        late = await home.job("r2")
        home.agent.ran(late.lease_id, model=b"weights")
        assert [result.job_id for result in (await refusal(home, examined)).results] == ["job-r2"]

    at_home(scenario)


def test_jobs_beyond_those_that_are_looked_at_are_never_removed_silently(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        guard = guard_of(home, max_jobs=2)
        for number in range(3):
            home.agent.ran((await home.job(f"r{number}")).lease_id)
        assert "more than 2 jobs have ended on worker-1" in str(await refusal(home, guard=guard))
        await guard.check(NODE, set(), discard=True)

    at_home(scenario)


def stopped_node(home: Home) -> StoppedNodeFiles:
    """The node's files as its script answers for them."""

    async def ask(operation: str, data: dict[str, Any]) -> dict[str, Any]:
        if operation == "list-results":
            return {"results": list_results(home.agent.root.parent, data["attempts"])}
        contents = [(home.agent.root / attempt / name).read_bytes()[offset:] for attempt, name, offset in data["files"]]
        parts = [
            (*file[:2], b64encode(content).decode()) for file, content in zip(data["files"], contents, strict=True)
        ]
        return {"parts": parts, "more": False}

    return StoppedNodeFiles(ask)


def test_a_node_without_an_agent_is_looked_at_by_its_script(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        attempts = [await home.job(f"r{number}") for number in range(3)]
        for number, attempt in enumerate(attempts):
            home.agent.ran(attempt.lease_id, b"out %d" % number, **({"model": b"weights"} if number == 1 else {}))
        home.agent.breaks_after = -1
        stopped = stopped_node(home)
        assert (await refusal(home, stopped=stopped)).results == (UnfetchedResult("job-r1", 1, 7),)
        await guard_of(home).check(NODE, set(), discard=True, stopped=stopped)
        for number, attempt in enumerate(attempts):
            assert await home.files.read(attempt, b"stdout", 0, 100) == (0, b"out %d" % number)

    at_home(scenario)


def test_a_node_that_nobody_can_look_at_is_not_purged_unless_insisted(at_home: Run) -> None:
    async def scenario(home: Home) -> None:
        home.agent.ran((await home.job("r1")).lease_id, model=b"weights")
        home.agent.breaks_after = -1
        refused = await refusal(home)
        assert str(refused) == (
            "worker-1 cannot be asked for the results of 1 job that were not fetched, the last is job-r1: "
            "the connection to worker-1 was lost; remove them with --discard-results"
        )
        assert refused.results == ()
        await guard_of(home).check(NODE, set(), discard=True)

    at_home(scenario)
