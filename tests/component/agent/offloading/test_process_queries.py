"""Questions about processes: long answers come in pages, and too many at once are refused."""

from __future__ import annotations

import asyncio
import os

from msgspec.structs import replace

from distributed_grid.agent.offloading.process_inventory import (
    MAX_ENVIRONMENT_CHARS,
    MAX_QUERIES,
    ProcessInventory,
    ProcessQueries,
    Surroundings,
    pages_of,
)
from distributed_grid.domain.processes import MAX_ARGV, MAX_PATHS
from distributed_grid.wire import (
    MAX_MESSAGE_BYTES,
    MAX_PROCESSES,
    CheckFiles,
    FilesChecked,
    ListProcesses,
    ProcessListing,
    decode_from_agent,
    encode,
)


def test_pages_hold_all_processes_in_their_order_and_fit_into_messages() -> None:
    (one,) = ProcessInventory().scan(pid=os.getpid())
    small = [replace(one, pid=number) for number in range(2 * MAX_PROCESSES + 1)]
    large = [replace(one, pid=number, argv=("x" * 8_000,) * 4) for number in range(300)]
    paths = ("\U0010ffff" * 4096,) * MAX_PATHS
    largest = replace(
        one,
        argv=("\U0010ffff" * 64,) * MAX_ARGV,
        **dict.fromkeys(("listening", "locks", "outside_writes", "shared_memory"), paths),
        needs=tuple((path, 1) for path in paths),
        environment=(("NAME", "\U0010ffff" * MAX_ENVIRONMENT_CHARS),),
    )
    for processes in ([], small, large, [largest] * 3):
        pages = list(pages_of(processes))
        assert [one for page in pages for one in page] == processes
        assert len(pages) >= 1
        assert all(len(page) <= MAX_PROCESSES for page in pages)
        for page in pages:
            raw = encode(ProcessListing(1, tuple(page)))
            assert len(raw) < MAX_MESSAGE_BYTES
            assert decode_from_agent(raw) == ProcessListing(1, tuple(page))


def test_a_question_that_hangs_delays_others_until_they_are_refused() -> None:
    answers: list[ProcessListing | FilesChecked] = []

    async def story() -> None:
        def surroundings() -> Surroundings:
            raise OSError("the table is broken")

        queries = ProcessQueries("gpu1", surroundings, answers.append)
        async with queries._one_at_a_time:  # as if a file system hung
            for number in range(MAX_QUERIES + 2):
                queries.received(CheckFiles(number, ()) if number % 2 else ListProcesses(number, "gpu1"))
            assert [(one.stream, "not answered yet" in one.problem) for one in answers] == [(8, True), (9, True)]
        while len(answers) < MAX_QUERIES + 2:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 30))
    listings = {one.stream: one.problem for one in answers if isinstance(one, ProcessListing)}
    assert "the table is broken" in listings[0]


def test_a_question_that_nobody_waits_for_any_more_ends_with_the_agent() -> None:
    answers: list[ProcessListing | FilesChecked] = []

    async def story() -> None:
        queries = ProcessQueries("gpu1", Surroundings, answers.append)
        async with queries._one_at_a_time:
            queries.received(CheckFiles(1, ()))
            await asyncio.sleep(0)
            queries.close()
            queries.close()
        await asyncio.sleep(0)

    asyncio.run(story())
    assert answers == []
