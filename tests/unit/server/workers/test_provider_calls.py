"""Calls to a provider: in threads, so many at once, with deadlines after which an answer is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid.errors import Refused, Unreachable
from distributed_grid.server.workers.provider_calls import ProviderCalls
from tests.support.scripted_provider import ScriptedProvider


def calls_of(tmp_path: Path, *, seconds: float, at_once: int = 8) -> ProviderCalls:
    provider = ScriptedProvider({"state_file": tmp_path / "cloud.json"})
    return ProviderCalls(provider, seconds=seconds, at_once=at_once)


def test_an_answer_and_an_error_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        calls = calls_of(tmp_path, seconds=10)
        assert await calls.call("add", lambda: 1 + 1) == 2

        def refuse() -> None:
            raise Refused("no")

        with pytest.raises(Refused, match="no"):
            await calls.call("refuse", refuse)
        with pytest.raises(Unreachable, match="ZeroDivisionError"):  # a bug: nobody knows what was done
            await calls.call("break", lambda: 1 // 0)

    asyncio.run(scenario())


def test_a_call_past_its_deadline_is_lost_and_settles_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        calls, may_end = calls_of(tmp_path, seconds=0.05), threading.Event()
        call = await calls.begin("wait", lambda: may_end.wait(20))
        with pytest.raises(Unreachable, match=r"scripted wait: no answer within 0.05 s"):
            await call.result()
        settled = asyncio.ensure_future(call.settled())
        await asyncio.sleep(0)
        assert not settled.done()
        may_end.set()
        await asyncio.wait_for(settled, 10)

    asyncio.run(scenario())


def test_no_more_calls_are_made_at_once_than_allowed(tmp_path: Path) -> None:
    async def scenario() -> None:
        calls, running, most, lock = calls_of(tmp_path, seconds=20, at_once=3), 0, 0, threading.Lock()
        full = threading.Barrier(3)

        def work() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            full.wait(20)
            with lock:
                running -= 1

        await asyncio.gather(*(calls.call("work", work) for _ in range(9)))
        assert most == 3

    asyncio.run(scenario())


def test_a_call_that_never_returns_does_not_keep_the_process(tmp_path: Path) -> None:
    async def scenario() -> Callable[[], bool]:
        calls, never = calls_of(tmp_path, seconds=0.01), threading.Event()
        call = await calls.begin("hang", never.wait)
        with pytest.raises(Unreachable):
            await call.result()
        return lambda: all(one.daemon for one in threading.enumerate() if one.name == "provider-hang")

    assert asyncio.run(scenario())()
