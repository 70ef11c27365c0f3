"""Long answers: shared, sliced, cut, and no more of them in memory than there is room for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distributed_grid.api.framing import MAX_FRAME_BYTES
from distributed_grid.control.grid import SLICE_SECONDS, LoopSlices
from distributed_grid.errors import Refused
from distributed_grid.server.answers import MAX_ANSWER_BYTES, MAX_HELD_BYTES, MAX_SENDERS, AnswerRenderer, EncodedAnswer
from distributed_grid.server.pages import select_page

Story = Callable[[AnswerRenderer], Awaitable[None]]


def run(story: Story) -> None:
    async def within_limits() -> None:
        await asyncio.wait_for(story(AnswerRenderer(LoopSlices())), 30)

    asyncio.run(within_limits())


async def render(renderer: AnswerRenderer, rows: list[Any], view: Callable[[Any], Any] = lambda row: row) -> Any:
    async with renderer.answer(max_rows=len(rows)) as writer:
        written = await writer.rows("rows", rows, view)
        writer.field("omitted", len(rows) - written)
        return writer.finish()


async def passes(count: int = 100) -> None:
    """So many passes of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_equal_questions_that_wait_at_the_same_time_share_one_rendering() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        answers = await asyncio.gather(
            *(renderer.shared("status", lambda: render(renderer, [{"a": 1}])) for _ in range(60)),
            *(renderer.shared("jobs", lambda: render(renderer, [])) for _ in range(60)),
        )
        assert renderer.renderings == 2
        assert {id(answer) for answer in answers[:60]} == {id(answers[0])}
        assert answers[0].decode() == {"rows": [{"a": 1}], "omitted": 0}
        assert answers[60].decode() == {"rows": [], "omitted": 0}

    run(story)


def test_a_question_that_comes_after_the_snapshot_gets_a_newer_one() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        ledger, may_finish = ["old"], asyncio.Event()

        async def snapshot() -> EncodedAnswer:
            rows = list(ledger)
            await may_finish.wait()
            return await render(renderer, rows)

        first = asyncio.create_task(renderer.shared("status", snapshot))
        await passes()
        ledger.append("new")
        later = [asyncio.create_task(renderer.shared("status", snapshot)) for _ in range(5)]
        await passes()
        may_finish.set()
        assert (await first).decode()["rows"] == ["old"]
        assert [answer.decode()["rows"] for answer in await asyncio.gather(*later)] == [["old", "new"]] * 5
        assert renderer.renderings == 2

    run(story)


def test_all_who_asked_hear_why_a_rendering_failed_and_the_next_one_is_tried_anew() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        async def fail() -> EncodedAnswer:
            raise Refused("no")

        asked = [renderer.shared("status", fail) for _ in range(3)]
        assert [str(failure) for failure in await asyncio.gather(*asked, return_exceptions=True)] == ["no"] * 3
        assert (await renderer.shared("status", lambda: render(renderer, []))).decode()["rows"] == []

    run(story)


def test_a_rendering_that_nobody_waits_for_any_more_ends() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        ended = asyncio.Event()

        async def endless() -> EncodedAnswer:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        readers = [asyncio.create_task(renderer.shared("status", endless)) for _ in range(2)]
        await passes()
        readers[0].cancel()
        await passes()
        assert not ended.is_set()
        readers[1].cancel()
        await ended.wait()
        assert (await renderer.shared("status", lambda: render(renderer, []))).decode()["rows"] == []

    run(story)


def test_others_have_their_turn_between_two_slices_and_each_pass_has_one_slice() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        turns: list[str] = []

        def view(row: str) -> str:
            """It takes a whole slice for itself."""
            asyncio.get_running_loop().call_soon(turns.append, "other")
            until = time.monotonic() + 2 * SLICE_SECONDS
            while time.monotonic() < until:
                pass
            turns.append(row)
            return row

        await asyncio.gather(render(renderer, ["a"] * 3, view), render(renderer, ["b"] * 3, view))
        await passes()
        assert turns == ["a", "other", "b", "other"] * 3

    run(story)


def test_an_answer_is_cut_before_it_exceeds_a_frame_and_counts_the_rows_it_leaves_out() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        answer = await render(renderer, ["x" * 2**20] * 100)
        assert MAX_ANSWER_BYTES <= answer.size < MAX_FRAME_BYTES
        decoded = answer.decode()
        assert len(decoded["rows"]) + decoded["omitted"] == 100
        assert decoded["omitted"] > 80
        assert (await render(renderer, ["x"] * 20_000)).decode()["omitted"] == 10_000

    run(story)


def test_the_next_page_begins_with_the_first_row_that_did_not_fit_in_either_order() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        names = [f"{number:03}" for number in range(100)]
        for last_first in (False, True):
            shown: list[str] = []
            cursor = ""
            while True:
                async with renderer.answer(max_rows=80) as writer:
                    page = await select_page(
                        renderer.slices, names, lambda name: (0, name), name="rows", cursor=cursor, limit=80
                    )
                    answer = await writer.page("rows", page, lambda name: name + "x" * 2**20, last_first=last_first)
                assert answer.size < MAX_FRAME_BYTES
                decoded = answer.decode()
                rows = [row[:3] for row in decoded["rows"]]
                assert rows == sorted(rows, reverse=last_first)
                assert len(rows) + decoded["omitted"] == min(80, 100 - len(shown))
                shown += reversed(rows) if last_first else rows
                assert decoded["more"] == (len(shown) < 100)
                if (cursor := decoded["next"]) is None:
                    break
            assert shown == names

    run(story)


def test_nothing_is_rendered_while_unread_answers_take_all_room() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        unread = []
        while renderer.held_bytes < MAX_HELD_BYTES:
            unread.append(await render(renderer, ["x" * 2**20] * 100))
        assert renderer.held_bytes < 2 * MAX_HELD_BYTES
        waiting = asyncio.create_task(renderer.shared("status", lambda: render(renderer, ["row"])))
        await passes()
        assert not waiting.done()
        unread.pop()
        assert (await waiting).decode()["rows"] == ["row"]
        unread.clear()
        del waiting
        await passes()
        assert renderer.held_bytes == 0

    run(story)


def test_readers_of_one_answer_send_a_few_parts_in_each_pass() -> None:
    async def story(renderer: AnswerRenderer) -> None:
        answer = await render(renderer, ["x" * 2**16] * 20)
        sent = 0

        async def send() -> None:
            nonlocal sent
            async for _ in answer.paced_parts():
                sent += 1

        sending = asyncio.gather(*(send() for _ in range(1000)))
        await passes(10)
        assert 0 < sent <= 10 * MAX_SENDERS
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    run(story)
