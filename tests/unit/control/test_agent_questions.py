"""Questions to agents: about processes and files, and what is not believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.control.agent_files import AgentQuestions
from distributed_grid.domain.processes import MAX_ARGV, ProcessInfo
from distributed_grid.errors import NotFound, ProtocolError, Unreachable

WORK = ProcessInfo(
    pid=70,
    pid_start=5,
    boot="boot",
    ppid=1,
    uid=1000,
    user="ann",
    name="python",
    argv=("python", "train.py"),
    cwd="/srv/ann",
)


class Answering:
    """An agent that answers each question as it likes."""

    nodes = ("gpu2",)

    def __init__(self, answers: Callable[[Any], Iterable[wire.ProcessListing | wire.FilesChecked]]) -> None:
        self.questions = AgentQuestions({"gpu2": self})
        self.asked: list[Any] = []
        self._answers = answers

    def send(self, message: wire.ToAgent) -> None:
        self.asked.append(message)
        for answer in self._answers(message):
            self.questions.received(answer, self)

    def close(self, why: str) -> None:
        raise AssertionError(why)


def listing(*pages: tuple[ProcessInfo, ...]) -> Callable[[Any], Iterable[wire.ProcessListing]]:
    def answers(message: Any) -> Iterable[wire.ProcessListing]:
        for number, page in enumerate(pages, 1):
            yield wire.ProcessListing(message.stream, page, more=number < len(pages))

    return answers


def test_a_listing_comes_in_pages() -> None:
    async def story() -> None:
        agent = Answering(listing((WORK,), (replace(WORK, pid=71),)))
        assert [one.pid for one in await agent.questions.processes("gpu2")] == [70, 71]
        assert agent.asked[0].node == "gpu2"

    asyncio.run(story())


def test_one_process_is_the_one_that_was_asked_for() -> None:
    async def story() -> None:
        agent = Answering(listing((WORK, replace(WORK, pid=71))))
        assert [one.pid for one in await agent.questions.processes("gpu2", 71)] == [71]
        assert await agent.questions.processes("gpu2", 72) == []

    asyncio.run(story())


@pytest.mark.parametrize(
    "lie",
    [
        {"argv": ("x",) * (MAX_ARGV + 1)},
        {"cwd": "x" * 10_000},
        {"pss_bytes": -1},
        {"pid": 2**40},
        {"locks": ("x",) * 100},
        {"needs": (("x", -1),)},
        {"environment": (("AWS_SECRET", "x"),)},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_a_process_that_cannot_be_is_not_believed(lie: dict[str, Any]) -> None:
    async def story() -> None:
        agent = Answering(listing((replace(WORK, **lie),)))
        with pytest.raises(ProtocolError):
            await agent.questions.processes("gpu2", variables=("PATH",))

    asyncio.run(story())


def test_problems_and_other_answers_are_raised() -> None:
    async def story() -> None:
        problem = Answering(lambda message: [wire.ProcessListing(message.stream, problem="/proc is hidden")])
        with pytest.raises(NotFound, match="/proc is hidden"):
            await problem.questions.processes("gpu2")
        other = Answering(lambda message: [wire.FilesChecked(message.stream)])
        with pytest.raises(ProtocolError):
            await other.questions.processes("gpu2")
        with pytest.raises(Unreachable, match="gpu9 is not connected"):
            await other.questions.processes("gpu9")

    asyncio.run(story())


def test_a_connection_that_ends_ends_the_question() -> None:
    async def story() -> None:
        agent = Answering(lambda message: [])
        asking = asyncio.create_task(agent.questions.processes("gpu2"))
        await asyncio.sleep(0)
        agent.questions.gone(agent)
        with pytest.raises(Unreachable, match="lost"):
            await asking

    asyncio.run(story())


def test_missing_files_are_asked_for_in_pages_and_no_other_is_believed() -> None:
    files = [(f"/data/{number}", 1) for number in range(250)]

    async def story() -> None:
        agent = Answering(lambda message: [wire.FilesChecked(message.stream, (message.files[0][0], "/etc/other"))])
        assert await agent.questions.missing_files("gpu2", files) == {"/data/0", "/data/100", "/data/200"}
        assert await agent.questions.missing_files("gpu2", []) == set()

    asyncio.run(story())
